"""NCCL_* variables in a benchmark's output: which are kept, and what they mean.

An environment may hold secrets, so nothing is kept that is not on a literal list of names. What
names one algorithm, protocol or channel count is the requested config; everything else that is kept
becomes part of the launch profile, since it is fixed for the whole process.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, Protocol

_CONFIG_NAMES: Final = frozenset(
    {
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
    }
)
#: Every variable that is ever stored; exact names, no patterns. None of them can hold a secret.
KEPT_NAMES: Final = _CONFIG_NAMES | {
    "NCCL_BUFFSIZE",
    "NCCL_CHECKS_DISABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CTA_POLICY",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DMABUF_ENABLE",
    "NCCL_GRAPH_REGISTER",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_DISABLE",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_IB_TC",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_LOCAL_REGISTER",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
    "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_PXN_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_WIN_ENABLE",
}
_SET_BY: Final = re.compile(
    r"\b(NCCL_\w+) set (?:by|in) (?:the )?environment (?:variable )?to (.*)"
)
_ASSIGNED: Final = re.compile(r"\b(NCCL_\w+)=(\"[^\"]*\"|'[^']*'|\S*)")
#: Long or odd values are not settings that we understand.
_PLAIN_VALUE: Final = re.compile(r"[\w.,;:^/+-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The requested config (which a tuner could set), and the launch profile."""

    algorithm: str | None = None
    protocol: str | None = None
    num_channels: int | None = None
    launch_profile: str = DEFAULT_PROFILE

    @property
    def is_default(self) -> bool:
        """Whether the choice was left to NCCL."""
        return self.algorithm is None and self.protocol is None and self.num_channels is None

    @property
    def default_scope(self) -> str:
        """The scope of the default that the row is compared with."""
        return default_scope(self.launch_profile)


def default_scope(launch_profile: str) -> str:
    """`untouched` for the user's own environment, else `profile`."""
    if launch_profile == DEFAULT_PROFILE:
        return DefaultScope.UNTOUCHED.value
    return DefaultScope.PROFILE.value


def kept_settings(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The variables on the list, with normalised values; all others are dropped."""
    return {
        name: value
        for name, value in pairs
        if name in KEPT_NAMES and _PLAIN_VALUE.fullmatch(value) is not None
    }


def settings_in(line: str) -> dict[str, str]:
    """Variables in one line of output: NCCL's log, an assignment, `mpirun -x`.

    >>> settings_in("lab:1:1 [0] NCCL INFO NCCL_ALGO set by environment to Ring")
    {'NCCL_ALGO': 'Ring'}
    >>> settings_in("mpirun -x NCCL_PROTO=Simple -x API_TOKEN=hush all_reduce_perf")
    {'NCCL_PROTO': 'Simple'}
    """
    said = _SET_BY.search(line)
    if said:
        return kept_settings([(said.group(1), said.group(2).strip().rstrip("."))])
    return kept_settings((m.group(1), m.group(2).strip("\"'")) for m in _ASSIGNED.finditer(line))


def requested_by(
    settings: Mapping[str, str], collective: Collective, extra: Iterable[str] = ()
) -> Requested:
    """Split kept settings into the requested config and the launch profile.

    `extra` are words for the profile that do not come from the environment (`blocking`). A list or
    an exclusion (`Ring,Tree`, `^NVLS`) leaves the choice to NCCL within limits: it is a profile.

    >>> requested_by({"NCCL_ALGO": "allreduce:tree;broadcast:ring"}, Collective.AllReduce).algorithm
    'Tree'
    >>> requested_by({"NCCL_ALGO": "^NVLS"}, Collective.AllReduce).launch_profile
    'algo=^NVLS'
    """
    rest = dict(settings)
    algorithm = _single(rest, "NCCL_ALGO", Algorithm, collective)
    protocol = _single(rest, "NCCL_PROTO", Protocol, collective)
    channels = _channels(rest, "CTAS") or _channels(rest, "NCHANNELS")
    words = [f"{name.removeprefix('NCCL_').lower()}={rest[name]}" for name in sorted(rest)]
    return Requested(
        algorithm=algorithm,
        protocol=protocol,
        num_channels=channels,
        launch_profile=",".join([*words, *extra]) or DEFAULT_PROFILE,
    )


def _single(
    rest: dict[str, str],
    name: str,
    kind: type[Algorithm] | type[Protocol],
    collective: Collective,
) -> str | None:
    """Take `name` out of `rest` when it names exactly one choice for `collective`."""
    value = rest.get(name)
    if value is None:
        return None
    if ":" in value:
        value = _for_collective(value, collective)
        if value is None:
            del rest[name]
            return None
    try:
        wire = kind.parse(value).wire
    except UnknownName:
        return None
    del rest[name]
    return wire


def _for_collective(value: str, collective: Collective) -> str | None:
    for part in value.split(";"):
        name, _, choice = part.partition(":")
        if name.lower() == collective.wire.lower():
            return choice
    return None


def _channels(rest: dict[str, str], noun: str) -> int | None:
    low, high = f"NCCL_MIN_{noun}", f"NCCL_MAX_{noun}"
    value = rest.get(low)
    if value is None or value != rest.get(high) or not value.isdecimal() or not int(value):
        return None
    del rest[low], rest[high]
    return int(value)
