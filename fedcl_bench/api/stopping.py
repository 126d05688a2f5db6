"""Stopping runs so that nothing is lost."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import Callable, Iterator


@contextmanager
def stop_between_rounds() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question asked after every round; a second Ctrl-C stops at once.

    Only the main thread receives signals: elsewhere the answer is always no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
