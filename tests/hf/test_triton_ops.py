"""The fused operations: plain torch is right, and Triton computes the same.

Every case runs an operation twice on the same numbers: TorchOps in float64, and the operations
under test. Its figure is the largest |difference| / |value| (Euclidean norms) of what it compares.

Without a GPU the kernels run in Triton's interpreter, in a process of their own: the interpreter is
chosen when triton is imported, and every other test needs the compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forge.models.hf.ops.reference import TorchOps  # noqa: E402

pytestmark = pytest.mark.torch

REFERENCE = TorchOps()
EPS = 0.1
"""Large, so that an operation without it shows."""
Case = Callable[[Any, Any, Any], float]


def draw(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def round_tensors(tensors: list[Any], device: Any, dtype: Any) -> tuple[list[Any], list[Any]]:
    """Return the tensors in `dtype` on `device`, and the same rounded numbers in float64."""
    low = [t if t is None else t.to(device, dtype) for t in tensors]
    return low, [t if t is None else t.to("cpu", torch.float64) for t in low]


def error(got: Any, expected: Any) -> float:
    """Return the relative error, by norm; infinite for NaN, inf and for wrong shapes."""
    got = got.to("cpu", torch.float64)
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - expected).norm() / expected.norm())


def norm_case(width: int) -> Case:
    def run(ops: Any, device: Any, dtype: Any) -> float:
        low, wide = round_tensors([draw(1, 3, width), draw(2, width)], device, dtype)
        return error(ops.rms_norm(*low, EPS), REFERENCE.rms_norm(*wide, EPS))

    return run


def add_norm_case(width: int) -> Case:
    def run(ops: Any, device: Any, dtype: Any) -> float:
        tensors = [draw(1, 3, width), draw(2, 3, width), draw(3, width)]
        low, wide = round_tensors(tensors, device, dtype)
        y, expected = (o.add_rms_norm(*t, EPS) for o, t in ((ops, low), (REFERENCE, wide)))
        return max(error(y, expected), error(low[1], wide[1]))

    return run


def gated_case(width: int) -> Case:
    def run(ops: Any, device: Any, dtype: Any) -> float:
        low, wide = round_tensors([draw(1, 3, 16), draw(2, 2 * width, 16)], device, dtype)
        return error(ops.gate_up(*low), REFERENCE.gate_up(*wide))

    return run


def rope_case(
    tokens: int, heads: int, kv_heads: int, dim: int, *, rot: int, page_dim: int, norms: int
) -> Case:
    """Return a case with `norms` weights of heads, 2 or none, and blocks of four."""

    def run(ops: Any, device: Any, dtype: Any) -> float:
        weights = [draw(5 + i, dim) if i < norms else None for i in range(2)]
        qkv = draw(1, tokens, (heads + 2 * kv_heads) * dim)
        pool = torch.zeros(tokens + 1, 2, 4, kv_heads, page_dim, dtype=torch.float64)
        low, wide = round_tensors([qkv, pool, *weights], device, dtype)
        angles = draw(4, 50, rot)
        positions = (torch.arange(tokens) * 7 % 50).to(torch.int32)
        where = (torch.arange(tokens).flip(0) * 3 + 1).to(torch.int32)
        for o, (x, pages, q, k) in ((ops, low), (REFERENCE, wide)):
            at = x.device
            table = torch.float64 if x is wide[0] else torch.float32
            out = o.rope_and_cache(
                x, angles.cos().to(at, table), angles.sin().to(at, table), positions.to(at),
                where.to(at), pages[:, 0], pages[:, 1], q, k, EPS, heads, kv_heads,
            )  # fmt: skip
            if o is ops:
                got = out
        return max(*map(error, got, out), error(low[1], wide[1]))

    return run


def linear_case(m: int, k: int, n: int, *, bias: int = 0, norm: int = 0, residual: int = 0) -> Case:
    """Return a case; bias, norm and residual are 0 or 1.

    With a residual the sum is written into it.
    """

    def run(ops: Any, device: Any, dtype: Any) -> float:
        optional = [draw(3, n)] * bias or [None], [draw(4, k)] * norm or [None]
        late = [draw(5, m, n)] * residual or [None]
        tensors = [draw(1, m, k), draw(2, n, k), *optional[0], *optional[1], *late]
        low, wide = round_tensors(tensors, device, dtype)
        x, w, b, g, r = low
        y = ops.linear_small(x, w, bias=b, norm_weight=g, eps=EPS, residual=r, out=r)
        if r is not None and y.data_ptr() != r.data_ptr():
            return float("inf")
        x, w, b, g, r = wide
        return error(y, REFERENCE.linear_small(x, w, bias=b, norm_weight=g, eps=EPS, residual=r))

    return run


def wide_norm_case(m: int, k: int, n: int) -> Case:
    """float16 holds what comes in and what comes out, and not x times the norm's weight."""

    def run(ops: Any, device: Any, dtype: Any) -> float:
        tensors = [draw(1, m, k) * 2000, draw(2, n, k), draw(3, k) * 100]
        low, wide = round_tensors(tensors, device, dtype)
        y, expected = (
            o.linear_small(x, w, norm_weight=g, eps=EPS)
            for o, (x, w, g) in ((ops, low), (REFERENCE, wide))
        )
        return error(y, expected)

    return run


def gate_up_case(m: int, k: int, n: int) -> Case:
    def run(ops: Any, device: Any, dtype: Any) -> float:
        low, wide = round_tensors([draw(1, m, k), draw(2, 2 * n, k) / 8, draw(3, k)], device, dtype)
        return error(ops.gate_up_small(*low, EPS), REFERENCE.gate_up_small(*wide, EPS))

    return run


CASES: dict[str, Case] = {
    "rms_norm": norm_case(96),
    "add_rms_norm": add_norm_case(96),
    "gate_up over one block of silu": gated_case(1040),
    "rope with norms": rope_case(3, 4, 2, 16, rot=16, page_dim=16, norms=2),
    "rope without norms": rope_case(3, 4, 4, 16, rot=16, page_dim=16, norms=0),
    "rope of a part, padded pages": rope_case(2, 4, 2, 24, rot=16, page_dim=32, norms=2),
    "rope of many tokens": rope_case(65, 4, 2, 8, rot=8, page_dim=8, norms=2),
    "linear, 1 row": linear_case(1, 1024, 8),
    "linear, 1 row, odd shape": linear_case(1, 600, 13),
    "linear, 1 row, more pieces than in flight": linear_case(1, 12800, 5),
    "linear, 1 row, everything": linear_case(1, 600, 13, bias=1, norm=1, residual=1),
    "linear, 2 rows, odd shape": linear_case(2, 600, 13),
    "linear, 3 rows, everything": linear_case(3, 600, 37, bias=1, norm=1, residual=1),
    "linear, 4 rows, norm, whole tiles": linear_case(4, 512, 32, norm=1),
    "linear, 4 rows, more pieces than in flight": linear_case(4, 4096, 5, residual=1),
    "linear, 2 rows, wide norm": wide_norm_case(2, 512, 8),
    "gate_up, 1 row": gate_up_case(1, 600, 13),
    "gate_up, 2 rows": gate_up_case(2, 600, 13),
    "gate_up, 3 rows": gate_up_case(3, 600, 13),
    "gate_up, 4 rows": gate_up_case(4, 512, 32),
}

GPU_CASES: dict[str, Case] = {
    "rope as in Qwen3-4B": rope_case(1, 32, 8, 128, rot=128, page_dim=128, norms=2),
    "rope of a long prompt": rope_case(2048, 32, 8, 128, rot=128, page_dim=128, norms=2),
    "linear of a head": linear_case(1, 1024, 50001, norm=1),
    "linear of a head, 4 rows": linear_case(4, 1024, 50001, norm=1),
    "linear of a long row": linear_case(1, 9728, 2560, residual=1),
    "gate_up as in Qwen3-0.6B": gate_up_case(1, 1024, 3072),
    "linear of a long row, 4 rows": linear_case(4, 9728, 2560, residual=1),
    "gate_up as in Qwen3-0.6B, 4 rows": gate_up_case(4, 1024, 3072),
}

BOUNDS = {"float32": 2e-6, "bfloat16": 1.2e-2, "float16": 1e-3}
"""Relative. bfloat16 rounds by 2**-9 at most, float16 by 2**-11; an operation does so a few times.

Interpreted is float16 and not bfloat16: the interpreter cuts bfloat16 off instead of rounding.
"""
INTERPRETED = ("float32", "float16")


def measure_errors(ops: Any, cases: dict[str, Case], dtype: str, device: str) -> dict[str, float]:
    at, kind = torch.device(device), getattr(torch, dtype)
    return {name: case(ops, at, kind) for name, case in cases.items()}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """Every case's figure by dtype, from a process in which Triton interprets."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hf.test_triton_ops"],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", INTERPRETED)
def test_interpreted_kernels_agree_with_float64(
    interpreted: dict[str, dict[str, float]], dtype: str, name: str
):
    assert interpreted[dtype][name] < BOUNDS[dtype]


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_in_bfloat16_agrees_with_float64(name: str):
    assert CASES[name](TorchOps(), torch.device("cpu"), torch.bfloat16) < BOUNDS["bfloat16"]


needs_compiler = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="triton interprets in this process"
)


def compile_for_hopper(kernel: Any, constants: dict[str, Any], tile: Any) -> Any:
    """Compile the kernel for sm_90a, which needs no GPU; constants include absent tensors."""
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    cut = {
        "OUTPUTS": tile.num_outputs,
        "WIDTH": 256 * tile.num_warps,
        "DEPTH": tile.prefetch_depth,
        "PDL": True,
    }
    constants = {**constants, **cut}
    scalars = {"eps": "fp32", "n": "i32"}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else scalars.get(name, "*bf16") for name in names
    }
    source = compiler.ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*")
        },
    )
    options = {"num_warps": tile.num_warps, "launch_pdl": True}
    return compiler.compile(source, target=target, options=options)


def loads_before_wait(compiled: Any) -> list[str]:
    before, wait, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    assert "st.global" not in before
    return [line for line in before.splitlines() if "ld.global" in line]


def stack_bytes(compiled: Any, folder: Path) -> int:
    """Return the bytes that a thread keeps outside its registers."""
    tool = pytest.importorskip("triton.knobs").nvidia.cuobjdump.path
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [tool, "--dump-resource-usage", str(folder / "kernel.cubin")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [size] = re.findall(r"STACK:(\d+)", output)
    return int(size)


@needs_compiler
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_weights_are_prefetched_before_the_wait_16_bytes_at_a_time_and_once(m: int):
    """Four rows of 1024 bf16 are 8 KiB; 64 threads load 128 bytes each: 8 loads of 16."""
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    constants = {"bias": None, "norm": None, "M": m, "K": 1024}
    compiled = compile_for_hopper(products.row_linear, constants, products.SmallGemmTile(4, 2, 2))
    loads = loads_before_wait(compiled)
    assert len(loads) == 8
    assert all(".v4.b32" in line for line in loads)
    weights = [line for line in compiled.asm["ptx"].splitlines() if "L1::evict_first" in line]
    assert len(weights) == 8


@needs_compiler
def test_only_weights_are_read_before_the_wait():
    """Four rows of w and one of the norm's weight, 512 columns, two loads of each by one warp."""
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    compiled = compile_for_hopper(
        products.row_gate_up, {"M": 4, "K": 512}, products.SmallGemmTile(4, 1, 2)
    )
    assert len(loads_before_wait(compiled)) == 4 * 2 + 2


@needs_compiler
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_gate_up_of_qwen3_4b_stays_in_registers(m: int, tmp_path: Path):
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    tile = products.H200_TILES.select_tile(m, 2560, 19456)
    compiled = compile_for_hopper(products.row_gate_up, {"M": m, "K": 2560}, tile)
    assert stack_bytes(compiled, tmp_path) == 0


def test_a_shape_that_was_measured_has_its_tile_and_every_other_has_one_by_rule():
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    tiles = products.SmallGemmTiles({(1, 4096, 4096): products.SmallGemmTile(8, 2, 3)})
    assert tiles.select_tile(1, 4096, 4096) == products.SmallGemmTile(8, 2, 3)
    assert tiles.select_tile(1, 2560, 6144) == products.SmallGemmTile(4, 1, 4)
    assert tiles.select_tile(3, 2560, 6144) == tiles.select_tile(4, 2560, 6144)


@pytest.mark.parametrize("n", [4096, 6144, 28672])
def test_the_rule_gives_long_rows_the_tiles_that_were_fastest_for_them(n: int):
    """The wide head's own tile has 4 outputs; the rule would give it 2."""
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    rule = products.SmallGemmTiles({})
    assert rule.select_tile(1, 4096, n) == products.H200_TILES.select_tile(1, 4096, n)


@pytest.mark.parametrize(
    ("k", "n", "tile"),
    [
        (4096, 14336, (2, 4, 4)),
        (4096, 64128, (2, 4, 4)),
        (7168, 4096, (2, 2, 6)),
        (5120, 25600, (2, 4, 5)),
        (8192, 5120, (2, 2, 6)),
        (2048, 4096, (4, 1, 4)),
        (4096, 3072, (4, 4, 2)),
        (2560, 9728, (4, 1, 4)),
    ],
)
def test_a_divided_weight_has_a_tile_with_half_of_a_long_row_in_flight(
    k: int, n: int, tile: tuple[int, int, int]
):
    """Weights of Llama 3.1 8B, Qwen3 32B and 4B, divided over two ranks or whole."""
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    assert products.H200_TILES.select_tile(1, k, n) == tile


@needs_compiler
@pytest.mark.parametrize(("k", "n"), [(4096, 14336), (5120, 25600), (8192, 57344)])
def test_gate_up_of_long_rows_stays_in_registers(k: int, n: int, tmp_path: Path):
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    for m in (1, 2):
        tile = products.H200_TILES.select_tile(m, k, n)
        compiled = compile_for_hopper(products.row_gate_up, {"M": m, "K": k}, tile)
        assert stack_bytes(compiled, tmp_path) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", {**CASES, **GPU_CASES})
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pdl", [True, False])
def test_compiled_kernels_agree_with_float64(pdl: bool, dtype: str, name: str):
    kernels = pytest.importorskip("forge.models.hf.ops.triton_ops")
    # Head and down sum 10,000 products in fp32.
    bound = BOUNDS[dtype] if dtype == "bfloat16" else 1e-5
    case = {**CASES, **GPU_CASES}[name]
    ops = kernels.TritonOps(pdl=pdl)
    assert case(ops, torch.device("cuda"), getattr(torch, dtype)) < bound


@pytest.mark.gpu
def test_a_row_is_the_same_with_one_other_and_with_three():
    """With equal tiles, a row's sums depend on no other row."""
    kernels = pytest.importorskip("forge.models.hf.ops.triton_ops")
    products = pytest.importorskip("forge.models.hf.ops.small_gemm")
    tile = products.SmallGemmTile(4, 2, 2)
    tiles = products.SmallGemmTiles({(m, 1024, 512): tile for m in (2, 4)})
    ops = kernels.TritonOps(pdl=False, tiles=tiles)
    x, w, g = (draw(i, *s).to("cuda", torch.bfloat16) for i, s in
               enumerate(((4, 1024), (512, 1024), (1024,))))  # fmt: skip
    whole = ops.linear_small(x, w, norm_weight=g, eps=EPS)
    for rows in (2, 3):
        assert torch.equal(ops.linear_small(x[:rows], w, norm_weight=g, eps=EPS), whole[:rows])


def test_rotation_turns_each_pair_by_its_angle():
    """A pair (i, i + rot / 2) is a complex number, and the rotation a product with e^(i angle)."""
    angle = draw(1, 9, 4)
    cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
    qkv = draw(2, 3, 4 * 10)
    pool = torch.zeros(2, 2, 4, 1, 10, dtype=torch.float64)
    positions, where = torch.tensor([8, 0, 3]), torch.tensor([0, 5, 6])
    keys, values = pool[:, 0], pool[:, 1]
    got, turned_keys = REFERENCE.rope_and_cache(
        qkv, cos, sin, positions, where, keys, values, None, None, EPS, 2, 1
    )
    heads = qkv.view(3, 4, 10)
    pairs = torch.complex(heads[..., :4], heads[..., 4:8])
    turned = pairs * torch.polar(torch.ones(3, 4, dtype=torch.float64), angle[positions])[:, None]
    expected = torch.cat((turned.real, turned.imag, heads[..., 8:]), -1)
    assert torch.allclose(got, expected[:, :2])
    assert torch.allclose(turned_keys, expected[:, 2:3])
    assert torch.allclose(keys.reshape(8, 10)[where], expected[:, 2])
    assert torch.equal(values.reshape(8, 10)[where], heads[:, 3])


def test_add_rms_norm_leaves_the_sum_in_the_residual():
    x, residual = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    y = REFERENCE.add_rms_norm(x, residual, torch.ones(2), 0.0)
    assert residual.tolist() == [[3.0, 4.0]]
    assert torch.allclose(y, residual / 12.5**0.5)


def test_gate_up_multiplies_the_gated_half_of_a_product_with_the_normed_rows():
    x, w, norm = draw(1, 3, 8), draw(2, 10, 8), draw(3, 8)
    normed = x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * norm
    gate, up = normed @ w[:5].T, normed @ w[5:].T
    expected = gate * gate.sigmoid() * up
    assert torch.allclose(REFERENCE.gate_up_small(x, w, norm, EPS), expected)


def test_more_rows_than_the_small_kernels_take_are_refused():
    kernels = pytest.importorskip("forge.models.hf.ops.triton_ops")
    ops = kernels.TritonOps(pdl=False)
    with pytest.raises(AssertionError, match="5 rows"):
        ops.linear_small(torch.zeros(5, 16), torch.zeros(16, 16))


def _main() -> None:
    from forge.models.hf.ops.triton_ops import TritonOps

    torch.set_num_threads(1)
    ops = TritonOps(pdl=False)
    print(json.dumps({dtype: measure_errors(ops, CASES, dtype, "cpu") for dtype in INTERPRETED}))


if __name__ == "__main__":
    _main()
