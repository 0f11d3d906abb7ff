"""What drafts gain over plain decoding: by an oracle, by a draft model, with k fixed and chosen.

Owns the ways that are compared and the figures of `forge bench spec`. Knows no kernel: what steps
cost is timed through the seam (forge.models.costs).

    plain             no drafts; its outputs are recorded
    oracle k          the record, each token spoiled with probability 1 - a: drafts at no cost
    draft k           the draft model
    adaptive          the number of drafts is chosen by the costs: with the oracle, with the draft
                      model, and with drafts that cost as much and are never right

    opened pair ─► plain ─► outputs ─► oracle
                                  └──► each way, a run each repeat ─► figures ─► ratios to plain

Figures are those of a run's window (bench/rounds.py), and a ratio is of two runs of the same
repeat. One opened pair serves all ways, one after the other: each way is an engine of its own, and
the adaptive ones keep theirs, since a server learns once. Greedy, so whatever a way does its output
has to be the plain one; tokens that are not are counted.

Random weights are another matter: their best two logits are so near to each other that a batch of
another size chooses another token, and the record is lost. There the model runs every step, and a
script says what came of it: the record, with drafts right at the chosen rate, a draft model's too.

Formula of a round's gain: Leviathan et al. 2023, theorem 3.8, with h for the host.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from bench import shapes, tiny
from bench.drive import TimedModel, defaults, opened
from bench.record import record, write
from bench.rounds import Figures, Tokens, apart, figures_of, run, summary
from bench.workload import Cells, draw_prompts, id_range, say
from forge.config import EngineConfig, Speculation, StepCosts
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.llm import Options
from forge.models.around import Around
from forge.models.costs import Parts, measured, parts
from forge.models.load import TRAINED
from forge.overhead import overhead
from forge.proposers import Oracle
from forge.sampling import draw_key, uniform
from forge.seam import Model, PendingStep, Row, RowOutput, StepOutput, StepPlan, Verified
from forge.speculative import expected_tokens

DRAFTS = {
    "hash": "hash:agreement=0.8,step_ms=1",
    "tiny": "tiny-draft",
    "qwen3-4b": "qwen3-0.6b",
}
"""Who drafts for a model where nobody is named."""

STREAMS = (1, 8, 64)
MOST = 8
"""Drafts of a step, where nobody asked for another number."""

ORACLE_DRAFTS = (2, 3, 4, 6, 8)
MODEL_DRAFTS = (1, 2, 3, 4, 8)
WARM_UP = 24
"""Output tokens of the runs that do not count."""


class Way(NamedTuple):
    """How tokens are proposed. `k` is their number in a step; None where it is chosen."""

    name: str
    k: int | None = None


PLAIN = Way("plain", 0)


class Setting(NamedTuple):
    """What all runs at one number of streams share.

    config      with the speculation that the pair was opened with
    costs       of steps, by the number of drafts: what k is chosen by
    parts       of rounds, by the number of drafts
    agreement   share of the oracle's tokens that are right
    scripted    a script says what is sampled, and how many drafts are right
    """

    model: Model
    config: EngineConfig
    costs: Mapping[int, StepCosts]
    parts: Mapping[int, Parts]
    agreement: float
    prompts: Sequence[Tokens]
    output: int
    scripted: bool = False

    @property
    def speculation(self) -> Speculation:
        """That of the pair."""
        assert self.config.speculation is not None, "the pair was opened without"
        return self.config.speculation


# Ways.


class Misled(TimedModel):
    """The pair, whose drafts run and are thrown away: tokens are verified that cannot be right.

    record   what the target says of each sequence, by its id
    """

    def __init__(self, model: Model, prompts: Sequence[Tokens], record: Mapping[int, Tokens]):
        super().__init__(model)
        self._known = _known(prompts, record)

    def forward(self, plan: StepPlan) -> PendingStep:
        """The model's, for other drafts."""
        vocab_size = self.vocab_size()
        rows = []
        for row in plan.rows:
            tokens = self._known[row.seq_id % len(self._known)][row.end - len(row.drafts) : row.end]
            rows.append(row._replace(drafts=tuple((token + 1) % vocab_size for token in tokens)))
        return super().forward(plan._replace(rows=tuple(rows)))


def _known(prompts: Sequence[Tokens], record: Mapping[int, Tokens]) -> list[Tokens]:
    """Each prompt with what is recorded behind it."""
    return [[*prompt, *record[i]] for i, prompt in enumerate(prompts)]


class ScriptedStep(NamedTuple):
    """A step whose output is read and then told by the script."""

    pending: PendingStep
    plan: StepPlan
    script: Scripted

    def result(self) -> StepOutput:
        """As many tokens as the script says, once the model has its own."""
        output = self.pending.result()
        said = map(self.script.said, self.plan.rows, output.rows)
        return output._replace(rows=tuple(said))


class Scripted(Around):
    """A model that does all its work and says the record. An error stays what it is.

    agreement   share of a draft model's tokens that are right; known drafts are right or are not
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Tokens],
        record: Mapping[int, Tokens],
        agreement: float,
        seed: int,
    ) -> None:
        super().__init__(model)
        self._known = _known(prompts, record)
        self._agreement = agreement
        self._seed = seed

    def forward(self, plan: StepPlan) -> PendingStep:
        """The model's."""
        return ScriptedStep(self._model.forward(plan), plan, self)

    def said(self, row: Row, output: RowOutput) -> RowOutput:
        """The record's tokens, one more than drafts that are right; those are judged in order."""
        known, end = self._known_of(row), row.end - len(row.drafts)
        if not output.tokens or end >= len(known):
            return output
        kept = 0
        while kept < len(row.drafts) and self._right(row, kept, end + kept):
            kept += 1
        judged = row.drafts[: kept + 1]
        vocab_size = self.vocab_size()
        verified = tuple(
            Verified(known[end + i] if i < kept else (known[end + i] + 1) % vocab_size)
            for i in range(len(judged))
        )
        return output._replace(tokens=tuple(known[end : end + kept + 1]), verified=verified)

    def _known_of(self, row: Row) -> Tokens:
        # Sequences are numbered on from run to run of an engine.
        return self._known[row.seq_id % len(self._known)]

    def _right(self, row: Row, index: int, at: int) -> bool:
        known, draft = self._known_of(row), row.drafts[index]
        if at + 1 >= len(known):  # nobody knows what would come
            return False
        if isinstance(draft, int):
            return draft == known[at]
        return uniform(draw_key(self._seed, row.seq_id, at), 0) < self._agreement


def ways(most: int) -> list[Way]:
    """All that are compared where a step has at most `most` drafts, the plain one first."""
    return [
        PLAIN,
        *(Way("oracle", k) for k in [k for k in ORACLE_DRAFTS if k <= most] or [most]),
        *(Way("draft", k) for k in sorted({most, *(k for k in MODEL_DRAFTS if k < most)})),
        *(Way(f"adaptive, {who}") for who in ("oracle", "draft", "useless")),
    ]


def engine_of(way: Way, setting: Setting, plain: Mapping[int, Tokens], seed: int) -> Engine:
    """An engine for one run. `plain` is what the oracle knows, `seed` that of what it spoils."""
    model, config, asked = setting.model, setting.config, setting.speculation
    if setting.scripted and plain:
        right = 0.0 if way.name.endswith("useless") else setting.agreement
        model = Scripted(model, setting.prompts, plain, right, seed)
    if way == PLAIN:
        return Engine(model, replace(config, speculation=None))
    num_tokens = way.k or asked.num_tokens
    costs = None if way.k else setting.costs[num_tokens]
    if way.name.endswith("oracle"):
        free = None if costs is None else costs._replace(draft=())
        guessing = Speculation(num_tokens=num_tokens, method="ngram", costs=free)
        oracle = Oracle(plain, setting.agreement, model.vocab_size(), seed)
        return Engine(model, replace(config, speculation=guessing), proposer=oracle)
    if way.name.endswith("useless") and not setting.scripted:
        model = Misled(model, setting.prompts, plain)
    drafting = replace(asked, num_tokens=num_tokens, costs=costs)
    return Engine(model, replace(config, speculation=drafting))


def shares(k: int, parts: Parts, here: Figures, plain: Figures) -> dict[str, float]:
    """Where the time of a round of k drafts goes, and what is reached of what that promises.

    In steps of plain decoding: a step of the draft model takes c of the device, verification v; h
    is what a round took beyond both, the host's share of it.

    of_formula   tokens/s as a share of plain * E / (1 + k c + h), as if v were 1
    """
    c, v = parts.draft / parts.step, parts.verify / parts.step
    h = here.round_s / plain.round_s - v - k * c
    gain = here.tok_s / plain.tok_s / here.per_round
    return {"c": c, "v": v, "h": h, "of_formula": gain * (1 + k * c + h)}


def sample(way: Way, setting: Setting, here: Figures, plain: Figures) -> dict[str, float]:
    """The numbers of one run, beside those of the plain run of its repeat."""
    told = {
        "tok_s": here.tok_s,
        "ratio": here.tok_s / plain.tok_s,
        "round_ms": here.round_s * 1e3,
        "drafts": here.drafts,
        "draft_steps": here.draft_steps,
        "tokens_per_round": here.per_round,
    }
    if here.acceptance is not None:
        told["acceptance"] = here.acceptance
    if way.k and way.name == "oracle":
        told["expected"] = expected_tokens(setting.agreement, way.k)
    if way.k and way.name == "draft":
        told |= shares(way.k, setting.parts[way.k], here, plain)
    return told


def level(setting: Setting, repeats: int) -> dict[str, Any]:
    """Every way at one number of streams, after a warm-up. Raises RequestFailed, InvalidConfig."""
    prompts, output, most = setting.prompts, setting.output, setting.speculation.num_tokens
    compared = ways(most)
    plain = run(engine_of(PLAIN, setting, {}, 0), prompts, output).outputs
    learnt: dict[Way, Engine] = {}
    for way in compared:
        engine = engine_of(way, setting, plain, 0)
        if way.k is None:
            learnt[way] = engine
        run(engine, prompts, output if way.k is None else min(WARM_UP, output))
    samples: dict[Way, list[dict[str, float]]] = {way: [] for way in compared}
    for repeat in range(repeats):
        seen: dict[Way, Figures] = {}
        for way in compared:
            engine = learnt.get(way) or engine_of(way, setting, plain, repeat)
            ran = run(engine, prompts, output)
            seen[way] = figures_of(ran, output, most + 1)
            streams, places = apart(ran.outputs, plain)
            told = sample(way, setting, seen[way], seen[PLAIN])
            samples[way].append({**told, "streams_apart": streams, "tokens_apart": places})
    found: list[dict[str, Any]] = [
        {"way": way.name, "k": way.k, **summary(samples[way])} for way in compared
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


class Asked(NamedTuple):
    """What to measure. None: that of the cells.

    streams     none: STREAMS, as far as max_num_seqs goes
    agreement   share of the oracle's tokens that are right
    """

    streams: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    agreement: float = 0.8
    repeats: int = 3


def sizes(asked: Asked, cells: Cells) -> dict[int, tuple[int, int]]:
    """Tokens of prompt and output at each number of streams: those of the cell of so many."""
    found = {}
    for streams in asked.streams:
        lengths = cells.sweep.input, cells.sweep.output
        for batch in cells.throughput:
            if batch.requests == streams:
                lengths = batch.input[1], batch.output[1]
        found[streams] = asked.prompt_tokens or lengths[0], asked.output_tokens or lengths[1]
    return found


def checked(asked: Asked, options: Options) -> Asked:
    """The same with the streams that a batch can have. Raises InvalidConfig."""
    most = options.get("max_num_seqs", max(asked.streams or STREAMS))
    if asked.streams and max(asked.streams) > most:
        raise InvalidConfig(
            "streams", f"{max(asked.streams)} are no batch of {most}", "Raise max_num_seqs"
        )
    if not 0 <= asked.agreement <= 1:
        raise InvalidConfig("agreement", f"{asked.agreement} is no share", "Give 0 to 1")
    fitting = tuple(streams for streams in STREAMS if streams <= most)
    return asked._replace(streams=asked.streams or fitting or STREAMS[:1])


def opening(model: str, asked: Asked, cells: Cells, given: Options) -> Options:
    """Options with which all streams decode together, for a pair. Raises InvalidConfig."""
    draft = given.get("draft_model", DRAFTS.get(model.partition(":")[0]))
    if draft is None:
        raise InvalidConfig(
            "draft_model", f"nobody is known to draft for {model[:64]!r}", "Name a smaller model"
        )
    most = given.get("num_speculative_tokens", MOST)
    streams = max(asked.streams)
    lengths = sizes(asked, cells).values()
    longest, shortest = max(map(sum, lengths)), min(output for _, output in lengths)
    if shortest < 4 * (most + 1):
        raise InvalidConfig(
            "output_tokens",
            f"{shortest} are few rounds of {most} drafts",
            f"Give at least {4 * (most + 1)}",
        )
    block_size = given.get("block_size", 16)
    room: Options = {
        "depth": 2,
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_seqs": streams,
        "max_num_batched_tokens": max(8192, streams * (1 + most)),
        "num_blocks": streams * (-(-longest // block_size) + 1),
        "num_speculative_tokens": most,
        "draft_model": draft,
    }
    return {**defaults(model, cells), **room, **given}


def prompts_of(
    model: str, vocab_size: int, streams: int, length: int, seed: int
) -> tuple[str, list[list[int]]]:
    """Where prompts come from, and they. A trained pair has text on which it was not trained."""
    rng = random.Random(seed)
    if model not in TRAINED:
        lengths = (length, length)
        return "random ids", draw_prompts(rng, streams, lengths, id_range(vocab_size))
    texts = [each.data for each in tiny.library() if each.held_out and len(each.data) >= length]
    prompts = []
    for _ in range(streams):
        text = rng.choice(texts)
        begin = rng.randrange(len(text) - length + 1)
        prompts.append([byte + 1 for byte in text[begin : begin + length]])
    return "held-out text", prompts


def measure(
    model: str,
    asked: Asked,
    cells: Cells,
    given: Options,
    tell: Callable[[Mapping[str, Any]], object] = lambda level: None,
) -> dict[str, Any]:
    """Every figure of the pair, which is opened for it. Raises InvalidConfig, RequestFailed.

    tell   hears of each number of streams when it is done
    """
    asked = checked(asked, given)
    options = opening(model, asked, cells, given)
    draft = options["draft_model"]
    with ExitStack() as closing:
        if draft in shapes.SHAPES:
            root = closing.enter_context(tempfile.TemporaryDirectory())
            options["draft_model"] = str(shapes.write(draft, root))
        llm, shape, start_s = closing.enter_context(opened(model, options))
        inner, config = llm.engine.model, llm.engine.config
        speculation = config.speculation
        assert speculation is not None, "a pair was asked for"
        costs: dict[int, StepCosts] = {}
        for way in ways(speculation.num_tokens):
            if way.k and way.name == "draft":
                tried = replace(speculation, num_tokens=way.k)
                spent = measured(inner, replace(config, speculation=tried))
                assert spent is not None, "no row of so small a cache has drafts"
                costs[way.k] = spent._replace(host=overhead(replace(config, speculation=tried)))
        levels = []
        for streams, (length, output) in sizes(asked, cells).items():
            source, prompts = prompts_of(model, inner.vocab_size(), streams, length, cells.seed)
            measured_parts = {k: parts(inner, config, streams, k) for k in costs}
            scripted = options.get("load_format") == "dummy"
            setting = Setting(
                inner, config, costs, measured_parts, asked.agreement, prompts, output, scripted
            )
            levels.append({**level(setting, asked.repeats), "repeats": asked.repeats})
            tell(levels[-1])
    return {
        "engine": "forge",
        "shape": shape,
        "draft": os.path.basename(draft.rstrip("/")),
        "start_s": start_s,
        "prompts": source,
        "agreement": asked.agreement,
        "scripted": options.get("load_format") == "dummy",
        "repeats": asked.repeats,
        "costs": {str(k): each._asdict() for k, each in costs.items()},
        "levels": levels,
    }


# What is shown.

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


def row(told: Mapping[str, Any]) -> str:
    """One way under its heading; a dash for what it has not."""
    k = "chosen" if told["k"] is None else told["k"]
    cells = [f"{told[key]:,.{digits}f}" if key in told else "-" for key, _, digits in COLUMNS]
    return f"{told['way']:<17}{k:>7}" + "".join(f"{each:>9}" for each in cells)


def show(told: Mapping[str, Any]) -> None:
    """A table of one number of streams on standard output."""
    lengths = f"{told['prompt_tokens']} + {told['output_tokens']} tokens"
    print(
        f"\n{told['streams']} streams, {lengths}, medians of {told['repeats']}; "
        f"the oracle's best k is {told['best_k']}"
    )
    print(f"{'way':<17}{'k':>7}" + "".join(f"{name:>9}" for _, name, _ in COLUMNS))
    for each in told["ways"]:
        print(row(each), flush=True)


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
    """Measure, show, print the result, write the record where asked. Raises InvalidConfig.

    model     a shape's name, a checkpoint's folder or id, or an embedded model
    options   what the pair is opened with beside the benchmark's own, the draft model too
    The others are those of Asked.
    """
    asked = Asked(tuple(streams), prompt_tokens, output_tokens, agreement, repeats)
    figures = measure(model, asked, cells or Cells.read(), options or Options(), show)
    print(f"\n{figures['shape']}, drafts of {figures['draft']}, {figures['prompts']}")
    say(figures)
    if json_path is not None:
        write(json_path, record("spec", figures))
    return 0
