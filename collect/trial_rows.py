"""The columns of a pick that every runner writes, without times."""

from typing import Any

from dynamiccl.collect.runner import Launch, LaunchMode, Pick, Row
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope, Statistic, Status
from dynamiccl.nccl import ABSTAIN


def pick_row(file: SweepFile, launch: Launch, pick: Pick) -> dict[str, Any]:
    """The identity, workload and requested-config columns of one attempt."""
    trial, setting = pick.trial, launch.setting
    config = trial.config
    return {
        "system": file.system,
        "sweep": file.name,
        "run": launch.run,
        "repeat": pick.repeat,
        "round": launch.round,
        "launch": launch.id,
        "collective": setting.collective.wire,
        "size_bytes": trial.size_bytes,
        "datatype": setting.datatype,
        "num_ranks": setting.num_ranks,
        "num_nodes": setting.num_nodes,
        "num_hosts": setting.hosts,
        "ranks_per_node": setting.ranks_per_node,
        "num_comms": None if setting.comms is None else setting.comms.count,
        "comm_split": setting.split or None,
        "launch_profile": setting.profile.name,
        "interference_kind": setting.interference.kind,
        "interference_level": setting.interference.level,
        "default_scope": default_scope(launch).value,
        "is_default": config == ABSTAIN,
        "requested_algorithm": config.algorithm.wire if config.algorithm is not None else None,
        "requested_protocol": config.protocol.wire if config.protocol is not None else None,
        "requested_num_channels": config.num_channels,
        "requested_chunk_bytes": config.chunk_bytes,
        "behaviour_probability": pick.probability,
    }


def default_scope(launch: Launch) -> DefaultScope:
    """Which default the rows of a launch are, or are to be compared with.

    Inside the sweep mode NCCL's own choice is measured with our plugin loaded, which displaces a
    vendor's: that is a default of its profile, and only a launch without us gives the untouched.
    """
    ours = launch.mode is LaunchMode.SWEEP
    if ours or launch.setting.profile.name != DEFAULT_PROFILE:
        return DefaultScope.PROFILE
    return DefaultScope.UNTOUCHED


def lost_row(row: Row, status: Status, reason: str) -> dict[str, Any]:
    """The row of an attempt that gave no time, with the reason."""
    return {
        **row,
        "status": status.value,
        "reason": reason,
        "statistic": Statistic.NONE.value,
    }
