"""FlashInfer's API is checked at its import, and refused where it differs from forge's calls."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.attention.flashinfer_api import check_flashinfer, load_wrappers, plan_info  # noqa: E402

pytestmark = pytest.mark.torch
HF = Path(__file__).resolve().parents[2] / "forge" / "models" / "hf"


class PagedWrapper:
    """FlashInfer's paged wrapper, with arguments that forge does not pass as well."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None: ...

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        non_blocking: bool = True,
    ) -> None:
        self._plan_info = [1, 2]

    def run(self, q: Any, paged_kv_cache: Any, *args: Any, out: Any = None) -> None: ...


class RaggedWrapper:
    """FlashInfer's wrapper over contiguous keys and values."""

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None: ...

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        non_blocking: bool = True,
    ) -> None:
        self._plan_info = [1, 2]

    def run(self, q: Any, k: Any, v: Any, *args: Any, out: Any = None) -> None: ...


def fake_library(**changed: Any) -> Any:
    """FlashInfer with the API that forge calls, some methods of its paged wrapper replaced."""
    paged = type("Paged", (PagedWrapper,), changed)
    return SimpleNamespace(
        __version__="0.7.0",
        BatchPrefillWithPagedKVCacheWrapper=paged,
        BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapper,
    )


def run_with_moved_argument(self: Any, paged_kv_cache: Any, q: Any, *, out: Any = None) -> None: ...
def run_with_renamed_argument(
    self: Any, q: Any, paged_kv_cache: Any, *, output: Any = None
) -> None: ...
def run_with_extra_argument(
    self: Any, q: Any, paged_kv_cache: Any, plan: Any, *, out: Any = None
) -> None: ...


def public(self: Any, *args: Any, **named: Any) -> None:
    self.plan_info = [1, 2]


public.__signature__ = inspect.signature(PagedWrapper.plan)  # type: ignore[attr-defined]


def test_a_library_that_takes_every_argument_gives_its_wrappers() -> None:
    known = fake_library()
    assert check_flashinfer(known) == (
        known.BatchPrefillWithPagedKVCacheWrapper,
        known.BatchPrefillWithRaggedKVCacheWrapper,
    )


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"run": run_with_moved_argument},
            r"run begins with paged_kv_cache, q, not q, paged_kv_cache",
        ),
        ({"run": run_with_renamed_argument}, r"run takes no out"),
        ({"run": run_with_extra_argument}, r"run needs plan"),
        ({"run": None}, r"run is gone"),
        ({"plan": public}, r"plan assigns no _plan_info"),
    ],
)
def test_a_library_that_differs_is_refused_by_the_call(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidConfig, match=rf"flashinfer 0\.7\.0 .*{problem}\. .*0\.6\.14"):
        check_flashinfer(fake_library(**changed))


def test_a_library_without_a_wrapper_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidConfig, match="has no BatchPrefillWithPagedKVCacheWrapper"):
        check_flashinfer(SimpleNamespace(__version__="0.7.0"))


def test_the_layout_of_a_plan_is_integers() -> None:
    """Other values might compare by identity, and no graph would ever be replayed."""
    assert plan_info(SimpleNamespace(_plan_info=[3, 4])) == (3, 4)
    with pytest.raises(AssertionError, match="not integers"):
        plan_info(SimpleNamespace(_plan_info=[3, object()]))


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_without_flashinfer_the_refusal_says_how_to_install_it() -> None:
    with pytest.raises(InvalidConfig, match=r"need flashinfer, which .* '\.\[gpu\]'"):
        load_wrappers()


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.filterwarnings("ignore")  # of the library's own imports
def test_the_installed_flashinfer_is_the_one_that_forge_calls() -> None:
    assert [each.__name__ for each in load_wrappers()] == [
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ]


def test_one_module_imports_flashinfer_and_reads_what_is_private_there() -> None:
    users = [
        path.name
        for path in sorted(HF.rglob("*.py"))
        if any(
            word in path.read_text(encoding="utf-8")
            for word in ("import flashinfer", "from flashinfer", "_plan_info")
        )
    ]
    assert users == ["flashinfer_api.py"]
