"""Arrays of any length on the device, in one copy that the host does not wait for.

Owns nothing: pinned memory is torch's own, used again only when the copy is over. A step's fixed
arrays go through staging instead, to places that a CUDA graph knows.

    ids [3]   factors [2]                     int64 and float64 share their 8 bytes
    └──────┬──────┘
        [ 5 numbers ] ─── one copy ───► views of 3 and 2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """The one-dimensional arrays of int64 or float64, one device tensor each."""
    host = torch.from_numpy(np.concatenate([array.view(np.int64) for array in arrays]))
    if device.type == "cuda":
        host = host.pin_memory()
    views = host.to(device, non_blocking=True).split_with_sizes([len(array) for array in arrays])
    return [
        part.view(torch.float64) if array.dtype == np.float64 else part
        for part, array in zip(views, arrays, strict=True)
    ]


def int64_array(values: Sequence[int]) -> NDArray[Any]:
    """The integers as `upload` takes them."""
    return np.array(values, np.int64)


def concatenate(arrays: Iterable[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    """The arrays behind each other; there may be none."""
    return np.concatenate([np.zeros(0, dtype), *arrays])
