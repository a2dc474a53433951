"""Small hand-made traces after the formats' sources, and helpers to read them."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from dynamiccl.collect.imports import ImportOptions, recognised
from dynamiccl.collect.traces import SIGNS, Traces, read_traces


def read(*paths: Path, **known: Any) -> Traces:
    """The traces as one import of a job, of which something could be read."""
    reports = recognised(paths, ImportOptions()).files
    traces = [report for report in reports if report.format in SIGNS]
    found = read_traces(traces, system="box", sweep="job", **known)
    if not found.calls.num_rows and (error := found.reports[0].failure):
        raise error
    return found


def calls_of(*paths: Path, **known: Any) -> pl.DataFrame:
    """The calls alone."""
    return pl.DataFrame(read(*paths, **known).calls)


def inspector_line(
    rank: int,
    number: int,
    time_us: float,
    *,
    version: str = "v4.0",
    header: Mapping[str, Any] | None = None,
    **record: Any,
) -> dict[str, Any]:
    """One line of formats 4.0 to 4.2, with a header of its own."""
    perf = {
        "coll": "AllReduce",
        "coll_sn": number,
        "coll_msg_size_bytes": 1 << 20,
        "coll_exec_time_us": time_us,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 1.0,
        "coll_busbw_gbs": 1.0,
        **record,
    }
    told = {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 2, "nnodes": 1, **(header or {})}
    metadata = {
        "inspector_output_format_version": version,
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1_750_000_000_000_000,
        "hostname": "n01",
        "pid": 17,
    }
    return {"header": told, "metadata": metadata, "coll_perf": perf}


def write_lines(path: Path, *documents: object) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in documents), encoding="utf-8")
    return path


class Chrome:
    """A chrome trace of one rank, event by event; moments are us from its beginning."""

    def __init__(self, rank: int = 0, world: int = 2) -> None:
        self.events: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.info |= {"pg_count": 1, "nccl_version": "2.27.5"}
        self.info["pg_config"] = [
            {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": [*range(world)]}
        ]
        self._ids = 100

    def event(self, cat: str, name: str, at: float, dur: float, tid: int = 1, **args: Any) -> None:
        one = {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": at, "dur": dur}
        self.events.append({**one, "args": args})

    def step(self, number: int, at: float, dur: float) -> None:
        self.event("user_annotation", f"ProfilerStep#{number}", at, dur)

    def compute(self, at: float, dur: float, stream: int = 7) -> None:
        self.event("kernel", "void gemm<float>()", at, dur, stream, device=0, correlation=-5)

    def collective(
        self,
        at: float,
        dur: float,
        kernel: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)",
        *,
        own: bool = False,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """An operation at `at - 10`, its launch, and a kernel of `dur` from `at` on."""
        self._ids += 10
        arguments = {
            "Collective name": "allreduce",
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "Group size": self.info["world_size"],
            "dtype": "Float",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            **(told or {}),
        }
        external = {"External id": self._ids}
        self.event("cpu_op", "record_param_comms", at - 10, 8, **external, **arguments)
        external["correlation"] = 1000 + self._ids
        self.event("cuda_runtime", "cudaLaunchKernelExC", at - 8, 2, **external)
        place = {"device": 0, "grid": [8, 1, 1], "block": [544, 1, 1]}
        more = arguments if own else {}
        self.event("kernel", kernel, at, dur, 20, **place, **external, **more)

    def write(self, path: Path) -> Path:
        """As PyTorch writes it: over lines, compressed where the name says so."""
        head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H100"}]}
        head |= {"distributedInfo": self.info, "baseTimeNanoseconds": 1_700_000_000_000_000_000}
        text = json.dumps({**head, "traceEvents": self.events}, indent=1)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path
