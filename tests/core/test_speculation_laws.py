"""Speculative decoding keeps the distribution: many seeds compared with runs without drafts.

Every figure is for fixed seeds, so a test that passes always does. The quick tests find large
biases; the soak draws millions, and finds small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from math import exp, sqrt
from random import Random
from typing import Any, NamedTuple

import pytest

from forge.acceptance import expected_tokens
from forge.proposers import OracleProposer
from forge.request import Request, SamplingParams
from forge.sampling import (
    filter_logits,
    process_logits,
)
from tests.core.speculation_reference import (
    GREEDY,
    PROMPT,
    Logits,
    SpecRun,
    check_ends,
    check_rounds,
    create_pair,
    engine_config,
    log_weights,
    run_requests,
)
from tests.core.test_sampling import p_value
from tests.core.worlds import RandomWorld, draw_world, run_world


def rejection_world(seed: int) -> RandomWorld:
    """Return the random world of an odd seed, under rejection sampling."""
    world = draw_world(2 * seed + 1)
    speculation = world.config.speculation
    assert speculation is not None
    rule = "coupled" if seed % 5 == 0 else "rejection"
    # Only proposers draft after a mask.
    method = speculation.method if world.tokenizer is None else "ngram"
    return world._replace(
        config=replace(
            world.config, speculation=replace(speculation, acceptance=rule, method=method)
        )
    )


def check_worlds(seeds: Iterable[int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_world(rejection_world(seed))
        try:
            counts += check_rounds(outcome) + check_ends(outcome)
        except BaseException as failure:
            failure.add_note(f"run_world(rejection_world({seed}))")
            raise
    print(dict(counts))
    return counts


ROUNDS = ("rounds", "replaced", "bonus", "guesses", "filtered", "penalised", "failed", "scored")
ENDS = ("eos", "stop id", "stop string", "length")


@pytest.mark.long
def test_every_round_of_a_random_world_follows_from_its_seed() -> None:
    """Drafts, p and q, accepted tokens, the replacement of the first rejected one, and logprobs.

    A draft is drawn from the same q against which it is verified; draws have separate keys.
    """
    counts = check_worlds(range(50))
    assert not [name for name in (*ROUNDS, *ENDS) if not counts[name]]


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_every_round_of_many_more_worlds_follows_from_its_seed(first: int) -> None:
    counts = check_worlds(range(first, first + 1_000))
    assert not [name for name in (*ROUNDS, *ENDS, "structure") if counts[name] < 5]
    assert counts["masked"]


# The same distribution.


class ModelPair(NamedTuple):
    """Two models of one vocabulary, each a function of the last token and the length."""

    vocab_size: int
    target: Logits
    draft: Logits
    params: SamplingParams


def random_logits(vocab_size: int, seed: int, spread: float) -> Logits:
    """Return logits that depend on the last token and on the length; another seed gives others."""
    rng = Random(seed)
    table = [[rng.uniform(0, spread) for _ in range(vocab_size)] for _ in range(vocab_size * 2)]
    return lambda context: table[context[-1] + vocab_size * (len(context) % 2)]


MODEL_PAIRS = {
    "plain": ModelPair(4, random_logits(4, 1, 2.5), random_logits(4, 2, 2.5), SamplingParams()),
    "filtered": ModelPair(
        8,
        random_logits(8, 3, 3.0),
        random_logits(8, 4, 3.0),
        SamplingParams(temperature=0.8, top_k=4, top_p=0.9, min_p=0.05),
    ),
    "penalised": ModelPair(
        4,
        random_logits(4, 5, 2.0),
        random_logits(4, 6, 2.0),
        SamplingParams(
            temperature=1.3,
            repetition_penalty=1.5,
            presence_penalty=0.6,
            frequency_penalty=-0.4,
            logit_bias={1: 0.7, 2: -0.5},
        ),
    ),
}


def output_distribution(scene: ModelPair, length: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of `length` tokens, by plain draws."""
    found = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, share in found.items():
            logits = scene.target([*PROMPT, *output])
            remaining = filter_logits(
                process_logits(logits, scene.params, PROMPT, output, ()), scene.params
            )
            total = sum(exp(c.logit) for c in remaining)
            for c in remaining:
                longer[*output, c.token] = share * exp(c.logit) / total
        found = longer
    return found


def p_value_of(samples: Counter[Any], law: dict[Any, float]) -> float:
    """Return the p-value of the draws under the distribution; rare cells are merged."""
    total = samples.total()
    assert samples.keys() <= law.keys(), "something impossible was drawn"
    cells = [cell for cell, share in law.items() if share * total >= 8]
    rest = 1.0 - sum(law[cell] for cell in cells)
    observed, shares = [samples[cell] for cell in cells], [law[cell] for cell in cells]
    if rest * total >= 5:
        observed.append(total - sum(observed))
        shares.append(rest)
    elif rest > 1e-9:
        observed[-1] += total - sum(observed)
        shares[-1] += rest
    return p_value(observed, shares)


def check_distribution(name: str, acceptance: str, batches: int, k: int) -> None:
    """Check the distribution of outputs: 4 tokens, the first a plain draw; 128 choices a batch."""
    scene = MODEL_PAIRS[name]
    config = engine_config(k, speculation_fields={"acceptance": acceptance}, block_size=16, depth=2)
    params = replace(scene.params, max_tokens=4, ignore_eos=True, n=128)
    law, drawn = output_distribution(scene, 4), Counter[tuple[int, ...]]()
    model = create_pair(config, scene.target, scene.draft, scene.vocab_size)
    for start in range(0, batches, 16):
        requests = [Request(i, PROMPT, params) for i in range(start, min(batches, start + 16))]
        done = run_requests(config, requests, model)
        drawn.update(done.tokens_by_choice.values())
        assert 0.2 < done.acceptance_rate < 0.97, "drafts are neither useless nor perfect"
    assert drawn.total() == 128 * batches
    for length in (1, 2, 4):  # the first token alone, then the second given the first, ...
        shorter, part = Counter[tuple[int, ...]](), dict[tuple[int, ...], float]()
        for output, number in drawn.items():
            shorter[output[:length]] += number
        for output, share in law.items():
            part[output[:length]] = part.get(output[:length], 0.0) + share
        found = p_value_of(shorter, part)
        assert found > 1e-4, f"the first {length} tokens: p = {found}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "acceptance"),
    [("plain", "rejection"), ("filtered", "rejection"), ("penalised", "rejection")],
)
def test_outputs_have_the_law_of_plain_decoding(name: str, acceptance: str) -> None:
    check_distribution(name, acceptance, batches=10, k=2)


@pytest.mark.soak
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("name", MODEL_PAIRS)
def test_a_million_tokens_have_the_law_of_plain_decoding(
    name: str, acceptance: str, k: int
) -> None:
    """18 cases of 20,480 outputs of 4 tokens."""
    check_distribution(name, acceptance, batches=160, k=k)


PAIRS = {
    "overlapping": ((8, 4, 2, 1, 1, 0, 0, 0), (1, 2, 4, 8, 1, 1, 1, 1)),
    "q is 0 where p is not": ((1, 1, 1, 1, 4, 4, 2, 2), (1, 3, 0, 0, 0, 4, 0, 8)),
    "disjoint": ((5, 0, 3, 0, 2, 0, 1, 0), (0, 1, 0, 1, 0, 1, 0, 1)),
    "one-hot q": ((4, 3, 2, 1, 1, 1, 1, 1), (0, 1, 0, 0, 0, 0, 0, 0)),
    "equal": ((8, 4, 2, 1, 1, 8, 4, 4), (8, 4, 2, 1, 1, 8, 4, 4)),
    "one-hot p": ((0, 0, 1, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1)),
}


def random_pairs() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the pairs above and others, 20 in all."""
    rng, found = Random(16), dict(PAIRS)
    for index in range(20 - len(PAIRS)):
        weights = [rng.choices((0, 1, 1, 2, 3, 5, 8), k=8) for _ in "pq"]
        for each in weights:
            each[rng.randrange(8)] += 1
        found[f"pair {index}"] = tuple(weights[0]), tuple(weights[1])
    return found


def check_pair(p: tuple[int, ...], q: tuple[int, ...], k: int, length: int, rows: int) -> None:
    """Check tokens, drafts, acceptance and tokens per round of two context-free distributions."""
    config = engine_config(
        k,
        speculation_fields={"acceptance": "rejection"},
        block_size=64,
        max_num_seqs=128,
        max_model_len=length + 8,
    )
    model = create_pair(config, lambda _: log_weights(*p), lambda _: log_weights(*q), 8)
    params = SamplingParams(max_tokens=length, ignore_eos=True, n=rows)
    done = run_requests(config, [Request(0, PROMPT, params)], model)
    target = {t: weight / sum(p) for t, weight in enumerate(p) if weight}
    draft = {t: weight / sum(q) for t, weight in enumerate(q) if weight}
    tokens, neighbours = Counter[int](), Counter[tuple[int, int]]()
    for output in done.tokens_by_choice.values():
        tokens.update(output[1:])
        neighbours.update(zip(output[1::2], output[2::2], strict=False))
    share = sum(min(x, draft.get(token, 0.0)) for token, x in target.items())
    assert set(tokens) <= set(target)
    if len(target) > 1:
        assert p_value_of(tokens, target) > 1e-4
        law = {(a, b): target[a] * target[b] for a, b in product(target, repeat=2)}
        assert p_value_of(neighbours, law) > 1e-4
    first = Counter(out.verified[0].token for _, out in done.draft_rows)
    assert set(first) <= set(draft) and (len(draft) == 1 or p_value_of(first, draft) > 1e-4)
    verified = done.engine.scheduler.num_draft_tokens
    sigma = sqrt(share * (1 - share) / verified)
    assert abs(done.acceptance_rate - share) <= 3 * sigma + 1e-12
    check_mean(done, share, k)


def check_mean(num_tokens_by_round: SpecRun, share: float, k: int) -> None:
    """Check that whole rounds have (1 - a^(k + 1)) / (1 - a) tokens on average, within 3 sigma."""
    lengths = [
        len(out.tokens) for row, out in num_tokens_by_round.draft_rows if len(row.drafts) == k
    ]
    chances = [share**n * (1 - share) for n in range(k)] + [share**k]
    mean = sum((n + 1) * chance for n, chance in enumerate(chances))
    assert mean == pytest.approx(expected_tokens(share, k))
    spread = sum((n + 1 - mean) ** 2 * chance for n, chance in enumerate(chances))
    found = sum(lengths) / len(lengths)
    assert abs(found - mean) <= 3 * sqrt(spread / len(lengths)) + 1e-9, (found, mean)


@pytest.mark.long
@pytest.mark.parametrize("name", list(PAIRS)[:4])
def test_tokens_drafts_and_acceptance_have_their_laws(name: str) -> None:
    """Tokens follow p, drafts the q of their verification, and sum(min(p, q)) is accepted."""
    check_pair(*PAIRS[name], k=3, length=40, rows=32)


@pytest.mark.soak
@pytest.mark.parametrize("name", random_pairs())
def test_a_million_tokens_of_twenty_pairs_have_their_laws(name: str) -> None:
    check_pair(*random_pairs()[name], k=1 + len(name) % 4, length=400, rows=128)


def check_oracle_rounds(share: float, k: int, length: int) -> None:
    config = engine_config(k, max_model_len=length + 8, block_size=64)
    params = replace(GREEDY, max_tokens=length)
    requests = [Request(i, (i % 8,), params) for i in range(16)]
    model = create_pair(config, random_logits(8, 7, 3.0), None, 8)
    recorded = run_requests(
        engine_config(None, max_model_len=length + 8, block_size=64), requests, model
    )
    outputs = {i: tokens for (i, _), tokens in recorded.tokens_by_choice.items()}
    model = create_pair(config, random_logits(8, 7, 3.0), None, 8)
    done = run_requests(config, requests, model, OracleProposer(outputs, share, 8, seed=k))
    assert done.tokens_by_choice == recorded.tokens_by_choice
    sigma = sqrt(share * (1 - share) / done.engine.scheduler.num_draft_tokens)
    assert abs(done.acceptance_rate - share) <= 3 * sigma
    check_mean(done, share, k)


@pytest.mark.parametrize(("share", "k"), [(0.3, 2), (0.6, 4), (0.9, 8)])
def test_a_round_of_an_oracle_has_the_mean_of_the_formula(share: float, k: int) -> None:
    check_oracle_rounds(share, k, 120)


@pytest.mark.soak
@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.98])
def test_rounds_of_any_oracle_have_the_mean_of_the_formula(share: float, k: int) -> None:
    check_oracle_rounds(share, k, 2_000)


@pytest.mark.long
def test_requests_without_seeds_keep_their_distribution_alongside_seeded_ones() -> None:
    """The unseeded half keeps its distribution while other rows have seeds."""
    config = engine_config(2, speculation_fields={"acceptance": "rejection"}, block_size=64)
    model = create_pair(
        config, lambda _: log_weights(5, 3, 2, 0), lambda _: log_weights(1, 3, 3, 3), 4
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    done = run_requests(
        config,
        [
            Request(i, PROMPT, replace(params, seed=None if i % 2 else 5 + i // 32))
            for i in range(64)
        ],
        model,
    )
    drawn = Counter(t for (i, _), output in done.tokens_by_choice.items() if i % 2 for t in output)
    assert p_value_of(drawn, {0: 0.5, 1: 0.3, 2: 0.2}) > 1e-4
    same = [done.tokens_by_choice[i, 0] for i in range(0, 32, 2)]
    assert len(set(same)) == 1, "one seed, one output"
