"""A checkpoint's tokenizer: text is streamed early, and equal to the library's decoding."""

from __future__ import annotations

import json
import pickle
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tokenizers import (  # noqa: E402
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from forge.errors import InvalidConfig, InvalidRequest  # noqa: E402
from forge.models.hf.loading.draft_pair import first_differing_token  # noqa: E402
from forge.models.hf.tokenizer import (  # noqa: E402
    HFTokenizer,
    parse_decoding,
    share_components,
)
from forge.tokenizer import ChatEnd, StopStringDetokenizer  # noqa: E402

pytestmark = pytest.mark.torch

LINES = [
    "Once upon a time there was a scheduler, and it was fair.",
    "Text with  two spaces,\ttabs\nand lines; naïve café, Größe.",
    "漢字かな交じり文 한국어 текст",
    "emoji 😀 👩‍👩‍👧 🇩🇪 👍🏽 done",
]
TEXTS = [
    *LINES,
    "",
    " ",
    "  leading spaces",
    "trailing  ",
    "\n\n",
    "a",
    "😀",
    "\u0301 combining first",
    "never seen: ꙮ 𓀀 \U0010ffff",
    "<s> <|end|> names of special tokens",
]
SPECIAL = ["<unk>", "<s>", "<|end|>"]
VALID_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"


def create_byte_level() -> Any:
    """Return a tokenizer like those of GPT-2, Qwen and Llama 3: no BOS."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return made


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def create_sentencepiece() -> Any:
    """Return a tokenizer like Llama 2's: BPE over ▁, byte fallback, BOS before each prompt."""
    base = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    base.normalizer = normalizers.Sequence(marks)
    base.train_from_iterator(
        LINES[:2], trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    )
    vocab = {name: i for i, name in enumerate([*SPECIAL, *BYTES])}
    for name, _ in sorted(base.get_vocab().items(), key=lambda item: item[1]):
        vocab.setdefault(name, len(vocab))
    merges = [tuple(pair) for pair in json.loads(base.to_str())["model"]["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(marks)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return made


def create_unigram() -> Any:
    """Return a tokenizer like those of T5 and XLNet: Metaspace, here with byte fallback."""
    scored = [(name, 0.0) for name in SPECIAL] + [(name, -20.0) for name in BYTES]
    words = sorted({word for line in LINES[:2] for word in re.findall(r"\w+", line)})
    scored += [("▁" + word, -5.0) for word in words]
    scored += [(char, -9.0) for char in sorted({*"".join(LINES[:2]), "▁"} - {" "})]
    made = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def create_word_level() -> Any:
    """Return a stand-in for measuring: token i is the word t<i>."""
    made = tokenizers.Tokenizer(models.WordLevel({f"t{i}": i for i in range(300)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": create_byte_level,
    "sentencepiece": create_sentencepiece,
    "unigram": create_unigram,
    "words": create_word_level,
}


def save_tokenizer(folder: Path, backend: Any, **options: Any) -> Path:
    """Return a folder with the files of that tokenizer."""
    for name in SPECIAL:
        if backend.token_to_id(name) is not None:
            backend.add_special_tokens([name])
    ends = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    if backend.token_to_id("<s>") is None:
        ends = {"bos_token": "t1", "eos_token": "t2", "unk_token": "t0"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **{**ends, **options})
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFTokenizer]:
    return {
        kind: HFTokenizer.from_folder(save_tokenizer(tmp_path_factory.mktemp(kind), make()))
        for kind, make in KINDS.items()
    }


@pytest.fixture(params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tokenizers_by_kind: dict[str, HFTokenizer]
) -> HFTokenizer:
    return tokenizers_by_kind[request.param]


def decode_by_library(tokenizer: HFTokenizer, tokens: Sequence[int]) -> str:
    return str(tokenizer._text_tokenizer.decode(list(tokens), skip_special_tokens=True))


def decode_stepwise(tokenizer: HFTokenizer, tokens: Sequence[int]) -> list[str]:
    decoder = tokenizer.create_detokenizer()
    return [*map(decoder.push, tokens), decoder.flush()]


def random_ids(tokenizer: HFTokenizer, seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(tokenizer.vocab_size) for _ in range(count)]


# Decoding.


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_text_comes_back(tokenizers_by_kind: dict[str, HFTokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    assert tokenizer.decode(tokenizer.encode(text, parse_special_tokens=False)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_is_that_of_the_library(tokenizer: HFTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == decode_by_library(tokenizer, tokens)


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_of_a_byte_level_vocabulary_decode_as_in_the_library(
    tokenizers_by_kind: dict[str, HFTokenizer], seed: int
) -> None:
    """Broken characters too."""
    tokens = random_ids(tokenizers_by_kind["byte_level"], seed, 200)
    assert "\ufffd" in decode_by_library(tokenizers_by_kind["byte_level"], tokens)
    assert tokenizers_by_kind["byte_level"].decode(tokens) == decode_by_library(
        tokenizers_by_kind["byte_level"], tokens
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["sentencepiece", "unigram", "words"])
def test_any_tokens_but_bytes_decode_as_in_the_library(
    tokenizers_by_kind: dict[str, HFTokenizer], kind: str, seed: int
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    tokens = [
        token
        for token in random_ids(tokenizer, seed, 300)
        if tokenizer._text_tokenizer.id_to_token(token) not in BYTES
    ]
    for start in range(0, len(tokens), 7):
        part = tokens[start:]
        assert tokenizer.decode(part) == decode_by_library(tokenizer, part)


@pytest.mark.parametrize("seed", range(10))
def test_joined_deltas_are_the_text_of_all_tokens(tokenizer: HFTokenizer, seed: int) -> None:
    tokens = random_ids(tokenizer, seed, 200)
    assert "".join(decode_stepwise(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("seed", range(4))
def test_several_tokens_at_once_make_the_text_that_is_certain_after_each(
    tokenizer: HFTokenizer, seed: int
) -> None:
    """Between calls for one token too, and where the first tokens have no text."""
    draw = random.Random(seed)
    tokens = [tokenizer.eos_token] * (seed % 2) + random_ids(tokenizer, seed, 80)
    one_by_one, decoder = tokenizer.create_detokenizer(), tokenizer.create_detokenizer()
    start = 0
    while start < len(tokens):
        end = start + draw.randrange(6)
        expected = "".join(map(one_by_one.push, tokens[start:end]))
        assert decoder.extend(tokens[start:end]) == expected
        assert decoder.push(tokens[start]) == one_by_one.push(tokens[start])
        start = max(end, start + 1)
    assert decoder.flush() == one_by_one.flush()


def test_a_character_of_several_tokens_comes_whole_with_its_last(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    """𓀀 is not in the vocabulary, so it is four bytes; the rest of the text is not held back."""
    for kind in ("byte_level", "sentencepiece"):
        tokenizer = tokenizers_by_kind[kind]
        tokens = [token for token in tokenizer.encode("a𓀀b") if token != tokenizer.bos_id]
        shown = [text for text in decode_stepwise(tokenizer, tokens) if text]
        assert shown[-2:] == ["𓀀", "b"]
        assert "".join(shown) == "a𓀀b"


def test_a_delta_never_ends_inside_a_character(tokenizers_by_kind: dict[str, HFTokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    for text in TEXTS:
        for delta in decode_stepwise(tokenizer, tokenizer.encode(text)):
            assert "\ufffd" not in delta
            assert all(unicodedata.category(char) != "Cs" for char in delta)


def test_bytes_that_make_no_character_are_shown_once_that_is_certain(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["sentencepiece"]
    lead, letter = (tokenizer._text_tokenizer.token_to_id(name) for name in ("<0xF0>", "a"))
    assert decode_stepwise(tokenizer, [letter, lead, letter]) == ["a", "", "\ufffda", ""]
    assert decode_stepwise(tokenizer, [letter, lead]) == ["a", "", "\ufffd"]


def test_the_space_before_the_first_word_is_no_text_and_later_ones_are(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    for kind in ("sentencepiece", "unigram"):
        tokenizer = tokenizers_by_kind[kind]
        tokens = tokenizer.encode("was fair")
        assert tokenizer.decode(tokens) == "was fair"
        assert tokenizer.token_text(tokens[-1]).startswith((" ", "r"))
        special = tokenizer.eos_token
        assert tokenizer.decode([special, *tokens]) == "was fair"


def test_special_ids_and_ids_of_no_token_have_no_text(tokenizer: HFTokenizer) -> None:
    tokens = tokenizer.encode("t5 was")
    silent = [tokenizer.eos_token, tokenizer.vocab_size, 10**9, -1]
    spread = [each for token in tokens for each in (token, *silent)]
    assert tokenizer.decode(spread) == tokenizer.decode(tokens)


def test_a_stop_string_is_found_across_tokens(tokenizers_by_kind: dict[str, HFTokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    stream = StopStringDetokenizer(tokenizer.create_detokenizer(), ("scheduler, and",))
    text = "".join(map(stream.push, tokenizer.encode(LINES[0])))
    assert (text, stream.matched_stop) == ("Once upon a time there was a ", "scheduler, and")


def test_a_long_run_of_broken_bytes_costs_no_more_per_token(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    """Nothing is held but the last character's bytes."""
    decoder = tokenizers_by_kind["sentencepiece"].create_detokenizer()
    stray = tokenizers_by_kind["sentencepiece"]._text_tokenizer.token_to_id("<0x80>")
    assert all(decoder.push(stray) == "\ufffd" for _ in range(2000))


# Encoding.


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_names_of_special_tokens_in_a_text_are_text(
    tokenizers_by_kind: dict[str, HFTokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    text = "a <|end|> b <s> c<unk>"
    tokens = tokenizer.encode(text, parse_special_tokens=False)
    assert set(tokens[1:]).isdisjoint(tokenizer._special_tokens)
    assert tokenizer.decode(tokens) == text


def test_the_bos_that_a_checkpoint_puts_before_prompts_is_there_once(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    assert (
        tokenizers_by_kind["sentencepiece"].encode("was")[0]
        == tokenizers_by_kind["sentencepiece"].bos_id
        == 1
    )
    assert tokenizers_by_kind["sentencepiece"].encode("was").count(1) == 1
    assert tokenizers_by_kind["byte_level"].encode("was").count(1) == 0


def test_bare_ids_are_those_of_a_prompt_without_what_is_around_it(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["sentencepiece"]
    for text in ("was", "<s>was"):
        bare = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.bos_id, *bare] == tokenizer.encode(text)
    byte_level = tokenizers_by_kind["byte_level"]
    assert byte_level.encode("was", add_special_tokens=False) == byte_level.encode("was")


def test_a_prompt_is_the_ids_that_transformers_gives(tokenizer: HFTokenizer) -> None:
    for text in (*TEXTS, "<s>was <|end|>fair<|end|>\n<s>", "<|end|> ", "a<s"):
        for added in (True, False):
            expected = tokenizer._fast_tokenizer(text, add_special_tokens=added)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=added) == expected


def test_a_lone_surrogate_is_refused_as_the_protocol_says(tokenizer: HFTokenizer) -> None:
    for parse_special_tokens in (True, False):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a\ud800b", parse_special_tokens=parse_special_tokens)


def test_a_prompt_is_not_cut_at_a_length_that_the_file_names(tmp_path: Path) -> None:
    backend = create_byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = HFTokenizer.from_folder(save_tokenizer(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(LINES[0])) == LINES[0]
    assert len(tokenizer.encode("a")) == 1


# One token.


def test_bytes_of_tokens_are_the_bytes_of_the_text(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    for text in TEXTS:
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert joined == text.encode()


def test_a_token_in_a_listing_is_its_text_its_name_or_its_bytes(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    one, other = tokenizers_by_kind["sentencepiece"], tokenizers_by_kind["byte_level"]
    assert one.token_text(one._text_tokenizer.token_to_id("<0xF0>")) == "bytes:\\xf0"
    assert one.token_text(one._text_tokenizer.token_to_id("<0x61>")) == "a"
    assert one.token_bytes(one.eos_token) == b"<|end|>"
    assert other.token_text(other.eos_token) == "<|end|>"
    assert other.token_text(other._text_tokenizer.token_to_id("<think>")) == "<think>"
    assert other.token_text(other._text_tokenizer.token_to_id("two words")) == "two words"
    assert (other.token_text(other.vocab_size), other.token_bytes(-1)) == ("", b"")
    assert one.token_piece(one._text_tokenizer.token_to_id("<0xF0>")) == "<0xF0>"
    assert other.token_piece(other.vocab_size) == ""


# Chat.


def test_a_chat_is_rendered_by_the_template_and_its_names_become_special_ids(
    tmp_path: Path,
) -> None:
    tokenizer = HFTokenizer.from_folder(
        save_tokenizer(tmp_path, create_byte_level(), chat_template=VALID_TEMPLATE)
    )
    assert tokenizer.chat_template == VALID_TEMPLATE
    text = tokenizer.render([{"role": "user", "content": "was"}])
    assert text == "<s>user: was<|end|>"
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "was"}], ChatEnd.END_OF_MESSAGE, {}
    )
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_token)
    assert tokenizer.eos_token not in tokenizer.encode(text, parse_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% for",
    ],
)
def test_a_template_that_fails_is_a_refusal_in_one_line(tmp_path: Path, template: str) -> None:
    tokenizer = HFTokenizer.from_folder(
        save_tokenizer(tmp_path, create_byte_level(), chat_template=template)
    )
    with pytest.raises(InvalidRequest, match=r"^messages: the model's chat template refuses"):
        tokenizer.render([{"role": "user", "content": "was"}])


def test_a_model_without_a_template_refuses_chats(
    tokenizers_by_kind: dict[str, HFTokenizer],
) -> None:
    assert tokenizers_by_kind["words"].chat_template is None
    with pytest.raises(InvalidRequest, match=r"^messages: the model has no chat template"):
        tokenizers_by_kind["words"].render([{"role": "user", "content": "was"}])


# What is refused.


def refuse_folder(folder: Path, end_ids: Sequence[int] = ()) -> str:
    with pytest.raises(InvalidConfig) as caught:
        HFTokenizer.from_folder(folder, end_ids)
    assert caught.value.option == "model" and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "has no tokenizer.json. Add the files" in refuse_folder(tmp_path)
    (tmp_path / "tekken.json").touch()
    assert "has no tokenizer.json; its tekken.json is not read. Add" in refuse_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "nonesuch"}}'])
def test_a_tokenizer_that_is_no_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    save_tokenizer(tmp_path, create_word_level())
    (tmp_path / "tokenizer.json").write_text(text)
    assert "cannot be loaded" in refuse_folder(tmp_path)


def test_a_tokenizer_without_an_end_takes_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, create_byte_level(), eos_token=None)
    assert "names an end token" in refuse_folder(folder)
    assert HFTokenizer.from_folder(folder, [7, 8]).eos_token == 7


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Strip(" ", 0, 1),
        decoders.Strip(" ", 1, 0),
        decoders.Replace(tokenizers.Regex(" +"), " "),
    ],
    ids=lambda decoder: type(decoder).__name__,
)
def test_a_decoder_that_is_not_known_is_refused_by_name(decoder: Any) -> None:
    with pytest.raises(InvalidConfig, match=f'has the decoder {{"type": "{type(decoder).__name__}'):
        parse_decoding(decoder)


def test_a_name_with_no_byte_in_it_is_text_where_bytes_are_named() -> None:
    """`<0xZZ>` has the form of a byte's name, and its digits are none."""
    decoder = decoders.ByteFallback()
    decoding = parse_decoding(decoder)
    assert [decoding.piece(name) for name in ("<0x41>", "<0xZZ>")] == [b"A", "<0xZZ>"]
    assert decoder.decode(["<0x41>", "<0xZZ>"]) == "A<0xZZ>"


def test_tokens_without_a_decoder_have_spaces_between_them() -> None:
    decoding = parse_decoding(None)
    assert (decoding.first_piece("a"), decoding.piece("b"), decoding.num_stripped_spaces) == (
        "a",
        " b",
        0,
    )


def test_a_tokenizer_is_the_same_in_another_process(tokenizer: HFTokenizer) -> None:
    again = pickle.loads(pickle.dumps(tokenizer))
    tokens = random_ids(tokenizer, 5, 200)
    text = tokenizer.decode(tokens)
    assert again.decode(tokens) == text
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.eos_token, again.vocab_size) == (tokenizer.eos_token, tokenizer.vocab_size)
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_with_shared_components_is_equal_to_a_parsed_copy(kind: str) -> None:
    """The added tokens alternate between special and not, and some are in the vocabulary."""
    original = KINDS[kind]()
    original.add_tokens([AddedToken("<plain>", lstrip=True), AddedToken("t7", single_word=True)])
    original.add_special_tokens([AddedToken("<special>", rstrip=True, normalized=False)])
    original.add_tokens([AddedToken("<last>", normalized=True)])
    shared = share_components(original)
    assert shared.to_str() == tokenizers.Tokenizer.from_str(original.to_str()).to_str()
    shared.encode_special_tokens = True
    assert not original.encode_special_tokens
    marked = "a <special> b<plain>c <last>t7"
    assert shared.token_to_id("<special>") in original.encode(marked).ids
    assert shared.token_to_id("<special>") not in shared.encode(marked).ids


def test_a_tokenizer_with_shared_components_has_no_second_vocabulary() -> None:
    """A change of one model is a change of the other."""
    original = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    shared = share_components(original)
    original.model.unk_token = "a"
    assert shared.model.unk_token == "a"


@pytest.mark.parametrize(
    ("vocabulary", "found"),
    [
        ({"t0": 0, "t1": 1, "t2": 2}, None),
        ({"t0": 0, "t1": 1, "t2": 2, "t3": 3}, 3),
        ({"t0": 0, "t1": 1, "other": 2}, 2),
        ({"t0": 0, "t2": 1, "t1": 2}, 1),
    ],
    ids=["the same", "one more", "another one", "two swapped"],
)
def test_the_first_token_that_two_tokenizers_do_not_share_is_found(
    tmp_path: Path, vocabulary: dict[str, int], found: int | None
) -> None:
    def of(name: str, ids: dict[str, int]) -> HFTokenizer:
        made = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="t0"))
        return HFTokenizer.from_folder(save_tokenizer(tmp_path / name, made))

    one, other = of("one", {"t0": 0, "t1": 1, "t2": 2}), of("other", vocabulary)
    assert first_differing_token(one, other) == first_differing_token(other, one) == found
