"""Checkpoints of all forms are served as transformers computes them, or refused by name.

One device, a second start from its record, and two ranks: equal tokens, or an equal refusal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge import LLM, SamplingParams  # noqa: E402
from forge.config import DeviceOptions  # noqa: E402
from forge.engine import Engine  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from forge.request import Request  # noqa: E402
from tests.hf.checkpoint_cases import (  # noqa: E402
    DIVISIBLE,
    EXTRAS,
    NUM_TOKENS,
    PLAIN,
    PROMPT,
    Case,
    drop_metadata,
    greedy_tokens,
    load_reference,
    sample_cases,
    whole_matrix,
    write_ends,
    write_weights,
)
from tests.hf.test_model import run  # noqa: E402
from tests.hf.thread_ranks import create_communicators, run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]
OPTIONS = DeviceOptions(device="cpu", dtype="float32")
GEOMETRY: Any = {"num_blocks": 8, "block_size": 8, "max_model_len": 32, "max_num_seqs": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0)

Outcome = tuple[list[int], list[float]] | str
"""Tokens and log probabilities, or a refusal."""


@pytest.fixture(autouse=True)
def _one_thread_and_own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of each family's tensors."""
    return tmp_path_factory.mktemp("saved")


def serve(folder: Path, communicator: Any = None) -> Outcome:
    """Return what an engine gives on this rank."""
    try:
        with open_model(str(folder), GEOMETRY, OPTIONS, communicator=communicator) as opened:
            engine = Engine(opened.model, opened.config)
            deltas = run(engine, Request(0, tuple(PROMPT), GREEDY)).deltas
    except InvalidConfig as refusal:
        return str(refusal)
    samples = [sample for delta in deltas for sample in delta.logprobs]
    return [each.token for each in samples], [each.logprob for each in samples]


def serve_on_ranks(folder: Path) -> Outcome:
    """Return what two ranks give, which must be equal."""
    first, second = run_ranks(create_communicators(2), lambda rank: serve(folder, rank))
    assert first == second or isinstance(first, str)
    return first


def expected_refusal(case: Case, report: dict[str, Any], ends: set[int]) -> str | None:
    """Return words of the refusal that a case must get, by transformers' report; None: served."""
    if case.layout == "stale copy":
        return "which model.safetensors.index.json gives to"
    if not ends:
        return "neither its tokenizer nor its config names an end token"
    extra, refusal = EXTRAS[case.extra]
    if case.dtype == "float8" or refusal == "quantised":
        return "quantised weights"
    if report["missing_keys"]:
        return "lacks weights"
    unexpected = {name for name in report["unexpected_keys"] if name not in extra or refusal}
    assert not unexpected or refusal, unexpected
    return refusal


def check(case: Case, folder: Path, saved: Path) -> bool:
    """Compare every way to serve the case with transformers. Return whether it is served."""
    write_weights(case, folder, saved)
    module, report = load_reference(folder)
    if case.layout == "no metadata":
        drop_metadata(folder)
    tokens, logprobs = greedy_tokens(module)
    ends = write_ends(case, tokens, folder)
    refusal = expected_refusal(case, report, ends)
    outcomes = {"one device": serve(folder), "from the record": serve(folder)}
    ranks = serve_on_ranks(folder)
    if case.family in DIVISIBLE:
        outcomes["two ranks"] = ranks
    else:
        assert isinstance(ranks, str)
        assert refusal is not None or "are not known to be divisible" in ranks, ranks
    if refusal is not None:
        lines = set(map(str, outcomes.values()))
        assert len(lines) == 1 and refusal in lines.pop(), outcomes
        return False
    cut = [index + 1 for index, token in enumerate(tokens) if token in ends]
    end = min(cut, default=NUM_TOKENS)
    for way, outcome in outcomes.items():
        assert not isinstance(outcome, str), f"{way}: {outcome}"
        assert outcome[0] == tokens[:end], way
        assert outcome[1] == pytest.approx(logprobs[:end], abs=2e-5), way
    return True


@pytest.mark.parametrize("case", sample_cases(3, seed=39), ids=str)
def test_a_checkpoint_is_served_alike_or_refused_alike(
    case: Case, tmp_path: Path, saved: Path
) -> None:
    check(case, tmp_path / "checkpoint", saved)


@pytest.mark.parametrize(
    ("ties", "head"), [(True, "different"), (True, "head"), (False, "embedding")]
)
def test_the_names_in_the_files_decide_whether_the_head_is_the_embedding(
    ties: bool, head: str, tmp_path: Path, saved: Path
) -> None:
    is_served = check(PLAIN._replace(ties=ties, head=head), tmp_path / "checkpoint", saved)
    assert is_served == ties


@pytest.mark.long
def test_the_whole_matrix(tmp_path: Path, saved: Path) -> None:
    """Counts of what was served and refused."""
    cases = whole_matrix()
    served = [check(case, tmp_path / str(index), saved) for index, case in enumerate(cases)]
    print(f"{len(cases)} checkpoints: {sum(served)} served, {len(cases) - sum(served)} refused")
    assert 0.4 < sum(served) / len(cases) < 0.9


@pytest.mark.long
@pytest.mark.parametrize("head", ["different", "equal", "head"])
def test_processes_serve_a_head_of_the_files_as_threads_do(
    head: str, tmp_path: Path, saved: Path
) -> None:
    case = PLAIN._replace(head=head, layout="two files", prefix=False)
    assert check(case, tmp_path / "checkpoint", saved)
    options: Any = {**GEOMETRY, "device": "cpu", "dtype": "float32"}
    found = []
    for ranks in (1, 2):
        with LLM(str(tmp_path / "checkpoint"), tensor_parallel_size=ranks, **options) as llm:
            (output,) = llm.generate([PROMPT], GREEDY)
            found.append(output.token_ids)
    assert found[0] == found[1]
