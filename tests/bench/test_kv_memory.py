"""Memory of keys and values that `forge.bench.kv_memory` measures, and the record of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge.bench import kv_memory  # noqa: E402
from forge.bench.peers import parse_results  # noqa: E402
from forge.cli.main import main  # noqa: E402
from tests.hf.tiny_configs import tiny_config  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def tiny() -> Any:
    config = tiny_config("llama")
    config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def test_live_bytes_count_a_storage_once_and_drop_with_it() -> None:
    before = kv_memory.live_bytes(CPU)
    tensor = torch.zeros(1000, dtype=torch.float32)
    views = [tensor[10:], tensor.view(10, 100)]
    assert kv_memory.live_bytes(CPU) - before == 4000
    del tensor, views
    assert kv_memory.live_bytes(CPU) == before


def test_bytes_of_each_kind_are_those_of_its_positions() -> None:
    config = tiny()
    num_kv_heads = config.num_key_value_heads
    token_bytes = 2 * config.num_hidden_layers * num_kv_heads * config.head_dim * 2
    measured = {each.kind: each for each in kv_memory.measure_shape(config, CPU)}
    contiguous, dynamic, paged, shared = (
        measured[kind].bytes_per_sequence / token_bytes
        for kind in ("contiguous", "dynamic", "paged", "paged, shared")
    )
    assert 512 <= contiguous < 512.2  # each layer also has its length
    assert dynamic == pytest.approx(60)
    # Four blocks, one of the 32nd part of the scratch block, and tables.
    assert 64 + 16 / 32 <= paged < 66
    assert 16 + 4 * 16 / 32 <= shared < 20
    assert measured["contiguous"].ratio == 1.0
    assert measured["dynamic"].sequences_per_gb == pytest.approx(1e9 / (60 * token_bytes), abs=0.01)


def test_the_command_measures_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv", "memory", "--shapes", "tiny-qwen3"]) == 0
    (result,) = parse_results(capsys.readouterr().out.splitlines())
    assert [each["kind"] for each in result["tiny-qwen3"]] == [
        *("contiguous", "dynamic", "paged", "paged, shared")
    ]


def test_the_record_has_at_least_7_9_times_more_paged_sequences() -> None:
    path = Path(kv_memory.__file__).parent / "results" / "kv-memory.json"
    record = json.loads(path.read_text())
    assert record["benchmark"] == "kv_memory"
    for name in ("qwen3-4b", "llama-3.1-8b"):
        ratios = {each["kind"]: each["ratio"] for each in record["figures"][name]}
        assert ratios["paged"] >= 7.9 and ratios["paged, shared"] > ratios["paged"]
