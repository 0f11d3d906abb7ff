"""`forge sim` from the command line: what it prints, draws and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forge.cli.main import main
from forge.sim.capacity import GOOD_SHARE_OPTION
from forge.sim.commands import (
    BASELINES_OPTION,
    CALIBRATION_OPTIONS,
    EXPLORATION_OPTIONS,
    FAULT_OPTIONS,
    OUTPUT_OPTIONS,
    REPLAY_OPTIONS,
)
from forge.sim.film_command import VERSUS_OPTION
from forge.sim.fleet_command import FLEET_OPTIONS
from forge.sim.reports.plots import MAX_TIMELINES
from forge.sim.reports.run_history import KINDS
from forge.sim.reports.text_report import describe_scenario
from forge.sim.run_options import AXIS_OPTIONS, RUN_OPTIONS, SEEDS_OPTION
from forge.sim.scenario import Scenario
from tests.cli.test_cli import format_cells, format_default, format_flag, parse_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "Simulator.md"

TIGHT = (
    "--workload closed --clients 2 --requests 3 --prompt 8 --output 13 --num-blocks 8 "
    "--block-size 4 --max-num-seqs 4 --max-num-batched-tokens 6 --cost unit"
).split()

EXPECTED_DRAWING = """\
       ms    step   slots  tokens      blocks  line
                     > 0 arrives: 8 prompt tokens, 13 of output
                     > 1 arrives: 8 prompt tokens, 13 of output
                     + 0 admitted: new, 0 tokens shared
      1.0       0   P...       6         2/8     1
                     + 1 admitted: new, 0 tokens shared
      2.0       1   PP..       6         4/8     0
      3.0       2   dP..       5         5/8     0
     10.0       9   dd..       2         8/8     0  and 6 equal steps before it
                     ! 1 preempted: 1 block needed, 0 free
     14.0      13   d...       1         0/8     1  and 3 equal steps before it
                     = 0 ended: length
                     > 2 arrives: 8 prompt tokens, 13 of output
                     + 1 admitted: resumed, 12 tokens shared
                     + 2 admitted: new, 0 tokens shared
     15.0      14   AP..       6         6/8     0
     16.0      15   dP..       6         7/8     0
     17.0      16   dP..       2         7/8     0
     19.0      18   dd..       2         3/8     0  and 1 equal step before it
                     = 1 ended: length
     29.0      28   .d..       1         0/8     0  and 9 equal steps before it
                     = 2 ended: length
"""
EXPECTED_OUTPUT = """\
workload    closed, clients 2, pause 0, requests 3, prompt 8, output 13; fcfs, unit, seed 0
requests    3: 3 length
offered     142.86 requests a second
time        0.029 s simulated, 29 steps
                  mean       p50       p90       p99       max
ttft ms           2.67      3.00      3.00      3.00      3.00
itl ms            1.11      1.00      1.00      5.00      5.00
latency ms       16.00     15.01     19.00     19.00     19.00
output      39 tokens, 1344.8 a second
goodput     103.45 requests a second, 3 of 3: at most 1000 ms to the first token and 50 ms between \
tokens, their mean
cache       8 of 8 blocks at most
preemptions 1
prefix      0.0 % of 24 prompt tokens shared
"""


class SimCommand:
    """Runs `forge sim` in this process and returns its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> str:
        """Return the standard output of a command that succeeds."""
        assert main(["sim", *words]) == 0
        out, err = self._capsys.readouterr()
        assert err == ""
        return out

    def check_refusal(self, *words: str) -> str:
        """Return the error line of a command that is refused."""
        try:
            status = main(["sim", *words])
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
        out, err = self._capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1), err
        return err


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> SimCommand:
    return SimCommand(capsys)


def test_a_run_prints_the_latencies_of_its_users(sim: SimCommand) -> None:
    assert sim(*TIGHT) == EXPECTED_OUTPUT


def test_a_drawing_shows_every_step_and_its_reasons(sim: SimCommand) -> None:
    drawing, legend, rest = sim(*TIGHT, "--draw").partition(" " * 21 + "P chunk of a prompt")
    assert drawing == EXPECTED_DRAWING
    assert (legend + rest).partition("\n")[2] == EXPECTED_OUTPUT


def test_a_drawing_shows_drafts_and_waiting_slots(sim: SimCommand) -> None:
    words = (
        "--requests 3 --rate 900 --prompt 8 --output 12 --num-blocks 24 --block-size 4 "
        "--max-num-seqs 4 --cost unit --num-speculative-tokens 3 --policy prefill-first --draw"
    )
    out = sim(*words.split())
    slots = re.findall(r"^ +[\d.]+ +\d+   (\S+) ", out, re.MULTILINE)
    assert slots[:4] == ["P...", "-P..", "--P.", "333."]
    assert re.search(r"^drafts      \d+ of \d+ accepted$", out, re.MULTILINE)


def test_a_drawing_shows_refusals_with_their_reasons(sim: SimCommand) -> None:
    out = sim(*TIGHT, "--prompt", "40", "--draw")
    assert "x 0 refused: prompt: 40 prompt tokens + 13 output tokens need 13 blocks" in out
    assert "requests    2: none ended, 2 refused\n" in out


def test_the_log_and_the_figures_are_written(sim: SimCommand, tmp_path: Path) -> None:
    log, figures = tmp_path / "made" / "run.jsonl", tmp_path / "figures.json"
    digest = re.search(
        r"^log +sha256 (\w+)$",
        sim(*TIGHT, "--log", str(log), "--json", str(figures)),
        re.MULTILINE,
    )
    lines = log.read_text().splitlines()
    assert digest is not None and json.loads(lines[-1]) == {"sha256": digest[1]}
    record = json.loads(figures.read_text())
    assert record["header"] == json.loads(lines[0])
    assert f"workload    {record['title']}, seed 0\n" in EXPECTED_OUTPUT
    assert record["figures"]["endings"] == {"length": 3}
    assert sum('"arrive"' in line for line in lines) == 3


def test_a_scenario_is_described_by_the_options_that_matter() -> None:
    sample = Scenario(workload="sample", rate=8.0, requests=60)
    assert describe_scenario(sample) == "sample, rate 8, requests 60; fcfs, affine:6000,20,25"
    assert describe_scenario(replace(sample, scale=0.5, longest_prompt=40)) == (
        "sample, rate 8, requests 60, scale 0.5, longest prompt 40; fcfs, affine:6000,20,25"
    )


def test_a_trace_has_every_step_row_and_request(sim: SimCommand, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    sim(*TIGHT, "--trace", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert Counter(e["ph"] for e in events if e["ph"] in "bne") == {"b": 3, "n": 3, "e": 3}
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    rows = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(steps) == 29
    # Slots show the tokens of steps, and a step starts where another has ended.
    computed: Counter[str] = Counter()
    for step in steps:
        computed += Counter({k: step["args"].get(k, 0) for k in KINDS})
    assert sum(e["args"]["tokens"] for e in rows) == computed.total()
    # The last of the lost tokens had not been computed before.
    assert computed == {"prompt": 24, "token": 36 - 1, "again": 3 + 1}
    for track in (0, 1):
        slices = [e for e in rows if e["tid"] == track]
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["1 preempted"]
    assert {e["name"] for e in events if e["ph"] == "C"} == {
        "blocks used", "in line", "tokens a step",
    }  # fmt: skip


def test_refusals_are_reported_by_reason_with_a_remedy(sim: SimCommand, tmp_path: Path) -> None:
    """Of ten requests four are too long for a sequence and three for the cache."""
    trace, figures = tmp_path / "trace.csv", tmp_path / "figures.json"
    lengths = (100, 5, 300, 200, 50, 60, 70, 5, 100, 5)
    rows = (f"2024-05-10 00:00:0{i},{n},9" for i, n in enumerate(lengths))
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "")))
    words = f"--workload {trace} --num-blocks 2 --max-model-len 90 --cost unit".split()
    out = sim(*words, "--json", str(figures))
    too_long, never_fits = (
        "prompt: Input tokens exceed the configured limit of 90 tokens: 300 prompt tokens + "
        "9 output tokens, the prompt alone is longer than the model's context length. "
        "Shorten the request, or start with --max-model-len 309 if the model takes as many",
        "prompt: 70 prompt tokens + 9 output tokens need 5 blocks, the cache has 2 of 16. "
        "Shorten the request or start with --num-blocks 5",
    )
    assert out.splitlines()[1:5] == [
        "requests    10: 3 length, 7 refused",
        f"refused     4 ContextTooLong, the longest of them: {too_long}",
        f"            3 NeverFits, the longest of them: {never_fits}",
        "            Times are those of the 3 requests that were not refused.",
    ]
    record = json.loads(figures.read_text())["figures"]
    assert record["refusals"] == {
        "ContextTooLong": {"requests": 4, "tokens": 309, "why": too_long},
        "NeverFits": {"requests": 3, "tokens": 79, "why": never_fits},
    }
    swept = sim("sweep", *words, "--policies", "fcfs,newest").splitlines()
    assert swept[1].split()[-5:-2] == ["good/s", "refused", "preempted"]
    assert [line.split()[-3] for line in swept[2:4]] == ["7", "7"]
    assert swept[4].startswith("refused     8 ContextTooLong, the longest of them: prompt: ")
    assert swept[-1].endswith("of the 6 requests that were not refused.")


@pytest.mark.parametrize(
    "words",
    [
        TIGHT,
        pytest.param([*TIGHT, "--prompt", "40"], marks=pytest.mark.soak, id="nothing ran"),
        ["sweep", *TIGHT, "--policies", "fcfs,newest"],
        pytest.param(
            ["sweep", *TIGHT, "--policies", "fcfs,newest", "--blocks", "8,16"],
            marks=pytest.mark.soak,
            id="two axes",
        ),
    ],
)
def test_a_picture_is_drawn_of_a_run_and_of_a_sweep(
    sim: SimCommand, tmp_path: Path, words: list[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    file = tmp_path / "picture.png"
    sim(*words, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert len(file.read_bytes()) < 60_000


def test_a_plot_says_how_many_requests_it_shows(sim: SimCommand, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    file = tmp_path / "run.svg"
    total = MAX_TIMELINES + 1
    sim("--requests", str(total), "--prompt", "4", "--output", "1", "--plot", str(file))
    assert f"the first {MAX_TIMELINES} of {total}, in order of arrival" in file.read_text("utf-8")


@pytest.mark.parametrize(
    ("suffix", "begins"),
    [
        ("svg", b"<?xml"),
        pytest.param("PDF", b"%PDF", marks=pytest.mark.long),
        pytest.param("png", b"\x89PNG", marks=pytest.mark.long),
    ],
)
def test_a_picture_is_what_its_name_says_and_the_same_every_time(
    sim: SimCommand, tmp_path: Path, suffix: str, begins: bytes
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    one, other = tmp_path / f"one.{suffix}", tmp_path / f"other.{suffix}"
    for file in (one, other):
        sim("sweep", *TIGHT, "--policies", "fcfs,newest", "--plot", str(file))
    assert one.read_bytes().startswith(begins)
    assert one.read_bytes() == other.read_bytes()


def test_a_refused_command_leaves_no_empty_file(sim: SimCommand, tmp_path: Path) -> None:
    """A file that existed before is unchanged."""
    before = tmp_path / "before.json"
    before.write_text("{}")
    words = ("--json", str(before), "--log", str(tmp_path / "run.jsonl"), "--cost", "free")
    sim.check_refusal(*words, "--plot", str(tmp_path / "run.png"))
    sim.check_refusal("sweep", "--rates", "1", "--plot", str(tmp_path / "run.bmp"))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("before.json", "{}")]


def test_a_link_to_a_file_that_is_not_there_stays_a_link(sim: SimCommand, tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    sim("--requests", "2", "--json", str(link))
    assert link.is_symlink() and json.loads(target.read_text())


def test_a_policy_that_fails_ends_its_own_run_of_a_sweep(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The second of three policies raises: its line has the error, and the others run."""
    bad, figures = tmp_path / "bad.py", tmp_path / "figures.json"
    bad.write_text(
        "from forge.policy import FCFS\n"
        "policy = FCFS._replace(preempt=lambda running, context: running[0].nothing)\n"
    )
    words = ["--policies", f"fcfs,{bad},newest", "--blocks", "8,16", "--json", str(figures)]
    if find_spec("matplotlib") is not None:
        words += ["--plot", str(tmp_path / "sweep.png")]
    assert main(["sim", "sweep", *TIGHT, *words]) == 1
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [policy, blocks] for policy in ("fcfs", str(bad), "newest") for blocks in ("8", "16")
    ]
    assert [row[2] == "failed:" for row in rows] == [False, False, True, False, False, False]
    assert "has no attribute 'nothing'" in out.splitlines()[4]
    assert err == "1 of 6 runs failed\n"
    outcomes = json.loads(figures.read_text())["outcomes"]
    assert ["error" in each for each in outcomes] == [False, False, True, False, False, False]
    assert "figures" not in outcomes[2]


def test_a_line_of_a_sweep_is_printed_when_its_run_ends(tmp_path: Path) -> None:
    """The second policy's file is imported when its run starts, and stores the output so far."""
    kept, source = tmp_path / "kept", tmp_path / "late.py"
    source.write_text(
        "import sys\nfrom pathlib import Path\nfrom forge.policy import FCFS as policy\n"
        f"Path({str(kept)!r}).write_text(sys.stdout.getvalue())\n"
    )
    with redirect_stdout(StringIO()) as out:
        assert main(["sim", "sweep", *TIGHT, "--policies", f"fcfs,{source},newest"]) == 0
    whole = out.getvalue().splitlines()
    assert [line.split()[0] for line in whole[2:]] == ["fcfs", str(source), "newest"]
    assert kept.read_text().splitlines() == whole[:3]


def test_a_sweep_runs_every_combination_on_the_same_requests(
    sim: SimCommand, tmp_path: Path
) -> None:
    file = tmp_path / "sweep.json"
    words = ["--policies", "fcfs,newest", "--blocks", "8,16", "--drafts", "0,2"]
    lines = sim("sweep", *TIGHT, *words, "--json", str(file)).splitlines()
    assert lines[1].split()[:3] == ["policy", "blocks", "drafts"]
    cases = [line.split()[:3] for line in lines[2:]]
    assert cases == [[p, b, d] for p in ("fcfs", "newest") for b in "8 16".split() for d in "02"]
    outcomes = json.loads(file.read_text())["outcomes"]
    assert {o["figures"]["output_tokens"] for o in outcomes} == {39}
    assert [o["figures"]["preemptions"] > 0 for o in outcomes[0::2]] == [True, False] * 2
    assert [o["figures"]["drafted"] > 0 for o in outcomes] == [False, True] * 4


def test_one_case_of_a_sweep_is_the_run_by_itself(sim: SimCommand, tmp_path: Path) -> None:
    alone, swept = tmp_path / "alone.json", tmp_path / "swept.json"
    words = ["--requests", "20", "--policy", "newest"]
    sim(*words, "--rate", "40", "--json", str(alone))
    sim("sweep", *words, "--rates", "10,40", "--json", str(swept))
    outcomes = json.loads(swept.read_text())["outcomes"]
    assert outcomes[1]["case"] == {"rate": 40.0}
    assert outcomes[1]["figures"] == json.loads(alone.read_text())["figures"]
    assert outcomes[0]["figures"] != outcomes[1]["figures"]


@pytest.mark.parametrize(
    ("axis", "option", "values"),
    [
        ("--budgets", "--max-num-batched-tokens", (6, 32)),
        ("--blocks", "--num-blocks", (8, 16)),
        ("--drafts", "--num-speculative-tokens", (0, 2)),
    ],
)
def test_an_axis_of_a_sweep_gives_its_option_the_values(
    sim: SimCommand, tmp_path: Path, axis: str, option: str, values: tuple[int, int]
) -> None:
    """Each case equals the run with that option alone, and the two cases differ."""
    file = tmp_path / "figures.json"
    sim("sweep", *TIGHT, axis, ",".join(map(str, values)), "--json", str(file))
    swept = [each["figures"] for each in json.loads(file.read_text())["outcomes"]]
    alone = []
    for value in values:
        sim(*TIGHT, option, str(value), "--json", str(file))
        alone.append(json.loads(file.read_text())["figures"])
    assert swept == alone
    assert alone[0] != alone[1]


def test_a_trace_at_half_its_scale_is_half_as_long(sim: SimCommand, tmp_path: Path) -> None:
    """Two lines: 80 tokens of prompts and 20 of answers become 40 and 10."""
    file, figures = tmp_path / "two.csv", tmp_path / "figures.json"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00,50,12\n2024-05-10 00:00:01,30,8\n"
    )
    records = []
    for words in ([], ["--scale", "0.5"]):
        sim("--workload", str(file), *words, "--json", str(figures))
        records.append(json.loads(figures.read_text())["figures"])
    assert [(each["prompt_tokens"], each["output_tokens"]) for each in records] == [
        (80, 20),
        (40, 10),
    ]


def test_the_offered_rate_is_printed_with_the_requested_one(
    sim: SimCommand, tmp_path: Path
) -> None:
    """Poisson arrivals reach the requested rate approximately, those of a trace exactly."""
    words = "--requests 30 --prompt 9 --output 4 --cost unit --rate 50".split()
    assert re.search(r"^offered     \d\d\.\d\d requests a second, 50 requested$", sim(*words), re.M)
    words = ["--workload", "sample", "--requests", "30", "--cost", "unit"]
    assert "\noffered     50.00 requests a second, 50 requested\n" in sim(*words, "--rate", "50")
    assert "\noffered     all requests at once\n" in sim(*words, "--requests", "1")
    file = tmp_path / "sweep.json"
    heading, *rows = sim("sweep", *words, "--rates", "5,50", "--json", str(file)).splitlines()[1:]
    assert heading.split()[:2] == ["rate", "offered/s"]
    assert [row.split()[:2] for row in rows] == [["5", "5.00"], ["50", "50.00"]]
    outcomes = json.loads(file.read_text())["outcomes"]
    assert [round(each["figures"]["offered_per_s"], 6) for each in outcomes] == [5, 50]


@pytest.fixture
def sim_figures(sim: SimCommand, tmp_path: Path) -> Callable[..., Any]:
    """Run `forge sim` and return its figures."""

    def run(*words: str) -> Any:
        sim(*words, "--json", str(tmp_path / "again.json"))
        return json.loads((tmp_path / "again.json").read_text())["figures"]

    return run


def test_the_log_of_a_run_is_a_workload(sim_figures: Callable[..., Any], tmp_path: Path) -> None:
    """Requests of a closed loop come again at the times at which they came."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    place = TIGHT.index("--num-blocks")
    figures = sim_figures(*TIGHT, "--log", str(first))
    words = ["--workload", str(first), *TIGHT[place:], "--log", str(second)]
    assert sim_figures(*words) == figures
    assert figures["preemptions"] == 1
    assert first.read_text().splitlines()[1:-1] == second.read_text().splitlines()[1:-1]
    faster = sim_figures(*words, "--rate", "200", "--scale", "0.5", "--requests", "9")
    assert (faster["requests"], faster["output_tokens"]) == (9, 9 * 6)


def test_the_log_of_a_run_keeps_classes_and_tenants(
    sim_figures: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "run.jsonl"
    others = ["--policy", "fair-share", "--max-num-seqs", "4", "--cost", "unit"]
    words = ["--requests", "40", "--rate", "200", "--classes", "2", "--tenants", "3", *others]
    figures = sim_figures(*words, "--log", str(log))
    assert sim_figures("--workload", str(log), *others) == figures
    assert list(figures["classes"]) == ["0", "1"] and len(figures["tenants"]) == 3


def test_a_recording_is_a_workload(
    sim_figures: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "recording"
    assert main(["generate", "abc", "--max-tokens", "5", "--record", str(file)]) == 0
    capsys.readouterr()
    for model in ("lengths", "hash"):
        figures = sim_figures("--workload", str(file), "--model", model)
        assert (figures["prompt_tokens"], figures["output_tokens"]) == (3, 5)


def test_faults_break_small_worlds_and_no_check(sim: SimCommand) -> None:
    lines = sim("--faults", "abort=0.2", "--seed", "3", "--seeds", "4").splitlines()
    assert lines[0].startswith("seeds       4 from 3, ")
    assert lines[-1] == "violations  none"
    assert any(line.split()[1:2] == ["abort"] for line in lines)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--rate x", "--rate: 'x' is not a number. Give a number"),
        ("--rate 0", "--rate: '0.0' is not a number above 0. Give 1, say"),
        ("--workload nowhere", "--workload: 'nowhere' is no workload and no file. Use poisson, "),
        ("--workload closed --rate 5", "--rate: the workload closed does not accept it. Leave it "),
        (
            "--clients 5",
            "--clients: the workload poisson does not accept it. Leave it out, or take",
        ),
        ("--workload Makefile", "--workload: Makefile begins with "),
        ("--policy nonesuch", "--policy: 'nonesuch' is not known. Use fcfs, shortest-prompt, "),
        ("--policy none.py", "--policy: there is no file 'none.py'. Use "),
        ("--cost free", "--cost: 'free' is not known. Use one of: unit, affine"),
        ("--model gpt", "--model: 'gpt' is not known. Use lengths, hash"),
        ("--prompt none", "--prompt: 'none' is no length. Give 512, 16-1024, "),
        ("--num-speculative-tokens 17", "--num-speculative-tokens: 17 is not from 1 to 16"),
        ("--max-num-seqs 4096", "--max-num-batched-tokens: 2048 is less than max_num_seqs 4096"),
        ("--log /dev/null/x", "--log: '/dev/null/x' cannot be written: "),
        ("--faults bad", "--faults: 'bad' is not known. Give some of: all, "),
        ("--faults all --rate 5", "--rate: a world with faults is drawn from its seed alone."),
        ("--faults all --draw", "draw: a world with faults is drawn from its seed alone."),
        ("--faults all --seeds 0", "--seeds: 0 is not a positive integer"),
        ("--seeds 5", "--seeds: a run without faults has one. Leave it out"),
        ("--rat 5", "there is no option --rat. The nearest is --rate. See forge sim --help"),
        ("frobnicate", "'frobnicate' is one argument too many. See forge sim --help"),
        ("--rate 5 sweep", "'sweep' is one argument too many. See forge sim --help"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(sim: SimCommand, words: str, line: str) -> None:
    assert sim.check_refusal(*words.split()).startswith(f"forge sim: {line}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "",
            "--policies: there is nothing to compare. Give --policies fcfs,ageing or --rates 10,20",
        ),
        ("--rates 10,x", "--rates: '10,x' is not a list of numbers. Give 10,20, say"),
        ("--blocks 0", "--num-blocks: 0 is not a positive integer"),
        ("--policies fcfs,,", "--policy: '' is not known. Use fcfs, "),
        ("--workload closed --rates 1,2", "rate: the workload closed does not accept it."),
        ("--log x", "there is no option --log"),
    ],
)
def test_an_invalid_sweep_is_refused_in_one_line(sim: SimCommand, words: str, line: str) -> None:
    shown = sim.check_refusal("sweep", *words.split())
    assert shown.startswith(f"forge sim sweep: {line}") or shown.startswith(
        f"forge sim sweep: --{line}"
    )


def test_a_policy_that_fails_on_the_way_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "nobody.py"
    file.write_text(
        "from forge.policy import FCFS\npolicy = FCFS._replace(admit=lambda w, c: None)\n"
    )
    assert main(["sim", *TIGHT, "--policy", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"forge sim: 2 requests wait, .*\n", err)


def test_a_recorded_run_is_replayed(
    sim: SimCommand, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "recording"
    assert main(["generate", "abc", "--max-tokens", "5", "--record", str(file)]) == 0
    capsys.readouterr()
    lines = sim("replay", str(file)).splitlines()
    assert lines[1:] == ["decided     5 steps, 1 requests, 5 tokens", "difference  none"]
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    for kept in range(len(lines[0]), len(whole), 11):  # cut after the header, wherever
        file.write_text(whole[:kept])
        assert main(["sim", "replay", str(file)]) == 1
        out, err = capsys.readouterr()
        assert out.splitlines()[-1] == "difference  none"
        assert err == (
            "forge sim replay: FILE: the end of the recording is missing: its disk was full, or "
            "its server still runs or was killed. All before it replays as it was recorded\n"
        )
    file.write_text(whole + lines[1])
    assert f"FILE: line {len(lines) + 1} is not as it was" in sim.check_refusal("replay", str(file))
    file.write_text(whole[: len(lines[0]) - 9])
    assert "FILE: line 1 is not as it was written" in sim.check_refusal("replay", str(file))


def test_a_replay_that_differs_is_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The recording has a policy from a file, and another file is given."""
    file, source = tmp_path / "recording", tmp_path / "mine.py"
    source.write_text("from forge.policy import FCFS\npolicy = FCFS._replace()\n")
    words = ["generate", "abc", "--max-tokens", "5", "--max-num-batched-tokens", "64"]
    assert main([*words, "--policy", str(source), "--record", str(file)]) == 0
    source.write_text(
        "from forge.policy import FCFS, Split\n"
        "policy = FCFS._replace(split=lambda b, n, f, c: Split(n, (1,) * len(f)))\n"
    )
    capsys.readouterr()
    assert main(["sim", "replay", str(file), "--policy", str(source)]) == 1
    out, err = capsys.readouterr()
    assert err == "" and re.search(r"^difference  line \d+: ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "replay nowhere",
            "replay: FILE: 'nowhere' cannot be read: No such file or directory. Name",
        ),
        ("replay Makefile", "replay: FILE: line 1 is not as it was written. Record the run again"),
        ("replay", "replay: the following arguments are required: FILE. See forge sim replay"),
        ("calibrate --minutes 0", "calibrate: --minutes: 0.0 is not from 0 to 60. Give 10, say"),
        (
            "calibrate nonesuch --out /dev/null",
            "calibrate: MODEL: 'nonesuch' is not a model this build serves.",
        ),
        ("calibrate --out /dev/null/x", "calibrate: --out: '/dev/null/x' cannot be written: "),
    ],
)
def test_an_invalid_subcommand_is_refused_in_one_line(
    sim: SimCommand, words: str, line: str
) -> None:
    assert sim.check_refusal(*words.split()).startswith(f"forge sim {line}")


# The page docs/Simulator.md.


def rows_of(table: tuple[Any, ...]) -> list[str]:
    """Return flag, default and help of each row.

    The model is a flag here, and positional elsewhere.
    """
    spelt = [
        f"`{each.metavar}`"
        if each.name == "recording"
        else format_flag(each._replace(name=each.name.replace("model", "a flag")))
        for each in table
    ]
    return [
        format_cells(flag, format_default(each), each.help)
        for flag, each in zip(spelt, table, strict=True)
    ]


def test_the_page_has_a_row_for_every_option() -> None:
    baselines, figures, run, files, faults, axes, capacity, fleet, *rest = parse_tables(PAGE)
    replay, calibrate, explore = rest
    assert len(figures) == 3
    assert run == rows_of(RUN_OPTIONS)
    assert files == [
        *rows_of((*OUTPUT_OPTIONS, VERSUS_OPTION)),
        "| `--draw` | | draw every step on the terminal |",
    ]
    assert faults == rows_of(FAULT_OPTIONS)
    assert baselines == rows_of((BASELINES_OPTION,))
    assert axes == rows_of((*AXIS_OPTIONS, SEEDS_OPTION))
    assert capacity == rows_of((GOOD_SHARE_OPTION,))
    assert fleet == rows_of(FLEET_OPTIONS)
    assert replay == rows_of(REPLAY_OPTIONS)
    assert calibrate == rows_of(CALIBRATION_OPTIONS)
    assert explore == rows_of(EXPLORATION_OPTIONS)
