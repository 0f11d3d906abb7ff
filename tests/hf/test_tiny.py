"""The embedded pair: the contents of its folders, the figures of its log, and that it is served.

The log's figures are measured again on a little of the text that no model was trained on. Another
Python has another library, so exact comparisons are skipped where the bytes are not the same.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from forge import LLM, SamplingParams  # noqa: E402
from forge.bench.tiny import (  # noqa: E402
    FOLDERS,
    ROLES,
    SAMPLE_FILES,
    SourceText,
    agreement,
    choose_sample,
    encode,
    load_checkpoint,
    read_library,
    sample_bits,
    save_checkpoint,
    split_windows,
)
from forge.bench.train_tiny import (  # noqa: E402
    RECIPES,
    Recipe,
    Stage,
    create_distillation_loss,
    text_loss,
    train,
)
from forge.engine import Engine  # noqa: E402
from forge.models import loader as loading  # noqa: E402
from forge.models.embedded import EMBEDDED_CHECKPOINTS, embedded_folder  # noqa: E402
from forge.models.hf.tokenizer import HFTokenizer  # noqa: E402
from forge.models.loader import load_model  # noqa: E402
from forge.request import Request  # noqa: E402
from forge.tokenizer import ByteTokenizer, ChatEnd  # noqa: E402
from tests.hf.families import generate_greedy  # noqa: E402
from tests.texts import ANY_CHARACTER  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(loading.__file__).parent
LOG = json.loads((ROOT / "bench" / "results" / "tiny-training.json").read_text())["figures"]
MAX_BYTES = 8 * 10**6


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def texts() -> list[SourceText]:
    return read_library()


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    """The shipped models in float32, as transformers opens them."""
    return {part: load_checkpoint(MODELS / FOLDERS[part]) for part in ROLES}


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.from_folder(MODELS / "tiny")


# The folders.


def test_both_checkpoints_together_are_at_most_eight_megabytes() -> None:
    sizes = [file.stat().st_size for part in ROLES for file in (MODELS / FOLDERS[part]).iterdir()]
    assert sum(sizes) <= MAX_BYTES


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_the_draft_has_the_targets_tokenizer(name: str) -> None:
    target, draft = ((MODELS / FOLDERS[part] / name).read_bytes() for part in ROLES)
    assert target == draft


@given(st.text(ANY_CHARACTER, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back_and_a_byte_is_a_token(tokenizer: HFTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == ByteTokenizer().encode(text)
    assert tokenizer.decode(ids) == text


def test_its_ids_are_those_of_the_byte_tokenizer(tokenizer: HFTokenizer) -> None:
    plain = ByteTokenizer()
    assert tokenizer.vocab_size == plain.vocab_size
    assert tokenizer.eos_token == plain.eos_token
    assert set(tokenizer.special_token_ids) == set(plain.special_token_ids)
    assert all(tokenizer.token_bytes(i) == plain.token_bytes(i) for i in range(plain.vocab_size))


TOOL = {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "<"}}}
TALK = [
    {"role": "user", "content": "hi\n<|end|>"},
    {"role": "assistant", "content": " é", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
]


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL, TOOL]}], ids=["no tools", "tools"])
@pytest.mark.parametrize("end", ChatEnd)
def test_a_chat_is_the_plain_one(tokenizer: HFTokenizer, end: ChatEnd, tools: Any) -> None:
    # A message that calls tools is never left open.
    for count in (1, 3) if end is ChatEnd.CONTINUE_FINAL_MESSAGE else (1, 2, 3):
        made = tokenizer.apply_chat_template(TALK[:count], end, tools)
        assert made == ByteTokenizer().apply_chat_template(TALK[:count], end, tools)


# The log.


@pytest.mark.parametrize("part", ROLES)
def test_the_log_is_about_the_files_that_ship(part: str, modules: dict[str, Any]) -> None:
    entry, config = LOG[part], modules[part].config
    folder = MODELS / FOLDERS[part]
    assert entry["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert entry["parameters"] == sum(tensor.numel() for tensor in modules[part].parameters())
    assert entry["shape"] == {name: getattr(config, name) for name in entry["shape"]}
    assert entry["shape"] == RECIPES[part].shape


@pytest.mark.parametrize("part", ROLES)
def test_bits_of_held_out_text_are_those_of_the_log(
    part: str, modules: dict[str, Any], texts: list[SourceText]
) -> None:
    entry = LOG[part]["sample"]
    found = sample_bits(modules[part], choose_sample(texts))
    same = [name for name in entry if found.get(name, {}).get("sha256") == entry[name]["sha256"]]
    if not same:
        pytest.skip("this Python's library has other text than the one of the log")
    for name in same:
        assert found[name]["bits"] == pytest.approx(entry[name]["bits"], abs=0.01)


def test_every_file_of_the_sample_is_held_out(texts: list[SourceText]) -> None:
    assert len(LOG["target"]["sample"]) == SAMPLE_FILES
    assert set(LOG["target"]["sample"]) <= set(LOG["corpus"]["held_out_files"])
    assert all(SourceText(name, b"").is_holdout for name in LOG["corpus"]["held_out_files"])
    held_out = [text for text in texts if text.is_holdout]
    assert 0.02 < len(held_out) / len(texts) < 0.1


def test_draft_and_target_agree_on_held_out_text_as_often_as_the_log_says(
    modules: dict[str, Any], texts: list[SourceText]
) -> None:
    windows = split_windows(encode([text for text in texts if text.is_holdout]), 6)
    found = agreement(modules["target"], modules["draft"], windows)
    assert found == pytest.approx(LOG["draft"]["agreement"], abs=0.08)


# Served.


@pytest.mark.parametrize("name", EMBEDDED_CHECKPOINTS)
def test_the_engine_scores_a_text_as_transformers_does(
    name: str, modules: dict[str, Any], texts: list[SourceText]
) -> None:
    """In float64 and in chunks. Norms of transformers are in float32, whatever the rest is."""
    prompt = encode(choose_sample(texts)[:1]).tolist()
    module = modules["target" if name == "tiny" else "draft"].double()
    logits = module(torch.tensor([prompt])).logits[0, :-1]
    meant = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    params = SamplingParams(temperature=0, max_tokens=32, prompt_logprobs=0, ignore_eos=True)
    with LLM(
        str(embedded_folder(name)), device="cpu", dtype="float64", max_num_batched_tokens=96
    ) as llm:
        (answer,) = llm.generate([prompt], params)
    scored = [entry.logprob for entry in answer.prompt_logprobs]
    assert scored == pytest.approx(meant, abs=1e-5)
    assert list(answer.choices[0].token_ids) == generate_greedy(module, prompt, 32)
    module.float()


# The training.

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SMALL = Recipe(SHAPE, (Stage(16, 8, 60), Stage(32, 4, 20)), 0.02)
VERSE = SourceText("verse.py", b"for each in both:\n    each.step()\n" * 40)


def train_small(loss: Any = text_loss, seed: int = 3) -> tuple[Any, list[dict[str, float]]]:
    ids = encode([VERSE])
    return train(SMALL, ids, split_windows(ids), loss, seed, lambda module: None)


@pytest.mark.long
def test_training_lowers_the_loss_and_equal_seeds_give_equal_weights() -> None:
    module, log = train_small()
    assert log[-1]["held_out_bits"] < 3
    again, log_again = train_small()
    assert [line["held_out_bits"] for line in log] == [line["held_out_bits"] for line in log_again]
    assert all(map(torch.equal, module.state_dict().values(), again.state_dict().values()))
    other, _ = train_small(seed=4)
    assert not torch.equal(module.lm_head.weight, other.lm_head.weight)


@pytest.mark.long
def test_a_draft_trained_on_the_targets_distributions_comes_to_agree_with_it() -> None:
    target, _ = train_small()
    draft, _ = train_small(create_distillation_loss(target), seed=5)
    windows = split_windows(encode([VERSE]))
    assert agreement(target, target, windows) == pytest.approx({"greedy": 1, "sampled": 1})
    assert agreement(target, draft, windows)["greedy"] > 0.5


def test_what_training_saves_is_a_checkpoint_that_is_served(tmp_path: Path) -> None:
    module, _ = train_small()
    save_checkpoint(module, tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        (answer,) = llm.generate("for each in ", SamplingParams(temperature=0, max_tokens=8))
    assert len(answer.choices[0].token_ids) == 8


def test_a_file_stands_between_ends_whatever_bytes_it_has() -> None:
    ids = encode([SourceText("a", b"\0\xff"), SourceText("b", b""), SourceText("c", b"x")])
    assert ids.tolist() == [0, 1, 256, 0, 0, 121, 0]


# The draft.


class GeneratedTexts(NamedTuple):
    """64 tokens after each prompt, and how many drafts were tested and accepted."""

    outputs: dict[int, list[int]]
    num_verified: int
    num_accepted: int


def generate_many(prompts: list[list[int]], draft: str | None, count: int = 64) -> GeneratedTexts:
    """Generate greedily, many at once; with a draft model every row has four drafts at any cost."""
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 32, "max_num_batched_tokens": 256}
    if draft is not None:
        options |= {"draft_model": draft, "num_speculative_tokens": 4}
    with load_model(str(MODELS / "tiny"), options) as loaded:
        config = loaded.config
        if config.speculation is not None:
            always = replace(config.speculation, costs=None)
            config = replace(config, speculation=always)
        engine = Engine(loaded.model, config)
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.submit(Request(i, tuple(prompt), params))
        outputs: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                outputs[delta.request_id] += delta.tokens
        scheduler = engine.scheduler
        assert scheduler.pool.num_free_blocks == config.num_blocks
        return GeneratedTexts(outputs, scheduler.num_draft_tokens, scheduler.num_accepted_tokens)


def some_prompts(texts: list[SourceText], count: int) -> list[list[int]]:
    """Return pieces of held-out text, 16 to 300 bytes."""
    rng = Random(5)
    long = [text.data for text in texts if text.is_holdout and len(text.data) > 400]
    prompts = []
    for _ in range(count):
        data, length = rng.choice(long), rng.randint(16, 300)
        begin = rng.randrange(len(data) - length)
        prompts.append([byte + 1 for byte in data[begin : begin + length]])
    return prompts


def logit_error(module: Any, prompts: list[list[int]]) -> float:
    """Return the largest error of a float32 logit, a prompt at a time and many at once."""
    wide = copy.deepcopy(module).double()
    worst = 0.0
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            found = module(ids).logits.double() - wide(ids).logits
            worst = max(worst, float(found.abs().max()))
    return worst


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10, marks=pytest.mark.long),
        pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_drafts_change_no_token_but_where_the_best_two_are_level(
    count: int, modules: dict[str, Any], texts: list[SourceText]
) -> None:
    prompts = some_prompts(texts, count)
    plain, drafted = generate_many(prompts, None), generate_many(prompts, "tiny-draft")
    assert (plain.num_verified, plain.num_accepted) == (0, 0)
    assert drafted.num_accepted > 0.6 * drafted.num_verified > 20 * count
    error, parted = logit_error(modules["target"], prompts[:20]), 0
    for i, prompt in enumerate(prompts):
        a, b = plain.outputs[i], drafted.outputs[i]
        assert len(a) == len(b) == 64
        if a == b:
            continue
        parted += 1
        at = next(j for j in range(64) if a[j] != b[j])
        with torch.inference_mode():
            logits = modules["target"](torch.tensor([prompt + a[:at]])).logits[0, -1]
        assert {a[at], b[at]} == set(logits.topk(2).indices.tolist())
        assert float(logits.topk(2).values.diff().abs()) < 2 * error
    share = drafted.num_accepted / drafted.num_verified
    print(f"{parted} of {count} part, {share:.3f} of drafts kept, logits off by {error:.1e}")
