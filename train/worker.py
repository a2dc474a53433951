"""Helpers for worker processes."""

from typing import Final

#: Two threads on a busy core spin against each other: trials side by side take one each.
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def reason(said: str) -> str:
    r"""The cause of a trial's failure, extracted from its output.

    Our own error, or else the last line that begins at the margin.

    >>> reason("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")
    "KeyError: 'a'"
    """
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error: ")]
    flush = [line for line in lines if not line[0].isspace()]
    return (ours or flush or [""])[-1].removeprefix("error: ")
