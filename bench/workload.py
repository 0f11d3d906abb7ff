"""The fixed workloads: their cells, and the prompts of each cell.

Owns cells.json as values, the draw of prompts, the closed loop and the summary of a sample. Knows
no engine: forge, its peers and the HTTP client all run these workloads.

    cells.json ─► Cells ─► prompts ─► an engine ─► RESULT {json}

Always true: every cell has its own generator, so leaving one out changes no other.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from forge.errors import InvalidConfig

CELLS_FILE = Path(__file__).with_name("cells.json")

PROMPT_ID_RANGE = (1000, 100_000)
"""Token ids of prompts, half-open, where the vocabulary is large enough."""


Id = TypeVar("Id")
"""The type of an engine's request ids."""


class BatchCell(NamedTuple):
    """Requests that are sent at once. `input` and `output` are bounds of tokens, both included."""

    name: str
    requests: int
    input: tuple[int, int]
    output: tuple[int, int]

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the batch of an entry of cells.json. A single length is both bounds."""
        lengths = (entry["input"], entry["output"])
        low_high = [(n, n) if isinstance(n, int) else (n[0], n[1]) for n in lengths]
        return cls(entry["name"], entry["requests"], low_high[0], low_high[1])


class SteadyCell(NamedTuple):
    """Single decode steps at these batch sizes, `steps` of them around `context` tokens."""

    batches: tuple[int, ...]
    context: int
    steps: int


class PrefixCell(NamedTuple):
    """Time to the first token after a shared prefix that is in the cache."""

    name: str
    prefix_tokens: int
    new_tokens: int
    repeats: int


class SweepCell(NamedTuple):
    """A closed loop: `rounds` requests a stream at each concurrency."""

    concurrency: tuple[int, ...]
    input: int
    output: int
    rounds: int


class Cells(NamedTuple):
    """All cells. An empty tuple leaves a kind out.

    ttft      prompt lengths; the median of `repeats` counts
    rounds    runs of each throughput cell; the fastest counts
    mixed     throughput cells of varied lengths, run once each
    prefix    needs a separate engine: caching is on for these and off for all others
    """

    seed: int
    warm_up: tuple[BatchCell, ...]
    ttft: tuple[int, ...]
    repeats: int
    throughput: tuple[BatchCell, ...]
    rounds: int
    mixed: tuple[BatchCell, ...]
    steady: SteadyCell
    prefix: tuple[PrefixCell, ...]
    sweep: SweepCell

    @classmethod
    def read(cls, path: Path = CELLS_FILE) -> Self:
        """Read the cells of a file."""
        content = json.loads(path.read_text())
        steady, sweep = content["steady"], content["sweep"]
        return cls(
            content["seed"],
            tuple(map(BatchCell.from_json, content["warm_up"])),
            tuple(content["ttft"]["prompt_tokens"]),
            content["ttft"]["repeats"],
            tuple(map(BatchCell.from_json, content["throughput"])),
            content["rounds"],
            (BatchCell.from_json(content["mixed"]),),
            SteadyCell(tuple(steady["batches"]), steady["context"], steady["steps"]),
            (PrefixCell(**content["prefix"]),),
            SweepCell(**{**sweep, "concurrency": tuple(sweep["concurrency"])}),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all cells except the sweep."""
        return (
            *(f"ttft_{n}" for n in self.ttft),
            *(batch.name for batch in (*self.throughput, *self.mixed)),
            *(f"b{n}" for n in self.steady.batches),
            *(f"ttft_{cell.name}" for cell in self.prefix),
        )

    def select(self, names: Sequence[str]) -> Self:
        """Return only the named cells. Raises InvalidConfig for unknown names."""
        for name in names:
            if name not in self.names:
                remedy = f"Use some of: {', '.join(self.names)}"
                raise InvalidConfig("cells", f"there is no cell {name!r}", remedy)
        batches = tuple(n for n in self.steady.batches if f"b{n}" in names)
        return self._replace(
            ttft=tuple(n for n in self.ttft if f"ttft_{n}" in names),
            throughput=tuple(batch for batch in self.throughput if batch.name in names),
            mixed=tuple(batch for batch in self.mixed if batch.name in names),
            steady=self.steady._replace(batches=batches),
            prefix=tuple(cell for cell in self.prefix if f"ttft_{cell.name}" in names),
        )


def prompt_id_range(vocab_size: int) -> tuple[int, int]:
    """Return the range of prompt ids, above special ids and within the vocabulary."""
    low, high = PROMPT_ID_RANGE
    return (low, high) if high <= vocab_size else (min(low, vocab_size // 4), vocab_size)


def draw_prompts(
    rng: random.Random, count: int, lengths: tuple[int, int], ids: tuple[int, int]
) -> list[list[int]]:
    """Return random prompts. The length of each is drawn before its tokens."""
    return [[rng.randrange(*ids) for _ in range(rng.randint(*lengths))] for _ in range(count)]


def draw_batch(
    rng: random.Random, batch: BatchCell, ids: tuple[int, int]
) -> list[tuple[list[int], int]]:
    """Return the prompts of a batch and their output tokens, which are drawn after all prompts."""
    prompts = draw_prompts(rng, batch.requests, batch.input, ids)
    return [(prompt, rng.randint(*batch.output)) for prompt in prompts]


def quantile(sample: Sequence[float], share: float) -> float:
    """Return the value below which `share` of a sample lies, or the largest."""
    return sorted(sample)[min(len(sample) - 1, int(share * len(sample)))]


def percentiles(name: str, sample: Sequence[float], digits: int) -> dict[str, float]:
    """Return the median as `name`, and the 10th and 90th percentile as name_p10 and name_p90."""
    return {
        name: round(statistics.median(sample), digits),
        f"{name}_p10": round(quantile(sample, 0.1), digits),
        f"{name}_p90": round(quantile(sample, 0.9), digits),
    }


class RequestTimes(NamedTuple):
    """A request of a closed loop, in seconds on one clock.

    chunk_times_s   when each piece of output arrived
    num_tokens      tokens of the output
    """

    start_s: float
    chunk_times_s: tuple[float, ...]
    num_tokens: int


def level_figures(
    concurrency: int, streams: Sequence[RequestTimes], wall_s: float
) -> dict[str, float]:
    """Return the figures of one concurrency, times in ms.

    itl is the mean time between tokens of a request after the first. gap is a single wait between
    two arrivals, each of which may bring several tokens.
    """
    ttft = [1e3 * (s.chunk_times_s[0] - s.start_s) for s in streams]
    itl = [
        1e3 * (s.chunk_times_s[-1] - s.chunk_times_s[0]) / max(1, s.num_tokens - 1) for s in streams
    ]
    gaps = [
        1e3 * (after - before)
        for s in streams
        for before, after in zip(s.chunk_times_s, s.chunk_times_s[1:], strict=False)
    ]
    return {
        "c": concurrency,
        "ttft_p50": round(statistics.median(ttft), 2),
        "ttft_p99": round(quantile(ttft, 0.99), 2),
        "itl_p50": round(statistics.median(itl), 3),
        "itl_p99": round(quantile(itl, 0.99), 3),
        "gap_p99": round(quantile(gaps or [0.0], 0.99), 3),
        "tok_s": round(sum(s.num_tokens for s in streams) / wall_s),
    }


SubmitFunction = Callable[[Sequence[int], int], Id]
"""Submits a prompt with its number of output tokens. Returns the id of the request."""

StepFunction = Callable[[], Mapping[Id, int]]
"""Runs one step of the engine. Returns the new tokens of each request."""


def run_engine_closed_loop(
    submit: SubmitFunction[Id],
    step: StepFunction[Id],
    prompts: Sequence[Sequence[int]],
    output: int,
    concurrency: int,
) -> tuple[list[RequestTimes], float]:
    """Run the prompts in order, `concurrency` at a time. Returns request times and wall seconds.

    A stream that has its `output` tokens is replaced before the next step.
    """
    assert concurrency >= 1, f"{concurrency} streams"
    pending = deque(prompts)
    started: dict[Id, float] = {}
    stamps: dict[Id, list[float]] = {}
    counts: dict[Id, int] = {}
    streams: list[RequestTimes] = []
    start_s = time.perf_counter()
    while pending or counts:
        while pending and len(counts) < concurrency:
            now = time.perf_counter()
            request_id = submit(pending.popleft(), output)
            started[request_id], stamps[request_id], counts[request_id] = now, [], 0
        num_tokens_by_request = step()
        now = time.perf_counter()
        for request_id, tokens in num_tokens_by_request.items():
            if tokens:
                stamps[request_id].append(now)
                counts[request_id] += tokens
            if counts[request_id] >= output:
                count = counts.pop(request_id)
                arrived = tuple(stamps.pop(request_id))
                streams.append(RequestTimes(started.pop(request_id), arrived, count))
    return streams, time.perf_counter() - start_s


def run_closed_levels(
    submit: SubmitFunction[Id],
    step: StepFunction[Id],
    cells: Cells,
    ids: tuple[int, int],
    concurrency: Sequence[int],
) -> list[dict[str, float]]:
    """Return a level for each concurrency, after a warm-up of four streams."""
    cell, rng = cells.sweep, random.Random(cells.seed)
    length = (cell.input, cell.input)
    warm_up = draw_prompts(rng, 4, length, ids)
    run_engine_closed_loop(submit, step, warm_up, min(32, cell.output), 4)
    levels = []
    for streams in concurrency:
        prompts = draw_prompts(rng, streams * cell.rounds, length, ids)
        done, wall_s = run_engine_closed_loop(submit, step, prompts, cell.output, streams)
        levels.append(level_figures(streams, done, wall_s))
    return levels


def print_result(result: Mapping[str, Any]) -> None:
    """Print the result as one line, for programs that collect results."""
    print("RESULT " + json.dumps(result), flush=True)
