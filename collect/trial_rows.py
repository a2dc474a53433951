"""What every runner writes of a trial, before it adds times."""

from typing import Any

from dynamiccl.collect.sweep import SweepFile, Trial
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, DefaultScope, Statistic, Status
from dynamiccl.nccl import ABSTAIN


def trial_row(file: SweepFile, trial: Trial, *, run: str, repeat: int) -> dict[str, Any]:
    """The identity, workload and requested-config columns of one attempt at `trial`."""
    config = trial.config
    untouched = file.launch_profile == DEFAULT_PROFILE
    scope = DefaultScope.UNTOUCHED if untouched else DefaultScope.PROFILE
    return {
        "system": file.system,
        "sweep": file.name,
        "run": run,
        "repeat": repeat,
        "collective": trial.collective.wire,
        "size_bytes": trial.size_bytes,
        "datatype": file.datatype,
        "num_ranks": trial.num_nodes * trial.ranks_per_node,
        "num_nodes": trial.num_nodes,
        "num_hosts": trial.num_nodes,
        "ranks_per_node": trial.ranks_per_node,
        "launch_profile": file.launch_profile,
        "interference_kind": "congestion" if trial.congestion else QUIET,
        "interference_level": trial.congestion,
        "default_scope": scope.value,
        "is_default": config == ABSTAIN,
        "requested_algorithm": config.algorithm.wire if config.algorithm is not None else None,
        "requested_protocol": config.protocol.wire if config.protocol is not None else None,
        "requested_num_channels": config.num_channels,
        "requested_chunk_bytes": config.chunk_bytes,
    }


def infeasible_row(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """The row of an attempt that cannot run, with the reason."""
    return {
        **row,
        "status": Status.INFEASIBLE.value,
        "reason": reason,
        "statistic": Statistic.NONE.value,
    }
