"""Small real objects for tests. Each builder has arguments for what a test varies.

    s = scheduler(blocks=4, block_size=4)      plan, deltas = step(s)      literal answers
    s.add(request(0, prompt=range(3)))         served = serve(s, model)    a real model, to the end

The expected outputs of a request are in tests/core/reference.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from forge.blocks import BlockPool
from forge.config import EngineConfig
from forge.models.hash import HashModel
from forge.policy import FCFS, Candidate, Policy, PolicyContext
from forge.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from forge.scheduler import Scheduler
from forge.seam import RowOutput, StepOutput, StepPlan
from forge.sequence import GrammarMatcher, StopChecker, no_matcher, no_stop_checker
from forge.sessions import Session


def _no_cached_tokens(candidate: Candidate) -> int:
    return 0


def _no_own_blocks(session: Session) -> int:
    return 0


NO_CONTEXT = PolicyContext(0, 8, 4, 8, 4, (), {}, None, _no_cached_tokens, _no_own_blocks, 0)
"""The context of a decision before anything runs: 8 free blocks of 4 tokens, no session."""

VOCAB = 257
EOS = 0


def config(
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 8192,
    **options: Any,
) -> EngineConfig:
    """Return the configuration of a small engine; `options` are EngineConfig's fields."""
    return EngineConfig(
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **options,
    )


def scheduler(
    *,
    policy: Policy = FCFS,
    stop_checker: Callable[[Request], StopChecker | None] = no_stop_checker,
    matcher: Callable[[SamplingParams], GrammarMatcher | None] = no_matcher,
    **numbers: Any,
) -> Scheduler:
    """Return a scheduler for a model with 257 tokens, of which token 0 is the end token."""
    return Scheduler(config(**numbers), VOCAB, (EOS,), policy, stop_checker, matcher)


def request(
    id: int,
    prompt: Iterable[int],
    *,
    priority: int = 0,
    cache_salt: str = "",
    **params: Any,
) -> Request:
    """Return a greedy request; `params` are SamplingParams' fields."""
    chosen = SamplingParams(**{"temperature": 0.0, **params})
    return Request(id, tuple(prompt), chosen, priority, cache_salt)


def hash_model(s: Scheduler, **options: Any) -> HashModel:
    """Return a HashModel with the scheduler's geometry."""
    return HashModel(num_blocks=s.pool.num_blocks, block_size=s.pool.block_size, **options)


def create_output(plan: StepPlan, token: int = 7) -> StepOutput:
    """Return the output of a plan in which every row that samples gets `token`."""
    return StepOutput(plan.step, tuple(RowOutput((token,) * row.num_samples) for row in plan.rows))


def next_plan(s: Scheduler) -> StepPlan:
    """Return the next plan, and assert that there is one."""
    plan = s.schedule()
    assert plan is not None
    return plan


def step(s: Scheduler, token: int = 7) -> tuple[StepPlan, list[Delta]]:
    """Plan and commit one step in which every sample is `token`."""
    plan = next_plan(s)
    return plan, s.commit(plan, create_output(plan, token))


def row_spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (sequence, first position, end) of each row."""
    return [(row.seq_id, row.start, row.end) for row in plan.rows]


def check_block_pool(pool: BlockPool) -> None:
    """Check that each block is in one list, reference counts agree, and hashes are unique."""
    table_blocks = [block for table in pool.tables.values() for block in table.blocks]
    counts = [table_blocks.count(block) for block in range(pool.num_blocks)]
    assert pool._ref_counts == counts
    cached = [*pool._cached_blocks, *pool._protected_blocks]
    assert sorted([*pool._empty_blocks, *cached, *set(table_blocks)]) == list(
        range(pool.num_blocks)
    )
    assert {block: key for key, block in pool._block_by_hash.items()} == pool._hash_by_block
    assert not set(pool._empty_blocks) & set(pool._hash_by_block)
    assert set(cached) <= set(pool._hash_by_block)


def snapshot(pool: BlockPool) -> dict[str, str]:
    """Return the full state of the pool, orders included, as comparable text."""
    return {name: repr(value) for name, value in vars(pool).items()}


@dataclass
class ServedRequests:
    """Tokens and endings by (request, choice), and every plan of a run."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[tuple[int, int], list[TokenLogprob]] = field(default_factory=dict)
    finish: dict[tuple[int, int], FinishReason] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def add(self, deltas: list[Delta]) -> None:
        """Add deltas, and check that a choice gains nothing after its end."""
        for delta in deltas:
            key = (delta.request_id, delta.choice)
            assert key not in self.finish, f"{delta} came after the end"
            self.tokens.setdefault(key, []).extend(delta.tokens)
            self.prompt_logprobs.setdefault(key, []).extend(delta.prompt_logprobs)
            if delta.finish is not None:
                self.finish[key] = delta.finish

    @property
    def num_preemptions(self) -> int:
        """Return the number of preemptions in all plans."""
        return sum(len(plan.preempted) for plan in self.plans)


def serve(s: Scheduler, m: HashModel, *, depth: int = 1, max_steps: int = 2000) -> ServedRequests:
    """Plan, run and commit until every request has ended, with up to `depth` plans in flight."""
    result = ServedRequests()
    in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
    while s.has_work:
        assert len(result.plans) < max_steps, "the run does not end"
        plan = s.schedule()
        if plan is not None:
            result.plans.append(plan)
            in_flight.append((plan, m.forward(plan).result()))
        if plan is None or len(in_flight) >= depth:
            result.add(s.commit(*in_flight.popleft()))
        check_block_pool(s.pool)
    return result
