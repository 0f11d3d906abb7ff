"""Control of Python's garbage collector during a start and while a model serves.

Owns the contexts below. Torch and transformers hold a million objects that outlive every
request, and a full collection visits all of them: 0.4 s in which no step starts.

    imports   pause_gc         nothing is collected while packages are imported
    start     freeze_objects   objects of the packages are not visited again
              pause_gc         nothing is collected while graphs are captured
    serving   freeze_gc        objects that the start made are not visited again

Always true: when the last context ends, the collector is on and nothing is frozen, unless the
program itself had turned it off or frozen objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """Collect garbage, then keep the collector off until the context ends.

    Destroying a CUDA graph of an earlier model during a capture would invalidate the capture.
    Imports add 300,000 objects, and collections would be an eighth to a fifth of their time.
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
    """Collect garbage, then freeze the objects that are left until the context ends."""
    gc.collect()
    with freeze_objects():
        yield


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Keep objects that exist now out of collections until the context ends.

    Garbage among them is kept too: enter it after `pause_gc` or a collection.
    If objects were frozen before, none are unfrozen at the end.
    """
    num_frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not num_frozen:
            gc.unfreeze()
