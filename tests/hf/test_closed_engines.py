"""Engines of a checkpoint on torch give all memory back when they are closed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.async_llm import AsyncLLM  # noqa: E402
from forge.llm import LLM  # noqa: E402
from forge.models.embedded import embedded_folder  # noqa: E402
from forge.request import SamplingParams  # noqa: E402
from tests.engine.option_groups import BASE  # noqa: E402
from tests.engine.test_async_llm import run  # noqa: E402

pytestmark = pytest.mark.torch

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""
ON_CPU = {**BASE, "device": "cpu", "dtype": "float32"}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
TIERS = {"kv_host_gib": 0.01, "kv_disk_gib": 0.01, "check_kv": True}


def tensor_bytes() -> int:
    """Return the bytes of all tensors that are alive, each storage once."""
    gc.collect()
    gc.unfreeze()  # an open engine has frozen its objects, which the list below would lack
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter):  # no fake ones of a compiler
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def use(llm: Any) -> object:
    """Generate, leave a stream open and a step in flight, and return the stream."""
    if isinstance(llm, AsyncLLM):
        return run(llm.generate("Once upon a time", PARAMS))
    llm.generate(["Once upon a time", "Once upon"], PARAMS, use_tqdm=False)
    stream = llm.stream("It was", PARAMS)
    assert [next(stream) for _ in range(2)]
    return stream


@pytest.mark.parametrize(
    ("opener", "num_engines", "options"),
    [
        (LLM, 1, {}),
        pytest.param(LLM, 5, {}, marks=pytest.mark.long),
        pytest.param(LLM, 2, {"draft_model": "tiny-draft", **TIERS}, marks=pytest.mark.long),
        pytest.param(LLM, 2, {"speculative_method": "ngram"}, marks=pytest.mark.long),
        pytest.param(
            *(LLM, 2, {"torch_compile": True}),
            marks=[
                pytest.mark.long,
                pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
            ],
        ),
        pytest.param(AsyncLLM, 2, {"depth": 2, **TIERS}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_engines_in_turn_leave_no_tensor(
    opener: Any, num_engines: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """The closed ones are still referenced, as are streams of theirs."""
    torch.set_num_threads(1)
    closed: list[object] = []
    options = {**ON_CPU, **options}
    if "kv_disk_gib" in options:
        options["kv_disk_path"] = str(tmp_path)
    sizes = []
    for _ in range(1 + num_engines):  # the first one fills caches of libraries
        llm = opener(TINY, **options)
        closed += [llm, use(llm)]
        open_bytes = tensor_bytes()
        llm.close()
        sizes.append(tensor_bytes())
        assert open_bytes - sizes[-1] > 2**20, "weights and blocks were found"
    assert len(set(sizes[1:])) == 1, sizes


def test_weights_and_blocks_are_free_where_the_model_is_still_referenced() -> None:
    torch.set_num_threads(1)
    with LLM(TINY, **ON_CPU, draft_model="tiny-draft", kv_host_gib=0.01) as llm:
        models = [llm.engine.model]
        use(llm)
        open_bytes = tensor_bytes()
    kept_bytes = tensor_bytes()
    models.clear()
    closed_bytes = tensor_bytes()
    assert kept_bytes - closed_bytes < (open_bytes - closed_bytes) // 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_engines", "options"),
    [
        (5, {}),
        (3, {"enforce_eager": True}),
        (3, {"draft_model": "tiny-draft"}),
        (3, {"kv_host_gib": 1.0, "depth": 2}),
        (3, {"torch_compile": True}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_engines_in_turn_give_the_gpu_back(num_engines: int, options: dict[str, Any]) -> None:
    """Each takes half of the memory, so that the third would not start if one kept its own.

    What stays are workspaces of libraries, some of which a later engine may be the first to take.
    """
    closed: list[object] = []
    allocated, free = list[int](), list[int]()
    for _ in range(num_engines):
        llm = LLM(TINY, device="cuda", gpu_memory_utilization=0.5, **options)
        closed += [llm, use(llm)]
        assert torch.cuda.memory_allocated() > 2**30, "blocks are on the GPU"
        llm.close()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        free.append(torch.cuda.mem_get_info()[0])
    assert max(allocated) < 2**28, allocated
    assert free[0] - min(free) < 2**28, free


@pytest.mark.gpu
def test_a_closed_engine_frees_the_gpu_while_another_one_runs() -> None:
    """Objects of the one that runs are frozen, and no collection visits them."""
    params = {"device": "cuda", "num_blocks": 2**14}
    with LLM(TINY, **params) as running:
        expected = running.generate("Once", PARAMS, use_tqdm=False)[0].token_ids
        sizes = []
        for _ in range(3):
            llm = LLM(TINY, **params)
            use(llm)
            llm.close()
            sizes.append(torch.cuda.memory_allocated())
        assert sizes[-1] - sizes[0] < 2**26, sizes
        assert running.generate("Once", PARAMS, use_tqdm=False)[0].token_ids == expected
