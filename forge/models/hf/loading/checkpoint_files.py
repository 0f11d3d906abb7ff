"""Files of a checkpoint: where they are, which there must be, and whether they are complete.

Owns the names of files, the local cache of Hugging Face ids, the tensors' places and the wording of
refusals about a checkpoint. Knows no config and reads no tensor.

    config.json                    generation_config.json      tokenizer.json, ...
    model.safetensors          or  model.safetensors.index.json ─► model-00001-of-00003.safetensors
    pytorch_model.bin, *.pt, ...   refused: a pickle runs code when it is read

Always true: a name has one tensor. What the index gives to one file is in no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from forge.errors import InvalidConfig, one_line
from forge.models.loader import find_local_folder
from forge.sampling_defaults import NO_SAMPLING_DEFAULTS, SamplingDefaults

DESCRIPTION_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
WEIGHT_PATTERNS = ("model*.safetensors", "model.safetensors.index.json")
"""Files that are fetched by a checkpoint's id. Pickles are not."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHER_FORMATS = {
    "*.gguf": "a GGUF file, which is not served",
    "consolidated*.safetensors": "the format of Mistral's own library, which is not served",
    "adapter_model.safetensors": "an adapter and not a model",
}
"""Files that are not read, and what they are."""


class StoredTensor(NamedTuple):
    """Tensor in a safetensors file that is open.

    file    handle of the safetensors library
    dtype   in words of the safetensors library, such as BF16
    """

    file: Any
    name: str
    dtype: str
    shape: tuple[int, ...]

    def open_slice(self) -> Any:
        """Return the tensor as one whose parts are read when they are indexed."""
        return self.file.get_slice(self.name)

    def read(self) -> Any:
        """Return the whole tensor, on the CPU. Its memory may be the file itself."""
        return self.file.get_tensor(self.name)


def refuse_model(problem: str, remedy: str) -> NoReturn:
    """Raise InvalidConfig about the model."""
    raise InvalidConfig("model", problem, remedy) from None


def find_checkpoint_folder(name: str, patterns: Sequence[str]) -> Path:
    """Return the named folder, or an id's folder in the cache, fetched if needed."""
    if (folder := find_local_folder(name)) is not None:
        return folder
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
    _refuse_dead_link(folder / name)
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse_model(f"{folder} has no {name}", "Name the folder of a checkpoint, or hash")
    except OSError as error:
        refuse_model(f"{folder / name} cannot be read: {error.strerror}", "Make it readable")
    except (ValueError, RecursionError):
        _refuse_text(folder / name)
        refuse_model(f"{folder / name} is not JSON", "Fetch it again")
    if not isinstance(value, dict):
        refuse_model(f"{folder / name} holds no JSON object", "Fetch it again")
    return value


def read_sampling_defaults(folder: Path, source: str) -> SamplingDefaults:
    """Return the sampling parameters of a generation_config.json. Raise InvalidConfig.

    folder   the checkpoint's, which may have no such file
    source   the option: auto, none, or another folder
    """
    if source != "auto":
        folder = Path(source).expanduser()
    if source == "none" or (source == "auto" and not (folder / GENERATION_FILE).exists()):
        return NO_SAMPLING_DEFAULTS
    if not (folder / GENERATION_FILE).is_file():
        raise InvalidConfig(
            "generation_config",
            f"{source[:64]!r} has no {GENERATION_FILE}",
            "Give auto, none, or a folder with one",
        )
    return SamplingDefaults.from_generation_config(read_json(folder, GENERATION_FILE))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder, all of which exist. Raise InvalidConfig."""
    if _is_there(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE]
    if not _is_there(folder / INDEX_FILE):
        _refuse_without_weights(folder)
    names = sorted(set(_read_index(folder).values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            refuse_model(
                f"{folder / INDEX_FILE} names {name[:64]!r}, not a safetensors file of its folder",
                "Fix it",
            )
        if not _is_there(folder / name):
            refuse_model(f"{folder} has no {name}, which {INDEX_FILE} names", "Fetch it again")
    return [folder / name for name in names]


def _read_index(folder: Path) -> dict[str, str]:
    """Return the name of the file that has each tensor, by the index. Raise InvalidConfig."""
    shards = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        refuse_model(f"{folder / INDEX_FILE} has no weight_map", "Fetch it again")
    return {name: str(shard) for name, shard in shards.items()}


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's safetensors files by its name. Raise InvalidConfig.

    Each file must be as long as its header says. Nothing but the headers is read.
    """
    files = weight_files(folder)
    owners = {} if files == [folder / SINGLE_FILE] else _read_index(folder)
    tensors: dict[str, StoredTensor] = {}
    paths: dict[str, Path] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt")
            names = list(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            _refuse_text(path)
            refuse_model(f"{path} is cut short or damaged: {one_line(error)}", "Fetch it again")
        _refuse_stale(path, names, owners, paths)
        paths |= dict.fromkeys(names, path)
        for name in names:
            stored = file.get_slice(name)
            shape = tuple(stored.get_shape())
            tensors[name] = StoredTensor(file, name, stored.get_dtype(), shape)
    return tensors


def _refuse_stale(
    path: Path, names: Sequence[str], owners: Mapping[str, str], paths: Mapping[str, Path]
) -> None:
    """Raise InvalidConfig for tensors that the index gives to another file than this.

    owners   name of the file of each tensor, by the index
    paths    files of the tensors that were found before
    """
    for name in names:
        owner = owners.get(name, path.name)
        if owner != path.name:
            refuse_model(
                f"{path} has {name}, which {INDEX_FILE} gives to {owner}",
                "Fetch all files again, from one version of the model",
            )
        if name in paths:
            refuse_model(
                f"{path} has {name}, which {paths[name].name} has too, and {INDEX_FILE} names "
                "neither",
                "Remove one of them",
            )


def _is_there(path: Path) -> bool:
    """Return whether the file exists. Raise InvalidConfig for a link that leads to none."""
    _refuse_dead_link(path)
    return path.exists()


def _refuse_dead_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        refuse_model(f"{path} is a symbolic link that leads to no file", "Fetch it again")


def check_descriptions(folder: Path) -> None:
    """Raise InvalidConfig for a description that is a dead link or a git-lfs pointer.

    transformers takes the former for a file that is not there.
    """
    for pattern in DESCRIPTION_PATTERNS:
        for path in sorted(folder.glob(pattern)):
            _refuse_dead_link(path)
            _refuse_pointer(path)


def _read_beginning(path: Path) -> bytes:
    """Return the first bytes of a file; none of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""


def _refuse_pointer(path: Path) -> None:
    if _read_beginning(path).startswith(b"version https://git-lfs"):
        refuse_model(f"{path} is a git-lfs pointer and not the file", "Run git lfs pull")


def _refuse_text(path: Path) -> None:
    """Raise InvalidConfig for a text in the place of a file, by what it is."""
    _refuse_pointer(path)
    beginning = _read_beginning(path)
    if beginning.startswith(b"\xef\xbb\xbf"):
        refuse_model(f"{path} begins with a byte order mark", "Save it as UTF-8 without one")
    if beginning.lstrip()[:1] == b"<":
        refuse_model(f"{path} is a page of HTML or XML, as of a failed download", "Fetch it again")


def _refuse_without_weights(folder: Path) -> NoReturn:
    """Raise InvalidConfig that names the weights of another format, if there are any."""
    pickles = sorted(path.name for kind in PICKLE_PATTERNS for path in folder.glob(kind))
    for pattern, description in OTHER_FORMATS.items():
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            refuse_model(
                f"{folder} has no {SINGLE_FILE}; its {found[0]} is {description}",
                "Serve the checkpoint with model.safetensors that it belongs to",
            )
    if pickles:
        refuse_model(
            f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code",
            "Save it as safetensors",
        )
    refuse_model(
        f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE})",
        "Add them, or give --load-format dummy for random ones",
    )
