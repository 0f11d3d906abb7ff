"""Speculative decoding against plain decoding: an oracle and a draft model, k fixed and adaptive.

Owns the variants that are compared and the figures of `forge bench spec`. Knows no kernel: step
costs are timed through the seam (forge.models.costs).

    plain             no drafts; its outputs are the reference
    oracle k          the reference, each token wrong with probability 1 - a: drafts at no cost
    draft k           the draft model
    adaptive          the costs choose the number of drafts: with the oracle, with the draft model,
                      and with drafts that cost as much and are never right

    opened pair ─► plain ─► outputs ─► oracle
                                  └──► each variant, a run a repeat ─► figures ─► ratios to plain

Figures are those of the window of a run (bench/engine_run.py). A ratio is of two runs of the same
repeat. All variants run one after the other on one opened pair, each on its own engine. Adaptive
variants keep their engine, since a server learns once. Requests are greedy, so the output of each
variant must be the plain one; tokens that differ are counted.

With random weights the two best logits are so close that another batch size changes the token, and
the reference is lost. There the model runs every step, and ScriptedModel replaces its output by the
reference. Drafts are accepted at the chosen rate, those of a draft model too.

Formula of the gain of a round: Leviathan et al. 2023, theorem 3.8, with h for the host.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from forge.acceptance import expected_tokens
from forge.bench import shapes, tiny
from forge.bench.engine_driver import ModelTimer, defaults, open_llm
from forge.bench.engine_run import (
    Tokens,
    WindowFigures,
    count_differences,
    run_requests,
    summarize,
    window_figures,
)
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import Cells, draw_prompts, print_result, prompt_id_range
from forge.config import EngineConfig, Speculation, StepCosts
from forge.engine import Engine
from forge.engine_options import Options
from forge.errors import InvalidConfig
from forge.models.costs import DeviceTimes, measure_device_times, measure_step_costs
from forge.models.embedded import EMBEDDED_CHECKPOINTS
from forge.models.model_wrapper import ModelWrapper
from forge.overhead import measure_overhead
from forge.proposers import OracleProposer
from forge.sampling import draw_key, uniform
from forge.seam import Model, PendingStep, Row, RowOutput, StepOutput, StepPlan, Verified

DRAFT_MODELS = {
    "hash": "hash:agreement=0.8,step_ms=1",
    "tiny": "tiny-draft",
    "qwen3-4b": "qwen3-0.6b",
}
"""Default draft model of each target."""

STREAMS = (1, 8, 64)
MAX_DRAFTS = 8
"""Default number of drafts of a step."""

ORACLE_DRAFTS = (2, 3, 4, 6, 8)
MODEL_DRAFTS = (1, 2, 3, 4, 8)
WARM_UP = 24
"""Output tokens of warm-up runs."""


class DraftVariant(NamedTuple):
    """A proposer and its drafts in a step: `k`, or None where the costs choose."""

    name: str
    k: int | None = None


PLAIN = DraftVariant("plain", 0)


class LevelSetup(NamedTuple):
    """The values that all runs at one number of streams share.

    config      with the speculation that the pair was opened with
    costs       number of drafts -> costs of steps, by which k is chosen
    parts       number of drafts -> device times of a round
    agreement   share of the oracle's drafts that are right
    scripted    ScriptedModel decides the samples and how many drafts are accepted
    """

    model: Model
    config: EngineConfig
    costs: Mapping[int, StepCosts]
    parts: Mapping[int, DeviceTimes]
    agreement: float
    prompts: Sequence[Tokens]
    output: int
    scripted: bool = False

    @property
    def speculation(self) -> Speculation:
        """The speculation of the pair."""
        assert self.config.speculation is not None, "the pair was opened without"
        return self.config.speculation


# Variants.


class WrongDrafts(ModelTimer):
    """The pair, with its drafts computed and replaced by wrong ones.

    outputs   sequence -> output of the target
    """

    def __init__(self, model: Model, prompts: Sequence[Tokens], outputs: Mapping[int, Tokens]):
        super().__init__(model)
        self._sequences = _full_sequences(prompts, outputs)

    def forward(self, plan: StepPlan) -> PendingStep:
        """Launch the plan with wrong drafts."""
        vocab_size = self.vocab_size()
        rows = []
        for row in plan.rows:
            tokens = self._sequences[row.seq_id % len(self._sequences)][
                row.end - len(row.drafts) : row.end
            ]
            rows.append(row._replace(drafts=tuple((token + 1) % vocab_size for token in tokens)))
        return super().forward(plan._replace(rows=tuple(rows)))


def _full_sequences(prompts: Sequence[Tokens], outputs: Mapping[int, Tokens]) -> list[Tokens]:
    """Return each prompt followed by its reference output."""
    return [[*prompt, *outputs[i]] for i, prompt in enumerate(prompts)]


class ScriptedStep(NamedTuple):
    """A pending step whose output is replaced by the script."""

    pending: PendingStep
    plan: StepPlan
    script: ScriptedModel

    def result(self) -> StepOutput:
        """Wait for the model and return the scripted output."""
        output = self.pending.result()
        rows = map(self.script.script_row, self.plan.rows, output.rows)
        return output._replace(rows=tuple(rows))


class ScriptedModel(ModelWrapper):
    """A model that computes every step and returns the reference. Errors are passed on.

    agreement   share of accepted drafts of a draft model; drafts known to the host are compared
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Tokens],
        outputs: Mapping[int, Tokens],
        agreement: float,
        seed: int,
    ) -> None:
        super().__init__(model)
        self._sequences = _full_sequences(prompts, outputs)
        self._agreement = agreement
        self._seed = seed

    def forward(self, plan: StepPlan) -> PendingStep:
        """Launch the plan on the model."""
        return ScriptedStep(self._model.forward(plan), plan, self)

    def script_row(self, row: Row, output: RowOutput) -> RowOutput:
        """Return the accepted drafts of the row and one more token, all from the reference."""
        sequence, end = self._sequence_of(row), row.end - len(row.drafts)
        if not output.tokens or end >= len(sequence):
            return output
        num_accepted = 0
        while num_accepted < len(row.drafts) and self._is_right(
            row, num_accepted, end + num_accepted
        ):
            num_accepted += 1
        verified_drafts = row.drafts[: num_accepted + 1]
        vocab_size = self.vocab_size()
        verified = tuple(
            Verified(
                sequence[end + i] if i < num_accepted else (sequence[end + i] + 1) % vocab_size
            )
            for i in range(len(verified_drafts))
        )
        return output._replace(
            tokens=tuple(sequence[end : end + num_accepted + 1]), verified=verified
        )

    def _sequence_of(self, row: Row) -> Tokens:
        # Sequence ids continue from run to run of an engine.
        return self._sequences[row.seq_id % len(self._sequences)]

    def _is_right(self, row: Row, index: int, at: int) -> bool:
        sequence, draft = self._sequence_of(row), row.drafts[index]
        if at + 1 >= len(sequence):  # the reference ends here
            return False
        if isinstance(draft, int):
            return draft == sequence[at]
        return uniform(draw_key(self._seed, row.seq_id, at), 0) < self._agreement


def draft_variants(max_drafts: int) -> list[DraftVariant]:
    """Return all variants where a step has at most `max_drafts` drafts. The plain one is first."""
    return [
        PLAIN,
        *(
            DraftVariant("oracle", k)
            for k in [k for k in ORACLE_DRAFTS if k <= max_drafts] or [max_drafts]
        ),
        *(
            DraftVariant("draft", k)
            for k in sorted({max_drafts, *(k for k in MODEL_DRAFTS if k < max_drafts)})
        ),
        *(DraftVariant(f"adaptive, {who}") for who in ("oracle", "draft", "useless")),
    ]


def create_engine(
    variant: DraftVariant, setting: LevelSetup, plain_outputs: Mapping[int, Tokens], seed: int
) -> Engine:
    """Return an engine for one run.

    plain_outputs   the reference of the oracle
    seed            of the tokens that the oracle gets wrong
    """
    model, config, speculation = setting.model, setting.config, setting.speculation
    if setting.scripted and plain_outputs:
        right_fraction = 0.0 if variant.name.endswith("useless") else setting.agreement
        model = ScriptedModel(model, setting.prompts, plain_outputs, right_fraction, seed)
    if variant == PLAIN:
        return Engine(model, replace(config, speculation=None))
    num_tokens = variant.k or speculation.num_tokens
    costs = None if variant.k else setting.costs[num_tokens]
    if variant.name.endswith("oracle"):
        free_costs = None if costs is None else costs._replace(draft=())
        oracle_config = Speculation(num_tokens=num_tokens, method="ngram", costs=free_costs)
        oracle = OracleProposer(plain_outputs, setting.agreement, model.vocab_size(), seed)
        return Engine(model, replace(config, speculation=oracle_config), proposer=oracle)
    if variant.name.endswith("useless") and not setting.scripted:
        model = WrongDrafts(model, setting.prompts, plain_outputs)
    draft_config = replace(speculation, num_tokens=num_tokens, costs=costs)
    return Engine(model, replace(config, speculation=draft_config))


def round_fractions(
    k: int, parts: DeviceTimes, measured: WindowFigures, plain: WindowFigures
) -> dict[str, float]:
    """Return the parts of a round of k drafts, and the share of the formula's gain that is reached.

    The parts are relative to a step of plain decoding:

    c            a step of the draft model
    v            verification
    h            the rest of the round: the share of the host
    of_formula   tokens/s as a share of plain * E / (1 + k c + h), the formula with v = 1
    """
    c, v = parts.draft / parts.step, parts.verify / parts.step
    h = measured.round_s / plain.round_s - v - k * c
    gain = measured.tok_s / plain.tok_s / measured.tokens_per_round
    return {"c": c, "v": v, "h": h, "of_formula": gain * (1 + k * c + h)}


def run_figures(
    variant: DraftVariant, setting: LevelSetup, measured: WindowFigures, plain: WindowFigures
) -> dict[str, float]:
    """Return the figures of a run, with ratios to the plain run of its repeat."""
    figures = {
        "tok_s": measured.tok_s,
        "ratio": measured.tok_s / plain.tok_s,
        "round_ms": measured.round_s * 1e3,
        "drafts": measured.drafts,
        "draft_steps": measured.draft_steps,
        "tokens_per_round": measured.tokens_per_round,
    }
    if measured.acceptance is not None:
        figures["acceptance"] = measured.acceptance
    if variant.k and variant.name == "oracle":
        figures["expected"] = expected_tokens(setting.agreement, variant.k)
    if variant.k and variant.name == "draft":
        figures |= round_fractions(variant.k, setting.parts[variant.k], measured, plain)
    return figures


def measure_level(setting: LevelSetup, repeats: int) -> dict[str, Any]:
    """Return the figures of every variant at one number of streams, after a warm-up.

    Raises RequestFailed, InvalidConfig.
    """
    prompts, output, max_drafts = setting.prompts, setting.output, setting.speculation.num_tokens
    variants = draft_variants(max_drafts)
    plain_outputs = run_requests(create_engine(PLAIN, setting, {}, 0), prompts, output).outputs
    adaptive_engines: dict[DraftVariant, Engine] = {}
    for variant in variants:
        engine = create_engine(variant, setting, plain_outputs, 0)
        if variant.k is None:
            adaptive_engines[variant] = engine
        run_requests(engine, prompts, output if variant.k is None else min(WARM_UP, output))
    samples: dict[DraftVariant, list[dict[str, float]]] = {variant: [] for variant in variants}
    for repeat in range(repeats):
        window_by_variant: dict[DraftVariant, WindowFigures] = {}
        for variant in variants:
            engine = adaptive_engines.get(variant) or create_engine(
                variant, setting, plain_outputs, repeat
            )
            engine_run = run_requests(engine, prompts, output)
            window_by_variant[variant] = window_figures(engine_run, output, max_drafts + 1)
            streams, num_tokens_apart = count_differences(engine_run.outputs, plain_outputs)
            figures = run_figures(
                variant, setting, window_by_variant[variant], window_by_variant[PLAIN]
            )
            samples[variant].append(
                {**figures, "streams_apart": streams, "tokens_apart": num_tokens_apart}
            )
    found: list[dict[str, Any]] = [
        {"way": variant.name, "k": variant.k, **summarize(samples[variant])} for variant in variants
    ]
    oracles = [each for each in found if each["way"] == "oracle"]
    return {
        "streams": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "output_tokens": output,
        "best_k": max(oracles, key=lambda each: each["ratio"])["k"],
        "ways": found,
    }


# The pair and its prompts.


class SpecWorkload(NamedTuple):
    """The workload to measure. None: the lengths of the cells.

    streams     empty: STREAMS up to max_num_seqs
    agreement   share of the oracle's drafts that are right
    """

    streams: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    agreement: float = 0.8
    repeats: int = 3


def token_lengths(workload: SpecWorkload, cells: Cells) -> dict[int, tuple[int, int]]:
    """Return streams -> tokens of prompt and output, from the cell with that many requests."""
    found = {}
    for streams in workload.streams:
        lengths = cells.sweep.input, cells.sweep.output
        for batch in cells.throughput:
            if batch.requests == streams:
                lengths = batch.input[1], batch.output[1]
        found[streams] = workload.prompt_tokens or lengths[0], workload.output_tokens or lengths[1]
    return found


def resolve_streams(workload: SpecWorkload, options: Options) -> SpecWorkload:
    """Return the workload with streams that fit a batch. Raises InvalidConfig."""
    max_streams = options.get("max_num_seqs", max(workload.streams or STREAMS))
    if workload.streams and max(workload.streams) > max_streams:
        raise InvalidConfig(
            "streams",
            f"{max(workload.streams)} are no batch of {max_streams}",
            "Raise max_num_seqs",
        )
    if not 0 <= workload.agreement <= 1:
        raise InvalidConfig("agreement", f"{workload.agreement} is no share", "Give 0 to 1")
    fitting = tuple(streams for streams in STREAMS if streams <= max_streams)
    return workload._replace(streams=workload.streams or fitting or STREAMS[:1])


def spec_options(
    model: str, workload: SpecWorkload, cells: Cells, engine_options: Options
) -> Options:
    """Return options for a pair with which all streams decode together. Raises InvalidConfig."""
    draft = engine_options.get("draft_model", DRAFT_MODELS.get(model.partition(":")[0]))
    if draft is None:
        raise InvalidConfig(
            "draft_model", f"{model[:64]!r} has no default draft model", "Name a smaller model"
        )
    max_drafts = engine_options.get("num_speculative_tokens", MAX_DRAFTS)
    streams = max(workload.streams)
    lengths = token_lengths(workload, cells).values()
    longest, shortest = max(map(sum, lengths)), min(output for _, output in lengths)
    if shortest < 4 * (max_drafts + 1):
        raise InvalidConfig(
            "output_tokens",
            f"{shortest} are few rounds of {max_drafts} drafts",
            f"Give at least {4 * (max_drafts + 1)}",
        )
    block_size = engine_options.get("block_size", 16)
    room: Options = {
        "depth": 2,
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_seqs": streams,
        "max_num_batched_tokens": max(8192, streams * (1 + max_drafts)),
        "num_blocks": streams * (-(-longest // block_size) + 1),
        "num_speculative_tokens": max_drafts,
        "draft_model": draft,
    }
    return {**defaults(model, cells), **room, **engine_options}


def draw_spec_prompts(
    model: str, vocab_size: int, streams: int, length: int, seed: int
) -> tuple[str, list[list[int]]]:
    """Return the source of prompts, and the prompts. A trained pair gets held-out text."""
    rng = random.Random(seed)
    if model not in EMBEDDED_CHECKPOINTS:
        lengths = (length, length)
        return "random ids", draw_prompts(rng, streams, lengths, prompt_id_range(vocab_size))
    texts = [
        each.data for each in tiny.read_library() if each.is_holdout and len(each.data) >= length
    ]
    prompts = []
    for _ in range(streams):
        text = rng.choice(texts)
        begin = rng.randrange(len(text) - length + 1)
        prompts.append([byte + 1 for byte in text[begin : begin + length]])
    return "held-out text", prompts


def measure(
    model: str,
    workload: SpecWorkload,
    cells: Cells,
    engine_options: Options,
    on_level: Callable[[Mapping[str, Any]], object] = lambda level: None,
) -> dict[str, Any]:
    """Open the pair and return all figures. Raises InvalidConfig, RequestFailed.

    on_level   called with the figures of each number of streams when they are complete
    """
    workload = resolve_streams(workload, engine_options)
    options = spec_options(model, workload, cells, engine_options)
    draft = options["draft_model"]
    with ExitStack() as stack:
        if draft in shapes.SHAPES:
            root = stack.enter_context(tempfile.TemporaryDirectory())
            options["draft_model"] = str(shapes.write_shape(draft, root))
        llm, shape, start_s = stack.enter_context(open_llm(model, options))
        inner, config = llm.engine.model, llm.engine.config
        speculation = config.speculation
        assert speculation is not None, "the options name a draft model"
        costs: dict[int, StepCosts] = {}
        for variant in draft_variants(speculation.num_tokens):
            if variant.k and variant.name == "draft":
                candidate = replace(speculation, num_tokens=variant.k)
                step_costs = measure_step_costs(inner, replace(config, speculation=candidate))
                assert step_costs is not None, "no row of so small a cache has drafts"
                costs[variant.k] = step_costs._replace(
                    scheduler=measure_overhead(replace(config, speculation=candidate))
                )
        levels = []
        for streams, (length, output) in token_lengths(workload, cells).items():
            source, prompts = draw_spec_prompts(
                model, inner.vocab_size(), streams, length, cells.seed
            )
            measured_parts = {k: measure_device_times(inner, config, streams, k) for k in costs}
            scripted = options.get("load_format") == "dummy"
            setting = LevelSetup(
                inner, config, costs, measured_parts, workload.agreement, prompts, output, scripted
            )
            levels.append({**measure_level(setting, workload.repeats), "repeats": workload.repeats})
            on_level(levels[-1])
    return {
        "engine": "forge",
        "shape": shape,
        "draft": os.path.basename(draft.rstrip("/")),
        "start_s": start_s,
        "prompts": source,
        "agreement": workload.agreement,
        "scripted": options.get("load_format") == "dummy",
        "repeats": workload.repeats,
        "costs": {str(k): each._asdict() for k, each in costs.items()},
        "levels": levels,
    }


# Output.

COLUMNS = (
    ("tok_s", "tok/s", 0),
    ("ratio", "ratio", 3),
    ("ratio_p10", "p10", 3),
    ("ratio_p90", "p90", 3),
    ("round_ms", "round ms", 3),
    ("drafts", "drafts", 2),
    ("draft_steps", "steps", 2),
    ("tokens_per_round", "tokens", 3),
    ("expected", "expected", 3),
    ("acceptance", "kept", 3),
    ("c", "c", 3),
    ("v", "v", 3),
    ("h", "h", 3),
    ("of_formula", "formula", 3),
    ("tokens_apart", "apart", 0),
)


def format_row(figures: Mapping[str, Any]) -> str:
    """Return a variant as a row of the table; a dash for figures that it does not have."""
    k = "chosen" if figures["k"] is None else figures["k"]
    cells = [f"{figures[key]:,.{digits}f}" if key in figures else "-" for key, _, digits in COLUMNS]
    return f"{figures['way']:<17}{k:>7}" + "".join(f"{each:>9}" for each in cells)


def show(level: Mapping[str, Any]) -> None:
    """Print a table of one number of streams."""
    lengths = f"{level['prompt_tokens']} + {level['output_tokens']} tokens"
    print(
        f"\n{level['streams']} streams, {lengths}, medians of {level['repeats']}; "
        f"the oracle's best k is {level['best_k']}"
    )
    print(f"{'variant':<17}{'k':>7}" + "".join(f"{name:>9}" for _, name, _ in COLUMNS))
    for each in level["ways"]:
        print(format_row(each), flush=True)


def main(
    model: str,
    json_path: str | None,
    streams: Sequence[int] = (),
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    agreement: float = 0.8,
    repeats: int = 3,
    options: Options | None = None,
    cells: Cells | None = None,
) -> int:
    """Measure, print the result and write the record to `json_path`. Raises InvalidConfig.

    model     a shape's name, a checkpoint's folder or id, or an embedded model
    options   of the pair besides those of the benchmark; may name the draft model
    The other arguments are those of SpecWorkload.
    """
    workload = SpecWorkload(tuple(streams), prompt_tokens, output_tokens, agreement, repeats)
    figures = measure(model, workload, cells or Cells.read(), options or Options(), show)
    print(f"\n{figures['shape']}, drafts of {figures['draft']}, {figures['prompts']}")
    print_result(figures)
    if json_path is not None:
        write_json(json_path, create_result("spec", figures))
    return 0
