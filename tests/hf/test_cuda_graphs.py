"""CUDA graphs: the sizes there are, and that a replay computes what the step does without a graph.

The number of rows decides how kernels split the work. With equal rows the numbers are equal; with
padding rows they agree within rounding.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.config import EngineConfig  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.models.capture_sizes import (  # noqa: E402
    MAX_GRAPH_PREFILL_ROWS,
    MIXED_CAPTURE_SIZES,
    VERIFY_CAPTURE_SIZES,
    decode_capture_sizes,
)
from forge.models.hf.attention.flashinfer_api import load_wrappers  # noqa: E402
from forge.models.hf.attention.graph_attention import (  # noqa: E402
    MixedGraphAttention,
    PrefillGraphAttention,
    SplitGraphAttention,
    build_graph_attentions,
)
from forge.models.hf.attention.interface import AttentionMetadata, RowSpan  # noqa: E402
from forge.models.hf.decoders.module_decoder import ATTENTION_NAME, register_attention  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec, select_ops  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.runner.cuda_graphs import MixedGraphs  # noqa: E402
from forge.models.hf.runner.input_batch import InputBatch, build_input_batch  # noqa: E402
from forge.models.hf.runner.model_runner import (  # noqa: E402
    ModelRunner,
    padded_mixed_fields,
    padded_token_fields,
)
from forge.request import Request, SamplingParams  # noqa: E402
from forge.seam import Row, StepPlan  # noqa: E402
from forge.sim.calibration.fitting import _create_captured_forms  # noqa: E402
from forge.sim.cost.table import StepFeatures  # noqa: E402
from tests.hf.families import SMALL  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
VOCAB, EOS = 307, 2
BLOCK = 16
BOUND = 3e-2
"""Relative error of hidden states in bf16 after four layers that rounding explains."""

MEDIUM = {**SMALL, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4}
CONFIGS = {
    "qwen3, heads of 128": lambda: hf.Qwen3Config(**MEDIUM, head_dim=128),
    "qwen3, heads of 64": lambda: hf.Qwen3Config(**MEDIUM, head_dim=64),
    "qwen3, heads of 96 in pages of 128": lambda: hf.Qwen3Config(**MEDIUM, head_dim=96),
    "gemma2, windows and soft caps": lambda: hf.Gemma2Config(
        **MEDIUM, head_dim=128, query_pre_attn_scalar=128, sliding_window=20
    ),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def wrappers_of(kernels: str) -> Any:
    """Return FlashInfer's wrappers, or None for Triton's kernel."""
    if kernels == "triton":
        return None
    pytest.importorskip("flashinfer")
    return load_wrappers()


def model_of(
    name: str, device: Any, dtype: Any, *, decodes: Any, chunks: Any, kernels: str = "triton"
) -> HFModel:
    """Return a model with random weights, 64 blocks of 16, 8 slots and graphs of these sizes.

    kernels   kernels of longer rows on a GPU
    """
    register_attention()
    config = CONFIGS[name]()
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in module.parameters():
            noise = torch.randn(tensor.shape) / math.sqrt(tensor.shape[-1])
            tensor.copy_(1.2 * noise if tensor.dim() > 1 else tensor + noise)
    module = module.to(device, dtype).eval()
    with torch.inference_mode():
        decoder, layers = select_decoder(module, select_ops(device, dtype), 1024)
        return assemble_model(
            decoder,
            layers,
            select_kv_cache_spec(layers, dtype, device),
            geometry(),
            vocab_size=VOCAB,
            eos_token=EOS,
            device=device,
            decode_sizes=decodes,
            mixed_sizes=chunks,
            wrappers=wrappers_of(kernels) if device.type == "cuda" else None,
        )


def geometry() -> EngineConfig:
    return EngineConfig(
        num_blocks=64, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=640,
        max_model_len=1024, enable_prefix_caching=False,
    )  # fmt: skip


class PreparedBatch(NamedTuple):
    """A batch whose earlier positions are in their blocks."""

    batch: InputBatch
    spans: list[RowSpan]
    pages: list[int]


def prepare_batch(device: ModelRunner, spans: list[tuple[int, int]]) -> PreparedBatch:
    """Return rows [start, end) in slots 0, 1, ..., over random blocks, tables on the device."""
    draw = torch.Generator().manual_seed(4)
    blocks = torch.randperm(64, generator=draw).tolist()
    noise = torch.randn(device.kv_cache.data[..., :1].shape, generator=draw)
    device.kv_cache.data.copy_(noise.expand(device.kv_cache.data.shape) * 0.1)
    rows, pages = [], []
    for slot, (start, end) in enumerate(spans):
        mine, blocks = blocks[: -(-end // BLOCK)], blocks[-(-end // BLOCK) :]
        tokens = torch.randint(3, VOCAB, (end - start,), generator=draw).tolist()
        pages += mine
        rows.append(Row(slot, 0, slot, start, tuple(tokens), new_blocks=tuple(mine), num_samples=1))
    pool = device.kv_cache
    plan = StepPlan(0, tuple(rows), 64, BLOCK)
    batch = build_input_batch(plan, [], pool.num_slots, pool.block_tables.shape[1])
    placed = [
        RowSpan(rows[i].slot, rows[i].start, rows[i].end, int(first))
        for i, first in zip(batch.plan_rows, batch.query_starts, strict=True)
    ]
    device.upload_inputs(batch, [])
    return PreparedBatch(batch, placed, pages)


def inputs(device: ModelRunner, batch: InputBatch, size: int) -> list[Any]:
    """Return the batch's fields on the device, padded to `size` tokens."""
    return device.input_buffer.copy_to_device(padded_token_fields(batch, size, device.kv_cache))


def error(got: Any, expected: Any) -> float:
    """Return the relative error, by norm."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


def eager_hidden(device: ModelRunner, ready: PreparedBatch) -> Any:
    """Return hidden states [tokens, hidden_size], computed without a graph."""
    fields = inputs(device, ready.batch, len(ready.batch.tokens))
    none = device.output_buffer.sampled[0, :0]
    device.attention.plan(AttentionMetadata(ready.spans, 0, none, none))
    return device.run_forward(device.attention, *fields)[1]


def other_pages(device: ModelRunner, ready: PreparedBatch) -> list[int]:
    """Return the blocks that no row of the batch has, without the scratch block."""
    return sorted(set(range(64)) - set(ready.pages))


# On any machine.


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (5, [1, 2, 4, 5]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_sizes_grow_and_end_with_the_most(most: int, sizes: list[int]):
    assert decode_capture_sizes(most) == sizes


def test_a_batch_is_filled_up_by_less_than_its_own_size_and_less_than_16():
    for most in (1, 7, 64, 100, 128, 130, 256, 300):
        sizes = decode_capture_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for rows in range(1, most + 1):
            filled = next(size for size in sizes if size >= rows)
            assert filled - rows < min(rows, 16), (most, rows)


def test_rows_that_fill_a_step_are_in_the_scratch_slot_and_known():
    cpu = torch.device("cpu")
    device = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())._runner
    ready = prepare_batch(device, [(20, 21), (5, 6), (0, 1)])
    slots, positions, tokens, sources = (
        field.tolist() for field in padded_token_fields(ready.batch, 5, device.kv_cache)
    )
    assert slots == [0, 1, 2, 8, 8]
    assert positions == [20, 5, 0, 0, 0]
    assert tokens[3:] == [0, 0]
    assert sources == [8] * 5


def test_a_chunk_knows_what_its_rows_of_one_token_read():
    cpu = torch.device("cpu")
    device = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())._runner
    ready = prepare_batch(device, [(20, 24), (5, 6), (0, 1)])
    slots, positions, *_, reads = (
        field.tolist() for field in padded_mixed_fields(ready.batch, 8, device.kv_cache)
    )
    assert (slots[:2], positions[:2], reads[:2]) == ([1, 2], [5, 0], [6, 1])
    assert slots[2:6] == [0] * 4 and reads[2:] == [0] * 6


def test_rows_that_fill_a_step_write_to_the_scratch_block_only():
    cpu = torch.device("cpu")
    device = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())._runner
    ready = prepare_batch(device, [(20, 37), (5, 30)])
    before = device.kv_cache.data.clone()
    size = len(ready.batch.tokens)
    filled = inputs(device, ready.batch, size + 6)
    none = device.output_buffer.sampled[0, :0]
    spare = RowSpan(device.kv_cache.scratch_slot, 0, 6, size)
    device.attention.plan(AttentionMetadata([*ready.spans, spare], 0, none, none))
    hidden = device.run_forward(device.attention, *filled)[1][:size]
    others = other_pages(device, ready)
    assert torch.equal(device.kv_cache.data[:, others], before[:, others])
    device.kv_cache.data.copy_(before)
    assert error(hidden, eager_hidden(device, ready)) < 1e-6


class UnplannedAttention(NamedTuple):
    """Attention without kernels whose plan matches all rows that its buffers have room for."""

    num_tokens: int
    max_rows: int
    backend: str
    scratch_slot: int = 0

    def plan_replay(self, spans: list[RowSpan]) -> bool:
        assert len(spans) <= self.max_rows
        assert sum(s.end - s.start for s in spans) <= self.num_tokens
        return True


class FakeGraph(NamedTuple):
    """A captured graph by its size; nothing is computed."""

    attention: MixedGraphAttention
    input_ids: int
    hidden: None = None

    @property
    def graph(self) -> FakeGraph:
        return self

    def replay(self) -> None: ...


class FakeChunkGraphs(MixedGraphs):
    """The graphs that a GPU with so many slots would have."""

    def __init__(self, slots: int, sizes: tuple[int, ...] = MIXED_CAPTURE_SIZES) -> None:
        input_buffer = SimpleNamespace(buffer=torch.zeros(5 * max(sizes), dtype=torch.int32))
        device: Any = SimpleNamespace(
            kv_cache=SimpleNamespace(num_slots=slots), input_buffer=input_buffer
        )
        super().__init__(device, self, sizes)

    def build_graph_attentions(
        self, tokens: int, slots: Any, kv_lens: Any
    ) -> tuple[MixedGraphAttention, ...]:
        return build_graph_attentions(
            partial(UnplannedAttention, tokens), Any, tokens, slots, kv_lens
        )

    def _capture(self, size: int, attention: Any, fields: Any) -> Any:
        return FakeGraph(attention, size)

    def choose_graph(self, rows: list[tuple[int, int]]) -> tuple[type, int] | None:
        """Return the graph for rows [start, end), rows of one token first, and its tokens."""
        spans = [RowSpan(slot, start, end, 0) for slot, (start, end) in enumerate(rows)]
        tokens = sum(end - start for start, end in rows)
        singles = sum(end - start == 1 for start, end in rows)
        size = self.padded_size(tokens) or tokens
        for chunk in self._captured.get(size, ()):
            found = self.replay(spans, singles, size)
            if found is None:
                return None
            if chunk.attention.plan_replay(spans, singles):
                return type(chunk.attention), size
        return None


@pytest.mark.parametrize(
    ("rows", "kind", "size"),
    [
        ([(0, 13)], PrefillGraphAttention, 16),
        ([(0, 3)] * 4, PrefillGraphAttention, 16),
        ([(0, 4)], PrefillGraphAttention, 16),
        ([(40, 50)], MixedGraphAttention, 16),
        ([(0, 128)], PrefillGraphAttention, 128),
        ([(1, 129)], MixedGraphAttention, 128),
        ([(1, 130)], PrefillGraphAttention, 192),
        ([(30, 31), (0, 13)], MixedGraphAttention, 16),
        ([(30, 31), (0, 63)], MixedGraphAttention, 64),
        ([(30, 31), (0, 64)], SplitGraphAttention, 128),
        ([(90, 91)] * 60 + [(9, 40)] * 4, SplitGraphAttention, 192),
        ([(90, 91)] * 59 + [(9, 40)] * 5, MixedGraphAttention, 256),
        ([(0, 20)] * 5, MixedGraphAttention, 128),
    ],
)
def test_a_step_replays_the_graph_of_its_size(rows: list[tuple[int, int]], kind: type, size: int):
    assert FakeChunkGraphs(64).choose_graph(rows) == (kind, size)


def test_a_step_of_more_rows_than_a_graph_has_is_not_replayed():
    graphs = FakeChunkGraphs(256)
    longer = [(0, 97), (0, 96), (0, 96), (0, 96)]
    assert graphs.choose_graph([(9, 10)] * 127 + longer) == (SplitGraphAttention, 512)
    assert graphs.choose_graph([(9, 10)] * 123 + [(0, 20)] * 5) == (MixedGraphAttention, 256)
    # FA3 has room for 4 of the longer rows, FA2 for 128 rows.
    assert graphs.choose_graph([(9, 10)] * 124 + [(0, 20)] * 5) is None


@pytest.mark.parametrize(
    ("rows", "kind", "size"),
    [
        ([(0, 600)], SplitGraphAttention, 640),
        ([(40, 140)] * 9, SplitGraphAttention, 1024),
        ([(9, 10)] * 100 + [(0, 50)] * 17, MixedGraphAttention, 1024),
        ([(9, 10)] * 120 + [(0, 50)] * 17, None, None),
        ([(0, 60)] * 17, MixedGraphAttention, 1024),
        ([(9, 10)] * 255 + [(0, 1024)], SplitGraphAttention, 1280),
        ([(0, 60)] * 21, None, None),
        ([(0, 1281)], None, None),
    ],
)
def test_a_large_step_replays_one_graph_with_or_without_decode_rows(
    rows: list[tuple[int, int]], kind: type | None, size: int | None
):
    graphs = FakeChunkGraphs(256, (512, 640, 1024, 1280))
    assert graphs.choose_graph(rows) == ((kind, size) if kind else None)


def test_steps_of_two_to_four_tokens_replay_one_graph_for_any_rows():
    graphs = FakeChunkGraphs(8, (2, 4, 16))
    assert [len(graphs._captured[size]) for size in (2, 4, 16)] == [1, 1, 2]


@pytest.mark.parametrize("slots", [1, 3, 24, 64, 256])
@pytest.mark.parametrize(
    "sizes", [MIXED_CAPTURE_SIZES, tuple(s for s in VERIFY_CAPTURE_SIZES if s <= 512)]
)
def test_the_simulator_predicts_which_graph_a_step_replays(slots: int, sizes: tuple[int, ...]):
    """Steps at the limits of the graphs, and a few larger ones."""
    graphs, forms = (
        FakeChunkGraphs(slots, sizes),
        _create_captured_forms(MIXED_CAPTURE_SIZES, slots),
    )
    dice, seen = random.Random(7), Counter[type | None]()
    for _ in range(400):
        singles = min(dice.choice((0, 0, 1, 2, 60, 120, 124, 125, 128)), slots - 1)
        number = min(dice.choice((1, 2, 3, 4, 5, 9)), slots - singles)
        lengths = [dice.choice((2, 3, 15, 16, 64, 65, 97, 128, 129)) for _ in range(number)]
        rows = [(9, 10)] * singles
        rows += [(start, start + n) for n in lengths for start in [dice.choice((0, 0, 40))]]
        tokens = singles + sum(lengths)
        if tokens <= MAX_GRAPH_PREFILL_ROWS:
            continue
        spans = tuple((end - start, end) for start, end in rows)
        work = StepFeatures(len(rows), tokens, number, spans=spans)
        form = next((each for each in forms if each.applies_to(work)), None)
        kind = None
        if form is not None:
            kind = (
                SplitGraphAttention
                if form.apart
                else MixedGraphAttention
                if form.cuts
                else PrefillGraphAttention
            )
        assert kind is (graphs.choose_graph(rows) or [None])[0], rows
        seen[kind] += 1
    rare = [
        kind
        for kind in (PrefillGraphAttention, MixedGraphAttention, SplitGraphAttention, None)
        if seen[kind] < 5
    ]
    assert rare == {1: [SplitGraphAttention, None], 3: [None]}.get(slots, []), seen


@pytest.mark.parametrize(("singles", "size"), [(8, 128), (60, 192), (124, 256)])
def test_samples_of_few_rows_predict_the_graph_of_more(singles: int, size: int):
    rows = [(9, 10)] * singles + [(0, 97)]
    work = StepFeatures(len(rows), singles + 97, 1, spans=((1, 10),) * singles + ((97, 97),))
    forms = _create_captured_forms(MIXED_CAPTURE_SIZES, 16)
    assert next(each for each in forms if each.applies_to(work)).apart
    assert FakeChunkGraphs(256).choose_graph(rows) == (SplitGraphAttention, size)


# On a GPU.

KERNELS = ("triton", "flashinfer")
"""Kernels of rows with more than one token."""


@pytest.fixture(scope="module", params=product(CONFIGS, KERNELS), ids=", ".join)
def captured_model(request: pytest.FixtureRequest) -> HFModel:
    name, kernels = request.param
    cuda, sizes = torch.device("cuda"), (16, 64, 256, 640)
    return model_of(name, cuda, torch.bfloat16, decodes=(1, 2, 4, 8), chunks=sizes, kernels=kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_a_replayed_decode_step_gives_the_logits_of_the_step(captured_model: HFModel, rows: int):
    device, graphs = captured_model._runner, captured_model._graphs.decode
    assert graphs is not None
    spans = [(start, start + 1) for start in (0, 1, 15, 16, 100, 70, 31, 33)[:rows]]
    ready = prepare_batch(device, spans)
    before = device.kv_cache.data.clone()
    logits = graphs.replay(ready.batch)[1].clone()
    drawn, after = device.output_buffer.sampled[:, :rows].clone(), device.kv_cache.data.clone()
    device.kv_cache.data.copy_(before)
    expected = device.run_decode(*inputs(device, ready.batch, rows))[1]
    others = other_pages(device, ready)
    assert torch.equal(after[:, others], before[:, others])
    assert not torch.equal(after[:, ready.pages], before[:, ready.pages])
    assert error(after[:, ready.pages], device.kv_cache.data[:, ready.pages]) < BOUND
    assert error(logits, expected) < BOUND
    best = logits.gather(1, drawn[0][:, None].long())[:, 0]
    assert torch.equal(best, logits.amax(-1)) and not drawn[1].any()
    if rows in (1, 2, 4, 8):
        assert torch.equal(logits, expected)
        assert torch.equal(device.output_buffer.sampled[:, :rows], drawn)


CHUNKS = {
    "a prompt": [(0, 13)],
    "a prompt that fills its recording": [(0, 64)],
    "a chunk": [(40, 100)],
    "two chunks": [(7, 90), (16, 130)],
    "decodes with a chunk": [(3, 4), (64, 65), (15, 16), (100, 101), (0, 55)],
    "a chunk between decodes": [(30, 31), (20, 64), (300, 301)],
    "a long decode with two prompts": [(0, 5), (480, 481), (0, 30)],
    "as many decodes as there is room for": [(9, 10), (0, 1), (90, 91), *[(0, 3)] * 5],
    "a long chunk with decodes": [(30, 31), (300, 301), (16, 200)],
    "more decodes than before, with four chunks": [(90, 91)] * 4 + [(0, 30)] * 4,
    "fewer, and the recording is full": [(30, 31), (0, 255)],
    "five prompts": [(0, 9), (0, 3), (0, 17), (0, 2), (0, 20)],
    "a large step of prompts": [(0, 300), (0, 290)],
    "a large step of chunks with decodes": [(30, 31), (300, 301), (0, 250), (16, 290)],
    "a large step that is full": [(0, 1), (100, 101), (17, 18), (0, 637)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHUNKS)
def test_a_replayed_chunk_gives_the_hidden_states_of_the_step(captured_model: HFModel, name: str):
    device, graphs = captured_model._runner, captured_model._graphs.mixed
    assert graphs is not None
    ready = prepare_batch(device, CHUNKS[name])
    tokens = len(ready.batch.tokens)
    size = graphs.padded_size(tokens)
    assert size is not None and size >= tokens
    before = device.kv_cache.data.clone()
    device.input_buffer.copy_to_device(padded_mixed_fields(ready.batch, size, device.kv_cache))
    found = graphs.replay(ready.spans, ready.batch.num_decode_rows, size)
    assert found is not None, "the plan has another layout than the recorded one"
    hidden, after = found[1][:tokens].clone(), device.kv_cache.data.clone()
    device.kv_cache.data.copy_(before)
    expected = eager_hidden(device, ready)
    others = other_pages(device, ready)
    assert torch.equal(after[:, others], before[:, others])
    assert error(after[:, ready.pages], device.kv_cache.data[:, ready.pages]) < BOUND
    assert error(hidden, expected) < BOUND


@pytest.mark.gpu
def test_a_chunk_larger_than_every_captured_graph_runs_without_one(captured_model: HFModel):
    graphs = captured_model._graphs.mixed
    assert graphs is not None
    sizes = [graphs.padded_size(tokens) for tokens in (1, 16, 17, 256, 257, 640, 641)]
    assert sizes == [16, 16, 64, 256, 640, 640, None]


def outputs(model: HFModel) -> list[list[int]]:
    """Return greedy tokens of four requests of one length, admitted together."""
    engine = Engine(model, geometry())
    draw = torch.Generator().manual_seed(6)
    found: dict[int, list[int]] = {i: [] for i in range(4)}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for i in found:
        prompt = torch.randint(3, VOCAB, (30 + i,), generator=draw).tolist()
        engine.submit(Request(i, tuple(prompt), params))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            found[delta.request_id] += delta.tokens
    assert [len(tokens) for tokens in found.values()] == [24] * 4
    return list(found.values())


def test_outputs_repeat_on_one_model():
    """The comparisons on a GPU rely on this."""
    cpu = torch.device("cpu")
    model = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())
    assert outputs(model) == outputs(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_captured_decode_steps_are_those_without_graphs(name: str):
    """Always four rows, a captured size: every kernel does the same with and without the graph."""
    cuda = torch.device("cuda")
    eager = model_of(name, cuda, torch.bfloat16, decodes=(), chunks=())
    graphs = model_of(name, cuda, torch.bfloat16, decodes=decode_capture_sizes(8), chunks=())
    assert outputs(graphs) == outputs(eager)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3, heads of 128", "gemma2, windows and soft caps"])
def test_a_plan_with_another_layout_than_the_captured_one_runs_without_a_graph(name: str):
    """Every graph is given a captured layout that no plan has."""
    cuda = torch.device("cuda")
    shared: dict[str, Any] = {"decodes": (1, 2, 4, 8), "kernels": "flashinfer"}
    eager = model_of(name, cuda, torch.bfloat16, chunks=(), **shared)
    model = model_of(name, cuda, torch.bfloat16, chunks=MIXED_CAPTURE_SIZES[:5], **shared)
    assert model._graphs.mixed is not None
    for chunks in model._graphs.mixed._captured.values():
        for chunk in chunks:
            places = chunk.attention._kernels
            places._captured_plans = dict.fromkeys(places._captured_plans, ("of no plan",))
            assert not places.plan_replay(())
    assert outputs(model) == outputs(eager)
