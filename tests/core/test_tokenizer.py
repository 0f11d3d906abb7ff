"""Text to ids and back: characters stay whole, nothing waits without need, stops end exactly."""

from __future__ import annotations

import codecs
import re
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.tokenizer import ByteTokenizer, Detokenizer, StopStringDetokenizer
from tests.texts import ANY_CHARACTER

FAMILY = "👩‍👩‍👧"
CHARACTERS = (
    *(
        "a",
        "b",
        " ",
        "\n",
        "\x00",
        "\x7f",
        "é",
        "ß",
        "e\u0301",
        "漢",
        "字",
        "한",
        "\ufffd",
        "\ufeff",
    ),
    *("😀", FAMILY, "🇩🇪", "👍🏽", "\u200d", "\U0010ffff", "\ud7ff", "\ue000"),
)
IDS_WITHOUT_TEXT = (0, 257, 258, -1, 10**9)  # special ids, and ids that are none


def ids(data: bytes) -> list[int]:
    return [byte + 1 for byte in data]


def deltas(stream: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token made certain, then the text of the flush."""
    return [*map(stream.push, tokens), stream.flush()]


def deltas_of_parts(stream: Detokenizer, parts: Sequence[Sequence[int]]) -> list[str]:
    """Return the text that the tokens of each part made certain, then the text of the flush."""
    return [*("".join(map(stream.push, part)) for part in parts), stream.flush()]


def stream(*stop: str, min_tokens: int = 0) -> StopStringDetokenizer:
    return StopStringDetokenizer(ByteTokenizer().create_detokenizer(), stop, min_tokens)


def read_text(text: str, *stop: str, min_tokens: int = 0) -> tuple[str, str | None]:
    """Return all text sent for `text` as byte tokens, and the stop string that ended it."""
    s = stream(*stop, min_tokens=min_tokens)
    return "".join(deltas(s, ByteTokenizer().encode(text))), s.matched_stop


class PieceDetokenizer:
    """A detokenizer whose tokens are any bytes: several characters, or part of one."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.pieces[token])

    def extend(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


def read_pieces(
    token_bytes: Sequence[str], *stop: str, min_tokens: int = 0
) -> tuple[str, str | None]:
    """Return the same as `read_text`, with one token for each of `token_bytes`."""
    s = StopStringDetokenizer(PieceDetokenizer([p.encode() for p in token_bytes]), stop, min_tokens)
    return "".join(deltas(s, range(len(token_bytes)))), s.matched_stop


def brute_force(
    fragments: Sequence[str], stops: Sequence[str], min_tokens: int
) -> tuple[list[str], str | None]:
    """Return all text sent after each fragment, and the stop, by trying every end of every stop.

    fragments   the text that each token makes certain; the last one is that of the flush
    """
    num_tokens = len(fragments) - 1
    text = "".join(fragments)
    token_of = [min(i, num_tokens) for i, part in enumerate(fragments, 1) for _ in part]
    found = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop) and token_of[end - 1] >= min_tokens
    ]
    end, _, stopped = min(found, default=(len(text) + 1, 0, None))
    sent = []
    for known in accumulate(fragments):
        if stopped is not None and len(known) >= end:
            sent.append(text[: end - len(stopped)])
            continue
        may_begin = [n for stop in stops for n in range(len(stop)) if known.endswith(stop[:n])]
        sent.append(known[: len(known) - max(may_begin, default=0)])
    if stopped is None:
        sent[-1] = text
    return sent, stopped


# Ids.


def test_byte_b_is_id_b_plus_one_and_the_end_is_id_zero() -> None:
    t = ByteTokenizer()
    assert t.encode("\x00Az\x7f") == [1, 66, 123, 128]
    assert (t.eos_token, t.vocab_size) == (0, 257)


def test_ascii_round_trips() -> None:
    t = ByteTokenizer()
    text = "".join(map(chr, range(128)))
    assert t.decode(t.encode(text)) == text


@given(st.text(ANY_CHARACTER))
def test_every_text_round_trips_and_gives_no_special_id(text: str) -> None:
    t = ByteTokenizer(("<|end|>", "<|user|>"))
    tokens = t.encode(text, parse_special_tokens=False)
    assert t.decode(tokens) == text
    assert all(1 <= token <= 256 for token in tokens)


def test_text_that_spells_a_special_token_is_plain_bytes_where_it_is_not_parsed() -> None:
    t = ByteTokenizer(("<|end|>", "<|user|>", "<|end|>!"))
    text = "a<|end|><|user|><|end|>!<|end|"
    assert t.encode(text, parse_special_tokens=False) == ids(text.encode())
    assert t.encode(text) == [*ids(b"a"), 0, 257, 258, *ids(b"<|end|")]
    assert t.encode(text, add_special_tokens=False) == t.encode(text)


def test_further_special_tokens_come_after_the_bytes() -> None:
    t = ByteTokenizer(("<|end|>", "<|user|>", "<|tool|>"))
    assert t.vocab_size == 259
    assert [t.token_text(token) for token in (0, 257, 258)] == ["<|end|>", "<|user|>", "<|tool|>"]


def test_a_tokenizer_without_an_end_token_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="end token"):
        ByteTokenizer(())


def test_a_lone_surrogate_cannot_be_encoded() -> None:
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        ByteTokenizer().encode("a\ud83d")


def test_special_ids_and_ids_without_text_decode_to_nothing() -> None:
    t = ByteTokenizer(("<|end|>", "<|user|>"))
    assert t.decode([*IDS_WITHOUT_TEXT, 66, *IDS_WITHOUT_TEXT]) == "A"


@pytest.mark.parametrize(
    ("token", "text", "data"),
    [
        (0, "<|end|>", b"<|end|>"),
        (257, "ü終", "ü終".encode()),
        (66, "A", b"A"),
        (11, "\n", b"\n"),
        (128, "\x7f", b"\x7f"),
        (129, "bytes:\\x80", b"\x80"),
        (0xF0 + 1, "bytes:\\xf0", b"\xf0"),
        (256, "bytes:\\xff", b"\xff"),
        (258, "", b""),
        (-1, "", b""),
    ],
)
def test_a_token_shows_as_its_text_its_name_or_its_byte(token: int, text: str, data: bytes) -> None:
    t = ByteTokenizer(("<|end|>", "ü終"))
    assert (t.token_text(token), t.token_bytes(token)) == (text, data)


def test_no_two_tokens_look_alike_in_a_listing() -> None:
    t = ByteTokenizer(("<|end|>", "<|user|>"))
    assert len({t.token_text(token) for token in range(t.vocab_size)}) == t.vocab_size


# One token at a time.

HARD_BYTES = st.one_of(
    st.sampled_from(CHARACTERS).map(str.encode),
    st.sampled_from(CHARACTERS).map(lambda c: c.encode()[:-1]),
    st.sampled_from(CHARACTERS).map(lambda c: c.encode()[1:]),
    st.sampled_from((b"\xed\xa0\x80", b"\xed\xbf", b"\xf4\x90", b"\xc0\xaf", b"\xe0\x80")),
    st.integers(0, 255).map(lambda b: bytes((b,))),
)


@given(st.lists(HARD_BYTES, max_size=12).map(b"".join))
def test_joined_deltas_are_the_decode_of_all_bytes(data: bytes) -> None:
    """After every token too: the unsent part is one unfinished character, or nothing.

    Half of a surrogate pair is unfinished too: its first two bytes wait for the third.
    """
    *sent, whole = accumulate(deltas(ByteTokenizer().create_detokenizer(), ids(data)))
    assert whole == data.decode(errors="replace") == ByteTokenizer().decode(ids(data))
    for size, text in enumerate(sent, 1):
        held = "\ufffd\ufffd" if re.search(rb"\xed[\xa0-\xbf]\Z", data[:size]) else "\ufffd"
        assert data[:size].decode(errors="replace") in (text, text + held)


@given(st.lists(st.sampled_from(CHARACTERS) | ANY_CHARACTER, max_size=12))
def test_a_character_is_sent_with_its_last_byte(characters: list[str]) -> None:
    data = "".join(characters).encode()
    *sent, _ = accumulate(deltas(ByteTokenizer().create_detokenizer(), ids(data)))
    assert sent == [data[:size].decode(errors="ignore") for size in range(1, len(data) + 1)]


@given(
    st.lists(
        HARD_BYTES.map(ids) | st.sampled_from(IDS_WITHOUT_TEXT).map(lambda t: [t]), max_size=12
    )
)
def test_ids_without_text_change_nothing_wherever_they_stand(parts: list[list[int]]) -> None:
    t = ByteTokenizer(("<|end|>", "<|user|>", "<|tool|>"))
    tokens = [token for part in parts for token in part]
    data = bytes(token - 1 for token in tokens if token not in IDS_WITHOUT_TEXT)
    whole = data.decode(errors="replace")
    assert t.decode(tokens) == "".join(deltas(t.create_detokenizer(), tokens)) == whole
    together = t.create_detokenizer()
    assert [*map(together.extend, parts), together.flush()] == deltas_of_parts(
        t.create_detokenizer(), parts
    )


def test_an_emoji_comes_whole_with_its_fourth_byte() -> None:
    assert deltas(ByteTokenizer().create_detokenizer(), ids("😀".encode())) == [
        "",
        "",
        "",
        "😀",
        "",
    ]


def test_a_joined_emoji_comes_one_code_point_at_a_time() -> None:
    parts = deltas(ByteTokenizer().create_detokenizer(), ids(FAMILY.encode()))
    assert [part for part in parts if part] == ["👩", "\u200d", "👩", "\u200d", "👧"]


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    tokens = [*ids(b"\xf0\x9f"), 0, *ids(b"\x98\x80")]
    assert "".join(deltas(ByteTokenizer().create_detokenizer(), tokens)) == "😀"


def test_a_replacement_character_that_the_text_holds_is_text() -> None:
    assert deltas(ByteTokenizer().create_detokenizer(), ids(b"\xef\xbf\xbd")) == [
        "",
        "",
        "\ufffd",
        "",
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff", ["\ufffd", ""]),
        (b"\x80a", ["\ufffd", "a", ""]),
        (b"\xe6\xbca", ["", "", "\ufffda", ""]),
        (b"\xe6\xe6\xbc\xa2", ["", "\ufffd", "", "漢", ""]),
        (b"\xc0\xaf", ["\ufffd", "\ufffd", ""]),
        (b"\xf4\x90", ["", "\ufffd\ufffd", ""]),
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd"]),
    ],
    ids=("never", "no start", "cut short", "started again", "overlong", "too high", "unfinished"),
)
def test_broken_bytes_become_replacement_characters(data: bytes, expected: list[str]) -> None:
    assert deltas(ByteTokenizer().create_detokenizer(), ids(data)) == expected


def test_half_of_a_surrogate_pair_is_three_broken_bytes() -> None:
    parts = deltas(ByteTokenizer().create_detokenizer(), ids(b"\xed\xa0\x80!"))
    assert "".join(parts) == "\ufffd\ufffd\ufffd!"


# Stop strings, case by case.


def test_a_stop_string_split_over_tokens_ends_the_text_before_it() -> None:
    s = stream("END")
    assert deltas(s, ids(b"ok END no")) == ["o", "k", " ", "", "", "", "", "", "", ""]
    assert s.matched_stop == "END"


def test_a_beginning_of_a_stop_string_waits_and_is_sent_when_the_text_differs() -> None:
    assert deltas(stream("answer"), ids(b"an answ!")) == [
        "",
        "",
        "an ",
        "",
        "",
        "",
        "",
        "answ!",
        "",
    ]


def test_a_beginning_of_a_stop_string_stays_when_the_rest_is_sent() -> None:
    assert deltas(stream("aab"), ids(b"aaab")) == ["", "", "a", "", ""]


def test_text_in_which_no_stop_string_begins_is_not_delayed() -> None:
    assert deltas(stream("zebra", "😀"), ids(b"one two")) == [*"one two", ""]


def test_the_stop_string_that_is_complete_first_wins_wherever_it_is_listed() -> None:
    assert read_text("abcd", "abcd", "bc") == read_text("abcd", "bc", "abcd") == ("a", "bc")


def test_of_two_complete_at_the_same_character_the_longer_wins() -> None:
    assert read_text("xab", "b", "ab") == read_text("xab", "ab", "b") == ("x", "ab")


def test_text_after_the_stop_string_in_the_same_token_is_not_sent() -> None:
    assert read_pieces(["one. T", "wo. Three"], ". ") == ("one", ". ")


def test_two_stop_strings_in_one_token_end_at_the_first() -> None:
    assert read_pieces(["a;b,c"], ",", ";") == ("a", ";")


def test_a_stop_string_may_end_inside_the_bytes_of_a_token() -> None:
    s = StopStringDetokenizer(PieceDetokenizer([b"a\xf0\x9f", b"\x98\x80b"]), ("😀",))
    assert (deltas(s, (0, 1)), s.matched_stop) == (["a", "", ""], "😀")


def test_a_stop_string_of_characters_of_many_bytes_is_found() -> None:
    assert read_text("漢字😀かな", "😀か") == ("漢字", "😀か")


def test_text_held_at_the_end_is_flushed() -> None:
    assert read_text("the answ", "answer") == ("the answ", None)


def test_after_a_stop_nothing_more_is_sent() -> None:
    s = stream("b")
    assert [s.push(token) for token in ids(b"abab\xe6")] == ["a", "", "", "", ""]
    assert (s.flush(), s.matched_stop) == ("", "b")


def test_half_a_character_after_the_stop_string_is_not_flushed() -> None:
    s = StopStringDetokenizer(PieceDetokenizer([b"ab\xe6"]), ("b",))
    assert (deltas(s, (0,)), s.matched_stop) == (["a", ""], "b")


def test_a_stop_string_that_the_flush_completes_counts() -> None:
    s = stream("a\ufffd")
    assert deltas(s, ids(b"ba\xf0\x9f")) == ["b", "", "", "", ""]
    assert s.matched_stop == "a\ufffd"


def test_text_held_before_a_stop_that_the_flush_completes_is_sent() -> None:
    s = stream("abc", "\ufffd")
    assert deltas(s, ids(b"ab\xf0")) == ["", "", "", "ab"]
    assert s.matched_stop == "\ufffd"


def test_an_end_token_does_not_match_a_stop_string_of_its_name() -> None:
    s = stream("<|end|>")
    assert deltas(s, [66, 0, 67]) == ["A", "", "B", ""]
    assert s.matched_stop is None


def test_a_stop_string_that_is_complete_before_min_tokens_is_text() -> None:
    assert read_text("aXbX", "X", min_tokens=3) == ("aXb", "X")


def test_a_stop_string_that_min_tokens_let_pass_does_not_count_later() -> None:
    assert read_text("Xab", "X", min_tokens=2) == ("Xab", None)


def test_a_stop_string_may_begin_before_min_tokens() -> None:
    assert read_text("aXY", "XY", min_tokens=3) == ("a", "XY")


def test_a_stop_string_that_passed_may_begin_the_next() -> None:
    """Complete at token 3 it is text; its last character begins the one complete at token 5."""
    assert read_text("XaXaX", "XaX", min_tokens=4) == ("Xa", "XaX")


def test_the_token_that_reaches_min_tokens_may_end_the_text() -> None:
    assert read_pieces(["ab", "cd"], "d", min_tokens=2) == ("abc", "d")
    assert read_pieces(["ab", "cd"], "d", min_tokens=3) == ("abcd", None)


def test_tokens_without_text_count_for_min_tokens() -> None:
    s = stream("X", min_tokens=3)
    assert deltas(s, [0, 0, *ids(b"X")]) == ["", "", "", ""]
    assert s.matched_stop == "X"


def test_an_empty_stop_string_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match=re.escape("('a', '')")):
        stream("a", "")


# Stop strings, against brute force.


def test_every_short_text_ends_as_brute_force_says() -> None:
    """All 64 texts of six a and b with every one or two of the stop strings up to three."""
    stops = ["".join(s) for size in (1, 2, 3) for s in product("ab", repeat=size)]
    chosen = [*combinations(stops, 1), *combinations(stops, 2)]
    stopped = 0
    for number, (text, stop) in enumerate(product(product("ab", repeat=6), chosen)):
        min_tokens = number % 4 * 2
        s = stream(*stop, min_tokens=min_tokens)
        sent = list(accumulate(deltas(s, ids("".join(text).encode()))))
        expected = brute_force((*text, ""), stop, min_tokens)
        assert (sent, s.matched_stop) == expected, (text, stop, min_tokens)
        stopped += s.matched_stop is not None
    assert number == 64 * (14 + 91) - 1
    assert 1000 < stopped < number - 1000


# Pieces repeat, so stop strings overlap themselves and each other.
REPEATING = st.lists(st.sampled_from(("a", "b", "ab", "aab", "aba", "c")), min_size=1, max_size=5)
WORDS = REPEATING.map("".join) | st.sampled_from((*CHARACTERS, "a\ufffd", "\ufffdb", "漢字a"))
# With the end of the first one, two stop strings often are complete at the same character.
STOPS = st.lists(WORDS, max_size=4).map(
    lambda words: (*(w[1:] for w in words[:1] if w[1:]), *words)
)
PART = REPEATING.map(lambda parts: "".join(parts).encode()) | HARD_BYTES
PIECES = st.lists(st.lists(PART, max_size=2).map(b"".join), max_size=12)


@given(PIECES, STOPS, st.integers(0, 8))
def test_every_delta_and_the_end_equal_those_of_brute_force(
    pieces: list[bytes], stop: tuple[str, ...], min_tokens: int
) -> None:
    s = StopStringDetokenizer(PieceDetokenizer(pieces), stop, min_tokens)
    sent = list(accumulate(deltas(s, range(len(pieces)))))
    fragments = deltas(PieceDetokenizer(pieces), range(len(pieces)))
    assert (sent, s.matched_stop) == brute_force(fragments, stop, min_tokens)


@given(PIECES, STOPS.filter(len), st.data())
def test_order_and_repetition_of_stop_strings_change_nothing(
    pieces: list[bytes], stop: tuple[str, ...], data: st.DataObject
) -> None:
    other = (*data.draw(st.permutations(stop)), data.draw(st.sampled_from(stop)))
    one, two = (StopStringDetokenizer(PieceDetokenizer(pieces), stops) for stops in (stop, other))
    assert deltas(one, range(len(pieces))) == deltas(two, range(len(pieces)))
    assert one.matched_stop == two.matched_stop


@given(PIECES, STOPS)
def test_less_is_held_than_the_longest_stop_string(
    pieces: list[bytes], stop: tuple[str, ...]
) -> None:
    """Between tokens, counted against the text that is certain by then."""
    s, certain = StopStringDetokenizer(PieceDetokenizer(pieces), stop), PieceDetokenizer(pieces)
    held = 0
    for token in range(len(pieces)):
        delta = s.push(token)
        if s.matched_stop is not None:
            break
        held += len(certain.push(token)) - len(delta)
        assert 0 <= held <= max((len(text) - 1 for text in stop), default=0)


def allocated_bytes(work: Callable[[], object]) -> int:
    """Return the number of bytes that `work` leaves allocated."""
    tracemalloc.start()
    try:
        kept = work()
        size, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return size


@pytest.mark.long
def test_memory_of_a_stream_does_not_grow_with_the_text() -> None:
    """Then no push can read the whole text again. The text has 40 kB, the stop string 65 bytes."""
    s = stream("a" * 64 + "b")
    tokens = ids(b"a" * 70 + b"c") * 8
    for token in tokens:
        s.push(token)
    assert allocated_bytes(lambda: [s.push(token) for token in tokens * 70].clear()) < 4000


def test_long_stop_strings_cost_nothing_until_text_begins_them() -> None:
    """Otherwise a request with many choices delays all others while its streams are created."""
    stops = tuple(f"{i:x}" + "ab" * 511 for i in range(16))
    assert allocated_bytes(lambda: stream(*stops)) < 16_000
