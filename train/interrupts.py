"""Delays Ctrl-C during a write: an interrupted transaction leaves MLflow's store locked."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT until the block ends; KeyboardInterrupt is raised then."""
    if threading.current_thread() is not threading.main_thread():
        yield  # it gets no signals
        return
    came = False

    def remember(_number: int, _frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
