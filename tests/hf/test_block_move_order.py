"""Moves, rows and threads of neighbouring plans on one block, with each of them held up in turn.

On a GPU the streams sleep, so that whatever does not wait comes first and is seen. On a CPU the
same plans run in order, which shows what is right. The engine on a GPU runs with captured graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge.config import EngineConfig, HostTier  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.models.capture_sizes import MIXED_CAPTURE_SIZES, decode_capture_sizes  # noqa: E402
from forge.models.file_moves import FileMoves  # noqa: E402
from forge.models.hf.block_moves import BlockMoves  # noqa: E402
from forge.models.hf.host_pool import HostPool, allocate_slabs  # noqa: E402
from forge.models.hf.kv_cache import KVCacheSpec  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.kv_tiers import NO_HOST_MEMORY, HostMemory  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.request import Request  # noqa: E402
from forge.seam import HostFile, HostLoad, HostStore, StepPlan  # noqa: E402
from tests.core.worlds import FaultyStore  # noqa: E402
from tests.hf import test_gpu as gpu  # noqa: E402
from tests.hf.test_block_moves import CheckedModel, cache_of, pool_of  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
KEY = bytes(range(64))
SLEEP_CYCLES = 200_000_000
"""A tenth of a second: a thousand times what is queued here."""
SPEC = KVCacheSpec(3, 2, 64, torch.bfloat16)


class Plans:
    """Plans of moves on a cache, queued one after the other without waiting for the device.

    Block b holds the number b, host block h the number 100 + h.
    """

    def __init__(self, device: str, executor: ThreadPoolExecutor) -> None:
        self._device = torch.device(device)
        cache = cache_of(SPEC, 8, self._device)
        self.store = FaultyStore(0)
        self.pool = pool_of(cache, 4, is_pinned=device == "cuda")
        self.moves = BlockMoves(cache, self.pool, FileMoves(self.store, executor))
        self._data = cache.data.view(torch.uint8)
        self._step = 0
        for block in range(8):
            self.fill(block, block)
        for host_block in range(4):
            self.pool.block(host_block).fill_(100 + host_block)
        self.wait()

    def run(self, **moves: Any) -> StepPlan:
        """Queue a plan without rows; what is filled or read next belongs to it."""
        plan = StepPlan(self._step, (), 8, 4, num_host_blocks=4, **moves)
        self._step += 1
        self.moves.begin(plan)
        self.moves.queue(plan)
        return plan

    def fill(self, block: int, number: int) -> None:
        """Let the rows of this plan write a block."""
        self._data[:, block] = number

    def read(self, block: int) -> Any:
        """Let the rows of this plan read a block; return the copy on the device."""
        return self._data[:, block].clone()

    def hold_up(self, *names: str) -> None:
        """Let the next work of streams begin late: compute, store or load."""
        if self._device.type == "cpu":
            return
        streams = {
            "compute": torch.cuda.current_stream(),
            "store": self.moves._store_stream,
            "load": self.moves._load_stream,
        }
        for name in names:
            with torch.cuda.stream(streams[name]):
                torch.cuda._sleep(SLEEP_CYCLES)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def host_numbers(self, host_block: int) -> list[int]:
        """Return the different numbers of a host block, once the device is done."""
        self.wait()
        return self.pool.block(host_block).unique().tolist()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def plans(request: pytest.FixtureRequest, executor: ThreadPoolExecutor) -> Iterator[Plans]:
    with torch.inference_mode():
        yield Plans(request.param, executor)


def numbers(content: Any) -> list[int]:
    return content.unique().tolist()


def test_a_store_reads_what_the_rows_of_the_plan_before_it_write(plans: Plans) -> None:
    plans.run()
    plans.hold_up("compute")
    plans.fill(3, 50)
    plans.run(stores=(HostStore(3, 0),))
    assert plans.host_numbers(0) == [50]


def test_a_store_reads_its_block_before_the_rows_of_the_next_plan_write_it(plans: Plans) -> None:
    plans.hold_up("store")
    plans.run(stores=(HostStore(3, 0),))
    plans.run()
    plans.fill(3, 50)
    assert plans.host_numbers(0) == [3]


def test_rows_read_what_the_plan_before_them_loads(plans: Plans) -> None:
    plans.hold_up("load")
    plans.run(loads=(HostLoad(0, 0, 3, 0),))
    plans.run()
    assert numbers(plans.read(3)) == [100]


def test_a_load_writes_its_block_after_the_rows_of_the_plan_before_it_read_it(plans: Plans) -> None:
    plans.run()
    plans.hold_up("compute")
    content = plans.read(3)
    plans.run(loads=(HostLoad(0, 0, 3, 0),))
    plans.run()
    assert numbers(content) == [3] and numbers(plans.read(3)) == [100]


def test_a_load_reads_a_host_block_before_the_next_plan_stores_to_it(plans: Plans) -> None:
    plans.hold_up("load")
    plans.run(loads=(HostLoad(0, 0, 3, 0),))
    plans.run(stores=(HostStore(4, 0),))
    plans.run()
    assert numbers(plans.read(3)) == [100] and plans.host_numbers(0) == [4]


def test_a_load_reads_what_the_plan_before_it_stores(plans: Plans) -> None:
    plans.hold_up("store")
    plans.run(stores=(HostStore(4, 0),))
    plans.run(loads=(HostLoad(0, 0, 3, 0),))
    plans.run()
    assert numbers(plans.read(3)) == [4]


def test_moves_wait_for_both_directions_of_the_plan_before_them(plans: Plans) -> None:
    """Block 3 is loaded late, and stored by the next plan; block 4 is stored late, and loaded."""
    plans.hold_up("load", "store")
    plans.run(loads=(HostLoad(0, 0, 3, 0),), stores=(HostStore(4, 1),))
    plans.run(loads=(HostLoad(0, 0, 4, 2),), stores=(HostStore(3, 3),))
    plans.run()
    assert numbers(plans.read(4)) == [102]
    assert (plans.host_numbers(1), plans.host_numbers(3)) == ([4], [100])


def test_what_an_aborted_forward_has_queued_is_complete_before_the_next_plan(plans: Plans) -> None:
    """The model fails after the moves of a plan began and before they are queued."""
    plans.hold_up("load")
    plans.run(loads=(HostLoad(0, 0, 3, 0),))
    failed = StepPlan(plans._step, (), 8, 4, num_host_blocks=4, stores=(HostStore(5, 1),))
    plans.moves.begin(failed)
    plans._step += 1
    plans.run()
    assert numbers(plans.read(3)) == [100] and plans.host_numbers(1) == [101]


def test_a_spill_writes_what_the_plan_before_it_stores(
    plans: Plans, executor: ThreadPoolExecutor
) -> None:
    plans.hold_up("store")
    plans.run(stores=(HostStore(4, 0),))
    plans.run(spills=(HostFile(0, KEY),))
    executor.shutdown()
    assert set(bytes(plans.store.contents[KEY])) == {4}


def test_a_fetch_writes_a_host_block_after_the_plan_before_it_has_loaded_it(
    plans: Plans, executor: ThreadPoolExecutor
) -> None:
    plans.store.contents[KEY] = bytes([60]) * plans.pool.block_bytes
    plans.hold_up("load")
    plans.run(loads=(HostLoad(0, 0, 3, 0),))
    fetch = plans.run(fetches=(HostFile(0, KEY),))
    executor.shutdown()
    [answer] = plans.moves.end(fetch)
    assert answer.is_good and plans.host_numbers(0) == [60]
    assert numbers(plans.read(3)) == [100]


# An engine on a GPU.


def gpu_engine(tier: HostTier | None, graphs: bool) -> Engine:
    """Return an engine of the layers of tests/hf/test_gpu.py, with little memory."""
    decoder, layers = gpu.decoder_for(gpu.SHAPE)
    config = EngineConfig(
        num_blocks=40,
        block_size=gpu.BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=gpu.MAX_LEN,
        depth=2,
        host_tier=tier,
    )
    device = torch.device(gpu.SHAPE.device)
    spec = select_kv_cache_spec(layers, torch.bfloat16, device)
    memory = NO_HOST_MEMORY
    if tier is not None:
        size = spec.bytes_per_token * gpu.BLOCK
        slabs = allocate_slabs(tier.num_blocks * size, is_pinned=True, block_bytes=size)
        memory = HostMemory(HostPool(slabs, size), None)
    model_of = partial(
        assemble_model,
        decoder,
        layers,
        spec,
        config,
        vocab_size=gpu.SHAPE.vocab,
        eos_token=gpu.EOS,
        device=device,
        host_memory=memory,
    )
    with torch.inference_mode():
        model = (
            model_of(decode_sizes=decode_capture_sizes(4), mixed_sizes=MIXED_CAPTURE_SIZES)
            if graphs
            else model_of()
        )
    return Engine(model, config)


def gpu_turns() -> list[Request]:
    """Return turns of six conversations, which together have twice the blocks of the device."""
    rng = Random(7)
    threads = [list(gpu.prompt_of(gpu.SHAPE, 300 + 130 * i, seed=i)) for i in range(6)]
    requests = []
    for index in range(36):
        thread = threads[index % 6]
        thread += gpu.prompt_of(gpu.SHAPE, rng.randint(1, 90), seed=index)
        requests.append(gpu.request_of(index, tuple(thread), rng.randint(8, 40)))
    return requests


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_an_engine_on_a_gpu_loads_what_it_stored_and_chooses_the_same_tokens(graphs: bool) -> None:
    """Tokens may differ where two logits are level: another prefix is cached, so rows differ."""
    requests = gpu_turns()
    without = gpu.run(gpu_engine(None, graphs), requests)
    tier = HostTier(num_blocks=80, max_moved_blocks=6, min_clean_percent=100, min_touches=1)
    engine = gpu_engine(tier, graphs)
    assert isinstance(engine.model, HFModel)
    engine.model = checked = CheckedModel(engine.model)
    with_tier = gpu.run(engine, requests)
    assert sum(len(plan.loads) for plan in with_tier.plans) > 50
    assert any(plan.rows and plan.loads and plan.stores for plan in with_tier.plans)
    assert checked.num_equal > 50 and not checked.num_different
    gpu.compare(gpu.SHAPE, requests, without, with_tier, gpu.MAX_LOGPROB_GAP)
    del engine, checked
    gc.collect()
