"""Calibration: tables with what they were measured on, as a file, and where they must not be used.

Owns the format and the refusals. Knows no fit and no clock: sim/calibrate.py makes calibrations.

    {"format": 4,
     "identity": {"model", "dtype", "device", "versions", "code", "engine"},
     "digest": "...",                       of the identity: one that was edited is refused
     "tables": {...}, "residuals": {...},   whole numbers; femtoseconds and millionths
     "probes": [...],                       the steps that were timed: others can join them in a fit
     "report": {...}}                       the day, and errors on samples that no fit has seen

A simulation needs no GPU, so what it can be held to is the version and the engine's geometry: it
tells its user the `origin` of its costs. Who predicts a machine asks `refuse_elsewhere` there too.
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
from sim.noise import Residuals
from sim.table import Knots, Table, Tables, Work

FORMAT = 4
AGAIN = "Calibrate: forge sim calibrate MODEL"

EQUAL = ("block_size", "depth")
COVERED = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_speculative_tokens")
"""Numbers of an engine that must be those of the calibration, or at most those."""

Value = TypeVar("Value")


class Identity(NamedTuple):
    """What was measured.

    device     the GPU's name, or the processor's
    versions   of what a step's time can depend on, by package
    code       digest of the sources below the seam
    engine     numbers of EQUAL and COVERED
    """

    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    code: str
    engine: dict[str, int]

    @property
    def digest(self) -> str:
        """Of all of it."""
        text = json.dumps(self._asdict(), sort_keys=True, separators=(",", ":"))
        return sha256(text.encode()).hexdigest()


def engine_numbers(config: EngineConfig) -> dict[str, int]:
    """Numbers of EQUAL and COVERED."""
    drafts = config.speculation.num_tokens if config.speculation is not None else 0
    names = (*EQUAL, *COVERED[:-1])
    return {**{name: getattr(config, name) for name in names}, COVERED[-1]: drafts}


class Probed(NamedTuple):
    """A step that was timed: what the device took, and what errors are a share of."""

    work: Work
    ns: int
    whole_ns: int


@dataclass(frozen=True)
class Calibration:
    """Tables, what they hold for, and the steps that they were fitted to."""

    identity: Identity
    tables: Tables
    residuals: Residuals
    report: dict[str, Any]
    probes: tuple[Probed, ...] = ()

    def table(self) -> Table:
        """The cost model."""
        return Table(self.tables)

    def refuse_engine(self, config: EngineConfig, name: str = "the calibration") -> None:
        """Raises InvalidConfig unless an engine like this, of this version, was measured."""
        differences = [
            *_unequal("version", {"forge": self.identity.versions.get("forge")}, _OWN),
            *_unlike(self.identity.engine, engine_numbers(config)),
        ]
        _refuse(name, differences)

    def refuse_elsewhere(self, here: Identity, name: str = "the calibration") -> None:
        """Raises InvalidConfig unless this is what was measured: model, device, versions, code."""
        own, other = self.identity, here
        plain = ("model", "dtype", "device", "code")
        differences = [
            *_unequal(
                "",
                {each: getattr(own, each) for each in plain},
                {each: getattr(other, each) for each in plain},
            ),
            *_unequal("version", own.versions, other.versions),
            *_unlike(own.engine, other.engine),
        ]
        _refuse(name, differences)

    def origin(self, code: str) -> list[str]:
        """What was measured, where and when, in lines; and that it was other code, where it was.

        code   what `code_digest` says here
        """
        own, day = self.identity, self.report.get("day", "a day that was not written down")
        what = f"{own.model} {own.dtype}, code {own.code[:12]}"
        lines = [f"measured on {own.device}, {day}: {what}"]
        return lines if own.code == code else [*lines, f"of another version: here is {code[:12]}"]

    def write(self, path: str | Path) -> None:
        """The file is there, its folder is made if it is missing."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "format": FORMAT,
            "identity": self.identity._asdict(),
            "digest": self.identity.digest,
            "tables": plain_of(self.tables),
            "residuals": plain_of(self.residuals),
            "report": self.report,
            "probes": plain_of(self.probes),
        }
        target.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def code_digest() -> str:
    """Of the sources below the seam: what decides how long a step takes."""
    root = Path(forge.__file__).parent / "models"
    found = sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return found.hexdigest()


_OWN = {"forge": __version__}


def _unequal(what: str, measured: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    names = sorted(measured.keys() | here.keys())
    return [
        f"{what} {name}".strip() + f" was {_short(measured.get(name))}, is {_short(here.get(name))}"
        for name in names
        if measured.get(name) != here.get(name)
    ]


def _short(value: object) -> str:
    return "absent" if value is None else str(value)[:64]


def _unlike(measured: Mapping[str, int], here: Mapping[str, int]) -> list[str]:
    """Numbers of an engine that the calibration does not hold for."""
    found = [
        f"{name} was {measured.get(name)}, is {here[name]}"
        for name in EQUAL
        if measured.get(name) != here[name]
    ]
    return found + [
        f"{name} was at most {measured.get(name, 0)}, is {here[name]}"
        for name in COVERED
        if measured.get(name, 0) < here[name]
    ]


def _refuse(name: str, differences: list[str]) -> None:
    if differences:
        what = f"{name} was measured elsewhere: {'; '.join(differences)}"
        raise InvalidConfig(
            "cost", what, "Run it as it was measured, or calibrate there: forge sim calibrate MODEL"
        )


# Files.


def read(path: str | Path) -> Calibration:
    """The calibration in this file. Raises InvalidConfig."""
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as fault:
        what = getattr(fault, "strerror", None) or "it is not JSON"
        raise InvalidConfig("cost", f"{str(path)!r} cannot be read: {what}", AGAIN) from None
    form = whole.get("format") if isinstance(whole, dict) else None
    if form != FORMAT:
        what = f"{str(path)!r} is no calibration of this format: {form} is not {FORMAT}"
        raise InvalidConfig("cost", what, AGAIN)
    try:
        identity = value_of(Identity, whole["identity"])
        calibration = Calibration(
            identity,
            value_of(Tables, whole["tables"]),
            value_of(Residuals, whole["residuals"]),
            dict(whole["report"]),
            value_of(tuple[Probed, ...], whole["probes"], "probes"),
        )
        if identity.digest != whole["digest"]:
            raise ValueError("what was measured was changed afterwards")
    except (KeyError, TypeError, ValueError) as fault:
        raise InvalidConfig("cost", f"{str(path)!r} is damaged: {fault}", AGAIN) from None
    return calibration


def plain_of(value: Any) -> Any:
    """Named tuples as mappings, other tuples as lists."""
    if hasattr(value, "_asdict"):
        return {name: plain_of(each) for name, each in value._asdict().items()}
    return [plain_of(each) for each in value] if isinstance(value, tuple) else value


def value_of(kind: Any, plain: Any, name: str = "it") -> Any:
    """What `plain_of` was given, being of this kind. Raises ValueError."""
    options = [each for each in get_args(kind) if each is not NoneType]
    if NoneType in get_args(kind):
        return None if plain is None else value_of(options[0], plain, name)
    if get_origin(kind) is tuple:
        if not isinstance(plain, list):
            raise ValueError(f"{name} is no list")
        return tuple(value_of(options[0], each, name) for each in plain)
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        if not isinstance(plain, dict) or plain.keys() != hints.keys():
            raise ValueError(f"{name} has other keys than {', '.join(hints)}")
        value = kind(**{key: value_of(hint, plain[key], key) for key, hint in hints.items()})
        if isinstance(value, Knots) and not value.sound:
            raise ValueError(f"{name} has other knots than values, or not in order")
        return value
    if get_origin(kind) is dict:
        if not isinstance(plain, dict):
            raise ValueError(f"{name} is no mapping")
        return {str(key): value_of(options[-1], each, name) for key, each in plain.items()}
    if type(plain) is not kind or (kind is int and plain < 0):
        raise ValueError(f"{name} is no {'whole number above 0' if kind is int else 'text'}")
    return plain
