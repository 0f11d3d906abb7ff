"""One tiny model of a causal class of transformers, served by forge and compared with itself.

Owns how a class is examined and when its outputs count as equal. What a tiny model is made of:
tests/hf/tiny_configs.py. All classes, and the page about them: tests/hf/model_classes.py.

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
from forge.models.hf.decoders.fused_decoder import FusedDecoder
from forge.models.hf.decoders.module_decoder import ModuleDecoder, register_attention
from forge.models.hf.loading.checkpoint import open_checkpoint
from forge.models.hf.loading.decoder_loader import load_decoder
from forge.models.hf.loading.model_loader import create_model
from forge.models.hf.loading.model_spec import ModelSpec, resolve_model_spec
from forge.request import Request, SamplingParams
from forge.start_log import StartLog
from tests.hf.tiny_configs import (
    ORIGINAL_POSITIONS,
    POSITIONS,
    draw_weights,
    tiny_config,
    weight_deviation,
)

CLASSES: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
"""The causal class of each model type."""

DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")
TOKENIZER = Path(__file__).resolve().parents[2] / "forge" / "models" / "tiny"

LENGTHS = (0.012, 0.2, 0.6)
"""Lengths of the prompts, as shares of the longest sequence."""
NEW = 24
"""Tokens that each request adds."""
TOP = 20
"""Most likely tokens compared at each position."""
GEOMETRY = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_blocks": 64}

TOLERANCE = 1e-3
MEDIAN_FACTOR, TAIL_FACTOR, MAX_FACTOR = 1.5, 2.0, 3.0
EXPERTS_FACTOR = 3.0
MIN_ORDER_EFFECT = 20.0
"""The order of a text must change its logits by so many times what counts as equal."""

MAX_PARAMETERS = 30_000_000
"""Parameters of a model that is tiny."""

FAILURES = ("WRONG", "CRASH")


class ErrorQuantiles(NamedTuple):
    """Quantiles of the errors of some positions, in the spread of their logits."""

    median: float
    tail: float
    most: float


LIMITS = ErrorQuantiles(MEDIAN_FACTOR, TAIL_FACTOR, MAX_FACTOR)


class Comparison(NamedTuple):
    """How far forge, and transformers in the same dtype, are from the true values.

    forge_errors, transformers_errors   before position ORIGINAL, then from it on where a text is
                                        that long
    loss                                how far the worst emitted token is from the most likely one
    experts                             the model is a mixture of experts
    """

    forge_errors: list[ErrorQuantiles]
    transformers_errors: list[ErrorQuantiles]
    loss: float
    experts: bool


class ClassOutcome(NamedTuple):
    """Result of one class.

    seed         of the optional fields; None: the class's defaults
    outcome      fused, modules, refused, not constructible, WRONG or CRASH
    detail       the reason, in one line
    comparison   measured errors, where a model was served
    """

    kind: str
    dtype: str
    seed: int | None
    outcome: str
    detail: str = ""
    comparison: Comparison | None = None


class NotConstructible(Exception):
    """Raised where transformers cannot build or run the model itself."""


class ServedTexts(NamedTuple):
    """What an engine returned for some prompts.

    decoder         class of the decoder that served
    max_model_len   longest sequence that was accepted
    texts           prompts with their outputs
    prompt_lens     length of each prompt
    scores          for each position after the first of each text its most likely tokens
    error           of the first request that failed, or nothing
    """

    decoder: type
    max_model_len: int
    texts: list[list[int]]
    prompt_lens: list[int]
    scores: list[list[Any]]
    error: str


def examine(kind: str, dtype: str, seed: int | None = None) -> ClassOutcome:
    """Return what forge does with a tiny model of the kind."""
    with tempfile.TemporaryDirectory(prefix="forge-class-") as folder:
        try:
            return _examine(kind, dtype, seed, Path(folder))
        except InvalidConfig as refusal:
            return ClassOutcome(
                kind, dtype, seed, "refused", refusal_reason(refusal, CLASSES[kind])
            )
        except NotConstructible as error:
            return ClassOutcome(kind, dtype, seed, "not constructible", str(error))
        except Exception as error:
            return ClassOutcome(kind, dtype, seed, "CRASH", describe(error))


def _examine(kind: str, dtype: str, seed: int | None, folder: Path) -> ClassOutcome:
    """Return the outcome of a model that is served. Raises InvalidConfig or Unbuilt."""
    register_attention()
    try:
        config = tiny_config(kind, seed)
        config.architectures = [CLASSES[kind]]
        config.save_pretrained(folder)
    except Exception as error:
        raise NotConstructible(describe(error)) from error
    open_checkpoint(str(folder), CPU, dtype=dtype, load_format="dummy")
    try:
        true, own = build(config, CLASSES[kind], folder, dtype, weight_deviation(dtype, seed))
        effect = order_effect(true)
    except Exception as error:
        raise NotConstructible(describe(error)) from error
    run = serve(folder, dtype)
    if run.error:
        return ClassOutcome(kind, dtype, seed, "CRASH", f"a request failed: {run.error}")
    assert effect >= MIN_ORDER_EFFECT * TOLERANCE, (
        f"the order of a text changes its logits by {effect:.2g}"
    )
    comparison = compare(run, true, own)
    how = {FusedDecoder: "fused", ModuleDecoder: "modules"}[run.decoder]
    if wrong := find_faults(comparison, dtype):
        return ClassOutcome(kind, dtype, seed, "WRONG", f"{how}: {wrong}", comparison)
    detail = "" if run.max_model_len == POSITIONS else f"up to {run.max_model_len} positions"
    return ClassOutcome(kind, dtype, seed, how, detail, comparison)


def build(config: Any, name: str, folder: Path, dtype: str, deviation: float) -> tuple[Any, Any]:
    """Return transformers' models of the true values and of its own, saved before in `folder`.

    The true ones are computed in float32 from the weights of the dtype.

    deviation   of the random weights
    """
    cls = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(each.numel() for each in cls._from_config(config).parameters())
    assert size <= MAX_PARAMETERS, f"{size} parameters are not tiny"
    wide, saved = torch.float32, getattr(torch, dtype)
    module = cls._from_config(config, dtype=wide, attn_implementation="eager")
    draw_weights(module, deviation)
    module.to(saved).save_pretrained(folder)
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    true = _load(cls, folder, wide)
    return true, true if saved == wide else _load(cls, folder, saved)


def _load(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
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
    text = _draw_ids(int(0.8 * ORIGINAL_POSITIONS), seed=2)
    one, other = (logprobs(module, each)[-1] for each in (text, text[-2::-1] + text[-1:]))
    return float((one - other).square().mean().sqrt() / one.std())


def _draw_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (count,), generator=generator).tolist()


def serve(folder: Path, dtype: str) -> ServedTexts:
    """Return the engine's output for three greedy requests in one batch."""
    known, limit = _outline(folder, dtype)
    weights = load_decoder(known.checkpoint, known.config_fields, _options(dtype), CPU, StartLog())
    config = EngineConfig(**known.config_fields)
    engine = Engine(create_model(weights, config, known.eos_token, CPU), config)
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
    return ServedTexts(type(weights.decoder), limit, texts, starts, scores, error)


def _options(dtype: str) -> DeviceOptions:
    return DeviceOptions(device="cpu", dtype=dtype)


def _outline(folder: Path, dtype: str) -> tuple[ModelSpec, int]:
    """Return the checkpoint's outline, and POSITIONS or the most that a refusal names."""

    def outlined(limit: int) -> tuple[ModelSpec, int]:
        geometry = {**GEOMETRY, "max_model_len": limit}
        return resolve_model_spec(str(folder), geometry, _options(dtype), CPU), limit

    try:
        return outlined(POSITIONS)
    except InvalidConfig as refusal:
        _, found, limit_text = str(refusal).rpartition("Give at most ")
        if refusal.option != "max_model_len" or not found:
            raise
    return outlined(int(limit_text))


def compare(run: ServedTexts, true: Any, own: Any) -> Comparison:
    """Compare the served texts with the models of true and of own values.

    An error is the root mean square over a position's most likely tokens.
    """
    ours: list[list[float]] = [[], []]
    theirs: list[list[float]] = [[], []]
    loss = 0.0
    for text, start, scores in zip(run.texts, run.prompt_lens, run.scores, strict=True):
        assert len(scores) == len(text) - 1, f"{len(scores)} scores for {len(text)} tokens"
        truth, rounded = logprobs(true, text), logprobs(own, text)
        spread = truth.std(-1).mean()
        for at, score in enumerate(scores):
            ids = [token for token, _ in score.top]
            values = torch.tensor([value for _, value in score.top], dtype=torch.float64)
            for errors, each in ((ours, values), (theirs, rounded[at, ids])):
                error = (each - truth[at, ids]).square().mean().sqrt() / spread
                errors[at >= ORIGINAL_POSITIONS].append(float(error))
            if at >= start - 1:
                lost = truth[at].max() - truth[at, text[at + 1]]
                loss = max(loss, float(lost / spread))
    experts = any("expert" in name for name, _ in true.named_parameters())
    both = ([_errors(part) for part in parts if part] for parts in (ours, theirs))
    return Comparison(*both, loss, experts)


def _errors(values: Sequence[float]) -> ErrorQuantiles:
    quantiles = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
    return ErrorQuantiles(*torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist())


def find_faults(comparison: Comparison, dtype: str) -> str:
    """Return what is wrong, or nothing."""
    found = []
    for part, ours, theirs in zip(
        ("near", "far"), comparison.forge_errors, comparison.transformers_errors, strict=False
    ):
        limits = [factor * error for factor, error in zip(LIMITS, theirs, strict=True)]
        if dtype == "float32":
            limits = [TOLERANCE] * 3
        elif comparison.experts:
            limits = [EXPERTS_FACTOR * theirs.median, inf, inf]
        found += [
            f"{part} {name} error {error:.2g} above {limit:.2g}"
            for name, error, limit in zip(ErrorQuantiles._fields, ours, limits, strict=True)
            if not error <= limit
        ]
    # An emitted token is the most likely one, up to the error of its position.
    limit = max(TOLERANCE, *(4 * each.most for each in comparison.forge_errors))
    if not comparison.loss <= limit:
        found.append(f"a token {comparison.loss:.2g} below the most likely one, above {limit:.2g}")
    return ", ".join(found)


def refusal_reason(refusal: InvalidConfig, name: str) -> str:
    """Return a refusal without the name of the class and the remedy."""
    problem, _, _ = str(refusal).removeprefix(f"{refusal.option}: ").partition(". ")
    return problem.removeprefix(f"{name} ").removesuffix(", which is not supported")


def describe(fault: BaseException) -> str:
    """Return a fault's name, its first line and where it came from."""
    first = next(iter(str(fault).strip().splitlines()), "")
    last = traceback.extract_tb(fault.__traceback__)[-1]
    return f"{type(fault).__name__}: {first[:160]} ({Path(last.filename).name}:{last.lineno})"
