"""What is read: every counter's name, unit and kind, and what the kinds mean for a reader.

A GAUGE is what was true at that moment. A TOTAL only grows (bytes, errors) from a start that nobody
knows, and starts again at a driver reload or wraps: it is kept raw, as read, and only differences
mean something. A STATE is a mode or a set of bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """How a counter's values are to be read."""

    GAUGE = "gauge"
    TOTAL = "total"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter: its kind, its unit ('' for a count or bits), and what it says."""

    kind: Kind
    unit: str
    meaning: str


CLOCK_REASONS: Final = "clock_event_reasons"
ECC_UNCORRECTED: Final = "ecc_uncorrected_errors"
MIG_MODE: Final = "mig_mode"

#: NVML field ids (nvml.h, NVML_FI_DEV_*) of what has no function of its own: id, scope, factor to
#: the unit. Scope 2^32-1 is the sum over all links. The first that a driver answers is taken.
ALL_LINKS: Final = 0xFFFFFFFF
NVLINK_BYTES: Final[Mapping[str, tuple[tuple[int, int, int], ...]]] = {
    # NVLINK_THROUGHPUT_DATA_TX/RX: KiB, without overhead; NVLink 5: NVLINK_COUNT_XMIT/RCV_BYTES.
    "nvlink_tx_bytes": ((138, ALL_LINKS, 1024), (202, ALL_LINKS, 1)),
    "nvlink_rx_bytes": ((139, ALL_LINKS, 1024), (204, ALL_LINKS, 1)),
}
NVLINK_ERRORS: Final[Mapping[str, tuple[tuple[int, int, int], ...]]] = {
    # *_ERROR_COUNT_TOTAL; NVLink 5: NVLINK_COUNT_{RCV_ERRORS,LINK_RECOVERY_EVENTS}.
    "nvlink_crc_flit_errors": ((38, 0, 1), (208, ALL_LINKS, 1)),
    "nvlink_replay_errors": ((52, 0, 1),),
    "nvlink_recovery_errors": ((59, 0, 1), (215, ALL_LINKS, 1)),
    "nvlink_ecc_data_errors": ((160, 0, 1),),
}

COUNTERS: Final[Mapping[str, Counter]] = {
    "sm_clock_mhz": Counter(Kind.GAUGE, "MHz", "clock of the multiprocessors"),
    "memory_clock_mhz": Counter(Kind.GAUGE, "MHz", "clock of the memory"),
    "power_w": Counter(Kind.GAUGE, "W", "power drawn by the board (averaged by the driver)"),
    "temperature_c": Counter(Kind.GAUGE, "°C", "temperature of the GPU"),
    "utilization_percent": Counter(Kind.GAUGE, "%", "share of time that a kernel ran"),
    "memory_utilization_percent": Counter(Kind.GAUGE, "%", "share of time that memory was busy"),
    CLOCK_REASONS: Counter(Kind.STATE, "", "bits of ClockReason"),
    ECC_UNCORRECTED: Counter(Kind.TOTAL, "", "uncorrected memory errors since the driver loaded"),
    MIG_MODE: Counter(Kind.STATE, "", "1 = the GPU is split into MIG instances"),
    "pcie_tx_kbytes_per_s": Counter(Kind.GAUGE, "kB/s", "PCIe, over 20 ms, to the host"),
    "pcie_rx_kbytes_per_s": Counter(Kind.GAUGE, "kB/s", "PCIe, over 20 ms, from the host"),
    "nvlink_tx_bytes": Counter(Kind.TOTAL, "B", "sent over all NVLinks of the GPU"),
    "nvlink_rx_bytes": Counter(Kind.TOTAL, "B", "received over all NVLinks of the GPU"),
    "nvlink_crc_flit_errors": Counter(Kind.TOTAL, "", "CRC errors of all NVLinks of the GPU"),
    "nvlink_replay_errors": Counter(Kind.TOTAL, "", "replays on all NVLinks of the GPU"),
    "nvlink_recovery_errors": Counter(Kind.TOTAL, "", "recoveries of all NVLinks of the GPU"),
    "nvlink_ecc_data_errors": Counter(Kind.TOTAL, "", "ECC errors of all NVLinks of the GPU"),
    "tx_bytes": Counter(Kind.TOTAL, "B", "sent by the NIC's port"),
    "rx_bytes": Counter(Kind.TOTAL, "B", "received by the NIC's port"),
    "tx_wait_ticks": Counter(Kind.TOTAL, "", "ticks with data and no credit to send: congestion"),
    "tx_errors": Counter(Kind.TOTAL, "", "packets that could not be sent"),
    "rx_errors": Counter(Kind.TOTAL, "", "packets received with an error"),
    "tx_dropped": Counter(Kind.TOTAL, "", "packets dropped before they were sent"),
    "rx_dropped": Counter(Kind.TOTAL, "", "packets dropped after they were received"),
    "symbol_errors": Counter(Kind.TOTAL, "", "minor errors on the physical link"),
    "link_downed": Counter(Kind.TOTAL, "", "times that the link went down"),
}
