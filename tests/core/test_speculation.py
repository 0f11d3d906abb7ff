"""Speculative decoding in engines: the same tokens, or the same distribution, for any drafts.

Three kinds of proof. Under `coupled`, and for greedy requests, every output is the sequential
reference's. Under `rejection` every round is computed again from its seed by separate arithmetic,
and outputs of many seeds are compared with the distribution without drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, nan, sqrt
from random import Random
from typing import Any

import pytest

from forge.config import EngineConfig, Speculation, StepCosts
from forge.drafting import ModelDrafter
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.hash import HashModel
from forge.models.logits import LogitsModel
from forge.models.paged import FaultHooks
from forge.proposers import OracleProposer
from forge.request import FinishReason, Request, SamplingParams, Structure
from forge.sampling import (
    ACCEPT,
    DRAFT,
    PLAIN,
    RESIDUAL,
    draw_key,
    uniform,
)
from forge.seam import StepOutput, StepPlan
from forge.tokenizer import ByteTokenizer
from tests.core.reference import ALPHABET, compute_expected
from tests.core.speculation_reference import (
    GREEDY,
    LONG_SAMPLED,
    PROMPT,
    SHORT_SAMPLED,
    Logits,
    SpecRun,
    committed_rows,
    create_hash_pair,
    create_pair,
    engine_config,
    log_weights,
    prompts,
    run_requests,
)
from tests.core.worlds import (
    Chances,
    RandomWorld,
    RecordingModel,
    chain_of,
    check_choice,
    check_outcome,
    count_events,
    run_world,
)

# The behaviours of a round.


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_identical_draft_is_always_right_and_gives_k_plus_one_tokens_a_round(
    acceptance: str, temperature: float
) -> None:
    """The output is that of the target alone, in a fifth of the steps."""
    config = engine_config(4, speculation_fields={"acceptance": acceptance})
    params = replace(LONG_SAMPLED, temperature=temperature, max_tokens=21)
    done = run_requests(config, prompts(20, params), create_hash_pair(config))
    assert done.acceptance_rate == 1.0
    assert all(len(out.tokens) == len(row.drafts) + 1 for row, out in done.draft_rows)
    assert {len(out.tokens) for row, out in done.draft_rows} == {5}
    assert done.num_plans == 1 + 4, "the prompts, then 20 tokens by fives: one pass a round"
    if acceptance == "coupled" or not temperature:
        plain = engine_config(None)
        assert (
            done.tokens_by_choice
            == run_requests(plain, prompts(20, params), create_hash_pair(plain)).tokens_by_choice
        )


def test_a_draft_that_is_never_right_costs_no_token_and_gives_one_a_round() -> None:
    """At a wrong draft's position stands the target's token."""
    config = engine_config(3)
    done = run_requests(config, prompts(20, GREEDY), create_hash_pair(config, agreement=0.0))
    assert done.acceptance_rate == 0.0
    assert all(len(out.tokens) == 1 == len(out.verified) for _, out in done.draft_rows)
    plain = engine_config(None)
    assert (
        done.tokens_by_choice
        == run_requests(plain, prompts(20, GREEDY), create_hash_pair(plain)).tokens_by_choice
    )


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_better_the_draft_the_more_is_accepted(acceptance: str) -> None:
    """The acceptance rate goes from near none to all, and is over 0.2 for a good draft."""
    shares = []
    for agreement in (0.0, 0.3, 0.75, 1.0):
        config = engine_config(4, speculation_fields={"acceptance": acceptance})
        done = run_requests(
            config,
            prompts(50, replace(SHORT_SAMPLED, max_tokens=6), 8),
            create_hash_pair(config, agreement, vocab_size=8),
        )
        shares.append(done.acceptance_rate)
    assert shares == sorted(shares) and 0.0 <= shares[0] < shares[1] < shares[2] < shares[3] == 1.0
    assert shares[2] > 0.5


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_same_run_gives_the_same_tokens_and_the_same_acceptance(acceptance: str) -> None:
    """Two runs from the same seeds give equal tokens and equal acceptance rates."""
    config = engine_config(3, speculation_fields={"acceptance": acceptance}, depth=2)
    first, second = (
        run_requests(
            config, prompts(8, SHORT_SAMPLED), create_hash_pair(config, 0.6, seed_offset=1)
        )
        for _ in "ab"
    )
    assert first.tokens_by_choice == second.tokens_by_choice and first.log == second.log
    assert first.acceptance_rate == second.acceptance_rate


def test_a_plan_for_two_models_is_refused_by_one_alone() -> None:
    config = engine_config(2)
    model = create_pair(config, lambda context: [0.0] * 4, None, 4)
    with pytest.raises(InvalidConfig, match="this model has no draft"):
        run_requests(config, prompts(1, LONG_SAMPLED, 4), model)
    with pytest.raises(InvalidConfig, match="vocabulary"):
        sizes: Any = {"eos_token": 0, "num_blocks": 4, "block_size": 4}
        draft = LogitsModel(lambda context: [0.0] * 5, vocab_size=5, **sizes)
        LogitsModel(lambda context: [0.0] * 4, vocab_size=4, draft=draft, **sizes)


# Token for token.


REACHED = (
    *("preemptions", "prefix hits", "later chunks", "accepted drafts", "rejected drafts"),
    *("drafts and prompts", "rows of several k", "forks", "length", "eos"),
    *("depth 1", "depth 2", *(f"k {k}" for k in range(1, 9))),
)


def shared_prefix_world(
    seed: int, method: str, temperature: float, number: int = 30
) -> RandomWorld:
    """Return a world of `number` prompts with shared prefixes, whose pool is too small for all."""
    rng = Random(seed)
    size = rng.choice((1, 2, 3, 4, 8))
    vocab_size = 4 if method == "ngram" else 12
    prefix = rng.choices(range(vocab_size), k=12)
    requests = [
        Request(
            i,
            (*prefix[: rng.randint(0, 12)], rng.randrange(vocab_size)),
            SamplingParams(
                temperature=temperature,
                max_tokens=rng.randint(1, 14),
                ignore_eos=rng.random() < 0.6,
                seed=rng.choice((None, rng.getrandbits(60))),
                n=rng.choice((1, 1, 1, 3)),
                logprobs=rng.choice((None, None, 1)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
                frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            ),
        )
        for i in range(number)
    ]
    config = EngineConfig(
        num_blocks=-(-26 // size) + rng.randint(1, 2 + 80 // size),
        block_size=size,
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice((8, 11, 24, 200)),
        max_model_len=64,
        depth=1 + (seed + seed // 8) % 2,
        enable_prefix_caching=rng.random() < 0.7,
        speculation=Speculation(num_tokens=1 + seed % 8, method=method),
    )
    return RandomWorld(
        seed,
        config,
        tuple(requests),
        vocab_size,
        chances=Chances(submit=rng.choice((0.4, 0.8, 1.0))),
        agreement=rng.choice((0.0, 0.25, 0.6, 0.9, 1.0)),
    )


def check_worlds(worlds: Iterable[RandomWorld]) -> Counter[str]:
    """Check every output against the sequential reference, and count the cases."""
    counts: Counter[str] = Counter()
    for world in worlds:
        outcome = run_world(world, audited=world.seed % 5 == 0)
        counts += outcome.event_counts + check_outcome(outcome)
        assert world.config.speculation is not None
        counts[f"k {world.config.speculation.num_tokens}"] += 1
        counts[f"depth {world.config.depth}"] += 1
        counts["prompts"] += len(world.requests)
    print(dict(counts))
    return counts


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_drafts_change_no_token_of_a_greedy_or_a_seeded_output(
    method: str, temperature: float
) -> None:
    """All outputs of batched, chunked, preempted and forked prompts on cached prefixes."""
    first = int(temperature) * 96
    number = 16 if temperature else 24
    counts = check_worlds(
        shared_prefix_world(first + i, method, temperature, number) for i in range(8)
    )
    assert not [name for name in REACHED if not counts[name]]


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 11_000, 1_000))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_drafts_change_no_token_of_ten_thousand_prompts(
    method: str, temperature: float, first: int
) -> None:
    worlds = (shared_prefix_world(first + i, method, temperature, 50) for i in range(20))
    counts = check_worlds(worlds)
    assert counts["prompts"] == 1_000
    assert not [name for name in REACHED if not counts[name]]


def check_oracle(seed: int, acceptance: float, number: int) -> Counter[str]:
    """Check an oracle's drafts on small pools: every output is the recorded one."""
    world = shared_prefix_world(seed, "ngram", float(seed // 2 % 2), number)
    config = world.config
    model = HashModel(
        vocab_size=4, num_blocks=config.num_blocks, block_size=config.block_size, seed=seed
    )
    requests = [replace(r, params=replace(r.params, n=1)) for r in world.requests]
    outputs = {r.id: compute_expected(model, config, r) for r in requests}
    oracle = OracleProposer({i: want.tokens for i, want in outputs.items()}, acceptance, 4)
    done = run_requests(config, requests, model, oracle, audited=seed % 5 == 0)
    for request in requests:
        check_choice(done.choices[request.id, 0], outputs[request.id], f"{seed=} {request=}")
    return count_events(done.log) + Counter({f"depth {config.depth}": 1})


def test_an_oracles_drafts_right_or_wrong_change_no_token() -> None:
    counts: Counter[str] = Counter()
    for seed in range(12):
        counts += check_oracle(seed, (0.0, 0.5, 0.9, 1.0)[seed % 4], 20)
    wanted = ("preemptions", "prefix hits", "accepted drafts", "rejected drafts")
    assert not [name for name in (*wanted, "depth 1", "depth 2") if not counts[name]]


@pytest.mark.soak
def test_an_oracles_drafts_change_no_token_of_many_more_prompts() -> None:
    for seed in range(400):
        check_oracle(seed, (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)[seed % 6], 30)


# Known defects of other implementations, one by one.


UNLIKE_WEIGHTS = ((5, 3, 2, 0), (1, 3, 3, 3))


def run_unlike(k: int, params: SamplingParams, **numbers: Any) -> SpecRun:
    """Run rounds of two very different distributions, under `rejection`."""
    config = engine_config(k, speculation_fields={"acceptance": "rejection"}, **numbers)
    model = create_pair(
        config,
        lambda _: log_weights(*UNLIKE_WEIGHTS[0]),
        lambda _: log_weights(*UNLIKE_WEIGHTS[1]),
        4,
    )
    return run_requests(config, [Request(0, PROMPT, params)], model)


def test_a_draft_is_verified_against_the_law_it_was_drawn_from_and_not_as_certain() -> None:
    """The p and q of every draft are those of the two models, neither 0, 1 nor missing."""
    done, (p, q) = run_unlike(3, replace(LONG_SAMPLED, n=8)), UNLIKE_WEIGHTS
    judged = [each for _, out in done.draft_rows for each in out.verified]
    assert len(judged) > 100 and {each.token for each in judged} == {0, 1, 2, 3}
    for each in judged:
        assert each.p == pytest.approx(p[each.token] / 10)
        assert each.q == pytest.approx(q[each.token] / 10)


def test_a_proposed_draft_is_verified_as_certain() -> None:
    """A proposed draft is accepted with p; otherwise another token takes its position."""
    config = engine_config(2, speculation_fields={"acceptance": "rejection", "method": "ngram"})
    model = create_pair(config, lambda _: log_weights(5, 3, 2, 0), None, 4)
    done = run_requests(config, [Request(0, PROMPT, replace(LONG_SAMPLED, n=8))], model)
    judged = [each for _, out in done.draft_rows for each in out.verified]
    assert len(judged) > 50 and {each.q for each in judged} == {1.0}
    assert all(each.residual != each.token for each in judged)


def test_the_replacement_of_a_draft_is_drawn_from_the_residual() -> None:
    """Here max(0, p - q) is positive at token 0 alone: it replaces every rejected draft."""
    done = run_unlike(3, replace(LONG_SAMPLED, n=8))
    ends = [out.tokens[-1] for _, out in done.draft_rows if len(out.tokens) == len(out.verified)]
    assert len(ends) > 100 and set(ends) == {0}


def test_the_token_after_the_last_draft_is_compared_with_no_draft() -> None:
    """All drafts are right: the next token is any token of the target, 0 included."""
    config = engine_config(2, speculation_fields={"acceptance": "rejection"})
    model = create_pair(
        config, lambda _: log_weights(1, 1, 1, 1), lambda _: log_weights(1, 1, 1, 1), 4
    )
    done = run_requests(config, [Request(0, PROMPT, replace(LONG_SAMPLED, n=16))], model)
    assert all(len(out.tokens) == len(row.drafts) + 1 for row, out in done.draft_rows)
    assert {out.tokens[-1] for _, out in done.draft_rows} == {0, 1, 2, 3}


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_seeded_request_gives_the_same_tokens_in_a_batch_as_alone(
    acceptance: str,
) -> None:
    """Seed and position name its draws: earlier rows in the batch do not matter.

    With budget and blocks for all it has as many drafts in a batch as alone.
    """
    config = engine_config(3, speculation_fields={"acceptance": acceptance})
    seeded = [
        Request(100 + i, (3, i), replace(SHORT_SAMPLED, seed=77 + i // 2, n=2)) for i in range(4)
    ]
    others = [
        Request(i, tuple(range(1, 2 + i)), replace(SHORT_SAMPLED, temperature=t, max_tokens=5 + i))
        for i, t in enumerate((1.0, 0.0, 0.7, 1.0))
    ]
    mixed = [each for both in zip(others, seeded, strict=True) for each in both]
    together = run_requests(
        config, mixed, create_hash_pair(config, 0.5, seed_offset=1)
    ).tokens_by_choice
    for request in seeded:
        alone = run_requests(
            config, [request], create_hash_pair(config, 0.5, seed_offset=1)
        ).tokens_by_choice
        assert {key: together[key] for key in alone} == alone
    assert len(set(together.values())) == len(together), "no two of them are the same"


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_temperature_penalties_and_filters_change_target_and_draft_alike(acceptance: str) -> None:
    """An identical draft is always right, under any parameters: both models apply the same."""
    params = replace(
        LONG_SAMPLED,
        temperature=0.6,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        top_p=0.95,
        min_tokens=10,
        stop_token_ids=(2,),
        logit_bias={3: 2.0},
        max_tokens=20,
    )
    config = engine_config(3, speculation_fields={"acceptance": acceptance}, depth=2)
    requests = [replace(r, params=params) for r in prompts(8, params)]
    done = run_requests(config, requests, create_hash_pair(config))
    assert done.acceptance_rate == 1.0 and len(done.draft_rows) > 20
    if acceptance == "coupled":
        for request in requests:
            want = compute_expected(create_hash_pair(config), config, request)
            check_choice(done.choices[request.id, 0], want, f"{request}")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_penalties_count_every_token_that_was_accepted_and_none_that_was_not(
    method: str, depth: int
) -> None:
    """Plans are made ahead, and sequences without drafts share the steps."""
    costs = StepCosts(((1, 1.0), (64, 1.4)), ((1, 0.3), (64, 0.4))) if method == "draft" else None
    config = engine_config(
        3, speculation_fields={"method": method, "costs": costs}, depth=depth, num_blocks=128
    )
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.9,
        frequency_penalty=-0.6,
        temperature=0.7,
        max_tokens=30,
        ignore_eos=True,
    )
    requests = prompts(10, params, 6)
    model = create_hash_pair(config, 0.6, vocab_size=6)
    done = run_requests(config, requests, model, audited=True)
    for request in requests:
        check_choice(
            done.choices[request.id, 0], compute_expected(model, config, request), f"{request}"
        )
    lengths = {len(row.drafts) for row, _ in committed_rows(done.log)}
    assert len(lengths) > 1 and done.engine.scheduler.num_accepted_tokens > 10


def test_draws_of_different_purposes_have_different_keys() -> None:
    """I39: plain, draft, acceptance and residual draws, for each position and seed."""
    purposes = (PLAIN, DRAFT, ACCEPT, RESIDUAL)
    keys = {
        draw_key(seed, position, purpose)
        for seed in range(8)
        for position in range(300)
        for purpose in purposes
    }
    assert len(keys) == 8 * 300 * 4
    columns = [[uniform(draw_key(5, at, purpose), 0) for at in range(4000)] for purpose in purposes]
    for i, first in enumerate(columns):
        for second in columns[:i]:
            shift = [(x - 0.5) * (y - 0.5) * 12 for x, y in zip(first, second, strict=True)]
            assert abs(sum(shift)) / sqrt(4000) < 4, "correlated"


# Stops, structure, failures, blocks.


@pytest.mark.long
@pytest.mark.parametrize(
    "params",
    [
        {"stop": ("é", "ab")},
        {"stop": ("b", " a"), "min_tokens": 4},
        {"structure": Structure.regex("( |é){2,5}"), "ignore_eos": True},
        {"structure": Structure.regex("[ab]{0,4}é?"), "ignore_eos": False},
        {"ignore_eos": False},
        {"stop_token_ids": (98, 11), "min_tokens": 3, "logprobs": 2},
    ],
    ids=lambda params: " ".join(params),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_inside_an_accepted_run_ends_the_output_there(
    params: dict[str, Any], temperature: float
) -> None:
    """I37, I40: the oracle is always right, also past the output, so ends fall inside a round."""
    tokenizer = ByteTokenizer()
    likely = (*sorted(set(tokenizer.encode(ALPHABET))), tokenizer.eos_token)
    sizes: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "eos_token": tokenizer.eos_token}
    config = engine_config(5, block_size=2, num_blocks=300)
    model = HashModel(num_blocks=300, block_size=2, likely_tokens=likely, **sizes)
    given: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, **params}
    chosen = SamplingParams(max_tokens=24, **given)
    requests = [
        Request(i, tuple(tokenizer.encode("ab é"[i % 4] * (i + 1))), chosen) for i in range(12)
    ]
    want = {r.id: compute_expected(model, config, r, tokenizer=tokenizer) for r in requests}
    # The output if it went on: the recorded tokens, then the same again.
    oracle = OracleProposer({i: (*each.tokens, *likely) for i, each in want.items()}, 1.0, 257)
    done = run_requests(config, requests, model, oracle, tokenizer=tokenizer, audited=True)
    for request in requests:
        check_choice(done.choices[request.id, 0], want[request.id], f"{request}")
    assert done.engine.scheduler.num_accepted_tokens > (1 if "structure" in params else 10)
    if "structure" not in params:
        given_tokens = sum(len(out.tokens) for _, out in committed_rows(done.log))
        assert given_tokens > sum(len(each.tokens) for each in want.values()), "nothing was dropped"


def raise_fault(plan: StepPlan) -> Any:
    raise RuntimeError("no drafts")


def fail_every_third(plan: StepPlan) -> dict[int, str]:
    return {0: "broken"} if plan.step % 3 == 0 else {}


DRAFT_FAULTS = {
    "raises": FaultHooks(result=raise_fault),
    "refuses": FaultHooks(forward=raise_fault),
    "errs": FaultHooks(result=fail_every_third),
}
WRONG_LOGITS = {"nan": [nan] * 20, "ruled out": [-inf] * 20, "wide": [0.0] * 21}


@pytest.mark.parametrize("how", [*DRAFT_FAULTS, *WRONG_LOGITS, "no room"])
def test_a_draft_model_that_fails_costs_drafts_and_no_token(how: str) -> None:
    """I38: it raises, returns numbers that cannot be used, or has a block for two tokens."""
    spec = {"num_blocks": 1} if how == "no room" else {}
    config = engine_config(3, speculation_fields=spec, depth=2, num_blocks=128)
    model = create_hash_pair(config, 0.8, draft_faults=DRAFT_FAULTS.get(how, FaultHooks()))
    assert model._draft is not None
    if how in WRONG_LOGITS:
        right = model._draft._decoder._logits
        model._draft._decoder._logits = lambda c: WRONG_LOGITS[how] if len(c) % 5 == 0 else right(c)
    requests = prompts(8, replace(SHORT_SAMPLED, max_tokens=45))
    done = run_requests(config, requests, model, audited=True)
    for request in requests:
        check_choice(
            done.choices[request.id, 0], compute_expected(model, config, request), f"{request}"
        )
    undrafted = sum(len(e.undrafted) for e in done.log if isinstance(e, StepOutput))
    assert (undrafted > 0) != (how == "no room")
    if how in ("raises", "refuses", "no room"):
        assert done.engine.scheduler.num_draft_tokens == 0
    else:
        assert done.engine.scheduler.num_accepted_tokens > 0


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_draft_model_that_fails_for_one_row_leaves_the_drafts_before(acceptance: str) -> None:
    """The second draft is missing: the first is verified, and a plain token follows."""
    config = engine_config(3, speculation_fields={"acceptance": acceptance})
    model = create_hash_pair(config)
    assert model._draft is not None
    right = model._draft._decoder._logits
    model._draft._decoder._logits = lambda c: [nan] * 20 if len(c) == 5 else right(c)
    done = run_requests(config, [Request(0, (1, 2, 3), SHORT_SAMPLED)], model)
    row, out = done.draft_rows[0]
    assert row.start == 3 and len(row.drafts) == 3
    assert len(out.verified) == 1 and len(out.tokens) == 2


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_without_finite_logits_ends_that_request_and_no_other(
    acceptance: str, temperature: float
) -> None:
    """The failure follows a correct draft. At most the seven tokens before it are sent."""
    config = engine_config(4, speculation_fields={"acceptance": acceptance})

    def target(context: Sequence[int]) -> list[float]:
        return [nan] * 4 if context[0] == 3 and len(context) == 8 else log_weights(0, 3, 2, 1)

    model = create_pair(config, target, lambda _: log_weights(0, 3, 2, 1), 4)
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
    done = run_requests(config, [Request(i, (i,), params) for i in range(4)], model)
    assert [done.choices[i, 0].finish for i in range(3)] == [FinishReason.LENGTH] * 3
    broken = done.choices[3, 0]
    assert broken.deltas[-1].error == "the model's logits are not finite: NaN"
    assert len(broken.tokens) <= 7


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_published_tokens_are_confirmed_and_in_their_block_in_both_pools(acceptance: str) -> None:
    """I35: the content of every cached block of target and draft, read from pages, each step."""
    config = engine_config(
        5,
        speculation_fields={"acceptance": acceptance, "num_blocks": 40},
        num_blocks=60,
        block_size=2,
        depth=2,
    )
    model = create_hash_pair(config, 0.6, seed_offset=int(acceptance == "rejection"))
    rng, prefix = Random(4), (5, 6, 7, 8, 9, 10)
    requests = [
        Request(
            i,
            (*prefix[: rng.randint(0, 6)], i % 20),
            replace(LONG_SAMPLED, max_tokens=rng.randint(2, 16)),
        )
        for i in range(30)
    ]
    sequences: dict[int, Any] = {}
    checked: Counter[str] = Counter()

    def check_published_blocks(engine: Engine) -> None:
        sequences.update(engine.scheduler.sequences)
        legal = {
            key: s.tokens[2 * index : 2 * index + 2]
            for s in sequences.values()
            for index, key in enumerate(chain_of(engine.scheduler, s)[1:])
        }
        drafting = engine.scheduler.drafter
        assert isinstance(drafting, ModelDrafter) and model._draft is not None
        for name, pool, pages in (
            ("target", engine.scheduler.pool, model._decoder.pages()),
            ("draft", drafting.pool, model._draft._decoder.pages()),
        ):
            for key, block in pool._block_by_hash.items():
                assert list(pages[block]) == legal[key], name
                checked[name] += 1

    done = run_requests(config, requests, model, audited=True, on_step=check_published_blocks)
    assert 0.1 < done.acceptance_rate < 0.95
    assert checked["target"] > 200 and checked["draft"] > 200
    hits = count_events(done.log)["prefix hits"]
    shared = [r for p in done.log if isinstance(p, StepPlan) for d in p.drafts for r in d.rows]
    assert hits > 0 and any(row.bind is not None and row.start for row in shared)


# How many drafts, in engines.


NEVER_PAYS = StepCosts(((1, 1.0), (64, 64.0)), ((1, 1.0), (64, 64.0)))
CHEAP_DRAFTS = StepCosts(((1, 1.0), (64, 1.0)), ((1, 0.1), (64, 0.1)))
COSTLY_DRAFTS = StepCosts(((1, 1.0), (64, 1.0)), ((1, 0.6), (64, 0.6)))


def counting_logits(context: Sequence[int]) -> list[float]:
    token = (context[-1] * 3 + len(context)) % 7 + 1
    return [1.0 if t == token else 0.0 for t in range(8)]


def wrong_between(first: int, end: int) -> Logits:
    """Return logits that are right except for contexts of `first` to `end` tokens."""

    def logits(context: Sequence[int]) -> list[float]:
        scores = counting_logits(context)
        return scores[-1:] + scores[:-1] if first <= len(context) < end else scores

    return logits


def run_with_costs(costs: StepCosts | None, depth: int, draft: Logits, length: int) -> SpecRun:
    config = engine_config(
        4, speculation_fields={"costs": costs}, depth=depth, max_model_len=length + 8, block_size=64
    )
    model = create_pair(config, counting_logits, draft, 8)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return run_requests(config, [Request(0, (1,), params)], model)


def test_drafts_stop_while_they_are_bad_and_return_when_they_are_good_again() -> None:
    """Bad from 200 to 900 tokens: at the end of that range almost nothing is drafted."""
    done = run_with_costs(CHEAP_DRAFTS, 2, wrong_between(200, 900), 2_200)
    at = [row.start for row, _ in done.draft_rows]
    assert sum(start < 200 for start in at) >= 35, "five tokens a round"
    assert sum(500 <= start < 900 for start in at) <= 40
    assert sum(1_950 <= start < 2_200 for start in at) >= 45, "drafts are back"
    tokens = done.tokens_by_choice[0, 0]
    assert tokens == run_with_costs(None, 1, counting_logits, 2_200).tokens_by_choice[0, 0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("costs", "attempts"), [(NEVER_PAYS, (0, 0)), (COSTLY_DRAFTS, (3, 40))])
def test_unprofitable_drafts_add_no_steps_except_trials(
    depth: int, costs: StepCosts, attempts: tuple[int, int]
) -> None:
    """Drafts are wrong. If right ones would not pay either, no draft is made."""
    done = run_with_costs(costs, depth, wrong_between(0, 9_999), 1_500)
    config = engine_config(None, depth=depth, max_model_len=1_508, block_size=64)
    params = SamplingParams(temperature=0.0, max_tokens=1_500, ignore_eos=True)
    plain = run_requests(
        config, [Request(0, (1,), params)], create_pair(config, counting_logits, None, 8)
    )
    assert done.tokens_by_choice == plain.tokens_by_choice
    assert attempts[0] <= len(done.draft_rows) <= attempts[1]
    late = [len(row.drafts) for row, _ in done.draft_rows if row.start > 100]
    assert set(late) <= {1} and len(late) * 0.6 <= 0.015 * 1_500, "a small share of the time"
    assert abs(done.num_plans - plain.num_plans) <= len(done.draft_rows)


def test_a_sequence_that_rests_runs_ahead_and_one_with_drafts_does_not() -> None:
    in_flight = Counter[int]()
    drafting = Counter[int]()
    for costs, num_plans in ((NEVER_PAYS, in_flight), (None, drafting)):
        config = engine_config(2, speculation_fields={"costs": costs}, depth=2)
        recorder = RecordingModel(create_pair(config, counting_logits, counting_logits, 8))
        engine = Engine(recorder, config)

        def count_plans_in_flight(
            plan: StepPlan, engine: Engine = engine, num_plans: Counter[int] = num_plans
        ) -> None:
            num_plans[len(engine.scheduler.ledger)] += 1
            first = engine.scheduler.ledger[0]
            if plan is not first and plan.rows[0].refs:
                assert not first.rows[0].drafts

        recorder.on_plan = count_plans_in_flight
        engine.submit(Request(0, (1,), replace(GREEDY, max_tokens=25)))
        while engine.has_work:
            engine.step()
    assert in_flight[2] >= 20 and drafting[2] == 0
