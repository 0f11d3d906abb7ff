"""The same greedy requests under different batching: which tokens differ, and how close they were.

Owns the variants, the pairs of them and the report of `forge bench pairs`. Arithmetic on a device
rounds differently for another batch or another kernel. So two variants may choose different tokens
that were almost equally likely. The report says how close they were.

    together   A B C D in one batch        a   17 17  4  9  2
    alone      A, then B, then C, then D   b   17 17  4  5  8
                                                         └─ the first difference counts: after it
                                                            the contexts differ
    gap = log p(9) - log p(5) in variant a at that position; 0 is a tie

Always true: a variant did run as named, or its pair is an error; see VARIANT_CHECKS. All pairs run
on one opened model, except those with eager steps.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from forge.bench.engine_driver import defaults, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import Cells, draw_prompts, print_result, prompt_id_range
from forge.config import EngineConfig
from forge.engine import Engine
from forge.engine_options import Options
from forge.errors import InvalidConfig, RequestFailed
from forge.models.model_wrapper import ModelWrapper
from forge.request import MAX_FAST_LOGPROBS, Request, SamplingParams, TokenLogprob
from forge.seam import Model, PendingStep, StepPlan

LENGTHS = (5, 700)
"""Bounds of prompt lengths, both included."""

CHUNK = 64
"""Token budget of a step that splits prompts into chunks."""


class RunVariant(NamedTuple):
    """The configuration and batching of a run.

    max_open   requests in the engine at a time
    rounds     runs on one engine; the last one counts
    logprobs   requested number of top log probabilities for each token
    """

    config: EngineConfig
    max_open: int
    rounds: int = 1
    logprobs: int | None = None


class VariantCounts(NamedTuple):
    """Counts of the last round.

    most_rows     rows of the largest step
    split         rows that computed part of a prompt and not its end
    preemptions   preempted sequences
    cached        tokens from the prefix cache
    """

    most_rows: int
    split: int
    preemptions: int
    cached: int


class GreedyOutput(NamedTuple):
    """Output of a request.

    `logprobs` has an entry for each token where the variant requests them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class VariantRun(NamedTuple):
    """Outputs of a variant, in the order of the prompts."""

    outputs: list[GreedyOutput]
    counts: VariantCounts


class Divergence(NamedTuple):
    """The first position at which two outputs differ.

    position     in the output, from 0
    first        token of the scored side, the most likely there
    second       token of the other side
    gap          log probability of `first` minus that of `second`, on the scored side
    relative     the gap as a share of the range between the most likely and the last listed token
    ranked       `second` is among the listed tokens; if not, gap and relative are lower bounds
    """

    request: int
    position: int
    first: int
    second: int
    gap: float
    relative: float
    ranked: bool


class PlanCounter(ModelWrapper):
    """The model, and counts over the plans that it received: those of VariantCounts."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.most_rows = 0
        self.split = 0
        self.preemptions = 0

    def forward(self, plan: StepPlan) -> PendingStep:
        """Count the plan and launch it."""
        self.most_rows = max(self.most_rows, len(plan.rows))
        self.split += sum(not row.num_samples for row in plan.rows)
        self.preemptions += len(plan.preempted)
        return self._model.forward(plan)


def run_variant(
    model: Model, variant: RunVariant, prompts: Sequence[Sequence[int]], tokens: int
) -> VariantRun:
    """Return `tokens` greedy tokens for every prompt. Raises RequestFailed."""
    engine = Engine(model, variant.config)
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=variant.logprobs
    )
    assert variant.rounds > 0, f"{variant.rounds} rounds"
    for number in range(variant.rounds):
        engine.model = counter = PlanCounter(model)
        cached = engine.scheduler.num_cached_tokens
        base = number * len(prompts)
        requests = [Request(base + i, tuple(prompt), params) for i, prompt in enumerate(prompts)]
        answers = collect_outputs(engine, requests, variant.max_open)
    cached = engine.scheduler.num_cached_tokens - cached
    return VariantRun(
        answers, VariantCounts(counter.most_rows, counter.split, counter.preemptions, cached)
    )


def collect_outputs(
    engine: Engine, requests: Sequence[Request], max_open: int
) -> list[GreedyOutput]:
    """Run the requests and return their outputs, in order. Raises RequestFailed."""
    found = {request.id: GreedyOutput((), ()) for request in requests}
    pending = list(reversed(requests))
    count = 0
    while pending or engine.has_work:
        while pending and count < max_open:
            engine.submit(pending.pop())
            count += 1
        for delta in engine.step():
            if delta.error is not None:
                raise RequestFailed(delta.error)
            before = found[delta.request_id]
            found[delta.request_id] = GreedyOutput(
                before.tokens + delta.tokens, before.logprobs + delta.logprobs
            )
            count -= delta.finish is not None
    return list(found.values())


def tight_num_blocks(config: EngineConfig, lengths: Sequence[int], tokens: int) -> int:
    """Return blocks for all prompts and hardly any output, but enough for each request alone."""
    prompts = sum(-(-length // config.block_size) for length in lengths)
    spare = max(1, prompts // 90)  # admission leaves some blocks free; all should run at first
    return max(prompts + spare, -(-(max(lengths) + tokens) // config.block_size))


def run_variants(
    config: EngineConfig, lengths: Sequence[int], tokens: int
) -> dict[str, RunVariant]:
    """Return every variant for a model that was opened with this config.

    lengths   of the prompts
    """
    count = len(lengths)
    # Limits are at most those that the model was opened with.
    chunked = replace(
        config,
        max_num_seqs=min(count, CHUNK, config.max_num_seqs),
        max_num_batched_tokens=min(CHUNK, config.max_num_batched_tokens),
    )
    few = min(tight_num_blocks(config, lengths, tokens), config.num_blocks)
    together = RunVariant(config, count, logprobs=MAX_FAST_LOGPROBS)
    return {
        "together": together,
        "alone": together._replace(max_open=1),
        "without logprobs": together._replace(logprobs=None),
        "in chunks": RunVariant(chunked, count),
        "preempted": RunVariant(replace(config, num_blocks=few), count),
        "behind a prefix": RunVariant(replace(config, enable_prefix_caching=True), count, rounds=2),
        f"depth {3 - config.depth}": RunVariant(replace(config, depth=3 - config.depth), count),
    }


def eager_variants(config: EngineConfig, count: int) -> dict[str, RunVariant]:
    """Return the variants for a model that was opened without CUDA graphs."""
    return {"eager": RunVariant(config, count), "alone, eager": RunVariant(config, 1)}


VARIANT_CHECKS: Mapping[str, Callable[[VariantCounts, int], bool]] = {
    "together": lambda counts, count: counts.most_rows == count and not counts.split,
    "alone": lambda counts, count: counts.most_rows == 1 and not counts.split,
    "in chunks": lambda counts, count: counts.split > 0,
    "preempted": lambda counts, count: counts.preemptions > 0,
    "behind a prefix": lambda counts, count: counts.cached > 0,
}
"""Checks that a variant ran as named, given its counts and the number of requests."""


def unreached_variants(runs: Mapping[str, VariantRun]) -> list[str]:
    """Return an error text for each variant that did not run as named, with its counts."""
    return [
        f"{name!r} did not happen: {run.counts}. Give more requests or tokens, or fewer options"
        for name, run in runs.items()
        if name in VARIANT_CHECKS and not VARIANT_CHECKS[name](run.counts, len(run.outputs))
    ]


def find_divergence(request: int, scored: GreedyOutput, other: GreedyOutput) -> Divergence | None:
    """Return where the outputs of one request first differ, or None. `scored` has logprobs."""
    both = zip(scored.tokens, other.tokens, strict=True)
    position = next((at for at, (a, b) in enumerate(both) if a != b), None)
    if position is None:
        return None
    first, second = scored.tokens[position], other.tokens[position]
    token = scored.logprobs[position]
    top_logprobs = dict(token.top)
    last = token.top[-1][1]
    gap, spread = token.logprob - top_logprobs.get(second, last), token.top[0][1] - last
    relative = gap / spread if spread else 0.0
    return Divergence(
        request, position, first, second, round(gap, 6), round(relative, 6), second in top_logprobs
    )


def compare_runs(scored: VariantRun, other: VariantRun) -> dict[str, Any]:
    """Return the figures of a pair. Tokens after the first difference of a request do not count."""
    both = list(zip(scored.outputs, other.outputs, strict=True))
    found = [find_divergence(index, a, b) for index, (a, b) in enumerate(both)]
    divergences = [each for each in found if each is not None]
    tokens = [
        len(a.tokens) if at is None else at.position + 1
        for (a, _), at in zip(both, found, strict=True)
    ]
    return {
        "requests": len(both),
        "identical": len(both) - len(divergences),
        "tokens": sum(tokens),
        "max_gap": max((each.gap for each in divergences), default=0.0),
        "max_relative": max((each.relative for each in divergences), default=0.0),
        "divergences": [each._asdict() for each in divergences],
    }


def show(pairs: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each pair and one for each divergence."""
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


def pairs_options(model: str, lengths: Sequence[int], tokens: int, options: Options) -> Options:
    """Return options with which all prompts fit one step and all sequences fit the cache."""
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


def measure_variants(
    model: str, draw_prompts_for: Callable[[int], list[list[int]]], tokens: int, options: Options
) -> tuple[str, dict[str, VariantRun]]:
    """Return the shape's name and a run of every variant.

    draw_prompts_for   vocabulary size -> prompts
    """
    with open_llm(model, options) as (llm, shape, _):
        inner, config = llm.engine.model, llm.engine.config
        prompts = draw_prompts_for(inner.vocab_size())
        lengths = [len(prompt) for prompt in prompts]
        runs = {
            name: run_variant(inner, variant, prompts, tokens)
            for name, variant in run_variants(config, lengths, tokens).items()
        }
        # enforce_eager is refused for compiled modules.
        plain = not options.get("enforce_eager") and not options.get("torch_compile")
        uses_graphs = llm.device.startswith("cuda") and plain
    if uses_graphs:
        # The same number of blocks: the free memory of the device may have changed.
        eager_options: Options = {**options, "num_blocks": config.num_blocks, "enforce_eager": True}
        with open_llm(model, eager_options) as (llm, _, _):
            for name, variant in eager_variants(llm.engine.config, len(prompts)).items():
                runs[name] = run_variant(llm.engine.model, variant, prompts, tokens)
    return shape, runs


def main(
    model: str,
    json_path: str | None,
    requests: int = 32,
    tokens: int = 64,
    options: Options | None = None,
) -> int:
    """Run, compare, print, and write the record. Returns 1 where a variant did not run as named.

    A difference is a figure, not a failure. Raises InvalidConfig.
    """
    engine_options = options or Options()
    if requests < 2 or tokens < 2:
        name = "requests" if requests < 2 else "tokens"
        raise InvalidConfig(name, "one alone cannot be compared", "Give 2 or more")
    longest = min(LENGTHS[1], engine_options.get("max_model_len", LENGTHS[1] + tokens) - tokens)
    if longest < LENGTHS[0]:
        raise InvalidConfig("max_model_len", "no prompt fits with its output", "Give more")
    seed = Cells.read().seed
    rng = random.Random(seed)
    lengths = [rng.randint(LENGTHS[0], longest) for _ in range(requests)]

    def draw_prompts_for(vocab_size: int) -> list[list[int]]:
        ids = prompt_id_range(vocab_size)
        return [draw_prompts(rng, 1, (length, length), ids)[0] for length in lengths]

    shape, runs = measure_variants(
        model, draw_prompts_for, tokens, pairs_options(model, lengths, tokens, engine_options)
    )
    pairs = {}
    for name, other in runs.items():
        side = "alone" if name == "alone, eager" else "together"
        if name != side:
            pairs[f"{side} / {name}"] = compare_runs(runs[side], other)
    show(pairs)
    counts = {name: each.counts._asdict() for name, each in runs.items()}
    about = {"engine": "forge", "shape": shape}
    brief = {
        name: {key: value for key, value in figures.items() if key != "divergences"}
        for name, figures in pairs.items()
    }
    print_result({**about, "pairs": brief})
    if json_path is not None:
        write_json(
            json_path,
            create_result("pairs", {**about, "seed": seed, "ways": counts, "pairs": pairs}),
        )
    failures = unreached_variants(runs)
    for complaint in failures:
        print(f"forge bench pairs: {complaint}", file=sys.stderr)
    return 1 if failures else 0
