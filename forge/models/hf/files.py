"""The files of a checkpoint: where they are, those that must be there, and that they are whole.

Owns the names of files, the local cache of HuggingFace ids and how a refusal about a checkpoint is
worded. Knows no config and no tensor.

    config.json                    generation_config.json      tokenizer.json, ...
    model.safetensors          or  model.safetensors.index.json ─► model-00001-of-00003.safetensors
    pytorch_model.bin, *.pt, ...   refused: a pickle runs code when it is read
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as hf_logging

from forge.errors import InvalidConfig

DESCRIPTIONS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Files of a checkpoint that are fetched by its id: no pickle is."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def refuse(problem: str, remedy: str) -> NoReturn:
    """Raises InvalidConfig about the model."""
    raise InvalidConfig("model", problem, remedy) from None


def folder_of(name: str, patterns: Sequence[str]) -> Path:
    """The folder with these files: the one named, or the cache's of an id, fetched if need be."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        refuse(f"{name} is a file", "Name the folder it is in")
    if name.startswith(("/", ".", "~")):
        refuse(f"there is no folder {name!r}", "Name the folder of a checkpoint")
    where = "https://huggingface.co"
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except hub_errors.LocalEntryNotFoundError:
        refuse(
            f"{name} is no folder here and not in the local cache, and {where} cannot be reached",
            "Name a folder, or fetch it where there is a network",
        )
    except hub_errors.GatedRepoError:
        refuse(
            f"{name} is only given to accounts that were let in", f"Ask at {where}/{name}, log in"
        )
    except hub_errors.RepositoryNotFoundError:
        refuse(f"there is no folder {name!r}, and no such id at {where}", "Check the name")
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, OSError) as fault:
        refuse(f"{name} cannot be fetched: {brief(fault)}", "Name a folder")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of the folder."""
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse(f"{folder} has no {name}", "Name the folder of a checkpoint, or hash")
    except OSError as fault:
        refuse(f"{folder / name} cannot be read: {fault.strerror}", "Make it readable")
    except (ValueError, RecursionError):
        refuse(f"{folder / name} is not JSON", "Fetch it again")
    if not isinstance(found, dict):
        refuse(f"{folder / name} holds no JSON object", "Fetch it again")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder; all of them are there. Raises InvalidConfig."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
        if pickles:
            refuse(
                f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code",
                "Save it as safetensors",
            )
        refuse(
            f"{folder} has no weights ({SINGLE} or {INDEX})",
            "Add them, or give --load-format dummy for random ones",
        )
    shards = read_json(folder, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        refuse(f"{folder / INDEX} has no weight_map", "Fetch it again")
    names = sorted({str(shard) for shard in shards.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            refuse(f"{folder / INDEX} names {name[:64]!r}, no safetensors beside it", "Mend it")
        if not (folder / name).exists():
            refuse(f"{folder} has no {name}, which {INDEX} names", "Fetch it again")
    return [folder / name for name in names]


def check_weights(folder: Path) -> None:
    """Each file is as long as its head says."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as fault:
            refuse(f"{file} is cut short or damaged: {brief(fault)}", "Fetch it again")


def brief(fault: BaseException) -> str:
    """What an error of a library says, in at most a line."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing: what it would warn of is refused or fine. Its progress bar is
    shown on a terminal only."""
    before = hf_logging.get_verbosity()
    bar = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)
        if bar:
            hf_logging.enable_progress_bar()
