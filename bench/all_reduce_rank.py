"""Rank of the all-reduce benchmark: exact sums of random calls, and times inside CUDA graphs.

Owns what a rank runs. Its process is one of forge.bench.rank_processes, its parts are named by
forge.bench.all_reduce.

    check:  xs of all ranks from one seed ─► this rank's x ─► all-reduce
                        └─► sum in torch ─────────────────────► equal, bit for bit
    time:   CUDA graph [ call | call | ... 50 ], replayed twice: the second is timed

Always true: all ranks draw the same shapes from the same seed. Delays differ, so that each rank is
ahead of the others at times.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from forge.models.hf.ops.skinny_gemm import SkinnyGemm
from forge.models.hf.ops.triton_ops import TritonOps
from forge.models.hf.parallel.all_reduce import DTYPE_MACROS, OneShotAllReduce

EPS = 1e-6
GRAPH_CALLS = 50
REPLAYS = 10
CHECKED_HIDDEN = (1024, 2560, 4096, 5120, 8192)
CHECKED_BYTES = 1 << 21
NORM_STEPS = {torch.bfloat16: 1.01 * 2**-7, torch.float16: 1.01 * 2**-10, torch.float32: 2**-20}
"""Largest relative difference of a norm from one that is not rounded: it is rounded twice."""

PACKET_BYTES = 1 << 20
"""Longest message of the packets that are timed: longer than the default, to find where to end."""

CHAIN_LAYERS = 36
CHAIN_HIDDEN, CHAIN_HEADS, CHAIN_INTERMEDIATE = 2560, 32 * 128, 9728
"""Row-parallel products of Qwen3-4B, before they are divided among the ranks."""


class Setting(NamedTuple):
    """Sizes that all parts of a run share.

    hidden           columns of a message of a time
    max_bytes        longest message
    calls            random calls of a check
    """

    hidden: int
    max_bytes: int
    calls: int


class CheckedCall(NamedTuple):
    """Tensors of a call that is compared. `xs` are those of all ranks."""

    xs: Tensor
    residual: Tensor
    weight: Tensor
    mode: str


class Rank:
    """Device, group and all-reduces of this process."""

    def __init__(self, rank: int, world_size: int, start: int, setting: Setting) -> None:
        self.rank, self.world_size = rank, world_size
        self.setting = setting
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        store = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]) + start, is_master=rank == 0
        )
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world_size, device_id=self.device
        )
        group = dist.group.WORLD
        assert group is not None
        self.group = group
        longest = setting.max_bytes
        packets = min(PACKET_BYTES, longest)
        self.reducers = {
            "default": OneShotAllReduce(group, self.device, longest),
            "packets": OneShotAllReduce(group, self.device, longest, max_packet_bytes=packets),
            "flagged": OneShotAllReduce(group, self.device, longest, max_packet_bytes=0),
        }
        self.ops = TritonOps(pdl=True, skinny_gemm=SkinnyGemm(torch.bfloat16, self.device))
        self.symmetric = symmetric_memory.empty(longest, dtype=torch.uint8, device=self.device)
        self.symmetric.zero_()
        symmetric_memory.rendezvous(self.symmetric, group)
        self._generator = torch.Generator(self.device)
        self._delays = random.Random(rank)

    def meet(self) -> None:
        """Wait for all ranks, on the host."""
        dist.barrier(self.group)
        torch.cuda.synchronize()

    def delay(self) -> None:
        """Keep this rank's stream busy for up to 50 us, in one of four calls."""
        if self._delays.random() < 0.25:
            torch.cuda._sleep(self._delays.randrange(100_000))

    def draw_call(self, rng: random.Random, seed: int, name: str) -> CheckedCall:
        """Return a random call of one of the all-reduces, equal on all ranks."""
        dtype = rng.choice(tuple(DTYPE_MACROS))
        hidden = rng.choice(CHECKED_HIDDEN)
        most = max(1, min(256, CHECKED_BYTES // (hidden * dtype.itemsize)))
        rows = rng.choice((1, 1, 2, rng.randint(1, 16), rng.randint(1, most)))
        mode = rng.choice(("sum", "residual", "norm", "gather"))
        shape = (self.world_size, rows, hidden)
        xs = torch.empty(shape, dtype=dtype, device=self.device)
        if mode == "gather" and not self.reducers[name].takes_gather(xs[0]):
            mode = "sum"
        call = CheckedCall(xs, torch.empty_like(xs[0]), torch.empty_like(xs[0, 0]), mode)
        self.fill(call, seed)
        return call

    def fill(self, call: CheckedCall, seed: int) -> None:
        """Draw new numbers, equal on all ranks."""
        self._generator.manual_seed(seed)
        for each in (call.xs, call.residual, call.weight):
            each.normal_(generator=self._generator)

    def launch(self, name: str, call: CheckedCall) -> tuple[Tensor, ...]:
        """Make a call with one of the all-reduces."""
        reducer, x = self.reducers[name], call.xs[self.rank]
        if call.mode == "sum":
            return (reducer.all_reduce(x),)
        if call.mode == "gather":
            return (reducer.all_gather(x),)
        if call.mode == "residual":
            return (reducer.all_reduce(x, call.residual),)
        return reducer.all_reduce_norm(x, call.residual, call.weight, EPS)


class Comparison:
    """Differences, counted on the device, so that a rank does not wait for its results."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._wrong = torch.zeros(2, dtype=torch.int64, device=rank.device)
        self._digest = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.num_calls = 0

    def add(self, call: CheckedCall, results: Sequence[Tensor]) -> None:
        """Compare a result with the sum in the order of ranks, rounded once, or with all x."""
        total = (call.xs if call.mode == "gather" else call.xs[0]).float()
        for x in call.xs[1:] if call.mode != "gather" else ():
            total = total + x.float()
        if call.mode in ("residual", "norm"):
            total = total + call.residual.float()
        expected = total.to(call.xs.dtype)
        self._wrong[0] += (results[0] != expected).sum()
        if call.mode == "norm":
            x32 = expected.float()
            scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)
            exact = x32 * scale * call.weight.float()
            limit = NORM_STEPS[call.xs.dtype] * exact.abs() + 1e-6
            self._wrong[1] += ((results[1].float() - exact).abs() > limit).sum()
        self.num_calls += 1
        for each in results:
            bits = each.view(torch.int32 if each.dtype == torch.float32 else torch.int16)
            self._digest += bits.sum(dtype=torch.int64) * self.num_calls

    def result(self) -> dict[str, Any]:
        """Return the counts. Raises RuntimeError on a difference."""
        digests = [torch.zeros_like(self._digest) for _ in range(self._rank.world_size)]
        dist.all_gather(digests, self._digest, self._rank.group)
        wrong_sums, wrong_norms = self._wrong.tolist()
        num_digests = len({int(each) for each in digests})
        if wrong_sums or wrong_norms or num_digests != 1:
            raise RuntimeError(
                f"{wrong_sums} wrong sums, {wrong_norms} wrong norms, {num_digests} different "
                f"results of {self.num_calls} calls"
            )
        return {"calls": self.num_calls, "wrong": 0}


def check_eager(rank: Rank, name: str) -> dict[str, Any]:
    """Compare random calls of one of the all-reduces."""
    rng, comparison = random.Random(name), Comparison(rank)
    for index in range(rank.setting.calls):
        call = rank.draw_call(rng, index, name)
        rank.delay()
        comparison.add(call, rank.launch(name, call))
    return comparison.result()


def check_graphs(rank: Rank) -> dict[str, Any]:
    """Compare calls of several graphs, replayed in a random order that is equal on all ranks."""
    rng, comparison = random.Random("graphs"), Comparison(rank)
    graphs = []
    for _ in range(4):
        names = [rng.choice(tuple(rank.reducers)) for _ in range(20)]
        calls = [(name, rank.draw_call(rng, 0, name)) for name in names]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = [rank.launch(name, call) for name, call in calls]
        graphs.append((graph, calls, results))
    seed = 0
    for _ in range(max(1, rank.setting.calls // 40)):
        chosen = [rng.randrange(len(graphs)) for _ in range(rng.randint(1, 4))]
        for index in set(chosen):
            for _, call in graphs[index][1]:
                seed += 1
                rank.fill(call, seed)
        for index in chosen:
            rank.delay()
            graphs[index][0].replay()
            if rng.random() < 0.3:
                name = rng.choice(tuple(rank.reducers))
                eager_call = rank.draw_call(rng, seed, name)
                comparison.add(eager_call, rank.launch(name, eager_call))
        for index in sorted(set(chosen)):
            for (_, call), result in zip(*graphs[index][1:], strict=True):
                comparison.add(call, result)
    return comparison.result()


def time_graph(rank: Rank, run: Callable[[], object], num_calls: int) -> float:
    """Return microseconds of a call: the median replay of a graph of `num_calls` calls.

    A replay before it brings the ranks together.
    """
    run()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            run()
    times = []
    for _ in range(REPLAYS + 2):
        rank.meet()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / num_calls)
    rank.meet()
    return median(times[2:])


def sums(rank: Rank, method: str, x: Tensor) -> Callable[[], Tensor]:
    """Return a call of a method that sums x, which is in memory that the ranks share."""
    group_name = rank.group.group_name
    if method == "one-shot":
        return lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group_name)
    if method == "two-shot":
        return lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group_name)

    def run() -> Tensor:
        dist.all_reduce(x, group=rank.group)
        return x

    return run


def time_method(rank: Rank, method: str, mode: str, rows: int) -> float | None:
    """Return microseconds of an all-reduce with what follows it, or None where it cannot be run.

    method   an all-reduce of `Rank.reducers`, or one of torch's, with the rest in other kernels
    mode     "sum", "residual" or "norm"
    """
    count = rows * rank.setting.hidden
    x = rank.symmetric[: 2 * count].view(torch.bfloat16).view(rows, -1)
    residual, weight = torch.ones_like(x), torch.ones_like(x[0])
    if method in rank.reducers:
        reducer = rank.reducers[method]
        if method == "packets" and x.nbytes > reducer.layout.max_packet_bytes:
            return None
        if mode == "sum":
            return time_graph(rank, partial(reducer.all_reduce, x), GRAPH_CALLS)
        if mode == "residual":
            return time_graph(rank, partial(reducer.all_reduce, x, residual), GRAPH_CALLS)
        run = partial(reducer.all_reduce_norm, x, residual, weight, EPS)
        return time_graph(rank, run, GRAPH_CALLS)
    x.zero_()  # An in-place sum doubles it each time.
    add = sums(rank, method, x)
    if mode == "sum":
        return time_graph(rank, add, GRAPH_CALLS)
    if mode == "residual":
        return time_graph(rank, lambda: add() + residual, GRAPH_CALLS)
    return time_graph(
        rank, lambda: rank.ops.add_rms_norm(add(), residual, weight, EPS), GRAPH_CALLS
    )


def time_chain(rank: Rank, method: str, rows: int) -> float:
    """Return microseconds of a layer's two row-parallel products, each with its all-reduce.

    method   an all-reduce of `Rank.reducers`, "one-shot" or "nccl"; "none": the products add the
             residual and nothing is reduced
    """
    size = rank.world_size
    inputs = [
        torch.ones(rows, width // size, dtype=torch.bfloat16, device=rank.device)
        for width in (CHAIN_HEADS, CHAIN_INTERMEDIATE)
    ]
    weights = [
        [torch.randn(CHAIN_HIDDEN, x.shape[1], device=rank.device).bfloat16() / 1e4 for x in inputs]
        for _ in range(CHAIN_LAYERS)
    ]
    residual = torch.ones(rows, CHAIN_HIDDEN, dtype=torch.bfloat16, device=rank.device)
    x = rank.symmetric[: residual.nbytes].view(torch.bfloat16).view_as(residual)
    is_small = rows <= rank.ops.max_small_rows
    product = rank.ops.linear_small if is_small else rank.ops.linear

    def run_layers() -> None:
        for layer in weights:
            for a, w in zip(inputs, layer, strict=True):
                if method == "none" and is_small:
                    rank.ops.linear_small(a, w, residual=residual)
                elif method == "none":
                    torch.add(product(a, w), residual)
                elif method in rank.reducers:
                    rank.reducers[method].all_reduce(product(a, w), residual)
                elif method == "one-shot":
                    total = torch.ops.symm_mem.one_shot_all_reduce_copy(
                        x, product(a, w), "sum", rank.group.group_name
                    )
                    torch.add(total, residual)
                else:
                    y = product(a, w)
                    dist.all_reduce(y, group=rank.group)
                    torch.add(y, residual)

    return time_graph(rank, run_layers, 1) / CHAIN_LAYERS


def time_gather(rank: Rank, method: str, rows: int) -> float:
    """Return microseconds in which every rank gets eight bytes for each row of every rank."""
    x = torch.ones(rows, dtype=torch.int64, device=rank.device)
    if method in rank.reducers:
        return time_graph(rank, partial(rank.reducers[method].all_gather, x), GRAPH_CALLS)
    out = x.new_empty((rank.world_size, rows))
    run = partial(dist.all_gather_into_tensor, out, x, group=rank.group)
    return time_graph(rank, run, GRAPH_CALLS)


def run_part(rank: Rank, part: str) -> Any:
    """Return the result of a part, whose name is a kind and the arguments of its function."""
    kind, *words = part.split()
    if kind == "check":
        return check_graphs(rank) if words == ["graphs"] else check_eager(rank, words[0])
    if kind == "time":
        return time_method(rank, words[0], words[1], int(words[2]))
    if kind == "gather":
        return time_gather(rank, words[0], int(words[1]))
    return time_chain(rank, words[0], int(words[1]))


def run_rank(
    setting: Setting, number: int, world_size: int, start: int, parts: Sequence[str]
) -> Iterator[Any]:
    """Set this rank up, yield None, then yield the result of each part."""
    rank = Rank(number, world_size, start, setting)
    yield None
    for part in parts:
        rank.meet()
        yield run_part(rank, part)
        torch.cuda.empty_cache()
