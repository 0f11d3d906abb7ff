"""The same greedy requests run in different ways: which tokens differ, and how close they were.

Owns the ways, the pairs of them and the report of `forge bench pairs`. Arithmetic on a device
rounds differently for another batch or another kernel, so two ways may choose another token where
two were almost equally likely. Whether they were is what the report tells.

    together   A B C D  one batch           a  17 17  4  9  2
    alone      A, then B, then C, then D    b  17 17  4  5  8
                                                        └─ the first difference counts: behind it
                                                           the contexts are not the same
    gap = log p(9) - log p(5) in way a at that position; 0 is a tie

A way has to have happened, or its pair says nothing: the figures of `Seen` are checked. Everything
but the pairs with eager steps runs on one opened model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench.drive import defaults, opened
from bench.record import record, write
from bench.workload import Cells, draw_prompts, id_range, say
from forge.config import EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig, RequestFailed
from forge.llm import Options
from forge.models.around import Around
from forge.request import MAX_LOGPROBS, Request, SamplingParams, TokenLogprob
from forge.seam import Model, PendingStep, StepPlan

LENGTHS = (5, 700)
"""Prompt lengths, both included."""

CHUNK = 64
"""Tokens of a step where prompts are to be computed in pieces."""


class Way(NamedTuple):
    """How requests are run.

    open_at_once   requests in the engine at any time
    rounds         how often all are run on one engine; the last round counts
    logprobs       most likely tokens that are asked for beside each token
    """

    config: EngineConfig
    open_at_once: int
    rounds: int = 1
    logprobs: int | None = None


class Seen(NamedTuple):
    """What happened in the last round.

    most_rows     rows of the largest step
    split         rows that computed a part of a prompt and not its end
    preemptions   times that a sequence lost its blocks
    cached        tokens taken from the prefix cache
    """

    most_rows: int
    split: int
    preemptions: int
    cached: int


class Answer(NamedTuple):
    """Output of one request; one entry of `logprobs` for each token where the way asks."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class Run(NamedTuple):
    """The answers of a way, in the order of the prompts."""

    answers: list[Answer]
    seen: Seen


class Divergence(NamedTuple):
    """The first position at which two answers differ.

    position     of the output, from 0
    first        token of the scored side, the most likely there
    second       token of the other side
    gap          log probability of `first` less that of `second`, on the scored side
    relative     the gap as a share of what lies between the most likely token and the last listed
    ranked       `second` is among the listed tokens; if not, gap and relative are lower bounds
    """

    request: int
    position: int
    first: int
    second: int
    gap: float
    relative: float
    ranked: bool


class Watched(Around):
    """The model, and counts of what its plans told it so far: those of `Seen`."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.most_rows = 0
        self.split = 0
        self.preemptions = 0

    def forward(self, plan: StepPlan) -> PendingStep:
        """The model's."""
        self.most_rows = max(self.most_rows, len(plan.rows))
        self.split += sum(not row.num_samples for row in plan.rows)
        self.preemptions += len(plan.preempted)
        return self._model.forward(plan)


def run(model: Model, way: Way, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """Every prompt has `tokens` greedy tokens. Raises RequestFailed."""
    engine = Engine(model, way.config)
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=way.logprobs
    )
    assert way.rounds > 0, f"{way.rounds} rounds"
    for number in range(way.rounds):
        engine.model = watched = Watched(model)
        cached = engine.scheduler.cached_tokens
        base = number * len(prompts)
        requests = [Request(base + i, tuple(prompt), params) for i, prompt in enumerate(prompts)]
        answers = answered(engine, requests, way.open_at_once)
    cached = engine.scheduler.cached_tokens - cached
    return Run(answers, Seen(watched.most_rows, watched.split, watched.preemptions, cached))


def answered(engine: Engine, requests: Sequence[Request], open_at_once: int) -> list[Answer]:
    """The answers, in order, once the engine is idle. Raises RequestFailed."""
    found = {request.id: Answer((), ()) for request in requests}
    left = list(reversed(requests))
    count = 0
    while left or engine.has_work:
        while left and count < open_at_once:
            engine.submit(left.pop())
            count += 1
        for delta in engine.step():
            if delta.error is not None:
                raise RequestFailed(delta.error)
            before = found[delta.request_id]
            found[delta.request_id] = Answer(
                before.tokens + delta.tokens, before.logprobs + delta.logprobs
            )
            count -= delta.finish is not None
    return list(found.values())


def scarce(config: EngineConfig, lengths: Sequence[int], tokens: int) -> int:
    """Blocks that hold all prompts and next to none of their outputs, but any request alone."""
    prompts = sum(-(-length // config.block_size) for length in lengths)
    spare = max(1, prompts // 90)  # what admission leaves free, or not all would run at first
    return max(prompts + spare, -(-(max(lengths) + tokens) // config.block_size))


def ways(config: EngineConfig, lengths: Sequence[int], tokens: int) -> dict[str, Way]:
    """Every way on a model that was opened with this config. `lengths` are those of the prompts."""
    count = len(lengths)
    # No more than the model was opened with.
    chunked = replace(
        config,
        max_num_seqs=min(count, CHUNK, config.max_num_seqs),
        max_num_batched_tokens=min(CHUNK, config.max_num_batched_tokens),
    )
    few = min(scarce(config, lengths, tokens), config.num_blocks)
    together = Way(config, count, logprobs=MAX_LOGPROBS)
    return {
        "together": together,
        "alone": together._replace(open_at_once=1),
        "without logprobs": together._replace(logprobs=None),
        "in chunks": Way(chunked, count),
        "preempted": Way(replace(config, num_blocks=few), count),
        "behind a prefix": Way(replace(config, enable_prefix_caching=True), count, rounds=2),
        f"depth {3 - config.depth}": Way(replace(config, depth=3 - config.depth), count),
    }


def eager_ways(config: EngineConfig, count: int) -> dict[str, Way]:
    """Ways on a model that was opened anew and records no step."""
    return {"eager": Way(config, count), "alone, eager": Way(config, 1)}


REACHED: Mapping[str, Callable[[Seen, int], bool]] = {
    "together": lambda seen, count: seen.most_rows == count and not seen.split,
    "alone": lambda seen, count: seen.most_rows == 1 and not seen.split,
    "in chunks": lambda seen, count: seen.split > 0,
    "preempted": lambda seen, count: seen.preemptions > 0,
    "behind a prefix": lambda seen, count: seen.cached > 0,
}
"""What a way has to have been, given the number of requests."""


def missed(runs: Mapping[str, Run]) -> list[str]:
    """Ways that did not happen, with what was seen of them."""
    return [
        f"{name!r} did not happen: {run.seen}. Give more requests or tokens, or fewer options"
        for name, run in runs.items()
        if name in REACHED and not REACHED[name](run.seen, len(run.answers))
    ]


def divergence(request: int, scored: Answer, other: Answer) -> Divergence | None:
    """Where the answers of one request first differ, or None. The first side has logprobs."""
    both = zip(scored.tokens, other.tokens, strict=True)
    position = next((at for at, (a, b) in enumerate(both) if a != b), None)
    if position is None:
        return None
    first, second = scored.tokens[position], other.tokens[position]
    token = scored.logprobs[position]
    listed = dict(token.top)
    last = token.top[-1][1]
    gap, spread = token.logprob - listed.get(second, last), token.top[0][1] - last
    relative = gap / spread if spread else 0.0
    return Divergence(
        request, position, first, second, round(gap, 6), round(relative, 6), second in listed
    )


def compared(scored: Run, other: Run) -> dict[str, Any]:
    """Figures of one pair. Tokens behind a request's first difference are not compared."""
    both = list(zip(scored.answers, other.answers, strict=True))
    found = [divergence(index, a, b) for index, (a, b) in enumerate(both)]
    apart = [each for each in found if each is not None]
    tokens = [
        len(a.tokens) if at is None else at.position + 1
        for (a, _), at in zip(both, found, strict=True)
    ]
    return {
        "requests": len(both),
        "identical": len(both) - len(apart),
        "tokens": sum(tokens),
        "max_gap": max((each.gap for each in apart), default=0.0),
        "max_relative": max((each.relative for each in apart), default=0.0),
        "divergences": [each._asdict() for each in apart],
    }


def show(pairs: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each pair and one for each divergence on standard output."""
    print(f"{'pair':<34}{'requests':>9}{'identical':>10}{'tokens':>8}{'max gap':>10}{'share':>8}")
    for name, figures in pairs.items():
        print(
            f"{name:<34}{figures['requests']:>9}{figures['identical']:>10}{figures['tokens']:>8}"
            f"{figures['max_gap']:>10.4g}{figures['max_relative']:>8.2%}"
        )
        for each in figures["divergences"]:
            least = "" if each["ranked"] else "at least "
            print(
                f"    request {each['request']} token {each['position']}: {each['first']} and "
                f"{each['second']}, gap {least}{each['gap']:.4g} ({each['relative']:.2%})"
            )


def opening(model: str, lengths: Sequence[int], tokens: int, options: Options) -> Options:
    """Options with which all prompts fit into one step and all sequences into the cache."""
    longest = max(lengths) + tokens
    block_size = options.get("block_size", 16)
    room: Options = {
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_seqs": len(lengths),
        "max_num_batched_tokens": max(2048, sum(lengths)),
        "num_blocks": len(lengths) * -(-longest // block_size),
    }
    return {**defaults(model, Cells.read()), **room, **options}


def measure(
    model: str, prompts_of: Callable[[int], list[list[int]]], tokens: int, options: Options
) -> tuple[str, dict[str, Run]]:
    """The shape's name and a run of every way. `prompts_of` draws for a size of vocabulary."""
    with opened(model, options) as (llm, shape, _):
        inner, config = llm.engine.model, llm.engine.config
        prompts = prompts_of(inner.vocab_size())
        lengths = [len(prompt) for prompt in prompts]
        runs = {
            name: run(inner, way, prompts, tokens)
            for name, way in ways(config, lengths, tokens).items()
        }
        # Compiled modules are refused without graphs.
        plain = not options.get("enforce_eager") and not options.get("torch_compile")
        recorded = llm.device.startswith("cuda") and plain
    if recorded:
        # As many blocks as before: what is free on the device is another number now.
        again: Options = {**options, "num_blocks": config.num_blocks, "enforce_eager": True}
        with opened(model, again) as (llm, _, _):
            for name, way in eager_ways(llm.engine.config, len(prompts)).items():
                runs[name] = run(llm.engine.model, way, prompts, tokens)
    return shape, runs


def main(
    model: str,
    json_path: str | None,
    requests: int = 32,
    tokens: int = 64,
    options: Options | None = None,
) -> int:
    """Run, compare, show, write the record where asked. 1 where a way did not happen.

    A difference is a figure and no failure. Raises InvalidConfig.
    """
    given = options or Options()
    if requests < 2 or tokens < 2:
        name = "requests" if requests < 2 else "tokens"
        raise InvalidConfig(name, "one alone cannot be compared", "Give 2 or more")
    longest = min(LENGTHS[1], given.get("max_model_len", LENGTHS[1] + tokens) - tokens)
    if longest < LENGTHS[0]:
        raise InvalidConfig("max_model_len", "no prompt fits beside its output", "Give more")
    seed = Cells.read().seed
    rng = random.Random(seed)
    lengths = [rng.randint(LENGTHS[0], longest) for _ in range(requests)]

    def prompts_of(vocab_size: int) -> list[list[int]]:
        ids = id_range(vocab_size)
        return [draw_prompts(rng, 1, (length, length), ids)[0] for length in lengths]

    shape, runs = measure(model, prompts_of, tokens, opening(model, lengths, tokens, given))
    pairs = {}
    for name, other in runs.items():
        side = "alone" if name == "alone, eager" else "together"
        if name != side:
            pairs[f"{side} / {name}"] = compared(runs[side], other)
    show(pairs)
    seen = {name: each.seen._asdict() for name, each in runs.items()}
    about = {"engine": "forge", "shape": shape}
    brief = {
        name: {key: value for key, value in figures.items() if key != "divergences"}
        for name, figures in pairs.items()
    }
    say({**about, "pairs": brief})
    if json_path is not None:
        write(json_path, record("pairs", {**about, "seed": seed, "ways": seen, "pairs": pairs}))
    complaints = missed(runs)
    for complaint in complaints:
        print(f"forge bench pairs: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    from forge.cli import main as command

    sys.exit(command(["bench", "pairs", *sys.argv[1:]]))
