"""THE column tables: name, Arrow type, unit and meaning of every column that is written.

Format history
    1 (0.1.0)  first.
    2 (0.2.0)  round, launch, aa_noise_band, mig, throttled, ecc_errors, actual_chunk_bytes.
    3 (0.2.0)  node_fingerprint.
    4 (0.2.0)  hosts, job_id, partial_launch, process_times_us.
    5 (0.2.0)  num_comms, comm_split, nic_retries, nic_congestion, nic_worst. Files of versions 3
               and 4 are read, with nulls in what came later.
    `calls`, `costs` and `decisions` count for themselves:
    1 (0.2.0)  first.

A file carries `dynamiccl.schema` and `dynamiccl.schema_version` in its Arrow metadata; a file with
another version is refused (SchemaMismatch), never reinterpreted.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 5
#: Of `calls`, which changes when the plugin does and not when sweeps do.
CALLS_VERSION: Final = 1
#: Of `costs`, NCCL's own cost model.
COSTS_VERSION: Final = 1
#: Of `decisions`, what NCCL ran for each size.
DECISIONS_VERSION: Final = 1
#: Keys of the Arrow schema metadata.
META_SCHEMA: Final = b"dynamiccl.schema"
META_VERSION: Final = b"dynamiccl.schema_version"
META_PROVENANCE: Final = b"dynamiccl.provenance"
#: Columns that are directories of the hive layout and not inside the files.
PARTITION_COLUMNS: Final = ("system", "sweep")
#: The launch profile of the user's untouched environment.
DEFAULT_PROFILE: Final = "default"
#: The sweep under which costs stand that a model of NCCL made, and no log.
MODELLED_SWEEP: Final = "modelled"
#: `interference_kind` of a collective measured alone.
QUIET: Final = "none"


class Status(StrEnum):
    """What became of a trial; every attempt is a row, never a gap."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    WRONG_VALUES = "wrong_values"


class Source(StrEnum):
    """Where a row comes from, so that a simulated one cannot be mistaken for a measured one."""

    NCCL_TESTS_TEXT = "nccl-tests-text"
    NCCL_TESTS_JSON = "nccl-tests-json"
    TIDY_CSV = "tidy-csv"
    SIMULATOR = "simulator"


class Statistic(StrEnum):
    """What `time_us` is over the calls of one launch."""

    MEAN = "mean"
    MEDIAN = "median"
    P50 = "p50"
    SINGLE = "single"
    MEAN_OF_RUNS = "mean_of_runs"
    MAX_OF_HALVES = "max_of_oop_ip"
    TARGET = "target"
    NONE = "none"


class DefaultScope(StrEnum):
    """Which default a row is to be compared with."""

    #: The default of the user's untouched environment.
    UNTOUCHED = "untouched"
    #: The default measured inside the row's own launch profile.
    PROFILE = "profile"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: Arrow type, unit ('' when it has none), meaning, and whether it may be null."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = True


def _text(name: str, meaning: str, *, nullable: bool = True) -> Column:
    return Column(name, pa.string(), "", meaning, nullable)


def _count(name: str, meaning: str, *, nullable: bool = True, unit: str = "") -> Column:
    return Column(name, pa.int64(), unit, meaning, nullable)


def _number(name: str, unit: str, meaning: str) -> Column:
    return Column(name, pa.float64(), unit, meaning)


def _flag(name: str, meaning: str, *, nullable: bool = True) -> Column:
    return Column(name, pa.bool_(), "", meaning, nullable)


_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

_IDENTITY: Final = (
    _text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    _text("sweep", "short name of the sweep or import (hive directory)", nullable=False),
    _text("trial", "stable id of workload, requested config and profile", nullable=False),
    _text(
        "run", "group of measurements made together; noise within it is correlated", nullable=False
    ),
    _count("repeat", "number of the independent repeat within the run", nullable=False),
    _count("round", "round of the sampling strategy; a cycle of an exhaustive sweep is one"),
    _text("launch", "id of the process that measured it, within the sweep"),
    _flag("partial_launch", "that process was killed with the sweep: what follows ran in another"),
    _text("hosts", "where the ranks ran, in the order of ranks, as Slurm writes hosts: n[01-04]"),
    _text("job_id", "Slurm's id of the job that it ran in"),
    Column("timestamp", _TIMESTAMP, "", "when the measurement began"),
    _text("source", "one of Source", nullable=False),
    _text("source_file", "file that the row was read from"),
    _count("source_line", "line in that file, counted from 1"),
)

_ENVIRONMENT: Final = (
    _text("system_description", "the system in the words of whoever measured it"),
    _text("gpu", "GPU model as the driver or the source names it"),
    _text("nccl_version", "dotted NCCL release"),
    _text("nccl_tests_version", "dotted nccl-tests release"),
    _text("driver_version", "NVIDIA driver"),
    _text("cuda_version", "CUDA runtime"),
    _count("num_hosts", "hosts by name; NCCL's own num_nodes may differ (NVL72)"),
    _number("compute_capability", "", "of the GPU, e.g. 9.0"),
    _count("nvlink_generation", "0 = no NVLink; null = unknown"),
    _count("nvlinks_per_gpu", "links from one GPU"),
    _flag("nvswitch", "an NVSwitch joins the GPUs of a node (NVLS needs it)"),
    _text("nic_kind", "infiniband, roce, efa, socket or none"),
    _number("nic_gbits_per_s", "Gbit/s", "line rate of one NIC"),
    _count("nics_per_node", "NICs that NCCL uses on one node"),
    _text("cpu_vendor", "intel, amd or arm"),
    _flag("exclusive_node", "nobody else ran on the nodes"),
    _flag("mig", "the ranks ran on MIG instances, parts of a GPU"),
    _text("node_fingerprint", "GPUs, MIG and NICs of each node, as the plugin names them"),
    _flag("throttled", "a GPU was slowed by heat or power meanwhile (telemetry)"),
    _count("ecc_errors", "uncorrected memory errors counted meanwhile (telemetry)"),
    _count("nic_retries", "packets that NICs lost, or sent again, meanwhile (telemetry)"),
    _count("nic_congestion", "packets marked or slowed for congestion meanwhile (telemetry)"),
    _text("nic_worst", "the NIC port with most of the retries, else of the congestion, and where"),
)

_WORKLOAD: Final = (
    _text("collective", "NCCL's spelling, e.g. AllReduce", nullable=False),
    _count("size_bytes", "NCCL's nBytes = the size column of nccl-tests", nullable=False, unit="B"),
    _text("datatype", "as nccl-tests prints it"),
    _text("reduction_op", "as nccl-tests prints it"),
    _count("root", "root rank; -1 where the collective has none"),
    _count("num_ranks", "ranks of the communicator"),
    _count("num_nodes", "NCCL's nNodes"),
    _count("ranks_per_node", "num_ranks / num_nodes"),
    _count("num_comms", "communicators of that shape that ran it at the same time; null = alone"),
    _text("comm_split", "how nccl-tests shared processes out to these, e.g. MOD 8"),
    _flag("in_place", "send and receive buffer are one"),
    _text("launch_profile", "named set of launch-time settings", nullable=False),
    _text("interference_kind", "what ran beside the collective; 'none' = alone", nullable=False),
    _number("interference_level", "", "strength of it; 0 = none, 1 = the network half as fast"),
)

_CONFIG: Final = (
    _flag("is_default", "nothing was requested: NCCL's own choice", nullable=False),
    _text("requested_algorithm", "null = AUTO"),
    _text("requested_protocol", "null = AUTO"),
    _count("requested_num_channels", "null = AUTO"),
    _count("requested_chunk_bytes", "null = AUTO", unit="B"),
    _text("actual_algorithm", "read back from NCCL's log; null = not read back"),
    _text("actual_protocol", "read back from NCCL's log; null = not read back"),
    _count("actual_num_channels", "read back from NCCL's log; null = not read back"),
    _count(
        "actual_chunk_bytes",
        "smallest chunk that NCCL was given by the plugin; null = its own",
        unit="B",
    ),
    _flag(
        "verified",
        "NCCL's log said what ran: in this launch, or in an untimed one of the same setting",
        nullable=False,
    ),
    _text("default_scope", "one of DefaultScope", nullable=False),
    _number("behaviour_probability", "", "P(config | workload, history) of the strategy's draw"),
    _number(
        "aa_noise_band",
        "",
        "A/A: by how much nine in ten pairs of NCCL's default differed in this setting and round, "
        "in one process and across two",
    ),
)

_RESULT: Final = (
    _text("status", "one of Status", nullable=False),
    _text("reason", "why the status is not ok, or a remark of the source"),
    _text("statistic", "one of Statistic", nullable=False),
    _number("time_us", "us", "time of one call"),
    _flag(
        "time_derived",
        "computed from the bandwidth, since the source gives no time",
        nullable=False,
    ),
    _number("algbw_gbytes_per_s", "GB/s", "size_bytes / time, as nccl-tests defines it"),
    _number("busbw_gbytes_per_s", "GB/s", "algbw times the collective's bus factor"),
    _count("wrong_values", "wrong results counted; null = not checked"),
    _number("time_min_us", "us", "per-iteration minimum (nccl-tests -I)"),
    _number("time_max_us", "us", "per-iteration maximum (nccl-tests -I)"),
    _number("time_p99_us", "us", "per-iteration 99th percentile (nccl-tests -I)"),
    _number("time_cv_percent", "%", "per-iteration coefficient of variation (nccl-tests -I)"),
    Column("iteration_times_us", pa.list_(pa.float64()), "us", "each iteration (nccl-tests -J -I)"),
    Column(
        "process_times_us",
        pa.list_(pa.float64()),
        "us",
        "of each process, the mean of its iterations (nccl-tests -J -I): others wait for the one "
        "with the least",
    ),
)

MEASUREMENT_COLUMNS: Final = (*_IDENTITY, *_ENVIRONMENT, *_WORKLOAD, *_CONFIG, *_RESULT)

_CALL_ENVIRONMENT: Final = tuple(
    column
    for column in _ENVIRONMENT
    if column.name
    not in {
        *("nccl_tests_version", "driver_version", "cuda_version", "throttled", "ecc_errors"),
        *("nic_retries", "nic_congestion", "nic_worst"),
    }
)

CALLS_COLUMNS: Final = (
    _text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    _text("sweep", "short name of the import (hive directory)", nullable=False),
    _text("run", "the job, as its launcher names it", nullable=False),
    _text("comm", "NCCL's id of the communicator, 16 hexadecimal digits", nullable=False),
    _count(
        "sequence",
        "number of the call among those of its collective on the communicator",
        nullable=False,
    ),
    _count("replay", "of a captured call: the number of the replay, from 0 on", nullable=False),
    Column("timestamp", _TIMESTAMP, "", "when the first rank put it on its stream", nullable=False),
    *_CALL_ENVIRONMENT,
    _text("plugin_version", "release of the plugin that recorded it"),
    _text("plugin_mode", "DYNAMICCL_MODE of the job"),
    _text("collective", "NCCL's spelling, e.g. AllReduce", nullable=False),
    _count("size_bytes", "NCCL's nBytes, as a tuner is asked about it", nullable=False, unit="B"),
    _text("datatype", "as nccl-tests prints it; NCCL makes int8 of AllGather and Broadcast"),
    _count("num_ranks", "ranks of the communicator", nullable=False),
    _count("num_nodes", "NCCL's nNodes", nullable=False),
    _count("ranks_per_node", "num_ranks / num_nodes"),
    _text("actual_algorithm", "what ran, as NCCL's profiler tells; null = a new one"),
    _text("actual_protocol", "what ran, as NCCL's profiler tells; null = a new one"),
    _count("actual_num_channels", "channels that were used", nullable=False),
    _count("actual_num_warps", "warps of a channel's kernel", nullable=False),
    _count(
        "table",
        "number of the table in force; 0 = NCCL's own choice everywhere, or a captured call, "
        "of whose table nobody knows",
        nullable=False,
    ),
    _flag(
        "decided",
        "our table asked for this config; else NCCL chose, or it is a captured call",
        nullable=False,
    ),
    _flag("probe", "NCCL's own choice, measured on purpose", nullable=False),
    _number("time_us", "us", "least of all ranks; null = not known from all of them"),
    _number("skew_us", "us", "by how much the slowest rank took longer; null as time_us"),
    _count("ranks_seen", "ranks whose record was there", nullable=False),
    _count("ranks_timed", "ranks whose GPU time is known", nullable=False),
    _flag("ranks_agree", "all ranks seen ran the same config on the same size", nullable=False),
    _flag("graph_captured", "part of a CUDA graph", nullable=False),
    _flag("sampled", "a rank took its GPU time", nullable=False),
    _flag("incomplete", "a rank lost a part of its GPU time", nullable=False),
)


def _schema(name: str, columns: tuple[Column, ...], version: int = SCHEMA_VERSION) -> pa.Schema:
    fields = [
        pa.field(
            c.name, c.type, nullable=c.nullable, metadata={"unit": c.unit, "meaning": c.meaning}
        )
        for c in columns
    ]
    return pa.schema(fields, metadata={META_SCHEMA: name, META_VERSION: str(version)})


MEASUREMENTS: Final = _schema("measurements", MEASUREMENT_COLUMNS)
CALLS: Final = _schema("calls", CALLS_COLUMNS, CALLS_VERSION)

#: Which cell of which group a line of NCCL's log is about.
_LOGGED: Final = (
    _text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    _text("sweep", "short name of the sweep or import (hive directory)", nullable=False),
    _text("source_file", "log that it was read from"),
    _text("gpu", "GPU model as the driver or the source names it"),
    _text("nccl_version", "dotted NCCL release"),
    _count("num_ranks", "ranks of the communicator"),
    _count("num_nodes", "NCCL's nNodes"),
    _count("ranks_per_node", "num_ranks / num_nodes"),
    _text("launch_profile", "named set of launch-time settings", nullable=False),
    _text("collective", "NCCL's spelling, e.g. AllReduce", nullable=False),
    _text("algorithm", "NCCL's spelling", nullable=False),
    _text("protocol", "NCCL's spelling", nullable=False),
)
COSTS_COLUMNS: Final = (
    *_LOGGED,
    _number("latency_us", "us", "as NCCL logs it, one decimal"),
    _number(
        "bandwidth_gbytes_per_s",
        "GB/s",
        "NCCL's bandwidth of the cell, one decimal; 0 = NCCL does not take the cell",
    ),
    _count("max_threads", "threads of a channel at most"),
)
COSTS: Final = _schema("costs", COSTS_COLUMNS, COSTS_VERSION)

DECISIONS_COLUMNS: Final = (
    *_LOGGED,
    _count("size_bytes", "NCCL's nBytes, of all ranks together", nullable=False, unit="B"),
    _count("num_channels", "channels that ran; null = NCCL before 2.24, which does not say"),
)
DECISIONS: Final = _schema("decisions", DECISIONS_COLUMNS, DECISIONS_VERSION)

#: Columns that make two rows the same task: what the job asked, where, and under which conditions.
TASK_COLUMNS: Final = (
    "system",
    "nccl_version",
    "gpu",
    "num_nodes",
    "ranks_per_node",
    "num_comms",
    "comm_split",
    "collective",
    "datatype",
    "size_bytes",
    "launch_profile",
    "in_place",
    "interference_kind",
    "interference_level",
)
#: Columns that make two rows the same requested config.
REQUESTED_COLUMNS: Final = (
    "requested_algorithm",
    "requested_protocol",
    "requested_num_channels",
    "requested_chunk_bytes",
)
