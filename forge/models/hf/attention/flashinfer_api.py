"""FlashInfer: the parts of it that forge calls, checked before the first call.

Owns the import of flashinfer and the names, arguments and private attribute that forge depends on.
Knows no KV cache, no plan and no step. No other module of forge imports flashinfer.
`describe_prefill_module` names a compiled module: flashinfer_modules.py.

    flashinfer ──► check_flashinfer() ──► FlashInferWrappers     flashinfer_prefill.py calls
                      │                                          plan() and run()
                      └── InvalidConfig: a name or an argument is gone or has another position

`plan_info` reads a private attribute. FlashInfer has no public way to find out whether two plans
have the same layout, and a graph captured with one layout computes wrong outputs with another.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from forge.errors import InvalidConfig
from forge.version import install_remedy

PLAN_INFO = "_plan_info"
"""Attribute of a wrapper that its plan() assigns: the layout, a sequence of ints."""

PLAN_OPTIONS = ("causal", "sm_scale", "q_data_type", "kv_data_type", "non_blocking")


class CallSignature(NamedTuple):
    """Arguments that forge passes to a method: `positional` by position, `keywords` by name."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]


CALLS: dict[str, dict[str, CallSignature]] = {
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": CallSignature(
            ("float_workspace_buffer", "kv_layout"),
            (
                *("backend", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf"),
                *("paged_kv_indices_buf", "paged_kv_last_page_len_buf"),
            ),
        ),
        "plan": CallSignature(
            (
                *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
                *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
            ),
            (*PLAN_OPTIONS, "window_left", "logits_soft_cap"),
        ),
        "run": CallSignature(("q", "paged_kv_cache"), ("out",)),
    },
    "BatchPrefillWithRaggedKVCacheWrapper": {
        "__init__": CallSignature(("float_workspace_buffer", "kv_layout"), ("backend",)),
        "plan": CallSignature(
            ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk"),
            PLAN_OPTIONS,
        ),
        "run": CallSignature(("q", "k", "v"), ("out",)),
    },
}
"""Every call of FlashInfer that forge makes."""


class FlashInferWrappers(NamedTuple):
    """FlashInfer's attention over a paged KV cache, and over contiguous keys and values."""

    paged: Any
    ragged: Any


def load_wrappers() -> FlashInferWrappers:
    """Import FlashInfer, which takes seconds the first time.

    Raise InvalidConfig where it is missing.
    """
    try:
        import flashinfer
    except ModuleNotFoundError as missing:
        raise InvalidConfig(
            "device",
            f"the GPU's kernels need {missing.name}, which is not installed",
            install_remedy("gpu"),
        ) from None
    return check_flashinfer(flashinfer)


def describe_prefill_module(
    backend: str, dtype: Any, head_dim: int, *, has_window: bool, has_softcap: bool
) -> Any:
    """Return FlashInfer's JitSpec of a prefill module, and write its sources where they differ.

    dtype   of queries, keys, values and outputs
    """
    import torch
    from flashinfer.jit import gen_batch_prefill_module

    no_positions, no_fp16_sums = 0, False
    return gen_batch_prefill_module(
        *(backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, no_positions),
        *(has_window, has_softcap, no_fp16_sums),
    )


def check_flashinfer(library: Any) -> FlashInferWrappers:
    """Return FlashInfer's wrappers. Raise InvalidConfig where a call has other arguments."""
    for name, methods in CALLS.items():
        wrapper = getattr(library, name, None)
        if wrapper is None:
            raise _api_error(library, f"has no {name}")
        for method, call in methods.items():
            if problem := _signature_problem(getattr(wrapper, method, None), call):
                raise _api_error(library, f"{name}.{method} {problem}")
        if PLAN_INFO not in inspect.unwrap(wrapper.plan).__code__.co_names:
            raise _api_error(library, f"{name}.plan assigns no {PLAN_INFO}")
    return FlashInferWrappers(*(getattr(library, name) for name in CALLS))


def plan_info(wrapper: Any) -> tuple[int, ...]:
    """Return the layout of the wrapper's last plan, for comparison with another's."""
    layout = tuple(getattr(wrapper, PLAN_INFO))
    assert all(type(each) is int for each in layout), f"FlashInfer's plan is {layout}, not integers"
    return layout


def _signature_problem(method: Any, call: CallSignature) -> str | None:
    if method is None:
        return "is gone"
    _, *arguments = inspect.signature(method).parameters.values()
    positional = [each.name for each in arguments if each.kind is each.POSITIONAL_OR_KEYWORD]
    if tuple(positional[: len(call.positional)]) != call.positional:
        return (
            f"begins with {', '.join(positional[: len(call.positional)])}, not "
            f"{', '.join(call.positional)}"
        )
    names = {each.name for each in arguments}
    if missing := [each for each in call.keywords if each not in names]:
        return f"takes no {', '.join(missing)}"
    needed = [each.name for each in arguments if _is_required(each)]
    if unexpected := [each for each in needed if each not in call.positional + call.keywords]:
        return f"needs {', '.join(unexpected)}"
    return None


def _is_required(argument: inspect.Parameter) -> bool:
    variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    return argument.default is argument.empty and not variadic


def _api_error(library: Any, problem: str) -> InvalidConfig:
    version = getattr(library, "__version__", "of an unknown version")
    return InvalidConfig(
        "device",
        f"flashinfer {version} is not the one that forge calls: {problem}",
        "Run pip install flashinfer-python==0.6.14",
    )
