"""Outputs: the text of a batch, decoded tens of tokens at a time, is the text of a stream.

tokens ──OutputProcessor, a token at a time──► text
tokens ──OutputBatch, many at a time─────────► the same text
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge.llm import LLM
from forge.outputs import (
    DECODE_INTERVAL,
    OutputBatch,
    OutputProcessor,
    RequestOutput,
    StopMatch,
    TextDelta,
    cut_at_stop,
    merge_deltas,
)
from forge.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from forge.stop_strings import create_stop_checker
from forge.tokenizer import ByteTokenizer, Detokenizer

PIECES = (
    b"",
    b"a",
    b"b",
    b"ab",
    b"ba ",
    b"bab",
    "é".encode(),
    "😀b".encode(),
    b"\xf0\x9f",
    b"\x98",
)
"""Bytes of each token; those of 0 are a skipped token's. Some are parts of characters."""


class PieceDetokenizer:
    """Incremental decoder of PIECES, which counts its tokens."""

    def __init__(self, tokenizer: PieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        self._tokenizer.num_pushed += 1
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def extend(self, tokens: Sequence[int]) -> str:
        self._tokenizer.num_extended += len(tokens)
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, tokens)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceTokenizer(ByteTokenizer):
    """Tokenizer of PIECES; further ids have the piece of their remainder.

    num_pushed     tokens that were decoded one at a time
    num_extended   tokens that were decoded with others
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_pushed = self.num_extended = 0

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token % len(PIECES)]

    def create_detokenizer(  # type: ignore[override]
        self, previous: int | None = None
    ) -> Detokenizer:
        return PieceDetokenizer(self)


def read_stream(params: SamplingParams, tokens: Sequence[int]) -> tuple[str, int | str | None]:
    """Return the text of an output that arrives token by token, and the stop string in it."""
    processor = OutputProcessor(Request(0, (1,), params), PieceTokenizer())
    deltas = [Delta(0, 0, (token,)) for token in tokens]
    deltas.append(Delta(0, 0, finish=FinishReason.STOP))
    texts = [processor.process(delta) for delta in deltas]
    return "".join(each.text for each in texts), texts[-1].stop_match.matched


class PreviousDetokenizer:
    """Decoder whose text begins with the token that it follows; token 1 is "a", and so on."""

    def __init__(self, previous: int | None) -> None:
        self._start = f"{previous} "

    def push(self, token: int) -> str:
        return self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> str:
        start = self._start if tokens else ""
        self._start = "" if tokens else self._start
        return start + "".join(chr(96 + token) for token in tokens)

    def flush(self) -> str:
        return ""


class PreviousTokenizer(ByteTokenizer):
    """A tokenizer whose texts show what they follow."""

    def create_detokenizer(  # type: ignore[override]
        self, previous: int | None = None
    ) -> Detokenizer:
        return PreviousDetokenizer(previous)


@pytest.mark.parametrize(("begins_text", "previous"), [(False, "4"), (True, "None")])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "ending"),
    [((), 0, "abc"), (("ab",), 0, ""), (("4 a", "None a"), 0, None), (("4 a", "b"), 2, "a")],
)
def test_all_decoders_of_an_output_start_after_the_same_token(
    begins_text: bool, previous: str, stop: tuple[str, ...], min_tokens: int, ending: str | None
) -> None:
    tokenizer = PreviousTokenizer()
    params = SamplingParams(stop=stop, min_tokens=min_tokens)
    request = Request(0, (3, 4), params, begins_text=begins_text)
    delta = Delta(0, 0, (1, 2, 3), FinishReason.STOP)
    streamed = OutputProcessor(request, tokenizer).process(delta)
    batch = OutputBatch([request], tokenizer)
    batch.extend([delta])
    (choice,) = batch.outputs[0].choices
    assert (choice.text, choice.stop_match) == (streamed.text, streamed.stop_match)
    assert choice.text == ("" if ending is None else f"{previous} {ending}")
    checker = create_stop_checker(tokenizer, request)
    found = checker is not None and any(map(checker.feed, delta.tokens))
    assert found == bool(stop)


TEXTS = st.text(alphabet="ab é😀\ufffd", min_size=1, max_size=4)
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@example([5, 5], ["bb", "abb", "ab"], 2, {1})
@example([1, 8], ["\ufffd"], 0, set())
@example([8, 1], ["\ufffda"], 2, {0, 1})
@given(
    tokens=TOKENS,
    stops=st.lists(TEXTS, max_size=3),
    min_tokens=st.integers(0, 13),
    decoded_after=st.sets(st.integers(0, 12)),
)
def test_a_text_decoded_many_tokens_at_a_time_is_that_of_the_stream(
    tokens: list[int], stops: list[str], min_tokens: int, decoded_after: set[int]
) -> None:
    params = SamplingParams(max_tokens=64, stop=stops, min_tokens=min_tokens)
    batch = OutputBatch([Request(0, (1,), params)], PieceTokenizer())
    for index, token in enumerate(tokens):
        batch.extend([Delta(0, 0, (token,))])
        if index in decoded_after:
            batch.decode_ahead()
    batch.extend([Delta(0, 0, finish=FinishReason.STOP)])
    (choice,) = batch.outputs[0].choices
    assert (choice.text, choice.stop_match.matched) == read_stream(params, tokens)


def test_the_stop_that_ends_first_cuts_and_of_two_the_longer() -> None:
    assert cut_at_stop("xabcd", ("abcd", "bc"), 1) == ("xa", "bc")
    assert cut_at_stop("xab", ("b", "ab"), 1) == ("x", "ab")
    assert cut_at_stop("xbxb", ("b",), 3) == ("xbx", "b")
    assert cut_at_stop("xbxb", ("b",), 5) == ("xbxb", None)


BROKEN_CHARACTER = 8
END_TOKEN = ByteTokenizer().eos_token
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "last", "matched", "reason"),
    [
        ({"stop": ["ab", "bab"]}, Delta(0, 0, (5,), STOP), "bab", "bab"),
        ({"stop_token_ids": [4]}, Delta(0, 0, (4,), STOP, 4), 4, 4),
        ({}, Delta(0, 0, (END_TOKEN,), STOP, END_TOKEN), END_TOKEN, None),
        ({}, Delta(0, 0, (7,), STOP, 7), 7, 7),
        (
            {"ignore_eos": True, "stop_token_ids": [END_TOKEN]},
            Delta(0, 0, (END_TOKEN,), STOP, END_TOKEN),
            *(END_TOKEN, END_TOKEN),
        ),
        ({"stop": "b"}, Delta(0, 0, (1,), STOP), None, None),
        ({"stop": "\ufffd"}, Delta(0, 0, (BROKEN_CHARACTER,), LENGTH), None, None),
        ({"stop": "\ufffd"}, Delta(0, 0, (BROKEN_CHARACTER, 4), STOP, 4), 4, 4),
    ],
    ids=[
        *("string", "stop id", "end token", "further end token", "ignored end token as stop id"),
        *("structure", "broken character at the limit", "broken character before a stop id"),
    ],
)
def test_a_choice_names_the_stop_that_ended_it(
    params: dict[str, Any], last: Delta, matched: int | str | None, reason: int | str | None
) -> None:
    request = Request(0, (1,), SamplingParams(max_tokens=64, **params))
    streamed = OutputProcessor(request, PieceTokenizer()).process(last)
    batch = OutputBatch([request], PieceTokenizer())
    batch.extend([last])
    (choice,) = batch.outputs[0].choices
    for match in (streamed.stop_match, choice.stop_match):
        assert (match.matched, match.reason) == (matched, reason)
    assert choice.stop_reason == reason


def test_a_choice_that_the_engine_gives_up_has_no_stop() -> None:
    processor = OutputProcessor(Request(0, (1,), SamplingParams(stop="a")), PieceTokenizer())
    (delta,) = processor.finish("abort", None)
    assert delta.stop_match == StopMatch(None, False)


def test_deltas_that_are_merged_have_the_stop_of_the_last() -> None:
    match = StopMatch("b")
    last = TextDelta(0, "", (2,), "stop", stop_match=match)
    assert merge_deltas([TextDelta(0, "a", (1,)), last])[0].stop_match == match


# A batch.


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0)


def test_a_batch_collects_the_choices_of_its_requests_and_ignores_other_deltas() -> None:
    requests = [Request(7, (1, 2), SamplingParams(n=2, logprobs=0)), Request(9, (3,))]
    batch = OutputBatch(requests, PieceTokenizer())
    other = Delta(8, 0, (1,))
    first = Delta(7, 1, (1,), logprobs=(logprob(1),), prompt_logprobs=(logprob(2),))
    batch.extend([first, other, Delta(9, 0, (7,))])
    assert (batch.num_finished, batch.count_tokens(), batch.is_finished) == (0, 2, False)
    end = Delta(7, 1, (5, 4), FinishReason.STOP, 4, logprobs=(logprob(5), logprob(4)))
    batch.extend([end, Delta(9, 0, (6,), FinishReason.LENGTH)])
    assert (batch.num_finished, batch.count_tokens(), batch.is_finished) == (1, 5, False)
    batch.extend([Delta(7, 0, (3,), FinishReason.LENGTH)])
    assert (batch.num_finished, batch.count_tokens(), batch.is_finished) == (2, 6, True)
    two_choices, one_choice = batch.outputs
    assert [choice.text for choice in two_choices.choices] == ["ab", "abab"]
    assert [choice.token_ids for choice in two_choices.choices] == [[3], [1, 5, 4]]
    assert [choice.finish_reason for choice in two_choices.choices] == ["length", "stop"]
    assert two_choices.choices[1].logprobs == [logprob(1), logprob(5), logprob(4)]
    assert two_choices.prompt_logprobs == [logprob(2)]
    assert (one_choice.prompt_token_ids, one_choice.text) == ([3], "😀bé")


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_output_that_was_cut_off_has_the_text_of_its_tokens(finish: FinishReason) -> None:
    batch = OutputBatch([Request(0, (1,))], PieceTokenizer())
    batch.extend([Delta(0, 0, (1,)), Delta(0, 0, (8,))])
    batch.extend([Delta(0, 0, finish=finish, error="why")])
    output = batch.outputs[0]
    assert (output.text, output.token_ids) == ("a\ufffd", [1, 8])
    assert (output.finish_reason, output.choices[0].error) == (finish.value, "why")


def test_no_prompts_are_a_finished_batch() -> None:
    assert OutputBatch([], PieceTokenizer()).is_finished


def test_little_is_left_to_decode_when_many_choices_end_at_once() -> None:
    num_choices, num_tokens = 2 * DECODE_INTERVAL, 3 * DECODE_INTERVAL
    params = SamplingParams(n=num_choices, max_tokens=num_tokens)
    tokenizer = PieceTokenizer()
    batch = OutputBatch([Request(0, (1,), params)], tokenizer)
    for index in range(num_tokens):
        finish = FinishReason.LENGTH if index == num_tokens - 1 else None
        num_decoded = tokenizer.num_extended
        batch.extend([Delta(0, choice, (1,), finish) for choice in range(num_choices)])
        num_left = tokenizer.num_extended - num_decoded
        batch.decode_ahead()
        assert tokenizer.num_extended - num_decoded - num_left <= 2 * DECODE_INTERVAL
    mean_left = num_left / num_choices
    assert mean_left == (1 + DECODE_INTERVAL) / 2
    assert tokenizer.num_extended == num_choices * num_tokens


# LLM.


def open_piece_llm() -> tuple[LLM, PieceTokenizer]:
    """Return a hash model and its tokenizer, whose tokens have several characters or bytes."""
    llm, tokenizer = LLM("hash"), PieceTokenizer()
    llm.tokenizer = llm.engine.tokenizer = tokenizer
    return llm, tokenizer


def draw_params(rng: Random) -> SamplingParams:
    """Draw parameters that reach every way in which an output ends."""
    max_tokens = rng.randint(1, 24)
    return SamplingParams(
        n=rng.choice((1, 1, 3)),
        seed=rng.randrange(2**32),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        stop=rng.choice(((), ("bb",), ("é", "abab"), ("\ufffd",), ("b ", "a"))),
        stop_token_ids=rng.choice(((), (5, 77), tuple(range(100, 130)))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, 1)),
        prompt_logprobs=rng.choice((None, 0)),
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))]
)
def test_generate_returns_what_streams_of_the_same_requests_join_to(seed: int) -> None:
    rng = Random(seed)
    each = [draw_params(rng) for _ in range(16)]
    prompts = [rng.choices(range(1, 257), k=rng.randint(2, 9)) for _ in each]
    outputs = open_piece_llm()[0].generate(prompts, each)
    llm, _ = open_piece_llm()
    for prompt, params, output in zip(prompts, each, outputs, strict=True):
        joined = RequestOutput.empty(Request(0, tuple(prompt), params))
        for delta in llm.stream(prompt, params):
            joined.append(delta)
        assert output == joined
    reasons = {choice.finish_reason for output in outputs for choice in output.choices}
    assert reasons == {"stop", "length"}


def test_generate_decodes_no_token_alone_and_none_twice() -> None:
    llm, tokenizer = open_piece_llm()
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    llm.generate([[1, 2], [3], [4]], params)
    assert (tokenizer.num_extended, tokenizer.num_pushed) == (3 * 2 * 20, 0)
    llm.generate([5], replace(params, stop="never"))
    num_pushed_by_engine = 2 * 20
    assert (tokenizer.num_extended, tokenizer.num_pushed) == (4 * 2 * 20, num_pushed_by_engine)
