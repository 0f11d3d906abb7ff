"""Moves of HFModel: contents come back bit for bit, and no token depends on where a block was.

Each run asserts that it came to what it is about: stores, loads, files that are written and read.
On a GPU with graphs, and with copies that are held up: tests/hf/test_block_move_order.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.config import DiskTier, EngineConfig, HostTier, Speculation  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.invariants import PlanAudit, audit  # noqa: E402
from forge.models.block_files import BlockFiles  # noqa: E402
from forge.models.file_moves import FileMoves  # noqa: E402
from forge.models.hf.block_moves import BlockMoves, Moves  # noqa: E402
from forge.models.hf.decoders.module_decoder import ATTENTION_NAME, register_attention  # noqa: E402
from forge.models.hf.host_pool import HostPool, allocate_slabs  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.kv_tiers import NO_HOST_MEMORY, HostMemory  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.models.model_wrapper import ModelWrapper  # noqa: E402
from forge.request import Delta, Request, SamplingParams  # noqa: E402
from forge.seam import HostFile, HostLoad, HostStore, StepPlan, executes_moves  # noqa: E402
from tests.core.worlds import FaultyStore, RecordingModel  # noqa: E402
from tests.hf.families import CONFIGS, create_module  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
CPU = torch.device("cpu")
VOCAB, EOS, BLOCK = 307, 2, 4
KEY = bytes(range(64))
TIER = HostTier(num_blocks=40, min_clean_percent=100, min_touches=1)
"""Stores every block that no sequence holds, at once."""
SMALL_TIER = replace(TIER, num_blocks=28, max_moved_blocks=2)
"""Less than the conversations of `turns` have, moved a few at a time."""
DISK = DiskTier(max_files=1000)


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


# Contents.


def cache_of(spec: KVCacheSpec, num_blocks: int, device: Any = CPU) -> KVCache:
    """Return a cache of random bits, NaN among them."""
    cache = KVCache(
        spec, num_blocks=num_blocks, block_size=BLOCK, num_slots=1, max_model_len=8, device=device
    )
    bits = cache.data.view(torch.uint8)
    bits.copy_(torch.randint(256, bits.shape, dtype=torch.uint8))
    return cache


def pool_of(cache: KVCache, *blocks_of_slabs: int, is_pinned: bool = False) -> HostPool:
    """Return a host pool of slabs of so many blocks each."""
    size = cache.block_bytes
    slabs = [
        slab
        for count in blocks_of_slabs
        for slab in allocate_slabs(count * size + size // 2, is_pinned=is_pinned)
    ]
    return HostPool(slabs, size)


def run_moves(moves: BlockMoves, plan: StepPlan) -> None:
    """Execute a plan without rows."""
    with torch.inference_mode():
        moves.begin(plan)
        moves.queue(plan)


def plan_of(step: int, **fields: Any) -> StepPlan:
    return StepPlan(step, (), 12, BLOCK, **{"num_host_blocks": 7, **fields})


def bits_of(cache: KVCache, block: int) -> Any:
    return cache.data[:, block].contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("staged_blocks", [0, 1, 2, 100])
@pytest.mark.parametrize(
    "spec",
    [
        KVCacheSpec(3, 2, 16, torch.bfloat16),
        KVCacheSpec(1, 1, 3, torch.float16),
        KVCacheSpec(2, 4, 8, torch.float64),
    ],
)
def test_blocks_that_are_stored_and_loaded_elsewhere_are_equal_bit_for_bit(
    spec: KVCacheSpec, staged_blocks: int
) -> None:
    """Seven blocks, through slabs of three, by as many at a time as the staging buffers hold."""
    cache = cache_of(spec, 12)
    moves = BlockMoves(cache, pool_of(cache, 3, 3, 1), None, staged_blocks * cache.block_bytes)
    before = [bits_of(cache, block) for block in range(13)]
    order = [6, 0, 3, 5, 1, 4, 2]
    run_moves(moves, plan_of(0, stores=tuple(map(HostStore, order, range(7)))))
    assert all(torch.equal(bits_of(cache, block), before[block]) for block in range(13))
    cache.data.view(torch.uint8)[:, :7] = 0
    run_moves(moves, plan_of(1, loads=tuple(HostLoad(0, 0, 11 - i, i) for i in range(7))))
    for host_block, block in enumerate(order):
        assert torch.equal(bits_of(cache, 11 - host_block), before[block])
    for block in (12, *range(7 - 2)):
        expected = before[block] if block == 12 else torch.zeros_like(before[block])
        assert torch.equal(bits_of(cache, block), expected), "no other block is written"


def test_stores_and_loads_of_one_plan_are_of_what_was_there_before_it() -> None:
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float32), 12)
    moves = BlockMoves(cache, pool_of(cache, 7))
    one, two = bits_of(cache, 1), bits_of(cache, 2)
    run_moves(moves, plan_of(0, stores=(HostStore(1, 0),)))
    run_moves(moves, plan_of(1, stores=(HostStore(2, 1),), loads=(HostLoad(0, 0, 3, 0),)))
    run_moves(moves, plan_of(2, loads=(HostLoad(0, 0, 1, 1),)))
    assert torch.equal(bits_of(cache, 3), one)
    assert torch.equal(bits_of(cache, 1), two)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_host_blocks": 8}, "8 host blocks, and there is memory for 7"),
        ({"stores": (HostStore(12, 0),)}, "moves block 12 of 12"),
        ({"stores": (HostStore(0, 7),)}, "moves host block 7 of 7"),
        ({"loads": (HostLoad(0, 0, -1, 0),)}, "moves block -1 of 12"),
        ({"loads": (HostLoad(0, 0, 1, 0), HostLoad(0, 0, 1, 2))}, "in two moves"),
        ({"stores": (HostStore(1, 0),), "fetches": (HostFile(0, KEY),)}, "a file move"),
    ],
)
def test_moves_beyond_the_pools_or_of_one_block_twice_are_refused(
    fields: dict[str, Any], problem: str
) -> None:
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float32), 12)
    with pytest.raises((InvalidConfig, ValueError), match=problem):
        run_moves(BlockMoves(cache, pool_of(cache, 7)), plan_of(0, **fields))


def test_a_host_pool_of_another_model_is_refused() -> None:
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float32), 12)
    other = cache_of(KVCacheSpec(3, 1, 8, torch.float32), 12)
    with pytest.raises(InvalidConfig, match="host_tier: a block has 512 bytes, a host block 768"):
        BlockMoves(cache, pool_of(other, 7))


def test_slabs_hold_whole_blocks() -> None:
    assert [len(slab) for slab in allocate_slabs(0, is_pinned=False)] == []
    slabs = allocate_slabs(5 * 2**28, is_pinned=False, block_bytes=5 * 2**26)
    assert [len(slab) for slab in slabs] == [3 * 5 * 2**26, 5 * 2**26]
    pool = HostPool(slabs, 5 * 2**26)
    assert pool.num_blocks == 4
    assert pool.block(3).data_ptr() == slabs[1].data_ptr()


# Tokens.


@cache
def decoder_for(family: str) -> Any:
    register_attention()
    return select_decoder(create_module(family, torch.float64, ATTENTION_NAME), TorchOps(), 512)


class Failing:
    """A decoder that fails at some of its calls, counted from 1."""

    def __init__(self, decoder: Any, *calls: int) -> None:
        self._decoder = decoder
        self._calls = calls
        self._count = 0

    def forward(self, *arguments: Any) -> Any:
        self._count += 1
        if self._count in self._calls:
            raise RuntimeError(f"call {self._count} fails")
        return self._decoder.forward(*arguments)

    def compute_logits(self, hidden: Any) -> Any:
        return self._decoder.compute_logits(hidden)


def engine_for(
    family: str,
    tier: HostTier | None,
    *,
    depth: int = 2,
    blocks: int = 22,
    files: FileMoves | None = None,
    drafts: int = 0,
    fails: tuple[int, ...] = (),
    namespace: str = "",
    create_moves: Callable[..., Moves] = BlockMoves,
) -> Engine:
    """Return an engine of a family's decoder; a draft model is the model itself."""
    decoder, layers = decoder_for(family)
    config = EngineConfig(
        num_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=512,
        depth=depth,
        host_tier=tier,
        speculation=Speculation(num_tokens=drafts, num_blocks=blocks) if drafts else None,
        cache_namespace=namespace,
    )
    spec = select_kv_cache_spec(layers, torch.float64, CPU)

    def model_of(draft: HFModel | None, host_memory: HostMemory) -> HFModel:
        return assemble_model(
            Failing(decoder, *fails) if fails else decoder,
            layers,
            spec,
            config,
            vocab_size=VOCAB,
            eos_token=EOS,
            device=CPU,
            draft=draft,
            max_in_flight=2 * max(1, drafts),
            host_memory=host_memory,
        )

    memory = NO_HOST_MEMORY
    if tier is not None:
        size = spec.bytes_per_token * BLOCK
        slabs = allocate_slabs(tier.num_blocks * size, is_pinned=False, block_bytes=size)
        memory = HostMemory(HostPool(slabs, size), files, create_moves=create_moves)
    return Engine(model_of(model_of(None, NO_HOST_MEMORY) if drafts else None, memory), config)


def turns(count: int = 12, **params: Any) -> list[Request]:
    """Return turns of four conversations, sampled and greedy ones, each longer than the one before.

    The conversations together have twice the blocks of the device.
    """
    rng = Random(5)
    threads = [rng.choices(range(3, VOCAB), k=20) for _ in range(4)]
    requests = []
    for index in range(count):
        thread = threads[index % 4]
        thread += rng.choices(range(3, VOCAB), k=5)
        chosen = {
            "temperature": 0.9 * (index % 3 > 0),
            "max_tokens": 6,
            "seed": index,
            "ignore_eos": True,
            "repetition_penalty": 1.0 + 0.2 * (index % 5 == 0),
            **params,
        }
        requests.append(Request(index, tuple(thread), SamplingParams(**chosen)))
    return requests


class Served(NamedTuple):
    """Outputs of a run: deltas by request, and its plans."""

    outputs: dict[int, list[Any]]
    plans: list[StepPlan]

    def count(self, kind: str) -> int:
        """Moves of a kind in all plans."""
        return sum(len(getattr(plan, kind)) for plan in self.plans)


def serve(
    engine: Engine,
    requests: list[Request],
    at_once: int = 1,
    before: Callable[[int], object] = lambda index: None,
) -> Served:
    """Serve the requests, `at_once` at a time, with every plan and state audited.

    before   called with the index of a group of requests before it is submitted
    """
    recording = RecordingModel(engine.model, PlanAudit(engine.scheduler))
    engine.model, plain = recording, engine.model
    outputs: dict[int, list[Any]] = {request.id: [] for request in requests}

    def keep(delta: Delta) -> None:
        assert delta.error is None, delta.error
        kept = outputs[delta.request_id]
        kept += zip(delta.tokens, delta.logprobs or (None,) * len(delta.tokens), strict=True)
        kept += delta.prompt_logprobs or ()

    for first in range(0, len(requests), at_once):
        before(first // at_once)
        for request in requests[first : first + at_once]:
            engine.submit(request)
        while engine.has_work:
            for delta in engine.step():
                keep(delta)
            assert recording.failure is None
            audit(engine)
    engine.model = plain
    return Served(outputs, [entry for entry in recording.log if isinstance(entry, StepPlan)])


@cache
def expected(family: str) -> dict[int, list[Any]]:
    """Return the outputs of `turns` without a host tier."""
    return serve(engine_for(family, None), turns(), at_once=3).outputs


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[] if each in ("llama", "gpt2", "gemma2") else pytest.mark.long)
        for each in CONFIGS
    ],
)
def test_outputs_with_a_host_tier_are_those_without(family: str) -> None:
    served = serve(engine_for(family, SMALL_TIER), turns(), at_once=3)
    assert served.outputs == expected(family)
    assert served.count("stores") > 20 and served.count("loads") > 8
    assert any(plan.rows and plan.loads for plan in served.plans)
    assert any(plan.stores and plan.loads for plan in served.plans)


class CheckedModel(ModelWrapper):
    """A model whose loaded blocks are compared with what they were when they were stored.

    num_equal, num_different   blocks that were loaded, by that comparison
    """

    def __init__(self, model: HFModel) -> None:
        super().__init__(model)
        self._data = model._runner.kv_cache.data
        self._stored: dict[int, Any] = {}
        self._loaded: list[tuple[int, Any]] = []
        self._results: list[Any] = []

    def forward(self, plan: StepPlan) -> Any:
        """Run the plan. Loads of the plan before it are complete for what is queued afterwards."""
        before = {move.host_block: self._data[:, move.block].clone() for move in plan.stores}
        step = self._model.forward(plan)
        self._results += [(self._data[:, b] == content).all() for b, content in self._loaded]
        self._loaded = [(move.block, self._stored[move.host_block]) for move in plan.loads]
        self._stored |= before
        return step

    @property
    def num_equal(self) -> int:
        return sum(map(bool, self._results))

    @property
    def num_different(self) -> int:
        return len(self._results) - self.num_equal


def test_loaded_blocks_are_those_that_were_stored() -> None:
    engine = engine_for("llama", SMALL_TIER)
    assert isinstance(engine.model, HFModel)
    engine.model = checked = CheckedModel(engine.model)
    assert serve(engine, turns(), at_once=3).outputs == expected("llama")
    assert checked.num_equal > 20 and not checked.num_different


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_moved_blocks", [1, None])
def test_outputs_do_not_depend_on_how_much_is_moved_at_a_time(
    depth: int, max_moved_blocks: int | None
) -> None:
    tier = replace(TIER, max_moved_blocks=max_moved_blocks)
    served = serve(engine_for("llama", tier, depth=depth), turns(), at_once=3)
    assert served.outputs == expected("llama")
    assert served.count("loads")


def test_preempted_sequences_find_their_blocks_in_host_memory() -> None:
    """Three sequences of up to fourteen blocks run in 22."""
    requests = turns(6, max_tokens=24)
    with_tier = serve(engine_for("llama", TIER), requests, at_once=3)
    without = serve(engine_for("llama", None), requests, at_once=3)
    assert with_tier.outputs == without.outputs
    assert any(plan.preempted for plan in with_tier.plans) and with_tier.count("loads")


def test_prompt_logprobs_and_copies_of_forks_are_those_without_a_host_tier() -> None:
    requests = turns(8, logprobs=2)
    requests[5] = replace(requests[5], params=replace(requests[5].params, prompt_logprobs=1))
    requests[6] = replace(requests[6], params=replace(requests[6].params, n=2, temperature=1.0))
    with_tier = serve(engine_for("llama", TIER), requests)
    assert with_tier.outputs == serve(engine_for("llama", None), requests).outputs
    assert with_tier.count("copies") and with_tier.count("loads")


def test_a_draft_model_computes_what_the_target_loads() -> None:
    with_tier = serve(engine_for("llama", TIER, drafts=2), turns(), at_once=3)
    assert with_tier.outputs == expected("llama")
    assert with_tier.count("loads") and any(plan.drafts for plan in with_tier.plans)


def test_pools_may_shrink_and_grow_while_blocks_are_moved() -> None:
    engine = engine_for("llama", TIER)

    def resize(index: int) -> None:
        engine.scheduler.resize((22, 14, 18)[index % 3])
        engine.scheduler.resize_host((40, 6, 20)[index % 3])

    served = serve(engine, turns(), at_once=2, before=resize)
    assert served.outputs == expected("llama")
    assert served.count("loads")


@pytest.mark.parametrize("call", [6, 13, 20, 21])
def test_a_step_that_fails_leaves_no_wrong_block_in_any_tier(call: int) -> None:
    engine = engine_for("llama", SMALL_TIER, fails=(call,))
    served = serve(engine, turns(), at_once=3)
    assert served.outputs == expected("llama")
    assert served.count("loads")


def test_a_model_executes_moves_if_it_has_a_host_pool() -> None:
    model = engine_for("llama", None).model
    assert not executes_moves(model) and executes_moves(engine_for("llama", TIER).model)
    config = EngineConfig(num_blocks=16, block_size=BLOCK, max_num_seqs=3, host_tier=TIER)
    with pytest.raises(InvalidConfig, match="host_tier: this model has no pool"):
        Engine(model, config)
    with pytest.raises(InvalidConfig, match="host_tier: 7 host blocks, and this model has no"):
        model.forward(StepPlan(0, (), 16, BLOCK, num_host_blocks=7))


# Files.


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_restarted_engine_finds_its_prefixes_in_files(
    family: str, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    """The files of the first engine are read by the second, whose pools are empty."""
    for kind in ("spills", "fetches"):
        store = BlockFiles(tmp_path / "kv", bytes(64), 10**8)
        files = FileMoves(store, executor)
        engine = engine_for(family, replace(SMALL_TIER, disk=DISK), files=files)
        engine.add_disk_keys(store.keys())
        served = serve(engine, turns(), at_once=3)
        assert served.outputs == expected(family)
        assert served.count(kind) > 10
        # The first prompt has six full blocks.
        first = next(row for plan in served.plans for row in plan.rows if row.seq_id == 0)
        assert first.start == (24 if kind == "fetches" else 0)
        executor.submit(int).result()
        store.close()


@pytest.mark.parametrize("seed", range(1, 6))
def test_files_that_fail_or_answer_late_change_no_token(seed: int) -> None:
    store = FaultyStore(seed)
    files = FileMoves(store, lateness=store.lateness)
    tier = replace(SMALL_TIER, num_blocks=8, disk=replace(DISK, max_moves=4, max_wait_plans=6))
    engine = engine_for("llama", tier, files=files)
    served = serve(engine, turns(), at_once=2)
    assert served.outputs == expected("llama")
    assert served.count("spills") and served.count("fetches")


@pytest.mark.parametrize("missing_bytes", [-1, 1, 511])
def test_a_file_of_another_length_is_no_content(missing_bytes: int) -> None:
    cache = cache_of(KVCacheSpec(2, 1, 8, torch.float32), 12)
    store = FaultyStore(0)
    moves = BlockMoves(cache, pool_of(cache, 7), FileMoves(store))
    store.contents[KEY] = bytes(cache.block_bytes - missing_bytes)
    plan = plan_of(0, fetches=(HostFile(3, KEY),))
    run_moves(moves, plan)
    [answer] = moves.end(plan)
    assert not answer.is_good
