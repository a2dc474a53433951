"""The schema: name, Arrow type, unit and meaning of every column of every table.

`measurements` is what sweeps measured, `calls` and `steps` what jobs called, `costs` NCCL's own
cost model. A file carries `dynamiccl.schema` and `dynamiccl.schema_version` in its Arrow metadata.
One of an older version reads as null in columns that were added since, and any other is refused
(SchemaMismatch), never reinterpreted. Null always means that a value is not known.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 6
#: Version of `calls`, which changes independently of sweeps.
CALLS_VERSION: Final = 3
#: Version of `steps`, the steps of a job by its traces.
STEPS_VERSION: Final = 1
#: Version of `costs`, NCCL's own cost model.
COSTS_VERSION: Final = 1
#: Keys of the Arrow schema metadata.
META_SCHEMA: Final = b"dynamiccl.schema"
META_VERSION: Final = b"dynamiccl.schema_version"
META_PROVENANCE: Final = b"dynamiccl.provenance"
#: Columns that are directories of the hive layout and not inside the files.
PARTITION_COLUMNS: Final = ("system", "sweep")
#: The launch profile of the user's untouched environment.
DEFAULT_PROFILE: Final = "default"
#: The `sweep` of costs that were computed by a model of NCCL and not logged.
MODELLED_SWEEP: Final = "modelled"
#: `interference_kind` of a collective measured alone.
QUIET: Final = "none"


class Status(StrEnum):
    """Outcome of a trial; every attempt is a row, a failed one too."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    WRONG_VALUES = "wrong_values"


class Source(StrEnum):
    """Where a row comes from, so that a simulated row is never taken for a measured one."""

    NCCL_TESTS_TEXT = "nccl-tests-text"
    NCCL_TESTS_JSON = "nccl-tests-json"
    BESIDE = "beside"
    TIDY_CSV = "tidy-csv"
    SIMULATOR = "simulator"


class Statistic(StrEnum):
    """The statistic over the calls of one launch that `time_us` is."""

    MEAN = "mean"
    MEDIAN = "median"
    P50 = "p50"
    SINGLE = "single"
    MEAN_OF_RUNS = "mean_of_runs"
    MAX_OF_HALVES = "max_of_oop_ip"
    NONE = "none"


class DefaultScope(StrEnum):
    """The default that a row is compared with."""

    #: The default of the user's untouched environment.
    UNTOUCHED = "untouched"
    #: The default measured inside the row's own launch profile.
    PROFILE = "profile"


class CallSource(StrEnum):
    """The tool that recorded a call."""

    PLUGIN = "plugin"
    SIMULATOR = "simulator"
    INSPECTOR = "inspector"
    KINETO = "kineto"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: Arrow type, name, meaning, unit ('' = unitless), and whether it may be null."""

    type: pa.DataType
    name: str
    meaning: str
    unit: str = ""
    nullable: bool = True
    #: The version that added it, where files of the version before are still read.
    since: int = 0


text: Final = partial(Column, pa.string())
count: Final = partial(Column, pa.int64())
flag: Final = partial(Column, pa.bool_())


def number(name: str, unit: str, meaning: str, since: int = 0) -> Column:
    """A column of real numbers."""
    return Column(pa.float64(), name, meaning, unit, since=since)


TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

ENVIRONMENT: Final = (
    text("system_description", "the system in the words of whoever measured it"),
    text("gpu", "GPU model as the driver or the source names it"),
    text("nccl_version", "dotted NCCL release"),
    text("nccl_tests_version", "dotted nccl-tests release"),
    text("driver_version", "NVIDIA driver"),
    text("cuda_version", "CUDA runtime"),
    count("num_hosts", "hosts by name; NCCL's own num_nodes may differ (NVL72)"),
    number("compute_capability", "", "of the GPU, e.g. 9.0"),
    count("nvlink_generation", "0 = no NVLink; null = unknown"),
    count("nvlinks_per_gpu", "links from one GPU"),
    flag("nvswitch", "an NVSwitch joins the GPUs of a node (NVLS needs it)"),
    text("nic_kind", "infiniband, roce, efa, socket or none"),
    number("nic_gbits_per_s", "Gbit/s", "line rate of one NIC"),
    count("nics_per_node", "NICs that NCCL uses on one node"),
    text("cpu_vendor", "intel, amd or arm"),
    flag("exclusive_node", "nobody else ran on the nodes"),
    flag("mig", "the ranks ran on MIG instances, parts of a GPU"),
    text("node_fingerprint", "GPUs, MIG and NICs of each node, as the plugin names them"),
    flag("throttled", "a GPU was slowed by heat or power meanwhile (telemetry)"),
    count("ecc_errors", "uncorrected memory errors counted meanwhile (telemetry)"),
    count("nic_retries", "packets that NICs lost, or sent again, meanwhile (telemetry)"),
    count("nic_congestion", "packets marked or slowed for congestion meanwhile (telemetry)"),
    text("nic_worst", "the NIC port with most of the retries, else of the congestion, and where"),
)

_IDENTITY: Final = (
    text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    text("sweep", "short name of the sweep or import (hive directory)", nullable=False),
    text("trial", "stable id of workload, requested config and profile", nullable=False),
    text(
        "run", "group of measurements made together; noise within it is correlated", nullable=False
    ),
    count("repeat", "number of the independent repeat within the run", nullable=False),
    count("round", "round of the sampling strategy; a cycle of an exhaustive sweep is one"),
    text("launch", "id of the process that measured it, within the sweep"),
    flag("partial_launch", "that process was killed with the sweep: what follows ran in another"),
    text("hosts", "where the ranks ran, in the order of ranks, as Slurm writes hosts: n[01-04]"),
    text("job_id", "Slurm's id of the job that it ran in"),
    Column(TIMESTAMP, "timestamp", "when the measurement began"),
    text("source", "one of Source", nullable=False),
    text("source_file", "file that the row was read from"),
    count("source_line", "line in that file, counted from 1"),
)

_WORKLOAD: Final = (
    text("collective", "NCCL's spelling, e.g. AllReduce", nullable=False),
    count("size_bytes", "NCCL's nBytes = the size column of nccl-tests", nullable=False, unit="B"),
    text("datatype", "as nccl-tests prints it"),
    text("reduction_op", "as nccl-tests prints it"),
    count("root", "root rank; -1 where the collective has none"),
    count("num_ranks", "ranks of the communicator"),
    count("num_nodes", "NCCL's nNodes"),
    count("ranks_per_node", "num_ranks / num_nodes"),
    count("num_comms", "communicators of that shape that ran it at the same time; null = alone"),
    text("comm_split", "how nccl-tests shared processes out to these, e.g. MOD 8"),
    flag("in_place", "send and receive buffer are one"),
    text("launch_profile", "named set of launch-time settings", nullable=False),
    text("interference_kind", "what ran beside the collective; 'none' = alone", nullable=False),
    number("interference_level", "", "0 = none, 1 = the network half as fast; of matmul, the edge"),
)

_CONFIG: Final = (
    flag("is_default", "nothing was requested: NCCL's own choice", nullable=False),
    text("requested_algorithm", "null = AUTO"),
    text("requested_protocol", "null = AUTO"),
    count("requested_num_channels", "null = AUTO"),
    count("requested_chunk_bytes", "null = AUTO", unit="B"),
    text("actual_algorithm", "read back from NCCL's log; null = not read back"),
    text("actual_protocol", "read back from NCCL's log; null = not read back"),
    count("actual_num_channels", "read back from NCCL's log; null = not read back"),
    count(
        "actual_chunk_bytes",
        "smallest chunk that NCCL was given by the plugin; null = its own",
        unit="B",
    ),
    flag(
        "verified",
        "NCCL's log said what ran: in this launch, or in an untimed one of the same setting",
        nullable=False,
    ),
    text("default_scope", "one of DefaultScope", nullable=False),
    number("behaviour_probability", "", "P(config | workload, history) of the strategy's draw"),
    number(
        "aa_noise_band",
        "",
        "A/A: by how much nine in ten pairs of NCCL's default differed in this setting and round, "
        "in one process and across two",
    ),
)

_RESULT: Final = (
    text("status", "one of Status", nullable=False),
    text("reason", "why the status is not ok, or a remark of the source"),
    text("statistic", "one of Statistic", nullable=False),
    number("time_us", "us", "time of one call"),
    flag(
        "time_derived",
        "computed from the bandwidth, since the source gives no time",
        nullable=False,
    ),
    number("algbw_gbytes_per_s", "GB/s", "size_bytes / time, as nccl-tests defines it"),
    number("busbw_gbytes_per_s", "GB/s", "algbw times the collective's bus factor"),
    count("wrong_values", "wrong results counted; null = not checked"),
    number("time_min_us", "us", "per-iteration minimum (nccl-tests -I)"),
    number("time_max_us", "us", "per-iteration maximum (nccl-tests -I)"),
    number("time_p99_us", "us", "per-iteration 99th percentile (nccl-tests -I)"),
    number("time_cv_percent", "%", "per-iteration coefficient of variation (nccl-tests -I)"),
    Column(pa.list_(pa.float64()), "iteration_times_us", "each iteration (nccl-tests -J -I)", "us"),
    Column(
        pa.list_(pa.float64()),
        "process_times_us",
        "of each process, the mean of its iterations (nccl-tests -J -I): others wait for the one "
        "with the least",
        "us",
    ),
)

_beside = partial(number, since=6)
#: What a call and matrix products beside it took from each other (collect/beside.py, in the order
#: in which it prints them); null = not measured.
BESIDE_COLUMNS: Final = (
    _beside("compute_alone_tflops", "TFLOP/s", "rate of the products before and behind the calls"),
    _beside("compute_beside_tflops", "TFLOP/s", "rate of the products beside the calls"),
    _beside("compute_loss_us", "us", "what a call costs compute: period x (1 - beside / alone)"),
    _beside("compute_period_us", "us", "time of whole products beside the calls, for each call"),
    _beside("resident_share", "", "share of compute_period_us in which a call's kernel ran"),
    _beside("sm_clock_mhz", "MHz", "clock of the SMs beside the calls"),
    _beside("compute_aa_difference", "", "by how much the rates before and behind differ"),
)

_RUN: Final = (*_WORKLOAD, *_CONFIG, *_RESULT, *BESIDE_COLUMNS)
MEASUREMENT_COLUMNS: Final = (*_IDENTITY, *ENVIRONMENT, *_RUN)


_NOT_OF_CALLS: Final = frozenset(
    {
        *("nccl_tests_version", "driver_version", "cuda_version", "throttled", "ecc_errors"),
        *("nic_retries", "nic_congestion", "nic_worst"),
    }
)

CALLS_COLUMNS: Final = (
    text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    text("sweep", "short name of the import (hive directory)", nullable=False),
    text("source", "one of CallSource", nullable=False),
    text("source_file", "file that the row was read from; of several ranks, the first"),
    text("run", "the job, as its launcher names it", nullable=False),
    text("comm", "NCCL's id of the communicator, 16 hexadecimal digits"),
    text("group", "PyTorch's name of the process group, or the communicator's own name"),
    Column(pa.list_(pa.int64()), "group_ranks", "the job's ranks that are in the group"),
    count("sequence", "number of the call among those of its collective on the communicator"),
    count("group_sequence", "number of the call in its process group, as PyTorch counts"),
    count("replay", "of a captured call: the number of the replay, from 0 on"),
    count("step", "number of the training step in the trace"),
    Column(TIMESTAMP, "timestamp", "when the first rank put it on its stream, or began it"),
    *(column for column in ENVIRONMENT if column.name not in _NOT_OF_CALLS),
    text("plugin_version", "release of the plugin that recorded it"),
    text("plugin_mode", "DYNAMICCL_MODE of the job"),
    text("collective", "NCCL's spelling, e.g. AllReduce"),
    count("size_bytes", "NCCL's nBytes, as a tuner is asked about it", unit="B"),
    text("datatype", "as nccl-tests prints it; NCCL makes int8 of AllGather and Broadcast"),
    count("root", "root rank within the group; null where it has none, too"),
    count("num_ranks", "ranks of the communicator"),
    count("num_nodes", "NCCL's nNodes"),
    count("ranks_per_node", "num_ranks / num_nodes"),
    text("kernel", "name of the GPU kernel that ran; it names no algorithm"),
    flag("asks_tuner", "NCCL asks a tuner about such a call"),
    text("actual_algorithm", "what ran, as NCCL's profiler tells; null = a new one"),
    text("actual_protocol", "what ran, as NCCL's profiler tells; null = a new one"),
    count("actual_num_channels", "channels that were used"),
    count("actual_num_warps", "warps of a channel's kernel"),
    count("num_threads", "threads of a channel's kernel, as it was launched"),
    count(
        "table",
        "number of the table in force; 0 = NCCL's own choice everywhere, or a captured call, "
        "of whose table nobody knows",
    ),
    flag("decided", "our table asked for this config; else NCCL chose, or it is a captured call"),
    flag("probe", "NCCL's own choice, measured on purpose"),
    number("time_us", "us", "least of all ranks; null = not known from all of them"),
    number(
        "time_at_most_us",
        "us",
        "least of the ranks whose time is known: the call took no longer, since a rank's own time "
        "includes waiting for the others",
    ),
    number("skew_us", "us", "by how much the slowest rank took longer; null as time_us"),
    number(
        "exposed_us",
        "us",
        "part of the call in which the rank's GPU ran no compute kernel; least of the ranks known",
    ),
    number(
        "compute_ratio",
        "",
        "how long compute goes on from the begin of calls that follow each other, until it waits "
        "or the next such calls begin, over their time; below 1, it waits; least of the ranks",
        since=3,
    ),
    text("timing_source", "which clock: gpu, cpu (of the host, longer than the kernel), or other"),
    count("ranks_seen", "ranks whose record was there", nullable=False),
    count("ranks_timed", "ranks whose GPU time is known", nullable=False),
    flag("ranks_agree", "all ranks seen ran the same config on the same size"),
    flag("graph_captured", "part of a CUDA graph"),
    flag("sampled", "a rank took its GPU time"),
    flag("incomplete", "a rank lost a part of its GPU time"),
)

STEPS_COLUMNS: Final = (
    text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    text("sweep", "short name of the import (hive directory)", nullable=False),
    text("source", "one of CallSource", nullable=False),
    text("source_file", "file that the row was read from", nullable=False),
    text("run", "the job, as its launcher names it", nullable=False),
    count("rank", "the job's rank that the trace is of"),
    count("step", "number of the training step in the trace; 0 where it marks none"),
    Column(TIMESTAMP, "timestamp", "when the step began"),
    number("step_us", "us", "from the beginning of the step to its end"),
    number("compute_us", "us", "in which the GPU ran a kernel that is no communication"),
    number("communication_us", "us", "in which the GPU ran a communication kernel"),
    number("exposed_us", "us", "of communication_us, in which no other kernel ran"),
    number("idle_us", "us", "of the step, in which the GPU ran no kernel"),
)

COSTS_COLUMNS: Final = (
    text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    text("sweep", "short name of the sweep or import (hive directory)", nullable=False),
    text("source_file", "log that it was read from"),
    text("gpu", "GPU model as the driver or the source names it"),
    text("nccl_version", "dotted NCCL release"),
    count("num_ranks", "ranks of the communicator"),
    count("num_nodes", "NCCL's nNodes"),
    count("ranks_per_node", "num_ranks / num_nodes"),
    text("launch_profile", "named set of launch-time settings", nullable=False),
    text("collective", "NCCL's spelling, e.g. AllReduce", nullable=False),
    text("algorithm", "NCCL's spelling", nullable=False),
    text("protocol", "NCCL's spelling", nullable=False),
    number("latency_us", "us", "as NCCL logs it, one decimal"),
    number(
        "bandwidth_gbytes_per_s",
        "GB/s",
        "NCCL's bandwidth of the cell, one decimal; 0 = NCCL does not take the cell",
    ),
    count("max_threads", "threads of a channel at most; of no use, and null in newer files"),
)


def _schema(name: str, columns: tuple[Column, ...], version: int = SCHEMA_VERSION) -> pa.Schema:
    fields = [
        pa.field(
            c.name, c.type, nullable=c.nullable, metadata={"unit": c.unit, "meaning": c.meaning}
        )
        for c in columns
    ]
    return pa.schema(fields, metadata={META_SCHEMA: name, META_VERSION: str(version)})


#: By schema, the columns that an older version may lack, and since when they are there.
ADDED: Final = {
    name: {column.name: column.since for column in columns if column.since}
    for name, columns in (("measurements", MEASUREMENT_COLUMNS), ("calls", CALLS_COLUMNS))
}
MEASUREMENTS: Final = _schema("measurements", MEASUREMENT_COLUMNS)
CALLS: Final = _schema("calls", CALLS_COLUMNS, CALLS_VERSION)
STEPS: Final = _schema("steps", STEPS_COLUMNS, STEPS_VERSION)
COSTS: Final = _schema("costs", COSTS_COLUMNS, COSTS_VERSION)

#: Columns that make two rows the same task: what the job asked, where, and under which conditions.
#: In place and out of place are two measurements of one task.
TASK_COLUMNS: Final = (
    *("system", "nccl_version", "gpu", "num_nodes", "ranks_per_node", "num_comms", "comm_split"),
    *("collective", "datatype", "size_bytes", "launch_profile"),
    *("interference_kind", "interference_level"),
)
#: Columns that make two rows the same requested config.
REQUESTED_COLUMNS: Final = (
    *("requested_algorithm", "requested_protocol"),
    *("requested_num_channels", "requested_chunk_bytes"),
)
