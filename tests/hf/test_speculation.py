"""Drafts in the Hugging Face model: as LogitsModel for each plan, and as without drafts.

Two kinds of model. A Markov chain has its logits in a table, so that sampling is compared with the
normative arithmetic to the last digit, thousands of rows a second. A small Llama reads the KV
cache, so that a position that was rejected and computed again must be right. All in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from forge.config import MAX_DRAFTS, DeviceOptions, EngineConfig, Speculation  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.attention.interface import LayerSpec  # noqa: E402
from forge.models.hf.decoders.interface import ALL_TOKENS  # noqa: E402
from forge.models.hf.decoders.module_decoder import ATTENTION_NAME, register_attention  # noqa: E402
from forge.models.hf.decoders.resized_vocab import ResizedVocabDecoder  # noqa: E402
from forge.models.hf.loading.decoder_loader import select_decoder  # noqa: E402
from forge.models.hf.loading.draft_pair import open_pair  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402
from forge.models.logits import LogitsModel  # noqa: E402
from forge.proposers import OracleProposer, Proposer  # noqa: E402
from forge.request import Request, SamplingParams, Structure  # noqa: E402
from forge.sampling import filter_logits, probabilities, process_logits  # noqa: E402
from forge.seam import (  # noqa: E402
    COUPLED,
    REJECTION,
    Bind,
    DraftRef,
    Row,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenRef,
)
from tests.hf.families import generate_greedy  # noqa: E402
from tests.hf.test_http import save_checkpoint  # noqa: E402
from tests.hf.test_sampler import some_params  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
CPU = torch.device("cpu")
EOS = 2


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


# Models.


class MarkovDecoder:
    """A decoder whose logits after a token are that token's row of a table."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def forward(self, ids: Any, positions: Any, step: Any, wanted: Any = ALL_TOKENS) -> Any:
        return self.table[ids][wanted]

    def compute_logits(self, hidden: Any) -> Any:
        return hidden


class FlakyDecoder:
    """A decoder that fails in some of its steps, counted from 1."""

    def __init__(self, decoder: Any, fails: Callable[[int], bool]) -> None:
        self._decoder = decoder
        self._fails = fails
        self._steps = 0

    def forward(self, *arguments: Any) -> Any:
        self._steps += 1
        if self._fails(self._steps):
            raise RuntimeError(f"step {self._steps}")
        return self._decoder.forward(*arguments)

    def compute_logits(self, hidden: Any) -> Any:
        return self._decoder.compute_logits(hidden)


MARKOV_LAYERS = [LayerSpec(1, 1, 8, 1.0)]
NUM_STATES = 24
"""Tokens of the chains."""


def table_of(seed: int, spread: float = 1.5) -> Any:
    return torch.randn(
        NUM_STATES, NUM_STATES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).mul_(spread)


def mix_tables(a: Any, b: Any, share: float) -> Any:
    return (1 - share) * a + share * b


@cache
def create_llama(kind: str) -> Any:
    """Return the decoder of `create_llama_module`, and its layers."""
    return select_decoder(create_llama_module(kind), TorchOps(), 256)


def create_llama_module(kind: str) -> Any:
    """Return two layers over 61 tokens.

    `near`: the same with different noise; `other`: unrelated.
    """
    config = hf.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        attn_implementation=ATTENTION_NAME,
    )
    module = hf.LlamaForCausalLM(config).to(torch.float64).eval()
    shift = {"same": 0.0, "near": 0.08, "other": 1.0}[kind]
    one, two = (torch.Generator().manual_seed(seed) for seed in (3, 4))
    with torch.no_grad():
        for tensor in module.parameters():
            mine, theirs = (
                torch.randn(tensor.shape, generator=g, dtype=torch.float64) for g in (one, two)
            )
            tensor.copy_(0.35 * mix_tables(mine, theirs, shift) + (tensor.dim() == 1))
    return module


class Sizes(NamedTuple):
    """Geometry of an engine."""

    blocks: int = 64
    rows: int = 6
    budget: int = 128
    depth: int = 1
    cached: bool = False


def config_of(sizes: Sizes, speculation: Speculation | None) -> EngineConfig:
    return EngineConfig(
        num_blocks=sizes.blocks,
        block_size=4,
        max_num_seqs=sizes.rows,
        max_num_batched_tokens=sizes.budget,
        max_model_len=128,
        depth=sizes.depth,
        enable_prefix_caching=sizes.cached,
        speculation=speculation,
    )


def create_markov_model(table: Any, config: EngineConfig, draft: HFModel | None = None) -> HFModel:
    return model_of(
        (MarkovDecoder(table), MARKOV_LAYERS), config, table.shape[1], draft, table.device
    )


def model_of(
    decoder_and_layers: Any,
    config: EngineConfig,
    vocab_size: int,
    draft: HFModel | None = None,
    device: Any = CPU,
) -> HFModel:
    decoder, layers = decoder_and_layers
    return assemble_model(
        decoder,
        layers,
        select_kv_cache_spec(layers, torch.float64, device),
        config,
        vocab_size=vocab_size,
        eos_token=EOS,
        device=device,
        draft=draft,
    )


def engine_of(
    kind: str | None = None,
    sizes: Sizes = Sizes(),  # noqa: B008
    k: int = 3,
    acceptance: str = COUPLED,
    decoder: Any = None,
) -> Engine:
    """Return an engine with a Llama, alone or with a draft of that kind."""
    if kind is None and decoder is None:
        config = config_of(sizes, None)
        return Engine(model_of(create_llama("same"), config, 61), config)
    config = config_of(sizes, Speculation(num_tokens=k, acceptance=acceptance))
    draft = model_of(decoder or create_llama(str(kind)), config, 61)
    return Engine(model_of(create_llama("same"), config, 61, draft), config)


class ServedRun(NamedTuple):
    """Tokens and log probabilities of each request of a run, every plan with its output."""

    tokens: dict[int, list[int]]
    scores: dict[int, list[Any]]
    errors: dict[int, str]
    steps: list[tuple[StepPlan, StepOutput]]

    @property
    def draft_counts(self) -> list[tuple[int, int]]:
        """Drafts tested and accepted, of each row that had some."""
        return [
            (len(out.verified), len(out.tokens) - 1)
            for plan, output in self.steps
            for row, out in zip(plan.rows, output.rows, strict=True)
            if row.drafts
        ]

    @property
    def acceptance_rate(self) -> float:
        """Share of the tested drafts that were accepted."""
        return sum(taken for _, taken in self.draft_counts) / max(
            1, sum(n for n, _ in self.draft_counts)
        )


class ModelFailure(BaseException):
    """Failure of a model's test. An engine would handle an Exception, and the test would pass."""


class LoggedStep(NamedTuple):
    """A step that is kept with its output."""

    step: Any
    plan: StepPlan
    steps: list[tuple[StepPlan, StepOutput]]

    def result(self) -> StepOutput:
        try:
            output: StepOutput = self.step.result()
        except Exception as error:
            raise ModelFailure(f"step {self.plan.step}") from error
        self.steps.append((self.plan, output))
        return output


class LoggingModel:
    """A model that keeps its outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.steps: list[tuple[StepPlan, StepOutput]] = []
        self.vocab_size, self.num_layers = model.vocab_size, model.num_layers
        self.eos_token, self.samples_late_rows = model.eos_token, model.samples_late_rows

    def forward(self, plan: StepPlan) -> LoggedStep:
        try:
            return LoggedStep(self._model.forward(plan), plan, self.steps)
        except Exception as error:
            raise ModelFailure(f"step {plan.step}") from error


def run(engine: Engine, requests: Sequence[Request]) -> ServedRun:
    plain = engine.model
    keeping = engine.model = LoggingModel(plain)
    for request in requests:
        engine.submit(request)
    found = ServedRun({}, {}, {}, keeping.steps)
    while engine.has_work:
        for delta in engine.step():
            found.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            found.scores.setdefault(delta.request_id, []).extend(delta.logprobs)
            if delta.error:
                found.errors[delta.request_id] = delta.error
    engine.model = plain
    assert engine.scheduler.pool.num_free_blocks == engine.config.num_blocks
    return found


def same_scores(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert [s.token for s in ours] == [s.token for s in theirs]
    assert [s.logprob for s in ours] == pytest.approx([s.logprob for s in theirs], abs=1e-7)
    assert [[t for t, _ in s.top] for s in ours] == [[t for t, _ in s.top] for s in theirs]


# In step with LogitsModel.


class ComparedStep(NamedTuple):
    """A step of both models, compared when it ends."""

    hf_step: Any
    reference_step: Any

    def result(self) -> StepOutput:
        ours, theirs = self.hf_step.result(), self.reference_step.result()
        assert (ours.step, ours.undrafted) == (theirs.step, theirs.undrafted)
        for mine, normative in zip(ours.rows, theirs.rows, strict=True):
            compare(mine, normative)
        return ours


class ComparedModels:
    """HFModel and LogitsModel with the same plans; every output of one must equal the other's."""

    def __init__(self, ours: HFModel, theirs: LogitsModel) -> None:
        self._ours, self._theirs = ours, theirs
        self.vocab_size, self.num_layers = ours.vocab_size, ours.num_layers
        self.eos_token, self.samples_late_rows = ours.eos_token, ours.samples_late_rows

    def forward(self, plan: StepPlan) -> ComparedStep:
        return ComparedStep(self._ours.forward(plan), self._theirs.forward(plan))


def compare(mine: RowOutput, normative: RowOutput) -> None:
    assert (mine.tokens, mine.error) == (normative.tokens, normative.error)
    same_scores(mine.logprobs, normative.logprobs)
    assert [v.token for v in mine.verified] == [v.token for v in normative.verified]
    for one, other in zip(mine.verified, normative.verified, strict=True):
        assert one.p == pytest.approx(other.p, abs=1e-12)
        assert one.q == pytest.approx(other.q, abs=1e-12)
        if one.p is not None and one.q is not None and one.q - one.p > 1e-6:
            # Otherwise p - q may be rounding alone.
            assert one.residual == other.residual


def normative_of(table: Any, config: EngineConfig, draft: LogitsModel | None = None) -> LogitsModel:
    lines = table.tolist()
    return LogitsModel(
        lambda context: lines[context[-1]],
        vocab_size=len(lines),
        eos_token=EOS,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        draft=draft,
    )


def create_compared_engine(
    target: Any,
    draft: Any,
    sizes: Sizes,
    speculation: Speculation,
    proposer: Proposer | None = None,
) -> Engine:
    config = config_of(sizes, speculation)
    if proposer is not None:
        pair = ComparedModels(create_markov_model(target, config), normative_of(target, config))
        return Engine(pair, config, proposer=proposer)
    ours = create_markov_model(target, config, create_markov_model(draft, config))
    return Engine(
        ComparedModels(ours, normative_of(target, config, normative_of(draft, config))), config
    )


def some_requests(rng: Random, count: int) -> list[Request]:
    """Return requests with any parameters, and prompts that spoiled tables can read."""
    requests = []
    for id in range(count):
        params = some_params(rng, NUM_STATES)
        params = replace(
            params,
            max_tokens=rng.randint(2, 14),
            min_tokens=min(params.min_tokens, 2),
            logprobs=(logprobs := rng.choice([None, None, 0, 3])),
            logprob_token_ids=(9, 4) if logprobs == 0 else (),
            seed=rng.getrandbits(63),
            ignore_eos=rng.random() < 0.5,
        )
        prompt = [rng.randrange(12, NUM_STATES) for _ in range(rng.randint(1, 9))]
        requests.append(Request(id, tuple(prompt), params))
    return requests


@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_row_is_what_the_normative_arithmetic_makes_of_the_same_plan(
    acceptance: str, depth: int
) -> None:
    """Requests of every kind at once; the draft is near the target."""
    rng = Random(f"{acceptance} {depth}")
    target = table_of(1)
    sizes = Sizes(blocks=40, rows=6, budget=40, depth=depth)
    speculation = Speculation(num_tokens=4, acceptance=acceptance)
    engine = create_compared_engine(
        target, mix_tables(target, table_of(2), 0.3), sizes, speculation
    )
    served = run(engine, some_requests(rng, 40))
    assert 0.2 < served.acceptance_rate < 0.9
    assert len(served.draft_counts) > 60
    if acceptance == REJECTION:
        assert any(v.p is not None for _, o in served.steps for r in o.rows for v in r.verified)


@pytest.mark.soak
@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
def test_every_row_of_many_engines_is_what_the_normative_arithmetic_makes_of_it(
    acceptance: str,
) -> None:
    for seed in range(60):
        rng = Random(seed)
        target = table_of(seed)
        sizes = Sizes(rng.choice((14, 40, 80)), rng.randint(2, 8), rng.choice((12, 40)))
        sizes = sizes._replace(depth=rng.choice((1, 2)))
        k = rng.choice((1, 2, 5, MAX_DRAFTS))
        speculation = Speculation(num_tokens=k, acceptance=acceptance)
        draft = mix_tables(target, table_of(1000 + seed), rng.choice((0.1, 0.3, 1.0)))
        run(create_compared_engine(target, draft, sizes, speculation), some_requests(rng, 30))


@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
def test_known_drafts_are_accepted_as_the_normative_arithmetic_accepts_them(
    acceptance: str,
) -> None:
    requests = some_requests(Random(7), 30)
    target = table_of(1)
    config = config_of(Sizes(), None)
    recorded = run(Engine(create_markov_model(target, config), config), requests).tokens
    speculation = Speculation(num_tokens=3, method="ngram", acceptance=acceptance)
    engine = create_compared_engine(
        target, None, Sizes(), speculation, OracleProposer(recorded, 0.7, NUM_STATES)
    )
    served = run(engine, requests)
    assert 0.3 < served.acceptance_rate < 0.9
    if acceptance == COUPLED:
        assert served.tokens == recorded


@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
def test_what_is_not_finite_fails_its_row_only_where_it_is_emitted(acceptance: str) -> None:
    """After tokens 3 and 4 the target has no logits, after 5 and 6 the draft has none."""
    target = table_of(1)
    draft = mix_tables(target, table_of(2), 0.5)
    target[3], target[4] = math.nan, -math.inf
    draft[5], draft[6] = math.nan, -math.inf
    speculation = Speculation(num_tokens=4, acceptance=acceptance)
    engine = create_compared_engine(target, draft, Sizes(), speculation)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    requests = [Request(i, (12 + i % 9,), replace(params, seed=i)) for i in range(40)]
    served = run(engine, requests)
    assert len(served.errors) > 10
    assert any(output.undrafted for _, output in served.steps)
    # Drafts with no possible next token do no harm where they are not accepted.
    assert any(
        v.token in (3, 4) and not out.error
        for _, output in served.steps
        for out in output.rows
        for v in out.verified
    )


def test_each_sample_of_a_row_has_a_separate_mask() -> None:
    """The first may be 7 or 8, the second 9, the third anything up to 15."""
    target, config = table_of(1), config_of(Sizes(), None)
    pair = ComparedModels(create_markov_model(target, config), normative_of(target, config))
    structure = SamplingParams(temperature=1.0, structure=Structure.regex(".*"))
    masks = ((1 << 7 | 1 << 8), 1 << 9, (1 << 16) - 1)
    emitted = Counter()
    for step in range(20):
        bind = Bind(structure, step, 1)
        row = Row(
            step,
            0,
            0,
            0,
            (12,),
            new_blocks=(0,),
            num_samples=3,
            bind=bind,
            masks=tuple(mask.to_bytes(3, "little") for mask in masks),
            drafts=(8, 9),
        )
        (out,) = pair.forward(StepPlan(step, (row,), 64, 4)).result().rows
        emitted[len(out.tokens)] += 1
        assert out.tokens[0] in (7, 8) and out.tokens[1:2] in ((), (9,))
        assert all(token < 16 for token in out.tokens[2:])
    assert emitted[1] > 2 and emitted[3] > 2


# Against plain decoding.

PROMPTS = [[(7 * i + n) % 58 + 3 for i in range(n)] for n in (1, 5, 16, 30)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "filters": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "greedy penalties": {
        **{"temperature": 0.0, "presence_penalty": 0.9},
        **{"logprobs": 0, "logprob_token_ids": [5, 3]},
    },
}


def requests_of(kind: str, count: int = 20) -> list[Request]:
    return [
        Request(
            i,
            tuple(prompt),
            SamplingParams(max_tokens=count, ignore_eos=True, seed=i, **KINDS[kind]),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


@cache
def run_plain(kind: str) -> ServedRun:
    return run(engine_of(), requests_of(kind))


class DraftCase(NamedTuple):
    kind: str
    draft: str
    k: int
    sizes: Sizes


CASES = {
    "greedy": DraftCase("greedy", "near", 4, Sizes()),
    "one draft, planned ahead": DraftCase("sampled", "near", 1, Sizes(depth=2)),
    "small chunks, preempted": DraftCase("filters", "near", 2, Sizes(22, 4, 9, 2)),
    "preempted": DraftCase("greedy penalties", "near", 3, Sizes(22, 4, 64)),
    "penalties": DraftCase("penalties", "near", 3, Sizes(depth=2)),
    "another model": DraftCase("filters", "other", 3, Sizes()),
    "the same model": DraftCase("penalties", "same", 4, Sizes(cached=True)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_coupled_drafts_change_no_token_and_no_score(case: DraftCase) -> None:
    plain = run_plain(case.kind)
    served = run(engine_of(case.draft, case.sizes, case.k), requests_of(case.kind))
    assert served.tokens == plain.tokens and not served.errors
    for request, scores in plain.scores.items():
        same_scores(served.scores[request], scores)
    low, high = {"same": (1.0, 1.0), "near": (0.15, 0.95), "other": (0.0, 0.3)}[case.draft]
    assert low <= served.acceptance_rate <= high, served.acceptance_rate
    assert max(len(row.drafts) for plan, _ in served.steps for row in plan.rows) == case.k
    if case.sizes.blocks < 30:
        assert any(plan.preempted for plan, _ in served.steps)
    if case.sizes.budget < 16:
        assert any(row.num_samples == 0 for plan, _ in served.steps for row in plan.rows)


def test_after_a_prefix_cache_hit_drafts_change_no_token() -> None:
    engine = engine_of("near", Sizes(cached=True))
    requests = requests_of("filters")
    first = run(engine, requests)
    again = run(engine, [replace(request, id=10 + request.id) for request in requests])
    assert list(again.tokens.values()) == list(first.tokens.values())
    assert list(first.tokens.values()) == list(run_plain("filters").tokens.values())
    starts = {row.seq_id: row.start for plan, _ in reversed(again.steps) for row in plan.rows}
    assert max(starts.values()) > 20


def test_a_draft_that_is_rejected_is_not_counted_by_penalties() -> None:
    """Drafts 7 7 are fed, the first is accepted.

    Then 7 was emitted once: it costs 1, not 0 or 2.
    """
    config = config_of(Sizes(), None)
    table = torch.zeros(NUM_STATES, NUM_STATES, dtype=torch.float64)
    table[12, 7] = table[7, 8] = 9.0
    table[8, 7], table[8, 9] = 5.0, 4.5
    table[9, 7], table[9, 10] = 5.0, 3.5
    model = create_markov_model(table, config)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    row = Row(0, 0, 0, 0, (12,), new_blocks=(0, 1), num_samples=3, bind=Bind(params, 0, 1))
    (out,) = model.forward(StepPlan(0, (row._replace(drafts=(7, 7)),), 64, 4)).result().rows
    assert out.tokens == (7, 8) and [v.token for v in out.verified] == [7, 7]
    row = Row(0, 0, 0, 2, (8,), keep=2, num_samples=1)
    assert model.forward(StepPlan(1, (row,), 64, 4)).result().rows[0].tokens == (9,)
    row = Row(0, 0, 0, 3, (9,), keep=2, num_samples=1)
    assert model.forward(StepPlan(2, (row,), 64, 4)).result().rows[0].tokens == (7,)


# A draft model that fails.


def test_where_the_draft_fails_the_target_gives_the_tokens_it_gives_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every fifth step of the draft raises; its sequences are reported and start again."""
    decoder, layers = create_llama("near")
    flaky = FlakyDecoder(decoder, lambda step: step % 5 == 0)
    served = run(engine_of(decoder=(flaky, layers), k=4), requests_of("penalties"))
    assert served.tokens == run_plain("penalties").tokens
    assert any(output.undrafted for _, output in served.steps)
    assert served.acceptance_rate > 0.15
    assert {record.getMessage() for record in caplog.records} >= {
        "the draft model failed: RuntimeError('step 5')"
    }


def with_bind(row: Row, params: SamplingParams, **bind: Any) -> Row:
    return row._replace(bind=Bind(params, row.seq_id, 1, **bind))


@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
def test_drafts_are_verified_up_to_the_first_that_the_draft_model_did_not_give(
    acceptance: str,
) -> None:
    """Of two sequences with three drafts each the second plan of the draft raises, or the second
    draft of the first sequence is nothing that can be drawn."""
    target, config = table_of(1, 0.1), config_of(Sizes(), None)
    params = SamplingParams(temperature=1.0)
    row = Row(0, 0, 0, 0, (12,), new_blocks=(0,), num_samples=1)
    rows = [
        with_bind(row, params, acceptance=acceptance),
        with_bind(row._replace(seq_id=1, slot=1, new_blocks=(1,)), params, acceptance=acceptance),
    ]
    drafting = [each._replace(bind=each.bind._replace(proposes=True)) for each in rows if each.bind]
    later = [
        tuple(Row(i, 0, i, at, (), (TokenRef(at - 1, i),), keep=1, num_samples=1) for i in range(2))
        for at in (1, 2)
    ]
    plans = tuple(StepPlan(i, each, 64, 4) for i, each in enumerate((tuple(drafting), *later)))
    judged = tuple(
        row._replace(num_samples=4, drafts=tuple(DraftRef(plan, i) for plan in range(3)))
        for i, row in enumerate(rows)
    )
    plan = StepPlan(0, judged, 64, 4, drafts=plans)
    raising = FlakyDecoder(MarkovDecoder(target), lambda step: step == 2)
    draft = model_of((raising, MARKOV_LAYERS), config, NUM_STATES)
    output = create_markov_model(target, config, draft).forward(plan).result()
    assert output.undrafted == (0, 1)
    assert [len(out.verified) for out in output.rows] == [1, 1]
    assert [len(out.tokens) for out in output.rows] == [2, 2]  # The same table: it was accepted.

    certain = target.clone()
    first = output.rows[0].verified[0].token
    assert first != output.rows[1].verified[0].token
    certain[first] = math.nan
    model = ComparedModels(
        create_markov_model(target, config, create_markov_model(certain, config)),
        normative_of(target, config, normative_of(certain, config)),
    )
    output = model.forward(plan).result()
    assert output.undrafted == (0,)
    assert [len(out.verified) for out in output.rows] == [1, 3]


def test_a_draft_model_that_fails_for_a_prompt_computes_it_again() -> None:
    """The row samples no draft: only the host can find out that its blocks are invalid."""
    target, config = table_of(1), config_of(Sizes(), None)
    spoiled = target.clone()
    spoiled[12] = math.nan
    row = Row(5, 0, 0, 0, (13, 12), new_blocks=(0,), bind=Bind(SamplingParams(), 0, 3))
    plan = StepPlan(0, (row,), 64, 4, drafts=(StepPlan(0, (row,), 64, 4),))
    output = (
        create_markov_model(target, config, create_markov_model(spoiled, config))
        .forward(plan)
        .result()
    )
    assert output == StepOutput(0, (RowOutput(),), (5,))


# The distribution under rejection.


FAR = 6.0
"""Largest `pearson` that chance explains for some hundred numbers."""


def pearson(counts: Counter[int], shares: dict[int, float]) -> float:
    """Return chi-squared's excess over its expectation, in standard deviations."""
    total = sum(counts.values())
    assert set(counts) <= set(shares), "a token that the filters leave out was emitted"
    chi = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in shares.items())
    freedom = len(shares) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


SAMPLED = SamplingParams(temperature=0.9, top_k=9, top_p=0.95)
NUM_PARALLEL = 500


def shares(table: Any, token: int) -> dict[int, float]:
    """Return the tokens that may follow the token, with their probabilities."""
    logits = process_logits(table[token].tolist(), SAMPLED, (), (), ())
    return probabilities(filter_logits(logits, SAMPLED))


def count_tokens(
    target: Any, draft: Any, draws: int, drafts: Callable[[int], tuple[Any, Any]]
) -> tuple[Counter[int], dict[int, Counter[int]]]:
    """Return counts of first tokens after token 12, and of second ones after each accepted first.

    drafts   of a row: named, of two plans of the draft model, or guessed
    """
    config = config_of(Sizes(blocks=NUM_PARALLEL, rows=NUM_PARALLEL, budget=4000), None)
    model = create_markov_model(target, config, create_markov_model(draft, config))
    firsts: Counter[int] = Counter()
    seconds: dict[int, Counter[int]] = {}
    for step in range(draws // NUM_PARALLEL):
        row = Row(0, 0, 0, 0, (12,), num_samples=1)
        rows = [row._replace(seq_id=i, slot=i, new_blocks=(i,)) for i in range(NUM_PARALLEL)]
        binds = [
            Bind(SAMPLED, NUM_PARALLEL * step + i, 1, (), (), REJECTION)
            for i in range(NUM_PARALLEL)
        ]
        drafting = [
            row._replace(bind=bind._replace(proposes=True))
            for row, bind in zip(rows, binds, strict=True)
        ]
        again = [
            Row(i, 0, i, 1, (), (TokenRef(2 * step, i),), 1, num_samples=1)
            for i in range(NUM_PARALLEL)
        ]
        plans = (
            StepPlan(2 * step, tuple(drafting), NUM_PARALLEL, 4),
            StepPlan(2 * step + 1, tuple(again), NUM_PARALLEL, 4),
        )
        judged = [
            row._replace(num_samples=3, drafts=drafts(i), bind=bind)
            for i, (row, bind) in enumerate(zip(rows, binds, strict=True))
        ]
        output = model.forward(
            StepPlan(step, tuple(judged), NUM_PARALLEL, 4, drafts=plans)
        ).result()
        for out in output.rows:
            firsts[out.tokens[0]] += 1
            if len(out.tokens) > 1:
                seconds.setdefault(out.tokens[0], Counter())[out.tokens[1]] += 1
    return firsts, seconds


MANY = 1_000_000
DRAWS = [
    ("cpu", 20_000),
    pytest.param("cpu", MANY, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    pytest.param("cuda", MANY, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device, draws", DRAWS)
def test_the_distribution_of_the_output_is_the_targets(device: str, draws: int) -> None:
    target = table_of(1, 1.0).to(device)
    draft = mix_tables(target, table_of(2, 1.0).to(device), 0.7)
    firsts, seconds = count_tokens(target, draft, draws, lambda i: (DraftRef(0, i), DraftRef(1, i)))
    assert pearson(firsts, shares(target, 12)) < FAR
    behind = {t: counts for t, counts in seconds.items() if counts.total() > 400}
    assert len(behind) > 2
    assert max(pearson(counts, shares(target, t)) for t, counts in behind.items()) < FAR
    assert 0.3 * draws < sum(counts.total() for counts in seconds.values()) < 0.9 * draws


@pytest.mark.soak
def test_the_distribution_with_proposed_drafts_is_the_targets() -> None:
    """Each guess is the second most likely token."""
    target = table_of(1, 1.0)
    one = list(shares(target, 12))[1]
    two = list(shares(target, one))[1]
    firsts, seconds = count_tokens(target, target, 200_000, lambda i: (one, two))
    assert pearson(firsts, shares(target, 12)) < FAR
    assert list(seconds) == [one]
    assert pearson(seconds[one], shares(target, one)) < FAR


def test_a_draft_under_rejection_is_sampled_with_a_separate_key() -> None:
    """With the noise of the target's own samples, acceptance would not be independent of them."""
    table, config = table_of(1), config_of(Sizes(rows=20), None)
    params = SamplingParams(temperature=1.0)
    drawn = {}
    for acceptance in (COUPLED, REJECTION):
        rows = [
            Row(
                i,
                0,
                i,
                0,
                (12,),
                new_blocks=(i,),
                num_samples=1,
                bind=Bind(params, i, 1, acceptance=acceptance, proposes=True),
            )
            for i in range(20)
        ]
        output = (
            create_markov_model(table, config).forward(StepPlan(0, tuple(rows), 64, 4)).result()
        )
        drawn[acceptance] = [out.tokens for out in output.rows]
    assert drawn[COUPLED] != drawn[REJECTION]


# What makes a pair.


@pytest.mark.parametrize("width", [NUM_STATES - 5, NUM_STATES + 5])
@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
def test_a_draft_of_another_width_never_proposes_what_one_of_the_two_has_not(
    acceptance: str, width: int
) -> None:
    table = torch.zeros(width, width, dtype=torch.float64)
    config = config_of(Sizes(), Speculation(num_tokens=3, acceptance=acceptance))
    draft = (ResizedVocabDecoder(MarkovDecoder(table), width, NUM_STATES), MARKOV_LAYERS)
    target = table_of(1, 0.1)
    model = create_markov_model(target, config, model_of(draft, config, NUM_STATES))
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    requests = [Request(i, (12,), replace(params, seed=i)) for i in range(6)]
    served = run(Engine(model, config), requests)
    verified = {v.token for _, o in served.steps for out in o.rows for v in out.verified}
    emitted = {token for tokens in served.tokens.values() for token in tokens}
    assert max(verified) < min(width, NUM_STATES) <= 1 + max(emitted | verified)
    assert max(emitted) == NUM_STATES - 1 and served.acceptance_rate > 0.3
    if acceptance == COUPLED:
        plain = config_of(Sizes(), None)
        assert (
            served.tokens == run(Engine(create_markov_model(target, plain), plain), requests).tokens
        )


def test_a_pair_is_of_one_vocabulary_and_of_as_many_slots() -> None:
    config = config_of(Sizes(), None)
    table = table_of(1)
    with pytest.raises(InvalidConfig, match="the draft has 20 tokens in its vocabulary") as refused:
        create_markov_model(table, config, create_markov_model(table[:20, :20], config))
    assert refused.value.option == "draft_model"
    with pytest.raises(InvalidConfig, match="the draft has 3 slots, the model 6") as refused:
        create_markov_model(
            table, config, create_markov_model(table, config_of(Sizes(rows=3), None))
        )
    assert refused.value.option == "max_num_seqs"


def test_plans_for_a_draft_model_that_is_not_there_are_refused() -> None:
    config = config_of(Sizes(), None)
    plan = StepPlan(0, (), 64, 4, drafts=(StepPlan(0, (), 64, 4),))
    with pytest.raises(InvalidConfig, match="this model has no draft"):
        create_markov_model(table_of(1), config).forward(plan)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    return save_checkpoint(tmp_path_factory.mktemp("saved"))


def changed_copy(folder: Path, into: Path, file: str, change: Callable[[str], str]) -> Path:
    """Return a copy of the folder with one text file changed."""
    for each in folder.iterdir():
        (into / each.name).write_bytes(each.read_bytes())
    (into / file).write_text(change((into / file).read_text("utf-8")), "utf-8")
    return into


def test_a_pair_is_opened_out_of_one_memory_and_serves_what_the_model_serves(saved: Path) -> None:
    given = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 8}
    given["speculation"] = Speculation(num_tokens=3)
    options = DeviceOptions(device="cpu", dtype="float64")
    with open_pair(str(saved), str(saved), given, options) as loaded:
        config = loaded.config
        assert config.speculation == Speculation(num_tokens=3, num_blocks=config.num_blocks)
        assert config.num_blocks == 4 * 64 // 8
        prompt = loaded.tokenizer.encode("Once upon")
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        served = run(
            Engine(loaded.model, config, loaded.tokenizer), [Request(0, tuple(prompt), params)]
        )
    module = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64).eval()
    assert served.tokens[0] == generate_greedy(module, prompt, 16)
    assert served.acceptance_rate == 1.0


def test_a_draft_that_is_too_short_is_refused_with_both_limits(saved: Path, tmp_path: Path) -> None:
    short = changed_copy(
        saved,
        tmp_path,
        "config.json",
        lambda text: text.replace(
            '"max_position_embeddings": 2048', '"max_position_embeddings": 32'
        ),
    )
    with pytest.raises(InvalidConfig, match=r"has 32 positions.*of 64.*Give at most 32") as refused:
        with open_pair(str(saved), str(short), {"max_model_len": 64}, DeviceOptions(device="cpu")):
            pass
    assert refused.value.option == "max_model_len"


def test_a_draft_with_other_tokens_is_refused(saved: Path, tmp_path: Path) -> None:
    other = changed_copy(
        saved, tmp_path, "tokenizer.json", lambda text: text.replace("<unk>", "<none>")
    )
    with pytest.raises(InvalidConfig, match=r"its tokens are not the model's: 0 is") as refused:
        with open_pair(str(saved), str(other), {}, DeviceOptions(device="cpu")):
            pass
    assert refused.value.option == "draft_model"
