"""Outputs: from the Deltas of a request to the text of its choices.

Owns both ways to text: a delta at a time for a stream, tens of tokens at a time for a batch.
Knows no engine and no thread.

    Delta ──OutputProcessor──► TextDelta ──append──► RequestOutput    a stream: text as it comes
    Delta ──OutputBatch──────────────────extend────► RequestOutput    a batch: text at its end, of
                                         decode_ahead                 which most was decoded before

Always true: both ways give the same text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from forge.request import (
    INITIAL_WEIGHTS,
    NOTHING_CACHED,
    CachedTokens,
    Delta,
    FinishReason,
    OutputWeights,
    Request,
    SamplingParams,
    TokenLogprob,
)
from forge.stop_strings import create_stop_detokenizer
from forge.timings import ChoiceTimings
from forge.tokenizer import Detokenizer, Tokenizer

DECODE_INTERVAL = 32
"""Calls of `OutputBatch.decode_ahead` after which it decodes the new tokens of the same choice."""


class StopMatch(NamedTuple):
    """Token or stop string that ended a choice.

    matched        id of the token, or the stop string; None if neither ended the choice
    is_end_token   `matched` is the tokenizer's end token, and the request does not ignore it
    """

    matched: int | str | None = None
    is_end_token: bool = False

    @property
    def reason(self) -> int | str | None:
        """Return what matched, or None for the end token: `stop_reason` in vLLM."""
        return None if self.is_end_token else self.matched


NO_STOP_MATCH = StopMatch()


class TextDelta(NamedTuple):
    """Text and tokens that one choice gained since its previous delta.

    text            text that is certain now; "" while a character or a stop string is incomplete
    finish_reason   "stop", "length", "abort" or "error" in the last delta of a choice, else None
    error           what went wrong when finish_reason is "error"
    cached_tokens   those of the prompt, in the last delta of the choice that ran first
    weights         weights that the choice was sampled with, in its last delta
    timings         its times, in its last delta, where the request returns them
    stop_match      token or stop string that ended the choice, in its last delta
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    cached_tokens: CachedTokens = NOTHING_CACHED
    weights: OutputWeights = INITIAL_WEIGHTS
    timings: ChoiceTimings | None = None
    stop_match: StopMatch = NO_STOP_MATCH


@dataclass(slots=True)
class ChoiceOutput:
    """A continuation of a prompt.

    weights      version of the weights at its end, and how many tokens are of earlier ones
    timings      its times, where the request returns them
    stop_match   token or stop string that ended it
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    weights: OutputWeights = INITIAL_WEIGHTS
    timings: ChoiceTimings | None = None
    stop_match: StopMatch = NO_STOP_MATCH

    @property
    def stop_reason(self) -> int | str | None:
        """Stop string or stop id that ended it; None for the end token and for any other end."""
        return self.stop_match.reason

    def append(self, delta: TextDelta) -> None:
        """Add the delta to this choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.error = delta.error
        self.weights = delta.weights
        self.timings = delta.timings
        self.stop_match = delta.stop_match


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations. `text` and the other shortcuts are the first choice's.

    cached_tokens   tokens of the prompt that were in a cache, by tier
    """

    prompt_token_ids: list[int]
    choices: list[ChoiceOutput]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: CachedTokens = NOTHING_CACHED

    @classmethod
    def empty(cls, request: Request) -> Self:
        """Return an output without tokens that has one choice for each of the request's `n`."""
        return cls(list(request.prompt), [ChoiceOutput(i) for i in range(request.params.n)])

    @property
    def text(self) -> str:
        """Text of the first choice, without its stop string."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Output ids of the first choice, including its end token."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Reason that the first choice ended, or None."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Entries for each token of the first choice, if the request has `logprobs`."""
        return self.choices[0].logprobs

    @property
    def weight_version(self) -> str:
        """Version of the weights at the end of the first choice."""
        return self.choices[0].weights.version

    def append(self, delta: TextDelta) -> None:
        """Add the delta to its choice."""
        self.choices[delta.choice].append(delta)
        self.prompt_logprobs += delta.prompt_logprobs
        self.cached_tokens = self.cached_tokens.plus(delta.cached_tokens)


class OutputProcessor:
    """Turns the Deltas of one request into text, and tracks which of its choices are open."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self._params = params
        self._tokenizer = tokenizer
        self._streams = {
            choice: create_stop_detokenizer(tokenizer, request) for choice in range(params.n)
        }

    @property
    def is_finished(self) -> bool:
        """Return whether every choice has its finish reason."""
        return not self._streams

    def process(self, delta: Delta) -> TextDelta:
        """Return the delta with its text. A stop token has no text."""
        text = self._streams[delta.choice]
        text_tokens = delta.tokens if delta.stop_token is None else delta.tokens[:-1]
        parts = [text.push(token) for token in text_tokens]
        stop_match = NO_STOP_MATCH
        if delta.finish is not None:
            del self._streams[delta.choice]
            parts.append(text.flush())
            stop_match = _find_stop_match(delta, text.matched_stop, self._params, self._tokenizer)
        return TextDelta(
            delta.choice,
            "".join(parts),
            delta.tokens,
            None if delta.finish is None else delta.finish.value,
            delta.logprobs,
            delta.prompt_logprobs,
            delta.error,
            delta.cached_tokens,
            delta.weights,
            delta.timings,
            stop_match,
        )

    def finish(self, finish_reason: str, error: str | None) -> list[TextDelta]:
        """End every open choice with this reason, after the engine sent its last delta."""
        deltas = [
            TextDelta(choice, text.flush(), (), finish_reason, error=error)
            for choice, text in self._streams.items()
        ]
        self._streams.clear()
        return deltas


class _ChoiceDetokenizer:
    """Detokenizer of an open choice, and the text so far.

    is_ended   the choice has its whole text
    """

    __slots__ = ("_choice", "_detokenizer", "_num_decoded", "_parts", "is_ended")

    def __init__(self, choice: ChoiceOutput, detokenizer: Detokenizer) -> None:
        self.is_ended = False
        self._choice = choice
        self._detokenizer = detokenizer
        self._num_decoded = 0
        self._parts: list[str] = []

    def decode(self) -> None:
        """Decode the tokens that came since the last call."""
        tokens = self._choice.token_ids
        self._parts.append(self._detokenizer.extend(tokens[self._num_decoded :]))
        self._num_decoded = len(tokens)

    def end(self, tokens: Sequence[int]) -> str:
        """Return the whole text.

        tokens   those of the choice, without its stop token
        """
        self.is_ended = True
        rest = self._detokenizer.extend(tokens[self._num_decoded :])
        return "".join((*self._parts, rest, self._detokenizer.flush()))


class OutputBatch:
    """Outputs of several requests, which grow with each step. A choice has its text when it ends.

    outputs        one for each request, in order
    num_finished   requests of which every choice has ended
    """

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        self.outputs = [RequestOutput.empty(request) for request in requests]
        self.num_finished = 0
        self._tokenizer = tokenizer
        self._open_requests = {request.id: request for request in requests}
        self._open_outputs = {
            request.id: output for request, output in zip(requests, self.outputs, strict=True)
        }
        self._num_finished_tokens = 0
        self._open_detokenizers: deque[_ChoiceDetokenizer] = deque()
        self._detokenizer_by_choice: dict[tuple[int, int], _ChoiceDetokenizer] = {}

    @property
    def is_finished(self) -> bool:
        """Return whether every choice of every request has its finish reason."""
        return not self._open_outputs

    def count_tokens(self) -> int:
        """Return the number of output tokens so far. O(open requests)."""
        return self._num_finished_tokens + sum(map(_num_tokens, self._open_outputs.values()))

    def extend(self, deltas: Iterable[Delta]) -> None:
        """Add a step's deltas to their choices. Deltas of other requests are ignored."""
        open_outputs = self._open_outputs
        # One loop without a call: at 256 rows a call each is a percent of a short step.
        for delta in deltas:
            output = open_outputs.get(delta.request_id)
            if output is None:
                continue
            choice = output.choices[delta.choice]
            if not choice.token_ids:
                self._start_text(delta.request_id, choice)
            choice.token_ids += delta.tokens
            if delta.logprobs:
                choice.logprobs += delta.logprobs
            if delta.prompt_logprobs:
                output.prompt_logprobs += delta.prompt_logprobs
            if delta.finish is not None:
                choice.finish_reason, choice.error = delta.finish.value, delta.error
                choice.weights, choice.timings = delta.weights, delta.timings
                output.cached_tokens = output.cached_tokens.plus(delta.cached_tokens)
                self._finish(choice, delta)

    def decode_ahead(self) -> None:
        """Decode the new tokens of a few open choices. Called once a step.

        Each is decoded every DECODE_INTERVAL calls, while the device computes. Otherwise the device
        would wait for all texts when many choices end in one step.
        """
        for _ in range(-(-len(self._open_detokenizers) // DECODE_INTERVAL)):
            detokenizer = self._open_detokenizers.popleft()
            if not detokenizer.is_ended:
                detokenizer.decode()
                self._open_detokenizers.append(detokenizer)

    def _start_text(self, request_id: int, choice: ChoiceOutput) -> None:
        key = (request_id, choice.index)
        if key not in self._detokenizer_by_choice:
            previous = self._open_requests[request_id].previous_token
            detokenizer = _ChoiceDetokenizer(choice, self._tokenizer.create_detokenizer(previous))
            self._detokenizer_by_choice[key] = detokenizer
            self._open_detokenizers.append(detokenizer)

    def _finish(self, choice: ChoiceOutput, last: Delta) -> None:
        """Write the text of a choice that has ended, and drop its request if it was the last."""
        request, output = self._open_requests[last.request_id], self._open_outputs[last.request_id]
        tokens = choice.token_ids if last.stop_token is None else choice.token_ids[:-1]
        params, tokenizer = request.params, self._tokenizer
        text = self._detokenizer_by_choice.pop((request.id, choice.index)).end(tokens)
        choice.text, stop = cut_output(text, tokenizer, request, tokens)
        choice.stop_match = _find_stop_match(last, stop, params, tokenizer)
        if all(each.finish_reason is not None for each in output.choices):
            del self._open_requests[request.id], self._open_outputs[request.id]
            self.num_finished += 1
            self._num_finished_tokens += _num_tokens(output)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(choice.token_ids) for choice in output.choices)


def _find_stop_match(
    delta: Delta, stop: str | None, params: SamplingParams, tokenizer: Tokenizer
) -> StopMatch:
    """Return what ended a choice.

    delta   its last one
    stop    stop string that its text ends at, or None
    """
    # The last bytes may be no character, and U+FFFD in their place may complete a stop string.
    if delta.finish is not FinishReason.STOP:
        return NO_STOP_MATCH
    token = delta.stop_token
    if token is None:
        return StopMatch(stop)
    return StopMatch(token, token == tokenizer.eos_token and not params.ignore_eos)


def cut_output(
    text: str, tokenizer: Tokenizer, request: Request, tokens: Sequence[int]
) -> tuple[str, str | None]:
    """Return an output's text and `matched_stop`, as a StopStringDetokenizer has them.

    text     of all tokens
    tokens   without the stop token

    A stop string is searched in the whole text, and only the tokens before `min_tokens` are decoded
    again: the first character that may complete a stop string comes after their text.
    """
    params = request.params
    if not params.stop or len(tokens) < params.min_tokens:
        return text, None
    num_unstoppable = max(0, params.min_tokens - 1)
    detokenizer = tokenizer.create_detokenizer(request.previous_token)
    first_end = 1 + len(detokenizer.extend(tokens[:num_unstoppable]))
    return cut_at_stop(text, params.stop, first_end)


def cut_at_stop(text: str, stops: Iterable[str], first_end: int) -> tuple[str, str | None]:
    """Return the text before the stop string that ends first, and this stop string or None.

    It ends at `first_end` or later. Of two that end at the same character, the longer one is cut.
    """
    starts = ((text.find(stop, max(0, first_end - len(stop))), stop) for stop in stops)
    matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    if not matches:
        return text, None
    _, start, stop = min(matches)
    return text[:start], stop


def merge_deltas(deltas: Iterable[TextDelta]) -> list[TextDelta]:
    """Return one delta per choice with the content of all: a slow reader gets them together."""
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
            new.cached_tokens,
            new.weights,
            new.timings,
            new.stop_match,
        )
    return list(by_choice.values())
