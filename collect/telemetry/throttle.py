"""Reasons for a GPU's clock: NVML's clock event reasons ("throttle reasons" until R535)."""

from enum import IntFlag
from typing import Final


class ClockReason(IntFlag):
    """One bit for each reason (nvml.h, `nvmlClocksEventReason*`, CUDA 12.9 and 13.0)."""

    GPU_IDLE = 0x1
    #: The user limited the clock: application clocks, or `nvidia-smi -lgc`.
    APPLICATIONS_CLOCKS_SETTING = 0x2
    #: The driver lowers the clock to keep to the power limit.
    SW_POWER_CAP = 0x4
    #: Hardware lowers it by half or more: heat, or power brake, or peak power.
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    #: The driver lowers it to keep to the target temperature.
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    #: The server's power supply asks for less (a pin of the board).
    HW_POWER_BRAKE_SLOWDOWN = 0x80
    DISPLAY_CLOCK_SETTING = 0x100


#: Slowed by heat or power, so that the same config runs slower than it does on a healthy GPU. Idle
#: clocks, clocks that the user chose and those of a display are no fault of the trial.
SLOWED: Final = (
    ClockReason.SW_POWER_CAP
    | ClockReason.HW_SLOWDOWN
    | ClockReason.SW_THERMAL_SLOWDOWN
    | ClockReason.HW_THERMAL_SLOWDOWN
    | ClockReason.HW_POWER_BRAKE_SLOWDOWN
)


def is_slowed(reasons: int) -> bool:
    """Whether these bits say that heat or power throttles the GPU.

    >>> is_slowed(0x1 | 0x2), is_slowed(0x1 | 0x40)
    (False, True)
    """
    return bool(reasons & SLOWED)


def reason_names(reasons: int) -> tuple[str, ...]:
    """The reasons in words, known ones by name and others by their bit.

    >>> reason_names(0x44 | 0x8000)
    ('sw_power_cap', 'hw_thermal_slowdown', 'bit 0x8000')
    """
    names = [reason.name.lower() for reason in ClockReason if reasons & reason and reason.name]
    known = sum(ClockReason)
    other = reasons & ~known
    names += [f"bit {1 << i:#x}" for i in range(other.bit_length()) if other >> i & 1]
    return tuple(names)
