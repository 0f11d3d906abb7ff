"""HFModel under the engine: tokens are those of transformers' generate(), however they are batched.

The longest prompt's tokens are compared with those of generate(), and each prompt's with the most
likely ones by one forward of the module. In float64 no token may differ. Each way to batch asserts
that it came to what it is about: preemption, hits of the prefix cache, chunks.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.config import EngineConfig  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.decoders.module_decoder import ATTENTION_NAME, register_attention  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.request import Delta, Request, SamplingParams  # noqa: E402
from forge.sampling import output_logprob, process_logits, sample_token, token_logprob  # noqa: E402
from forge.seam import Bind, BlockCopy, Row, StepPlan  # noqa: E402
from tests.core.worlds import RecordingModel  # noqa: E402
from tests.hf.families import (  # noqa: E402
    FAMILIES,
    create_module,
    generate_greedy,
    is_greedy,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
CPU = torch.device("cpu")
VOCAB, EOS = 307, 2
NEW = 40


class BatchingVariant(NamedTuple):
    """One way to batch the same requests."""

    depth: int
    blocks: int
    rows: int
    budget: int
    preempts: bool = False


BATCHING_VARIANTS = {
    "one at a time": BatchingVariant(1, 64, 1, 64),
    "together": BatchingVariant(1, 128, 5, 256),
    "small chunks, planned ahead": BatchingVariant(2, 128, 4, 7),
    "preempted": BatchingVariant(1, 14, 4, 64, preempts=True),
    "preempted, planned ahead, small chunks": BatchingVariant(2, 18, 5, 9, preempts=True),
}
QUICK_VARIANTS = ("together", "preempted, planned ahead, small chunks")
"""The others have a part of what these two have together."""
SINGLE_PRECISION = ("qwen3", "gpt2", "gemma2")
"""Normalised heads, biased layer norms, and windows with caps; float64 compares every family."""


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


@cache
def decoder_for(family: str, dtype: Any) -> Any:
    register_attention()
    return select_decoder(create_module(family, dtype, ATTENTION_NAME), TorchOps(), 1024)


def engine_for(
    family: str, variant: BatchingVariant, dtype: Any = torch.float64, **options: Any
) -> Engine:
    return engine_of(decoder_for(family, dtype), variant, dtype, **options)


def engine_of(
    decoder_and_layers: Any, variant: BatchingVariant, dtype: Any, **options: Any
) -> Engine:
    """Return an engine on a decoder, batching in that way."""
    decoder, layers = decoder_and_layers
    config = EngineConfig(
        num_blocks=variant.blocks,
        block_size=16,
        max_num_seqs=variant.rows,
        max_num_batched_tokens=variant.budget,
        max_model_len=1024,
        depth=variant.depth,
        **options,
    )
    model = assemble_model(
        decoder,
        layers,
        select_kv_cache_spec(layers, dtype, CPU),
        config,
        vocab_size=VOCAB,
        eos_token=EOS,
        device=CPU,
    )
    return Engine(model, config)


class EngineOutput(NamedTuple):
    """All outputs of one run, and its plans."""

    deltas: list[Delta]
    plans: list[StepPlan]

    def tokens(self, request: int, choice: int = 0) -> list[int]:
        """Output of one choice."""
        mine = [d for d in self.deltas if (d.request_id, d.choice) == (request, choice)]
        return [token for delta in mine for token in delta.tokens]

    @property
    def num_preempted(self) -> int:
        """Preemptions of sequences, each counted."""
        return sum(len(plan.preempted) for plan in self.plans)


def run(engine: Engine, *requests: Request) -> EngineOutput:
    """Serve the requests to their end."""
    plain = engine.model
    recording = engine.model = RecordingModel(plain)
    for request in requests:
        engine.submit(request)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    engine.model = plain
    assert engine.scheduler.pool.num_free_blocks == engine.config.num_blocks
    return EngineOutput(deltas, [entry for entry in recording.log if isinstance(entry, StepPlan)])


def greedy(id: int, prompt: list[int], count: int = NEW, **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
    return Request(id, tuple(prompt), SamplingParams(**params))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length) for length in (1, 5, 16, 33, 100)]


@cache
def module_for(family: str) -> Any:
    return create_module(family, torch.float64)


@cache
def longest_reference(family: str) -> list[int]:
    """Return the output of generate() for the longest prompt."""
    return generate_greedy(module_for(family), PROMPTS[4], NEW)


def variant_marks(family: str, name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of one way to batch one family."""
    if name in QUICK_VARIANTS:
        return []
    return [pytest.mark.long if family in ("llama", "gemma2") else pytest.mark.soak]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=variant_marks(family, name), id=f"{family}-{name}")
        for family in FAMILIES
        for name, way in BATCHING_VARIANTS.items()
    ],
)
def test_greedy_tokens_are_those_of_generate_however_they_are_batched(
    family: str, way: BatchingVariant
) -> None:
    outcome = run(engine_for(family, way), *(greedy(i, prompt) for i, prompt in enumerate(PROMPTS)))
    assert outcome.tokens(4) == longest_reference(family)
    for i, prompt in enumerate(PROMPTS):
        assert len(outcome.tokens(i)) == NEW
        assert is_greedy(module_for(family), prompt, outcome.tokens(i))
    assert (outcome.num_preempted > 0) == way.preempts
    if way.budget < 16:
        assert any(row.num_samples == 0 for plan in outcome.plans for row in plan.rows)
    if way.depth == 2:
        assert any(row.refs for plan in outcome.plans for row in plan.rows)


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_hit_changes_no_token(family: str, depth: int) -> None:
    engine = engine_for(family, BatchingVariant(depth, 128, 4, 64))
    prompt = PROMPTS[4]
    run(engine, greedy(0, prompt, 8))
    outcome = run(engine, greedy(1, prompt), greedy(2, prompt[:70], 8))
    first = {row.seq_id: row.start for plan in reversed(outcome.plans) for row in plan.rows}
    assert sorted(first.values()) == [64, 96]  # Blocks that the first request left.
    assert outcome.tokens(1) == longest_reference(family)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.soak] * (family not in SINGLE_PRECISION))
        for family in FAMILIES
    ],
)
def test_single_precision_differs_only_where_two_tokens_are_level(family: str) -> None:
    module = create_module(family, torch.float32)
    outcome = run(
        engine_for(family, BatchingVariant(1, 128, 5, 256), torch.float32),
        *(greedy(i, prompt) for i, prompt in enumerate(PROMPTS)),
    )
    for i, prompt in enumerate(PROMPTS):
        tokens = outcome.tokens(i)
        with torch.inference_mode():
            logits = module(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        top = logits.topk(2)
        for token, (best, next_best), values in zip(
            tokens, top.indices.tolist(), top.values.tolist(), strict=True
        ):
            assert token == best or (token == next_best and values[0] - values[1] < 1e-4)


def sample_reference(module: Any, prompt: list[int], params: SamplingParams, seed: int) -> Any:
    """Return tokens and log probabilities by forge.sampling, from transformers' own logits."""
    tokens, scores = list(prompt), []
    while len(tokens) < len(prompt) + (params.max_tokens or 0):
        with torch.inference_mode():
            logits = module(torch.tensor([tokens]), use_cache=False).logits[0, -1].tolist()
        output = tokens[len(prompt) :]
        token = sample_token(
            process_logits(logits, params, prompt, output, (EOS,)), params, seed, len(tokens)
        )
        scores.append(output_logprob(logits, token, params))
        tokens.append(token)
    return tokens[len(prompt) :], scores


PARAMS = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.7, "repetition_penalty": 1.3},
    "bias and minimum": {"temperature": 1.0, "logit_bias": {7: 3.0}, "min_tokens": 20},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(50, 90))},
    "listed": {"temperature": 1.0, "logprob_token_ids": [9, 3, 70]},
    "many": {"temperature": 1.0, "logprobs": 30},
    "all": {"temperature": 0.0, "logprobs": -1},
    "a shorter list": {"temperature": 0.0, "logprob_token_ids": [8], "repetition_penalty": 1.3},
}
SAMPLED_PARAMS = [
    SamplingParams(**{"max_tokens": 32, "seed": i, "logprobs": 2, "ignore_eos": True, **each})
    for i, each in enumerate(PARAMS.values())
]


@cache
def sample_references() -> list[Any]:
    return [
        sample_reference(module_for("qwen3"), PROMPTS[2], each, seed)
        for seed, each in enumerate(SAMPLED_PARAMS)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_every_way_to_sample_is_the_normative_arithmetic_on_the_models_logits(depth: int) -> None:
    """One batch in which every row has different parameters."""
    engine = engine_for("qwen3", BatchingVariant(depth, 128, 9, 32), max_logprobs=-1)
    requests = [Request(i, tuple(PROMPTS[2]), each) for i, each in enumerate(SAMPLED_PARAMS)]
    outcome = run(engine, *requests)
    for i, (tokens, scores) in enumerate(sample_references()):
        assert outcome.tokens(i) == tokens
        logprobs = [score for d in outcome.deltas if d.request_id == i for score in d.logprobs]
        assert [s.token for s in logprobs] == tokens
        assert [s.logprob for s in logprobs] == pytest.approx([s.logprob for s in scores], abs=1e-5)
        assert [[t for t, _ in s.top] for s in logprobs] == [[t for t, _ in s.top] for s in scores]


def test_prompt_logprobs_are_those_of_the_models_logits_in_any_chunks() -> None:
    module = create_module("llama", torch.float64)
    prompt = PROMPTS[4]
    with torch.inference_mode():
        logits = module(torch.tensor([prompt]), use_cache=False).logits[0].tolist()
    for budget, count in ((7, 3), (256, 3), (256, -1)):
        engine = engine_for("llama", BatchingVariant(1, 64, 2, budget), max_logprobs=-1)
        outcome = run(engine, greedy(0, prompt, 2, prompt_logprobs=count), greedy(1, prompt, 2))
        logprobs = [s for d in outcome.deltas if d.request_id == 0 for s in d.prompt_logprobs]
        assert [s.token for s in logprobs] == prompt[1:]
        for at, score in enumerate(logprobs):
            mine = token_logprob(logits[at], prompt[at + 1], len(score.top))
            assert score.logprob == pytest.approx(mine.logprob, abs=1e-5)
            assert [t for t, _ in score.top] == [t for t, _ in mine.top]
            assert len(score.top) == (3 if count == 3 else len(logits[at]))
        assert not [s for d in outcome.deltas if d.request_id == 1 for s in d.prompt_logprobs]


def test_choices_of_one_request_draw_as_if_they_were_requests() -> None:
    engine = engine_for("qwen3", BatchingVariant(2, 128, 4, 64))
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    outcome = run(engine, Request(0, tuple(PROMPTS[4]), params))
    assert any(plan.copies for plan in outcome.plans)
    alone = run(
        engine,
        Request(
            1,
            tuple(PROMPTS[4]),
            SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True),
        ),
    )
    assert outcome.tokens(0, 0) == alone.tokens(1)
    assert len({tuple(outcome.tokens(0, choice)) for choice in range(3)}) == 3


def nan_decoder() -> Any:
    """Return a llama in which the embedding of token 9 is NaN."""
    module = create_module("llama", torch.float64, ATTENTION_NAME)
    module.model.embed_tokens.weight.data[9] = float("nan")
    return select_decoder(module, TorchOps(), 1024)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_with_logits_that_are_not_finite_fails_alone(depth: int) -> None:
    """Token 9 has an embedding of NaN.

    Its request ends; the others of its batch are not affected.
    """
    engine = engine_of(nan_decoder(), BatchingVariant(depth, 64, 4, 64), torch.float64)
    good = [token for token in PROMPTS[3] if token != 9]
    bias = {"logit_bias": {9: -100.0}}
    alone = run(engine, greedy(0, good, 20, **bias)).tokens(0)
    outcome = run(engine, greedy(1, good, 20, **bias), greedy(2, [5, 9, 7], 20))
    errors = {d.request_id: d.error for d in outcome.deltas if d.error}
    assert errors == {2: "the model's logits are not finite: NaN"}
    assert outcome.tokens(1) == alone


def test_a_plan_of_another_geometry_is_refused() -> None:
    model = engine_for("llama", BatchingVariant(1, 8, 2, 16)).model
    with pytest.raises(InvalidConfig, match="block_size"):
        model.forward(StepPlan(0, (), 8, 32))
    with pytest.raises(InvalidConfig, match="num_blocks"):
        model.forward(StepPlan(0, (), 9, 16))


def test_a_plan_without_rows_does_its_copies() -> None:
    engine = engine_for("llama", BatchingVariant(1, 8, 2, 16))
    assert isinstance(engine.model, HFModel)
    pool = engine.model._runner.kv_cache
    pool.data[:, 3] = 1.0
    output = engine.model.forward(StepPlan(0, (), 8, 16, (BlockCopy(3, 5),))).result()
    assert output.rows == ()
    assert bool((pool.data[:, 5] == 1.0).all())


def test_a_step_may_change_more_cells_of_the_tables_than_there_are_blocks() -> None:
    """Twelve requests share a prefix of twenty blocks: 240 cells, in a cache of 40 blocks."""
    engine = engine_for("llama", BatchingVariant(1, 40, 12, 24))
    shared = prompt_of(320)
    run(engine, greedy(0, shared, 1))
    outcome = run(engine, *(greedy(1 + i, [*shared, 3 + i], 2) for i in range(12)))
    assert max(sum(len(row.new_blocks) for row in plan.rows) for plan in outcome.plans) > 200
    assert all(len(outcome.tokens(1 + i)) == 2 for i in range(12))


def test_the_largest_step_fits_where_there_may_be_as_many_rows_as_tokens() -> None:
    """Each row is one token, is scored, and changes its whole table."""
    rows, blocks = 160, 64
    engine = engine_for("llama", BatchingVariant(1, blocks, rows, rows))
    params, history = SamplingParams(prompt_logprobs=0), tuple(prompt_of(16 * blocks))
    bind = Bind(params, seed=0, prompt_len=16 * blocks, history=history)
    last = [
        Row(slot, 0, slot, 16 * blocks - 2, (5,), new_blocks=tuple(range(blocks)), bind=bind)
        for slot in range(rows)
    ]
    output = engine.model.forward(StepPlan(0, tuple(last), blocks, 16)).result()
    assert [len(row.prompt_logprobs) for row in output.rows] == [1] * rows


def test_a_row_that_asks_for_no_token_has_no_score_either() -> None:
    """A captured graph samples for all of its rows; only rows with samples are sampled again."""
    engine = engine_for("llama", BatchingVariant(1, 8, 2, 16))
    assert isinstance(engine.model, HFModel)
    device = engine.model._runner
    for slot in (0, 1):
        device.sampler.bind(slot, Bind(SamplingParams(logprobs=1), 0, 2))
    rows = [Row(0, 0, 0, 1, (5,), num_samples=1), Row(1, 0, 1, 1, (5,), num_samples=0)]
    (scores,) = device.finish_sampling(torch.zeros(2, VOCAB), range(2), rows)
    assert scores.batch_rows == [0]


def test_blocks_after_a_number_that_is_not_finite_are_never_shared() -> None:
    """Token 9 is NaN and is in an unfinished chunk, after two whole blocks of clean tokens.

    Masked attention multiplies what it hides by zero, and zero times NaN is NaN: the clean tokens
    of that chunk are spoiled too.
    """
    spoiled = nan_decoder()
    clean = [10 + n for n in range(32)]
    tokens = {}
    for budget in (40, 64):
        engine = engine_of(spoiled, BatchingVariant(1, 64, 4, budget), torch.float64)
        bad = run(engine, greedy(0, [*clean, 9, *[40] * 20], 3, logit_bias={9: -100.0}))
        assert [d.error for d in bad.deltas] == ["the model's logits are not finite: NaN"]
        tokens[budget] = run(engine, greedy(1, [*clean, 50, 51], 3, logit_bias={9: -100.0}))
    assert len(tokens[64].tokens(1)) == 3
    assert tokens[40].tokens(1) == tokens[64].tokens(1)
