"""LLM: text in, text out, on one Engine driven by the caller's thread.

Owns the way from text to requests and from Deltas back to text, which AsyncLLM shares. Knows no
thread, event loop or HTTP.

    prompt ──tokenize──► Request ──► Engine.step() ──► Delta ──Transcript──► TextDelta ──► output
"""

from __future__ import annotations

import itertools
import runpy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypedDict, Unpack, cast

from forge.engine import Engine
from forge.errors import EngineDead, InvalidConfig, InvalidRequest
from forge.models.load import Loaded, load
from forge.overhead import overhead
from forge.policy import POLICIES, Policy
from forge.recording import Recording, header_of
from forge.request import Delta, Request, SamplingParams, TokenLogprob
from forge.tokenizer import TextStream, Tokenizer
from forge.version import VERSION

Prompt = str | list[int]

DEFAULT_PARAMS = SamplingParams()


class Options(TypedDict, total=False):
    """Keyword arguments of LLM and AsyncLLM, named as the flags of `forge serve`.

    Those that are not given are the model's to choose. The fields of EngineConfig come first, then
    those of DeviceOptions, then how tokens are proposed ahead of the model.

    draft_model              a model that proposes them: a name as the model's; --speculative-model
    num_speculative_tokens   most of them in a step, 1 to 16; 4 if not given
    speculative_method       draft, or ngram, which looks for what followed the same tokens before
    acceptance               coupled: token for token the output without drafts; rejection: more
                             drafts are accepted, and the output's distribution is the same

    record    file that gets all that the engine's decisions depend on: `forge sim replay` reads it
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    depth: int
    enable_prefix_caching: bool
    seed: int
    device: str
    dtype: str
    gpu_memory_utilization: float
    load_format: str
    enforce_eager: bool
    torch_compile: bool
    draft_model: str
    num_speculative_tokens: int
    speculative_method: str
    acceptance: str
    record: str


class TextDelta(NamedTuple):
    """What one choice gained since the delta before.

    text            text that is certain now; "" while a character or a stop string is incomplete
    finish_reason   "stop", "length", "abort" or "error" with the last delta of a choice, else None
    error           what went wrong when finish_reason is "error"
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class ChoiceOutput:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None

    def gain(self, delta: TextDelta) -> None:
        """The delta is part of this choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.error = delta.error


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations. `text` and its like are those of the first choice."""

    prompt_token_ids: list[int]
    choices: list[ChoiceOutput]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def begun(cls, request: Request) -> Self:
        """The output of a request that has gained nothing yet: a choice for each asked."""
        return cls(list(request.prompt), [ChoiceOutput(i) for i in range(request.params.n)])

    @property
    def text(self) -> str:
        """Text of the first choice, without its stop."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Output ids of the first choice, its end token included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """One entry per token of the first choice, where asked."""
        return self.choices[0].logprobs

    def gain(self, delta: TextDelta) -> None:
        """The delta is part of this output."""
        self.choices[delta.choice].gain(delta)
        self.prompt_logprobs += delta.prompt_logprobs


class Transcript:
    """Turns one request's Deltas into text, and knows which of its choices are open."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self._open = {
            choice: TextStream(tokenizer.detokenizer(), params.stop, params.min_tokens)
            for choice in range(params.n)
        }

    @property
    def ended(self) -> bool:
        """Every choice has its finish reason."""
        return not self._open

    def read(self, delta: Delta) -> TextDelta:
        """The delta with its text. A token that ended the choice has none."""
        text = self._open[delta.choice]
        shown = delta.tokens if delta.stop_token is None else delta.tokens[:-1]
        parts = [text.push(token) for token in shown]
        if delta.finish is not None:
            del self._open[delta.choice]
            parts.append(text.flush())
        return TextDelta(
            delta.choice,
            "".join(parts),
            delta.tokens,
            None if delta.finish is None else delta.finish.value,
            delta.logprobs,
            delta.prompt_logprobs,
            delta.error,
        )

    def end(self, finish_reason: str, error: str | None) -> list[TextDelta]:
        """Every open choice ends like this, for the engine will say no more."""
        last = [
            TextDelta(choice, text.flush(), (), finish_reason, error=error)
            for choice, text in self._open.items()
        ]
        self._open.clear()
        return last


def merged(deltas: Iterable[TextDelta]) -> list[TextDelta]:
    """One delta per choice that says the same: what waited for a slow reader leaves together."""
    by_choice: dict[int, TextDelta] = {}
    for new in deltas:
        old = by_choice.get(new.choice)
        if old is None:
            by_choice[new.choice] = new
            continue
        by_choice[new.choice] = TextDelta(
            new.choice,
            old.text + new.text,
            old.token_ids + new.token_ids,
            new.finish_reason,
            old.logprobs + new.logprobs,
            old.prompt_logprobs + new.prompt_logprobs,
            new.error,
        )
    return list(by_choice.values())


def find_policy(choice: str | Policy) -> Policy:
    """The policy of that name, or the one that the named file defines as `policy`."""
    if isinstance(choice, Policy):
        return choice
    if choice in POLICIES:
        return POLICIES[choice]
    names = ", ".join(POLICIES)
    if not isinstance(choice, str) or not choice.endswith(".py"):
        raise InvalidConfig("policy", f"{choice!r} is not known", f"Use {names} or a FILE.py")
    if not Path(choice).is_file():
        raise InvalidConfig("policy", f"there is no file {choice!r}", f"Use {names} or a FILE.py")
    try:
        policy = runpy.run_path(choice).get("policy")
    except (Exception, SystemExit) as fault:
        raise InvalidConfig("policy", f"{choice} does not run: {fault!r}", "Mend it") from fault
    if not isinstance(policy, Policy) or not all(map(callable, policy)):
        raise InvalidConfig(
            "policy", f"{choice} does not define `policy`", "Assign it a forge.policy.Policy"
        )
    return policy


def open_loaded(
    model: str, policy: str | Policy, options: Options, closing: ExitStack
) -> tuple[Engine, Loaded]:
    """An engine and the named model it is on, open until `closing` is. Raises InvalidConfig."""
    chosen = find_policy(policy)
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise InvalidConfig(unknown[0], "there is no such option", f"Options are: {known}")
    given = {name: value for name, value in options.items() if name != "record"}
    loaded = _with_overhead(closing.enter_context(load(model, given)))
    tape, path = None, options.get("record")
    if path is not None:
        named = policy if isinstance(policy, str) else "a policy of its own"
        tape = _recording(path, named, loaded, closing)
    return Engine(loaded.model, loaded.config, loaded.tokenizer, chosen, tape=tape), loaded


def _with_overhead(loaded: Loaded) -> Loaded:
    """Where the costs of drafts were timed, the engine's own part is among them."""
    speculation = loaded.config.speculation
    if speculation is None or speculation.costs is None or not speculation.costs.verify:
        return loaded
    costs = speculation.costs._replace(host=overhead(loaded.config))
    config = replace(loaded.config, speculation=replace(speculation, costs=costs))
    return loaded._replace(config=config)


def _recording(path: str, policy: str, loaded: Loaded, closing: ExitStack) -> Recording:
    """A recording in a new file, whole once `closing` is closed. Raises InvalidConfig."""
    try:
        file = closing.enter_context(open(path, "w", encoding="utf-8", buffering=2**20))
    except OSError as fault:
        raise InvalidConfig(
            "record", f"{path!r} cannot be written: {fault.strerror}", "Name another file"
        ) from None
    model = loaded.model
    header = header_of(loaded.config, model.vocab_size(), model.eos_token(), policy, VERSION)
    recording = Recording(file.write, time.perf_counter_ns, header)
    closing.callback(recording.close)
    return recording


def open_engine(
    model: str, policy: str | Policy, options: Options, closing: ExitStack
) -> tuple[Engine, Tokenizer]:
    """An engine on the named model, open until `closing` is. Raises InvalidConfig."""
    engine, loaded = open_loaded(model, policy, options, closing)
    return engine, loaded.tokenizer


def tokenize(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt given as text or as ids. Raises InvalidRequest."""
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
    if not isinstance(prompt, list | tuple) or any(isinstance(item, str) for item in prompt):
        raise InvalidRequest(
            "prompt",
            f"{str(prompt)[:64]!r} is neither text nor a list of token ids",
            "Give str, list[str], list[int] or list[list[int]]",
            "invalid_type",
        )
    return tuple(prompt)


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list that is not all integers is several prompts; whatever else is given is one."""
    several = isinstance(given, list | tuple) and not (given and all(type(i) is int for i in given))
    return list(cast(Sequence[Prompt], given)) if several else [cast(Prompt, given)]


def _numbered(refused: InvalidRequest, index: int) -> InvalidRequest:
    """The same refusal; it says which of several prompts it is about."""
    name = refused.field
    field = f"{name}[{index}]" if name in ("prompt", "params") else f"params[{index}].{name}"
    return type(refused)(field, refused.problem, refused.remedy, refused.code)


class LLM:
    """Offline generation. One thread; what it holds is freed by `close` or a `with` block.

    device   what the model runs on
    """

    def __init__(
        self, model: str = "hash", *, policy: str | Policy = "fcfs", **options: Unpack[Options]
    ) -> None:
        self._closing = ExitStack()
        self.engine, loaded = open_loaded(model, policy, options, self._closing)
        self.tokenizer, self.device = loaded.tokenizer, loaded.device
        self._ids = itertools.count()
        self._open: dict[int, deque[Delta]] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Open requests are dropped, new ones refused, and the model is closed."""
        self._closed = True
        for request_id in list(self._open):
            self.engine.abort(request_id)
        self._closing.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
    ) -> list[RequestOutput]:
        """One output per prompt, in order; all prompts share the engine's steps.

        `params` is one for all or one each. Raises InvalidRequest before anything runs.
        """
        listed = _prompts(prompts)
        if isinstance(params, list | tuple):
            each = list(params)
        else:
            each = [cast(SamplingParams, params)] * len(listed)
        if len(each) != len(listed):
            raise InvalidRequest(
                "params", f"{len(each)} for {len(listed)} prompts", "Give one, or one for each"
            )
        requests = []
        for index, (prompt, asked) in enumerate(zip(listed, each, strict=True)):
            try:
                requests.append(self._request(prompt, asked))
            except InvalidRequest as refused:
                raise (refused if len(listed) == 1 else _numbered(refused, index)) from None
        transcripts = [Transcript(request, self.tokenizer) for request in requests]
        outputs = [RequestOutput.begun(request) for request in requests]
        try:
            for request in requests:
                self._submit(request)
            for request, transcript, output in zip(requests, transcripts, outputs, strict=True):
                for delta in self._deltas(request.id):
                    output.gain(transcript.read(delta))
                    if transcript.ended:
                        break
        finally:
            for request in requests:
                self._drop(request.id)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
    ) -> Iterator[TextDelta]:
        """Deltas as they come. Dropping the iterator aborts the request, read from or not."""
        request = self._request(prompt, params)
        deltas = self._stream(request, Transcript(request, self.tokenizer))
        next(deltas)  # a generator that has begun runs its `finally` when it is dropped
        return deltas

    def _stream(self, request: Request, transcript: Transcript) -> Iterator[TextDelta]:
        """The request is submitted with the first, empty delta."""
        self._submit(request)
        try:
            yield TextDelta(0, "", ())
            for delta in self._deltas(request.id):
                yield transcript.read(delta)
                if transcript.ended:
                    return
        finally:
            self._drop(request.id)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if self._closed:
            raise EngineDead("the engine was closed. Open another LLM")
        request = Request(next(self._ids), tokenize(self.tokenizer, prompt), params)
        self.engine.check(request)
        return request

    def _submit(self, request: Request) -> None:
        self.engine.submit(request)
        self._open[request.id] = deque()

    def _deltas(self, request_id: int) -> Iterator[Delta]:
        """This request's deltas without end; other open requests advance beside it."""
        mine = self._open[request_id]
        while True:
            while mine:
                yield mine.popleft()
            for delta in self.engine.step():
                if delta.request_id in self._open:
                    self._open[delta.request_id].append(delta)

    def _drop(self, request_id: int) -> None:
        self.engine.abort(request_id)
        self._open.pop(request_id, None)
