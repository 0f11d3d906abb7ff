"""LLM: text in, text out, on one Engine driven by the caller's thread.

Owns the way from text to requests, which AsyncLLM shares, and the steps. Knows no thread, event
loop or HTTP.

    prompt ──tokenize──► Request ──► Engine.step() ──► Delta ──┬─► OutputBatch       generate
                                                               └─► OutputProcessor   each stream
"""

from __future__ import annotations

import itertools
import runpy
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast

from forge.config import default_batched_tokens
from forge.deferred_interrupt import defer_interrupt
from forge.engine import Engine
from forge.errors import EngineDead, EnginePaused, InvalidConfig, InvalidRequest
from forge.kv_event_options import KVEventOptions
from forge.kv_publisher import KVEventPublisher
from forge.models.early_start import has_gpu
from forge.models.embedded import is_embedded
from forge.models.loaded_model import LoadedModel
from forge.models.loader import load_model
from forge.outputs import OutputBatch, OutputProcessor, RequestOutput, TextDelta
from forge.overhead import measure_overhead
from forge.pause import PauseMode
from forge.policies import policy_names, policy_path
from forge.policy import POLICIES, Policy
from forge.progress import GenerationProgress
from forge.rank_start import start_ranks
from forge.ranks.rank_context import LeaderContext
from forge.ranks.rank_group import RankGroup
from forge.ranks.rank_lead import RankLead
from forge.recorder_chain import RecorderChain
from forge.recording import RecordingWriter, build_header
from forge.request import Delta, Request, SamplingParams
from forge.start_log import StartLog
from forge.timings_recorder import TimingsRecorder
from forge.tokenizer import Tokenizer
from forge.version import VERSION
from forge.weights import NamedWeights, SharedWeights, WeightFiles, WeightSource

Prompt = str | list[int]

DEFAULT_MODEL = "tiny"
"""Model of the command line and of the Python API where none is named."""

DEFAULT_PARAMS = SamplingParams()

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


class RequestFields(TypedDict, total=False):
    """Fields of a Request besides its id, prompt and parameters, with the defaults of Request."""

    priority: int
    cache_salt: str
    arrival_s: float
    tenant: str
    session_id: str
    session_end: bool
    expected_pause_s: float | None
    return_timings: bool
    external_id: str


def load_policy(name_or_policy: str | Policy) -> Policy:
    """Return the policy of that name, or the one that the named file defines as `policy`.

    Raises InvalidConfig.
    """
    if isinstance(name_or_policy, Policy):
        return name_or_policy
    names = ", ".join(policy_names())
    if not isinstance(name_or_policy, str):
        raise InvalidConfig("policy", f"{name_or_policy!r} is no name", f"Use {names} or a FILE.py")
    if name_or_policy in POLICIES:
        return POLICIES[name_or_policy]
    path = policy_path(name_or_policy)
    if path is None:
        raise InvalidConfig(
            "policy", f"{name_or_policy[:64]!r} is not known", f"Use {names} or a FILE.py"
        )
    if not path.is_file():
        raise InvalidConfig(
            "policy", f"there is no file {name_or_policy!r}", f"Use {names} or a FILE.py"
        )
    try:
        policy = runpy.run_path(str(path)).get("policy")
    except (Exception, SystemExit) as error:
        raise InvalidConfig(
            "policy", f"{name_or_policy} does not run: {error!r}", "Fix the policy"
        ) from error
    if not isinstance(policy, Policy) or not policy.is_complete:
        raise InvalidConfig(
            "policy",
            f"{name_or_policy} does not define `policy`",
            "Assign it a forge.policy.Policy",
        )
    return policy


def open_engine_and_model(
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
    recorder = _create_recorder(options, policy, loaded, lead, exit_stack)
    engine = Engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        scheduling_policy,
        recorder=recorder,
        kv_events=publisher,
    )
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
        known = ", ".join(Options.__annotations__)
        raise InvalidConfig(unknown[0], "there is no such option", f"Options are: {known}")
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
    exit_stack: ExitStack,
) -> RecordingWriter | None:
    """Return the recorder that the options name, complete once `exit_stack` closes, or None.

    Its lines go to the file of `record`, and with `check_ranks` to the other ranks. Raises
    InvalidConfig.
    """
    writers: list[Callable[[str], object]] = []
    path = options.get("record")
    if path is not None:
        try:
            file = exit_stack.enter_context(open(path, "w", encoding="utf-8", buffering=2**20))
        except OSError as error:
            raise InvalidConfig(
                "record", f"{path!r} cannot be written: {error.strerror}", "Name another file"
            ) from None
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


def open_engine(
    model: str,
    policy: str | Policy,
    options: Options,
    exit_stack: ExitStack,
    start: StartLog | None = None,
    rank_context: LeaderContext | None = None,
) -> tuple[Engine, Tokenizer]:
    """Open an engine on the named model, until `exit_stack` closes: see `open_engine_and_model`."""
    engine, loaded = open_engine_and_model(model, policy, options, exit_stack, start, rank_context)
    return engine, loaded.tokenizer


def tokenize(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt given as text or as ids. Raises InvalidRequest."""
    if isinstance(prompt, str):
        try:
            return tuple(tokenizer.encode(prompt))
        except UnicodeEncodeError:
            raise InvalidRequest(
                "prompt",
                "it has half a surrogate pair, which no UTF-8 text can have",
                "Send valid Unicode",
                "invalid_unicode",
            ) from None
    if not isinstance(prompt, list | tuple) or str in set(map(type, prompt)):
        raise InvalidRequest(
            "prompt",
            f"{str(prompt)[:64]!r} is neither text nor a list of token ids",
            "Give str, list[str], list[int] or list[list[int]]",
            "invalid_type",
        )
    return tuple(prompt)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list: a list with anything but integers is several prompts."""
    is_list = isinstance(prompts, list | tuple) and not (
        prompts and all(type(i) is int for i in prompts)
    )
    return list(cast(Sequence[Prompt], prompts)) if is_list else [cast(Prompt, prompts)]


def _with_index(error: InvalidRequest, index: int) -> InvalidRequest:
    """Return the error with the index of the prompt it is about."""
    name = error.field
    field = f"{name}[{index}]" if name in ("prompt", "params") else f"params[{index}].{name}"
    return type(error)(field, error.problem, error.remedy, error.code)


def parse_pause_mode(mode: PauseMode | str) -> PauseMode:
    """Return the mode of that name. Raises InvalidConfig."""
    try:
        return PauseMode(mode)
    except ValueError:
        raise InvalidConfig(
            "mode", f"{str(mode)[:32]!r} is not known", f"Give one of: {', '.join(PauseMode)}"
        ) from None


def new_namespace() -> str:
    """Return a namespace for blocks of new weights, which no other engine has.

    Files outlive an engine, and a version of weights may come again with another content.
    """
    return f"updated {secrets.token_hex(16)}"


class LLM:
    """Offline generation on the caller's thread. `close`, or the end of a `with` block, frees it.

    Ctrl-C takes effect after the step that runs, and a second one at once: see defer_interrupt.

    device   what the model runs on
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        policy: str | Policy = "fcfs",
        **options: Unpack[Options],
    ) -> None:
        self._exit_stack = ExitStack()
        self.engine, loaded = open_engine_and_model(
            model, policy, add_offline_defaults(model, options), self._exit_stack
        )
        self.tokenizer, self.device = loaded.tokenizer, loaded.device
        recorders = RecorderChain(self.engine)
        self._timings = TimingsRecorder(self.engine.scheduler, recorders, time.monotonic)
        self._ids = itertools.count()
        self._deltas_by_stream: dict[int, deque[Delta]] = {}
        self._open_ids: set[int] = set()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop open requests, refuse new ones and close the model."""
        self._closed = True
        for request_id in self._open_ids:
            self.engine.abort(request_id)
        self._exit_stack.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
        *,
        use_tqdm: bool = True,
        **fields: Unpack[RequestFields],
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order. All prompts share the engine's steps.

        params     one for all prompts, or a list with one for each
        use_tqdm   show a bar where standard error is a terminal, from the second second on
        fields     those of every request

        Raises InvalidRequest before anything runs.
        """
        prompt_list = _as_list(prompts)
        if isinstance(params, list | tuple):
            params_list = list(params)
        else:
            params_list = [cast(SamplingParams, params)] * len(prompt_list)
        if len(params_list) != len(prompt_list):
            raise InvalidRequest(
                "params",
                f"{len(params_list)} for {len(prompt_list)} prompts",
                "Give one, or one for each",
            )
        requests = []
        for index, (prompt, prompt_params) in enumerate(zip(prompt_list, params_list, strict=True)):
            try:
                requests.append(self._create_request(prompt, prompt_params, **fields))
            except InvalidRequest as error:
                raise (error if len(prompt_list) == 1 else _with_index(error, index)) from None
        batch = OutputBatch(requests, self.tokenizer)
        with defer_interrupt() as raise_pending:
            try:
                for request in requests:
                    self._submit(request)
                with GenerationProgress(batch, is_enabled=use_tqdm) as progress:
                    while not batch.is_finished:
                        raise_pending()
                        deltas = self._step()
                        # Streams first: an error while text is made loses nothing of theirs.
                        self._pass_to_streams(deltas)
                        batch.extend(deltas)
                        batch.decode_ahead()
                        progress.update()
            finally:
                for request in requests:
                    self._abort(request)
        return batch.outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        **fields: Unpack[RequestFields],
    ) -> Iterator[TextDelta]:
        """Yield deltas as they come. Dropping the iterator aborts the request, even when unread."""
        request = self._create_request(prompt, params, **fields)
        deltas = self._stream(request, OutputProcessor(request, self.tokenizer))
        next(deltas)  # only a generator that has started runs its `finally` when it is dropped
        return deltas

    def session(self, session_id: str | None = None) -> LLMSession:
        """Return a session: a `with` block ends it. It opens with its first turn.

        session_id   a new one where it is left out

        An LLM has no clock: sessions that are not ended stay open, up to `max_sessions`.
        """
        return LLMSession(self, session_id or f"session-{next(self._ids)}")

    def end_session(self, session_id: str) -> bool:
        """End a session, and return whether it was open. With an open request, it ends after it."""
        with defer_interrupt():
            return self.engine.end_session(("", session_id))

    @property
    def weight_version(self) -> str:
        """Version of the weights: that of the last update, or "0"."""
        return self.engine.weights.current

    def pause(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Stop all streams after the steps in flight, until `resume`.

        mode   what open streams do: see PauseMode. With WAIT they are served to their end here,
               and their deltas are kept until they are read
        Raises InvalidConfig.
        """
        pause_mode = parse_pause_mode(mode)
        with defer_interrupt() as raise_pending:
            self.engine.pause(pause_mode)
            while not self.engine.is_paused:
                raise_pending()
                self._pass_to_streams(self._step())
            self._pass_to_streams(
                self._timings.label(self.engine.step())
            )  # deltas of the steps that were in flight

    def resume(self) -> None:
        """End a pause. Raises EnginePaused while the model sleeps or lacks weights."""
        with defer_interrupt():
            self.engine.resume()

    def update_weights(
        self,
        weights: Mapping[str, object] | Iterable[tuple[str, object]] | WeightSource,
        version: str | None = None,
    ) -> str:
        """Replace weights in place, and return their version.

        Open streams go on with the new weights: keys and values of their tokens are computed again.

        weights   all tensors or some, by their names in the checkpoint, on any device; or files
        version   name of the weights in later outputs; None: the next number
        Raises InvalidWeights for a tensor that does not match; nothing has changed then.
        """
        if not isinstance(weights, NamedWeights | WeightFiles | SharedWeights):
            weights = NamedWeights(dict(weights))
        return self.engine.update_weights(weights, version, namespace=new_namespace())

    def sleep(self, level: int = 1) -> dict[str, float]:
        """Release the device's memory in a pause, and return the seconds of each part.

        level   1 moves the weights to host memory; 2 drops them: update all after `wake`
        Raises EnginePaused for an engine that is not paused.
        """
        return dict(self.engine.sleep(level))

    def wake(self) -> dict[str, float]:
        """Allocate what `sleep` released, and return the seconds of each part. `resume` follows."""
        return dict(self.engine.wake())

    def _stream(self, request: Request, processor: OutputProcessor) -> Iterator[TextDelta]:
        """Submit the request and yield an empty delta; then yield the request's deltas."""
        pending = self._deltas_by_stream[request.id] = deque()
        try:
            with defer_interrupt():
                self._submit(request)
            yield TextDelta(0, "", ())
            while not processor.is_finished:
                if not pending:
                    with defer_interrupt() as raise_pending:
                        while not pending:
                            raise_pending()
                            self._pass_to_streams(self._step())
                yield processor.process(pending.popleft())
        finally:
            with defer_interrupt():
                self._abort(request)
                self._deltas_by_stream.pop(request.id, None)

    def _create_request(
        self, prompt: Prompt, params: SamplingParams, **fields: Unpack[RequestFields]
    ) -> Request:
        if self._closed:
            raise EngineDead("the engine was closed. Open another LLM")
        self._check_running()
        request = Request(next(self._ids), tokenize(self.tokenizer, prompt), params, **fields)
        self.engine.check(request)
        return request

    def _submit(self, request: Request) -> None:
        self.engine.submit(request)
        self._timings.add(request, time.monotonic())
        self._open_ids.add(request.id)

    def _abort(self, request: Request) -> None:
        self.engine.abort(request.id)
        self._open_ids.discard(request.id)

    def _step(self) -> Sequence[Delta]:
        """Run one step of the engine, in which all open requests advance."""
        if not self.engine.can_step:
            if self.engine.is_paused:
                self._check_running()
            self._expire_longest_pause()
        return self._timings.label(self.engine.step())

    def _check_running(self) -> None:
        if self.engine.pause_state.mode is not None:
            raise EnginePaused("the engine is paused, and makes no step. Call resume first")

    def _pass_to_streams(self, deltas: Iterable[Delta]) -> None:
        """Keep each delta until its stream is read; drop those of streams that were dropped."""
        for delta in deltas:
            pending = self._deltas_by_stream.get(delta.request_id)
            if pending is not None:
                pending.append(delta)

    def _expire_longest_pause(self) -> None:
        """Close the session that all requests wait for: its next turn cannot come meanwhile."""
        paused = [each for each in self.engine.scheduler.sessions.values() if each.is_paused]
        longest = min(paused, key=lambda session: session.paused_at)
        self.engine.expire_session(longest.key, longest.last_turn)


class LLMSession:
    """Turns of one growing context. `end`, or the end of a `with` block, ends it.

    Each turn's prompt is the whole context so far; its beginning is found in the prefix cache.
    """

    def __init__(self, llm: LLM, session_id: str) -> None:
        self.session_id = session_id
        self._llm = llm

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        **fields: Unpack[RequestFields],
    ) -> RequestOutput:
        """Return the whole output of a turn. Raises InvalidRequest."""
        fields = self._fields_of_turn(fields)
        (output,) = self._llm.generate([prompt], params, use_tqdm=False, **fields)
        return output

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        **fields: Unpack[RequestFields],
    ) -> Iterator[TextDelta]:
        """Yield deltas of a turn as they come. Dropping the iterator aborts the turn."""
        return self._llm.stream(prompt, params, **self._fields_of_turn(fields))

    def end(self) -> bool:
        """End the session, and return whether it was open. A later turn would open it again."""
        return self._llm.end_session(self.session_id)

    def _fields_of_turn(self, fields: RequestFields) -> RequestFields:
        return {**fields, "session_id": self.session_id}
