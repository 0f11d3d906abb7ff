"""Requests of traffic cells: prompts, lengths and arrivals, drawn from a seed and a trace.

Owns the draws. Knows no engine: every engine gets the same requests in the same order.

    Cell, seed ──► lengths ─┬─► TrafficRequest, ...      Batch, TraceBatch
    trace file ──► lengths ─┤   Conversation, ...        Conversations
                   arrivals ┘   Arrival, ...             OpenLoop

Always true: lengths depend on the seed and the load alone, so cells with equal loads have equal
lengths. Token ids differ from round to round: no round finds another round in a prefix cache.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from forge.bench.traffic_cells import (
    Batch,
    Cell,
    Conversations,
    OpenLoop,
    Params,
    TraceBatch,
    Traffic,
)
from forge.bench.workload import draw_prompts
from forge.errors import InvalidConfig
from forge.sim.workloads.traces import TraceRequest, open_trace


class TrafficRequest(NamedTuple):
    """A request for exactly `output` tokens."""

    prompt: list[int]
    output: int
    params: Params


class Conversation(NamedTuple):
    """The system prompt, and the turns. The prompt of a turn has its new tokens only."""

    prefix: list[int]
    turns: list[TrafficRequest]


class Arrival(NamedTuple):
    """A request that is due `due_s` seconds after the start."""

    due_s: float
    request: TrafficRequest


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace. Raises InvalidConfig."""
    requests = list(open_trace(path))
    if not requests:
        raise InvalidConfig("trace", f"{path} has no request", "Give another trace")
    return requests


class RequestDraw(NamedTuple):
    """The source of the requests of every cell.

    trace   requests whose lengths and arrivals are drawn
    ids     range of token ids, half-open
    """

    traffic: Traffic
    trace: Sequence[TraceRequest]
    ids: tuple[int, int]

    def batch(self, cell: Cell, round_index: int) -> list[TrafficRequest]:
        """Return the requests of a Batch or a TraceBatch."""
        load, rng = cell.load, random.Random(f"lengths {self.traffic.seed}")
        if isinstance(load, TraceBatch):
            lengths = [self._clip(each) for each in rng.choices(self.trace, k=load.requests)]
        else:
            assert isinstance(load, Batch), load
            lengths = [
                (rng.randint(*load.input), rng.randint(*load.output)) for _ in range(load.requests)
            ]
        return self._requests(cell, round_index, lengths)

    def conversations(self, cell: Cell, round_index: int) -> list[Conversation]:
        """Return conversations that share a prefix, which no other round has."""
        load, rng = cell.load, random.Random(f"lengths {self.traffic.seed}")
        assert isinstance(load, Conversations), load
        lengths = [
            (rng.randint(*load.input), rng.randint(*load.output))
            for _ in range(load.conversations * load.turns)
        ]
        turns = self._requests(cell, round_index, lengths)
        prefix_rng = random.Random(f"prefix {self.traffic.seed} {cell.name} {round_index}")
        (prefix,) = draw_prompts(prefix_rng, 1, (load.prefix, load.prefix), self.ids)
        starts = range(0, len(turns), load.turns)
        return [Conversation(prefix, turns[start : start + load.turns]) for start in starts]

    def arrivals(self, cell: Cell, round_index: int) -> list[Arrival]:
        """Return the arrivals of an OpenLoop: a part of the trace, repeated where it is short.

        Raises InvalidConfig where all requests of the trace come at the same time.
        """
        load, trace = cell.load, self.trace
        assert isinstance(load, OpenLoop), load
        count = max(2, math.ceil(load.rate * load.seconds))
        rng = random.Random(f"arrivals {self.traffic.seed}")
        start = rng.randrange(max(1, len(trace) - count + 1))
        rows = [trace[(start + index) % len(trace)] for index in range(count)]
        mean_gap_ns = trace[-1].at_ns / max(1, len(trace) - 1)
        gaps_ns = [
            after.at_ns - before.at_ns if after.at_ns >= before.at_ns else mean_gap_ns
            for before, after in pairwise(rows)
        ]
        times_ns = list(accumulate(gaps_ns, initial=0.0))
        if not times_ns[-1]:
            raise InvalidConfig(
                "trace", "its requests come at the same time and have no rate", "Give another trace"
            )
        scale = (count - 1) / load.rate / times_ns[-1]
        requests = self._requests(cell, round_index, [self._clip(row) for row in rows])
        return [Arrival(at * scale, each) for at, each in zip(times_ns, requests, strict=True)]

    def _clip(self, row: TraceRequest) -> tuple[int, int]:
        max_len = self.traffic.options["max_model_len"]
        output = max(1, min(row.output, max_len // 2))
        return max(1, min(row.prompt, max_len - output)), output

    def _requests(
        self, cell: Cell, round_index: int, lengths: Sequence[tuple[int, int]]
    ) -> list[TrafficRequest]:
        rng = random.Random(f"prompts {self.traffic.seed} {cell.name} {round_index}")
        return [
            TrafficRequest(
                draw_prompts(rng, 1, (tokens, tokens), self.ids)[0],
                output,
                cell.params[index % len(cell.params)],
            )
            for index, (tokens, output) in enumerate(lengths)
        ]


def digest(work: Sequence[TrafficRequest | Conversation | Arrival]) -> str:
    """Return a hash of all prompts, lengths, times and parameters, equal for equal work."""
    return sha256(json.dumps(work).encode()).hexdigest()[:16]
