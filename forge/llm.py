"""LLM: text in, text out, on one Engine driven by the caller's thread.

Owns the way from text to requests, which AsyncLLM shares, the steps, and the lock that lets one
thread at a time use the engine. Knows no event loop or HTTP, and not how an engine is opened.

    prompt ──tokenize──► Request ──► Engine.step() ──► Delta ──┬─► OutputBatch       generate
                                                               └─► OutputProcessor   each stream
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypedDict, Unpack, cast

from forge.chat_prompts import Chat, encode_chats, invalid_unicode_error
from forge.deferred_interrupt import defer_interrupt
from forge.engine_options import DEFAULT_MODEL, Options, add_offline_defaults, open_engine
from forge.errors import EngineBusy, EngineDead, EnginePaused, InvalidConfig, InvalidRequest
from forge.outputs import OutputBatch, OutputProcessor, RequestOutput, TextDelta
from forge.pause import PauseMode
from forge.policy import Policy
from forge.progress import GenerationProgress
from forge.recorder_chain import RecorderChain
from forge.request import Delta, Request, SamplingParams
from forge.timings_recorder import TimingsRecorder
from forge.tokenizer import ChatEnd, Tokenizer
from forge.weights import WeightSource, as_weight_source

Prompt = str | list[int]


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
    begins_text: bool


class EncodingFields(TypedDict, total=False):
    """Fields that say how a prompt given as text becomes its ids; both are true by default.

    add_special_tokens     with the ids that the checkpoint puts around every prompt, such as BOS
    parse_special_tokens   the name of a special token in the text is that token
    """

    add_special_tokens: bool
    parse_special_tokens: bool


class PromptFields(RequestFields, EncodingFields, total=False):
    """Fields of a call that takes a prompt."""


def tokenize(tokenizer: Tokenizer, prompt: Prompt, encoding: EncodingFields) -> tuple[int, ...]:
    """Return the token ids of a prompt given as text or as ids. Raises InvalidRequest."""
    if isinstance(prompt, str):
        try:
            return tuple(tokenizer.encode(prompt, **encoding))
        except UnicodeEncodeError:
            raise invalid_unicode_error("prompt") from None
    if not isinstance(prompt, list | tuple) or str in set(map(type, prompt)):
        raise InvalidRequest(
            "prompt",
            f"{str(prompt)[:64]!r} is neither text nor a list of token ids",
            "Give str, list[str], list[int] or list[list[int]]",
            "invalid_type",
        )
    return tuple(prompt)


def create_request(
    id: int,
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams,
    add_special_tokens: bool = True,
    parse_special_tokens: bool = True,
    **fields: Unpack[RequestFields],
) -> Request:
    """Return a request for a prompt given as text or as ids. Raises InvalidRequest."""
    encoding: EncodingFields = {
        "add_special_tokens": add_special_tokens,
        "parse_special_tokens": parse_special_tokens,
    }
    return Request(id, tokenize(tokenizer, prompt, encoding), params, **fields)


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


def session_key(session_id: str, tenant: str = "") -> tuple[str, str]:
    """Return the key of a session. Raises InvalidRequest for what is no text."""
    for name, value in (("session_id", session_id), ("tenant", tenant)):
        if not isinstance(value, str):
            raise InvalidRequest(name, f"{str(value)[:64]!r} is no text", "Give str")
    return tenant, session_id


def new_namespace() -> str:
    """Return a namespace for blocks of new weights, which no other engine has.

    Files outlive an engine, and a version of weights may come again with another content.
    """
    return f"updated {secrets.token_hex(16)}"


class LLM:
    """Offline generation on the caller's thread. `close`, or the end of a `with` block, frees it.

    Ctrl-C takes effect after the step that runs, and a second one at once: see defer_interrupt.
    Several threads may call it: a call waits for that of another thread to end, and the read of a
    stream for its steps. A call within a call, as from a handler of a signal, is refused.

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
        weakref.finalize(self, self._exit_stack.close).atexit = False  # dropped without `close`
        self.engine, loaded = open_engine(
            model, policy, add_offline_defaults(model, options), self._exit_stack
        )
        self.tokenizer, self.device = loaded.tokenizer, loaded.device
        self.sampling_defaults = loaded.sampling_defaults
        recorders = RecorderChain(self.engine)
        self._timings = TimingsRecorder(self.engine.scheduler, recorders, time.monotonic)
        self._ids = itertools.count()
        self._deltas_by_stream: dict[int, deque[Delta]] = {}
        self._open_ids: set[int] = set()
        self._dropped_ids: deque[int] = deque()
        self._lock = threading.RLock()
        self._num_uses = 0  # of the engine, nested ones included; the lock guards it
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
        """End open requests as aborted, refuse new ones, and free all memory and threads.

        Waits for the call of another thread. In a call of this thread, as a handler of a signal
        does, it ends that call's requests, and frees the memory when the call returns.
        """
        with self._use():
            self._closed = True
            self._dropped_ids.extend(self._open_ids)

    @contextmanager
    def _use(self) -> Iterator[Callable[[], None]]:
        """Use the engine until the block ends: no other thread uses it, and Ctrl-C is deferred.

        Yields what `defer_interrupt` yields. Streams that are dropped meanwhile end with the block.
        """
        with self._lock, defer_interrupt() as raise_pending:
            self._num_uses += 1
            try:
                yield raise_pending
            finally:
                self._num_uses -= 1
                if not self._num_uses:
                    self._end_uses()

    @contextmanager
    def _use_open(self) -> Iterator[Callable[[], None]]:
        """Use the engine as `_use_alone` does. Raises EngineDead once it was closed."""
        with self._use_alone() as raise_pending:
            self._check_open()
            yield raise_pending

    @contextmanager
    def _use_alone(self) -> Iterator[Callable[[], None]]:
        """Use the engine as `_use` does. Raises EngineBusy within another use.

        The other one may be within a step, and outputs of its requests would come here.
        """
        with self._use() as raise_pending:
            if self._num_uses > 1:
                raise EngineBusy("this thread is within a call of this LLM. Call it afterwards")
            yield raise_pending

    def _end_uses(self) -> None:
        """End dropped requests, and free everything once `close` was called."""
        try:
            self._abort_dropped()
            if self._closed:
                self._pass_to_streams(self._timings.label(self.engine.undelivered_deltas))
        finally:
            if self._closed:
                self._exit_stack.close()

    def _abort_dropped(self) -> None:
        while self._dropped_ids:
            request_id = self._dropped_ids.popleft()
            if request_id in self._open_ids:  # else `close` has ended it
                self._open_ids.remove(request_id)
                self.engine.abort(request_id)

    def _drop_stream(self, request: Request) -> None:
        """End the request of a stream: now, or with the use of the engine in which this is called.

        Never waits. The collector calls it on any thread, within a step and under any lock.
        """
        self._deltas_by_stream.pop(request.id, None)
        self._dropped_ids.append(request.id)
        if self._lock.acquire(blocking=False):
            try:
                with self._use():
                    pass
            finally:
                self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed. Open another LLM")

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls without any: the checkpoint's defaults, else forge's."""
        return self.sampling_defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **fields: Unpack[PromptFields],
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order. All prompts share the engine's steps.

        params     one for all prompts, or a list with one for each; None: the defaults
        use_tqdm   show a bar where standard error is a terminal, from the second second on
        fields     those of every request

        Raises InvalidRequest before anything runs.
        """
        prompt_list = _as_list(prompts)
        if params is None:
            params = self.get_default_sampling_params()
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
        with self._use_open() as raise_pending:
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
                self._dropped_ids.extend(request.id for request in requests)
                self._abort_dropped()
        return batch.outputs

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
        **fields: Unpack[RequestFields],
    ) -> list[RequestOutput]:
        """Return one output per chat: the next message, as text. All else is as in `generate`.

        messages                 of one chat, or a list with those of each: [{"role": "user",
                                 "content": "..."}]
        tools                    functions that the template shows: [{"type": "function",
                                 "function": {...}}]. Calls of them are text of the output
        chat_template_kwargs     other names that the model's chat template may read
        continue_final_message   the output continues the last message, and begins no other
        """
        end = (
            ChatEnd.CONTINUE_FINAL_MESSAGE if continue_final_message else ChatEnd.GENERATION_PROMPT
        )
        variables: dict[str, object] = {}
        if chat_template_kwargs is not None:
            if not isinstance(chat_template_kwargs, Mapping):
                raise InvalidRequest("chat_template_kwargs", "it is no mapping", "Give a dict")
            variables |= chat_template_kwargs
        if tools is not None:
            if not isinstance(tools, list | tuple):
                raise InvalidRequest("tools", "they are no list", "Give a list of functions")
            variables |= {"tools": list(tools)} if tools else {}
        prompts = encode_chats(self.tokenizer, messages, end, variables)
        fields = {"begins_text": not continue_final_message, **fields}
        return self.generate(prompts, params, use_tqdm=use_tqdm, **fields)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
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
        _, name = session_key(session_id or f"session-{next(self._ids)}")
        return LLMSession(self, name)

    def end_session(self, session_id: str) -> bool:
        """End a session, and return whether it was open. With an open request, it ends after it."""
        key = session_key(session_id)
        with self._use_open():
            return self.engine.end_session(key)

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
        with self._use_open() as raise_pending:
            self.engine.pause(pause_mode)
            while not self.engine.is_paused:
                raise_pending()
                self._pass_to_streams(self._step())
            self._pass_to_streams(
                self._timings.label(self.engine.step())
            )  # deltas of the steps that were in flight

    def resume(self) -> None:
        """End a pause. Raises EnginePaused while the model sleeps or lacks weights."""
        with self._use_open():
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
        source = as_weight_source(weights)
        with self._use_open():
            return self.engine.update_weights(source, version, namespace=new_namespace())

    def sleep(self, level: int = 1) -> dict[str, float]:
        """Release the device's memory in a pause, and return the seconds of each part.

        level   1 moves the weights to host memory; 2 drops them: update all after `wake`
        Raises EnginePaused for an engine that is not paused.
        """
        with self._use_open():
            return dict(self.engine.sleep(level))

    def wake(self) -> dict[str, float]:
        """Allocate what `sleep` released, and return the seconds of each part. `resume` follows."""
        with self._use_open():
            return dict(self.engine.wake())

    def _stream(self, request: Request, processor: OutputProcessor) -> Iterator[TextDelta]:
        """Submit the request and yield an empty delta; then yield the request's deltas."""
        pending = self._deltas_by_stream[request.id] = deque()
        try:
            with self._use_open():
                self._submit(request)
            yield TextDelta(0, "", ())
            while not processor.is_finished:
                if not pending:
                    with self._use_alone() as raise_pending:
                        while not pending:
                            raise_pending()
                            self._pass_to_streams(self._step())
                yield processor.process(pending.popleft())
        finally:
            self._drop_stream(request)

    def _create_request(
        self, prompt: Prompt, params: SamplingParams | None, **fields: Unpack[PromptFields]
    ) -> Request:
        self._check_open()
        self._check_running()
        if params is None:
            params = self.get_default_sampling_params()
        request = create_request(next(self._ids), self.tokenizer, prompt, params, **fields)
        self.engine.check(request)
        return request

    def _submit(self, request: Request) -> None:
        self.engine.submit(request)
        self._timings.add(request, time.monotonic())
        self._open_ids.add(request.id)

    def _step(self) -> Sequence[Delta]:
        """Run one step of the engine, in which all open requests advance."""
        self._abort_dropped()
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
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> RequestOutput:
        """Return the whole output of a turn. Raises InvalidRequest."""
        fields = self._fields_of_turn(fields)
        (output,) = self._llm.generate([prompt], params, use_tqdm=False, **fields)
        return output

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[PromptFields],
    ) -> Iterator[TextDelta]:
        """Yield deltas of a turn as they come. Dropping the iterator aborts the turn."""
        return self._llm.stream(prompt, params, **self._fields_of_turn(fields))

    def end(self) -> bool:
        """End the session, and return whether it was open. A later turn would open it again."""
        return self._llm.end_session(self.session_id)

    def _fields_of_turn(self, fields: PromptFields) -> PromptFields:
        return {**fields, "session_id": self.session_id}
