"""Numbers as C reads and prints them."""

import re

from dynamiccl.nccl import NcclVersion

_LONG = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|\d+)")
_SIZE = re.compile(r"\s*([+-]?\d+\.?\d*(?:[eE][+-]?\d+)?|[+-]?\.\d+)\s*(\S?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def strtol(text: str) -> int:
    """`strtol(text, NULL, 0)`: a leading number, 0 when there is none.

    >>> strtol("0x10"), strtol("010"), strtol("8gpus"), strtol("none")
    (16, 8, 8, 0)
    """
    match = _LONG.match(text)
    if match is None:
        return 0
    digits = match[2]
    base = 16 if digits[:2] in {"0x", "0X"} else 8 if digits[0] == "0" and len(digits) > 1 else 10
    if base == 8:
        digits = re.match(r"[0-7]+", digits)[0]  # type: ignore[index]  # it starts with a 0
    return (-1 if match[1] == "-" else 1) * int(digits, base)


def parse_size(text: str) -> int | None:
    """A number of bytes with a binary K, M or G, as `-b` takes it; None when it is none.

    >>> parse_size("1.5K"), parse_size("8m"), parse_size("1T")
    (1536, 8388608, None)
    """
    match = _SIZE.match(text)
    if match is None or match[2].upper() not in _UNITS:
        return None
    value = float(match[1]) * _UNITS[match[2].upper()]
    return None if value < 0 else int(value)


def narrow(value: float, width: int, tests: NcclVersion) -> str:
    """A number with as many decimals as fit (`getFloatStr`, since nccl-tests 2.17).

    Until 2.19.6 the digits before rounding decide, so that 9999.996 needs a column too many.
    """
    forms = (f"{value:{width}.2f}", f"{value:{width}.1f}", f"{value:{width}.0f}")
    last = f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"
    if tests >= NcclVersion(2, 19, 6):
        return next((form for form in forms if len(form) <= width), last)
    digits = len(str(int(value))) if value >= 1 else 0
    for form, limit in zip(forms, (width - 2, width - 1, width + 1), strict=True):
        if digits < limit:
            return form
    return last


def old_time(time_us: float) -> str:
    """The time column before nccl-tests 2.17."""
    digits = 0 if time_us >= 10_000.0 else 1 if time_us >= 100.0 else 2
    return f"{time_us:7.{digits}f}"
