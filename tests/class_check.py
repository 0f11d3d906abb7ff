"""One tiny model of a causal class of transformers, served by forge and compared with itself.

Owns how a class is examined and when its outputs count as equal. What a tiny model is made of:
tests/tiny_configs.py. All classes, and the page about them: tests/model_classes.py.

    tiny_config ─► folder ─┬─► outline ─► load_weights ─► HFModel ─► Engine   log probabilities
     random weights        └─► from_pretrained, eager, one forward per text   true ones

Requests of several lengths run in one batch: chunked prefill, then decode, past every boundary
that the configuration has. Each position's most likely tokens are compared with what transformers
itself computes for the same text, in float32 from the same weights: the true values.

Two float32 models agree within TOLERANCE of the spread of their logits. In bfloat16 rounding moves
all logits, so the measure is transformers' own bfloat16 error against the true values: at most
MEDIAN times its median, TAIL times its 90th percentile and MOST times its maximum, before and after
position ORIGINAL. A mixture of experts sends a token to other experts where two scores are within
rounding of each other, in forge and in transformers alike but not at the same positions. Such a
position is far off in one of the two and proves nothing, so in bfloat16 only the medians of a
mixture of experts are compared: at most EXPERTS times theirs. In float32, where scores are that
close only by a coincidence, every position is compared.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forge.config import DeviceOptions, EngineConfig
from forge.engine import Engine
from forge.errors import InvalidConfig
from forge.models.hf.checkpoint import open_checkpoint
from forge.models.hf.decoder import ModuleDecoder, register
from forge.models.hf.fused import FusedDecoder
from forge.models.hf.open import Outline, load_weights, outline, serving
from forge.request import Request, SamplingParams
from tests.tiny_configs import ORIGINAL, POSITIONS, draw_weights, strength, tiny_config

CLASSES: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
"""The causal class of each model type."""

DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")
TOKENIZER = Path(__file__).resolve().parent.parent / "forge" / "models" / "tiny"

LENGTHS = (0.012, 0.2, 0.6)
"""Of the prompts, as shares of the longest sequence."""
NEW = 24
"""Tokens that each request adds."""
TOP = 20
"""Most likely tokens compared at each position."""
GEOMETRY = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_blocks": 64}

TOLERANCE = 1e-3
MEDIAN, TAIL, MOST = 1.5, 2.0, 3.0
EXPERTS = 3.0
ORDER = 20.0
"""The order of a text must change its logits by so many times what counts as equal."""

LARGEST = 30_000_000
"""Parameters of a model that is tiny."""

FAILURES = ("WRONG", "CRASH")


class Errors(NamedTuple):
    """Quantiles of the errors of some positions, in the spread of their logits."""

    median: float
    tail: float
    most: float


LIMITS = Errors(MEDIAN, TAIL, MOST)


class Comparison(NamedTuple):
    """How far forge, and transformers in the same dtype, are from the true values.

    ours, theirs   before position ORIGINAL, then from it on where a text is that long
    loss           how far the worst emitted token is from the most likely one
    experts        the model is a mixture of experts
    """

    ours: list[Errors]
    theirs: list[Errors]
    loss: float
    experts: bool


class Outcome(NamedTuple):
    """What became of one class.

    seed         of the optional fields; None: the class's defaults
    outcome      fused, modules, refused, not constructible, WRONG or CRASH
    detail       why, in one line
    comparison   what was measured, where a model was served
    """

    kind: str
    dtype: str
    seed: int | None
    outcome: str
    detail: str = ""
    comparison: Comparison | None = None


class Unbuilt(Exception):
    """transformers cannot build or run the model itself."""


class Run(NamedTuple):
    """What an engine returned for some prompts.

    decoder   class of the decoder that served
    limit     longest sequence that was accepted
    texts     prompts with their outputs
    starts    length of each prompt
    scores    for each position after the first of each text its most likely tokens
    error     of the first request that failed, or nothing
    """

    decoder: type
    limit: int
    texts: list[list[int]]
    starts: list[int]
    scores: list[list[Any]]
    error: str


def examine(kind: str, dtype: str, seed: int | None = None) -> Outcome:
    """Return what forge does with a tiny model of the kind."""
    with tempfile.TemporaryDirectory(prefix="forge-class-") as folder:
        try:
            return _examine(kind, dtype, seed, Path(folder))
        except InvalidConfig as refusal:
            return Outcome(kind, dtype, seed, "refused", reason(refusal, CLASSES[kind]))
        except Unbuilt as fault:
            return Outcome(kind, dtype, seed, "not constructible", str(fault))
        except Exception as fault:
            return Outcome(kind, dtype, seed, "CRASH", describe(fault))


def _examine(kind: str, dtype: str, seed: int | None, folder: Path) -> Outcome:
    """Return the outcome of a model that is served. Raises InvalidConfig or Unbuilt."""
    register()
    try:
        config = tiny_config(kind, seed)
        config.architectures = [CLASSES[kind]]
        config.save_pretrained(folder)
    except Exception as fault:
        raise Unbuilt(describe(fault)) from fault
    open_checkpoint(str(folder), CPU, dtype=dtype, load_format="dummy")
    try:
        true, own = build(config, CLASSES[kind], folder, dtype, strength(dtype, seed))
        effect = order_effect(true)
    except Exception as fault:
        raise Unbuilt(describe(fault)) from fault
    run = serve(folder, dtype)
    if run.error:
        return Outcome(kind, dtype, seed, "CRASH", f"a request failed: {run.error}")
    assert effect >= ORDER * TOLERANCE, f"the order of a text changes its logits by {effect:.2g}"
    comparison = compare(run, true, own)
    how = {FusedDecoder: "fused", ModuleDecoder: "modules"}[run.decoder]
    if wrong := faults(comparison, dtype):
        return Outcome(kind, dtype, seed, "WRONG", f"{how}: {wrong}", comparison)
    detail = "" if run.limit == POSITIONS else f"up to {run.limit} positions"
    return Outcome(kind, dtype, seed, how, detail, comparison)


def build(config: Any, name: str, folder: Path, dtype: str, deviation: float) -> tuple[Any, Any]:
    """Return transformers' models of the true values and of its own, saved before in `folder`.

    The true ones are computed in float32 from the weights of the dtype.

    deviation   of the random weights
    """
    cls = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(each.numel() for each in cls._from_config(config).parameters())
    assert size <= LARGEST, f"{size} parameters are not tiny"
    wide, saved = torch.float32, getattr(torch, dtype)
    module = cls._from_config(config, dtype=wide, attn_implementation="eager")
    draw_weights(module, deviation)
    module.to(saved).save_pretrained(folder)
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    true = _loaded(cls, folder, wide)
    return true, true if saved == wide else _loaded(cls, folder, saved)


def _loaded(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    return cls.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def logprobs(module: Any, text: Sequence[int]) -> torch.Tensor:
    """Return [positions, vocabulary] log probabilities by one forward of transformers' model."""
    ids = torch.tensor([text])
    logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert logits.isfinite().all(), "logits of transformers are not finite"
    return logits[0].double().log_softmax(-1)


def order_effect(module: Any) -> float:
    """Return how far the last logits move when the text before is reversed, in their spread."""
    text = _draw_ids(int(0.8 * ORIGINAL), seed=2)
    one, other = (logprobs(module, each)[-1] for each in (text, text[-2::-1] + text[-1:]))
    return float((one - other).square().mean().sqrt() / one.std())


def _draw_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (count,), generator=generator).tolist()


def serve(folder: Path, dtype: str) -> Run:
    """Return what an engine makes of three greedy requests in one batch."""
    known, limit = _outline(folder, dtype)
    weights = load_weights(known.checkpoint, known.geometry, _options(dtype), CPU)
    config = EngineConfig(**known.geometry)
    engine = Engine(serving(weights, config, known.eos_token, CPU), config)
    texts = [_draw_ids(ceil(limit * share), seed) for seed, share in enumerate(LENGTHS)]
    starts = list(map(len, texts))
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
    )
    for index, text in enumerate(texts):
        engine.submit(Request(index, tuple(text), params))
    scores: list[list[Any]] = [[] for _ in texts]
    error = ""
    while engine.has_work:
        for delta in engine.step():
            error = error or delta.error or ""
            texts[delta.request_id] += delta.tokens
            scores[delta.request_id] += [*delta.prompt_logprobs, *delta.logprobs]
    return Run(type(weights.decoder), limit, texts, starts, scores, error)


def _options(dtype: str) -> DeviceOptions:
    return DeviceOptions(device="cpu", dtype=dtype)


def _outline(folder: Path, dtype: str) -> tuple[Outline, int]:
    """Return the checkpoint's outline, and POSITIONS or the most that a refusal names."""

    def outlined(limit: int) -> tuple[Outline, int]:
        geometry = {**GEOMETRY, "max_model_len": limit}
        return outline(str(folder), geometry, _options(dtype), CPU), limit

    try:
        return outlined(POSITIONS)
    except InvalidConfig as refusal:
        _, found, most = str(refusal).rpartition("Give at most ")
        if refusal.option != "max_model_len" or not found:
            raise
    return outlined(int(most))


def compare(run: Run, true: Any, own: Any) -> Comparison:
    """Compare what was served with the models of true and of own values.

    An error is the root mean square over a position's most likely tokens.
    """
    ours: list[list[float]] = [[], []]
    theirs: list[list[float]] = [[], []]
    loss = 0.0
    for text, start, scores in zip(run.texts, run.starts, run.scores, strict=True):
        assert len(scores) == len(text) - 1, f"{len(scores)} scores for {len(text)} tokens"
        truth, rounded = logprobs(true, text), logprobs(own, text)
        spread = truth.std(-1).mean()
        for at, score in enumerate(scores):
            ids = [token for token, _ in score.top]
            values = torch.tensor([value for _, value in score.top], dtype=torch.float64)
            for errors, each in ((ours, values), (theirs, rounded[at, ids])):
                error = (each - truth[at, ids]).square().mean().sqrt() / spread
                errors[at >= ORIGINAL].append(float(error))
            if at >= start - 1:
                lost = truth[at].max() - truth[at, text[at + 1]]
                loss = max(loss, float(lost / spread))
    experts = any("expert" in name for name, _ in true.named_parameters())
    both = ([_errors(part) for part in parts if part] for parts in (ours, theirs))
    return Comparison(*both, loss, experts)


def _errors(values: Sequence[float]) -> Errors:
    quantiles = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
    return Errors(*torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist())


def faults(comparison: Comparison, dtype: str) -> str:
    """Return what is wrong, or nothing."""
    found = []
    for part, ours, theirs in zip(
        ("near", "far"), comparison.ours, comparison.theirs, strict=False
    ):
        limits = [factor * error for factor, error in zip(LIMITS, theirs, strict=True)]
        if dtype == "float32":
            limits = [TOLERANCE] * 3
        elif comparison.experts:
            limits = [EXPERTS * theirs.median, inf, inf]
        found += [
            f"{part} {name} error {error:.2g} above {limit:.2g}"
            for name, error, limit in zip(Errors._fields, ours, limits, strict=True)
            if not error <= limit
        ]
    # A token that was emitted is the most likely one but for the error of its position.
    limit = max(TOLERANCE, *(4 * each.most for each in comparison.ours))
    if not comparison.loss <= limit:
        found.append(f"a token {comparison.loss:.2g} below the most likely one, above {limit:.2g}")
    return ", ".join(found)


def reason(refusal: InvalidConfig, name: str) -> str:
    """Return a refusal without the name of the class and the remedy."""
    problem, _, _ = str(refusal).removeprefix(f"{refusal.option}: ").partition(". ")
    return problem.removeprefix(f"{name} ").removesuffix(", which is not supported")


def describe(fault: BaseException) -> str:
    """Return a fault's name, its first line and where it came from."""
    first = next(iter(str(fault).strip().splitlines()), "")
    last = traceback.extract_tb(fault.__traceback__)[-1]
    return f"{type(fault).__name__}: {first[:160]} ({Path(last.filename).name}:{last.lineno})"
