"""Garbage: what Python's collector may do, and when.

Owns nothing but the two spans of time below. Torch and transformers hold a million objects that
outlive every request, and a full collection looks at all of them: 0.4 s in which no step begins.

    start     undisturbed    nothing is collected while graphs are recorded
    serving   settled        what the start made is not looked at again
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """The garbage collector destroys nothing meanwhile.

    A graph of a model that is gone, destroyed while another is recorded, would spoil the recording.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def freeze_gc() -> Iterator[None]:
    """No collection meanwhile looks at what is there now.

    What others have set apart stays so: then nothing is given back at the end.
    """
    gc.collect()
    num_frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not num_frozen:
            gc.unfreeze()
