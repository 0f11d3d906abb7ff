"""Values of options: from a flag, else the environment, else the file of --config, else a default.

Owns parsing and checking of values, and the spelling of each option, which errors repeat.

    --max-num-seqs 8      ┐
    FORGE_MAX_NUM_SEQS=8  │  the first that is given
    max_num_seqs: 8       │ ─────────────────────────► Settings ──► serve, generate, info
    the default           ┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from forge.async_llm import AsyncLLM
from forge.cli.options import (
    ADDRESS_VARIABLE,
    ENGINE_OPTIONS,
    LIMIT_OPTIONS,
    SAMPLING_FLAGS,
    SERVE_OPTIONS,
    TYPE_NAMES,
    Option,
    OptionValue,
    closest_matches,
)
from forge.cli.vllm_options import vllm_remedy
from forge.engine_options import Options
from forge.errors import InvalidConfig
from forge.limits import Limits
from forge.llm import LLM
from forge.trainer_access import TrainerAccess

LLMType = TypeVar("LLMType", LLM, AsyncLLM)

BOOLEAN_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""Text of a boolean in the environment -> its value."""


class Settings(NamedTuple):
    """Resolved options of a command, by their names in Python.

    values      every option's value, or its default
    spellings   how the user spelled each option: a flag, a variable, a key of a file
    explicit    the options that were given
    """

    values: dict[str, Any]
    spellings: dict[str, str]
    explicit: frozenset[str]

    @property
    def engine_options(self) -> Options:
        """The engine's options that were given."""
        names = [each.name for each in ENGINE_OPTIONS if each.name in self.explicit]
        return cast(Options, {name: self.values[name] for name in names})

    @property
    def limits(self) -> Limits:
        """The server's limits. Raises InvalidConfig."""
        return Limits(**{each.name: self.values[each.name] for each in LIMIT_OPTIONS})

    @property
    def trainer_access(self) -> TrainerAccess | None:
        """The access of trainers, or None. Raises InvalidConfig."""
        return TrainerAccess.from_options(
            admin_key=self.values["admin_key"],
            weights_folder=self.values["weights_folder"],
            api_keys=self.values["api_key"] or (),
        )

    def open_llm(self, llm_type: Callable[..., LLMType]) -> LLMType:
        """Create an LLM or AsyncLLM with these settings. Raises InvalidConfig."""
        return llm_type(self.values["model"], policy=self.values["policy"], **self.engine_options)


def resolve_settings(
    options: Sequence[Option], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """Resolve each option: its flag, else the environment, else the file of --config, else default.

    Raises InvalidConfig with the option as it was spelled.
    """
    path = flags.get("config")
    file_values = {} if path is None else read_config_file(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    explicit: set[str] = set()
    for option in options:
        origin = option.metavar if option.name == flags.get("positional") else option.flag
        if flags.get(option.name) is not None:
            value: OptionValue | None = parse_value(option, flags[option.name], origin)
        elif environ.get(option.env_var):
            origin = option.env_var
            value = parse_value(option, _address_part(option, environ[origin]), origin)
        elif option.file_key in file_values:
            origin = f"{option.file_key} in {path}"
            value = file_values[option.file_key]
        else:
            values[option.name], origins[option.name] = option.default, origin
            continue
        values[option.name], origins[option.name] = value, origin
        explicit.add(option.name)
    return Settings(values, origins, frozenset(explicit))


def parse_value(option: Option, text: str | list[str], origin: str) -> OptionValue:
    """Parse the text of a flag or variable. Raises InvalidConfig with `origin`, its spelling.

    text   a list for a flag that is repeated; a variable has commas between several texts
    """
    if isinstance(text, list):
        return check_value(option, text, origin)
    if option.value_type is tuple:
        return check_value(option, [part.strip() for part in text.split(",")], origin)
    value: object = text
    with suppress(KeyError, ValueError):
        value = (
            BOOLEAN_WORDS[text.lower()] if option.value_type is bool else option.value_type(text)
        )
    return check_value(option, value, origin)


def check_value(option: Option, value: object, origin: str) -> OptionValue:
    """Return the value, checked to have the option's type. Raises InvalidConfig with `origin`."""
    if option.value_type is tuple:
        return _check_texts(option, value if isinstance(value, list) and value else [value], origin)
    if option.value_type is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if type(value) is not option.value_type:
        name, remedy = TYPE_NAMES[option.value_type]
        raise InvalidConfig(origin, f"{str(value)[:64]!r} is not {name}", remedy)
    if value == "":
        raise InvalidConfig(origin, "it is empty", "Give text, or leave it out")
    return cast(OptionValue, value)


def _check_texts(option: Option, values: list[object], origin: str) -> tuple[str, ...]:
    """Return the values, checked to be texts that a variable can have with commas between."""
    texts = [str(check_value(option._replace(value_type=str), each, origin)) for each in values]
    if any("," in text for text in texts):
        raise InvalidConfig(origin, "it has a comma", "Give each text separately, without commas")
    return tuple(texts)


def _address_part(option: Option, text: str) -> str:
    """Return the part of a variable's text that sets this option: FORGE_ADDR sets host and port."""
    if option.env_var != ADDRESS_VARIABLE:
        return text
    host, _, port = text.rpartition(":")
    if not host or not port:
        raise InvalidConfig(
            ADDRESS_VARIABLE, f"{text[:64]!r} is not HOST:PORT", "Give 127.0.0.1:8080, say"
        )
    return port if option.name == "port" else host.removeprefix("[").removesuffix("]")


def read_config_file(path: str) -> dict[str, OptionValue]:
    """Read the options in a YAML file, by their keys.

    Raises InvalidConfig for an unknown key, a repeated key or a value of the wrong type.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise InvalidConfig(
            "--config", f"{path!r} cannot be read: {error.strerror}", "Name a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        location = "" if mark is None else f" line {mark.line + 1}"
        raise InvalidConfig("--config", f"{path!r}{location} is not YAML", "Fix it") from None
    if values is None or document is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidConfig(
            "--config", f"{path!r} holds no options", "Write lines such as max_num_seqs: 8"
        )
    _check_unique_keys([(key.value, key.start_mark.line + 1) for key, _ in document.value], path)
    by_key = {each.file_key: each for each in SERVE_OPTIONS}
    for key, value in values.items():
        if key not in by_key:
            name, origin = str(key).replace("-", "_"), f"{str(key)[:64]} in {path}"
            if name in SAMPLING_FLAGS and name not in by_key:
                raise InvalidConfig(
                    origin,
                    "sampling is set by flags of forge generate only",
                    f"Give {SAMPLING_FLAGS[name]} there",
                )
            suggestions = closest_matches(name, list(by_key)) or by_key
            remedy = vllm_remedy(name) or f"Use {', '.join(suggestions)}"
            raise InvalidConfig(origin, "there is no such option", remedy)
        values[key] = check_value(by_key[key], value, f"{key} in {path}")
    return values


def _check_unique_keys(keys: list[tuple[str, int]], path: str) -> None:
    """Raise InvalidConfig if a key of the file is on two lines: YAML would take the last."""
    first_lines: dict[str, int] = {}
    for key, line in keys:
        if key in first_lines:
            raise InvalidConfig(
                f"{key[:64]} in {path}",
                f"it is on line {first_lines[key]} and on line {line}",
                "Keep one of them",
            )
        first_lines[key] = line
