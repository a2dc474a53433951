"""The schema: name, Arrow type, unit and meaning of every column of every table.

A file's Arrow metadata has the schema and its version. Older files read as null in added columns;
all others are refused (SchemaMismatch). Null always means unknown.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Final

import pyarrow as pa

#: Of `measurements`; each table has its own.
SCHEMA_VERSION: Final = 6
META_SCHEMA: Final = b"dynamiccl.schema"
META_VERSION: Final = b"dynamiccl.schema_version"
META_PROVENANCE: Final = b"dynamiccl.provenance"
#: Directories of the hive layout, not inside the files.
PARTITION_COLUMNS: Final = ("system", "sweep")
#: The user's untouched environment.
DEFAULT_PROFILE: Final = "default"
#: `sweep` of costs that a model of NCCL computed.
MODELLED_SWEEP: Final = "modelled"
#: `interference_kind` of a collective measured alone.
QUIET: Final = "none"


class Status(StrEnum):
    """Every attempt is a row, a failed one too."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    WRONG_VALUES = "wrong_values"


class Source(StrEnum):
    """Where a row comes from: no simulated row is taken for a measured one."""

    NCCL_TESTS_TEXT = "nccl-tests-text"
    NCCL_TESTS_JSON = "nccl-tests-json"
    BESIDE = "beside"
    TIDY_CSV = "tidy-csv"
    SIMULATOR = "simulator"


class Statistic(StrEnum):
    """What `time_us` is of the calls of one launch."""

    MEAN = "mean"
    MEDIAN = "median"
    P50 = "p50"
    SINGLE = "single"
    MEAN_OF_RUNS = "mean_of_runs"
    MAX_OF_HALVES = "max_of_oop_ip"
    NONE = "none"


class DefaultScope(StrEnum):
    """The default that a row is compared with: the user's own, or its launch profile's."""

    UNTOUCHED = "untouched"
    PROFILE = "profile"


class CallSource(StrEnum):
    """The tool that recorded a call."""

    PLUGIN = "plugin"
    SIMULATOR = "simulator"
    INSPECTOR = "inspector"
    KINETO = "kineto"


UNITS: Final = {
    "_us": "us",
    "_percent": "%",
    "_bytes": "B",
    "_gbytes_per_s": "GB/s",
    "_gbits_per_s": "Gbit/s",
    "_tflops": "TFLOP/s",
    "_mhz": "MHz",
}


def _column(kind: pa.DataType, name: str, meaning: str, *, needed: bool = False) -> pa.Field:
    unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
    told = {"unit": unit, "meaning": meaning}
    return pa.field(name, kind, nullable=not needed, metadata=told)


text: Final = partial(_column, pa.string())
must: Final = partial(text, needed=True)
count: Final = partial(_column, pa.int64())
counted: Final = partial(count, needed=True)
number: Final = partial(_column, pa.float64())
flag: Final = partial(_column, pa.bool_())
sure: Final = partial(flag, needed=True)
moment: Final = partial(_column, pa.timestamp("us", tz="UTC"))
numbers: Final = partial(_column, pa.list_(pa.float64()))

_SYSTEM: Final = must("system", "short name of the cluster or machine (hive directory)")
_SWEEP: Final = must("sweep", "short name of the sweep or import (hive directory)")
_GPU: Final = text("gpu", "GPU model as the driver or the source names it")
_NCCL: Final = text("nccl_version", "dotted NCCL release")
_COLLECTIVE: Final = must("collective", "NCCL's spelling, e.g. AllReduce")
_PROFILE: Final = must("launch_profile", "named set of launch-time settings")
_GROUP: Final = (
    count("num_ranks", "ranks of the communicator"),
    count("num_nodes", "NCCL's nNodes"),
    count("ranks_per_node", "num_ranks / num_nodes"),
)
_MACHINE: Final = (
    text("system_description", "the system in the words of whoever measured it"),
    _GPU,
    _NCCL,
    count("num_hosts", "hosts by name; NCCL's own num_nodes may differ (NVL72)"),
    number("compute_capability", "of the GPU, e.g. 9.0"),
    count("nvlink_generation", "0 = no NVLink; null = unknown"),
    count("nvlinks_per_gpu", "links from one GPU"),
    flag("nvswitch", "an NVSwitch joins the GPUs of a node (NVLS needs it)"),
    text("nic_kind", "infiniband, roce, efa, socket or none"),
    number("nic_gbits_per_s", "line rate of one NIC"),
    count("nics_per_node", "NICs that NCCL uses on one node"),
    text("cpu_vendor", "intel, amd or arm"),
    flag("exclusive_node", "nobody else ran on the nodes"),
    flag("mig", "the ranks ran on MIG instances, parts of a GPU"),
    text("node_fingerprint", "GPUs, MIG and NICs of each node, as the plugin names them"),
)

_IDENTITY: Final = (
    _SYSTEM,
    _SWEEP,
    must("trial", "stable id of workload, requested config and profile"),
    must("run", "group of measurements made together, whose noise is correlated"),
    counted("repeat", "number of the independent repeat within the run"),
    count("round", "round of the sampling strategy; a cycle of an exhaustive sweep is one"),
    text("launch", "id of the process that measured it, within the sweep"),
    flag("partial_launch", "that process was killed with the sweep: what follows ran in another"),
    text("hosts", "where the ranks ran, in the order of ranks, as Slurm writes hosts: n[01-04]"),
    text("job_id", "Slurm's id of the job that it ran in"),
    moment("timestamp", "when the measurement began"),
    must("source", "one of Source"),
    text("source_file", "file that the row was read from"),
    count("source_line", "line in that file, counted from 1"),
)
_ENVIRONMENT: Final = (
    *_MACHINE,
    text("nccl_tests_version", "dotted nccl-tests release"),
    text("driver_version", "NVIDIA driver"),
    text("cuda_version", "CUDA runtime"),
    flag("throttled", "a GPU was slowed by heat or power meanwhile (telemetry)"),
    count("ecc_errors", "uncorrected memory errors counted meanwhile (telemetry)"),
    count("nic_retries", "packets that NICs lost, or sent again, meanwhile (telemetry)"),
    count("nic_congestion", "packets marked or slowed for congestion meanwhile (telemetry)"),
    text("nic_worst", "the NIC port with most of the retries, else of the congestion, and where"),
)
_WORKLOAD: Final = (
    _COLLECTIVE,
    counted("size_bytes", "NCCL's nBytes = the size column of nccl-tests"),
    text("datatype", "as nccl-tests prints it"),
    text("reduction_op", "as nccl-tests prints it"),
    count("root", "root rank; -1 where the collective has none"),
    *_GROUP,
    count("num_comms", "communicators of that shape that ran it at the same time; null = alone"),
    text("comm_split", "how nccl-tests shared processes out to these, e.g. MOD 8"),
    flag("in_place", "send and receive buffer are one"),
    _PROFILE,
    must("interference_kind", "what ran beside the collective; 'none' = alone"),
    number("interference_level", "0 = none, 1 = the network half as fast; of matmul, the edge"),
)
_CONFIG: Final = (
    sure("is_default", "nothing was requested: NCCL's own choice"),
    text("requested_algorithm", "null = AUTO"),
    text("requested_protocol", "null = AUTO"),
    count("requested_num_channels", "null = AUTO"),
    count("requested_chunk_bytes", "null = AUTO"),
    text("actual_algorithm", "read back from NCCL's log; null = not read back"),
    text("actual_protocol", "read back from NCCL's log; null = not read back"),
    count("actual_num_channels", "read back from NCCL's log; null = not read back"),
    count("actual_chunk_bytes", "smallest that the plugin gave to NCCL; null = NCCL's own"),
    sure("verified", "NCCL's log said what ran: here, or in an untimed launch of the same setting"),
    must("default_scope", "one of DefaultScope"),
    number("behaviour_probability", "P(config | workload, history) of the strategy's draw"),
    #: In one process and across two.
    number("aa_noise_band", "what nine in ten pairs of defaults of a setting and round differ by"),
)
_RESULT: Final = (
    must("status", "one of Status"),
    text("reason", "why the status is not ok, or a remark of the source"),
    must("statistic", "one of Statistic"),
    number("time_us", "time of one call"),
    sure("time_derived", "computed from the bandwidth, since the source gives no time"),
    number("algbw_gbytes_per_s", "size_bytes / time, as nccl-tests defines it"),
    number("busbw_gbytes_per_s", "algbw times the collective's bus factor"),
    count("wrong_values", "wrong results counted; null = not checked"),
    number("time_min_us", "per-iteration minimum (nccl-tests -I)"),
    number("time_max_us", "per-iteration maximum (nccl-tests -I)"),
    number("time_p99_us", "per-iteration 99th percentile (nccl-tests -I)"),
    number("time_cv_percent", "per-iteration coefficient of variation (nccl-tests -I)"),
    numbers("iteration_times_us", "each iteration (nccl-tests -J -I)"),
    #: The others wait for the one with the least.
    numbers("process_times_us", "of each process, the mean of its iterations (nccl-tests -J -I)"),
)
_BESIDE: Final = (
    number("compute_alone_tflops", "rate of the products before and behind the calls"),
    number("compute_beside_tflops", "rate of the products beside the calls"),
    number("compute_loss_us", "what a call costs compute: period x (1 - beside / alone)"),
    number("compute_period_us", "time of whole products beside the calls, for each call"),
    number("resident_share", "share of compute_period_us in which a call's kernel ran"),
    number("sm_clock_mhz", "clock of the SMs beside the calls"),
    number("compute_aa_difference", "by how much the rates before and behind differ"),
)
#: Between a call and matrix products, in the order in which collect/beside.py prints them.
BESIDE_COLUMNS: Final = tuple(column.name for column in _BESIDE)
_CALLS: Final = (
    _SYSTEM,
    _SWEEP,
    must("source", "one of CallSource"),
    text("source_file", "file that the row was read from; of several ranks, the first"),
    must("run", "the job, as its launcher names it"),
    text("comm", "NCCL's id of the communicator, 16 hexadecimal digits"),
    text("group", "PyTorch's name of the process group, or the communicator's own name"),
    _column(pa.list_(pa.int64()), "group_ranks", "the job's ranks that are in the group"),
    count("sequence", "number of the call among those of its collective on the communicator"),
    count("group_sequence", "number of the call in its process group, as PyTorch counts"),
    count("replay", "of a captured call: the number of the replay, from 0 on"),
    count("step", "number of the training step in the trace"),
    moment("timestamp", "when the first rank put it on its stream, or began it"),
    *_MACHINE,
    text("plugin_version", "release of the plugin that recorded it"),
    text("plugin_mode", "DYNAMICCL_MODE of the job"),
    text("collective", "NCCL's spelling, e.g. AllReduce"),
    count("size_bytes", "NCCL's nBytes, as a tuner is asked about it"),
    text("datatype", "as nccl-tests prints it; NCCL makes int8 of AllGather and Broadcast"),
    count("root", "root rank within the group; null where it has none, too"),
    *_GROUP,
    text("kernel", "name of the GPU kernel that ran; it names no algorithm"),
    flag("asks_tuner", "NCCL asks a tuner about such a call"),
    text("actual_algorithm", "what ran, as NCCL's profiler tells; null = a new one"),
    text("actual_protocol", "what ran, as NCCL's profiler tells; null = a new one"),
    count("actual_num_channels", "channels that were used"),
    count("actual_num_warps", "warps of a channel's kernel"),
    count("num_threads", "threads of a channel's kernel, as it was launched"),
    #: Of a captured call nobody knows the table.
    count("table", "number of the table in force; 0 = NCCL's own choice, or a captured call"),
    flag("decided", "our table asked for this config; else NCCL chose, or it is a captured call"),
    flag("probe", "NCCL's own choice, measured on purpose"),
    number("time_us", "least of all ranks; null = not known from all of them"),
    #: A rank's own time includes waiting for the others.
    number("time_at_most_us", "least of the ranks whose time is known: it took no longer"),
    number("skew_us", "by how much the slowest rank took longer; null as time_us"),
    number("exposed_us", "part in which the rank's GPU ran no compute kernel; least of the ranks"),
    #: Below 1 compute waits; of calls that follow each other, from their begin to that of the next.
    number("compute_ratio", "how long compute goes on from a call's begin, over its time; least"),
    text("timing_source", "which clock: gpu, cpu (of the host, longer than the kernel), or other"),
    counted("ranks_seen", "ranks whose record was there"),
    counted("ranks_timed", "ranks whose GPU time is known"),
    flag("ranks_agree", "all ranks seen ran the same config on the same size"),
    flag("graph_captured", "part of a CUDA graph"),
    flag("sampled", "a rank took its GPU time"),
    flag("incomplete", "a rank lost a part of its GPU time"),
)
_STEPS: Final = (
    _SYSTEM,
    _SWEEP,
    must("source", "one of CallSource"),
    must("source_file", "file that the row was read from"),
    must("run", "the job, as its launcher names it"),
    count("rank", "the job's rank that the trace is of"),
    count("step", "number of the training step in the trace; 0 where it marks none"),
    moment("timestamp", "when the step began"),
    number("step_us", "from the beginning of the step to its end"),
    number("compute_us", "in which the GPU ran a kernel that is no communication"),
    number("communication_us", "in which the GPU ran a communication kernel"),
    number("exposed_us", "of communication_us, in which no other kernel ran"),
    number("idle_us", "of the step, in which the GPU ran no kernel"),
)
_COSTS: Final = (
    _SYSTEM,
    _SWEEP,
    text("source_file", "log that it was read from"),
    _GPU,
    _NCCL,
    *_GROUP,
    _PROFILE,
    _COLLECTIVE,
    must("algorithm", "NCCL's spelling"),
    must("protocol", "NCCL's spelling"),
    number("latency_us", "as NCCL logs it, one decimal"),
    #: 0: NCCL does not take the cell.
    number("bandwidth_gbytes_per_s", "NCCL's bandwidth of the cell, one decimal"),
    count("max_threads", "threads of a channel at most; of no use, and null in newer files"),
)


def _schema(name: str, version: int, *columns: pa.Field) -> pa.Schema:
    return pa.schema(columns, metadata={META_SCHEMA: name, META_VERSION: str(version)})


_RUN: Final = (*_WORKLOAD, *_CONFIG, *_RESULT, *_BESIDE)
MEASUREMENTS: Final = _schema("measurements", SCHEMA_VERSION, *_IDENTITY, *_ENVIRONMENT, *_RUN)
CALLS: Final = _schema("calls", 3, *_CALLS)
STEPS: Final = _schema("steps", 1, *_STEPS)
COSTS: Final = _schema("costs", 1, *_COSTS)
SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    "measurements": MEASUREMENTS,
    "calls": CALLS,
    "steps": STEPS,
    "costs": COSTS,
}
#: Columns that older versions may lack, and since which version they exist.
ADDED: Final = {"measurements": dict.fromkeys(BESIDE_COLUMNS, 6), "calls": {"compute_ratio": 3}}

#: Rows of one task: what was asked, where, under which conditions; in place or not.
TASK_COLUMNS: Final = (
    *("system", "nccl_version", "gpu", "num_nodes", "ranks_per_node", "num_comms", "comm_split"),
    *("collective", "datatype", "size_bytes", "launch_profile"),
    *("interference_kind", "interference_level"),
)
REQUESTED_COLUMNS: Final = (
    *("requested_algorithm", "requested_protocol"),
    *("requested_num_channels", "requested_chunk_bytes"),
)
