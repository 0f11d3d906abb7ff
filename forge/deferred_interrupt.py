"""A Ctrl-C that waits until the caller's thread has finished a change.

Owns the handler of SIGINT within a block. Knows no engine.

    main thread   |== step ==| check |== step ==| check      check   raises KeyboardInterrupt where
                     ▲ Ctrl-C                                        Ctrl-C was pressed before

Always true: after the block SIGINT has the handler that it had before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C to the end of the block.

    Yields a function that raises a pending KeyboardInterrupt earlier. A second Ctrl-C raises at
    once, since a model may hang. Nothing changes outside of the main thread, which alone gets
    Ctrl-C, or where the program has a handler of its own. Takes some 10 us.
    """
    is_pending = False

    def defer(number: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        if is_pending:
            signal.default_int_handler(number, frame)
        is_pending = True

    def raise_pending() -> None:
        nonlocal is_pending
        if is_pending:
            is_pending = False
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_pending
        return
    signal.signal(signal.SIGINT, defer)
    try:
        yield raise_pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise_pending()
