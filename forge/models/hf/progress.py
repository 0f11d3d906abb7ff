"""Progress of a start: a bar where somebody watches, else a line of the log at the end of a phase.

Owns how long work is shown. Knows no work.

    a terminal      recording decode steps:  62%|██████▏   | 15/24 [00:03<00:02,  4.6it/s]
    anything else   INFO forge.start: recording decode steps: 24 in 5.2 s

The bar is the one of transformers, which shows the reading of weights by itself; who has turned
that off has turned off these.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers.utils import logging as hf_logging

log = logging.getLogger("forge.start")
# Whatever process writes its log has these lines in it; a program that writes none has none.
log.setLevel(logging.INFO)


def has_progress_bars() -> bool:
    """Somebody watches: standard error is a terminal, and bars are not turned off."""
    return sys.stderr.isatty() and bool(hf_logging.is_progress_bar_enabled())


@contextmanager
def log_phase(phase: str) -> Iterator[None]:
    """The phase is in the log with its time once it is done, where no bar has shown it."""
    started_s = time.monotonic()
    yield
    if not has_progress_bars():
        log.info("%s in %.1f s", phase, time.monotonic() - started_s)


@contextmanager
def show_progress(phase: str, total: int) -> Iterator[Callable[[int], object]]:
    """The phase is shown. What comes out is to be told how many more of `total` pieces are done."""
    with log_phase(f"{phase}: {total}"):
        if has_progress_bars():
            with hf_logging.tqdm(total=total, desc=phase) as bar:
                yield bar.update
        else:
            yield lambda done: None


@contextmanager
def silence_transformers() -> Iterator[None]:
    """transformers says nothing: what it would warn of is refused or fine. Its progress bar is
    shown on a terminal only."""
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
