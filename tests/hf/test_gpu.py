"""The whole engine on a GPU in bf16: as near to fp32 as transformers is, however it is batched.

Tokens of two variants may differ where two logits are equal within bf16's rounding: then both must
be within MAX_LOGPROB_GAP of the best logit in fp32. `pytest -s` prints how often that happens.

The model has the layer shape of Qwen3-0.6B, six layers of it, and random weights.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.config import EngineConfig, Speculation  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.models.capture_sizes import (  # noqa: E402
    MIXED_CAPTURE_SIZES,
    VERIFY_CAPTURE_SIZES,
    decode_capture_sizes,
)
from forge.models.hf.attention.interface import AttentionMetadata, RowSpan  # noqa: E402
from forge.models.hf.buffers import MAX_IN_FLIGHT  # noqa: E402
from forge.models.hf.decoders.interface import ForwardContext  # noqa: E402
from forge.models.hf.decoders.module_decoder import ATTENTION_NAME, register_attention  # noqa: E402
from forge.models.hf.kv_cache import KVCache  # noqa: E402
from forge.models.hf.loading.decoder_loader import compile_kernels, select_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import (  # noqa: E402
    select_attention,
    select_kv_cache_spec,
    select_ops,
)
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.request import Delta, FinishReason, Request, SamplingParams  # noqa: E402
from forge.sampling import sample_token  # noqa: E402
from forge.seam import Bind, PendingStep, Row, StepPlan  # noqa: E402
from tests.core.worlds import RecordingModel  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000)
MAX_LEN = 2048
BLOCK = 64
BOUND_KL = 5e-3
"""Nats between fp32 and bf16, mean over positions."""
MAX_LOGPROB_GAP = 0.2
"""Difference of logits that bf16 may order either way; logits have a deviation of about 1.5."""
BAD_TOKEN = 9
"""The token with an embedding of NaN, where a test plants one."""


class GPUModelShape(NamedTuple):
    """Device, dtype and size of a model."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    vocab: int = 32000
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 3072
    layers: int = 6


SHAPE = GPUModelShape()
EOS = 2


def seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def module_of(shape: GPUModelShape, dtype: str, attention: str) -> Any:
    """Return equal random weights for every dtype and attention, rounded to the shape's dtype."""
    register_attention()
    config = hf.Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    config._attn_implementation = attention
    module = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = seeded(0)
    with torch.no_grad():
        for tensor in module.parameters():
            noise = torch.randn(tensor.shape, generator=draw)
            spread = 1.5 / math.sqrt(tensor.shape[-1])
            tensor.copy_(noise * spread if tensor.dim() > 1 else 1 + 0.1 * noise)
    rounded = module.to(getattr(torch, shape.dtype))
    return rounded.to(shape.device, getattr(torch, dtype)).eval()


@cache
def reference(shape: GPUModelShape) -> Any:
    """transformers in fp32."""
    return module_of(shape, "float32", "eager")


@cache
def decoder_for(shape: GPUModelShape) -> Any:
    device, dtype = torch.device(shape.device), getattr(torch, shape.dtype)
    with torch.inference_mode():
        return select_decoder(
            module_of(shape, shape.dtype, ATTENTION_NAME),
            select_ops(device, dtype),
            MAX_LEN,
            partial(compile_kernels, block_size=BLOCK, vocab_size=shape.vocab),
        )


class EngineVariant(NamedTuple):
    """One way to batch the same requests."""

    rows: int = 32
    budget: int = 4096
    blocks: int = 400
    depth: int = 2
    graphs: bool = True
    caching: bool = False
    drafts: int = 0


def engine_for(shape: GPUModelShape, variant: EngineVariant, decoder: Any = None) -> Engine:
    """Return a new engine over shared weights; a draft model is the model itself."""
    device, dtype = torch.device(shape.device), getattr(torch, shape.dtype)
    decoder, layers = decoder or decoder_for(shape)
    config = EngineConfig(
        num_blocks=variant.blocks,
        block_size=BLOCK,
        max_num_seqs=variant.rows,
        max_num_batched_tokens=variant.budget,
        max_model_len=MAX_LEN,
        depth=variant.depth,
        enable_prefix_caching=variant.caching,
        speculation=Speculation(num_tokens=variant.drafts) if variant.drafts else None,
    )

    def model_of(chunks: Sequence[int], draft: HFModel | None) -> HFModel:
        return assemble_model(
            decoder,
            layers,
            select_kv_cache_spec(layers, dtype, device),
            config,
            vocab_size=shape.vocab,
            eos_token=EOS,
            device=device,
            decode_sizes=decode_capture_sizes(variant.rows) if variant.graphs else (),
            mixed_sizes=chunks if variant.graphs else (),
            max_in_flight=MAX_IN_FLIGHT * max(1, variant.drafts),
            draft=draft,
        )

    with torch.inference_mode():
        draft = model_of(MIXED_CAPTURE_SIZES, None) if variant.drafts else None
        model = model_of(VERIFY_CAPTURE_SIZES if variant.drafts else MIXED_CAPTURE_SIZES, draft)
    return Engine(model, config)


def prompt_of(shape: GPUModelShape, length: int, seed: int = 0) -> tuple[int, ...]:
    """Return random ids, none of them special or BAD_TOKEN."""
    drawn = torch.randint(
        BAD_TOKEN + 1, shape.vocab, (length,), generator=seeded(1000 * seed + length)
    )
    return tuple(drawn.tolist())


def greedy(id: int, prompt: tuple[int, ...], count: int) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, logit_bias=((BAD_TOKEN, -100.0),)
    )
    return Request(id, prompt, params)


def request_of(id: int, prompt: tuple[int, ...], count: int, **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
    return Request(id, prompt, SamplingParams(**params))


class RunOutput(NamedTuple):
    """All outputs of one run, and its plans."""

    tokens: dict[int, list[int]]
    errors: dict[int, str]
    plans: list[StepPlan]


def run(engine: Engine, requests: list[Request]) -> RunOutput:
    """Serve the requests to their end; every block is free afterwards."""
    model = engine.model
    recording = engine.model = RecordingModel(model)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    errors = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.tokens
            if delta.error:
                errors[delta.request_id] = delta.error
    engine.model = model
    assert engine.scheduler.pool.num_free_blocks == engine.config.num_blocks
    return RunOutput(tokens, errors, [e for e in recording.log if isinstance(e, StepPlan)])


# Logits.


def paged_logits(shape: GPUModelShape, prompt: Any, computed: int) -> Any:
    """Return logits of positions [computed, end), the earlier ones computed by a step before."""
    device, dtype = torch.device(shape.device), getattr(torch, shape.dtype)
    decoder, layers = decoder_for(shape)
    pool = KVCache(
        select_kv_cache_spec(layers, dtype, device),
        num_blocks=MAX_LEN // BLOCK,
        block_size=BLOCK,
        num_slots=2,
        max_model_len=MAX_LEN,
        device=device,
    )
    pool.block_tables[1] = torch.randperm(pool.max_num_blocks, generator=seeded(3)).int()
    attention, _ = select_attention(pool, layers)
    logits = None
    for start, end in ((0, computed), (computed, len(prompt))):
        if start == end:
            continue
        positions = torch.arange(start, end, dtype=torch.int32, device=device)
        slots = torch.ones_like(positions)
        decodes = int(end - start == 1)
        rows = AttentionMetadata(
            [RowSpan(1, start, end, 0)], decodes, slots[:decodes], positions[:decodes] + 1
        )
        attention.plan(rows)
        step = ForwardContext(pool, attention, pool.slot_mapping(slots, positions))
        ids = prompt[start:end].to(device, torch.int32)
        logits = decoder.compute_logits(decoder.forward(ids, positions, step))
    return logits


def divergence(reference: Any, logits: Any) -> float:
    """Return KL(reference || logits), the mean over positions, in nats."""
    p, q = (each.float().log_softmax(-1) for each in (reference, logits))
    return float((p.exp() * (p - q)).sum(-1).mean())


def check_logits(shape: GPUModelShape, length: int, bound: float) -> None:
    """Compare with fp32: a prompt in one step, in two chunks, and its last token as a decode step.

    The error may be as large as that of transformers in the same dtype.
    """
    prompt = torch.tensor(prompt_of(shape, length))
    with torch.inference_mode():
        ids = prompt[None].to(shape.device)
        wide = reference(shape)(ids, use_cache=False).logits[0]
        theirs = divergence(wide, same_dtype(shape)(ids, use_cache=False).logits[0])
        assert wide.std() > 0.5, "logits all alike would be equal whatever the context"
        for computed in sorted({0, length // 2, length - 1}):
            mine = divergence(wide[computed:], paged_logits(shape, prompt, computed))
            print(f"{length} tokens, {computed} before: KL {mine:.2e}, transformers {theirs:.2e}")
            assert mine < bound
            assert computed or mine <= 2 * theirs + 1e-4


@cache
def same_dtype(shape: GPUModelShape) -> Any:
    """transformers in the dtype that is served."""
    return module_of(shape, shape.dtype, "eager")


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_as_near_to_fp32_as_those_of_transformers(length: int):
    check_logits(SHAPE, length, BOUND_KL)


# Ways to run.


def reference_logits(shape: GPUModelShape, tokens: tuple[int, ...]) -> Any:
    """Return fp32 logits after each token."""
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=shape.device)
        return reference(shape)(ids, use_cache=False).logits[0, -1]


def compare(
    shape: GPUModelShape, requests: list[Request], one: RunOutput, other: RunOutput, level: float
) -> int:
    """Return how many requests differ. Where they part, both tokens are among fp32's best."""
    assert not one.errors and not other.errors
    parted = 0
    for request in requests:
        a, b = one.tokens[request.id], other.tokens[request.id]
        assert len(a) == len(b) == request.params.max_tokens
        if a == b:
            continue
        parted += 1
        at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        logits = reference_logits(shape, (*request.prompt, *a[:at]))
        for token in (a[at], b[at]):
            behind = float(logits.max() - logits[token])
            assert behind < level, f"request {request.id}, token {at}: {behind} below the best"
    print(f"{parted} of {len(requests)} outputs part where two tokens are level")
    return parted


def mixed_prompts(shape: GPUModelShape, count: int) -> list[Request]:
    """Return 32 prompts of 1 to 280 tokens."""
    return [request_of(i, prompt_of(shape, 1 + i * 9, seed=i), count) for i in range(32)]


class VariantPair(NamedTuple):
    """Two variants, and a condition on the second one's plans."""

    first: EngineVariant
    second: EngineVariant
    reached: Callable[[list[StepPlan]], bool]


def accepts_half(plans: list[StepPlan]) -> bool:
    """Return whether half of the rows with drafts emitted more than one token."""
    before: dict[int, Row] = {}
    steps = []
    for row in (row for plan in plans for row in plan.rows):
        if row.seq_id in before and before[row.seq_id].drafts:
            steps.append(row.start - before[row.seq_id].start)
        before[row.seq_id] = row
    return sum(step > 1 for step in steps) >= len(steps) / 2 > 0


def has_later_chunk(plans: list[StepPlan]) -> bool:
    return any(row.num_samples == 0 for plan in plans for row in plan.rows)


VARIANT_PAIRS = {
    "graphs and eager": VariantPair(
        EngineVariant(), EngineVariant(graphs=False), lambda plans: True
    ),
    "batch 32 and batch 1": VariantPair(
        EngineVariant(),
        EngineVariant(rows=1),
        lambda plans: all(len(plan.rows) <= 1 for plan in plans),
    ),
    "whole and chunked": VariantPair(EngineVariant(), EngineVariant(budget=48), has_later_chunk),
    "kept and preempted": VariantPair(
        EngineVariant(),
        EngineVariant(blocks=40),
        lambda plans: any(plan.preempted for plan in plans),
    ),
    "depth 2 and depth 1": VariantPair(EngineVariant(), EngineVariant(depth=1), lambda plans: True),
    **{
        f"plain and {rows} rows of {drafts} drafts": VariantPair(
            EngineVariant(), EngineVariant(rows=rows, drafts=drafts), accepts_half
        )
        for rows, drafts in ((1, 1), (1, 3), (4, 4), (32, 2), (32, 8))
    },
    "plain and drafts without graphs": VariantPair(
        EngineVariant(), EngineVariant(graphs=False, drafts=4), accepts_half
    ),
    "plain and drafts of few blocks": VariantPair(
        EngineVariant(), EngineVariant(blocks=40, drafts=4), accepts_half
    ),
}


def check_pair(shape: GPUModelShape, pair: VariantPair, count: int, level: float) -> None:
    requests = mixed_prompts(shape, count)
    one, other = (
        run(engine_for(shape, variant), requests) for variant in (pair.first, pair.second)
    )
    assert pair.reached(other.plans) and len(one.plans) > count
    assert compare(shape, requests, one, other, level) < len(requests)


@pytest.mark.parametrize("name", VARIANT_PAIRS)
def test_two_ways_to_run_part_only_where_two_tokens_are_level(name: str):
    check_pair(SHAPE, VARIANT_PAIRS[name], 48, MAX_LOGPROB_GAP)


def check_prefix_hit(shape: GPUModelShape, level: float) -> None:
    """The second run hits the first blocks of each prompt."""
    requests = mixed_prompts(shape, 32)
    again = [replace(request, id=100 + request.id) for request in requests]
    engine = engine_for(shape, EngineVariant(caching=True))
    cold, warm = run(engine, requests), run(engine, again)
    starts = {row.seq_id: row.start for plan in reversed(warm.plans) for row in plan.rows}
    assert sum(start >= BLOCK for start in starts.values()) > len(requests) // 2
    moved = RunOutput({i - 100: found for i, found in warm.tokens.items()}, warm.errors, warm.plans)
    compare(shape, requests, cold, moved, level)


def test_a_prefix_hit_parts_from_a_cold_start_only_where_two_tokens_are_level():
    check_prefix_hit(SHAPE, MAX_LOGPROB_GAP)


# Faults.


def check_poison(shape: GPUModelShape) -> None:
    """The cache is so small that the good requests reuse the blocks that NaN was written to."""
    module = module_of(shape, shape.dtype, ATTENTION_NAME)
    module.model.embed_tokens.weight.data[BAD_TOKEN] = float("nan")
    with torch.inference_mode():
        device, dtype = torch.device(shape.device), getattr(torch, shape.dtype)
        decoder = select_decoder(module, select_ops(device, dtype), MAX_LEN)
    way = EngineVariant(rows=4, blocks=8, budget=512)
    good = [greedy(i, prompt_of(shape, length), 20) for i, length in enumerate((200, 70, 90, 3))]
    clean = run(engine_for(shape, way, decoder), good)
    assert not clean.errors
    engine = engine_for(shape, way, decoder)
    pool = engine.model._runner.kv_cache  # type: ignore[attr-defined]
    bad = greedy(10, (BAD_TOKEN, *prompt_of(shape, 220)), 20)
    beside = greedy(11, prompt_of(shape, 100), 20)
    outcome = run(engine, [bad, beside])
    assert outcome.errors == {10: "the model's logits are not finite: NaN"}
    assert len(outcome.tokens[11]) == 20
    pages = [page for page in range(8) if bool(pool.data[:, page].isnan().any())]
    assert len(pages) >= 4, "NaN was not written"
    whole = greedy(12, prompt_of(shape, 8 * BLOCK - 20), 20)
    assert not run(engine, [whole]).errors, "it has every page"
    engine = engine_for(shape, way, decoder)
    run(engine, [bad, beside])
    after = run(engine, good)
    assert (after.errors, after.tokens) == ({}, clean.tokens)


def test_a_row_that_is_not_finite_fails_alone_and_its_blocks_damage_no_other():
    check_poison(SHAPE)


# Draws.


def check_draws(shape: GPUModelShape) -> None:
    """Eight rows of one step with temperatures, sampled as forge.sampling does."""
    engine = engine_for(shape, EngineVariant(rows=8, depth=1))
    model: Any = engine.model
    device = model._runner
    params = [SamplingParams(temperature=t) for t in (0.0, 0.3, 0.7, 0.9, 1.0, 1.3, 1.7, 2.0)]
    rows = [
        Row(
            i, 0, i, 0, (50 + i,), new_blocks=(i,), num_samples=1,
            bind=Bind(each, 2**63 + 12345 * i, 1),
        )
        for i, each in enumerate(params)
    ]  # fmt: skip
    drawn, expected = [], []
    for step in range(6):
        output = model.forward(StepPlan(step, tuple(rows), engine.config.num_blocks, BLOCK))
        drawn.append([row.tokens[0] for row in output.result().rows])
        with torch.inference_mode():
            slots = torch.arange(8, dtype=torch.int32, device=shape.device)
            positions = torch.full_like(slots, step)
            known = torch.full_like(slots, 8)
            ids = torch.tensor([row.tokens[0] for row in rows], device=shape.device).int()
            spans = [RowSpan(i, step, step + 1, i) for i in range(8)]
            device.attention.plan(AttentionMetadata(spans, 8, slots, positions + 1))
            hidden = device.run_forward(device.attention, slots, positions, ids, known)[1]
            logits = device.decoder.compute_logits(hidden).float().tolist()
        expected.append(
            [
                sample_token(line, each, 2**63 + 12345 * i, step + 1)
                for i, (line, each) in enumerate(zip(logits, params, strict=True))
            ]
        )
        rows = [
            row._replace(start=step + 1, tokens=(token,), new_blocks=(), keep=1, bind=None)
            for row, token in zip(rows, drawn[-1], strict=True)
        ]
    assert drawn == expected
    assert len(Counter(token for line in drawn for token in line)) > 24


def test_draws_with_temperature_are_those_of_forge_sampling_on_the_same_logits():
    check_draws(SHAPE)


# Long runs.


def short_requests(shape: GPUModelShape, count: int, rng: Random) -> Iterator[Request]:
    for id in range(count):
        prompt = tuple(rng.randrange(BAD_TOKEN + 1, shape.vocab) for _ in range(rng.randint(1, 40)))
        params = {"temperature": rng.choice((0.0, 1.0)), "seed": id}
        yield request_of(id, prompt, rng.randint(1, 8), **params)


def churn(shape: GPUModelShape, count: int, variant: EngineVariant) -> list[int]:
    """Yield bytes allocated on the device, each time another tenth of the requests has ended."""
    rng, engine = Random(5), engine_for(shape, variant)
    waiting = short_requests(shape, count, rng)
    live: set[int] = set()
    ended: Counter[FinishReason | None] = Counter()
    aborted, bytes_at, sent = 0, [], 0
    while sum(ended.values()) < count:
        while len(live) < 2 * variant.rows and sent < count:
            request = next(waiting)
            engine.submit(request)
            live.add(request.id)
            sent += 1
        if live and rng.random() < 0.2:
            engine.abort(rng.choice(sorted(live)))
            aborted += 1
        for delta in engine.step():
            finished(delta, live, ended)
        if sum(ended.values()) * 10 // count > len(bytes_at):
            gc.collect()
            bytes_at.append(allocated_bytes(shape))
    assert (not live and not engine.has_work) or engine.step() == []
    assert (
        engine.scheduler.pool.num_free_blocks == variant.blocks
        and engine.scheduler.pool.num_used_blocks == 0
    )
    assert ended[FinishReason.ABORT] > aborted // 4 and not ended[FinishReason.ERROR], ended
    return bytes_at


def finished(delta: Delta, live: set[int], ended: Counter[FinishReason | None]) -> None:
    assert delta.request_id in live, f"{delta} after its end"
    if delta.finish is not None:
        live.remove(delta.request_id)
        ended[delta.finish] += 1


def allocated_bytes(shape: GPUModelShape) -> int:
    return torch.cuda.memory_allocated() if shape.device == "cuda" else 0


def test_memory_is_flat_over_ten_thousand_requests_of_which_some_are_aborted():
    """Between the first thousand and the last: what is on the way differs by some small tensors."""
    bytes_at = churn(SHAPE, 10_000, EngineVariant(rows=64, budget=512, blocks=128, caching=True))
    assert len(bytes_at) == 10
    assert abs(bytes_at[-1] - bytes_at[0]) < 2**21, bytes_at


class SyncGuardedModel:
    """A model whose steady steps may not wait for the device: torch raises where one does."""

    def __init__(self, model: Any, mode: str) -> None:
        self._model = model
        self._mode = mode
        self.guarded = 0

    def vocab_size(self) -> int:
        """Return the inner model's."""
        return self._model.vocab_size()

    def num_layers(self) -> int:
        """Return the inner model's."""
        return self._model.num_layers()

    def eos_token(self) -> int:
        """Return the inner model's."""
        return self._model.eos_token()

    def forward(self, plan: StepPlan) -> PendingStep:
        """Run the plan, guarded where the device has every input already."""
        if not all(row.refs for row in plan.rows):
            return self._model.forward(plan)
        self.guarded += 1
        torch.cuda.set_sync_debug_mode(self._mode)
        try:
            return self._model.forward(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def check_no_wait(shape: GPUModelShape, mode: str, **params: Any) -> None:
    engine = engine_for(shape, EngineVariant(rows=8))
    guarded = SyncGuardedModel(engine.model, mode)
    engine.model = guarded  # type: ignore[assignment]
    for i in range(8):
        engine.submit(request_of(i, prompt_of(shape, 50 + i), 100, **params))
    errors = []
    while engine.has_work:
        errors += [delta.error for delta in engine.step() if delta.error]
    assert not errors
    assert guarded.guarded > 80


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}],
    ids=["greedy", "temperature", "top_p"],
)
def test_a_steady_step_never_waits_for_the_device(params: dict[str, Any]):
    """100 tokens after 50 cross blocks too, so table updates are among the steps."""
    check_no_wait(SHAPE, "error", **params)


# Compiling.


def compiled_kernels() -> dict[str, int]:
    """Return how many variants of each Triton kernel are compiled."""
    from forge.models.hf.attention import triton_decode, triton_prefill
    from forge.models.hf.ops import small_gemm, triton_ops

    found = {}
    for module in (triton_decode, triton_prefill, triton_ops, small_gemm):
        for name, kernel in vars(module).items():
            if hasattr(kernel, "device_caches"):
                found[name] = sum(len(caches[0]) for caches in kernel.device_caches.values())
    assert sum(found.values()) > 10
    return found


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "eager"])
def test_nothing_is_compiled_for_whatever_a_step_looks_like(graphs: bool):
    """Prompts of every length modulo the vectors that kernels load, with chunks and without."""
    engine = engine_for(SHAPE, EngineVariant(rows=40, budget=301, blocks=400, graphs=graphs))
    run(engine, [request_of(1, prompt_of(SHAPE, 5), 3), request_of(2, prompt_of(SHAPE, 5), 3)])
    run(engine, [request_of(3, prompt_of(SHAPE, 700), 3, temperature=1.0, seed=1)])
    before = compiled_kernels()
    requests = [request_of(i, prompt_of(SHAPE, 1 + 17 * i), 1 + i, seed=i) for i in range(45)]
    assert not run(engine, requests).errors
    assert compiled_kernels() == before
