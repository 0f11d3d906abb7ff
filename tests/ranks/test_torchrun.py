"""Ranks that an outer launcher has started: they find each other, and end together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from forge.errors import EngineDead, InvalidConfig
from forge.ranks.rank_group import RankGroup
from forge.ranks.torchrun import SiblingRanks, TorchrunRank
from tests.ranks.stand_in import STEP, follow
from tests.ranks.test_rank_group import ROOT, TIMEOUT_S, is_alive, wait_until

VARIABLES = {
    **{"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
}


def test_a_rank_is_that_of_torchruns_variables() -> None:
    torchrun = TorchrunRank.from_environment(VARIABLES)
    assert torchrun is not None and torchrun[:2] == (1, 3)
    others = [
        TorchrunRank.from_environment({**VARIABLES, **change})
        for change in ({"RANK": "0"}, {"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "b"})
    ]
    same, *different = [each.address for each in others if each is not None]
    assert same == torchrun.address and torchrun.address not in different


@pytest.mark.parametrize("missing", ["RANK", "TORCHELASTIC_RUN_ID"])
def test_there_is_no_rank_without_torchrun(missing: str) -> None:
    """Other launchers set RANK and WORLD_SIZE too."""
    variables = {name: value for name, value in VARIABLES.items() if name != missing}
    assert TorchrunRank.from_environment(variables) is None
    one = {**VARIABLES, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert TorchrunRank.from_environment(one) is None


def test_several_hosts_and_another_number_of_ranks_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"3 of 6 ranks on this host.*--nnodes 1"):
        TorchrunRank.from_environment({**VARIABLES, "WORLD_SIZE": "6"})
    torchrun = TorchrunRank.from_environment(VARIABLES)
    assert torchrun is not None
    torchrun.check_world_size(3)
    with pytest.raises(InvalidConfig, match=r"3 processes for 1 ranks.*--nproc-per-node 1"):
        torchrun.check_world_size(1)


class Siblings:
    """Rank 0 in this process, and ranks 1 and 2 as an outer launcher starts them."""

    def __init__(self, stage: str, exit_stack: ExitStack) -> None:
        address = f"\0forge-test-{os.getpid()}-{stage}"
        self.processes = [
            exit_stack.enter_context(
                subprocess.Popen([sys.executable, "-c", self.code(rank, address)], cwd=ROOT)
            )
            for rank in (2, 1)
        ]
        exit_stack.callback(self.kill)
        with SiblingRanks(TorchrunRank(0, 3, address)) as siblings:
            self.group = RankGroup(3, follow, (stage, 2), siblings)
        self.group.watch_thread(lambda: False)

    @staticmethod
    def code(rank: int, address: str) -> str:
        return (
            "from forge.ranks.torchrun import TorchrunRank, follow_sibling\n"
            f"follow_sibling(TorchrunRank({rank}, 3, {address!r}))\n"
        )

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture
def exit_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_siblings_follow_rank_0_and_end_with_the_ring(exit_stack: ExitStack) -> None:
    """They connect in any order."""
    siblings = Siblings("none", exit_stack)
    siblings.group.wait_until_ready()
    with siblings.group.leader_context.open_writer() as writer:
        writer.send([STEP])
        siblings.group.expect_end()
    siblings.group.close()
    assert [process.wait(TIMEOUT_S) for process in siblings.processes] == [0, 0]


def test_a_sibling_that_fails_ends_the_others_with_its_last_words(exit_stack: ExitStack) -> None:
    siblings = Siblings("raises while loading", exit_stack)
    with pytest.raises(EngineDead, match=r"rank 2 ended .*ValueError: no weights for rank 2"):
        siblings.group.wait_until_ready()
    wait_until(lambda: not any(is_alive(process.pid) for process in siblings.processes))
    siblings.group.close()


def test_a_sibling_ends_with_rank_0_while_it_waits_for_a_step(exit_stack: ExitStack) -> None:
    """Rank 0 is a process too, and is killed."""
    address = f"\0forge-test-{os.getpid()}-killed"
    code = (
        "import sys\n"
        "from forge.ranks.rank_group import RankGroup\n"
        "from forge.ranks.torchrun import SiblingRanks, TorchrunRank\n"
        "from tests.ranks.stand_in import follow\n"
        f"with SiblingRanks(TorchrunRank(0, 2, {address!r})) as siblings:\n"
        "    group = RankGroup(2, follow, ('none', 0), siblings)\n"
        "group.watch_thread(lambda: False)\n"
        "group.wait_until_ready()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    rank_1 = exit_stack.enter_context(
        subprocess.Popen([sys.executable, "-c", Siblings.code(1, address)], cwd=ROOT)
    )
    exit_stack.callback(rank_1.kill)
    rank_0 = exit_stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    )
    assert rank_0.stdout is not None and rank_0.stdout.readline() == b"ready\n"
    rank_0.kill()
    assert rank_1.wait(TIMEOUT_S) != 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_does_not_end_a_start() -> None:
    address = f"\0forge-test-{os.getpid()}-stranger"
    code = (
        "import os, socket, sys, time; os.setuid(int(sys.argv[1])); "
        "s = socket.socket(socket.AF_UNIX); "
        "exec('while s.connect_ex(sys.argv[2].replace(chr(32), chr(0))): time.sleep(0.01)'); "
        "s.sendall((1).to_bytes(4, 'little')); time.sleep(60)"
    )
    stranger, rank = (
        subprocess.Popen([sys.executable, "-c", code, user, address.replace("\0", " ")])
        for user in ("65534", "0")
    )
    try:
        with SiblingRanks(TorchrunRank(0, 2, address)) as siblings:
            assert list(siblings._sockets) == [1]
    finally:
        for process in (stranger, rank):
            process.kill()
            process.wait()
