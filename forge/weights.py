"""Weights that replace those of a model between two steps: sources, versions, protocols.

Owns the values that an update consists of. Knows no tensor library and no file format: a model
reads the source.

    WeightFiles("step-40/model.safetensors") ─┬─► Engine.update_weights ─► UpdatesWeights
    NamedWeights({"model.norm.weight": ...}) ─┘      between two steps       in place

Always true: a source that does not match the model changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from forge.errors import InvalidConfig
from forge.request import INITIAL_WEIGHTS, Delta, OutputWeights
from forge.sequence import Sequence

MAX_VERSION_CHARS = 128


class WeightFiles(NamedTuple):
    """Safetensors files that this machine can read. No name is in two of them."""

    paths: tuple[str, ...]


class NamedWeights(NamedTuple):
    """Tensors of this process by their names in the checkpoint, on any device."""

    tensors: Mapping[str, Any]


WeightSource: TypeAlias = WeightFiles | NamedWeights

PartTimes: TypeAlias = tuple[tuple[str, float], ...]
"""Parts of a slow command, each with its seconds."""


@runtime_checkable
class UpdatesWeights(Protocol):
    """Optional method of a Model whose weights can be replaced in place."""

    def update_weights(self, source: WeightSource) -> None:
        """Replace the weights that the source has. No step is in flight, and none begins.

        Raises InvalidWeights, and changes nothing then. Any other error leaves a mixture, with
        which nothing may be computed.
        """
        ...


@runtime_checkable
class Sleeps(Protocol):
    """Optional methods of a Model that can release its device's memory between two steps."""

    def sleep(self, level: int) -> PartTimes:
        """Release the memory of the KV cache and of the weights. No step is in flight.

        level   1 keeps a copy of the weights in host memory, 2 keeps none
        """
        ...

    def wake(self) -> PartTimes:
        """Allocate everything again. After level 2 all weights must be updated before a step."""
        ...


class WeightVersions:
    """Version of the weights now, and of the tokens of open choices.

    current       version of the weights: the trainer's, or the number of updates
    num_updates   updates so far
    """

    def __init__(self) -> None:
        self.current = INITIAL_WEIGHTS.version
        self.num_updates = 0
        self._num_stale_tokens: dict[tuple[int, int], int] = {}

    def next_version(self, version: str | None) -> str:
        """Return the version of the next update. Raises InvalidConfig for one that is no name."""
        if version is None:
            return str(self.num_updates + 1)
        if (
            not isinstance(version, str)
            or not 0 < len(version) <= MAX_VERSION_CHARS
            or not version.isascii()
            or not version.isprintable()
        ):
            raise InvalidConfig(
                "weight_version",
                f"{str(version)[:64]!r} is not 1 to {MAX_VERSION_CHARS} printable ASCII characters",
                "Give the step of the training, say",
            )
        return version

    def advance(self, version: str, sequences: Iterable[Sequence]) -> None:
        """Begin the version. The tokens that open choices have so far are stale."""
        self.num_updates += 1
        self.current = version
        for sequence in sequences:
            if sequence.num_output:
                key = sequence.request.id, sequence.choice
                self._num_stale_tokens[key] = sequence.num_output

    def label(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas, the last one of each choice with the weights of its tokens."""
        if not self.num_updates:
            return deltas
        return [each if each.finish is None else self._label_last(each) for each in deltas]

    def _label_last(self, delta: Delta) -> Delta:
        num_stale = self._num_stale_tokens.pop((delta.request_id, delta.choice), 0)
        return delta._replace(weights=OutputWeights(self.current, num_stale))
