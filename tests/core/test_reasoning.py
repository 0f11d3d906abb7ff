"""A structure after reasoning: masks at the markers, drafts over them, and whole outputs."""

from __future__ import annotations

import json
from random import Random

import pytest

from forge.errors import InvalidRequest
from forge.mask_threads import MIN_MASKS
from forge.reasoning_matcher import ReasoningMasks
from forge.recording import encode_request, parse_request
from forge.request import MAX_MARKER_CHARS, Reasoning, Request, SamplingParams, Structure
from forge.sequence import GrammarMatcher
from forge.structured_output import LLGuidanceBackend
from tests.core.reasoning_worlds import BACKEND, MARKERS, PIECES, TOKENIZER, run_world

THINK = Reasoning("<think>", "</think>")
OPENED = Reasoning("", "</think>")


def create_matcher(structure: Structure, reasoning: Reasoning) -> GrammarMatcher:
    return BACKEND.create_matcher(structure._replace(reasoning=reasoning), allow_end=True)


def pieces_in(mask: bytes) -> set[str]:
    return {piece for t, piece in enumerate(PIECES) if mask[t >> 3] >> (t & 7) & 1}


def feed(matcher: GrammarMatcher, *pieces: str) -> bool:
    """Feed the pieces and return the result of the last; no earlier one ends the output."""
    *before, last = map(PIECES.index, pieces)
    assert not any(map(matcher.feed, before))
    return matcher.feed(last)


def test_reasoning_has_any_token_but_an_end_and_one_with_text_after_the_marker() -> None:
    matcher = create_matcher(Structure.regex("12"), OPENED)
    overlong = {"</think>{", "</think>[1"}
    assert pieces_in(matcher.mask) == set(PIECES) - overlong - {"<|end|>"}
    feed(matcher, "{", "</", "think")
    assert pieces_in(matcher.mask) == set(PIECES) - overlong - {">{", ">\n", "<|end|>"}
    feed(matcher, "</", "t", "h", "i", "n")
    assert pieces_in(matcher.mask) == set(PIECES) - overlong - {"k>1", "<|end|>"}


def test_the_structure_begins_with_the_token_after_the_end_marker() -> None:
    for spelling in (("</think>",), ("</", "think>"), ("</think", ">"), ("<", "/", "think", ">")):
        matcher = create_matcher(Structure.regex("12?"), OPENED)
        assert feed(matcher, "12", *spelling) is False
        assert pieces_in(matcher.mask) == {"1", "12"}
        assert feed(matcher, "1") is False
        assert pieces_in(matcher.mask) == {"2", "<|end|>"}
        assert feed(matcher, "2") is True


def test_an_output_may_begin_with_reasoning_or_with_its_structure() -> None:
    start = {"<", "<think>", "<think>{"}
    matcher = create_matcher(Structure.regex("12"), THINK)
    assert pieces_in(matcher.mask) == {*start, "1", "12"}
    assert feed(matcher, "12") is True
    matcher = create_matcher(Structure.regex("12"), THINK)
    feed(matcher, "<")
    assert pieces_in(matcher.mask) == {"t", "think", "think>"}
    feed(matcher, "think>", "</think>")
    assert pieces_in(matcher.mask) == {"1", "12"}
    matcher = create_matcher(Structure.regex("12"), THINK)
    feed(matcher, "<think>{", "</think>")
    assert pieces_in(matcher.mask) == {"1", "12"}


def test_reasoning_wins_where_the_structure_begins_like_its_marker() -> None:
    structure = Structure.json_schema({"type": "array", "items": {"const": 1}, "minItems": 1})
    matcher = create_matcher(structure, Reasoning("[", "]"))
    feed(matcher, "[", "a")
    feed(matcher, "]")
    assert pieces_in(matcher.mask) == {"["}
    assert feed(create_matcher(Structure.regex("<think>12"), THINK), "<think>", "12") is False
    undecided = create_matcher(Structure.regex("<th12"), THINK)
    feed(undecided, "<", "t", "h")
    assert pieces_in(undecided.mask) == {"1", "12", "i"}
    assert undecided.draft_masks([PIECES.index("1")]) == []
    feed(undecided, "1")
    assert pieces_in(undecided.mask) == {"2"}


def test_a_token_that_fits_neither_is_an_error() -> None:
    for piece in ("</think>{", "<|end|>"):
        with pytest.raises(ValueError, match="does not fit"):
            feed(create_matcher(Structure.regex("1"), OPENED), piece)
    with pytest.raises(ValueError, match="does not fit"):
        feed(create_matcher(Structure.regex("1"), THINK), "a")


@pytest.mark.parametrize("reasoning", MARKERS, ids=str)
def test_masks_of_drafts_are_those_of_the_committed_tokens(reasoning: Reasoning) -> None:
    """Drafts of up to eight tokens that the masks allow, from any point of an output."""
    rng, num_masks = Random(str(reasoning)), 0
    structure = Structure.json_schema({"type": "array", "items": {"type": "boolean"}})
    for _ in range(30):
        tokens: list[int] = []
        masks: list[bytes] = []
        committed = create_matcher(structure, reasoning)
        for _ in range(16):
            masks.append(committed.mask)
            allowed = [t for t in range(len(PIECES)) if committed.mask[t >> 3] >> (t & 7) & 1]
            likely = [t for t in allowed if PIECES[t] in (reasoning.begin, reasoning.end)]
            tokens.append(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
            if tokens[-1] == 0 or committed.feed(tokens[-1]):
                break
        else:
            masks.append(committed.mask)
        start = rng.randrange(len(tokens))
        matcher = create_matcher(structure, reasoning)
        assert not any(map(matcher.feed, tokens[:start]))
        found = matcher.draft_masks(tokens[start : start + 8])
        assert found == masks[start + 1 : start + 1 + len(found)]
        num_masks += len(found)
    assert num_masks > 30


def test_masks_of_markers_are_of_the_length_of_a_structures_masks() -> None:
    for count in (31, 32, 33):
        masks = ReasoningMasks(OPENED, [b"a"] * count, ())
        assert len(masks.mask(0)) == -(-count // 32) * 4


def test_outputs_that_end_inside_their_reasoning_have_no_structure() -> None:
    matcher = create_matcher(Structure.regex("1"), OPENED)
    assert matcher.draft_masks([PIECES.index("a"), 0, PIECES.index("a")]) == [matcher.mask]


@pytest.mark.parametrize("seed", range(12))
def test_outputs_after_reasoning_fit_their_schemas(seed: int) -> None:
    reached = run_world(seed)
    assert sum(count for key, count in reached.items() if "valid" in key) >= 1, reached


def test_a_recorded_request_keeps_its_markers() -> None:
    for reasoning in (None, THINK, OPENED):
        structure = Structure.regex("a")._replace(reasoning=reasoning)
        request = Request(1, (1,), SamplingParams(structure=structure))
        assert parse_request(json.loads(json.dumps(encode_request(request)))) == request


@pytest.mark.parametrize(
    "reasoning", [("<", ">"), Reasoning("<", ""), Reasoning("a", "b" * (MAX_MARKER_CHARS + 1))]
)
def test_markers_out_of_bounds_are_refused(reasoning: Reasoning) -> None:
    structure = Structure.regex("a")._replace(reasoning=reasoning)
    with pytest.raises(InvalidRequest, match="structure: "):
        SamplingParams(structure=structure)


def test_threads_compute_the_masks_of_structures_whose_reasoning_has_ended() -> None:
    backend = LLGuidanceBackend(TOKENIZER, len(PIECES), (0,), num_threads=2)
    structure = Structure.regex("12{3}")._replace(reasoning=OPENED)
    matchers = [backend.create_matcher(structure, allow_end=True) for _ in range(2 * MIN_MASKS)]
    reasoning, ended = matchers[::2], matchers[1::2]
    for matcher in ended:
        feed(matcher, "</think>")
    one, two = PIECES.index("1"), PIECES.index("2")
    assert all(each.structure_matcher is None for each in reasoning)
    structure_matchers = [each.structure_matcher for each in ended]
    backend.advance_matchers([(each, one) for each in structure_matchers if each is not None])
    assert all(matcher.feed(one) is False for matcher in [*reasoning, *ended[1:]])
    assert [pieces_in(matcher.mask) for matcher in ended[1:]] == [{"2"}] * (MIN_MASKS - 1)
    assert all("</think>" in pieces_in(matcher.mask) for matcher in reasoning)
    with pytest.raises(AssertionError, match=f"token {one} was added and {two} is fed"):
        ended[0].feed(two)
