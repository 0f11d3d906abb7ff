"""Start of ranks: a model that is divided over processes, each of which opens its part.

Owns what a rank other than 0 runs, and which options ranks do not have. Processes are in
forge.ranks, steps in forge.models.hf.parallel.

    rank 0        open_engine ─► load_model ─► Engine ─► LeaderModel ──── ring ────┐
    other ranks   follow_checkpoint: open_checkpoint_model ─► report_ready ─► steps ◄┘

With check_ranks the ring has the lines of a recording too, between the steps they belong to. Each
rank replays them in a scheduler of its own, and ends where a plan is not rank 0's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forge.config import DeviceOptions
from forge.errors import InvalidConfig, RankMismatch
from forge.models.embedded import is_embedded
from forge.models.loader import LoadOptions, open_checkpoint_model
from forge.policy import Policy
from forge.ranks.rank_context import FollowerContext
from forge.ranks.rank_group import RankGroup
from forge.ranks.torchrun import SiblingRanks, TorchrunRank, follow_sibling
from forge.replay_run import ReplayRun
from forge.start_log import StartLog

CreatePolicy = Callable[[], Policy]


def start_ranks(
    name: str,
    overrides: Mapping[str, Any],
    policy: str | Policy,
    load_policy: Callable[[str], Policy],
) -> RankGroup | None:
    """Start the ranks of the named model but 0, or return None where it has one rank.

    overrides     as in `load_model`
    policy        policy of the engine, or its name
    load_policy   importable call from a name to a policy
    Under torchrun the processes are there: that of rank 0 returns, and the others follow it until
    it ends, and end. Raises InvalidConfig.
    """
    torchrun = TorchrunRank.from_environment(os.environ)
    if is_embedded(name):
        if torchrun is not None:
            torchrun.check_world_size(1)
        return None  # `load_model` refuses ranks of these by name.
    options = LoadOptions.from_overrides(overrides)
    device_options = DeviceOptions(**options.device)
    num_ranks = device_options.tensor_parallel_size
    if torchrun is not None:
        torchrun.check_world_size(num_ranks)
    if num_ranks == 1:
        return None
    # A rank that refuses an option ends, and so would this process, where its own check is late.
    if device_options.torch_compile:
        raise InvalidConfig(
            "torch_compile",
            f"compiled modules cannot be divided, and tensor_parallel_size is {num_ranks}",
            "Leave it out, or serve the model on one device",
        )
    if options.tiers.check_kv:
        raise InvalidConfig(
            "check_kv",
            f"with tensor_parallel_size {num_ranks} each rank has blocks of its own, and rank 0 "
            "sees only its sums",
            "Leave it out, or serve the model on one device",
        )
    if options.tiers.kv_disk_path is not None:
        raise InvalidConfig(
            "kv_disk_path",
            f"with tensor_parallel_size {num_ranks} no files of blocks are kept",
            "Leave it out, or serve the model on one device",
        )
    if device_options.check_ranks and isinstance(policy, Policy):
        raise InvalidConfig(
            "check_ranks",
            "the policy's functions cannot be sent to other processes",
            "Give the policy's name or a FILE.py",
        )
    create_policy = partial(load_policy, policy) if isinstance(policy, str) else None
    args = (name, dict(overrides), create_policy)
    if torchrun is None:
        return RankGroup(num_ranks, follow_checkpoint, args)
    if torchrun.rank:
        follow_sibling(torchrun)
    with SiblingRanks(torchrun) as siblings:
        return RankGroup(num_ranks, follow_checkpoint, args, siblings)


def follow_checkpoint(
    rank_context: FollowerContext,
    report_ready: Callable[[], None],
    name: str,
    overrides: Mapping[str, Any],
    create_policy: CreatePolicy | None,
) -> None:
    """Open a rank's part of the checkpoint, and run rank 0's steps until the ring ends.

    create_policy   returns the engine's policy; None: rank 0 sends no lines of a recording
    """
    start = StartLog()
    with open_checkpoint_model(name, overrides, start, rank_context) as loaded:
        from forge.models.hf.parallel.rank_steps import FollowingModel, follow_steps

        model = loaded.model
        assert isinstance(model, FollowingModel), "a checkpoint was opened"
        report_ready()
        follow_steps(model, rank_context.open_reader(), PlanChecker(create_policy).check)


class PlanChecker:
    """Scheduler of a rank, which must make the plans of rank 0.

    create_policy   called once, for the first line; None: no line is expected
    """

    def __init__(self, create_policy: CreatePolicy | None) -> None:
        self._create_policy = create_policy
        self._run: ReplayRun | None = None

    def check(self, line: str) -> None:
        """Replay a line of rank 0's recording. Raises RankMismatch where a plan is another."""
        entry = json.loads(line.partition(" ")[2])
        if self._run is None:
            assert self._create_policy is not None, "lines come with check_ranks only"
            self._run = ReplayRun(entry, self._create_policy())
            return
        if "end" in entry:
            return
        difference = self._run.apply(entry)
        if difference is not None:
            raise RankMismatch(difference)
