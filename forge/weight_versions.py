"""WeightVersions: which weights the tokens of an output were sampled with.

Owns the version of the weights now, and what open choices had at the last update. Knows no model.

    update "step 40" ─► open choices: their tokens so far are stale
    last Delta of a choice ─► OutputWeights("step 40", num_stale_tokens=7)
"""

from __future__ import annotations

from collections.abc import Iterable

from forge.errors import InvalidConfig
from forge.request import INITIAL_WEIGHTS, Delta, OutputWeights
from forge.sequence import Sequence

MAX_VERSION_CHARS = 128


def check_version(version: object) -> None:
    """Raise InvalidConfig for what is no version of an update."""
    if version == INITIAL_WEIGHTS.version:
        raise InvalidConfig(
            "weight_version",
            f"{version} is the version of the weights at the start",
            "Give another one",
        )
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


class WeightVersions:
    """Version of the weights now, and of the tokens of open choices.

    current       version of the weights: the trainer's, or a number that no version had
    num_updates   updates so far
    """

    def __init__(self) -> None:
        self.current = INITIAL_WEIGHTS.version
        self.num_updates = 0
        self._max_number = 0
        self._num_stale_tokens: dict[tuple[int, int], int] = {}

    def next_version(self, version: str | None) -> str:
        """Return the version of the next update.

        Raises InvalidConfig for one that is no name, and for that of the weights at the start.
        """
        if version is None:
            return str(max(self.num_updates, self._max_number) + 1)
        check_version(version)
        return version

    def advance(self, version: str, sequences: Iterable[Sequence]) -> None:
        """Begin the version. The tokens that open choices have so far are stale."""
        self.num_updates += 1
        if version.isdecimal():
            self._max_number = max(self._max_number, int(version))
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
