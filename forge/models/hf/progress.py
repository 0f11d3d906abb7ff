"""Progress of a start: a bar on a terminal, else a log line at the end of each phase.

Owns how long work is shown. Knows nothing of the work.

    a terminal      capturing decode graphs:  62%|██████▏   | 15/24 [00:03<00:02,  4.6it/s]
    anything else   INFO forge.start: capturing decode graphs: 24 in 5.2 s

The bar is that of transformers, which it shows itself while it reads weights. Turning that bar off
turns these off too.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers.utils import logging as hf_logging

log = logging.getLogger("forge.start")


def has_progress_bars() -> bool:
    """Return whether standard error is a terminal and transformers' bars are on."""
    return sys.stderr.isatty() and bool(hf_logging.is_progress_bar_enabled())


@contextmanager
def log_phase(phase: str) -> Iterator[None]:
    """Log the phase with its time when the context ends, unless bars are shown."""
    started_s = time.monotonic()
    yield
    if not has_progress_bars():
        log.info("%s in %.1f s", phase, time.monotonic() - started_s)


@contextmanager
def show_progress(phase: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a phase of `total` pieces as a bar or a log line.

    Yield a function that takes the number of pieces done since its last call.
    """
    with log_phase(f"{phase}: {total}"), show_bar(phase, total) as advance:
        yield advance


@contextmanager
def show_bar(phase: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a phase of `total` pieces as a bar where bars are shown, and log nothing.

    Yield a function that takes the number of pieces done since its last call.
    """
    if has_progress_bars():
        with hf_logging.tqdm(total=total, desc=phase) as bar:
            yield bar.update
    else:
        yield lambda done: None


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the warnings of transformers, and its bars where standard error is no terminal.

    forge refuses what they warn of, or the warning does not apply.
    """
    verbosity = hf_logging.get_verbosity()
    had_progress_bar = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_progress_bar:
            hf_logging.enable_progress_bar()
