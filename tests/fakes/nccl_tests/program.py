"""`main` of the programs, and their command line (nccl-tests 2.19.6, `src/common.cu`)."""

import getopt
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(slots=True)
class Options:
    """What a command line asked for; the fields are in the order of `_LETTERS`."""

    gpus: int = 1
    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    #: 1 = in steps of 1 MiB.
    factor: int = 1
    iterations: int = 20
    warmup: int = 1
    #: 0 = for ever.
    cycles: int = 1
    check: int = 1
    datatype: str = "float"
    json_path: str = ""
    per_iteration: int = 0


#: The options that our launches use.
_LETTERS: Final = "gbefnwNcdJI"
_FIELDS: Final = dict(zip(_LETTERS, Options.__slots__, strict=True))


class Stop(Exception):
    """Raised to end a program before its end: exit status, and what it prints."""

    def __init__(self, status: int, out: str = "", err: str = "") -> None:
        super().__init__(out or err)
        self.status = status
        self.out = out
        self.err = err


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one program; `arguments[0]` is its path. Returns the exit status."""
    # As the real `main` does, so that each row appears when it is done, and not before.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    from tests.fakes.nccl_tests.benchmark import Benchmark  # it imports Stop from here

    try:
        options = parse(arguments)
        Benchmark(arguments, options, environment).run()
    except Stop as stop:
        sys.stderr.write(stop.err)
        sys.stdout.write(stop.out)
        return stop.status
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line. Raises Stop for what cannot run."""
    options = Options()
    try:
        found, _ = getopt.gnu_getopt([*arguments[1:]], ":".join(_LETTERS) + ":")
    except getopt.GetoptError as error:
        # The real one has more options: this is no run of it.
        raise Stop(125, err=f"{arguments[0]}: the stand-in for nccl-tests: {error}\n") from error
    for option, text in found:
        unit = _UNITS.get(text[-1:].upper(), 1)
        number = text[:-1] if unit > 1 else text
        setattr(options, _FIELDS[option[1]], text if option in {"-d", "-J"} else int(number) * unit)
    return options
