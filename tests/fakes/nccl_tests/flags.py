"""Command-line options of nccl-tests, release by release (`src/common.cu`, main)."""

import getopt
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dynamiccl.nccl import NcclVersion
from tests.fakes.nccl_tests.numbers import parse_size, strtol

_ALWAYS: Final = NcclVersion(0, 0)


@dataclass(frozen=True, slots=True)
class _Flag:
    letter: str
    name: str
    #: Field of `Options`; empty for what makes no difference here.
    field: str
    since: NcclVersion = _ALWAYS


_FLAGS: Final = (
    _Flag("t", "nthreads", "threads"),
    _Flag("g", "ngpus", "gpus"),
    _Flag("b", "minbytes", "min_bytes"),
    _Flag("e", "maxbytes", "max_bytes"),
    _Flag("i", "stepbytes", "step_bytes"),
    _Flag("f", "stepfactor", "step_factor"),
    _Flag("n", "iters", "iterations"),
    _Flag("m", "agg_iters", "aggregated"),
    _Flag("w", "warmup_iters", "warmup"),
    _Flag("N", "run_cycles", "cycles"),
    _Flag("p", "parallel_init", "parallel_init"),
    _Flag("c", "check", "check"),
    _Flag("o", "op", "operation"),
    _Flag("d", "datatype", "datatype"),
    _Flag("r", "root", "root"),
    _Flag("z", "blocking", "blocking"),
    _Flag("y", "stream_null", ""),
    _Flag("T", "timeout", "timeout_s"),
    _Flag("G", "cudagraph", "graph"),
    _Flag("C", "report_cputime", "cpu_time"),
    _Flag("S", "report_timestamps", "timestamps", NcclVersion(2, 17, 8)),
    _Flag("J", "output_file", "json_path", NcclVersion(2, 17, 3)),
    _Flag("a", "average", ""),
    _Flag("R", "local_register", "register"),
    _Flag("x", "cta_policy", "", NcclVersion(2, 17, 3)),
    _Flag("D", "device_implementation", "device_implementation", NcclVersion(2, 17, 3)),
    _Flag("V", "device_cta_count", "", NcclVersion(2, 17, 3)),
    _Flag("M", "memory", "memory", NcclVersion(2, 17, 8)),
    _Flag("u", "unalign", "unalign", NcclVersion(2, 18, 2)),
    _Flag("I", "per_iter_timing", "per_iteration", NcclVersion(2, 19, 2)),
    _Flag("K", "per_iter_skip", "skip", NcclVersion(2, 19, 6)),
)
_SIZES: Final = {"b": "minbytes", "e": "maxbytes", "i": "stepBytes"}
_TEXTS: Final = frozenset("odJ")
#: Options whose USAGE line shows its parameter in another way than `<0/1>`.
_PARAMETERS: Final = {
    "t": "<num threads>",
    "g": "<gpus per thread>",
    "b": "<min size in bytes>",
    "e": "<max size in bytes>",
    "i": "<increment size>",
    "f": "<increment factor>",
    "n": "<iteration count>",
    "m": "<aggregated iteration count>",
    "w": "<warmup iteration count>",
    "N": "<cycle count> run & print each cycle (default: 1; 0=infinite)",
    "c": "<check iteration count>",
    "o": "<sum/prod/min/max/avg/mulsum/all>",
    "d": "<nccltype/all>",
    "r": "<root>",
    "T": "<time in seconds>",
    "G": "<num graph launches>",
    "S": "<0/1> report timestamps (default 0)",
    "J": "<file> write output to filepath, if accessible. Infer type from suffix "
    "(only json supported presently.)",
    "a": "<0/1/2/3> report average iteration time <0=RANK0/1=AVG/2=MIN/3=MAX>",
    "R": "<0/1/2> enable local (1) or symmetric (2) buffer registration on send/recv buffers "
    "(default: disable (0))",
    "x": "<0/1/2> set CTA policy (NCCL_CTA_POLICY_DEFAULT (0), NCCL_CTA_POLICY_EFFICIENCY (1), "
    "NCCL_CTA_POLICY_ZERO (2)) (default: do not set)",
    "D": "<implementation number> enable device implementation (default: 0, use NCCL "
    "implementation; requires -R 2 if > 0)",
    "V": "<number> set number of CTAs for device implementation (default: 16)",
    "M": "<0/1> enable memory usage report (default: 0)",
    "u": "<index of first element> Misalign source and destination buffers (default: 0)",
    "I": "<0/1> per-iteration CUDA event timing\n\t    (best with -z 0, -z 2, or -z 3; with -z 1 "
    "includes barrier wait;\n\t    i_p99 uses nearest-rank percentile and may equal i_max\n\t    "
    "with <100 samples) (default: 0)",
    "K": "<count> exclude leading samples from -I summary stats (default: 0)",
}


class Stop(Exception):
    """Raised to end the program before any benchmark, with exit status and output."""

    def __init__(self, status: int, out: str = "", err: str = "") -> None:
        super().__init__(out or err)
        self.status = status
        self.out = out
        self.err = err


@dataclass(frozen=True, slots=True)
class Options:
    """What a command line asked for; names follow the long options."""

    threads: int = 1
    gpus: int = 1
    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    step_factor: int = 1
    iterations: int = 20
    aggregated: int = 1
    warmup: int = 1
    cycles: int = 1
    parallel_init: int = 0
    check: int = 1
    operation: str = "sum"
    datatype: str = "float"
    root: int = 0
    blocking: int = 0
    timeout_s: int = 0
    graph: int = 0
    cpu_time: int = 0
    timestamps: int = 0
    json_path: str = ""
    register: int = 0
    device_implementation: int = 0
    memory: int = 0
    unalign: int = 0
    per_iteration: int = 0
    skip: int = 0
    #: What was said on stderr while reading the options.
    remarks: tuple[str, ...] = field(default=())


def parse(path: str, arguments: Sequence[str], tests: NcclVersion) -> Options:
    """Read a command line as the release does. Raises Stop for help and for what cannot run."""
    flags = [flag for flag in _FLAGS if flag.since <= tests]
    program = path.rpartition("/")[2]
    short = "".join(f"{flag.letter}:" for flag in flags) + "h"
    names = [f"{_long_name(flag, tests)}=" for flag in flags] + ["help"]
    by_name = {f"-{flag.letter}": flag for flag in flags}
    by_name |= {f"--{_long_name(flag, tests)}": flag for flag in flags}
    try:
        found, _ = getopt.gnu_getopt(list(arguments), short, names)
    except getopt.GetoptError as error:
        said = f"{path}: {_complaint(error)}\n"
        raise Stop(0, f"invalid option '?'\n{usage(program, tests)}", said) from error
    values: dict[str, int | str] = {}
    for name, text in found:
        if name in {"-h", "--help"}:
            raise Stop(0, usage(program, tests))
        flag = by_name[name]
        value = _value(flag.letter, text)
        if flag.field:
            values[flag.field] = value
    defaults = Options(warmup=1 if tests >= NcclVersion(2, 16) else 5)
    return _checked(replace(defaults, **values))  # type: ignore[arg-type]  # each by its flag


def usage(program: str, tests: NcclVersion) -> str:
    """The USAGE text, with the options of this release only."""
    lines = [
        f"[-{flag.letter},--{_long_name(flag, tests, shown=True)} {_parameter(flag.letter, tests)}]"
        for flag in _FLAGS
        if flag.since <= tests
    ]
    return f"USAGE: {program} \n\t" + " \n\t".join([*lines, "[-h,--help]"]) + "\n"


def _complaint(error: getopt.GetoptError) -> str:
    """What the C library says about it."""
    name = error.opt.partition("=")[0]
    long = len(name) > 1
    if "requires argument" in error.msg:
        return (
            f"option '--{name}' requires an argument"
            if long
            else (f"option requires an argument -- '{name}'")
        )
    if "not a unique prefix" in error.msg:
        return f"option '--{name}' is ambiguous"
    return f"unrecognized option '--{name}'" if long else f"invalid option -- '{name}'"


def _long_name(flag: _Flag, tests: NcclVersion, *, shown: bool = False) -> str:
    # The help of 2.17 and 2.18 names an option that getopt did not know.
    return "memory_report" if shown and flag.letter == "M" and tests.minor < 19 else flag.name


def _parameter(letter: str, tests: NcclVersion) -> str:
    if letter == "z" and tests >= NcclVersion(2, 19, 2):
        return (
            "<0/1/2/3> 1=barrier after each inner iter (-m), 2=no barrier, 3=wait and barrier "
            "after each outer iter (-n)"
        )
    if letter == "z" and tests >= NcclVersion(2, 18, 2):
        return (
            "<0/1/2> 1=wait for completion and barrier (default behavior), 2=wait without barrier"
        )
    if letter == "R" and tests < NcclVersion(2, 16):
        return "<1/0> enable local buffer registration on send/recv buffers (default: disable)"
    return _PARAMETERS.get(letter, "<0/1>")


def _value(letter: str, text: str) -> int | str:
    if letter in _TEXTS:
        return text
    if letter not in _SIZES:
        return strtol(text)
    size = parse_size(text)
    if size is None:
        raise Stop(255, err=f"invalid size specified for '{_SIZES[letter]}'\n")
    return size


def _checked(options: Options) -> Options:
    if options.min_bytes > options.max_bytes:
        sizes = f"{options.min_bytes} > {options.max_bytes}"
        raise Stop(255, err=f"invalid sizes for 'minbytes' and 'maxbytes': {sizes}\n")
    if options.device_implementation > 0 and options.register != 2:
        said = "device implementation (-D > 0) requires enabling symmetric memory registration"
        raise Stop(255, err=f"{said} (-R 2)\n")
    remarks = []
    if options.per_iteration not in {0, 1}:
        remarks.append("per-iteration timing (-I) only supports 0=off or 1=on. Disabling.")
        options = replace(options, per_iteration=0)
    if options.per_iteration and options.graph:
        remarks.append(
            "per-iteration timing (-I) is incompatible with CUDA graph mode (-G). Disabling."
        )
        options = replace(options, per_iteration=0)
    if not 0 <= options.skip < options.iterations:
        last = options.iterations - 1
        remarks.append(f"per-iteration skip (-K) must be between 0 and {last}. Disabling.")
        options = replace(options, skip=0)
    if options.skip and not options.per_iteration:
        remarks.append("per-iteration skip (-K) requires per-iteration timing (-I 1). Disabling.")
        options = replace(options, skip=0)
    return replace(options, remarks=tuple(remarks))
