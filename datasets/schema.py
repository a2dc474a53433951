"""The schema: name, Arrow type, unit and meaning of every column of every table.

Format history
    1 (0.1.0)  first.
    2 (0.2.0)  round, launch, aa_noise_band, mig, throttled, ecc_errors, actual_chunk_bytes.
    3 (0.2.0)  node_fingerprint.
    4 (0.2.0)  hosts, job_id, partial_launch, process_times_us.
    5 (0.2.0)  num_comms, comm_split, nic_retries, nic_congestion, nic_worst. Files of versions 3
               and 4 are read, with nulls in what came later.
    6 (0.2.0)  compute_*, resident_share, sm_clock_mhz. Files of version 5 are read, too.
    `calls`, `steps` and `costs` count for themselves:
    1 (0.2.0)  first.
    2 (0.2.0)  `calls`: what a trace does not know may be null; source, source_file, group,
               group_ranks, group_sequence, step, root, kernel, asks_tuner, num_threads,
               time_at_most_us, exposed_us, timing_source. Files of version 1 are read.
    3 (0.2.0)  `calls`: compute_ratio. Files of versions 1 and 2 are read.

A file carries `dynamiccl.schema` and `dynamiccl.schema_version` in its Arrow metadata; a file with
another version is refused (SchemaMismatch), never reinterpreted.
"""

from enum import StrEnum
from typing import Final

import pyarrow as pa

from dynamiccl.datasets.call_columns import CALLS_COLUMNS, STEPS_COLUMNS
from dynamiccl.datasets.columns import ENVIRONMENT, TIMESTAMP, Column, count, flag, number, text

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
    Column("timestamp", TIMESTAMP, "", "when the measurement began"),
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
    Column("iteration_times_us", pa.list_(pa.float64()), "us", "each iteration (nccl-tests -J -I)"),
    Column(
        "process_times_us",
        pa.list_(pa.float64()),
        "us",
        "of each process, the mean of its iterations (nccl-tests -J -I): others wait for the one "
        "with the least",
    ),
)

#: What a call and matrix products beside it took from each other (collect/beside.py, in the order
#: in which it prints them); null = not measured.
BESIDE_COLUMNS: Final = (
    number("compute_alone_tflops", "TFLOP/s", "rate of the products before and behind the calls"),
    number("compute_beside_tflops", "TFLOP/s", "rate of the products beside the calls"),
    number("compute_loss_us", "us", "what a call costs compute: period x (1 - beside / alone)"),
    number("compute_period_us", "us", "time of whole products beside the calls, for each call"),
    number("resident_share", "", "share of compute_period_us in which a call's kernel ran"),
    number("sm_clock_mhz", "MHz", "clock of the SMs beside the calls"),
    number("compute_aa_difference", "", "by how much the rates before and behind differ"),
)

_RUN: Final = (*_WORKLOAD, *_CONFIG, *_RESULT, *BESIDE_COLUMNS)
MEASUREMENT_COLUMNS: Final = (*_IDENTITY, *ENVIRONMENT, *_RUN)


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
STEPS: Final = _schema("steps", STEPS_COLUMNS, STEPS_VERSION)

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
