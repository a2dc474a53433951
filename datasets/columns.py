"""What describes a table's column, and the environment columns that several tables share."""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column: Arrow type, unit ('' = unitless), meaning, and whether it may be null."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = True


def text(name: str, meaning: str, *, nullable: bool = True) -> Column:
    """A column of text."""
    return Column(name, pa.string(), "", meaning, nullable)


def count(name: str, meaning: str, *, nullable: bool = True, unit: str = "") -> Column:
    """A column of whole numbers."""
    return Column(name, pa.int64(), unit, meaning, nullable)


def number(name: str, unit: str, meaning: str) -> Column:
    """A column of real numbers."""
    return Column(name, pa.float64(), unit, meaning)


def flag(name: str, meaning: str, *, nullable: bool = True) -> Column:
    """A column of yes or no."""
    return Column(name, pa.bool_(), "", meaning, nullable)


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
