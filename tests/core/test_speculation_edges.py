"""Speculation with failures and shortages: ends, errors, lost drafts, empty pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest

from forge import LLM
from forge.cli.main import main
from forge.config import EngineConfig, Speculation, StepCosts
from forge.draft_length import CHECK_INTERVAL_STEPS
from forge.drafting import FAILURE_PAUSE_CHECKS, ModelDrafter
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.models.paged import NO_FAULTS, FaultHooks
from forge.proposers import Proposer
from forge.request import FinishReason, Request, SamplingParams, Structure
from forge.scheduler import Scheduler
from forge.seam import StepPlan
from forge.sequence import Sequence as Sequence_
from forge.sim.replay import replay
from tests.core.worlds import audit

Logits = Callable[[Sequence[int]], list[float]]
VOCAB = 64


def config(spec: dict[str, Any] | None, **numbers: Any) -> EngineConfig:
    numbers = {
        **{"num_blocks": 256, "block_size": 4, "max_num_seqs": 8},
        **{"max_num_batched_tokens": 512, "max_model_len": 512},
        **numbers,
    }
    speculation = None if spec is None else Speculation(**{"num_tokens": 4, **spec})
    return EngineConfig(**numbers, speculation=speculation)


def engine_of(
    config: EngineConfig,
    *,
    draft: dict[str, Any] | None = None,
    proposer: Proposer | None = None,
    min_eos_len: int = 4,
) -> Engine:
    """Return an engine on a HashModel whose draft has these options."""
    size = {"vocab_size": VOCAB, "block_size": config.block_size, "min_eos_len": min_eos_len}
    drafting = None
    if draft is not None:
        blocks = config.speculation.num_blocks if config.speculation else None
        drafting = HashModel(**size, num_blocks=blocks or config.num_blocks, **draft)
    model = HashModel(**size, num_blocks=config.num_blocks, draft=drafting)
    return Engine(model, config, proposer=proposer)


def run_requests(engine: Engine, *requests: Request) -> dict[int, tuple[list[int], Any]]:
    """Return tokens and end of each request."""
    found: dict[int, tuple[list[int], Any]] = {request.id: ([], None) for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            tokens, _ = found[delta.request_id]
            found[delta.request_id] = ([*tokens, *delta.tokens], delta.error or delta.finish)
        audit(engine)
    return found


def greedy_params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


# Errors after the emitted tokens.


def certain_logits(token: int) -> list[float]:
    return [50.0 if t == token else 0.0 for t in range(8)]


def end_after_five(context: Sequence[int]) -> list[float]:
    """Return logits for 3, 4, 5 and the end; after an end no logit is finite."""
    return (
        [nan] * 8 if 0 in context else certain_logits(0 if len(context) >= 5 else len(context) + 1)
    )


def nan_after_seven(context: Sequence[int]) -> list[float]:
    """Return logits that are NaN after a 7, which is never in the output."""
    if 7 in context:
        raise ValueError("a context that no output has")
    return certain_logits(len(context) % 5 + 1)


def nan_at_six(context: Sequence[int]) -> list[float]:
    return [nan] * 8 if len(context) >= 6 else certain_logits(len(context) + 1)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("target", "draft", "end"),
    [
        (
            end_after_five,
            lambda c: certain_logits(0 if len(c) >= 5 else len(c) + 1),
            FinishReason.STOP,
        ),
        (nan_after_seven, lambda c: certain_logits(7), FinishReason.LENGTH),
        (
            nan_at_six,
            lambda c: certain_logits((len(c) + 1) % 8),
            "the model's logits are not finite: NaN",
        ),
    ],
)
def test_tokens_after_an_end_or_a_wrong_draft_have_no_effect(
    acceptance: str, target: Logits, draft: Logits, end: object
) -> None:
    """The tokens, and the end or the error, are those without drafts."""
    size = {"vocab_size": 8, "eos_token": 0, "num_blocks": 64, "block_size": 4}
    params = SamplingParams(temperature=float(acceptance == "rejection"), seed=3, max_tokens=8)
    found = []
    for k in (None, 1, 3, 4):
        drafting = LogitsModel(draft, **size) if k else None  # type: ignore[arg-type]
        model = LogitsModel(target, draft=drafting, **size)  # type: ignore[arg-type]
        spec = {"num_tokens": k, "acceptance": acceptance} if k else None
        engine = Engine(model, config(spec, num_blocks=64))
        found.append(run_requests(engine, Request(0, (1, 2), params)))
    assert found[0][0][1] == end and len(found[0][0][0]) >= 4
    assert found == found[:1] * 4


# State after a failure.


def test_blocks_that_a_draft_model_did_not_compute_are_not_shared() -> None:
    """The draft model fails twice while it catches up; later requests have the same prefix."""
    failures = [2]

    def fails(plan: StepPlan) -> None:
        if failures[0] and any(len(row.tokens) > 1 for row in plan.rows):
            failures[0] -= 1
            raise RuntimeError("out of memory")

    system = tuple(range(1, 33))
    accepted = []
    for faults in (NO_FAULTS, FaultHooks(forward=fails)):
        engine = engine_of(config({}), draft={"faults": faults})
        run_requests(
            engine,
            Request(
                0, (*system, 5), greedy_params(FAILURE_PAUSE_CHECKS * CHECK_INTERVAL_STEPS + 30)
            ),
        )
        before = engine.scheduler.num_draft_tokens, engine.scheduler.num_accepted_tokens
        for index in range(1, 6):
            run_requests(engine, Request(index, (*system, index + 40), greedy_params(40)))
        scheduler = engine.scheduler
        drafted = scheduler.num_draft_tokens - before[0]
        assert drafted == scheduler.num_accepted_tokens - before[1] > 100, "a perfect draft"
        accepted.append(drafted)
    assert failures == [0]


def test_after_a_reset_nothing_computed_before_is_found_again() -> None:
    engine = engine_of(config({"num_tokens": 3}), draft={})
    engine.submit(Request(0, tuple(range(1, 34)), greedy_params(30)))
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    drafting = engine.scheduler.drafter
    assert isinstance(drafting, ModelDrafter)
    hashes = engine.scheduler.running[0].hashes[1:9]
    for _ in range(3):
        engine.step()
        assert not engine.scheduler.pool.lookup(hashes) and not drafting.pool.lookup(hashes)


# Block shortage.


def test_no_sequence_is_preempted_for_drafts_in_flight() -> None:
    """At depth 2 the blocks return with a commit: a sequence without a block waits for it."""

    class Guess:
        def propose(
            self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
        ) -> tuple[int, ...]:
            return (1,) * min(max_drafts, 4) if request_id == 0 else ()

    preempted = drafted = 0
    for seed in range(0, 60, 3):
        count, blocks = 6 + seed % 4, 60 + 2 * seed
        numbers = {"num_blocks": blocks, "block_size": 1, "max_model_len": 32, "depth": 2}
        engine = engine_of(
            config({"method": "ngram"}, max_num_seqs=16, enable_prefix_caching=False, **numbers),
            proposer=Guess(),
        )
        scheduler = engine.scheduler
        preempt_for = scheduler._preempt_until_fits

        def watched(
            growing: list[Sequence_],
            scheduler: Scheduler = scheduler,
            preempt_for: Callable[[list[Sequence_]], list[Sequence_]] = preempt_for,
        ) -> list[Sequence_]:
            assert all(s.num_pending >= 0 for s in scheduler.running.values()), "drafts in flight"
            return preempt_for(growing)

        scheduler._preempt_until_fits = watched  # type: ignore[method-assign]
        run_requests(
            engine,
            *(
                Request(i, (i + 1,) * (1 + (seed + i) % 5), greedy_params(10 + i))
                for i in range(count)
            ),
        )
        preempted += scheduler.num_preemptions
        drafted += scheduler.num_draft_tokens
    assert preempted > 10 and drafted > 100


def test_a_sequence_without_a_block_for_its_drafts_rests_and_runs_ahead() -> None:
    request = Request(0, tuple(range(1, 20)), greedy_params(60))
    steps = []
    for spec in (None, {"num_blocks": 3}):
        engine = engine_of(config(spec, depth=2), draft={} if spec else None)
        engine.submit(request)
        steps.append(0)
        while engine.has_work:
            engine.step()
            steps[-1] += 1
        assert engine.scheduler.num_draft_tokens == 0
    assert steps[1] <= steps[0] + 6


def test_proposals_that_are_always_wrong_are_tried_together_and_rarely() -> None:
    class Wrong:
        def propose(
            self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
        ) -> tuple[int, ...]:
            return (0,) * max_drafts

    costs = StepCosts(((1, 1.0),), ((1, 0.05),), ((1, 1.5),))
    engine = engine_of(
        config({"method": "ngram", "costs": costs}, enable_prefix_caching=False),
        proposer=Wrong(),
        min_eos_len=99,
    )
    for index in range(60):
        run_requests(engine, Request(index, (1, index % 16), greedy_params(20)))
    assert engine.scheduler.num_accepted_tokens <= engine.scheduler.num_draft_tokens < 30


# Recordings.


@pytest.mark.long
def test_a_recorded_run_with_costs_and_prompt_scores_is_decided_again(tmp_path: Path) -> None:
    for index in range(6):
        path = tmp_path / f"{index}.rec"
        with LLM(
            "hash:step_ms=0.5",
            draft_model=f"hash:agreement=0.{2 + index % 4},step_ms=0.{1 + index % 3}",
            num_speculative_tokens=(2, 4, 8)[index % 3],
            acceptance=("coupled", "rejection")[index % 2],
            depth=1 + index % 2,
            num_blocks=(20, 60, 300)[index % 3],
            block_size=4,
            max_num_seqs=(3, 8)[index % 2],
            max_num_batched_tokens=32,
            max_model_len=64,
            record=str(path),
        ) as llm:
            params = [
                SamplingParams(max_tokens=1 + 5 * i % 29, n=1 + i % 2, prompt_logprobs=1)
                for i in range(6)
            ]
            llm.generate(["x" * (1 + 7 * i % 24) for i in range(6)], params)
        found = replay(path.read_text().splitlines(keepends=True))
        assert found.difference is None and found.is_complete


def test_drafts_that_a_structure_has_cut_are_cut_again(tmp_path: Path) -> None:
    """The proposer repeats what followed before, as far as the structure allows it."""
    params = SamplingParams(max_tokens=40, structure=Structure.regex("(ab|abc){4,20}"), seed=2)
    path, found = tmp_path / "run.rec", []
    for options in ({}, {"speculative_method": "ngram", "record": str(path)}):
        with LLM("hash", **options) as llm:  # type: ignore[arg-type]
            found.append(llm.generate(["abcabab", "x"], params))
            drafted = llm.engine.scheduler.num_draft_tokens
    assert [o.token_ids for o in found[0]] == [o.token_ids for o in found[1]] and drafted > 0
    lines = path.read_text().splitlines(keepends=True)
    assert any('"cuts"' in line for line in lines)
    assert replay(lines).difference is None


def test_a_draft_model_leaves_a_structure_alone() -> None:
    params = SamplingParams(max_tokens=20, structure=Structure.regex("[a-z]{10}"), seed=2)
    texts = []
    for options in ({}, {"draft_model": "hash"}):
        with LLM("hash", **options) as llm:  # type: ignore[arg-type]
            texts.append(llm.generate("x", params)[0].text)
            assert llm.engine.scheduler.num_draft_tokens == 0
    assert texts[0] == texts[1] and len(texts[0]) == 10


def test_forge_info_leaves_a_recording_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.rec"
    path.write_text("a run\n")
    assert main(["info", "--record", str(path)]) == 0
    assert path.read_text() == "a run\n"
    capsys.readouterr()
