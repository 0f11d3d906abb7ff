"""The measurement of weight updates runs to its end on a CPU, and refuses wrong outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge.bench import weight_update  # noqa: E402
from forge.errors import RequestFailed  # noqa: E402
from forge.models.hf.weights import ModelWeights  # noqa: E402

pytestmark = pytest.mark.torch
OPTIONS: Any = {"device": "cpu", "max_num_seqs": 8, "num_blocks": 128, "max_model_len": 512}


@pytest.fixture(autouse=True)
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(1)


@pytest.mark.long
def test_every_part_is_measured() -> None:
    figures = weight_update.run("tiny-qwen3", 3, 8, OPTIONS)
    assert figures["first_token_s"] >= figures["pause_s"] + figures["update_s"] > 0
    assert figures["level_1"]["wake_parts_s"].keys() == {"weights", "kv_cache", "graphs"}
    assert figures["level_2"]["wake_parts_s"].keys() == {"weights", "kv_cache", "graphs", "update"}


@pytest.mark.long
def test_weights_that_are_not_all_updated_give_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = ModelWeights._copy

    def copy_most(self: ModelWeights, name: str, tensor: Any) -> None:
        if not name.endswith("layers.1.mlp.down_proj.weight"):
            copy(self, name, tensor)

    monkeypatch.setattr(ModelWeights, "_copy", copy_most)
    with pytest.raises(RequestFailed, match="outputs are not those of a fresh start"):
        weight_update.run("tiny-qwen3", 3, 8, OPTIONS)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_graphs_read_new_weights_and_memory_after_a_sleep() -> None:
    """Steps are captured, and what a sleep frees is on the device."""
    figures = weight_update.run("qwen3-0.6b", 16, 64, {"gpu_memory_utilization": 0.5})
    for level in ("level_1", "level_2"):
        assert figures[level]["freed_gib"] > figures["weights_gib"]
