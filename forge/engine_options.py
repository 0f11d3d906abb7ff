"""Engine options: the keyword arguments of LLM and AsyncLLM, and the engine that they open.

Owns how options become a model, its ranks, a recorder and an engine, and the file of a recording.
Knows no prompt and no text.

    Options ─┬─► load_model, start_ranks ──► LoadedModel ─┬─► Engine
             ├─► RecordingWriter      record, check_ranks ┤
             └─► KVEventPublisher     kv_events ──────────┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from difflib import get_close_matches
from os import PathLike
from typing import Any, TextIO, TypedDict, cast

from forge.config import default_batched_tokens
from forge.engine import Engine
from forge.errors import InvalidConfig, one_line
from forge.failure_log import FailureLog
from forge.kv_event_options import KVEventOptions
from forge.kv_publisher import KVEventPublisher
from forge.models.early_start import has_gpu
from forge.models.embedded import is_embedded
from forge.models.loaded_model import LoadedModel
from forge.models.loader import load_model
from forge.overhead import measure_overhead
from forge.policy import Policy
from forge.policy_loader import load_policy
from forge.rank_start import start_ranks
from forge.ranks.rank_context import LeaderContext
from forge.ranks.rank_group import RankGroup
from forge.ranks.rank_lead import RankLead
from forge.recording import RecordingWriter, build_header
from forge.start_log import StartLog
from forge.version import VERSION

LOG = logging.getLogger("forge.recording")

DEFAULT_MODEL = "tiny"
"""Model of the command line and of the Python API where none is named."""

KV_EVENT_OPTION_NAMES = tuple(each.name for each in fields(KVEventOptions))
OPTIONS_OF_NO_MODEL = ("record", *KV_EVENT_OPTION_NAMES)
"""Options that a loader of models does not take."""

OFFLINE_BATCHED_TOKENS = 8192
"""Default of LLM for `max_num_batched_tokens` of a checkpoint on a GPU.

A server computes fewer tokens in a step, so that running sequences wait less. Offline the time of
the whole batch counts, and larger steps compute prompts faster.
"""


class Options(TypedDict, total=False):
    """Keyword arguments of LLM and AsyncLLM, named as the flags of `forge serve`.

    An option that is not given has the model's default. The fields of EngineConfig come first, then
    those of DeviceOptions, TierOptions and KVEventOptions, then those of speculative decoding:

    draft_model              name of the model that proposes tokens; --speculative-model
    num_speculative_tokens   most proposed tokens in a step, 1 to 16; default 4
    speculative_method       draft (a draft model) or ngram (what followed the same tokens before)
    acceptance               coupled: token for token the output without drafts; rejection: more
                             drafts are accepted, and the output's distribution is the same

    record    file that gets all inputs of the engine's decisions: `forge sim replay` reads it
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    depth: int
    max_step_ms: float
    enable_prefix_caching: bool
    max_logprobs: int
    seed: int
    session_ttl_s: float
    max_sessions: int
    device: str
    dtype: str
    gpu_memory_utilization: float
    load_format: str
    generation_config: str
    enforce_eager: bool
    torch_compile: bool
    tensor_parallel_size: int
    check_ranks: bool
    kv_host_gib: float
    kv_disk_path: str
    kv_disk_gib: float
    kv_load_rule: str
    check_kv: bool
    kv_events: str
    kv_events_replay: str
    kv_events_topic: str
    kv_events_public: bool
    draft_model: str
    num_speculative_tokens: int
    speculative_method: str
    acceptance: str
    record: str


class RecordingFile:
    """File of a recording. Its first error ends the recording, and nothing else.

    failures   counts that error; one thread writes the file
    """

    def __init__(self, file: TextIO, failures: FailureLog) -> None:
        self._file = file
        self._failures = failures

    def write(self, line: str) -> None:
        """Write a line, unless an earlier one failed: a recording without it could not replay."""
        if not self._failures.num_failures:
            try:
                self._file.write(line)
            except OSError as error:
                self._failures.fail(error)

    def close(self) -> None:
        """Write the lines that are buffered, and close the file."""
        try:
            self._file.close()
        except OSError as error:
            if not self._failures.num_failures:
                self._failures.fail(error)


def open_engine(
    model: str,
    policy: str | Policy,
    options: Options,
    exit_stack: ExitStack,
    start: StartLog | None = None,
    rank_context: LeaderContext | None = None,
) -> tuple[Engine, LoadedModel]:
    """Open the named model and an engine on it, until `exit_stack` closes. Raises InvalidConfig.

    start          where the phases of the start are recorded
    rank_context   context of rank 0, where another process has started the other ranks; None: they
                   are started here, if there are any
    """
    start = start or StartLog()
    scheduling_policy = load_policy(policy)
    load_options = model_options(options)
    publisher = _open_publisher(options, exit_stack)
    with ExitStack() as opening:
        lead, group = None, None
        if rank_context is not None:
            lead = RankLead(rank_context)
        elif (group := start_ranks(model, load_options, policy, load_policy)) is not None:
            lead = _lead_ranks(opening.enter_context(group))
        loaded = opening.enter_context(load_model(model, load_options, start, lead))
        if lead is not None:
            opening.callback(lead.end)
        if group is not None:
            group.wait_until_ready()
            opening.callback(group.expect_end)
        exit_stack.enter_context(opening.pop_all())
    loaded = _add_engine_overhead(loaded)
    failures = FailureLog(
        LOG,
        "the recording has ended, and the engine goes on",
        "What was written can be replayed. Restart with room for the file to record again",
    )
    recorder = _create_recorder(options, policy, loaded, lead, failures, exit_stack)
    engine = Engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        scheduling_policy,
        recorder=recorder,
        kv_events=publisher,
        recording_failures=failures,
    )
    exit_stack.callback(engine.close)
    if loaded.disk_keys:
        engine.add_disk_keys(loaded.disk_keys)
    return engine, loaded


def _open_publisher(options: Options, exit_stack: ExitStack) -> KVEventPublisher | None:
    """Open the publisher of KV events that the options name, until `exit_stack` closes.

    Raises InvalidConfig.
    """
    event_options = {n: value for n, value in options.items() if n in KV_EVENT_OPTION_NAMES}
    settings = KVEventOptions(**cast(Any, event_options))
    settings.check_prefix_caching(options.get("enable_prefix_caching", True))
    if settings.kv_events is None:
        return None
    publisher = KVEventPublisher(settings)
    exit_stack.callback(publisher.close)
    return publisher


def model_options(options: Options) -> dict[str, Any]:
    """Return the options that `load_model` takes. Raises InvalidConfig for one that is unknown."""
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        known = list(Options.__annotations__)
        nearest = "".join(f"Use {each}. " for each in get_close_matches(unknown[0], known, 1))
        remedy = f"{nearest}Options are: {', '.join(known)}"
        raise InvalidConfig(unknown[0], "there is no such option", remedy)
    return {name: value for name, value in options.items() if name not in OPTIONS_OF_NO_MODEL}


def add_offline_defaults(model: str, options: Options) -> Options:
    """Return the options, with those defaults of LLM that a server does not have."""
    if "max_num_batched_tokens" in options or is_embedded(model):
        return options
    if options.get("device", "auto") == "cpu" or not has_gpu():
        return options
    num_tokens = default_batched_tokens(OFFLINE_BATCHED_TOKENS, options.get("max_num_seqs"))
    return {**options, "max_num_batched_tokens": num_tokens}


def _lead_ranks(group: RankGroup) -> RankLead:
    """Return rank 0 of a group, which runs in this thread."""
    lead = RankLead(group.leader_context)
    group.watch_thread(lambda: lead.is_waiting)
    return lead


def _add_engine_overhead(loaded: LoadedModel) -> LoadedModel:
    """Return the model with the engine's own time added to its costs of drafts, if it has any."""
    speculation = loaded.config.speculation
    if speculation is None or speculation.costs is None or not speculation.costs.verify:
        return loaded
    costs = speculation.costs._replace(scheduler=measure_overhead(loaded.config))
    config = replace(loaded.config, speculation=replace(speculation, costs=costs))
    return loaded._replace(config=config)


def _create_recorder(
    options: Options,
    policy: str | Policy,
    loaded: LoadedModel,
    lead: RankLead | None,
    failures: FailureLog,
    exit_stack: ExitStack,
) -> RecordingWriter | None:
    """Return the recorder that the options name, complete once `exit_stack` closes, or None.

    Its lines go to the file of `record`, and with `check_ranks` to the other ranks. Raises
    InvalidConfig.
    """
    writers: list[Callable[[str], object]] = []
    path = options.get("record")
    if path is not None:
        if not isinstance(path, str | PathLike):  # `open` takes numbers of open files too
            raise InvalidConfig("record", f"{str(path)[:64]!r} is no path", "Name a file")
        try:
            file = RecordingFile(open(path, "w", encoding="utf-8", buffering=2**20), failures)
        except (OSError, ValueError) as error:  # ValueError: a text that no path can be
            why = getattr(error, "strerror", None) or one_line(error)
            raise InvalidConfig(
                "record", f"{path!r} cannot be written: {why}", "Name another file"
            ) from None
        exit_stack.callback(file.close)
        writers.append(file.write)
    if lead is not None and options.get("check_ranks"):
        writers.append(lead.send_line)
    if not writers:
        return None
    model = loaded.model
    policy_name = policy if isinstance(policy, str) else "a policy of its own"
    header = build_header(
        loaded.config, model.vocab_size(), model.eos_token(), policy_name, VERSION
    )
    recording = RecordingWriter(
        lambda line: [write(line) for write in writers], time.perf_counter_ns, header
    )
    exit_stack.callback(recording.close)
    return recording
