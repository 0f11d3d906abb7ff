"""The embedded pair in numpy: the model's arithmetic, any batching of it, and how it is opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from forge import LLM, SamplingParams
from forge.errors import InvalidConfig, InvalidWeights
from forge.models.embedded import EMBEDDED_CHECKPOINTS, MAX_POSITIONS, embedded_folder
from forge.models.llama import Llama
from forge.models.llama_model import read_weights
from forge.models.loader import load_model
from forge.models.paged_decoder import BlockRow
from forge.request import Structure
from forge.weights import WeightFiles
from tests.models.ragged_runs import TEXT, draw_requests, run

ROOT = Path(__file__).resolve().parents[2]
IDS = [byte + 1 for byte in TEXT[:60]]
REQUESTS = draw_requests(seed=1, count=10, max_tokens=8)


def create_decoder(name: str = "tiny", num_blocks: int = 32, block_size: int = 16) -> Llama:
    return Llama(embedded_folder(name), num_blocks, block_size)


def logits_of(decoder: Llama, row: BlockRow) -> list[Any]:
    (logits,) = decoder.forward([row])
    return [logits(end) for end in range(row.start + 1, row.end + 1)]


# The arithmetic.


def reference_logits(folder: Path, ids: list[int]) -> Any:
    """Logits of all positions at once in float64, from the equations: no cache, no blocks."""
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    size, kv_heads = config["head_dim"], config["num_key_value_heads"]
    count = len(ids)

    def norm(x: Any, name: str) -> Any:
        mean = np.mean(x**2, -1, keepdims=True)
        return x / np.sqrt(mean + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def project(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T

    angles = np.outer(np.arange(count), 10000.0 ** -(np.arange(0, size, 2) / size))
    turn = np.exp(1j * angles)[:, None]  # A pair of halves is a complex number.

    def heads(x: Any, turned: bool) -> Any:
        x = x.reshape(count, -1, size)
        if turned:
            z = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
            x = np.concatenate([z.real, z.imag], -1)
        return np.repeat(x, config["num_attention_heads"] // x.shape[1], axis=1)

    hidden = weights["model.embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        x = norm(hidden, f"{layer}.input_layernorm")
        q, k, v = (project(x, f"{layer}.self_attn.{each}_proj") for each in "qkv")
        assert k.shape[1] == kv_heads * size
        scores = np.einsum("qhd,khd->hqk", heads(q, True), heads(k, True)) / size**0.5
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        read = np.einsum("hqk,khd->qhd", shares, heads(v, False)).reshape(count, -1)
        hidden = hidden + project(read, f"{layer}.self_attn.o_proj")
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate = project(x, f"{layer}.mlp.gate_proj")
        x = gate / (1 + np.exp(-gate)) * project(x, f"{layer}.mlp.up_proj")
        hidden = hidden + project(x, f"{layer}.mlp.down_proj")
    return norm(hidden, "model.norm") @ weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize("name", EMBEDDED_CHECKPOINTS)
def test_logits_are_those_of_the_equations(name: str) -> None:
    found = logits_of(create_decoder(name), BlockRow(range(32), 0, IDS))
    assert np.abs(np.array(found) - reference_logits(embedded_folder(name), IDS)).max() < 1e-3


@pytest.mark.parametrize("name", EMBEDDED_CHECKPOINTS)
def test_a_checkpoint_has_the_structure_that_is_computed(name: str) -> None:
    config = json.loads((embedded_folder(name) / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eos_token_id": 0,
        "vocab_size": 257,
    }
    assert {key: config[key] for key in expected} == expected


# Any batching gives the same bits.


def test_a_position_has_the_same_logits_in_any_batch() -> None:
    """Chunks of six sequences, whose blocks are anywhere, together and one by one."""
    rng = Random(2)
    texts = [[rng.choice(IDS) for _ in range(rng.randint(1, 60))] for _ in range(6)]
    alone = [logits_of(create_decoder(), BlockRow(range(32), 0, text)) for text in texts]
    decoder = create_decoder()
    blocks = rng.sample(range(32), 32)
    tables, done = [blocks[4 * i : 4 * i + 4] for i in range(6)], [0] * 6
    while done != [len(text) for text in texts]:
        turn = [i for i in range(6) if done[i] < len(texts[i]) and rng.random() < 0.7]
        rows = [
            BlockRow(tables[i], done[i], texts[i][done[i] :][: rng.choice((1, 1, 3, 30))])
            for i in turn
        ]
        for i, row, logits in zip(turn, rows, decoder.forward(rows), strict=True):
            for end in range(row.start + 1, row.end + 1):
                assert logits(end) == alone[i][end - 1]
            done[i] = row.end


def test_a_step_without_rows_computes_nothing() -> None:
    assert create_decoder().forward([]) == []


def test_blocks_keep_their_contents_when_the_pool_is_resized() -> None:
    decoder = create_decoder(num_blocks=4)
    expected = logits_of(decoder, BlockRow((2, 0), 0, IDS[:20]))
    decoder.resize(9)
    decoder.resize(3)
    assert len(decoder.pages()) == 3
    assert logits_of(decoder, BlockRow((2, 0), 19, IDS[19:20])) == expected[19:]


def test_a_block_has_all_that_its_positions_need() -> None:
    """Keys and values of every layer: a copy of the blocks continues like the original."""
    decoder = create_decoder()
    logits_of(decoder, BlockRow((0, 1), 0, IDS[:32]))
    pages = decoder.pages()
    pages[8][:], pages[9][:] = pages[0], pages[1]
    pages[0][:], pages[1][:] = 0, 0
    (continued,) = logits_of(decoder, BlockRow((8, 9, 10), 32, IDS[32:33]))
    (computed,) = logits_of(create_decoder(), BlockRow((0, 1, 2), 0, IDS[:33]))[32:]
    assert continued == computed


BATCHINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "in chunks": {"max_num_seqs": 8, "max_num_batched_tokens": 11, "depth": 2},
    "preempted": {"max_num_seqs": 8, "num_blocks": 16, "depth": 2},
    "not shared": {"max_num_seqs": 8, "enable_prefix_caching": False},
    "other blocks": {"max_num_seqs": 8, "num_blocks": 200},
    "drafts of a model": {"max_num_seqs": 8, "draft_model": "tiny-draft"},
    "drafts of n-grams": {"max_num_seqs": 8, "speculative_method": "ngram", "depth": 2},
}


@pytest.fixture(scope="module")
def expected() -> Any:
    return run("tiny", REQUESTS, max_num_seqs=3).outputs


@pytest.mark.parametrize("name", BATCHINGS)
def test_outputs_do_not_depend_on_the_batching(name: str, expected: Any) -> None:
    """Tokens and log probabilities of greedy and seeded requests, bit by bit."""
    found = run("tiny", REQUESTS, seed=3, **BATCHINGS[name])
    assert found.outputs == expected
    assert (found.num_preemptions > 0) == (name == "preempted")
    assert (found.num_cached_tokens > 0) == (name != "not shared")
    assert (found.num_accepted_tokens > 0) == name.startswith("drafts")


@pytest.mark.long
def test_rejection_accepts_drafts_and_greedy_outputs_stay() -> None:
    requests = draw_requests(seed=4, count=6, max_tokens=12)
    plain = run("tiny", requests)
    drafted = run("tiny", requests, draft_model="tiny-draft", acceptance="rejection")
    assert drafted.num_accepted_tokens > 6
    for request in requests:
        if request.params.greedy:
            assert drafted.outputs[request.id] == plain.outputs[request.id]
        else:
            assert len(drafted.outputs[request.id].tokens) == 12


# Opened and served.

STRUCTURE = Structure.regex(r"\{'path': '[a-z]{3,9}'\}")


def test_it_writes_lines_of_python() -> None:
    with LLM("tiny") as llm:
        (answer,) = llm.generate(
            'def read_file(path):\n    """Read', SamplingParams(temperature=0, max_tokens=38)
        )
    assert answer.text == " and return the file path from the file"[: len(answer.text)]


def test_an_output_follows_a_structure() -> None:
    params = SamplingParams(max_tokens=40, seed=1, structure=STRUCTURE)
    with LLM("tiny", max_num_seqs=1) as llm:
        (answer,) = llm.generate("config = ", params)
    assert answer.text.startswith("{'path': '") and answer.text.endswith("'}")


def test_the_name_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    with load_model("tiny", {"max_model_len": 64}) as loaded:
        assert (loaded.name, loaded.config.max_model_len) == ("tiny", 64)


def test_more_sequences_than_the_default_budget_are_served() -> None:
    with load_model("tiny", {"max_num_seqs": 300}) as loaded:
        assert loaded.config.max_num_batched_tokens == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "device: the model tiny is computed in numpy, .*/models/tiny$"),
        ({"dtype": "bfloat16"}, "dtype: the model tiny is computed in numpy"),
        ({"load_format": "dummy"}, "load_format: the model tiny is computed in numpy"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization: the model tiny is computed"),
        ({"max_model_len": 1025}, "max_model_len: 1025 is more than the 1024 positions of tiny"),
        ({"draft_model": "hash"}, "draft_model: 'hash' cannot draft for tiny. Use tiny-draft"),
        ({"draft_model": ["x"]}, "draft_model: .* cannot draft for tiny"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message), load_model("tiny", options):
        pass


def test_options_that_describe_it_are_accepted() -> None:
    with load_model("tiny", {"device": "cpu", "dtype": "float32"}) as loaded:
        assert loaded.device == "cpu"


@pytest.mark.long
def test_it_is_served_without_torch() -> None:
    """An import of torch, transformers or tokenizers would fail."""
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'jinja2'): sys.modules[name] = None\n"
        "from forge import LLM, SamplingParams\n"
        "with LLM('tiny', draft_model='tiny-draft') as llm:\n"
        "    print(llm.generate('import ', SamplingParams(max_tokens=4))[0].text)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# Updates of weights.

NORM = "model.norm.weight"


def changed_weights() -> dict[str, Any]:
    """Return some weights of tiny, other than they are."""
    weights = load_file(embedded_folder("tiny") / "model.safetensors")
    names = (NORM, "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight")
    return {name: (weights[name] * -1.5).astype(np.float32) for name in names}


def test_an_update_gives_the_outputs_of_a_model_with_these_weights(tmp_path: Path) -> None:
    changed, params = changed_weights(), SamplingParams(max_tokens=8, temperature=0)
    fresh = create_decoder()
    fresh.set_weights({**fresh.weights, **changed})
    expected = np.argmax(logits_of(fresh, BlockRow(range(4), 0, IDS))[-1])
    save_file(changed, tmp_path / "some.safetensors")
    for source in (changed, WeightFiles((str(tmp_path / "some.safetensors"),))):
        with LLM("tiny", num_blocks=32) as llm:
            before = llm.generate(IDS, params)[0].token_ids
            assert llm.update_weights(source) == "1"
            after = llm.generate(IDS, params)[0].token_ids
            assert after[0] == expected and after != before
            llm.update_weights(load_file(embedded_folder("tiny") / "model.safetensors"))
            assert llm.generate(IDS, params)[0].token_ids == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "weights: there are none"),
        ({"model.nrom.weight": np.zeros(256, np.float32)}, "model.nrom.weight: the model has no"),
        ({NORM: np.zeros(255, np.float32)}, r"its shape is \[255\], the model's \[256\]"),
        ({NORM: np.zeros(256, np.int64)}, "its dtype is int64"),
        ({NORM: [[1.0], [1.0, 2.0]]}, "it is no array"),
        (WeightFiles(("/none.safetensors",)), "it cannot be read"),
    ],
)
def test_an_update_that_does_not_match_is_refused_and_changes_nothing(
    source: Any, message: str
) -> None:
    with LLM("tiny", num_blocks=32) as llm:
        params = SamplingParams(max_tokens=4, temperature=0)
        before = llm.generate(IDS, params)[0].token_ids
        if isinstance(source, dict) and source:
            source = {"model.layers.0.mlp.down_proj.weight": np.zeros((256, 512)), **source}
        with pytest.raises(InvalidWeights, match=message):
            llm.update_weights(source)
        assert llm.generate(IDS, params)[0].token_ids == before


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({NORM: np.ones(256, np.float32)}, tmp_path / f"{name}.safetensors")
    paths = tuple(str(tmp_path / f"{name}.safetensors") for name in ("a", "b"))
    with LLM("tiny", num_blocks=32) as llm, pytest.raises(InvalidWeights, match="in two files"):
        llm.update_weights(WeightFiles(paths))


def test_a_file_of_a_type_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    header = json.dumps({NORM: {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}})
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(2))
    with pytest.raises(InvalidWeights, match="it cannot be read"):
        read_weights(WeightFiles((str(path),)), {NORM: np.zeros(2, np.float32)})


@pytest.mark.parametrize("value", ["8", None, 1.5])
def test_a_number_of_sequences_that_is_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="max_num_seqs"):
        LLM("tiny", max_num_seqs=value)
