"""Calibration files: cost tables, what they were measured on, and checks against misuse.

Owns the format and the refusals. Knows no fit and no clock: sim/calibration/calibrate.py makes
calibrations.

    {"format": 4,
     "identity": {"model", "dtype", "device", "versions", "code", "engine"},
     "digest": "...",                       of the identity: an edited one is refused
     "tables": {...}, "residuals": {...},   integers; femtoseconds and millionths
     "probes": [...],                       the timed steps: others can join them in a fit
     "report": {...}}                       the day, and errors on held-out samples

A simulation needs no GPU: it checks the version and the geometry of the engine only, and prints the
origin of its costs. A program that predicts one machine calls `check_machine` too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import forge
from forge import __version__
from forge.config import EngineConfig
from forge.errors import InvalidConfig
from forge.sim.cost.noise import Residuals
from forge.sim.cost.table import CostTables, PiecewiseLinear, StepFeatures, TableCost

FORMAT_VERSION = 4
REMEDY = "Calibrate: forge sim calibrate MODEL"

EXACT_FIELDS = ("block_size", "depth")
BOUNDED_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_speculative_tokens",
)
"""Fields of an engine config: equal to those of the calibration, or at most those."""

Value = TypeVar("Value")


class Identity(NamedTuple):
    """The model, machine and code that a calibration was measured on.

    device     name of the GPU, or of the processor
    versions   of each package that step times can depend on
    code       digest of the sources below the seam
    engine     values of EXACT_FIELDS and BOUNDED_FIELDS
    """

    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    code: str
    engine: dict[str, int]

    @property
    def digest(self) -> str:
        """SHA-256 of all fields."""
        text = json.dumps(self._asdict(), sort_keys=True, separators=(",", ":"))
        return sha256(text.encode()).hexdigest()


def select_engine_settings(config: EngineConfig) -> dict[str, int]:
    """Return the values of EXACT_FIELDS and BOUNDED_FIELDS."""
    drafts = config.speculation.num_tokens if config.speculation is not None else 0
    names = (*EXACT_FIELDS, *BOUNDED_FIELDS[:-1])
    return {**{name: getattr(config, name) for name in names}, BOUNDED_FIELDS[-1]: drafts}


class ProbeTime(NamedTuple):
    """A timed step.

    work       its features
    ns         time of the device
    whole_ns   the time that errors are relative to
    """

    work: StepFeatures
    ns: int
    whole_ns: int


@dataclass(frozen=True)
class Calibration:
    """Tables, what they were measured on, and the steps that they were fitted to."""

    identity: Identity
    tables: CostTables
    residuals: Residuals
    report: dict[str, Any]
    probes: tuple[ProbeTime, ...] = ()

    def create_cost(self) -> TableCost:
        """Return the cost model of the tables."""
        return TableCost(self.tables)

    def check_engine(self, config: EngineConfig, name: str = "the calibration") -> None:
        """Raise InvalidConfig unless the version matches and the calibration covers this engine."""
        differences = [
            *_describe_differences(
                "version", {"forge": self.identity.versions.get("forge")}, _CURRENT_VERSION
            ),
            *_describe_uncovered(self.identity.engine, select_engine_settings(config)),
        ]
        _raise_if_any(name, differences)

    def check_machine(self, current: Identity, name: str = "the calibration") -> None:
        """Raise InvalidConfig unless model, device, versions, code and engine match."""
        measured, other = self.identity, current
        plain = ("model", "dtype", "device", "code")
        differences = [
            *_describe_differences(
                "",
                {each: getattr(measured, each) for each in plain},
                {each: getattr(other, each) for each in plain},
            ),
            *_describe_differences("version", measured.versions, other.versions),
            *_describe_uncovered(measured.engine, other.engine),
        ]
        _raise_if_any(name, differences)

    def describe_origin(self, code: str) -> list[str]:
        """Return lines on what was measured, where and when, and whether the code has changed.

        code   the `model_code_digest` of this checkout
        """
        identity, day = self.identity, self.report.get("day", "an unknown day")
        model = f"{identity.model} {identity.dtype}, code {identity.code[:12]}"
        lines = [f"measured on {identity.device}, {day}: {model}"]
        return (
            lines if identity.code == code else [*lines, f"of another version: here is {code[:12]}"]
        )

    def write(self, path: str | Path) -> None:
        """Write the file. A missing folder is created."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT_VERSION,
            "identity": self.identity._asdict(),
            "digest": self.identity.digest,
            "tables": to_json(self.tables),
            "residuals": to_json(self.residuals),
            "report": self.report,
            "probes": to_json(self.probes),
        }
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def model_code_digest() -> str:
    """Return the digest of the sources below the seam, which decide how long a step takes."""
    root = Path(forge.__file__).parent / "models"
    found = sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return found.hexdigest()


_CURRENT_VERSION = {"forge": __version__}


def _describe_differences(
    what: str, measured: Mapping[str, Any], current: Mapping[str, Any]
) -> list[str]:
    names = sorted(measured.keys() | current.keys())
    return [
        f"{what} {name}".strip()
        + f" was {_shorten(measured.get(name))}, is {_shorten(current.get(name))}"
        for name in names
        if measured.get(name) != current.get(name)
    ]


def _shorten(value: object) -> str:
    return "absent" if value is None else str(value)[:64]


def _describe_uncovered(measured: Mapping[str, int], current: Mapping[str, int]) -> list[str]:
    """Return the settings of an engine that the calibration does not cover, one text each."""
    found = [
        f"{name} was {measured.get(name)}, is {current[name]}"
        for name in EXACT_FIELDS
        if measured.get(name) != current[name]
    ]
    return found + [
        f"{name} was at most {measured.get(name, 0)}, is {current[name]}"
        for name in BOUNDED_FIELDS
        if measured.get(name, 0) < current[name]
    ]


def _raise_if_any(name: str, differences: list[str]) -> None:
    if differences:
        message = f"{name} was measured elsewhere: {'; '.join(differences)}"
        raise InvalidConfig(
            "cost",
            message,
            "Run it as it was measured, or calibrate there: forge sim calibrate MODEL",
        )


# Files.


def read_calibration(path: str | Path) -> Calibration:
    """Read the calibration in this file. Raises InvalidConfig."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        message = getattr(error, "strerror", None) or "it is not JSON"
        raise InvalidConfig("cost", f"{str(path)!r} cannot be read: {message}", REMEDY) from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        message = (
            f"{str(path)!r} is no calibration of this format: {version} is not {FORMAT_VERSION}"
        )
        raise InvalidConfig("cost", message, REMEDY)
    try:
        identity = from_json(Identity, content["identity"])
        calibration = Calibration(
            identity,
            from_json(CostTables, content["tables"]),
            from_json(Residuals, content["residuals"]),
            dict(content["report"]),
            from_json(tuple[ProbeTime, ...], content["probes"], "probes"),
        )
        if identity.digest != content["digest"]:
            raise ValueError("what was measured was changed afterwards")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidConfig("cost", f"{str(path)!r} is damaged: {error}", REMEDY) from None
    return calibration


def to_json(value: Any) -> Any:
    """Return named tuples as mappings and other tuples as lists."""
    if hasattr(value, "_asdict"):
        return {name: to_json(each) for name, each in value._asdict().items()}
    return [to_json(each) for each in value] if isinstance(value, tuple) else value


def from_json(type_hint: Any, content: Any, name: str = "it") -> Any:
    """Return the value of this type that `to_json` turned into `content`. Raises ValueError."""
    options = [each for each in get_args(type_hint) if each is not NoneType]
    if NoneType in get_args(type_hint):
        return None if content is None else from_json(options[0], content, name)
    if get_origin(type_hint) is tuple:
        if not isinstance(content, list):
            raise ValueError(f"{name} is no list")
        return tuple(from_json(options[0], each, name) for each in content)
    if hasattr(type_hint, "_fields"):
        hints = get_type_hints(type_hint)
        if not isinstance(content, dict) or content.keys() != hints.keys():
            raise ValueError(f"{name} has other keys than {', '.join(hints)}")
        value = type_hint(
            **{key: from_json(hint, content[key], key) for key, hint in hints.items()}
        )
        if isinstance(value, PiecewiseLinear) and not value.is_valid:
            raise ValueError(f"{name} has other knots than values, or not in order")
        return value
    if get_origin(type_hint) is dict:
        if not isinstance(content, dict):
            raise ValueError(f"{name} is no mapping")
        return {str(key): from_json(options[-1], each, name) for key, each in content.items()}
    if type(content) is not type_hint or (type_hint is int and content < 0):
        raise ValueError(f"{name} is no {'whole number above 0' if type_hint is int else 'text'}")
    return content
