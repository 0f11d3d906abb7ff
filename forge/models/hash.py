"""HashModel: the deterministic model. Its logits are a pure function of the whole context.

Owns the function from context to logits. Paging, slots and sampling are LogitsModel's.

    context ── SHA-256 ──► 64 bits ──┬─► shape   one of 32 fixed logit vectors
                                     └─► peak    the most likely token, from `likely_tokens`

A draft is a HashModel with `agreement` below 1: on that share of contexts its most likely token is
the target's, on the others it is a different one.
Always true: equal contexts have equal logits, in any process, on any machine. Changing any earlier
token changes them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from forge.errors import InvalidWeights, one_line
from forge.models.file_moves import FileMoves
from forge.models.host_blocks import HostBlocks
from forge.models.logits import LogitsModel
from forge.models.paged import NO_FAULTS, FaultHooks
from forge.sampling import mix, uniform
from forge.weights import (
    NamedWeights,
    PartTimes,
    SharedWeights,
    WeightFiles,
    WeightSource,
    refuse_unreadable,
)

SEED_NAME = "seed"
"""Name of the model's only weight."""

_NUM_BASE_LOGITS = 32
_PEAK_LOGIT = 5.0


class HashModel(LogitsModel):
    """Language model made of a hash.

    seed            different seeds are different models
    likely_tokens   token ids that can be most likely; all by default
    agreement       share of contexts on which the most likely token is that of agreement = 1
    forced_tokens   context -> the token that is certain after it
    min_eos_len     shorter contexts never make eos likely
    step_s          seconds of a step, from the end of the step before
    draft           draft model with the same vocabulary, or None
    files           files of host blocks, or None
    host_blocks     contents of the host pool; None: a plain HostBlocks
    """

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        eos_token: int = 0,
        num_blocks: int = 1024,
        block_size: int = 16,
        num_layers: int = 1,
        seed: int = 0,
        likely_tokens: Sequence[int] | None = None,
        agreement: float = 1.0,
        forced_tokens: Mapping[tuple[int, ...], int] | None = None,
        min_eos_len: int = 4,
        step_s: float = 0.0,
        faults: FaultHooks = NO_FAULTS,
        draft: LogitsModel | None = None,
        files: FileMoves | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        super().__init__(
            self.context_logits,
            vocab_size=vocab_size,
            eos_token=eos_token,
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=num_layers,
            faults=faults,
            step_s=step_s,
            draft=draft,
            files=files,
            host_blocks=host_blocks,
        )
        self._likely_tokens = (
            tuple(range(vocab_size)) if likely_tokens is None else tuple(likely_tokens)
        )
        self._likely_before_eos = (
            tuple(t for t in self._likely_tokens if t != eos_token) or self._likely_tokens
        )
        self._agreement = agreement
        self._forced_tokens = dict(forced_tokens or {})
        self._min_eos_len = min_eos_len
        self._set_seed(seed)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed
        self._seed_bytes = seed.to_bytes(8, "little", signed=True)
        self._base_logits_by_index: dict[int, list[float]] = {}

    def update_weights(self, source: WeightSource) -> None:
        """Replace the seed, the only weight: an integer named `seed`. Raises InvalidWeights."""
        with refuse_unreadable(source):
            seed = _read_seed(source)
        self._set_seed(seed)
        self.mark_content_stale()

    def sleep(self, level: int) -> PartTimes:
        """Drop the content of all blocks, and with level 2 the seed."""
        if level == 2:
            self._set_seed(0)
        return super().sleep(level)

    def context_logits(self, context: Sequence[int]) -> list[float]:
        """Return one float per token. O(len(context) + vocab_size)."""
        forced_token = self._forced_tokens.get(tuple(context)) if self._forced_tokens else None
        digest = sha256(self._seed_bytes + array("i", context).tobytes()).digest()
        key = int.from_bytes(digest[:8], "little")
        logits = self._base_logits(key % _NUM_BASE_LOGITS).copy()
        if forced_token is not None:
            logits[forced_token] = 100.0
            return logits
        if len(context) < self._min_eos_len:
            logits[self._eos_token] = -100.0
        logits[self._peak_token(key, len(context))] = _PEAK_LOGIT
        return logits

    def _peak_token(self, key: int, length: int) -> int:
        likely = self._likely_tokens if length >= self._min_eos_len else self._likely_before_eos
        index = (key >> 8) % len(likely)
        if self._agreement < 1.0 and uniform(mix(key), 0) >= self._agreement:
            index = (index + 1) % len(likely)
        return likely[index]

    def _base_logits(self, index: int) -> list[float]:
        """Return the logits below the peak: -1 to 2 for likely tokens, far less for the others.

        Computed at the first use: all of them together take as long as a few hundred steps.
        """
        logits = self._base_logits_by_index.get(index)
        if logits is None:
            key = mix(mix(self._seed) + index)
            noise = [uniform(key, token) for token in range(self.vocab_size())]
            logits = [each - 6.0 for each in noise]
            for token in self._likely_tokens:
                logits[token] = 3.0 * noise[token] - 1.0
            self._base_logits_by_index[index] = logits  # Complete: other threads may read it.
        return logits


def _read_seed(source: WeightSource) -> int:
    """Return the seed that the source has, and nothing else. Raises InvalidWeights."""
    if isinstance(source, SharedWeights):
        raise InvalidWeights("weights", "the model hash has no tensors", "Give files")
    weights = source.tensors if isinstance(source, NamedWeights) else _read_integers(source)
    if weights.keys() != {SEED_NAME}:
        raise InvalidWeights(
            next(iter(weights.keys() - {SEED_NAME}), SEED_NAME),
            "the model hash has one weight, the integer seed",
            "Give that one",
        )
    seed = weights[SEED_NAME]
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise InvalidWeights(
            SEED_NAME, f"{str(seed)[:64]} is not a 64-bit integer", "Give an integer"
        )
    return seed


def _read_integers(source: WeightFiles) -> dict[str, object]:
    """Return the integers of safetensors files, by their names. Raises InvalidWeights.

    The format: the header's length in 8 bytes, the header in JSON, the content of the tensors.
    """
    weights: dict[str, object] = {}
    for path in source.paths:
        try:
            data = Path(path).read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            for name in header.keys() - {"__metadata__"}:
                first, end = header[name]["data_offsets"]
                if header[name]["dtype"] != "I64" or end - first != 8:
                    raise InvalidWeights(
                        name, "it is not one 64-bit integer", "Write an I64 tensor"
                    )
                content = data[start + first : start + end]
                if len(content) != 8:
                    raise InvalidWeights(name, "the file ends before it", "Write it again")
                weights[name] = int.from_bytes(content, "little", signed=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InvalidWeights):
                raise
            raise InvalidWeights(
                path, f"it cannot be read: {one_line(error)}", "Write it again"
            ) from None
    return weights
