"""Load on any OpenAI-compatible server: latency, throughput and goodput by streams or by rate.

Owns the requests of the load generators and the printed lines. The loads are in
bench/load_generator.py, the wire format is in bench/http_client.py.

    --concurrency 1,8,64   ─► closed loop, a level for each number of streams  ┐
    --rate 4,8,16          ─► open loop, a level for each rate                 ┤
                                                     table, RESULT, record, plot

Start the server first, then: python -m forge.bench.serve http://127.0.0.1:8080 --label forge
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from forge.bench.http_client import Endpoint
from forge.bench.load_generator import (
    Figures,
    LatencySLO,
    LoadRun,
    figures,
    open_loop_figures,
    poisson,
    run_closed_loop,
    run_open_loop,
)
from forge.bench.result_file import create_result, write_json
from forge.bench.serve_plot import check_plot, write_serve_plot
from forge.bench.workload import PROMPT_ID_RANGE, Cells, SweepCell, draw_prompts, print_result
from forge.errors import ForgeError, InvalidConfig, RequestFailed

SECONDS = 20.0
"""Default duration of an open loop."""

MAX_TOKENS = 10_000_000
"""Limit of the output tokens of a level. Times of events are kept until its end: 32 bytes each."""

COLUMNS = (
    *(("TTFT p50", "ttft_p50", ".1f"), ("p99", "ttft_p99", ".1f")),
    *(("ITL p50", "itl_p50", ".2f"), ("p99", "itl_p99", ".2f")),
    *(("gap p50", "gap_p50", ".2f"), ("p99", "gap_p99", ".2f")),
    *(("latency p50", "latency_p50", ".0f"), ("p99", "latency_p99", ".0f")),
    *(("tok/s", "tok_s", ",.0f"), ("req/s", "req_s", ".2f"), ("goodput", "goodput", ".2f")),
    *(("completed", "completed", "d"), ("rejected", "rejected", "d")),
)
"""(heading, key, format) of each printed figure. Times in ms."""


def format_heading(load: str) -> str:
    """Return the line above the levels of one kind of load."""
    return f"{load:>8}" + "".join(f"{name:>{max(8, len(name) + 2)}}" for name, _, _ in COLUMNS)


def format_row(level: Mapping[str, Any]) -> str:
    """Return a level as a row of the table; a dash for figures that it does not have."""
    cells = [f"{level.get('rate', level.get('c')):>8g}"]
    for name, key, form in COLUMNS:
        value = level.get(key)
        cells.append(f"{'-' if value is None else format(value, form):>{max(8, len(name) + 2)}}")
    return "".join(cells)


class RequestSource:
    """Requests of one size to one server. Prompts are drawn as they are sent."""

    def __init__(self, server: Endpoint, cell: SweepCell, ids: tuple[int, int]) -> None:
        self.server = server
        self._cell = cell
        self._ids = ids

    def draw(self, rng: random.Random, output: int) -> Iterator[bytes]:
        """Yield requests for exactly `output` tokens each, indefinitely."""
        length = (self._cell.input, self._cell.input)
        while True:
            (prompt,) = draw_prompts(rng, 1, length, self._ids)
            yield self.server.build_request(prompt, output)

    async def run_closed(
        self, rng: random.Random, streams: int, count: int, output: int
    ) -> LoadRun:
        """Run `count` requests on `streams` streams."""
        messages = list(islice(self.draw(rng, output), count))
        return self.check_complete(await run_closed_loop(self.server, messages, streams), output)

    async def run_open(self, rng: random.Random, due_s: Iterable[float]) -> LoadRun:
        """Send a request at each of these times."""
        output = self._cell.output
        work = zip(due_s, self.draw(rng, output), strict=False)
        return self.check_complete(await run_open_loop(self.server, work), output)

    def check_complete(self, run: LoadRun, output: int) -> LoadRun:
        """Return the run. Raises RequestFailed unless each stream has all its tokens."""
        for each in run.completed:
            if each.num_tokens != output or not each.chunk_times_s:
                raise RequestFailed(f"a stream ended after {each.num_tokens} tokens of {output}")
        return run


class LoadSpec(NamedTuple):
    """The loads to run.

    concurrency   numbers of streams, a closed loop each
    rates         requests a second, an open loop each
    requests      requests of each rate; None: as many as are due within `seconds`
    """

    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    requests: int | None
    seconds: float
    objective: LatencySLO

    def due_s(self, rng: random.Random, rate: float) -> Iterator[float]:
        """Return the times at which the requests of this rate are due."""
        times = poisson(rng, rate)
        if self.requests is not None:
            return islice(times, self.requests)
        return takewhile(lambda at_s: at_s < self.seconds, times)


def build_load(
    cell: SweepCell,
    concurrency: Sequence[int],
    rates: Sequence[float],
    requests: int | None,
    seconds: float | None,
    objective: LatencySLO,
) -> LoadSpec:
    """Return the loads; the cell's streams where neither streams nor rates are given.

    Raises InvalidConfig for values out of range, and for more tokens than MAX_TOKENS.
    """
    promised = {f"slo_{name}": value for name, value in objective._asdict().items()}
    positive_options = {"seconds": seconds, **promised}
    for name, value in (*positive_options.items(), *(("rate", rate) for rate in rates)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidConfig(name, f"{value:g} is not a number above 0", "Give 10, say")
    for name, value in (("requests", requests), ("seconds", seconds)):
        if value is not None and not rates:
            raise InvalidConfig(name, "it is how much of each --rate", "Give --rate too")
    if requests is not None and requests < 1:
        raise InvalidConfig("requests", f"{requests} is not a positive integer", "Give 1 or more")
    if requests is not None and seconds is not None:
        raise InvalidConfig("seconds", "requests has said how many", "Give one of the two")
    streams = tuple(concurrency) or (() if rates else cell.concurrency)
    load = LoadSpec(streams, tuple(rates), requests, seconds or SECONDS, objective)
    sizes = {"concurrency": cell.rounds * max(streams, default=0)}
    num_requests = max(rates, default=0) * load.seconds if requests is None else requests
    sizes["rate" if requests is None else "requests"] = math.ceil(num_requests)
    for name, count in sizes.items():
        if count * cell.output > MAX_TOKENS:
            raise InvalidConfig(
                name,
                f"{count} requests of {cell.output} tokens are more than the {MAX_TOKENS} tokens "
                "whose times are kept",
                "Ask for fewer",
            )
    return load


async def measure(
    requests: RequestSource, cell: SweepCell, load: LoadSpec, seed: int
) -> list[Figures]:
    """Return a level for each concurrency, then one for each rate, after a warm-up.

    Each rate has its own generators for arrivals and prompts, so it does not depend on other
    levels.
    """
    rng = random.Random(seed)
    await requests.run_closed(rng, 4, 4, min(32, cell.output))
    levels: list[Figures] = []
    for streams in load.concurrency:
        run = await requests.run_closed(rng, streams, streams * cell.rounds, cell.output)
        levels.append({"c": streams, **figures(run, load.objective)})
    for rate in load.rates:
        rng = random.Random(f"prompts {seed} {rate}")
        times = load.due_s(random.Random(f"arrivals {seed} {rate}"), rate)
        levels.append(open_loop_figures(await requests.run_open(rng, times), rate, load.objective))
    return levels


def main(
    url: str,
    json_path: str | None,
    label: str = "forge",
    concurrency: Sequence[int] = (),
    model: str | None = None,
    vocab_size: int | None = None,
    api_key: str | None = None,
    cells: Cells | None = None,
    *,
    rate: Sequence[float] = (),
    requests: int | None = None,
    seconds: float | None = None,
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
    plot: str | None = None,
) -> int:
    """Measure, print a result for each level, and write the record and the plot.

    label        name of the engine in results
    vocab_size   bound of the ids of prompts, for models of less than 100,000
    json_path    file of the record, or None
    plot         file of the plot, or None
    Raises InvalidConfig where no server answers, RequestFailed where a request fails.
    """
    cells = cells or Cells.read()
    objective = LatencySLO(slo_ttft_ms, slo_itl_ms)
    load = build_load(cells.sweep, concurrency, rate, requests, seconds, objective)
    if plot is not None:
        check_plot(plot)
    cell = cells.sweep._replace(concurrency=load.concurrency)
    high = PROMPT_ID_RANGE[1] if vocab_size is None else min(PROMPT_ID_RANGE[1], vocab_size)
    server = Endpoint(url, model, api_key)
    source = RequestSource(server, cell, (min(PROMPT_ID_RANGE[0], high // 4), high))
    levels = asyncio.run(measure(source, cell, load, cells.seed))
    about = {"engine": label, "shape": os.path.basename(server.model.rstrip("/")), "path": "http"}
    results: list[dict[str, Any]] = [{**about, **figures} for figures in levels]
    show(results)
    figures: dict[str, Any] = {"levels": results}
    if objective != LatencySLO():
        figures = {"objective": objective._asdict(), **figures}
    if json_path is not None:
        write_json(json_path, create_result("serve", figures))
    if plot is not None:
        write_serve_plot(plot, results)
    return 0


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each kind of load, then each result as a line for programs."""
    for load, key in (("streams", "c"), ("req/s", "rate")):
        levels = [each for each in results if key in each]
        if levels:
            print(format_heading(load))
        for each in levels:
            print(format_row(each))
    for each in results:
        print_result(each)


def parse_ints(text: str) -> tuple[int, ...]:
    """Return `1,2,4` as integers."""
    return tuple(int(part) for part in text.split(","))


def parse_floats(text: str) -> tuple[float, ...]:
    """Return `0.5,2` as numbers."""
    return tuple(float(part) for part in text.split(","))


def run_cli() -> int:
    """Run the command line of this module. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m forge.bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url")
    parser.add_argument("--label", default="forge", help="the engine's name in results")
    parser.add_argument("--model", help="the model's name over HTTP; default: the first listed")
    parser.add_argument("--concurrency", type=parse_ints, default=(), help="such as 1,8,64")
    parser.add_argument("--rate", type=parse_floats, default=(), help="such as 0.5,2")
    parser.add_argument("--requests", type=int, help="requests of each rate")
    parser.add_argument("--seconds", type=float, help="duration of each rate")
    parser.add_argument("--slo-ttft-ms", type=float, help="limit of ms to the first token")
    parser.add_argument("--slo-itl-ms", type=float, help="limit of mean ms between tokens")
    parser.add_argument("--vocab-size", type=int, help="needed if it is below 100000")
    parser.add_argument("--api-key")
    parser.add_argument("--json", help="file for the record", dest="json_path")
    parser.add_argument("--plot", help="file for the plot")
    try:
        return main(**vars(parser.parse_args()))
    except ForgeError as error:
        print(f"forge.bench.serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run_cli())
