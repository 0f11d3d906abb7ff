"""The example trainer raises the reward of a served policy, whose outputs follow its weights."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forge import LLM, AsyncLLM, SamplingParams  # noqa: E402
from forge.server.app import create_app  # noqa: E402
from forge.server.http_server import create_listener  # noqa: E402
from forge.trainer_access import TrainerAccess  # noqa: E402
from tests.server.local_server import serve_app  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=16)


def test_a_few_steps_raise_the_reward(tmp_path: Path) -> None:
    """After them the served policy is the trained model, and a fresh start of it."""
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "docs/examples/grpo.py")
    assert spec is not None and spec.loader is not None
    grpo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grpo)
    torch.set_num_threads(1)
    folder = ROOT / "forge/models/tiny"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm = AsyncLLM("tiny", device="cpu", dtype="float32", num_blocks=64, max_num_seqs=8)
    access = TrainerAccess("admin", tmp_path.resolve())
    app = create_app(llm, trainer_access=access)
    with serve_app(llm, app, create_listener("127.0.0.1", 0, ())) as (url, client):
        rewards = list(
            grpo.train(
                grpo.Server(url, "admin"),
                model,
                tmp_path,
                prompt="Once upon a time",
                letter="e",
                num_steps=7,
                group_size=8,
                max_tokens=16,
                learning_rate=3e-3,
            )
        )
        assert rewards[-1] > 2 * rewards[0], rewards
        body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
        served = client.post("/generate", json=body).json()
    assert served["weight_version"] == "step-7"
    fresh = tmp_path / "fresh"
    shutil.copytree(folder, fresh)
    shutil.copy(tmp_path / "step-7" / "model.safetensors", fresh)
    with LLM(str(fresh), device="cpu", dtype="float32", num_blocks=64, max_num_seqs=8) as llm_again:
        (output,) = llm_again.generate("Once upon a time", PARAMS)
    assert served["token_ids"] == output.token_ids
