"""A budget of reasoning: masks and drafts at its end, and whole outputs with and without it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from forge.config import Speculation
from forge.engine import Engine
from forge.errors import InvalidRequest
from forge.models.hash import HashModel
from forge.policy import FCFS
from forge.recording import (
    RecordingWriter,
    build_header,
    encode_request,
    parse_request,
    read_entries,
)
from forge.replay_run import ReplayRun
from forge.request import (
    Reasoning,
    Request,
    SamplingParams,
    Structure,
    ThinkingBudget,
)
from forge.sequence import GrammarMatcher
from forge.thinking_budget import ThinkingBudgetMatcher
from tests.core.builders import config
from tests.core.reasoning_worlds import BACKEND, MARKERS, PIECES, TOKENIZER, PieceTokenizer

THINK, OPENED = Reasoning("<think>", "</think>"), Reasoning("", "</think>")
ENDS = {
    "</think>": (("</think>",), ("a", "\n", "</", "think>")),
    ">": ((">",), ("b", "k", ">")),
    "]": (("]",),),
    "a<a<b": (("a", "<", "a", "<", "b"),),
}
"""Texts that end each kind of reasoning, token by token."""
SIZE = {"vocab_size": len(PIECES), "block_size": 4, "num_blocks": 256}


def ids(*pieces: str) -> tuple[int, ...]:
    return tuple(map(PIECES.index, pieces))


def create_matcher(
    num_tokens: int, reasoning: Reasoning, *end: str, other: GrammarMatcher | None = None
) -> ThinkingBudgetMatcher:
    budget = ThinkingBudget(num_tokens, reasoning, ids(*(end or ("</think>",))))
    return ThinkingBudgetMatcher(budget, TOKENIZER.token_bytes, len(PIECES), other)


def pieces_in(mask: bytes) -> set[str]:
    return {piece for t, piece in enumerate(PIECES) if mask[t >> 3] >> (t & 7) & 1}


def feed(matcher: GrammarMatcher, *pieces: str) -> None:
    assert not any(matcher.feed(token) for token in ids(*pieces))


def test_the_end_is_forced_after_the_budget_and_every_token_is_free_elsewhere() -> None:
    matcher = create_matcher(2, OPENED, "a", "</think>")
    for pieces, expected in (
        ((), set(PIECES)),
        (("12",), set(PIECES)),
        (("<",), {"a"}),
        (("a",), {"</think>"}),
        (("</think>",), set(PIECES)),
        (("1", "1", "1"), set(PIECES)),
    ):
        feed(matcher, *pieces)
        assert pieces_in(matcher.mask) == expected


@pytest.mark.parametrize(
    ("before", "num_left"),
    [(("<think>",), 2), (("\n", "\n", "<think>"), 2), (("<think>", "1"), 1), (("<", "think>"), 2)],
)
def test_tokens_count_from_the_begin_marker_on(before: tuple[str, ...], num_left: int) -> None:
    matcher = create_matcher(2, THINK)
    feed(matcher, *before, *["1"] * (num_left - 1))
    assert pieces_in(matcher.mask) == set(PIECES)
    feed(matcher, "1")
    assert pieces_in(matcher.mask) == {"</think>"}


def test_no_tokens_may_come_between_the_markers_with_a_budget_of_none() -> None:
    assert pieces_in(create_matcher(0, OPENED).mask) == {"</think>"}
    matcher = create_matcher(0, THINK)
    assert pieces_in(matcher.mask) == set(PIECES)
    feed(matcher, "<think>")
    assert pieces_in(matcher.mask) == {"</think>"}


def test_an_output_without_reasoning_or_whose_reasoning_has_ended_is_free() -> None:
    for before in (("a", "<think>"), ("\n", "\n", "\n", "<think>"), ("<think>", "</think>")):
        matcher = create_matcher(1, THINK)
        feed(matcher, *before, "1", "1", "1")
        assert pieces_in(matcher.mask) == set(PIECES)


def test_a_token_that_is_not_the_forced_one_is_an_error() -> None:
    matcher = create_matcher(0, OPENED)
    with pytest.raises(ValueError, match="budget forces"):
        feed(matcher, "1")


def test_a_structure_begins_after_the_forced_end() -> None:
    structure = Structure.regex("12")._replace(reasoning=OPENED)
    other = BACKEND.create_matcher(structure, allow_end=True)
    matcher = create_matcher(1, OPENED, other=other)
    assert "<|end|>" not in pieces_in(matcher.mask) and matcher.structure_matcher is None
    feed(matcher, "[", "</think>")
    assert matcher.structure_matcher is other.structure_matcher is not None
    assert pieces_in(matcher.mask) == {"1", "12"}
    assert matcher.feed(PIECES.index("12")) is True


@pytest.mark.parametrize("schema", [None, {"type": "array", "items": {"type": "boolean"}}])
@pytest.mark.parametrize("reasoning", MARKERS, ids=str)
def test_masks_of_drafts_are_those_of_the_committed_tokens(
    reasoning: Reasoning, schema: dict[str, object] | None
) -> None:
    """Drafts that the masks allow, from any point of an output, and drafts that cannot follow."""
    rng, num_forced = Random(f"{reasoning} {schema}"), 0

    def create(num_tokens: int) -> ThinkingBudgetMatcher:
        other = None
        if schema is not None:
            structure = Structure.json_schema(schema)._replace(reasoning=reasoning)
            other = BACKEND.create_matcher(structure, allow_end=True)
        return create_matcher(num_tokens, reasoning, *ENDS[reasoning.end][-1], other=other)

    for num_tokens in range(12):
        committed, tokens = create(num_tokens), list[int]()
        masks: list[bytes] = []
        for _ in range(16):
            masks.append(committed.mask)
            allowed = [t for t in range(len(PIECES)) if committed.mask[t >> 3] >> (t & 7) & 1]
            num_forced += len(allowed) == 1
            begins = [t for t in allowed if PIECES[t] == reasoning.begin and t and not tokens]
            others = [t for t in allowed if t or schema is not None]  # an end id completes no mask
            tokens.append(rng.choice(begins or others))
            if tokens[-1] == 0 or committed.feed(tokens[-1]):
                break
        else:
            masks.append(committed.mask)
        start = rng.randrange(len(tokens))
        matcher = create(num_tokens)
        assert not any(map(matcher.feed, tokens[:start]))
        found = matcher.draft_masks(tokens[start : start + 8])
        assert found == masks[start + 1 : start + 1 + len(found)]
        for token, mask in zip(tokens[start:], masks[start + 1 :], strict=False):
            assert matcher.feed(token) is False and matcher.mask == mask  # the drafts left it as is
    assert num_forced > 5
    blocked = create_matcher(1, OPENED)
    assert len(blocked.draft_masks(ids("1", "2", "3"))) == 1
    assert len(blocked.draft_masks(ids("1", "</think>", "3"))) == 3


def draw_request(rng: Random, request_id: int) -> Request:
    """Draw a request with a budget, some with a structure. Most of them reason."""
    reasoning = rng.choice(MARKERS)
    structure = None
    if rng.random() < 0.4:
        structure = Structure.json_schema({"type": "array", "items": {"type": "integer"}})
        structure = structure._replace(reasoning=reasoning)
    begins = ids(reasoning.begin) if reasoning.begin else ()
    params = SamplingParams(
        max_tokens=rng.choice((3, 20, 28)),
        temperature=rng.choice((0.0, 1.0)),
        seed=request_id,
        logit_bias=dict.fromkeys(begins, 8.0),
        repetition_penalty=rng.choice((1.0, 1.2)),
        ignore_eos=rng.random() < 0.7,
        structure=structure,
        thinking_budget=ThinkingBudget(
            (0, 1, 2, 5, 12, 50)[request_id % 6], reasoning, ids(*rng.choice(ENDS[reasoning.end]))
        ),
    )
    prompt = tuple(rng.choices(range(1, len(PIECES)), k=rng.randint(1, 9)))
    return Request(request_id, prompt, params)


def serve(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    """Return the tokens of each request."""
    tokens: dict[int, list[int]] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.tokens)
    return tokens


def forced_from(tokens: list[int], budget: ThinkingBudget) -> int | None:
    """Return the index in an output of the first forced token; None: none is due.

    It is found in the text: the end follows so many tokens after the one that completes the begin
    marker, unless the reasoning ends before.
    """
    begin, end = budget.reasoning
    for start in range(len(tokens) + 1):
        text = "".join(PIECES[token] for token in tokens[:start])
        body = text.lstrip("\n")
        if len(text) - len(body) > 2 or not (body.startswith(begin) or begin.startswith(body)):
            return None
        if body.startswith(begin):
            at = start + budget.num_tokens
            text = "".join(PIECES[token] for token in tokens[:at])
            return None if end in text.lstrip("\n")[len(begin) :] or at > len(tokens) else at
    return None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", [None, "draft", "ngram"])
def test_outputs_are_those_without_a_budget_up_to_its_end_which_follows(
    method: str | None, depth: int
) -> None:
    """Nine requests in blocks for one, so that some are preempted in their reasoning."""
    rng, reached = Random(f"{method} {depth}"), Counter[str]()
    requests = [draw_request(rng, request_id) for request_id in range(9)]
    plain = [replace(each, params=replace(each.params, thinking_budget=None)) for each in requests]
    free = serve(Engine(HashModel(**SIZE), config(blocks=256), TOKENIZER), plain)
    draft = HashModel(**SIZE, agreement=0.9) if method == "draft" else None
    speculation = None if method is None else Speculation(num_tokens=3, method=method)
    engine = Engine(
        HashModel(**SIZE, draft=draft),
        config(blocks=10, depth=depth, max_num_seqs=6, speculation=speculation),
        TOKENIZER,
    )
    budgeted = serve(engine, requests)
    for request in requests:
        budget, tokens = request.params.thinking_budget, budgeted[request.id]
        assert budget is not None
        at = forced_from(tokens, budget)
        if at is None:
            assert tokens == free[request.id]
            reached["free"] += 1
        else:
            assert tokens[:at] == free[request.id][:at]
            end = tokens[at : at + len(budget.end_ids)]
            assert tuple(end) == budget.end_ids[: len(end)]
            assert len(end) == len(budget.end_ids) or len(tokens) == request.params.max_tokens
            reached["forced"] += bool(end)
            reached["structured"] += request.params.structure is not None
    assert min(reached[name] for name in ("free", "forced", "structured")) > 0, reached
    assert engine.scheduler.num_preemptions > 0
    # As under a structure, no draft model proposes: its masks would follow from unknown tokens.
    assert (engine.scheduler.num_draft_tokens > 0) == (method == "ngram")


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"logit_bias": {PIECES.index("</think>"): -100.0}}, 8),
        ({"stop_token_ids": ids("</think>"), "min_tokens": 6}, 8),
        ({"stop_token_ids": ids("</think>")}, 4),
        ({"frequency_penalty": 2.0, "repetition_penalty": 10.0}, 8),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_keeps_the_forced_end_away(
    fields: dict[str, Any], num_tokens: int, depth: int
) -> None:
    """With two choices, each of which has its own budget."""
    budget = ThinkingBudget(2, OPENED, ids("a", "</think>"))
    fixed: dict[str, Any] = {"max_tokens": 8, "seed": 1, "ignore_eos": True, "n": 2}
    params = SamplingParams(thinking_budget=budget, **fixed, **fields)
    engine = Engine(HashModel(**SIZE), config(depth=depth), TOKENIZER)
    found: tuple[list[int], list[int]] = ([], [])
    engine.submit(Request(0, (5, 6), params))
    while engine.has_work:
        for delta in engine.step():
            found[delta.choice].extend(delta.tokens)
    assert [each[2:4] for each in found] == [list(budget.end_ids)] * 2
    assert [len(each) for each in found] == [num_tokens] * 2


def test_a_recording_with_a_budget_replays() -> None:
    """Also of an output with stop strings, whose end is recorded, and with drafts."""
    requests = [draw_request(Random(f"recorded {each}"), each) for each in range(5)]
    stopping = replace(requests[0].params, structure=None, stop=("1", "a"), max_tokens=40)
    requests[0] = Request(0, requests[0].prompt, stopping)
    lines: list[str] = []
    options = config(blocks=18, depth=2, speculation=Speculation(num_tokens=3, method="ngram"))
    header = build_header(options, len(PIECES), 0, FCFS.__class__.__name__, "0")
    writer = RecordingWriter(lines.append, lambda: 0, header)
    engine = Engine(HashModel(**SIZE), options, TOKENIZER, recorder=writer)
    tokens = serve(engine, requests)
    writer.close()
    entries = [entry for _, entry in read_entries(lines)]
    replay = ReplayRun(entries[0], FCFS)
    assert [each for each in map(replay.apply, entries[1:-1]) if each is not None] == []
    assert replay.tokens == sum(map(len, tokens.values()))


def test_a_request_with_a_budget_is_encoded_whole() -> None:
    request = draw_request(Random(1), 7)
    assert parse_request(encode_request(request)) == request


BUDGET = ThinkingBudget(5, OPENED, ids("</think>"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"thinking_budget": 5}, "ThinkingBudget"),
        ({"thinking_budget": BUDGET._replace(num_tokens=-1)}, "from 0 to"),
        ({"thinking_budget": BUDGET._replace(num_tokens=True)}, "from 0 to"),
        ({"thinking_budget": BUDGET._replace(end_ids=())}, "one id or more"),
        ({"thinking_budget": BUDGET._replace(end_ids=(-1,))}, "ids from 0"),
        ({"thinking_budget": BUDGET._replace(reasoning=Reasoning("", ""))}, "1 to 64"),
        ({"thinking_budget": BUDGET, "allowed_token_ids": [5]}, "has a budget"),
        ({"thinking_budget": BUDGET, "structure": Structure.regex("a")}, "the same reasoning"),
    ],
)
def test_a_budget_out_of_bounds_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end_ids", "tokenizer", "problem"),
    [
        (ids("</think>"), None, "no tokenizer"),
        ((len(PIECES),), TOKENIZER, "out of vocabulary"),
        (ids("</think>", "a"), TOKENIZER, "does not end with"),
    ],
)
def test_an_engine_refuses_ids_that_do_not_end_the_reasoning(
    end_ids: tuple[int, ...], tokenizer: PieceTokenizer | None, problem: str
) -> None:
    engine = Engine(HashModel(**SIZE), config(), tokenizer)
    params = SamplingParams(thinking_budget=BUDGET._replace(end_ids=end_ids))
    with pytest.raises(InvalidRequest, match=problem):
        engine.submit(Request(0, (1,), params))
