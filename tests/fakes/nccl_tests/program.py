"""`main` of the programs, and their command line (nccl-tests 2.19.6, `src/common.cu`)."""

import getopt
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: The options that our launches use: letter, and name and parameter as USAGE shows them.
_OPTIONS: Final = {
    "g": "ngpus <gpus per thread>",
    "b": "minbytes <min size in bytes>",
    "e": "maxbytes <max size in bytes>",
    "f": "stepfactor <increment factor>",
    "n": "iters <iteration count>",
    "w": "warmup_iters <warmup iteration count>",
    "N": "run_cycles <cycle count> run & print each cycle (default: 1; 0=infinite)",
    "c": "check <check iteration count>",
    "d": "datatype <nccltype/all>",
    "J": "output_file <file> write output to filepath, if accessible. Infer type from suffix "
    "(only json supported presently.)",
    "I": "per_iter_timing <0/1> per-iteration CUDA event timing (default: 0)",
}


@dataclass(slots=True)
class Options:
    """What a command line asked for; the fields are in the order of the options."""

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


_FIELDS: Final = dict(zip(_OPTIONS, Options.__slots__, strict=True))


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
    try:
        options = parse(arguments)
        # Whoever asks for help does not wait for the simulator, most of what a start takes.
        from tests.fakes.nccl_tests.benchmark import Benchmark

        Benchmark(arguments, options, environment).run()
    except Stop as stop:
        sys.stderr.write(stop.err)
        sys.stdout.write(stop.out)
        return stop.status
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Read a command line. Raises Stop for help and for what cannot run."""
    options = Options()
    try:
        found, _ = getopt.gnu_getopt([*arguments[1:]], ":".join([*_OPTIONS, "h"]))
    except getopt.GetoptError as error:
        # The real one has more options: this is no run of it.
        raise Stop(125, err=f"{arguments[0]}: the stand-in for nccl-tests: {error}\n") from error
    for option, text in found:
        if option == "-h":
            raise Stop(0, usage(arguments[0].rpartition("/")[2]))
        unit = _UNITS.get(text[-1:].upper(), 1)
        number = text[:-1] if unit > 1 else text
        setattr(options, _FIELDS[option[1]], text if option in {"-d", "-J"} else int(number) * unit)
    return options


def usage(program: str) -> str:
    """The USAGE text."""
    shown = [f"[-{letter},--{text}] \n\t" for letter, text in _OPTIONS.items()]
    return f"USAGE: {program} \n\t{''.join(shown)}[-h,--help]\n"
