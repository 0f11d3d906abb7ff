"""forge bench spec: its counts, its ratios and its errors."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forge import LLM
from forge.bench import tiny
from forge.bench.engine_run import (
    EngineRun,
    StepCommit,
    WindowFigures,
    count_differences,
    find_window,
    run_requests,
    summarize,
    window_figures,
)
from forge.bench.spec import (
    PLAIN,
    DraftVariant,
    LevelSetup,
    SpecWorkload,
    create_engine,
    draft_variants,
    draw_spec_prompts,
    main,
    measure_level,
    resolve_streams,
    round_fractions,
    spec_options,
    token_lengths,
)
from forge.bench.workload import Cells
from forge.cli.main import main as forge
from forge.config import StepCosts
from forge.engine_options import Options
from forge.errors import InvalidConfig, RequestFailed
from forge.models.costs import DeviceTimes
from forge.models.hash import HashModel
from forge.models.paged import FaultHooks
from forge.request import Delta
from forge.seam import Row, StepPlan

PROMPTS = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
OUTPUT = 60

# A step of one token costs 1, of the draft model 0.1, and a verified token almost nothing.
COSTS = StepCosts(((1, 1.0),), ((1, 0.1),), ((1, 1.0), (1000, 1.2)))
PARTS = DeviceTimes(1.0, 1.2, 0.1)


@pytest.fixture(scope="module", autouse=True)
def frozen_gc() -> None:
    """Freeze the objects of other tests: each run starts with a garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def setup() -> Iterator[LevelSetup]:
    """Three streams on a pair that agrees at 0.7 of all contexts, with at most four drafts."""
    with LLM("hash", draft_model="hash:agreement=0.7", depth=2) as llm:
        costs = dict.fromkeys((1, 2, 3, 4), COSTS)
        parts = dict.fromkeys(costs, PARTS)
        yield LevelSetup(llm.engine.model, llm.engine.config, costs, parts, 0.8, PROMPTS, OUTPUT)


def run_plain(setup: LevelSetup) -> EngineRun:
    return run_requests(create_engine(PLAIN, setup, {}, 0), PROMPTS, OUTPUT)


def create_commits(*counts: Sequence[int]) -> list[StepCommit]:
    """Return a commit a second, with these numbers of tokens for each stream."""
    return [
        StepCommit(float(at), 0.0, 0, 0, [Delta(i, 0, (7,) * n) for i, n in enumerate(gained)])
        for at, gained in enumerate(counts)
    ]


# Variants


def test_the_variants_are_plain_oracles_drafts_and_the_adaptive_ones() -> None:
    assert draft_variants(6) == [
        PLAIN,
        *(DraftVariant("oracle", k) for k in (2, 3, 4, 6)),
        *(DraftVariant("draft", k) for k in (1, 2, 3, 4, 6)),
        DraftVariant("adaptive, oracle"),
        DraftVariant("adaptive, draft"),
        DraftVariant("adaptive, useless"),
    ]


def test_one_draft_is_what_the_oracle_has_where_a_step_has_no_more() -> None:
    assert [way for way in draft_variants(1) if way.k] == [
        DraftVariant("oracle", 1),
        DraftVariant("draft", 1),
    ]


@pytest.mark.long
@pytest.mark.parametrize("way", draft_variants(4), ids=str)
def test_every_variant_gives_the_output_of_the_plain_one(
    setup: LevelSetup, way: DraftVariant
) -> None:
    plain = run_plain(setup).outputs
    ran = run_requests(create_engine(way, setup, plain, 1), PROMPTS, OUTPUT)
    assert count_differences(ran.outputs, plain) == (0, 0)
    assert [len(ran.outputs[i]) for i in range(3)] == [OUTPUT] * 3


def test_plain_decoding_has_a_token_a_row_and_no_draft(setup: LevelSetup) -> None:
    found = window_figures(run_plain(setup), OUTPUT, 5)
    assert (found.drafts, found.draft_steps, found.tokens_per_round) == (0, 0, 1)
    assert found.acceptance is None


@pytest.mark.parametrize("k", [2, 4])
def test_an_oracle_that_is_always_right_gives_all_drafts_and_one_token_a_round(
    setup: LevelSetup, k: int
) -> None:
    always = setup._replace(agreement=1.0)
    plain = run_plain(setup).outputs
    found = window_figures(
        run_requests(create_engine(DraftVariant("oracle", k), always, plain, 0), PROMPTS, OUTPUT),
        60,
        5,
    )
    assert (found.drafts, found.tokens_per_round, found.acceptance) == (k, k + 1, 1)
    assert found.draft_steps == 0


def test_an_oracle_that_is_never_right_gives_one_token_a_round(setup: LevelSetup) -> None:
    never = setup._replace(agreement=0.0)
    plain = run_plain(setup).outputs
    found = window_figures(
        run_requests(create_engine(DraftVariant("oracle", 2), never, plain, 0), PROMPTS, OUTPUT),
        60,
        5,
    )
    assert (found.tokens_per_round, found.acceptance) == (1, 0)


def test_another_seed_spoils_other_tokens(setup: LevelSetup) -> None:
    plain = run_plain(setup).outputs
    once, again, other = (
        len(
            run_requests(
                create_engine(DraftVariant("oracle", 4), setup, plain, seed), PROMPTS, OUTPUT
            ).plans
        )
        for seed in (0, 0, 1)
    )
    assert once == again != other


@pytest.mark.parametrize("k", [2, 4])
def test_the_draft_model_has_all_its_drafts_in_every_round_that_counts(
    setup: LevelSetup, k: int
) -> None:
    found = window_figures(
        run_requests(create_engine(DraftVariant("draft", k), setup, {}, 0), PROMPTS, OUTPUT),
        OUTPUT,
        5,
    )
    assert (found.drafts, found.draft_steps) == (k, k)
    assert found.acceptance is not None and 0.5 < found.acceptance < 0.9
    assert 1 < found.tokens_per_round < 1 + k


def test_useless_drafts_are_made_and_never_accepted(setup: LevelSetup) -> None:
    """The costs promise a gain, so the first rounds have drafts; then drafting pauses."""
    plain = run_plain(setup).outputs
    ran = run_requests(
        create_engine(DraftVariant("adaptive, useless"), setup, plain, 0), PROMPTS, OUTPUT
    )
    assert sum(len(plan.drafts) for plan in ran.plans) > 0
    assert (ran.commits[-1].num_draft_tokens > 0, ran.commits[-1].num_accepted_tokens) == (True, 0)
    rows = [len(row.drafts) for plan in ran.plans for row in plan.rows]
    assert 0 < sum(map(bool, rows)) < OUTPUT
    assert not any(rows[-3 * OUTPUT // 2 :]), "there are no drafts in the second half"


def test_an_adaptive_oracle_weighs_no_step_of_a_draft_model(setup: LevelSetup) -> None:
    """At this cost a draft model would gain nothing, and the oracle uses all its drafts."""
    dear = COSTS._replace(draft=((1, 9.0),))
    sure = setup._replace(agreement=1.0, costs={4: dear})
    plain = run_plain(setup).outputs
    oracle, draft = (
        window_figures(
            run_requests(create_engine(DraftVariant(name), sure, plain, 0), PROMPTS, OUTPUT),
            OUTPUT,
            5,
        )
        for name in ("adaptive, oracle", "adaptive, draft")
    )
    assert oracle.drafts > 3.5
    assert draft.drafts < 0.1


# Windows and figures


def test_the_window_has_all_streams_and_ends_before_one_is_near_its_end() -> None:
    commits = create_commits((1, 0), (1, 1), (1, 1), (1, 2), (4, 1), (1, 1))
    assert find_window(commits, 2, 9) == (2, 5)
    assert find_window(commits, 2, 8) == (2, 4)
    assert find_window(commits, 2, 7) == (2, 3)


@pytest.mark.parametrize("most", [2, 3])
def test_a_window_without_a_step_asks_for_more_tokens(most: int) -> None:
    with pytest.raises(InvalidConfig, match="2 streams hardly decode together"):
        find_window(create_commits((1, 1), (2, 1), (3, 3)), 2, most)


def test_figures_are_those_of_the_window() -> None:
    """Steps 2 to 4 count: 1, 1 and 3 seconds, 8 tokens of 5 rows, 3 of 4 drafts."""
    rows = [
        [Row(0, 0, 0, 0, (1, 2), num_samples=1), Row(1, 0, 1, 0, (1,))],
        [Row(0, 0, 0, 2, num_samples=1), Row(1, 0, 1, 1, num_samples=1)],
        [Row(0, 0, 0, 3, drafts=(1, 2), num_samples=3), Row(1, 0, 1, 2, num_samples=1)],
        [Row(0, 0, 0, 6, drafts=(1, 2), num_samples=3), Row(1, 0, 1, 3, num_samples=1)],
        [Row(0, 0, 0, 9, num_samples=1), Row(2, 0, 2, 3)],
        [Row(0, 0, 0, 10, num_samples=1)],
    ]
    draft = StepPlan(0, (), 8, 16)
    drafts = [(), (), (draft, draft), (draft,), (), ()]
    plans = [
        StepPlan(i, tuple(each), 8, 16, drafts=made)
        for i, (each, made) in enumerate(zip(rows, drafts, strict=True))
    ]
    times = (0.0, 10.0, 11.0, 12.0, 15.0, 99.0)
    inside = (0.0, 4.0, 4.5, 5.0, 7.5, 60.0)
    gained = ((1, 1), (1, 1), (3, 1), (2, 1), (1, 0), (9, 9))
    judged = ((5, 5), (5, 5), (7, 7), (9, 8), (9, 8), (9, 8))
    commits = [
        StepCommit(at, within, *counts, [Delta(i, 0, (7,) * n) for i, n in enumerate(each)])
        for at, within, counts, each in zip(times, inside, judged, gained, strict=True)
    ]
    found = window_figures(EngineRun(plans, commits, {0: (), 1: ()}), 20, 10)
    assert found == WindowFigures(8 / 5, 1.0, 1.5 / 3, 4 / 5, 3 / 3, 8 / 5, 3 / 4)


def test_shares_are_parts_of_a_plain_step() -> None:
    """A plain step takes 10 ms by itself, a draft step 2, verification 12.

    In the run a plain step takes 20 ms and a round 40, so 2 = 1.2 + 2 * 0.2 + h.
    """
    plain = WindowFigures(100.0, 0.020, 0.001, 0.0, 0.0, 1.0, None)
    here = WindowFigures(120.0, 0.040, 0.002, 2.0, 2.0, 2.4, 0.8)
    assert round_fractions(2, DeviceTimes(0.010, 0.012, 0.002), here, plain) == pytest.approx(
        {"c": 0.2, "v": 1.2, "h": 0.4, "of_formula": 0.5 * (1 + 0.4 + 0.4)}
    )


# Scripts


@pytest.fixture
def scripted_setup(setup: LevelSetup) -> LevelSetup:
    """A setup whose outputs are scripted, as for random weights."""
    return setup._replace(scripted=True)


OUTPUTS = {i: [50 + (7 * i + j) % 40 for j in range(OUTPUT)] for i in range(3)}


@pytest.mark.parametrize("way", draft_variants(4), ids=str)
def test_a_scripted_output_is_the_reference(scripted_setup: LevelSetup, way: DraftVariant) -> None:
    ran = run_requests(create_engine(way, scripted_setup, OUTPUTS, 1), PROMPTS, OUTPUT)
    assert ran.outputs == OUTPUTS


@pytest.mark.long
@pytest.mark.parametrize("name", ["oracle", "draft"])
def test_a_script_accepts_drafts_at_the_given_rate(scripted_setup: LevelSetup, name: str) -> None:
    for agreement in (0.0, 0.6, 1.0):
        level = scripted_setup._replace(agreement=agreement)
        runs = [
            run_requests(create_engine(DraftVariant(name, 3), level, OUTPUTS, s), PROMPTS, OUTPUT)
            for s in range(5)
        ]
        judged = sum(ran.commits[-1].num_draft_tokens for ran in runs)
        accepted = sum(ran.commits[-1].num_accepted_tokens for ran in runs)
        assert accepted / judged == pytest.approx(agreement, abs=0.06)
        assert judged > 300


def test_useless_drafts_of_a_script_are_never_accepted(scripted_setup: LevelSetup) -> None:
    ran = run_requests(
        create_engine(DraftVariant("adaptive, useless"), scripted_setup, OUTPUTS, 0),
        PROMPTS,
        OUTPUT,
    )
    assert (ran.commits[-1].num_draft_tokens > 0, ran.commits[-1].num_accepted_tokens) == (True, 0)


def test_an_error_is_no_part_of_a_script(scripted_setup: LevelSetup) -> None:
    failing = HashModel(
        faults=FaultHooks(result=lambda plan: {0: "not finite"} if plan.step else {})
    )
    with pytest.raises(RequestFailed, match="not finite"):
        run_requests(
            create_engine(PLAIN, scripted_setup._replace(model=failing), OUTPUTS, 0),
            PROMPTS,
            OUTPUT,
        )


def test_differences_after_the_first_are_counted_too() -> None:
    plain = {0: (1, 2, 3), 1: (4, 5, 6), 2: (7, 8, 9)}
    assert count_differences({0: (1, 2, 3), 1: (4, 0, 0), 2: (7, 8, 0)}, plain) == (2, 3)


def test_a_summary_has_medians_and_the_most_differences() -> None:
    samples = [
        {"ratio": 1.0, "h": 0.3, "tokens_apart": 0},
        {"ratio": 3.0, "h": 0.1, "tokens_apart": 5},
        {"ratio": 2.0, "h": 0.2, "tokens_apart": 1},
    ]
    assert summarize(samples) == {
        **{"ratio": 2.0, "ratio_p10": 1.0, "ratio_p90": 3.0},
        **{"h": 0.2, "tokens_apart": 5},
    }


@pytest.mark.long
def test_a_level_has_figures_for_each_variant(setup: LevelSetup) -> None:
    level = measure_level(setup._replace(agreement=1.0), 2)
    assert [level[key] for key in ("streams", "prompt_tokens", "output_tokens")] == [3, 3, OUTPUT]
    by_way = {(each["way"], each["k"]): each for each in level["ways"]}
    assert list(by_way) == [tuple(way) for way in draft_variants(4)]
    assert by_way["plain", 0]["ratio"] == 1
    assert by_way["oracle", 4]["expected"] == by_way["oracle", 4]["tokens_per_round"] == 5
    assert {"c", "v", "h", "of_formula"} < set(by_way["draft", 2])
    ratios = {k: by_way["oracle", k]["ratio"] for k in (2, 3, 4)}
    assert level["best_k"] == max(ratios, key=lambda k: ratios[k])
    assert {each["tokens_apart"] for each in level["ways"]} == {0}


def test_a_model_that_fails_ends_the_measurement(setup: LevelSetup) -> None:
    failing = HashModel(
        faults=FaultHooks(result=lambda plan: {0: "not finite"} if plan.step else {})
    )
    with pytest.raises(RequestFailed, match="not finite"):
        run_plain(setup._replace(model=failing))


def test_a_step_that_was_computed_again_is_no_measurement(setup: LevelSetup) -> None:
    def once(plan: StepPlan) -> None:
        if plan.step == 5:
            raise OSError("gone for a moment")

    with pytest.raises(RequestFailed, match="computed again"):
        run_plain(setup._replace(model=HashModel(vocab_size=257, faults=FaultHooks(forward=once))))


def test_a_cache_that_cannot_hold_all_streams_is_refused() -> None:
    with LLM("hash", draft_model="hash", depth=2, num_blocks=8) as llm:
        few = LevelSetup(llm.engine.model, llm.engine.config, {}, {}, 0.8, PROMPTS, OUTPUT)
        with pytest.raises(InvalidConfig, match="the cache is too small for 3 sequences"):
            run_plain(few)


# Workloads


def test_lengths_are_those_of_the_cell_of_so_many_requests() -> None:
    cells = Cells.read()
    lengths = token_lengths(SpecWorkload((1, 8, 9)), cells)
    assert lengths == {1: (128, 256), 8: (512, 256), 9: (200, 384)}
    assert token_lengths(SpecWorkload((8,), 10, 40), cells) == {8: (10, 40)}


def test_streams_are_as_many_as_a_batch_has() -> None:
    assert resolve_streams(SpecWorkload(), {"max_num_seqs": 10}).streams == (1, 8)
    assert resolve_streams(SpecWorkload((2, 64)), {}).streams == (2, 64)


def test_a_pair_is_opened_with_room_for_all_streams() -> None:
    options = spec_options(
        "hash", SpecWorkload((3,), 40, 60), Cells.read(), {"num_speculative_tokens": 4}
    )
    assert options["draft_model"] == "hash:agreement=0.8,step_ms=1"
    assert (options["max_num_seqs"], options["max_model_len"], options["depth"]) == (3, 100, 2)
    assert options["num_blocks"] >= 3 * 7
    chosen = spec_options(
        "hash", SpecWorkload((3,)), Cells.read(), {"draft_model": "hash", "depth": 1}
    )
    assert (chosen["draft_model"], chosen["depth"]) == ("hash", 1)


@pytest.mark.long
def test_prompts_of_a_trained_pair_are_pieces_of_text_that_was_held_out() -> None:
    source, prompts = draw_spec_prompts("tiny", 257, 3, 40, 0)
    assert source == "held-out text"
    texts = [each.data for each in tiny.read_library() if each.is_holdout]
    for prompt in prompts:
        piece = bytes(token - 1 for token in prompt)
        assert len(piece) == 40 and any(piece in text for text in texts)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--streams 1,x", "--streams: '1,x' is not a list of numbers. Give 1,8,64, say"),
        ("--streams 8 --max-num-seqs 4", "--streams: 8 are no batch of 4. Raise"),
        ("--agreement 2", "--agreement: 2.0 is no share. Give 0 to 1"),
        ("--repeats 0", "--repeats: 0 is not a positive integer"),
        ("--output-tokens 20", "--output-tokens: 20 are few rounds of 8 drafts. Give at least 36"),
        ("qwen3-0.6b", "--speculative-model: 'qwen3-0.6b' has no default draft model. Name a "),
        ("--speculative-method ngram", "--speculative-method: ngram takes no draft model"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge(["bench", "spec", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"forge bench spec: {line}")


# The command


def test_spec_prints_a_table_and_its_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "spec.json"
    words = "--prompt-tokens 8 --output-tokens 24 --num-speculative-tokens 2 --repeats 1"
    arguments = ["hash", "--streams", "1,3", *words.split(), "--json", str(path)]
    assert forge(["bench", "spec", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    assert (result["shape"], result["draft"]) == ("hash", "hash:agreement=0.8,step_ms=1")
    assert (result["prompts"], result["agreement"], result["repeats"]) == ("random ids", 0.8, 1)
    assert [each["streams"] for each in result["levels"]] == [1, 3]
    assert set(result["costs"]) == {"1", "2"}
    table = [line for line in lines if line.startswith(("plain", "oracle", "draft", "adaptive"))]
    assert len(table) == sum(len(each["ways"]) for each in result["levels"]) == 14
    written = json.loads(path.read_text())
    assert written["figures"] == result
    assert {"machine", "versions", "command", "commit"} < set(written)


def test_the_draft_model_is_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The model drafts for itself, so every draft is right."""
    options: Options = {"draft_model": "hash", "num_speculative_tokens": 2}
    assert main("hash", None, (1,), 8, 24, repeats=1, options=options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    by_way = {(each["way"], each["k"]): each for each in result["levels"][0]["ways"]}
    assert result["draft"] == "hash"
    assert by_way["draft", 2]["acceptance"] == 1
    assert by_way["draft", 2]["tokens_per_round"] == 3


@pytest.mark.torch
def test_a_shape_drafts_for_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are random, so a script makes every draft right."""
    torch = pytest.importorskip("torch")
    options: Options = {
        "draft_model": "tiny-qwen3",
        "num_speculative_tokens": 2,
        "device": "cpu",
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main("tiny-qwen3", None, (2,), 8, 16, 1.0, repeats=1, options=options) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    by_way = {(each["way"], each["k"]): each for each in result["levels"][0]["ways"]}
    assert (result["shape"], result["draft"]) == ("tiny-qwen3", "tiny-qwen3")
    assert result["scripted"]
    assert by_way["draft", 2]["acceptance"] == by_way["oracle", 2]["acceptance"] == 1
    assert {each["tokens_apart"] for each in by_way.values()} == {0}
