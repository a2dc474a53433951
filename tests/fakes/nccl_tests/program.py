"""`main` of the programs: options, output files, devices, one run."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from dynamiccl.nccl import Collective, NcclVersion
from tests.fakes.nccl_tests.benchmark import (
    CUDA_ERROR,
    NOT_IMPLEMENTED,
    OPERATIONS,
    TYPE_BYTES,
    Benchmark,
    Failed,
    Test,
    print_failure,
)
from tests.fakes.nccl_tests.flags import Options, Stop, parse
from tests.fakes.nccl_tests.groups import colours, group_world, slowdowns
from tests.fakes.nccl_tests.json_report import JsonReport, open_json
from tests.fakes.nccl_tests.library import Library
from tests.fakes.nccl_tests.numbers import strtol
from tests.fakes.nccl_tests.releases import UnknownRelease, release
from tests.fakes.nccl_tests.report import Report
from tests.fakes.nccl_tests.world import world_of

#: The programs that there are, by name.
PROGRAMS: Final = {
    "all_reduce_perf": Collective.AllReduce,
    "all_gather_perf": Collective.AllGather,
    "reduce_scatter_perf": Collective.ReduceScatter,
    "broadcast_perf": Collective.Broadcast,
    "reduce_perf": Collective.Reduce,
    "alltoall_perf": Collective.AlltoAll,
    "sendrecv_perf": Collective.SendRecv,
}


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one program; `arguments[0]` is its path. Returns the exit status."""
    # As `main` of every release does, so that each row appears when it is done, and not before.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    program = os.path.basename(arguments[0])  # noqa: PTH119 - a name, not a path
    try:
        tests = release(environment, "FAKE_NCCL_TESTS_VERSION", "2.19.6")
        nccl = release(environment, "FAKE_NCCL_VERSION", "2.29.7")
        options = parse(arguments[0], arguments[1:], tests)
    except UnknownRelease as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 125
    except Stop as stop:
        sys.stderr.write(stop.err)
        sys.stdout.write(stop.out)
        return stop.status
    sys.stderr.write("".join(f"{remark}\n" for remark in options.remarks))
    options = _known_names(options)
    world = world_of(environment)
    test = Test(PROGRAMS[program], program, options, tests, world, environment)
    json_report = _json_report(test, arguments, nccl)
    try:
        status = _run(test, nccl, json_report)
    except Failed as failed:
        if json_report is not None:
            json_report.finish()
        print_failure(failed, test)
        return failed.status
    if json_report is not None:
        json_report.finish()
    if status and tests >= NcclVersion(2, 17):
        print_failure(Failed(status, "", []), test)
    return status


def _run(test: Test, nccl: NcclVersion, json_report: JsonReport | None) -> int:
    options, world = test.options, test.world
    per_process = options.threads * options.gpus
    report = Report(options, test.tests, test.program, main=world.rank == 0)
    report.head(nccl.code)
    colour_of = colours(world, test.environment, test.tests)
    test = replace(test, slow=slowdowns(world, colour_of, test.environment))
    own = group_world(world, colour_of)
    library = Library(test.environment, nccl, own, per_process, colour_of[world.rank])
    lines = []
    for rank, host in enumerate(world.hosts):
        local = world.local_rank if rank == world.rank else world.hosts[:rank].count(host)
        devices = _devices(test, local, per_process)
        # Other processes' ids are made up: only they know them.
        pid = os.getpid() + rank - world.rank
        lines.append(report.devices(rank * per_process, host, devices, pid, colour_of[rank]))
    if json_report is not None:
        json_report.config(options, lines)
    return Benchmark(test, library, report, json_report).run()


def _devices(test: Test, local_rank: int, count: int) -> range:
    """GPUs of one process. Raises Failed where the node has not so many."""
    setting = test.environment.get("NCCL_TESTS_DEVICE")
    first = strtol(setting) if setting is not None else local_rank * count
    found = int(test.environment.get("FAKE_GPUS", "8"))
    if first + count <= found:
        return range(first, first + count)
    if test.tests < NcclVersion(2, 17):
        text = f"{test.world.host}: Test CUDA failure common.cu:892 'invalid device ordinal'\n"
        raise Failed(CUDA_ERROR, text, ["common.cu:821"])
    sys.stderr.write(
        f"Invalid number of GPUs: {first + count} requested but only {found} were found.\n"
        "Please check the number of processes and GPUs per process.\n"
    )
    raise Failed(NOT_IMPLEMENTED, "", [])


def _known_names(options: Options) -> Options:
    """Unknown types and operations become the usual ones, with a word about it."""
    if options.datatype not in {*TYPE_BYTES, "all"}:
        sys.stdout.write(f"invalid type {options.datatype}, defaulting to float .. \n")
        options = replace(options, datatype="float")
    if options.operation not in {*OPERATIONS, "all"}:
        sys.stdout.write(f"invalid op {options.operation}, defaulting to sum .. \n")
        options = replace(options, operation="sum")
    return options


def _json_report(test: Test, arguments: Sequence[str], nccl: NcclVersion) -> JsonReport | None:
    if test.world.rank or not test.options.json_path:
        return None
    file, said = open_json(test.options.json_path)
    sys.stdout.write(said)
    if file is None:
        return None
    report = JsonReport(file, test.tests)
    report.process(arguments, test.environment, nccl.code)
    return report
