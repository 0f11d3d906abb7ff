"""Recorded steps: the sizes there are, and that a replay does what the step does without one.

Which rows a recording is given decides how its kernels cut the work, so where both run with the
same rows the numbers are equal, and where one is filled up they are as near as rounding.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.config import EngineConfig  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.models.hf.attention import Rows, Span  # noqa: E402
from forge.models.hf.backend import kv_shape, ops_for  # noqa: E402
from forge.models.hf.batch import Batch, batch_of  # noqa: E402
from forge.models.hf.decoder import ATTENTION, register  # noqa: E402
from forge.models.hf.device import Device, chunk_fields_of, fields_of  # noqa: E402
from forge.models.hf.graphs import (  # noqa: E402
    CHUNK_SIZES,
    VERIFIED_SIZES,
    ChunkGraphs,
    bucket_sizes,
)
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.open import decoder_of, served  # noqa: E402
from forge.models.hf.recorded_attention import (  # noqa: E402
    FEW_ROWS,
    Alone,
    Apart,
    RecordedAttention,
    recordings,
)
from forge.request import Request, SamplingParams  # noqa: E402
from forge.seam import Row, StepPlan  # noqa: E402
from sim.fitting import _forms  # noqa: E402
from sim.table import Work  # noqa: E402
from tests.families import SMALL  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
VOCAB, EOS = 307, 2
BLOCK = 16
BOUND = 3e-2
"""Relative distance of hidden states in bf16, four layers deep, that rounding explains."""

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


def model_of(name: str, device: Any, dtype: Any, *, decodes: Any, chunks: Any) -> HFModel:
    """Random weights, 64 blocks of 16 for 8 slots, with recordings of these sizes."""
    register()
    config = CONFIGS[name]()
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in module.parameters():
            noise = torch.randn(tensor.shape) / math.sqrt(tensor.shape[-1])
            tensor.copy_(1.2 * noise if tensor.dim() > 1 else tensor + noise)
    module = module.to(device, dtype).eval()
    with torch.inference_mode():
        decoder, layers = decoder_of(module, ops_for(device, dtype), 512)
        return served(
            decoder,
            layers,
            kv_shape(layers, dtype, device),
            geometry(),
            vocab_size=VOCAB,
            eos_token=EOS,
            device=device,
            decode_sizes=decodes,
            chunk_sizes=chunks,
        )


def geometry() -> EngineConfig:
    return EngineConfig(
        num_blocks=64, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=512,
        max_model_len=512, enable_prefix_caching=False,
    )  # fmt: skip


class Prepared(NamedTuple):
    """A batch whose earlier positions are in the pages."""

    batch: Batch
    spans: list[Span]
    pages: list[int]


def prepared(device: Device, spans: list[tuple[int, int]]) -> Prepared:
    """Rows [start, end) in slots 0, 1, ..., over random pages, with their tables on the device."""
    draw = torch.Generator().manual_seed(4)
    blocks = torch.randperm(64, generator=draw).tolist()
    noise = torch.randn(device.pool.data[..., :1].shape, generator=draw)
    device.pool.data.copy_(noise.expand(device.pool.data.shape) * 0.1)
    rows, pages = [], []
    for slot, (start, end) in enumerate(spans):
        mine, blocks = blocks[: -(-end // BLOCK)], blocks[-(-end // BLOCK) :]
        tokens = torch.randint(3, VOCAB, (end - start,), generator=draw).tolist()
        pages += mine
        rows.append(Row(slot, 0, slot, start, tuple(tokens), new_blocks=tuple(mine), num_samples=1))
    pool = device.pool
    plan = StepPlan(0, tuple(rows), 64, BLOCK)
    batch = batch_of(plan, [], pool.num_slots, pool.tables.shape[1])
    placed = [
        Span(rows[i].slot, rows[i].start, rows[i].end, int(first))
        for i, first in zip(batch.order, batch.firsts, strict=True)
    ]
    device.receive(batch, [])
    return Prepared(batch, placed, pages)


def inputs(device: Device, batch: Batch, size: int) -> list[Any]:
    """The batch's fields on the device, filled up to `size` tokens."""
    return device.inbox.send(fields_of(batch, size, device.pool))


def error(got: Any, expected: Any) -> float:
    """Relative, by norm."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


def eager_hidden(device: Device, ready: Prepared) -> Any:
    """[tokens, hidden] without a recording."""
    fields = inputs(device, ready.batch, len(ready.batch.tokens))
    none = device.outbox.rows[0, :0]
    device.attention.begin(Rows(ready.spans, 0, none, none))
    return device.hidden(device.attention, *fields)[1]


def outside(device: Device, ready: Prepared) -> list[int]:
    """Pages of nobody in the batch: all but its rows' and the scratch page."""
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
    assert bucket_sizes(most) == sizes


def test_a_batch_is_filled_up_by_less_than_its_own_size_and_less_than_16():
    for most in (1, 7, 64, 100, 128, 130, 256, 300):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for rows in range(1, most + 1):
            filled = next(size for size in sizes if size >= rows)
            assert filled - rows < min(rows, 16), (most, rows)


def test_rows_that_fill_a_step_are_in_the_scratch_slot_and_known():
    cpu = torch.device("cpu")
    device = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())._device
    ready = prepared(device, [(20, 21), (5, 6), (0, 1)])
    slots, positions, tokens, sources = (
        field.tolist() for field in fields_of(ready.batch, 5, device.pool)
    )
    assert slots == [0, 1, 2, 8, 8]
    assert positions == [20, 5, 0, 0, 0]
    assert tokens[3:] == [0, 0]
    assert sources == [8] * 5


def test_a_chunk_knows_what_its_rows_of_one_token_read():
    cpu = torch.device("cpu")
    device = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())._device
    ready = prepared(device, [(20, 24), (5, 6), (0, 1)])
    slots, positions, *_, reads = (
        field.tolist() for field in chunk_fields_of(ready.batch, 8, device.pool)
    )
    assert (slots[:2], positions[:2], reads[:2]) == ([1, 2], [5, 0], [6, 1])
    assert slots[2:6] == [0] * 4 and reads[2:] == [0] * 6


def test_rows_that_fill_a_step_write_to_the_scratch_page_alone():
    cpu = torch.device("cpu")
    device = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())._device
    ready = prepared(device, [(20, 37), (5, 30)])
    before = device.pool.data.clone()
    size = len(ready.batch.tokens)
    filled = inputs(device, ready.batch, size + 6)
    none = device.outbox.rows[0, :0]
    spare = Span(device.pool.scratch_slot, 0, 6, size)
    device.attention.begin(Rows([*ready.spans, spare], 0, none, none))
    hidden = device.hidden(device.attention, *filled)[1][:size]
    others = outside(device, ready)
    assert torch.equal(device.pool.data[:, others], before[:, others])
    device.pool.data.copy_(before)
    assert error(hidden, eager_hidden(device, ready)) < 1e-6


class Unplanned(NamedTuple):
    """Places of no kernel, which match whatever there is room for."""

    tokens: int
    rows: int
    backend: str
    scratch_slot: int = 0

    def matches(self, spans: list[Span]) -> bool:
        assert len(spans) <= self.rows and sum(s.end - s.start for s in spans) <= self.tokens
        return True


class Replayed(NamedTuple):
    """A recording by its size; nothing is computed."""

    attention: RecordedAttention
    ids: int
    hidden: None = None

    @property
    def graph(self) -> Replayed:
        return self

    def replay(self) -> None: ...


class Unrecorded(ChunkGraphs):
    """The recordings that there would be on a GPU with so many slots."""

    def __init__(self, slots: int, sizes: tuple[int, ...] = CHUNK_SIZES) -> None:
        inbox = SimpleNamespace(buffer=torch.zeros(5 * max(sizes), dtype=torch.int32))
        device: Any = SimpleNamespace(pool=SimpleNamespace(num_slots=slots), inbox=inbox)
        super().__init__(device, self, sizes)

    def recorders(self, tokens: int, slots: Any, kv_lens: Any) -> tuple[RecordedAttention, ...]:
        return recordings(partial(Unplanned, tokens), Any, tokens, slots, kv_lens)

    def _record(self, size: int, attention: Any, fields: Any) -> Any:
        return Replayed(attention, size)

    def chosen(self, rows: list[tuple[int, int]]) -> tuple[type, int] | None:
        """The recording for rows [start, end), those of one token in front, and its tokens."""
        spans = [Span(slot, start, end, 0) for slot, (start, end) in enumerate(rows)]
        tokens = sum(end - start for start, end in rows)
        singles = sum(end - start == 1 for start, end in rows)
        size = self.size(len(rows), tokens) or tokens
        for chunk in self._chunks.get(size, ()):
            found = self.run(spans, singles, size)
            if found is None:
                return None
            if chunk.attention.matches(spans, singles):
                return type(chunk.attention), size
        return None


@pytest.mark.parametrize(
    ("rows", "kind", "size"),
    [
        ([(0, 13)], Alone, 16),
        ([(0, 3)] * 4, Alone, 16),
        ([(0, 4)], Alone, 16),
        ([(40, 50)], RecordedAttention, 16),
        ([(0, 128)], Alone, 128),
        ([(1, 129)], RecordedAttention, 128),
        ([(1, 130)], Alone, 256),
        ([(30, 31), (0, 13)], RecordedAttention, 16),
        ([(30, 31), (0, 63)], RecordedAttention, 64),
        ([(30, 31), (0, 64)], Apart, 128),
        ([(90, 91)] * 60 + [(9, 40)] * 4, Apart, 256),
        ([(90, 91)] * 59 + [(9, 40)] * 5, RecordedAttention, 256),
        ([(0, 20)] * 5, RecordedAttention, 128),
    ],
)
def test_a_step_takes_the_recording_that_is_for_it(
    rows: list[tuple[int, int]], kind: type, size: int
):
    assert Unrecorded(64).chosen(rows) == (kind, size)


def test_a_step_of_more_rows_than_a_recording_has_is_not_replayed():
    graphs = Unrecorded(256)
    longer = [(0, 97), (0, 96), (0, 96), (0, 96)]
    assert graphs.chosen([(9, 10)] * 124 + [(0, 97)] * 4) == (Apart, 512)
    assert graphs.size(131, 512) is None
    assert graphs.chosen([(9, 10)] * 127 + longer) is None  # 512 tokens, as many as a recording


def test_what_two_to_four_tokens_take_is_one_recording_of_any_rows():
    graphs = Unrecorded(8, (2, 4, 16))
    assert [len(graphs._chunks[size]) for size in (2, 4, 16)] == [1, 1, 2]


@pytest.mark.parametrize("slots", [1, 3, 24, 64, 256])
@pytest.mark.parametrize("sizes", [CHUNK_SIZES, tuple(s for s in VERIFIED_SIZES if s <= 512)])
def test_the_simulator_knows_which_recording_a_step_takes(slots: int, sizes: tuple[int, ...]):
    """Steps drawn at the borders of what recordings have, and a few larger ones."""
    graphs, forms = Unrecorded(slots, sizes), _forms(CHUNK_SIZES, slots)
    dice, seen = random.Random(7), Counter[type | None]()
    for _ in range(400):
        singles = min(dice.choice((0, 0, 1, 2, 60, 120, 124, 125, 128)), slots - 1)
        number = min(dice.choice((1, 2, 3, 4, 5, 9)), slots - singles)
        lengths = [dice.choice((2, 3, 15, 16, 64, 65, 97, 128, 129)) for _ in range(number)]
        rows = [(9, 10)] * singles
        rows += [(start, start + n) for n in lengths for start in [dice.choice((0, 0, 40))]]
        tokens = singles + sum(lengths)
        if tokens <= FEW_ROWS:
            continue
        spans = tuple((end - start, end) for start, end in rows)
        work = Work(len(rows), tokens, number, spans=spans)
        form = next((each for each in forms if each.holds(work)), None)
        kind = None
        if form is not None:
            kind = Apart if form.apart else RecordedAttention if form.cuts else Alone
        assert kind is (graphs.chosen(rows) or [None])[0], rows
        seen[kind] += 1
    rare = [kind for kind in (Alone, RecordedAttention, Apart, None) if seen[kind] < 5]
    assert rare == {1: [Apart, None], 3: [None]}.get(slots, []), seen


# On a GPU.


@pytest.fixture(scope="module", params=CONFIGS)
def recorded(request: pytest.FixtureRequest) -> HFModel:
    sizes = (16, 64, 256)
    return model_of(
        request.param, torch.device("cuda"), torch.bfloat16, decodes=(1, 2, 4, 8), chunks=sizes
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
def test_a_replayed_decode_step_gives_the_logits_of_the_step(recorded: HFModel, rows: int):
    device, graphs = recorded._device, recorded._decodes
    assert graphs is not None
    spans = [(start, start + 1) for start in (0, 1, 15, 16, 100, 70, 31, 33)[:rows]]
    ready = prepared(device, spans)
    before = device.pool.data.clone()
    logits = graphs.run(ready.batch)[1].clone()
    drawn, after = device.outbox.rows[:, :rows].clone(), device.pool.data.clone()
    device.pool.data.copy_(before)
    expected = device.decode(*inputs(device, ready.batch, rows))[1]
    others = outside(device, ready)
    assert torch.equal(after[:, others], before[:, others])
    assert not torch.equal(after[:, ready.pages], before[:, ready.pages])
    assert error(after[:, ready.pages], device.pool.data[:, ready.pages]) < BOUND
    assert error(logits, expected) < BOUND
    best = logits.gather(1, drawn[0][:, None].long())[:, 0]
    assert torch.equal(best, logits.amax(-1)) and not drawn[1].any()
    if rows in (1, 2, 4, 8):
        assert torch.equal(logits, expected)
        assert torch.equal(device.outbox.rows[:, :rows], drawn)


CHUNKS = {
    "a prompt": [(0, 13)],
    "a prompt that fills its recording": [(0, 64)],
    "a chunk": [(40, 100)],
    "two chunks": [(7, 90), (16, 130)],
    "decodes beside a chunk": [(3, 4), (64, 65), (15, 16), (100, 101), (0, 55)],
    "a chunk between decodes": [(30, 31), (20, 64), (300, 301)],
    "a long decode beside two prompts": [(0, 5), (480, 481), (0, 30)],
    "as many decodes as there is room for": [(9, 10), (0, 1), (90, 91), *[(0, 3)] * 5],
    "a long chunk beside decodes": [(30, 31), (300, 301), (16, 200)],
    "more decodes than before, beside four chunks": [(90, 91)] * 4 + [(0, 30)] * 4,
    "fewer, and the recording is full": [(30, 31), (0, 255)],
    "five prompts": [(0, 9), (0, 3), (0, 17), (0, 2), (0, 20)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHUNKS)
def test_a_replayed_chunk_gives_the_hidden_states_of_the_step(recorded: HFModel, name: str):
    device, graphs = recorded._device, recorded._chunks
    assert graphs is not None
    ready = prepared(device, CHUNKS[name])
    tokens = len(ready.batch.tokens)
    size = graphs.size(len(ready.spans), tokens)
    assert size is not None and size >= tokens
    before = device.pool.data.clone()
    device.inbox.send(chunk_fields_of(ready.batch, size, device.pool))
    found = graphs.run(ready.spans, ready.batch.num_decode, size)
    assert found is not None, "the plan has another layout than the recorded one"
    hidden, after = found[1][:tokens].clone(), device.pool.data.clone()
    device.pool.data.copy_(before)
    expected = eager_hidden(device, ready)
    others = outside(device, ready)
    assert torch.equal(after[:, others], before[:, others])
    assert error(after[:, ready.pages], device.pool.data[:, ready.pages]) < BOUND
    assert error(hidden, expected) < BOUND


@pytest.mark.gpu
def test_a_chunk_larger_than_every_recording_has_none(recorded: HFModel):
    graphs = recorded._chunks
    assert graphs is not None
    assert [graphs.size(1, tokens) for tokens in (1, 16, 17, 256, 257)] == [16, 16, 64, 256, None]


def outputs(model: HFModel) -> list[list[int]]:
    """Greedy tokens of four requests of one length, admitted together."""
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
    """What the comparisons on a GPU stand on."""
    cpu = torch.device("cpu")
    model = model_of("qwen3, heads of 64", cpu, torch.float32, decodes=(), chunks=())
    assert outputs(model) == outputs(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_recorded_decode_steps_are_those_without_recordings(name: str):
    """Four rows all the time: a size that is recorded, so every kernel does the same."""
    cuda = torch.device("cuda")
    eager = model_of(name, cuda, torch.bfloat16, decodes=(), chunks=())
    graphs = model_of(name, cuda, torch.bfloat16, decodes=bucket_sizes(8), chunks=())
    assert outputs(graphs) == outputs(eager)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3, heads of 128", "gemma2, windows and soft caps"])
def test_a_plan_with_another_layout_than_the_recorded_one_runs_without_it(name: str):
    """Every recording is made to remember a layout that no plan has."""
    cuda = torch.device("cuda")
    eager = model_of(name, cuda, torch.bfloat16, decodes=(1, 2, 4, 8), chunks=())
    model = model_of(name, cuda, torch.bfloat16, decodes=(1, 2, 4, 8), chunks=CHUNK_SIZES[:5])
    assert model._chunks is not None
    for chunks in model._chunks._chunks.values():
        for chunk in chunks:
            places = chunk.attention._places
            places._infos = dict.fromkeys(places._infos, ("of no plan",))
            assert not places.matches(())
    assert outputs(model) == outputs(eager)
