"""Structured output: the tokens that keep an output to a JSON schema, a regex or a grammar.

Owns the compiled structures of an engine. Knows no model or scheduler: a matcher reads the sampled
tokens and returns the mask of the tokens that may come next. llguidance decides what a schema or a
regex allows. It works on bytes, and visits each token of the vocabulary in a trie.

    Structure ──compile──► grammar, cached ──matcher──► mask ─► sample ─► feed ─► mask ─► ...
                           any thread                           a token           True: complete

Three limits bound the cost of a structure. This module checks the text: its length, properties and
numbers. llguidance's fuel bounds each mask and each token. Limits on processor time and memory
bound the rest: forge.grammar_sandbox first compiles the structures of a server's clients in
separate processes. Compiling recurses in Rust, where a stack overflow ends the process. So its
thread has a stack that no text within the limits can fill.

Masks over a trie of tokens: Willard and Louf 2023 (Outlines); Moskal et al. 2024 (llguidance).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from ctypes import addressof, create_string_buffer
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from itertools import cycle
from math import lcm
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from forge.errors import InvalidRequest
from forge.feedback_queue import COMPILE_LEVELS, QueueLevel
from forge.mask_threads import MIN_MASKS, MaskThreads
from forge.reasoning_matcher import ReasoningMasks, ReasoningMatcher
from forge.request import Reasoning, Structure, StructureKind, num_properties
from forge.schema_check import SchemaCheck
from forge.schema_grammar import prepare_schema
from forge.sequence import GrammarMatcher
from forge.strict_json import SchemaViolation
from forge.tokenizer import Tokenizer, Vocabulary

MAX_SCHEMA_PROPERTIES = 400
"""Properties of all objects of a schema. Any subset of optional ones may come, which costs time."""

MAX_GRAMMAR_KEYS = 2000
"""Keys of all JSON in a grammar, which may contain schemas."""

MAX_SCHEMA_NUMBER = 2**53
"""llguidance counts with floats, which are inexact beyond this; with -2**63 it does not end."""

UPPER_BOUND_KEYS = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
"""Keys for which a 64-bit maximum is common and means that there is no limit."""

MAX_COMMON_MULTIPLE = 10_000
"""Least common multiple of all multipleOf in a schema: each of its remainders is a state."""

STACK_BYTES = 256 * 2**20
"""Stack of a compiling thread. Unused pages take no memory; the longest rules need 64 MiB."""

CACHE_MIB = 128
"""Memory of the compiled structures kept for later requests. Each counts with the limit of its
level: sixteen of the first level, or eight of the last. The lexer that its outputs share grows
while they are matched, to 24 MiB after 30,000 tokens at the first level. With several threads that
compute masks, a structure takes as much memory for each."""

MAX_CHECKED_STRUCTURES = 1024
"""Structures that another process compiled, kept as their hashes."""

MAX_REASONINGS = 8
"""Kinds of reasoning whose masks are kept. A model has one or two."""

PARSER_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    step_lexer_fuel=60_000,
    step_max_items=4_000,
    verbose_errors=False,
)
"""Bounds on the cost of a mask: with the library's own limits one took 8 times as long as the
slowest mask of wiki/Structured-output.md. A row of an object with MAX_SCHEMA_PROPERTIES optional
ones has 1,607 items. With less fuel, Unicode classes within longer text, such as
`"name": "[\\w]+",` between others, run out of it over a vocabulary of 150,000 tokens."""

NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""The end of every grammar. Without it, a mask first writes out all text that must follow, and no
fuel bounds that: see wiki/Structured-output.md."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _CompiledGrammar:
    """A grammar before its first token, and the mask of that token, shared by many outputs.

    lexers       equal matchers in turn, each with its own lexer; an output is a copy of the next
    level        the level within whose limits it was compiled
    check        of complete outputs, where the structure is a schema
    """

    lexers: Iterator[llguidance.LLMatcher]
    first_mask: bytes
    level: QueueLevel
    check: SchemaCheck | None


class _AddedToken(NamedTuple):
    """A token that was added to a matcher: the mask after it, the end of the output or an error."""

    token: int
    mask: bytes = b""
    is_complete: bool = False
    error: Exception | None = None

    @property
    def needs_mask(self) -> bool:
        """True where a mask must follow and has not been computed yet."""
        return not (self.error or self.is_complete or self.mask)


class LLGuidanceMatcher(GrammarMatcher):
    """Matches one output. Raises ValueError where its structure becomes too complex to match.

    mask      ids that may come next: id t is bit t % 8 of byte t // 8
    lexer     the matcher that this one is a copy of. Its copies share a lexer and the lock of it
    matcher   the copy, which follows this output

    An output that is complete by the masks is compared with its schema once more: a parser of JSON
    merges names that a grammar distinguishes. SchemaViolation is raised where it does not fit.
    """

    def __init__(
        self,
        grammar: _CompiledGrammar,
        lexer: llguidance.LLMatcher,
        token_bytes: Callable[[int], bytes],
        forbidden_ids: Iterable[int],
        on_error: Callable[[], None],
    ) -> None:
        self.lexer = lexer
        self._grammar = grammar  # keeps it alive for outputs that start meanwhile
        self.matcher = lexer.deep_copy()
        self._mask_buffer = create_string_buffer(len(grammar.first_mask))
        self._forbidden_ids = tuple(forbidden_ids)
        self._on_error = on_error
        self._added: _AddedToken | None = None
        self._token_bytes = token_bytes
        self._tokens: list[int] = []
        self.mask = self._clear_forbidden(grammar.first_mask)

    def start_feed(self, token: int) -> bool:
        """Add the token of the next `feed` ahead of it; return whether it needs a mask.

        `feed` raises the errors. Before it, `finish_feed` must be called where a mask is needed.
        """
        if self._added is None:  # else a step that was interrupted has added it
            try:
                self._added = self._add(token)
            except Exception as error:  # the commit ends this output alone
                self._added = _AddedToken(token, error=error)
        return self._added.needs_mask

    def finish_feed(self, mask: bytes) -> None:
        """Set the mask that `matcher` computed after the token of `start_feed`."""
        assert self._added is not None, "no token was added"
        self._added = self._check_mask(self._added, self._clear_forbidden(mask))

    def feed(self, token: int) -> bool:
        """Add a token that the mask allows; return True once the output is complete."""
        added, self._added = self._added, None
        if added is None:
            added = self._add(token)
        assert added.token == token, f"token {added.token} was added and {token} is fed"
        if added.needs_mask:
            added = self._check_mask(added, self._compute_mask(self.matcher))
        if added.error is not None:
            self._on_error()
            raise added.error
        self._tokens.append(token)
        if added.is_complete:
            self.check_end()
        else:
            self.mask = added.mask
        return added.is_complete

    def check_end(self) -> None:
        """Raise SchemaViolation where the output is complete and does not have its schema.

        Raises ValueError where comparing takes too long.
        """
        check = self._grammar.check
        if check is not None and self.matcher.is_accepting():
            text = b"".join(map(self._token_bytes, self._tokens)).decode()
            violation = check.find_violation(text)
            if violation is not None:
                raise SchemaViolation(violation)

    def _add(self, token: int) -> _AddedToken:
        if not self.matcher.consume_token(token):
            problem = f"token {token} does not fit: {_describe_error(self.matcher)}"
            return _AddedToken(token, error=ValueError(problem))
        return _AddedToken(token, is_complete=self.matcher.is_stopped())

    def _check_mask(self, added: _AddedToken, mask: bytes) -> _AddedToken:
        """Return the token with the mask, or with the error if the mask is too complex."""
        if self.matcher.is_error():
            return added._replace(error=ValueError(_describe_error(self.matcher)))
        return added._replace(mask=mask)

    def draft_masks(self, drafts: Iterable[int]) -> list[bytes]:
        """Return the masks after the first 1, 2, ... drafts, up to one that cannot follow or ends.

        The matcher itself stays where it is.
        """
        matcher, mask, masks = self.matcher.deep_copy(), self.mask, list[bytes]()
        for token in drafts:
            is_allowed = mask[token >> 3] >> (token & 7) & 1 and matcher.consume_token(token)
            if not is_allowed or matcher.is_stopped():
                break
            mask = self._compute_mask(matcher)
            if matcher.is_error():
                break
            masks.append(mask)
        return masks

    def _compute_mask(self, matcher: llguidance.LLMatcher) -> bytes:
        """Return the ids that may come next after what `matcher` has read.

        llguidance writes into memory of this object: `compute_bitmask` makes the bytes one by one,
        which takes longer than most masks.
        """
        buffer = self._mask_buffer
        matcher.unsafe_compute_mask_ptr(addressof(buffer), len(buffer))
        return self._clear_forbidden(buffer.raw)

    def _clear_forbidden(self, mask: bytes) -> bytes:
        if not self._forbidden_ids:
            return mask
        cleared = bytearray(mask)
        for token in self._forbidden_ids:
            cleared[token >> 3] &= ~(1 << (token & 7))
        return bytes(cleared)


class _VocabularyAdapter:
    """A vocabulary in the interface that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids, (self.eos_token_id, *_) = vocabulary

    def __call__(self, text: str | bytes) -> list[int]:
        """Raise AssertionError: only forced text is encoded, and no text is forced."""
        raise AssertionError("a structure needs no encoder")


def build_token_trie(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Build the token trie that structures compile against. 0.5 s and 70 MiB for 150,000 tokens."""
    adapter = llguidance.TokenizerWrapper(_VocabularyAdapter(vocabulary))
    return llguidance.LLTokenizer(adapter, eos_token=vocabulary.end_ids)


class LLGuidanceBackend:
    """The structures of one engine's requests. Any thread may call it.

    end_ids       ids that end an output; they come where the structure may be complete
    num_threads   threads that compute masks: see `advance_matchers`

    Outputs with one structure share its lexer, whose number of states is limited. A matcher that
    fails drops the structure, and the next request compiles it again.

    A compiled structure lives while a matcher or a caller of `compile` refers to it. The most
    recently used ones are kept as well, up to CACHE_MIB.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_ids: Iterable[int],
        num_threads: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = list(dict.fromkeys(end_ids))
        self._token_trie: llguidance.LLTokenizer | None = None
        self._compilable_levels: OrderedDict[bytes, QueueLevel] = OrderedDict()
        self._grammars: WeakValueDictionary[Structure, _CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[Structure, _CompiledGrammar] = OrderedDict()
        self._compiling: dict[Structure, Future[_CompiledGrammar]] = {}
        self._reasoning_masks: OrderedDict[Reasoning, ReasoningMasks] = OrderedDict()
        self._lock = threading.Lock()
        self._num_threads = num_threads
        self._threads = MaskThreads(num_threads) if num_threads > 1 else None

    def mark_compilable(self, structure: Structure, level: QueueLevel) -> None:
        """Record that another process compiled the structure within the limits of the level."""
        with self._lock:
            self._compilable_levels[digest_structure(structure)] = level
            if len(self._compilable_levels) > MAX_CHECKED_STRUCTURES:
                self._compilable_levels.popitem(last=False)

    def compilable_level(self, structure: Structure) -> QueueLevel | None:
        """Return the level within whose limits another process compiled the structure, or None.

        The structure becomes the most recently used one.
        """
        digest = digest_structure(structure)
        with self._lock:
            if digest in self._compilable_levels:
                self._compilable_levels.move_to_end(digest)
            return self._compilable_levels.get(digest)

    def check(self, structure: Structure) -> None:
        """Raise InvalidRequest unless an output can have the structure. May take some seconds."""
        if self.compilable_level(structure) is None:
            self.compile(structure)

    def compile(self, structure: Structure, level: QueueLevel | None = None) -> object:
        """Compile the structure in this process; return an object that keeps it compiled.

        level   the level within whose limits it compiles, or None if that is unknown

        Raises InvalidRequest. May take some seconds.
        """
        grammar = self._get_or_compile(structure._replace(reasoning=None), level)
        if structure.reasoning is None:
            return grammar
        return grammar, self._get_or_build_masks(structure.reasoning)

    def compiled_grammar(self, structure: Structure) -> object | None:
        """Return the compiled structure, or None where `create_matcher` would compile it."""
        reasoning, shape = structure.reasoning, structure._replace(reasoning=None)
        if reasoning is not None and reasoning not in self._reasoning_masks:
            return None
        return self._grammars.get(shape)

    def vocabulary(self) -> Vocabulary:
        """Return the tokens that structures are compiled for."""
        tokenizer = self._tokenizer
        return Vocabulary(
            [tokenizer.token_bytes(token) for token in range(self._vocab_size)],
            sorted(tokenizer.special_token_ids),
            self._end_ids,
        )

    def create_matcher(self, structure: Structure, *, allow_end: bool) -> GrammarMatcher:
        """Return the matcher of a new output.

        allow_end   whether an end id may come where the text is complete
        """
        shape = structure._replace(reasoning=None)
        grammar = self._get_or_compile(shape, None)

        def forget() -> None:
            with self._lock:
                if self._grammars.get(shape) is grammar:
                    del self._grammars[shape]
                    self._recent.pop(shape, None)

        forbidden_ids, lexer = () if allow_end else self._end_ids, next(grammar.lexers)

        def create() -> LLGuidanceMatcher:
            return LLGuidanceMatcher(grammar, lexer, self._text_bytes, forbidden_ids, forget)

        if structure.reasoning is None:
            return create()
        return ReasoningMatcher(self._get_or_build_masks(structure.reasoning), create)

    def _text_bytes(self, token: int) -> bytes:
        """Return what the token adds to an output: an end id adds nothing."""
        return b"" if token in self._end_ids else self._tokenizer.token_bytes(token)

    def _get_or_build_masks(self, reasoning: Reasoning) -> ReasoningMasks:
        """Return the masks of this reasoning. The most recently used ones are kept."""
        masks = self._reasoning_masks.get(reasoning)
        if masks is None:
            masks = ReasoningMasks(reasoning, self.vocabulary().tokens, self._end_ids)
        with self._lock:
            masks = self._reasoning_masks.setdefault(reasoning, masks)
            self._reasoning_masks.move_to_end(reasoning)
            if len(self._reasoning_masks) > MAX_REASONINGS:
                self._reasoning_masks.popitem(last=False)
        return masks

    def advance_matchers(self, pairs: Sequence[tuple[object, int]]) -> None:
        """Do the work of the next `feed` of each matcher, which has this token.

        pairs   `structure_matcher` of outputs of this backend, and the token of each

        The masks are computed on `num_threads` threads. Outputs of one structure have one of as
        many lexers in turn; a structure of the last level has one, since it takes long to compile.
        With one thread, and for a few matchers, nothing is done: `feed` does it.
        """
        if self._threads is None or len(pairs) < MIN_MASKS:
            return
        matchers = [
            matcher
            for matcher, token in pairs
            if isinstance(matcher, LLGuidanceMatcher) and matcher.start_feed(token)
        ]
        if matchers:
            masks = self._threads.compute(
                [(each.lexer, each.matcher) for each in matchers], len(matchers[0].mask)
            )
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.finish_feed(mask)

    def _get_or_compile(self, structure: Structure, level: QueueLevel | None) -> _CompiledGrammar:
        """Return the compiled structure. Simultaneous calls with one structure compile it once."""
        with self._lock:
            grammar = self._grammars.get(structure)
            if grammar is not None:
                self._mark_recent(structure, grammar)
                return grammar
            token_trie = self._token_trie = self._token_trie or build_token_trie(self.vocabulary())
            running = self._compiling.get(structure)
            future = self._compiling.setdefault(structure, Future())
        if running is None:
            # A client's slow structure would occupy the thread of its level several times as long.
            num_lexers = 1 if level == COMPILE_LEVELS[-1] else self._num_threads
            run_with_deep_stack(
                lambda: compile_grammar(
                    structure, token_trie, level or COMPILE_LEVELS[-1], num_lexers
                ),
                future,
            )
            with self._lock:
                del self._compiling[structure]
                if future.exception() is None:
                    self._grammars[structure] = future.result()
                    self._mark_recent(structure, future.result())
        return future.result()

    def _mark_recent(self, structure: Structure, grammar: _CompiledGrammar) -> None:
        """Mark the structure as the most recently used; drop the oldest beyond CACHE_MIB."""
        self._recent[structure] = grammar
        self._recent.move_to_end(structure)
        while (
            sum(kept_grammar.level.memory_mib for kept_grammar in self._recent.values()) > CACHE_MIB
        ):
            self._recent.popitem(last=False)


def digest_structure(structure: Structure) -> bytes:
    """Return a digest of the kind and the text: a table's key that a long text does not enlarge."""
    return sha256(
        f"{structure.kind.value} {structure.text}".encode(errors="surrogatepass")
    ).digest()


T = TypeVar("T")

_STACK_SIZE_LOCK = threading.Lock()


def run_with_deep_stack(work: Callable[[], T], future: Future[T]) -> None:
    """Run `work` in a thread with a stack of STACK_BYTES; set its result or error in `future`."""

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="forge-structure")
    with _STACK_SIZE_LOCK:  # the size applies to all threads that the process starts
        old_size = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(old_size)
    thread.join()


def compile_grammar(
    structure: Structure,
    token_trie: llguidance.LLTokenizer,
    level: QueueLevel,
    num_lexers: int = 1,
) -> _CompiledGrammar:
    """Compile a structure, once for each of its lexers. Raises InvalidRequest where no text has it.

    Recurses in Rust: the thread needs a stack of STACK_BYTES.
    """
    text = _build_grammar(structure)

    def create() -> llguidance.LLMatcher:
        return llguidance.LLMatcher(token_trie, text, log_level=0, limits=PARSER_LIMITS)

    matcher = create()
    probe = matcher.deep_copy()
    mask_bytes = -(-token_trie.vocab_size // 32) * 4  # `compute_bitmask` may add a word
    first_mask = b"" if matcher.is_error() else probe.compute_bitmask()[:mask_bytes]
    if probe.is_error() or not any(first_mask):
        raise _invalid_structure_error(structure.kind, _describe_error(probe))
    lexers = cycle([matcher, *(create() for _ in range(num_lexers - 1))])
    check = None
    if structure.kind is StructureKind.JSON_SCHEMA:
        check = SchemaCheck(json.loads(structure.text))
        check.compile_patterns()  # the thread of the steps compares
    return _CompiledGrammar(lexers, first_mask, level, check)


def _build_grammar(structure: Structure) -> str:
    kind, text, _ = structure
    match kind:
        case StructureKind.REGEX:
            return _wrap_lark(f"start: {write_regex_rule(text)}")
        case StructureKind.GRAMMAR:
            count = len(re.findall(r'"\s*:', text))
            if count > MAX_GRAMMAR_KEYS:
                raise _invalid_structure_error(
                    kind, f"it has {count} keys in JSON, at most {MAX_GRAMMAR_KEYS}"
                )
            _check_embedded_schemas(text)
            return _wrap_lark(text)
        case StructureKind.JSON_SCHEMA:
            return _build_schema_grammar(text)


def write_regex_rule(pattern: str) -> str:
    r"""Return the right side of a grammar's rule for text that the whole pattern matches.

    `\d` is 0 to 9, as in the pattern of a schema: a digit of another script is in no JSON number.
    """
    return f"/{llguidance.regex_to_lark(pattern, use_ascii='d')}/"


def convert_ebnf(text: str) -> str:
    """Return a grammar in the notation of llama.cpp, `root ::= ...`, as one in llguidance's Lark.

    Raises ValueError for what is not such a grammar.
    """
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library has no common one
        raise ValueError(ascii(str(error)[:200])[1:-1]) from None


def _build_schema_grammar(text: str) -> str:
    kind = StructureKind.JSON_SCHEMA
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise _invalid_structure_error(kind, "it is not JSON, or nested too deep") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _invalid_structure_error(kind, "it is not an object")
    count = num_properties(schema)
    if count > MAX_SCHEMA_PROPERTIES:
        raise _invalid_structure_error(
            kind, f"it has {count} properties, at most {MAX_SCHEMA_PROPERTIES}"
        )
    _check_numbers(kind, schema)
    try:
        prepared = prepare_schema(schema)
    except RecursionError:
        raise _invalid_structure_error(kind, "it is nested too deep") from None
    return _wrap_lark("start: @json", {"name": "json", "json_schema": prepared})


def _wrap_lark(text: str, *others: dict[str, Any]) -> str:
    """Return a grammar without forced text, and the grammars that it refers to, as JSON."""
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": text + NO_FORCING}, *others]})


def _check_embedded_schemas(grammar: str) -> None:
    """Raise InvalidRequest for schemas in a grammar with numbers that no schema may have."""
    kind, decoder = StructureKind.GRAMMAR, json.JSONDecoder()
    schemas = []
    for match in re.finditer(r"%json\s*", grammar):
        try:
            schemas.append(decoder.raw_decode(grammar, match.end())[0])
        except (ValueError, RecursionError):
            raise _invalid_structure_error(
                kind, "after %json there is no JSON, or one nested too deep"
            ) from None
    _check_numbers(kind, schemas)


def _check_numbers(kind: StructureKind, schema: Any) -> None:
    """Raise InvalidRequest for numbers that llguidance gets wrong. Not recursive."""
    multiples: list[Decimal] = []
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        key, item = stack.pop()
        if isinstance(item, dict):
            stack += item.items()
        elif isinstance(item, list):
            stack += [(key, each) for each in item]
        elif isinstance(item, int | float) and not isinstance(item, bool):
            upper_bound = 2**63 if key in UPPER_BOUND_KEYS else MAX_SCHEMA_NUMBER
            if not -MAX_SCHEMA_NUMBER <= item <= upper_bound:
                raise _invalid_structure_error(
                    kind, f"it has a number beyond {MAX_SCHEMA_NUMBER}, where none is exact"
                )
            if key == "multipleOf" and item > 0:
                multiples.append(Decimal(str(item)))
    if _common_multiple(multiples) > MAX_COMMON_MULTIPLE:
        raise _invalid_structure_error(
            kind, f"its multipleOf have no common multiple up to {MAX_COMMON_MULTIPLE}"
        )


def _common_multiple(multiples: list[Decimal]) -> int:
    """Return the least common multiple, in units of the last decimal place that any number has.

    A result above MAX_COMMON_MULTIPLE may be any number above it.
    """
    num_decimals = max((-int(step.as_tuple().exponent) for step in multiples), default=0)
    if num_decimals > 20:
        return MAX_COMMON_MULTIPLE + 1
    common = 1
    for step in multiples:
        common = lcm(common, int(step.scaleb(max(num_decimals, 0))))
        if common > MAX_COMMON_MULTIPLE:
            break
    return common


def _describe_error(matcher: llguidance.LLMatcher) -> str:
    """Return why the matcher failed, in one printable line."""
    lines = matcher.get_error().partition("<non-verbose/>")[0].splitlines() or [""]
    if lines[0].startswith("NoExtension"):
        return "no text matches it"
    # An error in a regex begins with a drawing of its position.
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return ascii(line.removeprefix("error: ").strip()[:200])[1:-1]


def _invalid_structure_error(kind: StructureKind, problem: str) -> InvalidRequest:
    return InvalidRequest(
        "structure",
        f"the {kind.value} cannot be used: {problem}",
        f"Fix the {kind.value}",
        f"invalid_{kind.value}",
    )
