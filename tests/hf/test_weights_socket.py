"""Updates from a trainer's memory through the socket: outputs are those of a fresh start."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402

from forge import AsyncLLM, SamplingParams  # noqa: E402
from forge.errors import InvalidWeights, RequestFailed  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.server.weights_socket import WeightsSocket  # noqa: E402
from forge.weights import SharedMemory, SharedTensor, SharedWeights  # noqa: E402
from forge.weights_client import send_weights  # noqa: E402
from tests.hf.families import create_module  # noqa: E402
from tests.hf.forked_processes import fork_engines_and_ranks  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files of Linux"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 31, 77]
OPTIONS: Any = {"num_blocks": 64, "max_model_len": 128}
TIMEOUT_S = 60.0
Test = Callable[[AsyncLLM, Callable[..., Awaitable[Any]]], Awaitable[None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Folders of a checkpoint, and of further weights of its shape."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("socket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        old, new = (save_checkpoint(root / name, "qwen3") for name in ("old", "new"))
        create_module("qwen3", torch.float32, seed=1).save_pretrained(new)
        yield old, new


def run_with_socket(
    tmp_path: Path, folder: Path, test: Test, kind: Any = AsyncLLM, device: str = "cpu"
) -> None:
    """Run the test on an engine and a function that sends it weights."""
    path = str(tmp_path / "weights.sock")

    async def send(tensors: Any, version: str | None = None) -> Any:
        return await asyncio.to_thread(send_weights, path, "admin", tensors, version)

    async def run() -> None:
        async with kind(str(folder), device=device, **OPTIONS) as llm:
            weights_socket = WeightsSocket(path, "admin")
            weights_socket.start(llm, asyncio.get_running_loop())
            try:
                await test(llm, send)
            finally:
                await asyncio.to_thread(weights_socket.close)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


async def generate(llm: AsyncLLM) -> list[int]:
    return (await llm.generate(PROMPT, GREEDY)).token_ids


async def fresh_outputs(folder: Path, device: str = "cpu") -> list[int]:
    async with AsyncLLM(str(folder), device=device, **OPTIONS) as llm:
        return await generate(llm)


@pytest.mark.long
@pytest.mark.parametrize("kind", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_an_update_from_memory_is_a_fresh_start(
    kind: Any, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_engines_and_ranks(monkeypatch)
    old, new = folders
    tensors = load_file(new / "model.safetensors")

    async def test(llm: AsyncLLM, send: Callable[..., Awaitable[Any]]) -> None:
        before = await generate(llm)
        response = await send(tensors.items(), "step 40")
        assert (response["status"], response["weight_version"]) == ("updated", "step 40")
        assert response["seconds"].keys() == {"update"}
        after = await generate(llm)
        assert after == await fresh_outputs(new) != before
        # A view that is not contiguous, and an update of one tensor.
        name, tensor = next((n, t) for n, t in tensors.items() if t.dim() == 2)
        assert (await send({name: tensor.t().contiguous().t()}))["weight_version"] == "2"
        assert await generate(llm) == after

    run_with_socket(tmp_path, old, test, kind)


def test_tensors_that_match_are_copied_and_others_are_named_and_change_nothing(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = folders
    tensors = load_file(new / "model.safetensors")
    name = next(iter(tensors))

    async def test(llm: AsyncLLM, send: Callable[..., Awaitable[Any]]) -> None:
        before = await generate(llm)
        for wrong, problem in (
            ({**tensors, "model.nothing": torch.zeros(2)}, "model.nothing: the model has no such"),
            ({**tensors, name: torch.zeros(2, 2)}, f"{name}: its shape is"),
            ({**tensors, name: tensors[name].to(torch.int8)}, "tensors.0.dtype: "),
            ({}, "weights: there are none"),
        ):
            with pytest.raises(RequestFailed, match=problem):
                await send(wrong)
        for unsent, problem in (
            ({name: [1.0]}, "it is no tensor"),
            ({name: torch.zeros(2, 2).to_sparse()}, "it is sparse, or has no memory"),
            ({name: torch.zeros(2, device="meta")}, "it is sparse, or has no memory"),
            ([(name, tensors[name])] * 2, "it comes twice"),
        ):
            with pytest.raises(InvalidWeights, match=f"{name}: {problem}"):
                await send(unsent)
        # Sizes whose product is no number of 64 bits, and which the socket refuses before.
        memory = SharedMemory("/dev/zero", 4096)
        overflow = SharedTensor(name, "float32", (0, 2**44, 2**44, 2**44), 0, 0)
        with pytest.raises(InvalidWeights, match="cannot be opened"):
            await llm.update_weights(SharedWeights((memory,), (overflow,)))
        assert llm.weight_version == "0" and await generate(llm) == before
        assert (await send(tensors))["weight_version"] == "1"
        model = llm.engine.model
        assert isinstance(model, HFModel) and model._weights is not None
        parameters = model._weights.parameters()
        assert all(torch.equal(tensors[name], parameters[name]) for name in parameters)

    run_with_socket(tmp_path, old, test)


def test_a_server_that_does_not_respond_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(TimeoutError):
            send_weights(path, "admin", {"w": torch.zeros(2)}, timeout_s=0.01)


@pytest.mark.gpu
def test_an_update_from_a_gpu_is_a_fresh_start(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """By CUDA IPC, from this process to that of the engine. The tensors here stay as they are."""
    old, new = folders
    tensors = {name: t.cuda() for name, t in load_file(new / "model.safetensors").items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}

    async def test(llm: AsyncLLM, send: Callable[..., Awaitable[Any]]) -> None:
        for version in ("step 1", "step 2"):
            assert (await send(tensors, version))["weight_version"] == version
            assert await generate(llm) == await fresh_outputs(new, "cuda")
        assert all(torch.equal(tensors[name], copies[name]) for name in tensors)

    run_with_socket(tmp_path, old, test, AsyncLLM.spawn, "cuda")
