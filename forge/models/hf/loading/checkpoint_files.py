"""Files of a checkpoint: where they are, which there must be, and whether they are complete.

Owns the names of files, the local cache of Hugging Face ids and the wording of refusals about a
checkpoint. Knows no config and no tensor.

    config.json                    generation_config.json      tokenizer.json, ...
    model.safetensors          or  model.safetensors.index.json ─► model-00001-of-00003.safetensors
    pytorch_model.bin, *.pt, ...   refused: a pickle runs code when it is read
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from forge.errors import InvalidConfig, one_line

DESCRIPTION_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
WEIGHT_PATTERNS = ("model*.safetensors", "model.safetensors.index.json")
"""Files that are fetched by a checkpoint's id. Pickles are not."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def refuse_model(problem: str, remedy: str) -> NoReturn:
    """Raise InvalidConfig about the model."""
    raise InvalidConfig("model", problem, remedy) from None


def find_checkpoint_folder(name: str, patterns: Sequence[str]) -> Path:
    """Return the named folder, or an id's folder in the cache, fetched if needed."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        refuse_model(f"{name} is a file", "Name the folder it is in")
    if name.startswith(("/", ".", "~")):
        refuse_model(f"there is no folder {name!r}", "Name the folder of a checkpoint")
    hub_url = "https://huggingface.co"
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except hub_errors.LocalEntryNotFoundError:
        refuse_model(
            f"{name} is no folder here and not in the local cache, and {hub_url} cannot be reached",
            "Name a folder, or fetch it where there is a network",
        )
    except hub_errors.GatedRepoError:
        refuse_model(
            f"{name} is gated, and this account has no access",
            f"Request access at {hub_url}/{name} and log in",
        )
    except hub_errors.RepositoryNotFoundError:
        refuse_model(f"there is no folder {name!r}, and no such id at {hub_url}", "Check the name")
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, OSError) as error:
        refuse_model(f"{name} cannot be fetched: {one_line(error)}", "Name a folder")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the folder."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse_model(f"{folder} has no {name}", "Name the folder of a checkpoint, or hash")
    except OSError as error:
        refuse_model(f"{folder / name} cannot be read: {error.strerror}", "Make it readable")
    except (ValueError, RecursionError):
        refuse_model(f"{folder / name} is not JSON", "Fetch it again")
    if not isinstance(value, dict):
        refuse_model(f"{folder / name} holds no JSON object", "Fetch it again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder, all of which exist. Raise InvalidConfig."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        pickles = sorted(path.name for kind in PICKLE_PATTERNS for path in folder.glob(kind))
        if pickles:
            refuse_model(
                f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code",
                "Save it as safetensors",
            )
        refuse_model(
            f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE})",
            "Add them, or give --load-format dummy for random ones",
        )
    shards = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        refuse_model(f"{folder / INDEX_FILE} has no weight_map", "Fetch it again")
    names = sorted({str(shard) for shard in shards.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            refuse_model(
                f"{folder / INDEX_FILE} names {name[:64]!r}, not a safetensors file of its folder",
                "Fix it",
            )
        if not (folder / name).exists():
            refuse_model(f"{folder} has no {name}, which {INDEX_FILE} names", "Fetch it again")
    return [folder / name for name in names]


def check_weights(folder: Path) -> None:
    """Raise InvalidConfig unless each file is as long as its header says."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            refuse_model(f"{file} is cut short or damaged: {one_line(error)}", "Fetch it again")
