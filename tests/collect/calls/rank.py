"""NCCL's part in recording: the order in which each release tells a profiler of its events.

`Nccl` calls a built library's profiler as NCCL 2.27 (v4), 2.28 (v5) and 2.29 on (v6) do
(`serve/plugin/nccl/profiler_abi.h`).
"""

import ctypes
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

COMM_ID = 0x1234_5678_9ABC_DEF0
GROUP, COLL, P2P, KERNEL_CH = 1, 2, 4, 64
GROUP_API, COLL_API, KERNEL_LAUNCH = 256, 512, 2048
STOP: Final = 22


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


class CollApi(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_char_p),
        ("count", ctypes.c_size_t),
        ("datatype", ctypes.c_char_p),
        ("root", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("captured", ctypes.c_bool),
    )


class Kernel(ctypes.Structure):
    _fields_ = (("channel", ctypes.c_uint8), ("time_ns", ctypes.c_uint64))


class OneOf(ctypes.Union):
    _fields_ = (("coll", Coll), ("api", CollApi), ("kernel", Kernel))


class Event(ctypes.Structure):
    """v4's type is one byte, and padding behind it: the same in memory."""

    _fields_ = (
        ("type", ctypes.c_uint64),
        ("parent", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("of", OneOf),
    )


_OUT = ctypes.POINTER(ctypes.c_void_p)
_MASK = ctypes.POINTER(ctypes.c_int)
_LOGGER = ctypes.CFUNCTYPE(
    None, *(ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int), *[ctypes.c_char_p] * 2
)
_SHAPE = (*[ctypes.c_int] * 3, ctypes.c_void_p)
_STATE = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))


def _struct(*init: Any) -> type[ctypes.Structure]:
    fields = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, *init)),
        ("start", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _OUT, ctypes.POINTER(Event))),
        ("stop", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("state", ctypes.CFUNCTYPE(ctypes.c_int, *_STATE)),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    )
    return type("Profiler", (ctypes.Structure,), {"_fields_": fields})


Profiler = _struct(_OUT, ctypes.c_uint64, _MASK, ctypes.c_char_p, *_SHAPE)
_ProfilerV4 = _struct(_OUT, _MASK, ctypes.c_char_p, ctypes.c_uint64, *_SHAPE)


@dataclass(frozen=True)
class Call:
    func: str = "AllReduce"
    count: int = 1 << 20
    datatype: str = "ncclFloat32"
    channels: int = 2
    algorithm: str = "RING"
    protocol: str = "LL128"
    root: int = 0
    captured: bool = False


@dataclass(frozen=True)
class Launched:
    """A collective on its stream; its kernels are reported when the mask was wide."""

    handle: int | None
    kernels: int


class Nccl:
    """One NCCL of a process: one event mask, read when a call is made."""

    def __init__(self, library: Any, version: int, *, allgatherv: bool = True) -> None:
        self.mask = ctypes.c_int()
        self.lines: list[str] = []
        self.version = version
        struct: Any = _ProfilerV4 if version == 4 else Profiler
        self.profiler = struct.in_dll(ctypes.CDLL(str(library)), f"ncclProfiler_v{version}")
        #: From 2.29 on a Broadcast is no task of its own (2.30.7 `src/enqueue.cc:2703`).
        self.hides_broadcasts = version >= 6 and allgatherv
        self._logger = _LOGGER(lambda *told: self.lines.append(told[-1].decode()))

    def is_wide(self) -> bool:
        return bool(self.mask.value & KERNEL_CH)

    def comm(self, comm_id: int = COMM_ID, rank: int = 0, ranks: int = 8, nodes: int = 1) -> "Comm":
        return Comm(self, comm_id, rank, ranks, nodes)


class Comm:
    """A communicator on one rank."""

    def __init__(self, nccl: Nccl, comm_id: int, rank: int, ranks: int, nodes: int) -> None:
        self.nccl, self.profiler, self.rank = nccl, nccl.profiler, rank
        self.context, self._sequence = ctypes.c_void_p(), Counter[str]()
        mask, name, shape = ctypes.byref(nccl.mask), b"name", (nodes, ranks, rank)
        told = (mask, name, comm_id) if nccl.version == 4 else (comm_id, mask, name)
        logger = ctypes.cast(nccl._logger, ctypes.c_void_p)
        assert self.profiler.init(ctypes.byref(self.context), *told, *shape, logger) == 0

    def start(self, kind: int, parent: int | None = None, of: OneOf | None = None) -> int | None:
        handle, event = ctypes.c_void_p(), Event(kind, parent, self.rank, of or OneOf())
        self.profiler.start(self.context, ctypes.byref(handle), ctypes.byref(event))
        return handle.value

    def stop(self, handle: int | None) -> None:
        if handle is not None:
            self.profiler.stop(handle)

    def append(self, *calls: Call) -> list[tuple[Call, int, int | None]]:
        """The API's part of a group of calls: each with its mask and event."""
        mask = self.nccl.mask.value
        if self.nccl.version == 4 or mask == 0:
            return [(call, mask, None) for call in calls]
        group, made = self.start(GROUP_API), []
        for call in calls:
            mask = self.nccl.mask.value
            names = call.func.encode(), call.count, call.datatype.encode()
            api = CollApi(*names, call.root, None, call.captured)
            event = self.start(COLL_API, group, OneOf(api=api))
            self.stop(event)
            made.append((call, mask, event))
        self.stop(group)
        return made

    def launch(self, made: list[tuple[Call, int, int | None]]) -> list[Launched]:
        """What is told of their plan; a captured one moves no number unless KernelCh was wanted."""
        nccl, launched = self.nccl, []
        if nccl.hides_broadcasts:
            made = [each for each in made if each[0].func != "Broadcast"]
        if not made or made[0][1] == 0:
            return [Launched(None, 0) for _ in made]
        plan = self.start(GROUP)
        for call, mask, api in made:
            is_wide, sequence = bool(mask & KERNEL_CH), self._sequence[call.func]
            coll = Coll(
                sequence=sequence,
                func=call.func.encode(),
                count=call.count,
                datatype=call.datatype.encode(),
                channels=call.channels,
                warps=16,
                algorithm=call.algorithm.encode(),
                protocol=call.protocol.encode(),
            )
            handle = self.start(COLL, plan if nccl.version == 4 else api, OneOf(coll=coll))
            self._sequence[call.func] += not call.captured or is_wide
            launched.append(Launched(handle, call.channels if is_wide else 0))
        for each in launched:
            self.stop(each.handle)
        self.stop(plan)
        return launched

    def call(self, *calls: Call) -> list[Launched]:
        return self.launch(self.append(*(calls or (Call(),))))

    def kernel(self, launched: Launched, channel: int, begin_ns: int, end_ns: int) -> None:
        """The proxy's part, for one channel."""
        kernel = self.start(KERNEL_CH, launched.handle, OneOf(kernel=Kernel(channel, begin_ns)))
        if kernel is not None:
            self.profiler.state(kernel, STOP, ctypes.byref(ctypes.c_uint64(end_ns)))
            self.stop(kernel)

    def kernels(self, launched: Launched, begin_ns: int, end_ns: int) -> None:
        for channel in range(launched.kernels):
            self.kernel(launched, channel, begin_ns + channel, end_ns)

    def finalize(self) -> None:
        """Events of the proxy's may still come."""
        if self.context.value is not None:
            self.profiler.finalize(self.context)
