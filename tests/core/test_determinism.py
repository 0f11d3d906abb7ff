"""The same seed gives the same plans: byte for byte, in any process, under any hash seed.

A plan is a value that can be printed, pasted and run again. It is all that a model receives, so a
single wrong block id in it must show in the tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

import forge.request
import forge.seam
from forge.config import EngineConfig
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.request import Request, SamplingParams
from forge.seam import Model, PendingStep, Row, StepOutput, StepPlan, TokenRef
from tests.core.reference import compute_expected
from tests.core.worlds import (
    ChoiceResult,
    RandomWorld,
    WorldOutcome,
    build_engine,
    draw_world,
    run_world,
)

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(16)
LATE_SEED = 19
"""World in which a mask comes in the plan after that of its row."""


def list_plans(outcome: WorldOutcome) -> list[StepPlan]:
    return [entry for entry in outcome.log if isinstance(entry, StepPlan)]


@cache
def plan_log(seed: int) -> str:
    """Return one line per plan and per result of the world, as text."""
    return "\n".join(map(repr, run_world(draw_world(seed)).log))


# The same plans.


def digest_of_all_plan_logs() -> str:
    digest = sha256()
    for seed in SEEDS:
        digest.update(plan_log(seed).encode())
    return digest.hexdigest()


PRINT_DIGEST = "from tests.core.test_determinism import *; print(digest_of_all_plan_logs())"


@pytest.mark.long
@pytest.mark.parametrize(
    "hash_seed",
    ["1", *(pytest.param(each, marks=pytest.mark.long) for each in ("0", "random"))],
)
def test_plan_logs_are_the_same_bytes_in_another_process(hash_seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == digest_of_all_plan_logs()


def test_another_seed_gives_other_plans() -> None:
    """The comparison above would find a difference."""
    assert len({plan_log(seed) for seed in SEEDS}) == len(SEEDS)


def test_a_printed_plan_is_the_plan_when_pasted() -> None:
    """`repr` of a plan, evaluated with names of forge.seam and forge.request, is an equal plan."""
    names = {**vars(forge.seam), **vars(forge.request)}
    field_names = set()
    for seed in (*SEEDS, LATE_SEED):
        for plan in list_plans(run_world(draw_world(seed))):
            pasted = eval(repr(plan), dict(names))
            assert pasted == plan and type(pasted) is StepPlan
            assert all(type(row) is Row for row in pasted.rows)
            field_names |= {name for name in StepPlan._fields if getattr(plan, name)}
            field_names |= {name for row in plan.rows for name in Row._fields if getattr(row, name)}
    assert field_names == {*StepPlan._fields, *Row._fields}


# Plans ahead of tokens.


def two_request_world(depth: int) -> RandomWorld:
    """Return a world of two requests, 12 and 9 tokens plus six output tokens, in blocks of four."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = (
        Request(0, tuple(range(1, 13)), params),
        Request(1, tuple(range(21, 30)), params),
    )
    config = EngineConfig(
        num_blocks=16, block_size=4, max_num_seqs=2, max_model_len=32, depth=depth
    )
    return RandomWorld(0, config, requests, vocab_size=257)


def test_plan_n_plus_1_is_made_before_the_tokens_of_n_are_known() -> None:
    """At depth 2 the second plan names the first one's rows, and precedes their result."""
    world = two_request_world(depth=2)
    _, recorder, engine = build_engine(world)
    for request in world.requests:
        engine.submit(request)
    assert engine.step() == []
    deltas = engine.step()
    first, second, output = recorder.log
    assert isinstance(first, StepPlan) and isinstance(second, StepPlan)
    assert [(row.tokens, row.refs) for row in second.rows] == [
        ((), (TokenRef(0, 0),)),
        ((), (TokenRef(0, 1),)),
    ]
    assert isinstance(output, StepOutput) and output.step == 0
    assert [delta.tokens for delta in deltas] == [row.tokens for row in output.rows]


def test_a_synchronous_engine_never_names_a_token() -> None:
    outcome = run_world(two_request_world(depth=1))
    assert not [row.refs for plan in list_plans(outcome) for row in plan.rows if row.refs]


# A wrong block is a wrong token.


class SwappingModel:
    """A model in which one plan has the first two blocks of one sequence's table swapped."""

    def __init__(self, model: HashModel, step: int, seq_id: int) -> None:
        self.swapped = False
        self._model = model
        self._step = step
        self._seq_id = seq_id
        self._tables: dict[int, list[int]] = {}

    def vocab_size(self) -> int:
        return self._model.vocab_size()

    def num_layers(self) -> int:
        return self._model.num_layers()

    def eos_token(self) -> int:
        return self._model.eos_token()

    def forward(self, plan: StepPlan) -> PendingStep:
        rows = tuple(self._row(plan.step, row) for row in plan.rows)
        return self._model.forward(plan._replace(rows=rows))

    def _row(self, step: int, row: Row) -> Row:
        table = self._tables.setdefault(row.slot, [])
        table[row.keep :] = row.new_blocks
        if step != self._step or row.seq_id != self._seq_id:
            return row
        self.swapped = True
        table[0], table[1] = table[1], table[0]
        return row._replace(keep=0, new_blocks=tuple(table))


def run_requests(world: RandomWorld, model: Model) -> list[tuple[int, ...]]:
    """Submit the world's requests one after another to an engine, and return the tokens of each."""
    engine = Engine(model, world.config)
    choices = [ChoiceResult() for _ in world.requests]
    for request in world.requests:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            choices[delta.request_id].add(delta)
    return [choice.tokens for choice in choices]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", range(1, 6))
def test_swapping_two_blocks_of_a_live_table_changes_that_output_alone(
    step: int, depth: int
) -> None:
    world = two_request_world(depth)
    hash_model, _, _ = build_engine(world)
    first, second = (compute_expected(hash_model, world.config, r).tokens for r in world.requests)
    model = SwappingModel(hash_model, step, seq_id=0)
    swapped, beside = run_requests(world, model)
    assert model.swapped
    assert beside == second
    assert swapped[:step] == first[:step] and swapped[step] != first[step]


def test_swapping_two_new_blocks_of_a_shared_prefix_changes_the_output() -> None:
    """The second request's first row has two blocks that the first request has filled."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = tuple(range(1, 13))
    requests = (Request(0, prompt, params), Request(1, (*prompt, 13), params))
    config = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=2, max_model_len=32)
    world = RandomWorld(0, config, requests, vocab_size=257)
    hash_model, recorder, _ = build_engine(world)
    want = [compute_expected(hash_model, config, request).tokens for request in requests]
    assert run_requests(world, recorder) == want
    joined = next(
        row
        for entry in recorder.log
        if isinstance(entry, StepPlan)
        for row in entry.rows
        if row.seq_id == 1
    )
    assert joined.start == 12 and len(joined.new_blocks) == 4
    model = SwappingModel(build_engine(world)[0], step=1, seq_id=1)
    first, second = run_requests(world, model)
    assert model.swapped and first == want[0] and second[0] != want[1][0]
