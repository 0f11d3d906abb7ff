"""Speculating engines run to the end, and every round of a recorded run computed again.

Owns pairs of models and the arithmetic of a round, written a second time. It shares with the engine
the models' logits, the filters of forge.sampling and the names of draws, nothing of
forge.acceptance, forge.drafting or forge.scheduler.

    log of plans and outputs ──► per row: context, drafts from q, p, u, replacement ──► equal
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import exp, inf, log
from random import Random
from typing import Any, NamedTuple

import pytest

from forge.config import EngineConfig, Speculation
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.models.paged import FaultHooks
from forge.proposers import Proposer
from forge.request import FinishReason, Request, SamplingParams
from forge.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    choice_seed,
    draw_key,
    filter_logits,
    gumbel,
    mix,
    output_logprob,
    process_logits,
    sample_token,
    uniform,
)
from forge.seam import Row, RowOutput, StepOutput, StepPlan
from forge.tokenizer import Tokenizer
from tests.core import reference
from tests.core.worlds import (
    ChoiceResult,
    PlanAudit,
    RecordingModel,
    WorldOutcome,
    audit,
    audit_drained,
    has_only_distribution,
)

Logits = Callable[[Sequence[int]], Sequence[float]]
LONG_SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = (1, 2)
SHORT_SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True)


class SpecRun(NamedTuple):
    """An engine that has served its requests, with its log."""

    engine: Engine
    choices: dict[tuple[int, int], ChoiceResult]
    log: list[StepPlan | StepOutput]

    @property
    def tokens_by_choice(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {key: choice.tokens for key, choice in self.choices.items()}

    @property
    def draft_rows(self) -> list[tuple[Row, RowOutput]]:
        """Return the rows with drafts, each with its output."""
        return [(row, out) for row, out in committed_rows(self.log) if row.drafts and out.tokens]

    @property
    def num_plans(self) -> int:
        return sum(isinstance(entry, StepPlan) for entry in self.log)

    @property
    def acceptance_rate(self) -> float:
        """Return accepted drafts as a share of all verified drafts."""
        return self.engine.scheduler.num_accepted_tokens / self.engine.scheduler.num_draft_tokens


def committed_rows(log: Iterable[StepPlan | StepOutput]) -> list[tuple[Row, RowOutput]]:
    """Return every row whose result was read, in the order of results."""
    plans: dict[int, StepPlan] = {}
    found: list[tuple[Row, RowOutput]] = []
    for entry in log:
        if isinstance(entry, StepPlan):
            plans[entry.step] = entry
        else:
            found += zip(plans[entry.step].rows, entry.rows, strict=True)
    return found


def engine_config(
    k: int | None, *, speculation_fields: dict[str, Any] | None = None, **numbers: Any
) -> EngineConfig:
    """Return a configuration with room for all requests, and k drafts per row; None: no drafts."""
    numbers = {"num_blocks": 1024, "block_size": 4, "max_num_seqs": 128} | numbers
    speculation = None if k is None else Speculation(num_tokens=k, **(speculation_fields or {}))
    return EngineConfig(
        **{"max_num_batched_tokens": 4096, "max_model_len": 512, **numbers},
        speculation=speculation,
    )


def run_requests(
    config: EngineConfig,
    requests: Iterable[Request],
    model: LogitsModel,
    proposer: Proposer | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    audited: bool = False,
    on_step: Callable[[Engine], None] = lambda engine: None,
) -> SpecRun:
    """Serve all requests at once, to the end."""
    recorder = RecordingModel(model)
    engine = Engine(recorder, config, tokenizer, proposer=proposer)
    choices: dict[tuple[int, int], ChoiceResult] = {}
    if audited:
        recorder.on_plan = PlanAudit(engine.scheduler)
    for request in requests:
        engine.submit(request)
        choices |= {(request.id, index): ChoiceResult() for index in range(request.params.n)}
    while engine.has_work:
        for delta in engine.step():
            choices[delta.request_id, delta.choice].add(delta)
        if audited:
            audit(engine)
        on_step(engine)
    if recorder.failure is not None:
        raise recorder.failure
    audit_drained(engine)
    return SpecRun(engine, choices, recorder.log)


def create_pair(
    config: EngineConfig, target: Logits, draft: Logits | None, vocab_size: int
) -> LogitsModel:
    """Return a target and its draft model from two functions; token 0 is the end."""

    def create_model(logits: Logits, draft: LogitsModel | None = None) -> LogitsModel:
        return LogitsModel(
            logits,
            vocab_size=vocab_size,
            eos_token=0,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            draft=draft,
        )

    return create_model(target, None if draft is None else create_model(draft))


def create_hash_pair(
    config: EngineConfig,
    agreement: float = 1.0,
    seed: int = 0,
    seed_offset: int = 0,
    **options: Any,
) -> HashModel:
    """Return a HashModel whose draft agrees on that share of contexts."""
    options = {"vocab_size": 20, **options}
    faults = options.pop("draft_faults", FaultHooks())
    sizes: dict[str, Any] = {"block_size": config.block_size}
    speculation = config.speculation
    blocks = (speculation.num_blocks if speculation else None) or config.num_blocks
    draft = HashModel(
        seed=seed + seed_offset,
        agreement=agreement,
        faults=faults,
        num_blocks=blocks,
        **sizes,
        **options,
    )
    return HashModel(seed=seed, num_blocks=config.num_blocks, draft=draft, **sizes, **options)


def prompts(number: int, params: SamplingParams, vocab_size: int = 20) -> list[Request]:
    rng = Random(number)
    return [
        Request(i, tuple(rng.choices(range(vocab_size), k=rng.randint(1, 9))), params)
        for i in range(number)
    ]


def log_weights(*weights: int) -> list[float]:
    return [log(weight) if weight else -inf for weight in weights]


# Every round computed again from its seed.


class SequenceState(NamedTuple):
    """Sampling parameters and tokens of one sequence."""

    params: SamplingParams
    prompt_len: int
    seed: int
    end_ids: tuple[int, ...]
    tokens: list[int]

    def distribution(
        self, model: HashModel, context: Sequence[int], mask: bytes | None
    ) -> dict[int, float]:
        """Return the probability of each possible token after the context."""
        logits = self.adjusted(model, context, mask)
        remaining = filter_logits(logits, self.params)
        total = sum(exp(c.logit) for c in remaining)
        return {c.token: exp(c.logit) / total for c in remaining}

    def adjusted(self, model: HashModel, context: Sequence[int], mask: bytes | None) -> list[float]:
        return process_logits(
            model.context_logits(context),
            self.params,
            context[: self.prompt_len],
            context[self.prompt_len :],
            self.end_ids,
            mask,
        )

    def sample_plain(self, model: HashModel, context: Sequence[int], mask: bytes | None) -> int:
        """Return the draw after the context without drafts."""
        logits = self.adjusted(model, context, mask)
        return sample_token(logits, self.params, self.seed, len(context))

    def sample(self, law: dict[int, float], position: int, purpose: int) -> int:
        """Draw a token from the distribution, with the noise of this position and purpose."""
        key = draw_key(self.seed, position, purpose)
        return max(law, key=lambda token: log(law[token]) + gumbel(key, token))


class ExpectedRound(NamedTuple):
    """Expected output of a round."""

    tokens: list[int]
    drafts: list[int]
    probabilities: list[tuple[float, float]]


def replay_round(
    state: SequenceState,
    row: Row,
    num_drafts: int,
    target: HashModel,
    draft: HashModel | None,
    rule: str,
) -> ExpectedRound:
    """Compute the row's round: draw the drafts, then accept or replace each, in order."""
    sampled = rule == "rejection" and not state.params.greedy
    context = state.tokens[: row.end - len(row.drafts)]
    tokens, drafts, shares = list[int](), list[int](), list[tuple[float, float]]()
    for index, draft_ref in enumerate(row.drafts[:num_drafts]):
        position, mask = len(context), row.masks[index] if row.masks else None
        if isinstance(draft_ref, int):
            draft_token, q = draft_ref, {draft_ref: 1.0}
        else:
            assert draft is not None
            q = state.distribution(draft, context, None) if sampled else {}
            draft_token = (
                state.sample(q, position, DRAFT)
                if sampled
                else state.sample_plain(draft, context, None)
            )
        drafts.append(draft_token)
        if not sampled:
            tokens.append(state.sample_plain(target, context, mask))
        else:
            p = state.distribution(target, context, mask)
            share = p.get(draft_token, 0.0)
            shares.append((share, q[draft_token]))
            if uniform(draw_key(state.seed, position, ACCEPT), 0) < share / q[draft_token]:
                tokens.append(draft_token)
            else:
                residual = {token: x - q.get(token, 0.0) for token, x in p.items()}
                residual = {token: x for token, x in residual.items() if x > 0}
                tokens.append(state.sample(residual, position, RESIDUAL))
        if tokens[-1] != draft_token:
            return ExpectedRound(tokens, drafts, shares)
        context.append(draft_token)
    mask = row.masks[len(drafts)] if row.masks else None
    tokens.append(state.sample_plain(target, context, mask))
    return ExpectedRound(tokens, drafts, shares)


def check_rounds(outcome: WorldOutcome) -> Counter[str]:
    """Check that every row of the log follows from its seed, and count the cases."""
    world, model, counts = outcome.world, outcome.model, Counter[str]()
    speculation = world.config.speculation
    assert speculation is not None
    draft = model._draft
    assert draft is None or isinstance(draft, HashModel)
    states = [
        SequenceState(
            request.params,
            len(request.prompt),
            choice_seed(
                request.params.seed
                if request.params.seed is not None
                else mix(world.config.seed ^ mix(request.id)),
                index,
            ),
            () if request.params.ignore_eos else (world.eos_token, *world.config.end_ids),
            list(request.prompt),
        )
        for request in world.requests
        for index in range(request.params.n)
    ]
    undrafted = {o.step: o.undrafted for o in outcome.log if isinstance(o, StepOutput)}
    plans = {each.step: each for each in outcome.log if isinstance(each, StepPlan)}
    steps = {id(row): plan.step for plan in plans.values() for row in plan.rows}
    late_masks = {
        id(plans[plan.step - 1].rows[late.row]): (late.mask,)
        for plan in plans.values()
        for late in plan.late_masks
    }
    for row, out in committed_rows(outcome.log):
        state = states[row.seq_id]
        if not out.tokens or len(state.tokens) < row.end - len(row.drafts):
            continue  # nothing was sampled, or an earlier row lost its result
        failed = row.seq_id in undrafted[steps[id(row)]]
        num_drafts = len(out.verified) if failed else len(row.drafts)
        masked = row._replace(masks=late_masks.get(id(row), row.masks))
        expected = replay_round(state, masked, num_drafts, model, draft, speculation.acceptance)
        where = f"world {world.seed}: {row}"
        assert list(out.tokens) == expected.tokens, where
        assert [judged.token for judged in out.verified] == expected.drafts[
            : len(expected.tokens)
        ], where
        found = [(v.p, v.q) for v in out.verified if v.p is not None and v.q is not None]
        assert len(found) == len(expected.probabilities), where
        for got, share in zip(found, expected.probabilities, strict=True):
            assert got == pytest.approx(share, abs=1e-12), where
        start = row.end - len(row.drafts)
        state.tokens[start:] = out.tokens
        scores = [
            output_logprob(model.context_logits(state.tokens[:at]), token, state.params)
            for at, token in enumerate(out.tokens, start)
            if state.params.logprobs is not None
        ]
        assert list(out.logprobs) == scores, where
        counts["rounds"] += bool(row.drafts)
        counts["replaced"] += len(out.tokens) == len(out.verified) > 0
        counts["bonus"] += len(out.tokens) > len(out.verified) > 0
        counts["guesses"] += any(isinstance(named, int) for named in row.drafts)
        counts["filtered"] += bool(row.drafts) and state.params.top_p < 1.0
        counts["penalised"] += bool(row.drafts) and state.params.has_penalties
        counts["masked"] += bool(row.drafts and row.masks)
        counts["late masks"] += id(row) in late_masks
        counts["failed"] += failed
        counts["scored"] += bool(scores) and len(out.tokens) > 1
    return counts


def check_ends(outcome: WorldOutcome) -> Counter[str]:
    """Check that every choice that was not aborted ends at its first possible end."""
    world, counts = outcome.world, Counter[str]()
    for request in world.requests:
        end_ids = () if request.params.ignore_eos else (world.eos_token, *world.config.end_ids)
        for index in range(request.params.n):
            choice = outcome.choices[request.id, index]
            if choice.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                continue
            tokens, limit = list(choice.tokens), request.params.max_tokens
            if limit is None:
                limit = outcome.max_len_by_request[request.id] - len(request.prompt)
            reasons = [
                reference._end_reason(request, tokens[:n], end_ids, world.tokenizer)
                for n in range(1, len(tokens) + 1)
            ]
            assert not any(reasons[:-1]) and len(tokens) <= limit
            why = reasons[-1] if reasons and reasons[-1] else "length"
            assert (choice.finish is FinishReason.LENGTH) == (why == "length")
            assert why != "length" or len(tokens) == limit
            assert len(choice.logprobs) in (0, len(tokens))
            counts[why] += has_only_distribution(world, request)
    return counts
