"""One rank of a job under the profiler: `python -m tests.collect.calls.rank PLUGIN RANK RANKS`.

Calls the built plugin as NCCL 2.28 does (`serve/plugin/nccl/profiler_abi.h`): 40 AllReduce, each of
two channels that take 100 us and 10 us more a rank; rank 1 loses a channel of call 3, and the last
call of all ranks is an AllGather.
"""

import ctypes
import sys
from typing import Any

COMM_ID = 0x1234_5678_9ABC_DEF0
CALLS = 40
KERNEL_CH, COLL, COLL_API, STOP = 64, 2, 512, 22


class Coll(ctypes.Structure):
    _fields_ = (
        ("sequence", ctypes.c_uint64),
        ("func", ctypes.c_char_p),
        ("send", ctypes.c_void_p),
        ("receive", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("root", ctypes.c_int),
        ("datatype", ctypes.c_char_p),
        ("channels", ctypes.c_uint8),
        ("warps", ctypes.c_uint8),
        ("algorithm", ctypes.c_char_p),
        ("protocol", ctypes.c_char_p),
        ("group", ctypes.c_void_p),
    )


class Kernel(ctypes.Structure):
    _fields_ = (("channel", ctypes.c_uint8), ("time_ns", ctypes.c_uint64))


class OneOf(ctypes.Union):
    _fields_ = (("coll", Coll), ("kernel", Kernel))


class Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint64),
        ("parent", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("of", OneOf),
    )


_OUT = ctypes.POINTER(ctypes.c_void_p)
_INIT = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _OUT,
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
)


class Profiler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", _INIT),
        ("start", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _OUT, ctypes.POINTER(Event))),
        ("stop", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        (
            "state",
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)
            ),
        ),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    )


def main(plugin: str, rank: int, num_ranks: int) -> None:
    profiler: Any = Profiler.in_dll(ctypes.CDLL(plugin), "ncclProfiler_v5")
    context = ctypes.c_void_p()
    mask = ctypes.c_int()
    profiler.init(context, COMM_ID, mask, b"name", 1, num_ranks, rank, None)

    def start(kind: int, parent: int | None, of: OneOf | None = None) -> int | None:
        handle = ctypes.c_void_p()
        event = Event(kind, parent, rank, of or OneOf())
        profiler.start(context, ctypes.byref(handle), ctypes.byref(event))
        return handle.value

    for call in range(CALLS + 1):
        is_last = call == CALLS
        is_sampled = bool(mask.value & KERNEL_CH)
        api = start(COLL_API, None)
        coll = Coll(
            sequence=0 if is_last else call,
            func=b"AllGather" if is_last else b"AllReduce",
            count=1000,
            datatype=b"ncclInt8" if is_last else b"ncclBfloat16",
            channels=2,
            warps=16,
            algorithm=b"NVLS",
            protocol=b"SIMPLE",
        )
        handle = start(COLL, api, OneOf(coll=coll))
        if handle is not None:
            profiler.stop(handle)
        begin = 1_000_000 * (call + 1)
        for channel in range(2 if is_sampled else 0):
            if call == 3 and rank == 1 and channel == 1:
                continue
            times = OneOf(kernel=Kernel(channel, begin + channel))
            kernel = start(KERNEL_CH, handle, times)
            end = ctypes.c_uint64(begin + 100_000 + 10_000 * rank)
            profiler.state(kernel, STOP, ctypes.byref(end))
            profiler.stop(kernel)
    profiler.finalize(context)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
