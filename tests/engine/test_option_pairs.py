"""Options start together: with the tokens of a run without them, or refused by both names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from forge.cli.options import ENGINE_OPTIONS, MODEL_OPTION, POLICY_OPTION, SERVE_OPTIONS
from tests.engine.option_groups import (
    BASE,
    GROUPS,
    HTTP_OPTIONS,
    POLICY_GROUPS,
    Outcome,
    PairRun,
    pairs_of,
)

SEED = 3
BY_NAME = {group.name: group for group in GROUPS}
ALL_PAIRS = {"hash": pairs_of([*GROUPS, *POLICY_GROUPS]), "tiny": pairs_of(GROUPS)}
"""Policies decide about blocks and rows only, so one model is enough for them."""


def print_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Print how many pairs started and which were refused: pytest -s shows it."""
    outcomes = list(outcomes)
    started = [each for each in outcomes if each.refusal is None]
    alone = sorted({each.alone for each in outcomes if each.alone is not None})
    together = [each for each in outcomes if each.refusal is not None and each.alone is None]
    print(f"\n{len(outcomes)} pairs: {len(started)} started, {len(together)} refused, the others")
    print(f"have a group that the model refuses alone, of {alone}")
    for each in together:
        print(f"  {each.first} + {each.second}: {each.refusal}")


def test_each_option_is_in_a_group() -> None:
    """Name a new option in a group of option_groups.py, or among those that no engine receives."""
    grouped = {name for group in (*GROUPS, *POLICY_GROUPS) for name in group.options}
    assert grouped == {each.name for each in (*ENGINE_OPTIONS, POLICY_OPTION)}
    assert grouped | HTTP_OPTIONS | {MODEL_OPTION.name} == {each.name for each in SERVE_OPTIONS}
    assert not grouped & HTTP_OPTIONS


@pytest.mark.parametrize(("first", "second"), [("disk", "ngram"), ("host", "draft")])
def test_speculation_and_host_memory_start_together(
    first: str, second: str, tmp_path: Path
) -> None:
    """The costs of drafts are measured on `tiny`, by an engine over another model."""
    outcome = PairRun("tiny", BASE, tmp_path).start(BY_NAME[first], BY_NAME[second])
    assert outcome == Outcome(first, second)


def test_drawn_pairs_start_or_are_refused_by_both_names(tmp_path: Path) -> None:
    run = PairRun("hash", BASE, tmp_path)
    drawn = random.Random(SEED).sample(ALL_PAIRS["hash"], 12)
    print_outcomes(run.start(*pair) for pair in drawn)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "part", "num_parts"), [("hash", 0, 1), *(("tiny", part, 4) for part in range(4))]
)
def test_all_pairs_start_or_are_refused_by_both_names(
    model: str, part: int, num_parts: int, tmp_path: Path
) -> None:
    run = PairRun(model, BASE, tmp_path)
    print_outcomes(run.start(*pair) for pair in ALL_PAIRS[model][part::num_parts])
