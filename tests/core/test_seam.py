"""The seam: plans are values that text can carry, and a model needs only four methods."""

from __future__ import annotations

from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest

from forge.config import Speculation
from forge.drafting import create_drafter
from forge.engine import Engine
from forge.models.hash import HashModel
from forge.request import Delta, FinishReason, Request, SamplingParams, Structure, TokenLogprob
from forge.scheduler import Scheduler
from forge.seam import (
    Bind,
    BlockCopy,
    DraftRef,
    Event,
    Row,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenRef,
)
from forge.tokenizer import ByteTokenizer
from tests.core.builders import EOS, VOCAB, config, create_output, request

FOUR = {"vocab_size", "num_layers", "eos_token", "forward"}

PLAN = StepPlan(
    step=7,
    rows=(
        Row(
            seq_id=3,
            epoch=1,
            slot=0,
            start=4,
            tokens=(9, 8, 7),
            refs=(),
            keep=0,
            new_blocks=(5, 1),
            num_samples=0,
            bind=Bind(
                SamplingParams(temperature=0.5, stop="x", logit_bias={2: 1.5}, seed=-4),
                seed=2**64 - 4,
                prompt_len=9,
                end_ids=(0, 2),
                history=(1, 2, 3, 4),
            ),
        ),
        Row(4, 0, 1, 12, (), (TokenRef(6, 1),), 3, (6,), 1, None),
        Row(5, 0, 2, 0, (11,), (TokenRef(6, 0), TokenRef(6, 2)), 0, (2,), 1, None),
    ),
    block_size=4,
    copies=(BlockCopy(5, 9),),
    num_blocks=16,
    admitted=(Event(3, "resumed, 4 tokens shared"),),
    preempted=(Event(8, "1 block needed, 0 free"),),
    finished=(Event(2, "stop"),),
)


def test_a_plan_printed_and_read_back_is_the_same_plan() -> None:
    assert eval(repr(PLAN)) == PLAN


def test_a_decode_row_prints_only_fields_that_differ_from_the_default() -> None:
    """People read plans: a step of many rows must stay readable."""
    row = Row(3, 0, 1, 12, (9,), keep=4, num_samples=1)
    shown = "Row(seq_id=3, epoch=0, slot=1, start=12, tokens=(9,), keep=4, num_samples=1)"
    assert repr(row) == shown


def test_an_output_printed_and_read_back_is_the_same_output() -> None:
    score = TokenLogprob(3, -0.25, ((3, -0.25), (9, -2.0)))
    output = StepOutput(7, (RowOutput((3,), (score,), (score, score)), RowOutput(error="NaN")))
    assert eval(repr(output)) == output


@pytest.mark.parametrize(("row", "end"), [(0, 7), (1, 13), (2, 3)])
def test_a_row_ends_after_its_tokens_and_its_named_tokens(row: int, end: int) -> None:
    assert PLAN.rows[row].end == end


def test_a_plan_counts_the_positions_of_known_and_unknown_tokens() -> None:
    assert PLAN.num_tokens == 3 + 1 + 3
    drafted = Row(seq_id=1, epoch=0, slot=0, start=5, tokens=(7,), num_samples=3, drafts=(8, 9))
    assert StepPlan(0, (drafted,), num_blocks=2, block_size=4).num_tokens == 3
    assert StepPlan(0, (), num_blocks=1, block_size=4).num_tokens == 0


def test_plans_are_values() -> None:
    assert hash(PLAN) == hash(eval(repr(PLAN)))
    with pytest.raises(AttributeError):
        PLAN.step = 8  # type: ignore[misc]


class AttributeGuard:
    """A proxy that passes some names through to its target, and fails on any other."""

    def __init__(self, target: Any, names: set[str], touched: set[str]) -> None:
        self.__dict__["_AttributeGuard__parts"] = (target, names, touched)

    def __getattr__(self, name: str) -> Any:
        target, names, touched = self.__parts
        # Not an AttributeError: hasattr and getattr with a default would hide it.
        assert name in names, f"{name} is not part of the protocol"
        touched.add(name)
        return getattr(target, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"{name} was set from outside")


class MinimalModel:
    """A model whose steps have no method but `result`."""

    def __init__(self, model: HashModel, touched: set[str]) -> None:
        self._model = model
        self._touched = touched

    def vocab_size(self) -> int:
        return self._model.vocab_size()

    def num_layers(self) -> int:
        return self._model.num_layers()

    def eos_token(self) -> int:
        return self._model.eos_token()

    def forward(self, plan: StepPlan) -> Any:
        return AttributeGuard(self._model.forward(plan), {"result"}, self._touched)


REQUESTS = [
    Request(0, tuple(range(1, 11)), SamplingParams(max_tokens=12, seed=1, n=2)),
    Request(1, tuple(range(1, 11)), SamplingParams(max_tokens=12, seed=2, presence_penalty=0.5)),
    Request(2, (7, 7, 7), SamplingParams(max_tokens=12, temperature=0, logprobs=2)),
    Request(3, tuple(range(20, 30)), SamplingParams(max_tokens=2, prompt_logprobs=1)),
]


def create_model() -> HashModel:
    return HashModel(vocab_size=40, num_blocks=14, block_size=4, min_eos_len=99)


def run_requests(engine: Engine) -> list[Delta]:
    """Return every delta of REQUESTS. The later ones arrive while the first is being computed."""
    deltas: list[Delta] = []
    engine.submit(REQUESTS[0])
    for _ in range(6):
        deltas += engine.step()
    for later in REQUESTS[1:]:
        engine.submit(later)
    while engine.has_work:
        deltas += engine.step()
        assert engine.num_steps < 200
    return deltas


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_touches_the_four_methods_of_a_model_and_nothing_else(depth: int) -> None:
    touched: set[str] = set()
    glass: Any = AttributeGuard(MinimalModel(create_model(), touched), FOUR, touched)
    deltas = run_requests(
        Engine(glass, config(blocks=14, max_num_seqs=4, max_num_batched_tokens=8, depth=depth))
    )
    assert touched - FOUR == {"result"}
    assert {"vocab_size", "eos_token", "forward"} <= touched
    endings = [delta.finish for delta in deltas if delta.finish is not None]
    assert endings == [FinishReason.LENGTH] * 5


class TextLogModel(HashModel):
    """A HashModel that keeps the text of every plan together with its output."""

    def __init__(self, log: list[tuple[str, StepOutput]]) -> None:
        super().__init__(vocab_size=40, num_blocks=14, block_size=4, min_eos_len=99)
        self._log = log

    def forward(self, plan: StepPlan) -> Any:
        step = super().forward(plan)
        self._log.append((repr(plan), step.result()))
        return step


def test_the_text_of_the_plans_is_all_that_another_model_needs() -> None:
    """A run with forks, prefix hits, preemption and named tokens, repeated from its log alone."""
    log: list[tuple[str, StepOutput]] = []
    run_requests(
        Engine(
            TextLogModel(log), config(blocks=12, max_num_seqs=4, max_num_batched_tokens=8, depth=2)
        )
    )
    plans = [eval(text) for text, _ in log]
    rows = [row for plan in plans for row in plan.rows]
    assert any(plan.copies for plan in plans), "no fork was copied"
    assert any(plan.preempted for plan in plans), "no sequence was preempted"
    assert any(row.refs for row in rows), "no token was named before it was known"
    assert any(row.bind and row.start for row in rows), "no prefix was shared"
    assert any(row.bind and row.bind.history for row in rows), "no slot has a history"
    fresh = create_model()
    assert [fresh.forward(plan).result() for plan in plans] == [output for _, output in log]


class PlanLogModel(HashModel):
    """A HashModel that keeps every plan with its step."""

    def __init__(self) -> None:
        super().__init__(num_blocks=16, block_size=4)
        self.steps: list[tuple[StepPlan, Any]] = []

    def forward(self, plan: StepPlan) -> Any:
        self.steps.append((plan, super().forward(plan)))
        return self.steps[-1][1]


def run_structured(model: HashModel, depth: int, abort_step: int) -> list[Delta]:
    """Return the deltas of two outputs of letters and one of anything. One of letters is aborted.

    abort_step   steps before the abort
    """
    engine = Engine(model, config(blocks=16, depth=depth), ByteTokenizer())
    letters = Structure.regex("[a-f]+")
    for id, structure in enumerate((letters, None, letters)):
        params = SamplingParams(max_tokens=8, seed=id, ignore_eos=True, structure=structure)
        engine.submit(Request(id, (10 + id, 11), params))
    deltas: list[Delta] = []
    for step in range(30):
        if step == abort_step:
            engine.abort(2)
        deltas += engine.step()
    assert not engine.has_work
    return deltas


@pytest.mark.parametrize("abort_step", range(12))
def test_an_abort_between_a_late_row_and_its_mask_changes_no_other_output(abort_step: int) -> None:
    model = PlanLogModel()
    one = run_structured(HashModel(num_blocks=16, block_size=4), 1, 99)
    ahead = run_structured(model, 2, abort_step)
    plans = [plan for plan, _ in model.steps]
    if abort_step > 1:
        assert any(plan.late_masks for plan in plans)
    for id in range(3):
        expected = [token for delta in one if delta.request_id == id for token in delta.tokens]
        tokens = [token for delta in ahead if delta.request_id == id for token in delta.tokens]
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == 8 or id == 2
        (ending,) = [d.finish for d in ahead if d.request_id == id and d.finish is not None]
        assert ending is (FinishReason.LENGTH if len(tokens) == 8 else FinishReason.ABORT)
        assert id == 1 or all(98 <= token <= 103 for token in tokens)
    again = HashModel(num_blocks=16, block_size=4)
    steps = [again.forward(plan) for plan in plans]
    assert [step.result() for step in steps] == [step.result() for _, step in model.steps]


def has_type(value: Any, hint: Any) -> bool:
    """Return whether the value has the type, and each item of a tuple the type of its items."""
    if get_origin(hint) in (Union, UnionType):
        return any(has_type(value, each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        return type(value) is tuple and all(has_type(each, get_args(hint)[0]) for each in value)
    return type(value) is hint


def assert_fields_have_their_types(values: list[NamedTuple]) -> None:
    for value in values:
        kind = type(value)
        assert kind(*value) == kind(**value._asdict()) == value and len(value) == len(kind._fields)
        hints = get_type_hints(kind)
        wrong = [name for name in kind._fields if not has_type(getattr(value, name), hints[name])]
        assert wrong == [], f"{wrong} of {value}"


@pytest.mark.parametrize("speculation", [None, Speculation(num_tokens=2)])
def test_rows_and_deltas_built_as_tuples_have_the_fields_of_those_built_by_name(
    speculation: Speculation | None,
) -> None:
    """Decodes at depth two, with names of tokens; drafts of a model; masks of a structure."""

    class AnyToken:
        mask = b"\xff\xff"

        def draft_masks(self, drafts: Any) -> list[bytes]:
            return [self.mask for _ in drafts]

        def feed(self, token: int) -> bool:
            return False

    chosen = config(depth=2, block_size=2, blocks=64, speculation=speculation)
    scheduler = Scheduler(
        chosen,
        VOCAB,
        (EOS,),
        create_matcher=lambda params: AnyToken() if params.min_p else None,
        drafter=create_drafter(chosen, None),
    )
    scheduler.add(request(0, (5, 6, 7), max_tokens=12, ignore_eos=True))
    scheduler.add(request(1, (8, 9), max_tokens=12, ignore_eos=True))
    scheduler.add(request(2, (5, 6), max_tokens=12, ignore_eos=True, min_p=0.5))
    rows: list[Row] = []
    deltas: list[Delta] = []
    in_flight: list[StepPlan] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
            rows += [*plan.rows, *(row for draft in plan.drafts for row in draft.rows)]
        if plan is None or len(in_flight) == 2:
            oldest = in_flight.pop(0)
            deltas += scheduler.commit(oldest, create_output(oldest, token=9))
    assert_fields_have_their_types([*rows, *deltas])
    assert any(row.masks for row in rows) and any(row.refs for row in rows)
    drafts = [draft for row in rows for draft in row.drafts]
    assert bool(drafts) == (speculation is not None)
    assert_fields_have_their_types([draft for draft in drafts if isinstance(draft, DraftRef)])
    assert_fields_have_their_types([ref for row in rows for ref in row.refs])
