"""The end of a process beside the trials, in this process: the pieces that a signal would hide."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dynamiccl.collect.ending import HELLO, Ending


@dataclass(frozen=True)
class Pipe:
    """The two ends; closing one twice is harmless."""

    reading: io.FileIO
    writing: io.FileIO


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reading, writing = os.pipe()
    with io.FileIO(reading, "r") as one, io.FileIO(writing, "w") as other:
        yield Pipe(one, other)


def test_waiting_takes_as_long_as_was_asked(pipe: Pipe) -> None:
    with Ending(pipe.reading.fileno()) as ending:
        began = time.monotonic()
        assert not ending.wait(0.05)
        assert time.monotonic() - began >= 0.05


def test_a_signal_cuts_the_wait_short(pipe: Pipe) -> None:
    with Ending(pipe.reading.fileno()) as ending:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        assert ending.wait(30.0)


def test_a_greeted_input_that_ends_is_the_end(pipe: Pipe) -> None:
    with Ending(pipe.reading.fileno()) as ending:
        pipe.writing.write(HELLO)
        assert not ending.wait(0.01)
        pipe.writing.close()
        assert ending.wait(30.0)


def test_an_input_that_ends_at_once_is_not_the_end(pipe: Pipe) -> None:
    pipe.writing.close()
    with Ending(pipe.reading.fileno()) as ending:
        assert not ending.wait(0.02)
        assert not ending.wait(0.02)


def test_a_closed_input_is_not_the_end() -> None:
    # A number that no file has: the limit of open files is far below.
    with Ending(1 << 20) as ending:
        assert not ending.wait(0.02)


def test_even_without_time_to_wait_the_end_is_seen(pipe: Pipe) -> None:
    with Ending(pipe.reading.fileno()) as ending:
        pipe.writing.write(HELLO)
        assert not ending.wait(-1.0)
        pipe.writing.close()
        assert ending.wait(-1.0)


def test_signals_are_given_back(pipe: Pipe) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Ending(pipe.reading.fileno()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
