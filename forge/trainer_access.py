"""TrainerAccess: the key for pauses and updates of weights over HTTP, and the files of updates.

Owns the check of the options, and the way from a name in a request to a file. Knows no route.

    --admin-key KEY --weights-folder /weights
    "step-40/model.safetensors" ─► /weights/step-40/model.safetensors     a file of the folder
    "../other", "/etc/passwd", a link out of the folder                   refused

Always true: without `--admin-key` there is no access, and no route.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from forge.errors import InvalidConfig, InvalidWeights
from forge.weights import WeightFiles

MAX_FILES = 256
SUFFIX = ".safetensors"


class TrainerAccess(NamedTuple):
    """Key of the trainers' routes, and the folder of their files.

    weights_folder   real path; None: no file is read
    """

    admin_key: str
    weights_folder: Path | None

    @classmethod
    def from_options(
        cls,
        *,
        admin_key: str | None,
        weights_folder: str | None,
        api_keys: Collection[str],
    ) -> TrainerAccess | None:
        """Return the access that the options give, or None. Raises InvalidConfig."""
        if admin_key is None:
            if weights_folder is not None:
                raise InvalidConfig(
                    "weights_folder",
                    "it is for updates of weights, which need a key",
                    "Give admin_key too, or leave it out",
                )
            return None
        if not admin_key:
            raise InvalidConfig(
                "admin_key",
                "it is empty",
                "Set FORGE_ADMIN_KEY, to the output of openssl rand -hex 16, say",
            )
        if admin_key in api_keys:
            raise InvalidConfig(
                "admin_key", "it is a client's key too", "Give one that no client has"
            )
        folder = None
        if weights_folder is not None:
            folder = Path(weights_folder)
            if not folder.is_dir():
                raise InvalidConfig(
                    "weights_folder", f"there is no folder {weights_folder[:128]!r}", "Name one"
                )
            folder = folder.resolve()
        return cls(admin_key, folder)

    def find_files(self, names: Sequence[str]) -> WeightFiles:
        """Return the files of these names, relative to the folder. Raises InvalidWeights.

        A link is followed only within the folder.
        """
        if self.weights_folder is None:
            raise InvalidWeights(
                "files", "no folder of weights is configured", "Start with --weights-folder PATH"
            )
        if not 0 < len(names) <= MAX_FILES:
            raise InvalidWeights("files", f"{len(names)} names", f"Give 1 to {MAX_FILES}")
        return WeightFiles(tuple(_find_file(self.weights_folder, name) for name in names))


def _find_file(folder: Path, name: str) -> str:
    problem = None
    try:
        path = (folder / name).resolve()
        # Before anything is said of the file: outside of the folder its existence is a secret.
        if Path(name).is_absolute() or not path.is_relative_to(folder):
            problem = "it is not in the folder of weights"
        elif path.suffix != SUFFIX:
            problem = f"it is not a {SUFFIX} file"
        elif not path.is_file():
            problem = "there is no such file"
    except (OSError, ValueError, RuntimeError):  # a loop of links, or a name that is too long
        problem = "there is no such file"
    if problem is not None:
        escaped_name = name[:128].encode("unicode_escape").decode()
        raise InvalidWeights(
            escaped_name or "files",
            problem,
            "Name a file relative to the folder of --weights-folder",
        )
    return str(path)
