"""What is read of a GPU, and how often: every tick, every second, or rarely since it blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynamiccl.collect.telemetry.collectors import Reading, Refused, Report
from dynamiccl.collect.telemetry.counters import (
    CLOCK_REASONS,
    ECC_UNCORRECTED,
    MIG_MODE,
    NVLINK_BYTES,
    NVLINK_ERRORS,
)
from dynamiccl.collect.telemetry.nvml import Call, Nvml

# Values of NVML's enumerations (nvml.h).
_CLOCK_SM: Final = 1
_CLOCK_MEMORY: Final = 2
_SENSOR_GPU: Final = 0
_UNCORRECTED: Final = 1
_VOLATILE: Final = 0
_PCIE_TX: Final = 0
_PCIE_RX: Final = 1


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """The readings of one GPU."""

    fast: tuple[Reading, ...]
    slow: tuple[Reading, ...]
    #: Each of its two calls blocks for about 20 ms: not for the thread that keeps the ticks.
    blocking: tuple[Reading, ...]


def gpu_readings(nvml: Nvml, index: int, report: Report) -> GpuReadings:
    """Everything that is read of GPU number `index` (NVML's order, which is that of the PCI bus).

    Raises Refused when the GPU as a whole cannot be asked.
    """
    handle, device = nvml.handle(index), f"gpu{index}"

    def one(counter: str, *ways: Call, to_value: Callable[[Any], float] = float) -> Reading:
        function, arguments = nvml.first_way(handle, ways)
        return Reading(
            device, (counter,), lambda: (to_value(nvml.ask(function, handle, *arguments)),)
        )

    def pcie(counter: str, direction: int) -> Reading:
        # Not asked for a first time here: that alone would block.
        ask = "nvmlDeviceGetPcieThroughput"
        return Reading(device, (counter,), lambda: (float(nvml.ask(ask, handle, direction)),))

    return GpuReadings(
        fast=(
            one("sm_clock_mhz", ("nvmlDeviceGetClockInfo", (_CLOCK_SM,))),
            one("memory_clock_mhz", ("nvmlDeviceGetClockInfo", (_CLOCK_MEMORY,))),
            one("power_w", ("nvmlDeviceGetPowerUsage", ()), to_value=lambda mw: mw / 1000.0),
            one(
                "temperature_c",
                ("nvmlDeviceGetTemperature", (_SENSOR_GPU,)),
                ("nvmlDeviceGetTemperatureV", (_SENSOR_GPU,)),
            ),
            Reading(
                device,
                ("utilization_percent", "memory_utilization_percent"),
                lambda: _shares(nvml.ask("nvmlDeviceGetUtilizationRates", handle)),
            ),
            one(
                CLOCK_REASONS,
                ("nvmlDeviceGetCurrentClocksEventReasons", ()),
                ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
            ),
            *_field_readings(nvml, handle, device, NVLINK_BYTES, report),
        ),
        slow=(
            one(ECC_UNCORRECTED, ("nvmlDeviceGetTotalEccErrors", (_UNCORRECTED, _VOLATILE))),
            one(MIG_MODE, ("nvmlDeviceGetMigMode", ()), to_value=lambda modes: float(modes[0])),
            *_field_readings(nvml, handle, device, NVLINK_ERRORS, report),
        ),
        blocking=(
            pcie("pcie_tx_kbytes_per_s", _PCIE_TX),
            pcie("pcie_rx_kbytes_per_s", _PCIE_RX),
        ),
    )


def _shares(rates: Any) -> tuple[float, float]:
    return float(rates.gpu), float(rates.memory)


def _field_readings(
    nvml: Nvml,
    handle: Any,
    device: str,
    wanted: Mapping[str, tuple[tuple[int, int, int], ...]],
    report: Report,
) -> tuple[Reading, ...]:
    """One reading for all fields that the driver has; the others are reported, once, here."""
    found: dict[str, tuple[int, int, int]] = {}
    for counter, ways in wanted.items():
        try:
            answers = nvml.fields(handle, [(field, scope) for field, scope, _ in ways])
        except Refused as error:
            answers = [str(error)] * len(ways)
        working = [
            w for w, answer in zip(ways, answers, strict=True) if not isinstance(answer, str)
        ]
        if working:
            found[counter] = working[0]
        else:
            report(device, counter, str(answers[0]))
    if not found:
        return ()
    query = [(field, scope) for field, scope, _ in found.values()]
    factors = [factor for _, _, factor in found.values()]

    def ask() -> tuple[float, ...]:
        answers = nvml.fields(handle, query)
        for answer in answers:
            if isinstance(answer, str):
                raise Refused(answer, lasting=False)
        return tuple(
            factor * float(answer) for factor, answer in zip(factors, answers, strict=True)
        )

    return (Reading(device, tuple(found), ask),)
