"""Groups of options that are started together, and what each pair of groups must do.

Owns the groups, from which the pairs derive, and the comparison with a run without options. A new
option fails `test_each_option_is_in_a_group` until it is placed here.

    two groups ──► LLM starts: tokens of a run without them
               └─► InvalidConfig that names an option of each, with a remedy
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from forge.errors import InvalidConfig
from forge.llm import LLM
from forge.policies import policy_names
from forge.policy import FCFS
from forge.request import SamplingParams

ANY_PORT = "tcp://127.0.0.1:*"
SHARED = "Once upon a time there was a small engine that served every request in turn. "
PROMPTS = (SHARED + "It", SHARED + "Then", "The quick", SHARED + "It")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, seed=5, top_k=7, repetition_penalty=1.2, ignore_eos=True)
PARAMS = (GREEDY, SAMPLED, GREEDY, SAMPLED)

BASE = {"num_blocks": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
"""Options of every start, so small that measuring steps takes tenths of a second."""

HTTP_OPTIONS = frozenset(
    "host port api_key served_model_name allowed_hosts metrics_compat reasoning_parser "
    "reasoning_config tool_call_parser root_path return_tokens_as_token_ids "
    "enable_force_include_usage enable_per_request_metrics film otlp_traces_endpoint admin_key "
    "weights_folder weights_socket max_connections max_queue queue_timeout request_timeout "
    "read_timeout write_timeout ping_interval drain_timeout response_store_mib response_ttl".split()
)
"""Options of the server, which no engine receives."""


class OptionGroup(NamedTuple):
    """Options that are given together.

    changes_outputs   the tokens are other ones, and equal in each run with these options
    draws_alike       sampled tokens are those of a run without the options, as greedy ones are
    """

    name: str
    options: Mapping[str, Any]
    changes_outputs: bool = False
    draws_alike: bool = True


_HOST = {"kv_host_gib": 0.01}

GROUPS = (
    OptionGroup("blocks", {"num_blocks": 40, "block_size": 8}),
    OptionGroup("rows", {"max_num_seqs": 2, "max_num_batched_tokens": 32}),
    OptionGroup("length", {"max_model_len": 128}),
    OptionGroup("depth", {"depth": 2}),
    OptionGroup("step bound", {"max_step_ms": 50.0}),
    OptionGroup("no prefix caching", {"enable_prefix_caching": False}),
    OptionGroup("logprobs", {"max_logprobs": -1}),
    OptionGroup("seed", {"seed": 7}),
    OptionGroup("sessions", {"session_ttl_s": 1.0, "max_sessions": 1}),
    OptionGroup("device", {"device": "cpu"}),
    OptionGroup("dtype", {"dtype": "float32"}),
    OptionGroup("memory", {"gpu_memory_utilization": 0.5}),
    OptionGroup("dummy weights", {"load_format": "dummy"}, changes_outputs=True),
    OptionGroup("eager", {"enforce_eager": True}),
    OptionGroup("compile", {"torch_compile": True}),
    OptionGroup("ranks", {"tensor_parallel_size": 2}),
    OptionGroup("checked ranks", {"tensor_parallel_size": 2, "check_ranks": True}),
    OptionGroup("host", _HOST),
    OptionGroup("disk", {**_HOST, "kv_disk_path": "kv", "kv_disk_gib": 0.01}),
    OptionGroup("always load", {**_HOST, "kv_load_rule": "always"}),
    OptionGroup("checked KV", {**_HOST, "check_kv": True}),
    OptionGroup("events", {"kv_events": ANY_PORT, "kv_events_replay": ANY_PORT}),
    OptionGroup(
        "named events",
        {"kv_events": ANY_PORT, "kv_events_topic": "kv@pod", "kv_events_public": True},
    ),
    OptionGroup("draft", {"draft_model": "tiny-draft", "num_speculative_tokens": 3}),
    OptionGroup("ngram", {"speculative_method": "ngram"}),
    OptionGroup(
        "rejection", {"draft_model": "tiny-draft", "acceptance": "rejection"}, draws_alike=False
    ),
    OptionGroup("defaults", {"generation_config": "vllm"}),
    OptionGroup("record", {"record": "recording"}),
    OptionGroup("own policy", {"policy": FCFS._replace()}),
)

POLICY_GROUPS = tuple(OptionGroup(f"policy {name}", {"policy": name}) for name in policy_names())

PATH_OPTIONS = ("kv_disk_path", "record")
"""Options whose value is a name in a folder of the run."""


class Outcome(NamedTuple):
    """What a pair has done.

    refusal   error of a pair that was refused, or None
    alone     group that the model refuses without the other one, or None
    """

    first: str
    second: str
    refusal: str | None = None
    alone: str | None = None


class PairRun:
    """Starts of pairs on one model, each compared with a run without them.

    base     options of every start
    folder   empty folder, which gets files of the runs
    """

    def __init__(self, model: str, base: Mapping[str, Any], folder: Path) -> None:
        self._model, self._base, self._folder = model, base, folder
        self._num_starts = 0
        self._draft = "hash:agreement=0.6" if model == "hash" else "tiny-draft"
        self._expected: dict[str, list[list[int]]] = {}
        self._refusals: dict[str, str | None] = {}

    def start(self, first: OptionGroup, second: OptionGroup) -> Outcome:
        """Start the pair. Raises AssertionError where it neither runs nor is refused by name."""
        names = first.name, second.name
        for group in (first, second):
            if (refusal := self._refusal_alone(group)) is not None:
                return Outcome(*names, refusal, group.name)
        try:
            self._check_tokens([first, second])
        except InvalidConfig as error:
            assert _names(error, first) and _names(error, second), (names, str(error))
            return Outcome(*names, str(error))
        return Outcome(*names)

    def _refusal_alone(self, group: OptionGroup) -> str | None:
        """Return the error of a group that the model refuses, which names an option of it."""
        if group.name not in self._refusals:
            self._refusals[group.name] = None
            try:
                self._open(group).close()
            except InvalidConfig as error:
                assert _names(error, group), (group.name, str(error))
                self._refusals[group.name] = str(error)
        return self._refusals[group.name]

    def _check_tokens(self, groups: Sequence[OptionGroup]) -> None:
        tokens = self._generate(*groups)
        changing = [group for group in groups if group.changes_outputs]
        expected = self._expected_tokens(*changing[:1])
        draws_alike = all(group.draws_alike for group in groups)
        for params, *each in zip(2 * PARAMS, tokens, expected, strict=True):
            if params is GREEDY or draws_alike:
                assert each[0] == each[1], [group.name for group in groups]

    def _expected_tokens(self, *groups: OptionGroup) -> list[list[int]]:
        key = " ".join(group.name for group in groups)
        if key not in self._expected:
            self._expected[key] = self._generate(*groups)
        return self._expected[key]

    def _generate(self, *groups: OptionGroup) -> list[list[int]]:
        """Return the tokens of two runs of the prompts on one LLM."""
        with self._open(*groups) as llm:
            return [
                output.token_ids
                for _ in range(2)
                for output in llm.generate(list(PROMPTS), list(PARAMS), use_tqdm=False)
            ]

    def _open(self, *groups: OptionGroup) -> LLM:
        self._num_starts += 1
        options: dict[str, Any] = dict(self._base)
        for group in groups:
            options |= group.options
        if "draft_model" in options:
            options["draft_model"] = self._draft
        for name in PATH_OPTIONS:
            if name in options:
                options[name] = str(self._folder / f"{options[name]}-{self._num_starts}")
        return LLM(self._model, **options)


def pairs_of(groups: Collection[OptionGroup]) -> list[tuple[OptionGroup, OptionGroup]]:
    """Return all pairs, without those that give one option two values."""
    return [
        (first, second)
        for first, second in combinations(groups, 2)
        if all(second.options.get(key, value) == value for key, value in first.options.items())
    ]


def _names(error: InvalidConfig, group: OptionGroup) -> bool:
    """Return whether the error names an option of the group."""
    return any(re.search(rf"\b{name}\b", str(error)) for name in group.options)
