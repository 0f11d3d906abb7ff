"""HFTokenizer: a checkpoint's tokenizer as a forge.tokenizer.Tokenizer.

Owns the bytes of each token. Encoding is that of the `tokenizers` library. Decoding is not: the
library decodes whole sequences, and text is streamed while a sequence grows. Knows no model.

    decoder of tokenizer.json     one token    its bytes
    ByteLevel                     ĠðŁ          20 f0 9f       a space and half of an emoji
    Replace ▁, ByteFallback       ▁the         20 74 68 65
                                  <0xF0>       f0
    Metaspace                     ▁the         20 74 68 65    74 68 65 where it is the first

Always true: a token's bytes depend on the token and on whether it is the first. So an incremental
UTF-8 decoder returns each character with its last byte, in O(1) a token, and the joined deltas are
the text of all tokens. Bytes that form no character become U+FFFD, one for each maximal subpart
(Unicode, section 3.9), as the library does for ByteLevel. For ByteFallback the library writes one
for each byte of the whole run, which is unknown until the run ends.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import tokenizers
import transformers

from forge.errors import InvalidConfig, InvalidRequest, one_line
from forge.models.hf.progress import silence_transformers
from forge.tokenizer import ChatEnd, ChatMessage, check_chat_length, match_any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which any one makes a tokenizer."""

OTHER_TOKENIZER_FILES = ("tekken.json", "tiktoken.model", "qwen.tiktoken")
"""Files of other libraries, which a refusal names."""

BREAK_MARK = "\udcff"
"""Character that breaks names of special tokens in a message while its chat is rendered.

No valid text contains it.
"""

_BAR = "\uff5c"
VISIBLE_SPECIAL_TOKENS = frozenset(
    {
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<minimax:tool_call>", "</minimax:tool_call>", "<|tool_call|>"),
        *("<|action_start|>", "<|action_end|>", "<|plugin|>"),
        *(
            f"<{_BAR}tool▁{name}{_BAR}>"
            for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
        ),
    }
)
"""Special tokens that are decoded to text: reasoning and tool calls are parsed from it."""
SPOKEN_KEYS = ("content", "reasoning", "reasoning_content", "thinking")
"""Keys of an assistant's message in which the names of VISIBLE_SPECIAL_TOKENS are tokens.

The model wrote them there as tokens, and their text came from decoding. They mark reasoning and
calls within a message, and can neither end it nor begin another.
"""
CHANNEL_TOKENS = frozenset(
    {"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"}
)
"""Special tokens of gpt-oss that are decoded to text, where a vocabulary has all of them."""

PieceDecoder = Callable[[str], str | bytes]


class TokenDecoding(NamedTuple):
    """Functions from tokens to bytes.

    piece                 text or bytes of a token that is not the first
    first_piece           text or bytes of the first token
    num_stripped_spaces   spaces that the whole text loses at its start
    """

    piece: PieceDecoder
    first_piece: PieceDecoder
    num_stripped_spaces: int


class HFTokenizer:
    """Tokenizer of a checkpoint: text to ids and back.

    bos_id          id that begins a text, or None
    chat_template   source of the template that renders messages, or None
    """

    def __init__(self, fast_tokenizer: Any, end_ids: Sequence[int] = ()) -> None:
        self._fast_tokenizer = fast_tokenizer
        # A second tokenizer: names of special tokens are plain text here, not in a rendered chat.
        self._text_tokenizer = share_components(fast_tokenizer.backend_tokenizer)
        self._text_tokenizer.encode_special_tokens = True
        added = self._text_tokenizer.get_added_tokens_decoder()
        self._special_tokens: dict[int, str] = {
            token: each.content for token, each in added.items() if each.special
        }
        # Configured now: threads that encode must not see it change.
        self._template_tokenizer = fast_tokenizer.backend_tokenizer
        self._template_tokenizer.no_truncation()
        self._template_tokenizer.no_padding()
        visible = VISIBLE_SPECIAL_TOKENS
        if CHANNEL_TOKENS <= set(self._special_tokens.values()):
            visible |= CHANNEL_TOKENS
        self._skipped_tokens = {
            token: name for token, name in self._special_tokens.items() if name not in visible
        }
        names = set(self._special_tokens.values())
        self._special_pattern = re.compile(match_any(names))
        self._special_starts = _compile_starts(names)
        self._hidden_starts = _compile_starts(names - VISIBLE_SPECIAL_TOKENS)
        self._vocab_size = 1 + max(self._text_tokenizer.get_vocab(with_added_tokens=True).values())
        self._decoding = parse_decoding(self._text_tokenizer.decoder)
        self._pieces = _PieceCache(
            self.is_skipped, lambda token: self._decode_token(token, self._decoding.piece)
        )
        self.bos_id: int | None = fast_tokenizer.bos_token_id
        ends = [end for end in (fast_tokenizer.eos_token_id, *end_ids) if end is not None]
        if not ends:
            raise InvalidConfig(
                "model",
                "neither its tokenizer nor its config names an end token",
                "Add eos_token_id to generation_config.json",
            )
        self._eos_token = int(ends[0])
        self._end_ids = tuple(end_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        # The arguments can be pickled; everything else is built from them.
        return type(self), (self._fast_tokenizer, self._end_ids)

    @classmethod
    def from_folder(
        cls, folder: Path, end_ids: Sequence[int] = (), class_name: str = "AutoTokenizer"
    ) -> Self:
        """Return the tokenizer of a folder. Raise InvalidConfig where it cannot be loaded.

        end_ids      end tokens for a tokenizer that names none
        class_name   class of transformers that loads it. AutoTokenizer reads which one it is, and
                     its import takes a second more
        """
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            found = [name for name in OTHER_TOKENIZER_FILES if (folder / name).exists()]
            also = f"; its {found[0]} is not read" if found else ""
            raise InvalidConfig(
                "model", f"{folder} has no tokenizer.json{also}", "Add the files of its tokenizer"
            )
        with silence_transformers():
            try:
                fast_tokenizer = getattr(transformers, class_name).from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            # Several libraries read its files, and one of them raises bare Exceptions.
            except Exception as error:
                raise InvalidConfig(
                    "model",
                    f"the tokenizer of {folder} cannot be loaded: {one_line(error)}",
                    "Fetch it again",
                ) from None
        if not fast_tokenizer.is_fast:
            raise InvalidConfig(
                "model",
                f"{type(fast_tokenizer).__name__} is a tokenizer without a tokenizer.json",
                "Save it as one with the `tokenizers` library",
            )
        return cls(fast_tokenizer, end_ids)

    @property
    def class_name(self) -> str:
        """Name of the tokenizer's class in transformers."""
        return type(self._fast_tokenizer).__name__

    def equals_its_class(self, folder: Path) -> bool:
        """Return whether the tokenizer's class alone loads an equal tokenizer from the folder."""
        if getattr(transformers, self.class_name, None) is not type(self._fast_tokenizer):
            return False
        try:
            other = type(self).from_folder(folder, self._end_ids, self.class_name)
        except InvalidConfig:
            return False
        return self._description() == other._description()

    def _description(self) -> tuple[Any, ...]:
        """Return all that texts and ids depend on."""
        fast = self._fast_tokenizer
        return (
            fast.backend_tokenizer.to_str(),
            fast.special_tokens_map,
            fast.chat_template,
            (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id, fast.unk_token_id),
        )

    @property
    def vocab_size(self) -> int:
        """Highest id plus one.

        The model's logits may be wider; ids from here on have no text.
        """
        return self._vocab_size

    @property
    def eos_token(self) -> int:
        """Id that ends an output."""
        return self._eos_token

    @property
    def own_eos_token(self) -> int | None:
        """Id that the tokenizer's own files name as the end of a text, or None."""
        token = self._fast_tokenizer.eos_token_id
        return None if token is None else int(token)

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids of special tokens. Decoding skips those that show no reasoning or call."""
        return self._special_tokens.keys()

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template; of several, the one for tools."""
        template = self._fast_tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        return template if isinstance(template, str) else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of a prompt. Raise UnicodeEncodeError on a lone surrogate.

        add_special_tokens     with those that the checkpoint adds to a prompt, such as BOS: also
                               where the text begins with its name, as transformers does
        parse_special_tokens   the name of a special token is that token; False: plain text, unless
                               the vocabulary also has it as a word, which BPE never has
        """
        text.encode()
        backend = self._template_tokenizer if parse_special_tokens else self._text_tokenizer
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens. Special ids and ids of no token have none."""
        ids = list(tokens)
        first = next((i for i, token in enumerate(ids) if not self.is_skipped(token)), len(ids))
        data = self.decode_pieces(ids[first + 1 :])
        if first < len(ids):
            data = self.decode_first_piece(ids[first]) + data
        text = data.decode(errors="replace")
        num_spaces = len(text) - len(text.lstrip(" "))
        return text[min(num_spaces, self.num_stripped_spaces) :]

    def create_detokenizer(self, previous: int | None = None) -> HFDetokenizer:
        """Return a new incremental decoder.

        previous   token before the decoded ones. After none, and after a special one, they begin a
                   text, whose first space SentencePiece does not have
        """
        return HFDetokenizer(self, previous in self._special_tokens or previous is None)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token inside a text; for a special token its name."""
        name = self._special_tokens.get(token)
        return self.decode_piece(token) if name is None else name.encode()

    def token_text(self, token: int) -> str:
        """Return one token as text, or `bytes:\\xNN` where its bytes alone form no text."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it, such as `Ġthe`; "" for an unknown id."""
        return self._text_tokenizer.id_to_token(token) or ""

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], end: ChatEnd, variables: Mapping[str, Any]
    ) -> list[int]:
        """Return the ids of the messages as the checkpoint's template renders them.

        A special token's name is that token where the template wrote it. In a message or a tool's
        definition it is plain text, but for VISIBLE_SPECIAL_TOKENS in what the assistant said:
        templates search it for them. BOS is added by the template only. Raise InvalidRequest, and
        UnicodeEncodeError on a lone surrogate.
        """
        text = self.render(
            [self._break_message(message) for message in messages],
            end,
            self._break_special_names(variables, self._special_starts),
        )
        check_chat_length(text)
        tokens: list[int] = []
        for part in self._split_marked(text):
            tokens += (
                self._encode_marked(part)
                if BREAK_MARK in part
                else self.encode(part, add_special_tokens=False)
            )
        return tokens

    def _break_message(self, message: ChatMessage) -> Any:
        """Return the message with names of special tokens broken, as its role and keys say."""
        spoken = SPOKEN_KEYS if message.get("role") == "assistant" else ()
        return {
            self._break_special_names(key, self._special_starts): self._break_special_names(
                value, self._hidden_starts if key in spoken else self._special_starts
            )
            for key, value in message.items()
        }

    def _encode_marked(self, part: str) -> list[int]:
        """Return the ids of a part that contains BREAK_MARK."""

        def encode(text: str) -> list[int]:
            ids: list[int] = self._text_tokenizer.encode(text, add_special_tokens=False).ids
            return ids

        tokens = encode(part.replace(BREAK_MARK, ""))
        if self._special_tokens.keys().isdisjoint(tokens):
            return tokens
        # Unigram takes a special token's name for a word. No piece has a whole name.
        return [token for piece in part.split(BREAK_MARK) for token in encode(piece)]

    def _break_special_names(self, value: Any, starts: re.Pattern[str]) -> Any:
        """Return the value with names in its texts broken by BREAK_MARK after these starts."""
        if isinstance(value, str):
            value.encode()  # Raises for a surrogate, so every BREAK_MARK is added here.
            return starts.sub(rf"\1{BREAK_MARK}", value)
        if isinstance(value, Mapping):
            return {
                self._break_special_names(key, starts): self._break_special_names(inner, starts)
                for key, inner in value.items()
            }
        return (
            [self._break_special_names(inner, starts) for inner in value]
            if isinstance(value, list | tuple)
            else value
        )

    def _split_marked(self, text: str) -> Iterator[str]:
        """Yield the text in parts, so that a part with BREAK_MARK has no special token."""
        if BREAK_MARK not in text:
            yield text
            return
        unmarked_start = end = 0  # Text in [unmarked_start, end) has no mark and is not yielded.
        for name in [*self._special_pattern.finditer(text), None]:
            stop = len(text) if name is None else name.start()
            if BREAK_MARK in text[end:stop]:
                yield text[unmarked_start:end]
                yield text[end:stop]
                unmarked_start = stop
            end = stop if name is None else name.end()
        yield text[unmarked_start:end]

    def render(
        self,
        messages: Sequence[ChatMessage],
        end: ChatEnd = ChatEnd.GENERATION_PROMPT,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the messages as the checkpoint's template renders them.

        Raise InvalidRequest where there is no template or it raises an error for these messages.
        """
        if not self._fast_tokenizer.chat_template:
            raise InvalidRequest(
                "messages",
                "the model has no chat template",
                "Send a prompt to /v1/completions",
                "template_error",
            )
        try:
            text = self._fast_tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=end is ChatEnd.GENERATION_PROMPT,
                continue_final_message=end is ChatEnd.CONTINUE_FINAL_MESSAGE,
                **variables,
            )
        # A template is a program of the checkpoint, run in a sandbox. It may raise anything.
        except Exception as error:
            raise InvalidRequest(
                "messages",
                "the model's chat template refuses them: "
                f"{one_line(error).replace(BREAK_MARK, '')}",
                "Send roles and contents that it takes",
                "template_error",
            ) from None
        return str(text)

    def is_skipped(self, token: int) -> bool:
        """Return whether the token has no text: it is special, or no token."""
        return token in self._skipped_tokens or not 0 <= token < self._vocab_size

    def decode_piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text that is not empty. O(1).

        b"" for a token without text.
        """
        return self._pieces[token]

    def decode_pieces(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that the tokens add to a text that is not empty."""
        return b"".join(map(self._pieces.__getitem__, tokens))

    def decode_first_piece(self, token: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        return self._decode_token(token, self._decoding.first_piece)

    @property
    def num_stripped_spaces(self) -> int:
        """Spaces that a text loses at its start."""
        return self._decoding.num_stripped_spaces

    def _decode_token(self, token: int, piece: PieceDecoder) -> bytes:
        name = self._text_tokenizer.id_to_token(token) if 0 <= token < self._vocab_size else None
        decoded = b"" if name is None else piece(name)
        return decoded.encode() if isinstance(decoded, str) else decoded


def share_components(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a second tokenizer with the same model and the same added tokens.

    The vocabulary and the merges are shared: a copy would parse them again, half a second for
    150,000 tokens. Truncation and padding are not carried over.
    """
    shared = tokenizers.Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(tokenizer, name)
        if component is not None:
            setattr(shared, name, component)
    # The order of addition decides the ids of tokens that the model's vocabulary lacks.
    shared.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    return shared


def _compile_starts(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of every character at which a name starts, also inside another name."""
    return re.compile(f"(?=(?:{match_any(names)}))(.)", re.DOTALL)


class _PieceCache(dict[int, bytes]):
    """Bytes of each token inside a text, decoded when first read; b"" for a skipped token."""

    def __init__(self, is_skipped: Callable[[int], bool], decode: Callable[[int], bytes]) -> None:
        super().__init__()
        self._is_skipped = is_skipped
        self._decode = decode

    def __missing__(self, token: int) -> bytes:
        # A skipped token is not kept: the ids of no token have no bound.
        if self._is_skipped(token):
            return b""
        data = self[token] = self._decode(token)
        return data


class HFDetokenizer:
    """Incremental decoder of one output: each character is returned with its last byte.

    begins_text   the output begins a text, and does not continue one
    """

    def __init__(self, tokenizer: HFTokenizer, begins_text: bool = True) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_incomplete = False
        self._spaces_to_strip = tokenizer.num_stripped_spaces if begins_text else 0
        self._has_started = not begins_text

    def push(self, token: int) -> str:
        """Return the text that is complete after this token."""
        if self._has_started:
            data = self._tokenizer.decode_piece(token)
        elif self._tokenizer.is_skipped(token):
            return ""
        else:
            data, self._has_started = self._tokenizer.decode_first_piece(token), True
        # Most pieces are ASCII, and the decoder has no bytes of an incomplete character.
        if data.isascii() and not self._has_incomplete:
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
            self._has_incomplete = bool(self._decoder.getstate()[0])
        return self._strip_leading_spaces(text) if self._spaces_to_strip else text

    def extend(self, tokens: Sequence[int]) -> str:
        """Return the text that is complete after these tokens."""
        parts, num_pushed = [], 0
        while not self._has_started and num_pushed < len(tokens):
            parts.append(self.push(tokens[num_pushed]))
            num_pushed += 1
        text = self._decoder.decode(self._tokenizer.decode_pieces(tokens[num_pushed:]))
        self._has_incomplete = bool(self._decoder.getstate()[0])
        parts.append(self._strip_leading_spaces(text) if self._spaces_to_strip else text)
        return "".join(parts)

    def flush(self) -> str:
        """Return the remaining text, with incomplete bytes replaced."""
        return self._strip_leading_spaces(self._decoder.decode(b"", final=True))

    def _strip_leading_spaces(self, text: str) -> str:
        while self._spaces_to_strip and text:
            if text[0] != " ":
                self._spaces_to_strip = 0
                break
            text, self._spaces_to_strip = text[1:], self._spaces_to_strip - 1
        return text


# The library's decoders, applied to one token.


def parse_decoding(decoder: Any) -> TokenDecoding:
    """Return how a decoder turns tokens into bytes. Raise InvalidConfig for an unknown decoder."""
    if decoder is None:  # The library then joins the tokens by spaces.
        return TokenDecoding(lambda token: " " + token, lambda token: token, 0)
    stages = list(_flatten_stages(json.loads(decoder.__getstate__())))
    pieces: list[PieceDecoder] = []
    first_pieces: list[PieceDecoder] = []
    num_stripped_spaces = 0
    for index, stage in enumerate(stages):
        match stage:
            case {"type": "Fuse"}:
                continue
            case {"type": "ByteLevel"}:
                pieces.append(_byte_level)
                first_pieces.append(_byte_level)
            case {"type": "ByteFallback"}:
                pieces.append(_byte_fallback)
                first_pieces.append(_byte_fallback)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                pieces.append(_build_replace(old, new))
                first_pieces.append(_build_replace(old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                pieces.append(_build_replace(mark, " "))
                keeps_space = stage.get("prepend_scheme", "always") == "never"
                first_pieces.append(_build_replace(mark, " " if keeps_space else ""))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if {
                "type": "Fuse"
            } in stages[:index]:
                num_stripped_spaces += start
            case _:
                raise InvalidConfig(
                    "model",
                    f"its tokenizer has the decoder {json.dumps(stage)[:80]}, which is not "
                    "supported",
                    "Serve a model with a byte-level or SentencePiece tokenizer",
                )
    return TokenDecoding(_chain(pieces), _chain(first_pieces), num_stripped_spaces)


def _flatten_stages(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the stages of a decoder, those of a sequence one by one."""
    if stage.get("type") == "Sequence":
        for each in stage["decoders"]:
            yield from _flatten_stages(each)
    else:
        yield stage


def _chain(stages: Sequence[PieceDecoder]) -> PieceDecoder:
    """Return the stages as one function, which stops when a token is bytes."""

    def piece(token: str) -> str | bytes:
        decoded: str | bytes = token
        for stage in stages:
            if isinstance(decoded, bytes):
                break
            decoded = stage(decoded)
        return decoded

    return piece


def _build_replace(old: str, new: str) -> PieceDecoder:
    return lambda token: token.replace(old, new)


def _byte_fallback(token: str) -> str | bytes:
    """Return the byte of a token like `<0x0A>`; other tokens as they are."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token
    return token


def _byte_level(token: str) -> str | bytes:
    """Return the bytes of a token's characters, or the token if one stands for no byte."""
    try:
        return bytes([BYTE_BY_CHARACTER[char] for char in token])
    except KeyError:
        return token


def _bytes_by_character() -> dict[str, int]:
    """Return the byte of each character of byte-level tokens.

    Printable characters of Latin-1 stand for themselves; the other bytes follow from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


BYTE_BY_CHARACTER = _bytes_by_character()
"""Alphabet of byte-level tokens (GPT-2, 2019)."""
