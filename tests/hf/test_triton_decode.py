"""The decode kernel: outputs of plain torch for every split, and no spills in Hopper's code.

A case makes random blocks, tables and a step of one token per row. It runs TorchOps.rope_and_cache
and TorchAttention in float64 and the kernel in its own dtype, and returns the largest relative
difference of what both write: outputs, blocks, and the scratch that later steps find. The number of
rows selects how a step is split, so a case selects its split by its rows.

Without a GPU the kernel runs in Triton's interpreter, in a process of its own: the interpreter is
chosen when triton is imported, and every other test needs the compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.attention.interface import AttentionMetadata, LayerSpec, QKNormRope, RowSpan  # noqa: E402
from forge.models.hf.attention.reference import TorchAttention  # noqa: E402
from forge.models.hf.kv_cache import KVCache, KVCacheSpec  # noqa: E402
from forge.models.hf.ops.reference import TorchOps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(150)]
EPS = 0.1
"""Large, so that a norm without it shows."""


class DecodeCase(NamedTuple):
    """One layer and one step.

    lengths    positions of each row, the new one included
    page_dim   head size in the cache; 0: the head's own
    rot        dimensions that turn; 0: all
    norms      weights of a norm of every head: 2, or 0
    """

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    page: int = 16
    page_dim: int = 0
    rot: int = 0
    norms: int = 0
    window: int = 0
    cap: float = 0.0


def row_lengths(rows: int) -> tuple[int, ...]:
    """Return lengths from one position to 80, some shorter than the splits."""
    return tuple(1 + i * 37 % 80 for i in range(rows))


CASES: dict[str, DecodeCase] = {
    "1 row, 1 position": DecodeCase((1,)),
    "1 row in 32 splits": DecodeCase((530,)),
    "1 row, one position more than a tile": DecodeCase((66,)),
    "2 rows in 16 splits": DecodeCase((2, 300)),
    "4 rows in 8 splits": DecodeCase((1, 15, 65, 300), heads=4, kv_heads=2),
    "6 rows in 8 splits": DecodeCase((1, 2, 16, 33, 64, 260)),
    "12 rows, not cut": DecodeCase(row_lengths(12)),
    "9 rows in up to 4 splits": DecodeCase((1, 256, 257, 258, 300, 513, 514, 1000, 1500)),
    "50 rows, not cut": DecodeCase(row_lengths(50)),
    "24 rows in up to 2 splits": DecodeCase((*row_lengths(20), 513, 514, 900, 1500)),
    "window": DecodeCase((1, 15, 130), window=20),
    "window over splits": DecodeCase((150, 151, 300), window=150),
    "window of one": DecodeCase((1, 2, 33), window=1),
    "soft cap": DecodeCase((1, 15, 130), cap=2.0),
    "window and soft cap": DecodeCase((1, 70, 200), cap=1.5, window=90),
    "norms": DecodeCase((1, 130), norms=2),
    "norms of a window": DecodeCase((17, 130), norms=2, window=70),
    "part of each head turns": DecodeCase((1, 70), rot=8, norms=2),
    "part of each head turns, without norms": DecodeCase((1, 70), rot=8),
    "heads of 96 in pages of 128": DecodeCase((17, 140), head_dim=96, page_dim=128, norms=2),
    "heads of 96 turn in part": DecodeCase((1, 140), head_dim=96, page_dim=128, rot=48),
    "heads of 128": DecodeCase((1, 70), head_dim=128, norms=2),
    "a key head for each": DecodeCase((17, 70), heads=3, kv_heads=3),
    "groups of 3": DecodeCase((17, 70), heads=6, kv_heads=2),
    "groups of 16": DecodeCase((1, 150), heads=16),
    "blocks of 64": DecodeCase((1, 65, 200), page=64),
    "blocks of one": DecodeCase((17, 40), page=1),
}
HALF_CASES = ("1 row in 32 splits", "soft cap", "norms of a window")
INTERPRETED = [("float32", name) for name in CASES] + [("float16", name) for name in HALF_CASES]
"""Dtypes of interpreted cases: float32, and float16 to check rounding.

bfloat16 would be truncated.
"""

GPU_CASES: dict[str, DecodeCase] = {
    "Qwen3-4B, 1 row": DecodeCase((3000,), 32, 8, 128, 64, norms=2),
    "Qwen3-4B, 64 rows": DecodeCase(row_lengths(64), 32, 8, 128, 64, norms=2),
    "Qwen3-4B, 20 long rows": DecodeCase(tuple(range(1, 2001, 105)), 32, 8, 128, 64, norms=2),
    "Qwen3-4B, 200 long rows": DecodeCase(tuple(range(1, 1001, 5)), 32, 8, 128, 64, norms=2),
    "Qwen3-4B, 8 long rows": DecodeCase(tuple(range(513, 4097, 512)), 32, 8, 128, 64, norms=2),
    "144 rows, not cut": DecodeCase((*row_lengths(140), 128, 129, 257, 300)),
    "heads of 256, 150 rows": DecodeCase(row_lengths(150), 8, 4, 256, 64),
    "Qwen3-4B, 100 long rows": DecodeCase(tuple(range(1, 2001, 20)), 32, 8, 128, 64, norms=2),
    "Gemma 2": DecodeCase((1, 900, 5000), 8, 4, 256, 64, window=4096, cap=50.0),
}

BOUNDS = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative errors, by norm. Queries, keys, weights and outputs are rounded once each."""


def draw(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(got: Any, expected: Any) -> float:
    """Return the relative error, by norm; infinite for NaN, inf and for wrong shapes."""
    got = got.to("cpu", torch.float64)
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - expected).norm() / expected.norm())


class Step(NamedTuple):
    """A case's numbers on one device, in one dtype."""

    pool: KVCache
    spec: LayerSpec
    qkv: Any
    rotary: QKNormRope
    slots: Any
    lengths: Any


def step_of(case: DecodeCase, device: Any, dtype: Any) -> Step:
    """Return the case's numbers. Slots are not in order, and blocks are anywhere."""
    rows, longest = len(case.lengths), max(case.lengths)
    counts = [-(-length // case.page) for length in case.lengths]
    shape = KVCacheSpec(2, case.kv_heads, case.page_dim or case.head_dim, dtype)
    pool = KVCache(
        shape,
        num_blocks=sum(counts) + 3,
        block_size=case.page,
        num_slots=rows + 2,
        max_model_len=longest,
        device=device,
    )
    pool.data.copy_(draw(1, *pool.data.shape))
    pool.data[..., case.head_dim :] = 0.0
    order = torch.Generator().manual_seed(2)
    pages = torch.randperm(pool.max_num_blocks, generator=order).int()
    slots = torch.randperm(rows + 2, generator=order)[:rows].int()
    for slot, count in zip(slots.tolist(), counts, strict=True):
        pool.block_tables[slot, :count], pages = pages[:count], pages[count:]
    angles = draw(3, longest, (case.rot or case.head_dim) // 2).repeat(1, 2)
    table = torch.promote_types(dtype, torch.float32)
    weights = [draw(5 + i, case.head_dim).to(device, dtype) for i in range(case.norms)]
    return Step(
        pool,
        LayerSpec(
            case.heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, case.window, case.cap
        ),
        draw(4, rows, (case.heads + 2 * case.kv_heads) * case.head_dim).to(device, dtype),
        QKNormRope(
            *(turn.to(device, table) for turn in (angles.cos(), angles.sin())),
            *(weights or (None, None)),
            EPS,
        ),
        slots.to(device),
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
    )


def to_float64(step: Step) -> Step:
    """Return the same numbers in float64 on the host, in a cache without padding."""

    def up(x: Any) -> Any:
        return None if x is None else x.to("cpu", torch.float64)

    head_dim = step.spec.head_dim
    pool = KVCache(
        step.pool.spec._replace(head_dim=head_dim, dtype=torch.float64),
        num_blocks=step.pool.max_num_blocks,
        block_size=step.pool.block_size,
        num_slots=step.pool.num_slots,
        max_model_len=step.pool.block_tables.shape[1] * step.pool.block_size,
        device=torch.device("cpu"),
    )
    pool.data.copy_(step.pool.data[..., :head_dim])
    pool.block_tables.copy_(step.pool.block_tables)
    rotary = step.rotary
    turns = (up(rotary.cos), up(rotary.sin), up(rotary.q_norm_weight), up(rotary.k_norm_weight))
    return Step(
        pool,
        step.spec,
        up(step.qkv),
        QKNormRope(*turns, rotary.eps),
        step.slots.cpu(),
        step.lengths.cpu(),
    )


def attend_by_torch(step: Step) -> tuple[Any, Any]:
    """Return queries and outputs [rows, heads, head_dim]; write new keys and values."""
    pool, spec, rotary = step.pool, step.spec, step.rotary
    positions = step.lengths - 1
    queries, keys = TorchOps().rope_and_cache(
        step.qkv, rotary.cos, rotary.sin, positions, pool.slot_mapping(step.slots, positions),
        pool.keys[1], pool.values[1], rotary.q_norm_weight, rotary.k_norm_weight, rotary.eps,
        spec.num_heads, spec.num_kv_heads,
    )  # fmt: skip
    attention = TorchAttention(pool, [spec] * 2)
    pairs = zip(step.slots.tolist(), step.lengths.tolist(), strict=True)
    spans = [RowSpan(slot, length - 1, length, row) for row, (slot, length) in enumerate(pairs)]
    attention.plan(AttentionMetadata(spans, 0, step.slots[:0], step.lengths[:0]))
    return queries, attention.attend(1, queries, keys, keys)


def figures(case: DecodeCase, device: Any, dtype: Any, *, pdl: bool) -> dict[str, float]:
    """Return the kernel's differences from plain torch in all that it writes.

    The kernel runs twice, the second time with every key in its block and given queries: what the
    first run leaves in its scratch must not reach it.
    """
    from forge.models.hf.attention.triton_decode import DecodeAttention

    step = step_of(case, device, dtype)
    reference = to_float64(step)
    queries, expected = attend_by_torch(reference)
    kernel = DecodeAttention(step.pool, [step.spec] * 2, pdl=pdl)
    kernel._partial_outs.fill_(float("nan"))
    kernel._partial_stats.fill_(float("nan"))
    untouched = step.pool.data[0].clone()
    found = {}
    out = kernel.attend_qkv(1, step.qkv, step.rotary, step.slots, step.lengths)
    found["outputs"] = error(out.view_as(expected), expected)
    found["arrivals"] = float(kernel._split_counters.abs().sum())
    # All blocks are the reference's, so nothing was written but the new token.
    pages = step.pool.data[1]
    found["pages"] = error(pages[..., : case.head_dim], reference.pool.data[1])
    found["padding"] = float((pages[..., case.head_dim :] != 0.0).sum())
    found["other layer"] = float((step.pool.data[0] != untouched).sum())
    again = kernel.attend(1, queries.to(device, dtype), step.slots, step.lengths)
    found["outputs of given queries"] = error(again, expected)
    found["last arrivals"] = float(kernel._split_counters.abs().sum())
    if 1 < len(case.lengths) < 30:
        found |= measure_mixed_rows(kernel, step, queries.to(device, dtype), expected)
    return found


class ConstantAttention(NamedTuple):
    """A stand-in for planned kernels that writes 7 to every output, padding included."""

    pool: KVCache
    spec: LayerSpec
    tokens: int = 512
    rows: int = 4
    scratch_slot: int = 0

    def matches(self, spans: Sequence[RowSpan]) -> bool:
        return True

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        wide = queries.new_full((*queries.shape[:2], self.pool.spec.head_dim), 7.0)
        return wide[..., : self.spec.head_dim]


def measure_mixed_rows(kernel: Any, step: Step, queries: Any, expected: Any) -> dict[str, float]:
    """Return the errors of rows before five tokens of longer rows, which read nothing here.

    Every other row reads nothing either. Outputs of rows that read nothing must not change.
    """
    from forge.models.hf.attention.graph_attention import SplitGraphAttention

    num_rows = len(queries)
    longer = queries.new_ones(5, *queries.shape[1:])
    slots, lengths = torch.zeros(2, num_rows + 5, dtype=torch.int32, device=queries.device)
    slots[:num_rows], lengths[:num_rows:2] = step.slots, step.lengths[::2]
    attention = SplitGraphAttention(
        ConstantAttention(step.pool, step.spec), kernel, slots[:num_rows], lengths[:num_rows], 1
    )
    out = attention.attend(1, torch.cat((queries, longer)), None, None)
    untouched = torch.cat((out[1:num_rows:2], out[num_rows:]))
    return {
        "outputs with longer rows": error(out[:num_rows:2], expected[::2]),
        "untouched where nothing is read": float((untouched != 7.0).sum()),
        "arrivals with longer rows": float(kernel._split_counters.abs().sum()),
    }


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, dict[str, float]]]:
    """Every case's figures by dtype, from a process in which Triton interprets."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.test_triton_decode"],
        capture_output=True,
        text=True,
        env=env,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_errors(found: dict[str, float], bound: float) -> None:
    """Check that differences are below the bound, and that what must be zero is."""
    words = ("arrivals", "other layer", "padding", "untouched")
    exact = {name for name in found if any(word in name for word in words)}
    assert {name: found[name] for name in exact} == dict.fromkeys(exact, 0.0)
    too_far = {name: far for name, far in found.items() if name not in exact and not far < bound}
    assert not too_far


@pytest.mark.parametrize(("dtype", "name"), INTERPRETED)
def test_the_interpreted_kernel_agrees_with_plain_torch_in_float64(
    interpreted: dict[str, dict[str, dict[str, float]]], dtype: str, name: str
):
    check_errors(interpreted[dtype][name], BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("name", {**CASES, **GPU_CASES})
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_compiled_kernel_agrees_with_plain_torch_in_float64(dtype: str, name: str, pdl: bool):
    case = {**CASES, **GPU_CASES}[name]
    found = figures(case, torch.device("cuda"), getattr(torch, dtype), pdl=pdl)
    check_errors(found, BOUNDS[dtype])


def test_the_cases_come_to_every_cut():
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode")
    chosen = [
        {kernel.select_decode_config(len(case.lengths), case.head_dim) for case in cases.values()}
        for cases in (CASES, {**CASES, **GPU_CASES})
    ]
    assert chosen[0] == {cut for _, cut in kernel.DECODE_CONFIGS}
    assert chosen[1] == chosen[0] | {kernel.ONE_SPLIT_CONFIG}
    beside = {
        kernel.select_mixed_config(len(case.lengths)) for case in {**CASES, **GPU_CASES}.values()
    }
    assert beside == {kernel.TWO_SPLIT_CONFIG, *(cut for _, cut in kernel.MIXED_CONFIGS)}
    assert len(chosen[1]) == len(PRODUCT_CUTS), "one of them is not compiled below"


@pytest.mark.parametrize(("head_dim", "fewest"), [(128, 1), (256, 2)])
def test_more_rows_are_cut_into_fewer_parts(head_dim: int, fewest: int):
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode")
    splits = [kernel.select_decode_config(rows, head_dim).num_splits for rows in range(1, 300)]
    assert splits == sorted(splits, reverse=True)
    assert (splits[0], splits[-1]) == (32, fewest)


def test_the_tiles_of_wide_heads_fit_into_shared_memory():
    """A block of an H200 has 227 KiB. Each stage has a tile of keys and one of values."""
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode")
    for head_dim in (64, 128, 256):
        for rows in range(1, 300):
            for cut in (
                kernel.select_decode_config(rows, head_dim),
                kernel.select_mixed_config(rows),
            ):
                assert cut.num_stages * 2 * cut.tile_size * head_dim * 2 <= 227 * 1024, (
                    rows,
                    head_dim,
                )


def test_heads_that_share_keys_among_more_than_a_tile_are_refused():
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode")
    shape = KVCacheSpec(1, 1, 64, torch.float32)
    pool = KVCache(
        shape, num_blocks=1, block_size=4, num_slots=1, max_model_len=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="among too many heads"):
        kernel.DecodeAttention(pool, [LayerSpec(17, 1, 64, 0.125)], pdl=False)


def test_warmup_calls_have_a_layer_of_every_window():
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode")
    cpu, full = torch.device("cpu"), LayerSpec(4, 2, 64, 0.125)
    pool = KVCache(
        KVCacheSpec(4, 2, 64, torch.float32),
        num_blocks=1, block_size=4, num_slots=1, max_model_len=4, device=cpu,
    )  # fmt: skip
    layers = [full, full._replace(window=8), full, full._replace(window=9)]
    attention = kernel.DecodeAttention(pool, layers, pdl=False)
    rope = QKNormRope(torch.ones(4, 64), torch.zeros(4, 64), None, None, 0.0)
    calls = [(call.func.__name__, call.args[0]) for call in attention.warmup_calls(rope)]
    for name in ("attend_qkv", "attend"):
        called = {layers[layer_index] for each, layer_index in calls if each == name}
        assert called == set(layers), name


needs_compiler = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="triton interprets in this process"
)
PRODUCT_CUTS = (*(f"DECODE_CONFIGS {index}" for index in range(6)), "ONE_SPLIT_CONFIG")
QUERY_CUTS = (*(f"MIXED_CONFIGS {index}" for index in range(3)), "TWO_SPLIT_CONFIG")


def cut_named(name: str) -> Any:
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode")
    kind, _, index = name.partition(" ")
    found = getattr(kernel, kind)
    return found[int(index)][1] if index else found


@cache
def compile_for_hopper(name: str, *, new: bool, norms: bool) -> Any:
    """Compile the kernel for sm_90a, which needs no GPU: a layer of Qwen3-4B, blocks of 64."""
    kernel = pytest.importorskip("forge.models.hf.attention.triton_decode").decode_attention
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    cut = cut_named(name)
    names = kernel.arg_names
    constants: dict[str, Any] = {
        **{field.upper(): value for field, value in cut._asdict().items()},
        **{"SOFTCAP": 0.0, "WINDOW": 0, "Q_HEADS": 32, "KV_HEADS": 8},
        **{"HEAD_DIM": 128, "HEAD_DIM_PADDED": 128, "BLOCK_SIZE": 64},
        **{"ROTARY_DIM": 128 if new else 0, "FUSED_QKV": new, "PDL": True},
    }
    constants = {each: value for each, value in constants.items() if each in names}
    if not norms:
        constants |= {"q_norm_weight": None, "k_norm_weight": None}
    kinds = {
        **dict.fromkeys(("cos", "sin", "partial_outs", "partial_stats"), "*fp32"),
        **dict.fromkeys(("slots", "kv_lens", "block_tables", "split_counters"), "*i32"),
        **dict.fromkeys(("eps", "scale"), "fp32"),
    }
    kinds |= {each: "i32" for each in names if each.endswith("_stride")}
    signature = {
        each: "constexpr" if each in constants else kinds.get(each, "*bf16") for each in names
    }
    # Alignments of a launch: torch's memory, strides of whole lines except the table's.
    lines = [
        i
        for i, each in enumerate(names)
        if signature[each].startswith("*") or (signature[each] == "i32" and each != "table_stride")
    ]
    source = compiler.ASTSource(
        kernel,
        signature,
        {(names.index(each),): value for each, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in lines},
    )
    options = {"num_warps": cut.num_warps, "launch_pdl": True}
    return compiler.compile(source, target=target, options=options)


def stack_bytes(binary: bytes, folder: Path) -> list[int]:
    """Return the bytes that a thread of each kernel keeps outside its registers."""
    tool = pytest.importorskip("triton.knobs").nvidia.cuobjdump.path
    (folder / "kernel.cubin").write_bytes(binary)
    command = [tool, "--dump-resource-usage", str(folder / "kernel.cubin")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(size) for size in re.findall(r"STACK:(\d+)", output)]


@needs_compiler
@pytest.mark.parametrize("name", PRODUCT_CUTS)
def test_every_cut_of_a_product_stays_in_registers(name: str, tmp_path: Path):
    binary = compile_for_hopper(name, new=True, norms=True).asm["cubin"]
    assert stack_bytes(binary, tmp_path) == [0]


@needs_compiler
@pytest.mark.parametrize("name", QUERY_CUTS)
def test_every_cut_of_queries_stays_in_registers(name: str, tmp_path: Path):
    binary = compile_for_hopper(name, new=False, norms=False).asm["cubin"]
    assert stack_bytes(binary, tmp_path) == [0]


def check_wait(ptx: str) -> None:
    """Lengths, slots and tables are int32; cached keys and values are copied 16 bytes at a time."""
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.wait" not in after
    assert "griddepcontrol.launch_dependents" in before
    for what in ("st.global", "atom.", "red.global", "cp.async"):
        assert what not in before, what
    loads = [line for line in before.splitlines() if "ld.global" in line]
    assert loads and all("ld.global.b32" in line for line in loads)
    assert "cp.async" in after or "ld.global.v4" in after


@needs_compiler
@pytest.mark.parametrize("name", PRODUCT_CUTS)
def test_before_the_wait_only_int32_are_read(name: str):
    check_wait(compile_for_hopper(name, new=True, norms=True).asm["ptx"])


@needs_compiler
def test_without_norms_no_more_is_read_before_the_wait():
    check_wait(compile_for_hopper("DECODE_CONFIGS 0", new=True, norms=False).asm["ptx"])


@needs_compiler
@pytest.mark.parametrize("name", QUERY_CUTS)
def test_a_step_that_is_given_queries_reads_its_length_and_its_slot_before_the_wait(name: str):
    ptx = compile_for_hopper(name, new=False, norms=False).asm["ptx"]
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert wait
    assert len([line for line in before.splitlines() if "ld.global" in line]) == 2
    assert "st.global" not in before


def _let_one_number_be_an_integer() -> None:
    """Convert the interpreter's scalars before they become bounds of a range.

    It keeps a scalar as an array of one number and calls int() on it, which numpy refuses from 2.4
    on.
    """
    from triton.runtime import interpreter

    define = interpreter._patch_lang_tensor

    def define_with_index(tensor: Any, *rest: Any) -> None:
        define(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = define_with_index


def _main() -> None:
    _let_one_number_be_an_integer()
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    found: dict[str, dict[str, dict[str, float]]] = {"float32": {}, "float16": {}}
    for dtype, name in INTERPRETED:
        found[dtype][name] = figures(CASES[name], cpu, getattr(torch, dtype), pdl=False)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
