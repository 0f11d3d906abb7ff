"""The prefill kernel: outputs of plain torch for rows of any length, each as if it were alone.

A case makes random blocks, tables and rows. It runs TorchAttention in float64 and the kernel in its
own dtype, and returns the largest relative difference of the outputs. Positions that no row reads
hold NaN, so that reading one shows. In most cases a tile has few keys: short rows have many tiles.

Without a GPU the kernel runs in Triton's interpreter, in a process of its own: the interpreter is
chosen when triton is imported, and every other test needs the compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, RowSpan  # noqa: E402
from forge.models.hf.attention.reference import TorchAttention  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from tests.hf.test_triton_decode import (  # noqa: E402
    BOUNDS,
    _let_one_number_be_an_integer,
    draw,
    error,
    needs_compiler,
)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(150)]
NUM_OTHER_TOKENS = 3
"""Tokens before and after the rows, which belong to none."""


class PrefillCase(NamedTuple):
    """One layer and the rows of one step.

    rows       start and end of each row
    page       positions of a block
    page_dim   head size in the cache; 0: the head's own
    tile       packed queries and keys of a tile
    overlap    multiply weights and values one tile late
    alone      rows that also run alone
    """

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 16
    page: int = 16
    page_dim: int = 0
    window: int = 0
    cap: float = 0.0
    tile: tuple[int, int] = (64, 32)
    overlap: bool = True
    alone: tuple[int, ...] = ()


RAGGED = ((0, 1), (0, 37), (37, 37), (21, 60), (90, 91), (63, 66))
"""A row of one token, a prompt, an empty row, a chunk, one token after a prefix, a tile's edge."""

PAIR = ((0, 37), (21, 60))
MANY_ROWS = (*[(5, 5)] * 127, (0, 3), (0, 0), (2, 5), (4, 4), (30, 36))
"""More rows than a program searches at once, most of them empty."""

CASES: dict[str, PrefillCase] = {
    "one token": PrefillCase(((0, 1),)),
    "ragged": PrefillCase(RAGGED, alone=(1, 3, 4)),
    "ragged, product last": PrefillCase(RAGGED, overlap=False, alone=(3,)),
    "a key head for each": PrefillCase(PAIR, heads=2, kv_heads=2),
    "groups of 5": PrefillCase(PAIR, heads=10, kv_heads=2),
    "groups of 8": PrefillCase(PAIR, heads=8),
    "groups of more than a tile": PrefillCase(((0, 5), (30, 33)), heads=24, tile=(16, 32)),
    "blocks of one": PrefillCase(PAIR, page=1),
    "blocks of 7": PrefillCase(PAIR, page=7),
    "blocks of a tile": PrefillCase(PAIR, page=32),
    "blocks of two tiles": PrefillCase(RAGGED, page=64),
    "window": PrefillCase(RAGGED, window=20, alone=(3,)),
    "window, product last": PrefillCase(PAIR, window=20, overlap=False),
    "window of one": PrefillCase(PAIR, window=1),
    "window over tiles, one head": PrefillCase(((0, 150), (70, 130)), heads=1, window=50),
    "window longer than any row": PrefillCase(PAIR, window=500),
    "soft cap": PrefillCase(PAIR, cap=2.0),
    "window and soft cap": PrefillCase(PAIR, cap=1.5, window=25),
    "heads of 96 in pages of 128": PrefillCase(PAIR, head_dim=96, page_dim=128),
    "heads of 256": PrefillCase(PAIR, head_dim=256),
    "empty rows only": PrefillCase(((5, 5), (0, 0))),
    "132 rows": PrefillCase(MANY_ROWS, heads=1),
    "keys of an H200's tiles": PrefillCase(((190, 270), (127, 130)), tile=(64, 128), page=64),
}
HALF_CASES = ("ragged", "window and soft cap")
INTERPRETED = [("float32", name) for name in CASES] + [("float16", name) for name in HALF_CASES]

GPU_CASES: dict[str, PrefillCase] = {
    "Qwen3-4B": PrefillCase(((0, 700), (0, 3), (1500, 2100), (64, 192)), 32, 8, 128, 64),
    "Qwen3-4B, blocks of 16": PrefillCase(((0, 700), (1500, 2100)), 32, 8, 128, 16),
    "Qwen3-14B": PrefillCase(((0, 700), (1500, 2100)), 40, 8, 128, 64),
    "heads of 64": PrefillCase(((0, 700), (1500, 2100)), 32, 8, 64, 64),
    "Gemma 2": PrefillCase(((0, 900), (4500, 5000)), 8, 4, 256, 64, window=4096, cap=50.0),
}


class Step(NamedTuple):
    """A case's numbers on one device, in one dtype."""

    pool: KVCache
    spec: LayerSpec
    queries: Any
    spans: tuple[RowSpan, ...]


def step_of(case: PrefillCase, device: Any, dtype: Any) -> Step:
    """Return the case's numbers. Slots are not in order, and blocks are anywhere."""
    counts = [-(-end // case.page) for _, end in case.rows]
    pool = KVCache(
        KVCacheSpec(2, case.kv_heads, case.page_dim or case.head_dim, dtype),
        num_blocks=sum(counts) + 3,
        block_size=case.page,
        num_slots=len(case.rows) + 2,
        max_model_len=max(end for _, end in case.rows) + case.page,
        device=device,
    )
    order = torch.Generator().manual_seed(2)
    pages = torch.randperm(pool.max_num_blocks, generator=order).int()
    slots = torch.randperm(len(case.rows) + 2, generator=order)[: len(case.rows)].tolist()
    pool.data.fill_(float("nan"))
    spans, first_token = [], NUM_OTHER_TOKENS
    for row, (slot, (start, end)) in enumerate(zip(slots, case.rows, strict=True)):
        pool.block_tables[slot, : counts[row]], pages = pages[: counts[row]], pages[counts[row] :]
        numbers = draw(10 + row, 2, end, case.kv_heads, case.head_dim).to(device, dtype)
        positions = torch.arange(end, device=device)
        mapping = pool.slot_mapping(torch.full_like(positions, slot), positions)
        for part in (pool.keys[1], pool.values[1]):
            part[mapping // case.page, mapping % case.page] = 0.0
        pool.write(1, numbers[0], numbers[1], mapping)
        spans.append(RowSpan(slot, start, end, first_token))
        first_token += end - start
    queries = draw(4, first_token + NUM_OTHER_TOKENS, case.heads, case.head_dim)
    spec = LayerSpec(
        case.heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, case.window, case.cap
    )
    return Step(pool, spec, queries.to(device, dtype), tuple(spans))


def attend_by_torch(step: Step) -> Any:
    """Return the outputs of plain torch in float64, on the CPU."""
    pool = step.pool
    reference = KVCache(
        pool.spec._replace(dtype=torch.float64),
        num_blocks=pool.max_num_blocks,
        block_size=pool.block_size,
        num_slots=pool.num_slots,
        max_model_len=pool.block_tables.shape[1] * pool.block_size,
        device=torch.device("cpu"),
    )
    reference.block_tables.copy_(pool.block_tables)
    head_dim = step.spec.head_dim
    reference.data.copy_(pool.data.double())
    reference.keys = [each[..., :head_dim] for each in reference.keys]
    reference.values = [each[..., :head_dim] for each in reference.values]
    attention = TorchAttention(reference, [step.spec] * 2)
    none = torch.zeros(0, dtype=torch.int32)
    spans = [span for span in step.spans if span.end > span.start]
    attention.plan(AttentionMetadata(spans, 0, none, none))
    queries = step.queries.cpu().double()
    return attention.attend(1, queries, queries, queries)


def figures(case: PrefillCase, device: Any, dtype: Any, configs: Any) -> dict[str, float]:
    """Return the largest difference from plain torch, and counts of what must not be.

    touched   numbers of tokens outside of all rows that were written
    shared    numbers of a row that differ where the row is alone
    """
    from forge.models.hf.attention.triton_prefill import PrefillAttention, upload_prefill_rows

    step = step_of(case, device, dtype)
    expected = attend_by_torch(step)
    kernel = PrefillAttention(step.pool, [step.spec] * 2)
    first, last = NUM_OTHER_TOKENS, len(step.queries) - NUM_OTHER_TOKENS
    rows = upload_prefill_rows(step.spans, device)
    errors, touched, shared = [0.0], 0.0, 0.0
    for config in configs:
        out = torch.full_like(step.queries, 7.0)
        kernel.launch_config(config, out, 1, step.queries, rows)
        if first < last:
            errors.append(error(out[first:last], expected[first:last]))
        touched += float((out[:first] != 7.0).sum() + (out[last:] != 7.0).sum())
        for index in case.alone:
            span = step.spans[index]
            tokens = slice(span.first_token, span.first_token + span.end - span.start)
            alone = torch.zeros_like(out[tokens])
            row = upload_prefill_rows([span._replace(first_token=0)], device)
            kernel.launch_config(config, alone, 1, step.queries[tokens], row)
            shared += float((alone != out[tokens]).sum())
    return {"outputs": max(errors), "touched": touched, "shared": shared}


def case_config(case: PrefillCase) -> Any:
    """Return the case's tiles."""
    from forge.models.hf.attention.triton_prefill import PrefillConfig

    return PrefillConfig(*case.tile, 4, 2, case.overlap)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, dict[str, float]]]:
    """Every case's figures by dtype, from a process in which Triton interprets."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.test_triton_prefill"],
        capture_output=True,
        text=True,
        env=env,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_figures(found: dict[str, float], bound: float) -> None:
    assert found["outputs"] < bound
    assert (found["touched"], found["shared"]) == (0.0, 0.0)


@pytest.mark.parametrize(("dtype", "name"), INTERPRETED)
def test_the_interpreted_kernel_agrees_with_plain_torch_in_float64(
    interpreted: dict[str, dict[str, dict[str, float]]], dtype: str, name: str
):
    check_figures(interpreted[dtype][name], BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("name", {**CASES, **GPU_CASES})
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_compiled_kernel_agrees_with_plain_torch_in_float64(dtype: str, name: str):
    kernel = pytest.importorskip("forge.models.hf.attention.triton_prefill")
    case = {**CASES, **GPU_CASES}[name]
    configs = kernel.select_prefill_configs(case.page_dim or case.head_dim)
    tiles = [case_config(case)] if name in CASES else [configs.small, configs.large]
    found = figures(case, torch.device("cuda"), getattr(torch, dtype), tiles)
    check_figures(found, BOUNDS[dtype])


def test_small_tiles_are_for_steps_that_leave_multiprocessors_idle():
    kernel = pytest.importorskip("forge.models.hf.attention.triton_prefill")
    configs = kernel.select_prefill_configs(128)
    # 512 tokens of groups of 4 are 16 tiles of 128, for each of 8 key heads.
    assert configs.select_config(512 * 4, 8) == configs.small
    assert configs.select_config(528 * 4, 8) == configs.large


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_all_tiles_of_a_head_size_divide_keys_equally_and_fit_into_shared_memory(head_dim: int):
    """A block of an H200 has 227 KiB: queries, and in each stage a tile of keys and of values."""
    kernel = pytest.importorskip("forge.models.hf.attention.triton_prefill")
    configs = kernel.select_prefill_configs(head_dim)
    assert configs.small.block_n == configs.large.block_n
    for config in (configs.small, configs.large):
        assert config.block_m == 16 * config.num_warps
        tiles = config.block_m + 2 * config.num_stages * config.block_n
        assert tiles * head_dim * 2 <= 227 * 1024


def test_a_gap_between_rows_is_refused():
    kernel = pytest.importorskip("forge.models.hf.attention.triton_prefill")
    spans = [RowSpan(0, 0, 4, 2), RowSpan(1, 0, 4, 7)]
    with pytest.raises(AssertionError, match="does not begin at token 6"):
        kernel.upload_prefill_rows(spans, torch.device("cpu"))


def compile_for_hopper(head_dim: int, size: str) -> Any:
    """Compile the tiles of a size for sm_90a, which needs no GPU: 32 heads, 8 key heads."""
    module = pytest.importorskip("forge.models.hf.attention.triton_prefill")
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    config = getattr(module.select_prefill_configs(head_dim), size)
    kernel, names = module.prefill_attention, module.prefill_attention.arg_names
    constants: dict[str, Any] = {
        **{"SOFTCAP": 0.0, "WINDOW": 0, "Q_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim},
        **{"HEAD_DIM_PADDED": head_dim, "BLOCK_SIZE": 64, "BLOCK_M": config.block_m},
        **{"BLOCK_N": config.block_n, "NUM_STAGES": config.num_stages},
        "OVERLAP_SOFTMAX": config.overlap_softmax,
    }
    int_arrays = ("slots", "query_starts", "kv_lens", "block_tables")
    numbers = ("num_rows", "num_tiles", "q_stride", "out_stride", "table_stride")
    kinds = {**dict.fromkeys(int_arrays, "*i32"), **dict.fromkeys(numbers, "i32"), "scale": "fp32"}
    signature = {
        each: "constexpr" if each in constants else kinds.get(each, "*bf16") for each in names
    }
    lines = ("q", "out", "kv", "block_tables", "q_stride", "out_stride")
    source = compiler.ASTSource(
        kernel,
        signature,
        {(names.index(each),): value for each, value in constants.items()},
        {(names.index(each),): [["tt.divisibility", 16]] for each in lines},
    )
    return compiler.compile(source, target=target, options={"num_warps": config.num_warps})


@needs_compiler
@pytest.mark.parametrize(("head_dim", "size"), [(128, "small"), (128, "large"), (256, "large")])
def test_products_stay_in_flight_on_hopper(head_dim: int, size: str, tmp_path: Any):
    """ptxas says so where it waits after each wgmma, and that alone would halve the speed."""
    compiled = compile_for_hopper(head_dim, size)
    ptx, tool = compiled.asm["ptx"], pytest.importorskip("triton.knobs").nvidia.ptxas.path
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [tool, "-v", "--gpu-name=sm_90a", str(tmp_path / "kernel.ptx")]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "kernel.o")], capture_output=True, text=True, check=True
    )
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx
    assert "Used " in done.stderr and "serialized" not in done.stderr


def _main() -> None:
    _let_one_number_be_an_integer()
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    found: dict[str, dict[str, dict[str, float]]] = {"float32": {}, "float16": {}}
    for dtype, name in INTERPRETED:
        case = CASES[name]
        found[dtype][name] = figures(case, cpu, getattr(torch, dtype), [case_config(case)])
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
