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


_INT, _U64, _TEXT, _POINTER = ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
_TYPES: Final[dict[str, Any]] = {
    "int": _INT,
    "u64": _U64,
    "text": _TEXT,
    "pointer": _POINTER,
    "size": ctypes.c_size_t,
    "byte": ctypes.c_uint8,
    "flag": ctypes.c_bool,
}


def _struct(text: str = "", kind: type = ctypes.Structure, **more: Any) -> Any:
    """A class of fields: `NAME TYPE, ...`, then others."""
    fields = [each.split() for each in text.split(", ") if each]
    all_fields = (*((name, _TYPES[of]) for name, of in fields), *more.items())
    return type("Fields", (kind,), {"_fields_": all_fields})


Coll = _struct(
    "sequence u64, func text, send pointer, receive pointer, count size, root int, datatype text, "
    "channels byte, warps byte, algorithm text, protocol text, group pointer"
)
CollApi = _struct("func text, count size, datatype text, root int, stream pointer, captured flag")
Kernel = _struct("channel byte, time_ns u64")
OneOf = _struct(kind=ctypes.Union, coll=Coll, api=CollApi, kernel=Kernel)
#: v4's type is one byte, and padding behind it: the same in memory.
Event = _struct("type u64, parent pointer, rank int", of=OneOf)

_OUT, _MASK = ctypes.POINTER(_POINTER), ctypes.POINTER(_INT)
_LOGGER = ctypes.CFUNCTYPE(None, _INT, ctypes.c_ulong, _TEXT, _INT, _TEXT, _TEXT)
_SHAPE = (_INT, _INT, _INT, _POINTER)


def _profiler(*init: Any) -> Any:
    def function(*arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(_INT, *arguments)

    return _struct(
        name=_TEXT,
        init=function(*init),
        start=function(_POINTER, _OUT, ctypes.POINTER(Event)),
        stop=function(_POINTER),
        state=function(_POINTER, _INT, ctypes.POINTER(_U64)),
        finalize=function(_POINTER),
    )


Profiler = _profiler(_OUT, _U64, _MASK, _TEXT, *_SHAPE)
_ProfilerV4 = _profiler(_OUT, _MASK, _TEXT, _U64, *_SHAPE)


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

    def start(self, kind: int, parent: int | None = None, of: Any = None) -> int | None:
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
