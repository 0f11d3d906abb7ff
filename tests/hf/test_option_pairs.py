"""Options of a checkpoint on torch start together: see tests/engine/option_groups.py."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forge.models.embedded import embedded_folder  # noqa: E402
from tests.engine.option_groups import BASE, GROUPS, Outcome, PairRun, pairs_of  # noqa: E402
from tests.engine.test_option_pairs import BY_NAME, print_outcomes  # noqa: E402
from tests.hf.forked_processes import fork_engines_and_ranks  # noqa: E402

pytestmark = pytest.mark.torch

TINY = str(embedded_folder("tiny"))
"""The folder's name: a checkpoint on torch."""
ON_CPU = {**BASE, "device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(("first", "second"), [("disk", "ngram"), ("host", "draft")])
def test_speculation_and_host_memory_start_together(
    first: str, second: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    outcome = PairRun(TINY, ON_CPU, tmp_path).start(BY_NAME[first], BY_NAME[second])
    assert outcome == Outcome(first, second)


@pytest.mark.soak
def test_all_pairs_start_or_are_refused_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    fork_engines_and_ranks(monkeypatch)
    run = PairRun(TINY, ON_CPU, tmp_path)
    print_outcomes(run.start(*pair) for pair in pairs_of(GROUPS))
