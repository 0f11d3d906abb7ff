"""Late rows on a device: sampled when the next plan gives their masks, as LogitsModel does it.

The engine drives both models with the same plans; each output is compared. A chain of tokens gives
the logits, so a run of many steps takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.config import EngineConfig, Speculation  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.models.hf.decoders.module_decoder import register_attention  # noqa: E402
from forge.models.hf.loading.kernel_selection import select_kv_cache_spec  # noqa: E402
from forge.models.hf.loading.model_loader import assemble_model  # noqa: E402
from forge.models.hf.model import HFModel  # noqa: E402
from forge.models.hf.runner.cuda_graphs import CapturedGraphs  # noqa: E402
from forge.models.hf.runner.input_batch import InputBatch  # noqa: E402
from forge.models.hf.runner.model_runner import ModelRunner, padded_token_fields  # noqa: E402
from forge.models.logits import LogitsModel  # noqa: E402
from forge.request import (  # noqa: E402
    Reasoning,
    Request,
    SamplingParams,
    Structure,
    ThinkingBudget,
)
from forge.seam import Bind, LateMask, Row, StepPlan, TokenRef  # noqa: E402
from forge.tokenizer import ByteTokenizer  # noqa: E402
from tests.hf import test_cuda_graphs  # noqa: E402
from tests.hf.test_speculation import (  # noqa: E402
    CPU,
    MARKOV_LAYERS,
    ComparedModels,
    MarkovDecoder,
    ServedRun,
    run,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
TOKENIZER = ByteTokenizer()
END, VOCAB = TOKENIZER.eos_token, TOKENIZER.vocab_size


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


class EagerGraphs:
    """Stands for DecodeGraphs without a device: each replay overwrites the logits of the last."""

    def __init__(self, runner: ModelRunner, num_rows: int) -> None:
        self._runner = runner
        self._logits = torch.full((num_rows, VOCAB), torch.nan, dtype=torch.float64)
        self.num_replays = 0

    def can_replay(self, batch: InputBatch, rows: Sequence[Row]) -> bool:
        return len(batch.tokens) == len(rows)

    def replay(self, batch: InputBatch) -> tuple[Any, Any]:
        self.num_replays += 1
        size = len(batch.tokens)
        fields = padded_token_fields(batch, size, self._runner.kv_cache)
        input_ids, logits = self._runner.run_decode(*self._runner.upload_inputs(batch, fields))
        self._logits[:size] = logits
        return input_ids, self._logits[:size]


TABLE = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def create_config(depth: int, speculation: Speculation | None = None) -> EngineConfig:
    return EngineConfig(
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=128,
        depth=depth,
        speculation=speculation,
    )


def create_models(config: EngineConfig) -> tuple[HFModel, LogitsModel, EagerGraphs]:
    """Return the model with stand-ins for graphs of 8 rows, and its reference."""
    plain = assemble_model(
        MarkovDecoder(TABLE),
        MARKOV_LAYERS,
        select_kv_cache_spec(MARKOV_LAYERS, torch.float64, CPU),
        config,
        vocab_size=VOCAB,
        eos_token=END,
        device=CPU,
    )
    runner = plain._runner
    graphs: Any = EagerGraphs(runner, 8)
    model = HFModel(
        runner,
        vocab_size=VOCAB,
        eos_token=END,
        capture_graphs=lambda: CapturedGraphs(graphs),
    )
    rows = TABLE.tolist()
    reference = LogitsModel(
        lambda context: rows[context[-1]],
        vocab_size=VOCAB,
        eos_token=END,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
    )
    return model, reference, graphs


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 0.8, "logprobs": 0, "logprob_token_ids": (99, 7)},
    {"temperature": 0.7, "top_k": 5, "logit_bias": ((98, 2.0),)},
)


BUDGET = ThinkingBudget(5, Reasoning("", "ab"), tuple(TOKENIZER.encode("cab")))


def create_requests(count: int) -> list[Request]:
    """Return requests with prompts of 1 to 30 tokens.

    Two in three have a structure, and one in six a budget of reasoning.
    """
    pattern = Structure.regex("([a-f]{1,3}[0-9] )+")
    return [
        Request(
            number,
            tuple((7 * number + each) % 90 + 30 for each in range(1 + 11 * number % 30)),
            replace(
                SamplingParams(
                    max_tokens=12 + number % 5, seed=number, **KINDS[number % len(KINDS)]
                ),
                structure=pattern if number % 3 else None,
                thinking_budget=None if number % 6 else BUDGET,
            ),
        )
        for number in range(count)
    ]


class Letters:
    """A Proposer that guesses two letters for one request in three."""

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        return (98, 99)[:max_drafts] if request_id % 3 == 1 else ()


def serve(depth: int, speculation: Speculation | None = None) -> tuple[ServedRun, int]:
    """Return a run in which every output was compared, and its number of replays."""
    config = create_config(depth, speculation)
    model, reference, graphs = create_models(config)
    proposer = Letters() if speculation is not None else None
    engine = Engine(ComparedModels(model, reference), config, TOKENIZER, proposer=proposer)
    return run(engine, create_requests(18)), graphs.num_replays


def count_late_rows(served: ServedRun) -> Counter[str]:
    found: Counter[str] = Counter()
    for plan, _ in served.steps:
        if plan.late_rows:
            kind = "decode" if all(row.end - row.start == 1 for row in plan.rows) else "chunk"
            if any(row.drafts for row in plan.rows):
                kind = "drafts"
            found[kind] += 1
            is_plain = set(range(len(plan.rows))) - set(plan.late_rows)
            found["beside others"] += bool(is_plain)
            found["out of order"] += kind == "chunk" and plan.rows[0].end - plan.rows[0].start > 1
    return found


def test_late_rows_get_the_tokens_that_one_plan_at_a_time_gives() -> None:
    one, _ = serve(1)
    ahead, num_replays = serve(2)
    assert not count_late_rows(one)
    reached = count_late_rows(ahead)
    assert reached["decode"] > 5 and reached["chunk"] > 3 and reached["beside others"] > 5
    assert num_replays > 10
    assert ahead.tokens == one.tokens and not ahead.errors
    for number, scores in one.scores.items():
        assert [each.token for each in ahead.scores[number]] == [each.token for each in scores]


def test_late_rows_alongside_drafts_get_the_same_tokens() -> None:
    one, _ = serve(1)
    ahead, _ = serve(2, Speculation(num_tokens=2, method="ngram"))
    reached = count_late_rows(ahead)
    assert reached["drafts"] > 2 and any(
        r.drafts and r.masks for p, _ in ahead.steps for r in p.rows
    )
    assert ahead.tokens == one.tokens and not ahead.errors


DEVICES = [
    pytest.param("cpu", torch.float32, ()),
    pytest.param("cuda", torch.bfloat16, (4,), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "dtype", "graph_sizes"), DEVICES)
def test_a_model_on_its_device_samples_late_rows_as_it_samples_others(
    device: str, dtype: Any, graph_sizes: tuple[int, ...]
) -> None:
    """Always four rows, so the batches are the same at both depths. On a GPU a graph runs them."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    tokenizer = ByteTokenizer(
        tuple(f"<|{number}|>" for number in range(test_cuda_graphs.VOCAB - 256))
    )
    structure = Structure.regex("[a-z]{24}")
    outputs = []
    for depth in (1, 2):
        config = replace(test_cuda_graphs.geometry(), depth=depth)
        model = test_cuda_graphs.model_of(
            "qwen3, heads of 64", torch.device(device), dtype, decodes=graph_sizes, chunks=()
        )
        engine = Engine(model, config, tokenizer)
        kinds = [KINDS[number] for number in (0, 1, 2, 4)]
        served = run(
            engine,
            [
                Request(
                    number,
                    tuple(range(40 + number, 60 + number)),
                    SamplingParams(max_tokens=24, seed=number, structure=structure, **kind),
                )
                for number, kind in enumerate(kinds)
            ],
        )
        assert bool(count_late_rows(served)["decode"]) == (depth == 2)
        assert not served.errors
        outputs.append(served.tokens)
    assert outputs[0] == outputs[1]
    assert all(97 + 1 <= token <= 122 + 1 for tokens in outputs[0].values() for token in tokens)
    assert [len(tokens) for tokens in outputs[0].values()] == [24] * 4


# Single plans.

BIND = Bind(SamplingParams(temperature=0.0, structure=Structure.regex(".*")), 0, 1)


def mask_of(tokens: Iterable[int]) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(-(-VOCAB // 8), "little")


def start_rows(model: Any) -> Any:
    """Start two sequences; return the step of their next rows, which are late."""
    rows = [
        Row(slot, 0, slot, 0, (40 + slot,), (), 0, (slot,), 1, BIND, (mask_of({50 + slot}),))
        for slot in range(2)
    ]
    model.forward(StepPlan(0, tuple(rows), 64, 4))
    late = [Row(slot, 0, slot, 1, (), (TokenRef(0, slot),), 1, (), 1) for slot in range(2)]
    return model.forward(StepPlan(1, tuple(late), 64, 4, late_rows=(0, 1)))


def test_a_late_row_without_a_mask_fails_alone() -> None:
    model = ComparedModels(*create_models(create_config(2))[:2])
    step = start_rows(model)
    model.forward(StepPlan(2, (), 64, 4, late_masks=(LateMask(1, mask_of({60, 61})),)))
    none, masked = step.result().rows
    assert none.error == "the next plan gave no mask for this row"
    assert masked.tokens in ((60,), (61,))


def test_the_result_of_late_rows_can_be_read_when_no_plan_follows() -> None:
    """Every sequence has ended meanwhile. The next plan may have other rows in their slots."""
    model = ComparedModels(*create_models(create_config(2))[:2])
    outputs = start_rows(model).result().rows
    assert [each.error for each in outputs] == ["the next plan gave no mask for this row"] * 2
    again = Row(2, 0, 0, 0, (40,), (), 0, (5,), 1, BIND, (mask_of({70}),))
    (output,) = model.forward(StepPlan(2, (again,), 64, 4)).result().rows
    assert output.tokens == (70,)


def test_masks_of_no_late_row_are_a_fault_of_the_plan() -> None:
    model, _, _ = create_models(create_config(2))
    with pytest.raises(AssertionError, match="masks of no row"):
        model.forward(StepPlan(0, (), 64, 4, late_masks=(LateMask(0, mask_of({1})),)))
