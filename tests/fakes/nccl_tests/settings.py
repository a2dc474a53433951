"""NCCL's environment variables: allowed cells, channels, transports (`src/graph/tuning.cc`).

Factors of transports, threads and buffers are made up; they only have to show.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import (
    MAX_CHANNELS,
    NUM_TUNED_COLLECTIVES,
    Algorithm,
    Collective,
    NcclVersion,
    Protocol,
)
from tests.fakes.nccl_tests.numbers import strtol
from tests.fakes.nccl_tests.releases import NAMED_CHOICES

_COLLECTIVES: Final = tuple(Collective(value) for value in range(NUM_TUNED_COLLECTIVES))
#: Variables that NCCL reads as numbers when a communicator is made, and logs with a full stop.
NUMBERS: Final = (
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_GRAPH_REGISTER",
    "NCCL_LOCAL_REGISTER",
)
#: Variables that it logs as they are.
TEXTS: Final = ("NCCL_P2P_DISABLE", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID")
#: Times as long as over NVLink and InfiniBand.
_SHARED_MEMORY: Final = 3.0
_SOCKET: Final = 8.0


class InvalidSetting(ValueError):
    """A value that makes NCCL 2.24 and later refuse to make a communicator."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment as NCCL understands it."""

    #: Cells that NCCL_ALGO and NCCL_PROTO allow, for each of the five collectives.
    allowed: Mapping[Collective, frozenset[tuple[Algorithm, Protocol]]]
    #: Whether either was set at all.
    forced: bool
    min_channels: int
    max_channels: int
    peer_to_peer: bool
    shared_memory: bool
    socket: bool
    nvls: bool
    threads: int
    buffer_bytes: int

    @property
    def has_nvlink(self) -> bool:
        """Whether ranks of one node reach each other over NVLink."""
        return self.peer_to_peer

    def channels(self, opened: int) -> int:
        """Channels of the communicator, where the search alone gives `opened`."""
        return max(min(opened, self.max_channels), self.min_channels, 1)

    def transport_factor(self, num_nodes: int) -> float:
        """How many times as long everything takes as over NVLink and InfiniBand."""
        if self.socket and (num_nodes > 1 or not (self.peer_to_peer or self.shared_memory)):
            return _SOCKET
        if self.peer_to_peer:
            return 1.0
        return _SHARED_MEMORY if self.shared_memory else _SOCKET

    def detail_factor(self, protocol: Protocol) -> float:
        """A few per cent for threads and buffers that are not NCCL's own."""
        factor = 1.0 + 0.03 * abs(math.log2(512 / self.threads))
        if protocol is Protocol.Simple:
            factor += 0.01 * abs(math.log2((4 << 20) / self.buffer_bytes))
        return factor


def read_settings(environment: Mapping[str, str], nccl: NcclVersion) -> Settings:
    """Read what NCCL would. Raises InvalidSetting for a name that 2.24 and later refuse."""
    protocols = _lists(environment.get("NCCL_PROTO"), [p.wire for p in Protocol], nccl)
    algorithms = _lists(environment.get("NCCL_ALGO"), [a.wire for a in Algorithm], nccl)
    return Settings(
        allowed={
            collective: frozenset(
                (a, p)
                for a in Algorithm
                for p in Protocol
                if a.wire in algorithms[collective] and p.wire in protocols[collective]
            )
            for collective in _COLLECTIVES
        },
        forced="NCCL_ALGO" in environment or "NCCL_PROTO" in environment,
        min_channels=min(max(_numbers(environment, "MIN"), default=0), MAX_CHANNELS),
        max_channels=max(min(_numbers(environment, "MAX"), default=MAX_CHANNELS), 1),
        peer_to_peer=not _flag(environment, "NCCL_P2P_DISABLE"),
        shared_memory=not _flag(environment, "NCCL_SHM_DISABLE"),
        socket=environment.get("NCCL_NET", "").lower() == "socket",
        nvls=strtol(environment.get("NCCL_NVLS_ENABLE", "2")) != 0,
        threads=min(max(strtol(environment.get("NCCL_NTHREADS", "512")), 64), 512),
        buffer_bytes=max(strtol(environment.get("NCCL_BUFFSIZE", str(4 << 20))), 1 << 16),
    )


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return strtol(environment.get(name, "0")) != 0


def _numbers(environment: Mapping[str, str], end: str) -> list[int]:
    names = (f"NCCL_{end}_CTAS", f"NCCL_{end}_NCHANNELS")
    return [strtol(environment[name]) for name in names if environment.get(name)]


def _lists(
    text: str | None, elements: list[str], nccl: NcclVersion
) -> dict[Collective, frozenset[str]]:
    everything = dict.fromkeys(_COLLECTIVES, frozenset(elements))
    if text is None:
        return everything
    if nccl < NAMED_CHOICES:
        return dict.fromkeys(_COLLECTIVES, _list(text, elements, whole=None))
    allowed = everything
    for number, entry in enumerate(filter(None, text.split(";"))):
        prefix, colon, listed = entry.partition(":")
        if not colon:
            if number:
                raise InvalidSetting(f'All entries except the first must have a prefix: "{text}"')
            return_all = _list(prefix, elements, whole=text)
            allowed = dict.fromkeys(_COLLECTIVES, return_all)
            continue
        named = [c for c in _COLLECTIVES if c.wire.lower() == prefix.lower()]
        if not named:
            raise InvalidSetting(f'Unrecognized prefix token "{prefix}" when parsing "{text}"')
        allowed = {**allowed, named[0]: _list(listed, elements, whole=text)}
    return allowed


def _list(text: str, elements: Iterable[str], *, whole: str | None) -> frozenset[str]:
    """Elements of a comma list; unknown ones are refused when `whole` is given, else ignored."""
    by_name = {element.lower(): element for element in elements}
    named = set()
    for token in filter(None, text.lstrip("^").split(",")):
        if token.lower() in by_name:
            named.add(by_name[token.lower()])
        elif whole is not None:
            raise InvalidSetting(f'Unrecognized element token "{token}" when parsing "{whole}"')
    return frozenset(set(by_name.values()) - named if text.startswith("^") else named)
