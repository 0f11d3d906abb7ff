"""Causal classes of transformers, tiny: served tokens are those of transformers, or a refusal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING  # noqa: E402

from tests.hf import class_check, tiny_configs  # noqa: E402
from tests.hf.class_check import CLASSES, DTYPES, FAILURES, ClassOutcome, examine  # noqa: E402
from tests.hf.model_classes import (  # noqa: E402
    BEGIN,
    END,
    PAGE,
    QUICK,
    differences,
    failures,
    page_lines,
    run_jobs,
    summaries,
    table,
    versions,
    with_table,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", [kind for kind in QUICK if kind in CLASSES])
def test_a_class_gives_the_tokens_of_transformers_or_is_refused_as_the_page_says(kind: str) -> None:
    outcomes = [examine(kind, dtype) for dtype in DTYPES]
    assert failures(outcomes) == []
    page = PAGE.read_text("utf-8")
    if versions() in page:  # other versions may refuse other classes
        assert differences(outcomes, page) == []


def test_the_page_has_every_model_type_and_no_failure() -> None:
    page = PAGE.read_text("utf-8")
    lines = page_lines(page)
    if versions() in page:
        assert lines.keys() == CLASSES.keys()
    assert [kind for kind, line in lines.items() if re.search("|".join(FAILURES), line)] == []


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [None, *range(4)])
def test_every_class_gives_the_tokens_of_transformers_or_is_refused(seed: int | None) -> None:
    """With a seed, optional fields have other values than their defaults."""
    jobs = [(kind, dtype, seed) for kind in CLASSES for dtype in DTYPES]
    assert failures(run_jobs(jobs)) == []


# What the examination sees.


def compare_served_as(
    folder: Path, kind: str, dtype: str, served: dict[str, Any], **true: Any
) -> str:
    """Return faults of a model that is served with other fields than the true one has."""
    config = CONFIG_MAPPING[kind](**small(kind), **true)
    config.architectures = [CLASSES[kind]]
    models = class_check.build(config, CLASSES[kind], folder, dtype, tiny_configs.WEAK_DEVIATION)
    for name, value in served.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    run = class_check.serve(folder, dtype)
    return class_check.find_faults(class_check.compare(run, *models), dtype)


def small(kind: str) -> dict[str, Any]:
    default = CONFIG_MAPPING[kind]()
    fields = tiny_configs.small_fields(default)
    return {
        name: fields[name] for name in fields if name not in ("sliding_window", "no_rope_layers")
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "served", "true"),
    [
        ("mistral", {}, {}),
        ("mistral", {"sliding_window": None}, {"sliding_window": 20}),
        ("mistral", {"sliding_window": 20}, {"sliding_window": 21}),
        ("mistral", {"rms_norm_eps": 1e-2}, {"rms_norm_eps": 1e-6}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, {"no_rope_layers": [1, 1, 1, 0]}),
    ],
)
def test_a_field_that_is_ignored_is_a_wrong_token_in_either_dtype(
    tmp_path: Path,
    kind: str,
    served: dict[str, Any],
    true: dict[str, Any],
    dtype: str,
) -> None:
    """Weights are weak here: each layer changes little, and so does what it does wrong."""
    assert bool(compare_served_as(tmp_path, kind, dtype, served, **true)) == bool(served)


# The table.

OUTCOMES = [
    ClassOutcome("gpt2", "float32", None, "fused"),
    ClassOutcome("gpt2", "bfloat16", None, "fused"),
    ClassOutcome("gpt-sw3", "float32", None, "fused"),
    ClassOutcome("gpt-sw3", "bfloat16", None, "WRONG", "fused: far"),
    ClassOutcome("bloom", "float32", None, "refused", "has ALiBi"),
    ClassOutcome("bloom", "bfloat16", None, "refused", "has ALiBi"),
]


def test_a_table_says_again_what_it_was_made_of() -> None:
    lines = summaries(OUTCOMES)
    assert lines["gpt-sw3"] == "float32 fused; bfloat16 WRONG: fused: far"
    page = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", table(lines))
    assert page_lines(page) == lines
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert "| fused | GPT2LMHeadModel (`gpt2`) |" in page


def test_a_page_that_says_something_else_is_found() -> None:
    page = with_table(f"{BEGIN}{END}", table(summaries(OUTCOMES[:2])))
    assert differences(OUTCOMES[:2], page) == []
    assert differences(OUTCOMES[:4], page) == [
        "gpt-sw3: the page says None, and it is 'float32 fused; bfloat16 WRONG: fused: far'"
    ]
    assert failures(OUTCOMES) == ["gpt-sw3 bfloat16 seed None: WRONG: fused: far"]
