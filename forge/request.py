"""Requests and deltas: what a caller submits and what comes back. Values only.

Owns the fields, their bounds and their defaults. Knows no scheduler, cache or model; bounds that
need the model (vocabulary, longest sequence) are checked by the engine at admission.

    Request ──submit──► engine ──one Delta per step that gained──► consumer
                                 the last Delta of a choice carries its finish reason
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from forge.errors import InvalidRequest
from forge.schema_keywords import drop_neutral_keywords
from forge.timings import ChoiceTimings

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_FAST_LOGPROBS = 20
"""Most likely tokens that a device returns in its fast path. EngineConfig has the limit."""
ALL_LOGPROBS = 2**31 - 1
"""Number of log probabilities that is no less than any vocabulary."""
MAX_LISTED_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SESSION_ID_CHARS = 128
MAX_PAUSE_S = 86_400.0
MAX_STRUCTURE_CHARS = 65_536
MAX_PATTERN_CHARS = 8_192
"""Longest regex, and longest grammar of a client: compiling some takes the square of it."""
MAX_MARKER_CHARS = 64
"""Longest marker of reasoning: masks are kept for each of its beginnings."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less overflows."""


class FinishReason(Enum):
    """Reason for which a choice ended. `value` is the word that users see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __repr__(self) -> str:
        return f"FinishReason.{self.name}"


def _excerpt(value: object) -> str:
    """Return the value as one short printable piece of a message, whatever a client sent."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    if isinstance(value, int | float):
        return str(value)  # a number reads as one; anything else is quoted
    return ascii(str(value)[:64])


def _invalid_value(field: str, value: object, limit: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(field, f"{_excerpt(value)} is not {limit}", remedy)


def _parse_list(field: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise _invalid_value(field, values, "a list", "Give a list")
    return tuple(values)


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _invalid_value(
            field, value, f"an integer from {low} to {high}", "Give a value in range"
        )


def _check_float(field: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN compares false with everything
        raise _invalid_value(
            field, value, f"a number from {low:g} to {high:g}", "Give a value in range"
        )


def _parse_token_ids(field: str, values: object, max_ids: int = MAX_LISTED_IDS) -> tuple[int, ...]:
    ids = _parse_list(field, values)
    if len(ids) > max_ids:
        raise InvalidRequest(
            field, f"{len(ids)} ids, at most {max_ids}", "Give fewer", "too_many_items"
        )
    for token in ids:
        if type(token) is not int or token < 0:
            raise InvalidRequest(
                field,
                f"{_excerpt(token)} is not a token id",
                "Give ids from 0",
                "token_out_of_range",
            )
    return ids


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs = _parse_list("logit_bias", value.items() if isinstance(value, Mapping) else value)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _invalid_value("logit_bias", pair, "an id and a bias", "Give {id: bias}")
    pairs = tuple((token, bias) for token, bias in pairs)
    _parse_token_ids("logit_bias", (token for token, _ in pairs))
    for _, bias in pairs:
        _check_float("logit_bias", bias, -100.0, 100.0)
    return tuple(sorted(dict(pairs).items()))


def _parse_stop_strings(value: object) -> tuple[str, ...]:
    stop = (value,) if isinstance(value, str) else _parse_list("stop", value)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            "stop",
            f"{len(stop)} strings, at most {MAX_STOP_STRINGS}",
            "Give fewer",
            "too_many_items",
        )
    for text in stop:
        if not isinstance(text, str) or not text:
            raise _invalid_value("stop", text, "a non-empty string", "Leave it out")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                "stop",
                f"{len(text)} characters, at most {MAX_STOP_CHARS}",
                "Shorten it",
                "string_too_long",
            )
    return stop


class StructureKind(Enum):
    """Language of a Structure. `value` is its name in errors."""

    JSON_SCHEMA = "schema"
    REGEX = "regex"
    GRAMMAR = "grammar"

    def __repr__(self) -> str:
        return f"StructureKind.{self.name}"


class Reasoning(NamedTuple):
    """Text that a model writes before its answer, between two markers.

    begin   marker that an output may begin with; "" where the output begins after it
    end     marker after which the answer begins
    """

    begin: str
    end: str


class Structure(NamedTuple):
    """Shape that an output must have. forge.structured_output knows which tokens keep to it.

    text        a JSON schema as JSON, a regular expression without look-around, or a grammar in
                llguidance's dialect of Lark
    reasoning   what may come before it, without any shape; None: nothing
    """

    kind: StructureKind
    text: str
    reasoning: Reasoning | None = None

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool) -> Self:
        """Return the structure of a JSON value that the schema allows. Raises InvalidRequest."""
        if has_more_values(schema, MAX_STRUCTURE_CHARS):  # json.dumps would hold Python's lock
            raise InvalidRequest(
                "structure",
                f"the schema has more than {MAX_STRUCTURE_CHARS} values",
                "Simplify it",
                "invalid_schema",
            )
        try:
            text = json.dumps(drop_neutral_keywords(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise InvalidRequest(
                "structure", "the schema is not JSON", "Fix it", "invalid_schema"
            ) from None
        return cls(StructureKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the structure of text that the whole pattern matches."""
        return cls(StructureKind.REGEX, pattern)

    @classmethod
    def grammar(cls, text: str) -> Self:
        """Return the structure of text that the grammar's rule `start` derives."""
        return cls(StructureKind.GRAMMAR, text)

    def encode(self) -> list[object]:
        """Return the structure as a JSON value."""
        markers = [] if self.reasoning is None else [list(self.reasoning)]
        return [self.kind.value, self.text, *markers]

    @classmethod
    def decode(cls, values: Sequence[object]) -> Self:
        """Return the structure of the JSON value that `encode` made of it."""
        kind, text, *markers = values
        reasoning = Reasoning(*cast(list[str], markers[0])) if markers else None
        return cls(StructureKind(kind), cast(str, text), reasoning)


class ThinkingBudget(NamedTuple):
    """Most tokens of the reasoning of an output, and how it is ended there.

    num_tokens   tokens between the markers, from 0
    reasoning    markers between which they are
    end_ids      tokens that are forced after them. Their text ends with the end marker
    """

    num_tokens: int
    reasoning: Reasoning
    end_ids: tuple[int, ...]

    def encode(self) -> list[object]:
        """Return the budget as a JSON value."""
        return [self.num_tokens, list(self.reasoning), list(self.end_ids)]

    @classmethod
    def decode(cls, values: Sequence[Any]) -> Self:
        """Return the budget of the JSON value that `encode` made of it."""
        num_tokens, markers, end_ids = values
        return cls(num_tokens, Reasoning(*markers), tuple(end_ids))


def has_more_values(value: object, max_values: int) -> bool:
    """Return whether JSON has more values than this, itself included. O(max_values).

    Not recursive: it may be deep.
    """
    num_visited, stack = 0, [value]
    while stack and num_visited + len(stack) <= max_values:
        num_visited += 1
        item = stack.pop()
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return num_visited + len(stack) > max_values


def num_properties(schema: object) -> int:
    """Return how many properties all objects of the schema have. Not recursive: it may be deep."""
    count, stack = 0, [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            properties = item.get("properties")
            count += len(properties) if isinstance(properties, dict) else 0
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return count


def _check_reasoning(field: str, reasoning: object) -> None:
    if not isinstance(reasoning, Reasoning) or not all(isinstance(each, str) for each in reasoning):
        raise _invalid_value(field, reasoning, "a forge.request.Reasoning", "Give two markers")
    if not reasoning.end or max(map(len, reasoning)) > MAX_MARKER_CHARS:
        raise _invalid_value(
            field,
            reasoning.end,
            f"a marker of 1 to {MAX_MARKER_CHARS} characters",
            "Give the text that ends the reasoning",
        )


def _check_structure(structure: object) -> None:
    if not isinstance(structure, Structure):
        raise _invalid_value(
            "structure", structure, "a forge.Structure", "Give forge.Structure.regex(...)"
        )
    kind, text, reasoning = structure
    if not isinstance(kind, StructureKind) or not isinstance(text, str):
        raise _invalid_value("structure", text, "the text of a structure", "Give a string")
    if reasoning is not None:
        _check_reasoning("structure", reasoning)
    max_chars = MAX_PATTERN_CHARS if kind is StructureKind.REGEX else MAX_STRUCTURE_CHARS
    if len(text) > max_chars:
        raise InvalidRequest(
            "structure",
            f"the {kind.value} has {len(text)} characters, at most {max_chars}",
            "Simplify it",
            f"invalid_{kind.value}",
        )


def _check_thinking_budget(budget: object, structure: Structure | None) -> None:
    field = "thinking_budget"
    if not isinstance(budget, ThinkingBudget):
        raise _invalid_value(
            field, budget, "a forge.request.ThinkingBudget", "Give the budget and its end"
        )
    _check_int(field, budget.num_tokens, 0, 2**31 - 1)
    _check_reasoning(field, budget.reasoning)
    if type(budget.end_ids) is not tuple or not _parse_token_ids(field, budget.end_ids):
        raise _invalid_value(
            field, budget.end_ids, "a tuple with one id or more", "Give the tokens of the end"
        )
    if structure is not None and structure.reasoning != budget.reasoning:
        raise InvalidRequest(
            field,
            "the structure has no reasoning with these markers before it",
            "Give the structure the same reasoning",
        )


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams:
    """Rules for choosing tokens and for ending a request. Complete and in bounds once constructed.

    n                    choices; each draws with its own noise, choice 0 as if it were alone
    temperature          0 to 2; under 1e-5 is greedy (ties go to the lower id)
    top_k                keep the k most likely; 0 or -1 keeps all, 1 is greedy
    top_p                keep the smallest set of most likely tokens with this mass
    min_p                keep tokens at least this fraction as likely as the most likely
    repetition_penalty   divides positive and multiplies negative logits of any token seen
    presence_penalty     subtracted once for each token already in the output
    frequency_penalty    subtracted per occurrence in the output
    logit_bias           added to logits: {id: bias}, -100 to 100
    allowed_token_ids    every other token is impossible
    seed                 64-bit signed; None takes one from the engine's seed and the request
    max_tokens           most output tokens; None: as many as fit; 0: only the prompt is computed
    min_tokens           end ids, stop ids and stop strings cannot end the output before this many
    stop                 strings that end the output; they are not part of the text
    stop_token_ids       ids that end the output; their text is not part of the text
    ignore_eos           the model's end ids neither end the output nor are masked
    logprobs             with each token its log probability and the n most likely; raw logits. -1:
                         all of the vocabulary
    prompt_logprobs      the same for prompt tokens after the first; bypasses the prefix cache
    structure            the output is of this shape and ends with it; None: any
    logprob_token_ids    with `logprobs`: each token comes with the log probabilities of these ids,
                         in this order and each once, in place of the most likely ones
    thinking_budget      most tokens of the output's reasoning, after which its end is forced

    Raises InvalidRequest naming the field. Order of arithmetic: forge.sampling.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None
    logprob_token_ids: tuple[int, ...] = ()
    thinking_budget: ThinkingBudget | None = None

    if TYPE_CHECKING:
        # The constructor takes more types than the fields have: `__post_init__` makes them tuples.
        def __init__(
            self,
            n: int = 1,
            temperature: float = 1.0,
            top_k: int = 0,
            top_p: float = 1.0,
            min_p: float = 0.0,
            repetition_penalty: float = 1.0,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
            allowed_token_ids: Iterable[int] | None = None,
            seed: int | None = None,
            max_tokens: int | None = 16,
            min_tokens: int = 0,
            stop: str | Iterable[str] = (),
            stop_token_ids: Iterable[int] = (),
            ignore_eos: bool = False,
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            structure: Structure | None = None,
            logprob_token_ids: Iterable[int] = (),
            thinking_budget: ThinkingBudget | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        # A frozen value is normalised once, here.
        set_field = object.__setattr__
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        set_field(self, "top_k", max(self.top_k, 0))
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _invalid_value("top_p", self.top_p, "above 0", "Use temperature 0 for greedy")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        set_field(self, "logit_bias", _parse_logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            set_field(
                self,
                "allowed_token_ids",
                _parse_token_ids("allowed_token_ids", self.allowed_token_ids),
            )
            if not self.allowed_token_ids:
                raise _invalid_value(
                    "allowed_token_ids", (), "a list with one id or more", "Leave it out"
                )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        max_tokens = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        _check_int("min_tokens", self.min_tokens, 0, max_tokens)
        set_field(self, "stop", _parse_stop_strings(self.stop))
        set_field(self, "stop_token_ids", _parse_token_ids("stop_token_ids", self.stop_token_ids))
        if type(self.ignore_eos) is not bool:
            raise _invalid_value("ignore_eos", self.ignore_eos, "true or false", "Give a boolean")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), -1, ALL_LOGPROBS)
                if getattr(self, name) == -1:
                    set_field(self, name, ALL_LOGPROBS)
        listed = _parse_token_ids(
            "logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS
        )
        set_field(self, "logprob_token_ids", tuple(dict.fromkeys(listed)))
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest(
                "logprob_token_ids", "the request has no logprobs", "Set logprobs as well"
            )
        if self.structure is not None:
            _check_structure(self.structure)
            if self.allowed_token_ids is not None:
                raise InvalidRequest(
                    "allowed_token_ids", "the output has a structure as well", "Give one of them"
                )
        if self.thinking_budget is not None:
            _check_thinking_budget(self.thinking_budget, self.structure)
            if self.allowed_token_ids is not None:
                raise InvalidRequest(
                    "allowed_token_ids",
                    "the reasoning has a budget as well, which forces its end",
                    "Give one of them",
                )

    def __repr__(self) -> str:
        """Return a text that builds an equal value. Fields at their default are left out."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return (
            f"SamplingParams({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"
        )

    @property
    def has_masks(self) -> bool:
        """True where a matcher says which tokens may come next."""
        return self.structure is not None or self.thinking_budget is not None

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken without a draw."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_filters(self) -> bool:
        """True where top-k, top-p or min-p may rule out a token."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def has_penalties(self) -> bool:
        """True where logits depend on earlier tokens beyond the model's own arithmetic."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt, and how to continue it.

    id                 unique among live requests; chosen by the caller (the engine's own callers
                       count)
    prompt             token ids, at least one; a range stays one, and is equal to no tuple of the
                       same ids; any other list becomes a tuple
    params             SamplingParams
    priority           lower goes first (vLLM's convention)
    cache_salt         only requests with the same salt share cached blocks
    arrival_s          seconds on the caller's clock, for policies; the engine never reads a clock
    tenant             sender; session ids of two tenants never meet
    session_id         session of which it is a turn, at most 128 characters; empty: none is named
    session_end        its session ends with it; needs `session_id`
    expected_pause_s   seconds until the session's next turn, 0 to 86,400; None: not known
    return_timings     the last Delta of each choice has its times
    external_id        id outside of the engine, such as that of an HTTP request; for recordings
    begins_text        the output begins a text, as the answer of a chat does; else it continues
                       that of the prompt

    The session fields are hints: they order admission and eviction, and hold no memory.
    """

    id: int
    prompt: tuple[int, ...] | range
    params: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    tenant: str = ""
    session_id: str = ""
    session_end: bool = False
    expected_pause_s: float | None = None
    return_timings: bool = False
    external_id: str = ""
    begins_text: bool = False

    @property
    def previous_token(self) -> int | None:
        """Token before the output in its text, or None where the output begins a text."""
        return None if self.begins_text else self.prompt[-1]

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, range):
            object.__setattr__(self, "prompt", _parse_list("prompt", self.prompt))
        if not self.prompt:
            raise InvalidRequest("prompt", "it is empty", "Give at least one token", "empty_prompt")
        _check_int("id", self.id, 0, 2**63 - 1)
        _check_float("arrival_s", self.arrival_s, -1e18, 1e18)
        if not isinstance(self.params, SamplingParams):
            raise _invalid_value(
                "params", self.params, "a SamplingParams", "Give forge.SamplingParams"
            )
        for name in ("cache_salt", "tenant", "session_id", "external_id"):
            if not isinstance(getattr(self, name), str):
                raise _invalid_value(name, getattr(self, name), "a string", "Give text")
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        for name in ("return_timings", "begins_text"):
            if type(getattr(self, name)) is not bool:
                value = getattr(self, name)
                raise _invalid_value(name, value, "true or false", "Give a boolean")
        self._check_session()

    def _check_session(self) -> None:
        if len(self.session_id) > MAX_SESSION_ID_CHARS:
            raise InvalidRequest(
                "session_id",
                f"{len(self.session_id)} characters, at most {MAX_SESSION_ID_CHARS}",
                "Shorten it",
                "string_too_long",
            )
        if type(self.session_end) is not bool:
            raise _invalid_value("session_end", self.session_end, "true or false", "Give a boolean")
        if self.session_end and not self.session_id:
            raise InvalidRequest(
                "session_end", "the request names no session", "Give session_id, or leave it out"
            )
        if self.expected_pause_s is not None:
            _check_float("expected_pause_s", self.expected_pause_s, 0.0, MAX_PAUSE_S)


class TokenLogprob(NamedTuple):
    """Log probability of one token under the raw logits, and those of other tokens.

    top   the most likely tokens, likeliest first, or the request's `logprob_token_ids`
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class CachedTokens(NamedTuple):
    """Tokens of a prompt that its request did not compute, by the tier that had them.

    Counted when the request first runs: what it computes again after a preemption counts no more.

    device    blocks on the device
    host      blocks in host memory
    disk      blocks in files, which were read for the request
    written   none of the above: full blocks of the prompt that the request computed and that the
              prefix cache did not have then
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        """Tokens that the request did not compute, of all tiers."""
        return self.device + self.host + self.disk

    def plus(self, other: CachedTokens) -> CachedTokens:
        """Return the sums, tier by tier."""
        return CachedTokens(*map(add, self, other))


NOTHING_CACHED = CachedTokens()


class OutputWeights(NamedTuple):
    """Weights that the tokens of a choice were sampled with.

    version            version at its end
    num_stale_tokens   first tokens of the choice, which were sampled with earlier weights
    """

    version: str = "0"
    num_stale_tokens: int = 0


INITIAL_WEIGHTS = OutputWeights()


class Delta(NamedTuple):
    """Gain of one choice of one request in one committed step.

    choice            0 to n - 1
    tokens            new output ids, in order; () when only prompt logprobs or an ending came
    finish            None while the choice goes on; the last Delta of a choice carries it
    stop_token        the id in `tokens` that ended the choice, whose text is left out
    logprobs          one entry per token where requested
    prompt_logprobs   entries for prompt positions computed by this step, in order, where requested
    error             what went wrong when `finish` is ERROR
    cached_tokens     those of the prompt, in the last Delta of the choice that ran first
    weights           weights that the choice was sampled with, in its last Delta
    timings           its times, in its last Delta, where the request returns them
    """

    request_id: int
    choice: int
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    cached_tokens: CachedTokens = NOTHING_CACHED
    weights: OutputWeights = INITIAL_WEIGHTS
    timings: ChoiceTimings | None = None


assert Delta._fields == (
    *("request_id", "choice", "tokens", "finish", "stop_token"),
    *("logprobs", "prompt_logprobs", "error", "cached_tokens", "weights", "timings"),
), "Scheduler.commit builds a Delta as a tuple of these fields"
