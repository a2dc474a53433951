"""Columns of the table `calls`, one row a collective call of a job, and of `steps`.

What recorded a call knows only a part of it: our plugin all but the surroundings, a PyTorch trace
neither NCCL's choice nor the nodes. Null always means that it is not known.
"""

from enum import StrEnum
from typing import Final

import pyarrow as pa

from dynamiccl.datasets.columns import ENVIRONMENT, TIMESTAMP, Column, count, flag, number, text


class CallSource(StrEnum):
    """The tool that recorded a call."""

    PLUGIN = "plugin"
    SIMULATOR = "simulator"
    INSPECTOR = "inspector"
    KINETO = "kineto"


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
    Column("group_ranks", pa.list_(pa.int64()), "", "the job's ranks that are in the group"),
    count("sequence", "number of the call among those of its collective on the communicator"),
    count("group_sequence", "number of the call in its process group, as PyTorch counts"),
    count("replay", "of a captured call: the number of the replay, from 0 on"),
    count("step", "number of the training step in the trace"),
    Column("timestamp", TIMESTAMP, "", "when the first rank put it on its stream, or began it"),
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
    ),
    text("timing_source", "which clock: gpu, cpu (of the host, longer than the kernel), or other"),
    count("ranks_seen", "ranks whose record was there", nullable=False),
    count("ranks_timed", "ranks whose GPU time is known", nullable=False),
    flag("ranks_agree", "all ranks seen ran the same config on the same size"),
    flag("graph_captured", "part of a CUDA graph"),
    flag("sampled", "a rank took its GPU time"),
    flag("incomplete", "a rank lost a part of its GPU time"),
)

#: What versions 3 and 2 added, and a file of an older version is read with nulls in.
CALLS_ADDED_IN_3: Final = frozenset({"compute_ratio"})
CALLS_ADDED_IN_2: Final = frozenset(
    {
        *("source", "source_file", "group", "group_ranks", "group_sequence", "step", "root"),
        *("kernel", "asks_tuner", "num_threads", "time_at_most_us", "exposed_us", "timing_source"),
    }
)

STEPS_COLUMNS: Final = (
    text("system", "short name of the cluster or machine (hive directory)", nullable=False),
    text("sweep", "short name of the import (hive directory)", nullable=False),
    text("source", "one of CallSource", nullable=False),
    text("source_file", "file that the row was read from", nullable=False),
    text("run", "the job, as its launcher names it", nullable=False),
    count("rank", "the job's rank that the trace is of"),
    count("step", "number of the training step in the trace; 0 where it marks none"),
    Column("timestamp", TIMESTAMP, "", "when the step began"),
    number("step_us", "us", "from the beginning of the step to its end"),
    number("compute_us", "us", "in which the GPU ran a kernel that is no communication"),
    number("communication_us", "us", "in which the GPU ran a communication kernel"),
    number("exposed_us", "us", "of communication_us, in which no other kernel ran"),
    number("idle_us", "us", "of the step, in which the GPU ran no kernel"),
)
