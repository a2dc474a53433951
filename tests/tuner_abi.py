"""NCCL's tuner plugins as ctypes see them, and profilers as far as `init`: one layout a version.

They are those of `serve/plugin/nccl/tuner_abi.h` (`src/plugin/tuner.cc` v2.30.7-1 and its
forebears). Nothing is imported with it: ranks of the stand-in for nccl-tests start with it.
"""

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint64,
    c_ulong,
    c_void_p,
)
from typing import Any, Final

#: `ncclDebugLogger_t` with one argument beside the format, as our plugins call it. It is variadic
#: in C; on x86-64 and on 64-bit Arm Linux six fixed arguments receive that.
LOGGER: Final = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)
#: `ncclTunerConstants_v5_t`: baseLatencies[7][3], hwLatencies[3][7][3], five tables [4][3].
CONSTANTS: Final = c_double * (7 * 3 + 3 * 7 * 3 + 5 * 4 * 3)


class NvlDomains(Structure):
    """`ncclNvlDomainInfo_v5_t`."""

    _fields_ = (("number", c_int), ("min_ranks", c_int), ("max_ranks", c_int))


def tuner_struct(version: int) -> type[Structure]:
    """`ncclTuner_v<version>_t`, of v4 to v6."""
    shape: tuple[Any, ...] = (c_size_t, c_size_t, LOGGER)
    init = (*shape, POINTER(c_void_p))
    if version >= 5:
        init = (POINTER(c_void_p), c_uint64, *shape, POINTER(NvlDomains), c_void_p)
    call: tuple[Any, ...] = (c_void_p, c_int, c_size_t)
    fields: list[tuple[str, Any]] = [
        ("name", c_char_p),
        ("init", CFUNCTYPE(c_int, *init)),
        ("ask", CFUNCTYPE(c_int, *call, c_int, c_void_p, c_int, c_int, c_int, POINTER(c_int))),
        ("finalize", CFUNCTYPE(c_int, c_void_p)),
    ]
    if version >= 6:
        part = (*call, c_int, c_int, c_int, POINTER(c_size_t))
        fields.append(("get_chunk_size", CFUNCTYPE(c_int, *part)))
    return type(f"TunerV{version}", (Structure,), {"_fields_": fields})


class ProfilerV4(Structure):
    """`ncclProfiler_v4_t`, as far as `init`."""

    _told = (c_char_p, c_uint64, c_int, c_int, c_int, LOGGER)
    _fields_ = (
        ("name", c_char_p),
        ("init", CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), *_told)),
    )
