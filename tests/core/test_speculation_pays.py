"""Unprofitable drafts cost little: the real engine on the times of an H200, with chosen lengths.

Costs are rounded measurements of one H200 with a model of 4B and a draft of 0.6B. Time is virtual:
the same ratio every time, on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from forge.config import EngineConfig, Speculation, StepCosts
from forge.draft_length import interpolate_s
from forge.engine import Engine
from forge.proposers import Proposer
from forge.seam import StepPlan
from forge.sim.clock import Clock, VirtualClockModel
from forge.sim.length_model import LengthModel
from forge.sim.workloads.workload import create_request

VERIFY = (
    *((2, 0.0033), (3, 0.0038), (5, 0.0041), (9, 0.0041), (20, 0.0043), (36, 0.0045)),
    *((80, 0.0049), (144, 0.0054), (192, 0.0062), (256, 0.0066), (320, 0.0084), (576, 0.0107)),
)
COSTS = StepCosts(
    target=((1, 0.0022), (4, 0.0029), (16, 0.0031), (64, 0.0033)),
    draft=((1, 0.0005), (4, 0.0007), (16, 0.0011), (64, 0.0012)),
    verify=VERIFY,
    scheduler=((1, 0.0003), (8, 0.0006), (64, 0.003)),
    catch_up=((0, 0.0), (512, 512 * 6e-6)),
)
PROMPT_S, DRAFT_PROMPT_S = 11e-6, 6e-6
"""Time per token of a prompt, for the model and for its draft."""

OUTPUT, WAVES = 192, 10


@dataclass(frozen=True)
class H200Cost:
    """A cost model of COSTS, plus the time of prompt tokens."""

    def step_ns(self, plan: StepPlan) -> int:
        rows, tokens = len(plan.rows), plan.num_tokens
        if any(row.drafts for row in plan.rows):
            spent = interpolate_s(COSTS.verify, tokens)
        else:
            spent = interpolate_s(COSTS.target, rows) + PROMPT_S * (tokens - rows)
        for draft in plan.drafts:
            more = draft.num_tokens - len(draft.rows)
            spent += interpolate_s(COSTS.draft, max(1, len(draft.rows))) + DRAFT_PROMPT_S * more
        return round(1e9 * spent)

    def plan_ns(self, plan: StepPlan) -> int:
        spent = interpolate_s(COSTS.scheduler, len(plan.rows))
        return round(5e8 * spent * (1.0 if plan.drafts else 0.3))

    commit_ns = plan_ns

    def decode_ns(self, num_rows: int, num_kv: int, most_kv: int) -> int:
        raise AssertionError("no fast-forward here")


class RareProposer:
    """A proposer with proposals for every tenth run of twenty tokens only."""

    def propose(
        self, request_id: int, tokens: Sequence[int], prompt_len: int, max_drafts: int
    ) -> tuple[int, ...]:
        return (1,) * max_drafts if (request_id + len(tokens) // 20) % 10 == 0 else ()


def tokens_per_s(
    streams: int, prompt: int, acceptance: float, drafts: int, proposer: Proposer | None = None
) -> float:
    """Return tokens per second of waves of `streams` requests, one wave after another."""
    costs = COSTS if proposer is None else COSTS._replace(draft=(), catch_up=())
    chosen = Speculation(num_tokens=drafts, costs=costs) if drafts else None
    config = EngineConfig(
        num_blocks=streams * 16,
        block_size=64,
        max_num_seqs=streams,
        max_num_batched_tokens=8192,
        max_model_len=1024,
        depth=2,
        enable_prefix_caching=False,
        speculation=chosen,
    )
    model = VirtualClockModel(LengthModel(acceptance=acceptance, seed=1), Clock(), H200Cost())
    engine = Engine(model, config, proposer=proposer if drafts else None)
    for wave in range(WAVES):
        for i in range(streams):
            engine.submit(create_request(wave * streams + i, prompt, OUTPUT))
        while engine.has_work:
            engine.step()
    return WAVES * streams * OUTPUT / (model.clock.now_ns / 1e9)


SOAK = pytest.mark.soak


@pytest.mark.long
@pytest.mark.parametrize(
    ("streams", "prompt", "acceptance", "least"),
    [
        (1, 128, 0.0, 0.98),
        (1, 128, 0.8, 1.15),
        (8, 512, 0.0, 0.98),
        (8, 512, 0.95, 1.4),
        pytest.param(1, 128, 0.5, 0.98, marks=SOAK),
        pytest.param(1, 128, 0.95, 1.8, marks=SOAK),
        pytest.param(8, 512, 0.5, 0.98, marks=SOAK),
        pytest.param(8, 512, 0.7, 0.97, marks=SOAK),
        pytest.param(8, 512, 0.8, 0.98, marks=SOAK),
        pytest.param(64, 200, 0.0, 0.98, marks=SOAK),
        pytest.param(64, 200, 0.5, 0.98, marks=SOAK),
        pytest.param(64, 200, 0.8, 0.98, marks=SOAK),
        # All drafts together would gain 5 %, and the draft model needs more for each prompt.
        pytest.param(64, 200, 0.95, 0.98, marks=SOAK),
    ],
)
def test_drafting_by_choice_is_hardly_slower_than_without_and_faster_where_it_pays(
    streams: int, prompt: int, acceptance: float, least: float
) -> None:
    plain = tokens_per_s(streams, prompt, acceptance, 0)
    assert tokens_per_s(streams, prompt, acceptance, 8) / plain > least


@pytest.mark.long
@pytest.mark.parametrize("streams", [8, pytest.param(64, marks=SOAK)])
@pytest.mark.parametrize("acceptance", [0.0, 0.9])
def test_rare_proposals_cost_little(streams: int, acceptance: float) -> None:
    """A row with drafts delays all rows without."""
    plain = tokens_per_s(streams, 200, acceptance, 0)
    assert tokens_per_s(streams, 200, acceptance, 8, RareProposer()) / plain > 0.96
