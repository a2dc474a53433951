"""The supports of a data set: systems, group shapes, and the size bins measured for each action.

Decision tables act only near these bins, and only where NCCL's default was measured too: a config
is never carried to a size, a collective or a system on which nobody tried it.
"""

from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import quiet, tuned, usable
from dynamiccl.datasets.manifest import Costs, Shape, Support
from dynamiccl.datasets.scoring import ENVIRONMENT_COLUMNS
from dynamiccl.datasets.splits import with_split
from dynamiccl.fingerprint import with_nccl
from dynamiccl.nccl import NcclVersion

_SHAPE: Final = ("system", "num_nodes", "ranks_per_node", "launch_profile", "nccl_version")


def find_supports(
    frame: pl.DataFrame,
    catalogue: Catalogue,
    noise: pl.DataFrame,
    costs: pl.DataFrame | None = None,
) -> list[Support]:
    """Every (system, shape, launch profile, NCCL version) of a measurements frame.

    `noise` holds `noise_band` by NOISE_KEY; `costs` as in `cold_observations`.
    """
    rows = tuned(quiet(usable(frame))).drop_nulls(["num_nodes", "ranks_per_node"])
    rows = rows.with_columns(catalogue.actions(rows)).drop_nulls("action")
    rows = with_split(rows).sort(_SHAPE)
    return [
        _support(dict(zip(_SHAPE, key, strict=True)), part, noise, costs)
        for key, part in rows.group_by(_SHAPE, maintain_order=True)
    ]


def _support(
    key: dict[str, Any], part: pl.DataFrame, noise: pl.DataFrame, costs: pl.DataFrame | None
) -> Support:
    facts = part.select(pl.col(name).drop_nulls().first() for name in ENVIRONMENT_COLUMNS)
    environment = facts.row(0, named=True)
    environment.pop("num_ranks")
    used = pl.col("actual_num_channels")
    used = pl.when(pl.col("action") == ABSTAIN_ACTION).then(used.min()).otherwise(used.max())
    bins = part.group_by("collective", "action", "bin").agg(used.first()).sort(pl.all())
    measured: dict[str, dict[str, list[int]]] = {}
    channels: dict[str, dict[str, list[int | None]]] = {}
    for collective, action, found, used_there in bins.iter_rows():
        measured.setdefault(collective, {}).setdefault(str(action), []).append(found)
        channels.setdefault(collective, {}).setdefault(str(action), []).append(used_there)
    gpus = part["gpu"].drop_nulls().unique().sort().to_list()
    return Support(
        **key,
        num_ranks=key["num_nodes"] * key["ranks_per_node"],
        gpu=gpus[0] if gpus else None,
        simulated=bool((part["source"] == "simulator").all()),
        environment=environment,
        measured=measured,
        most_channels=part.select(pl.col("actual_num_channels").max()).item(),
        channels=channels,
        fingerprints=_fingerprints(part, key["nccl_version"]),
        noise_bands=dict(
            noise.filter(pl.col("system") == key["system"])
            .select("collective", "noise_band")
            .iter_rows()
        ),
        costs=None if costs is None else _costs(key, costs),
    )


def find_other_shapes(costs: pl.DataFrame | None, supports: Sequence[Support]) -> list[Shape]:
    """Shapes of the supports' systems with logged NCCL costs, but without measurements."""
    if costs is None:
        return []
    systems = {(s.system, s.launch_profile, s.nccl_version) for s in supports}
    measured = {tuple(getattr(s, name) for name in _SHAPE) for s in supports}
    found = costs.select(_SHAPE).unique().sort(_SHAPE).iter_rows(named=True)
    return [
        Shape(**key, costs=_costs(key, costs))
        for key in found
        if (key["system"], key["launch_profile"], key["nccl_version"]) in systems
        and tuple(key[name] for name in _SHAPE) not in measured
    ]


def _costs(key: dict[str, Any], costs: pl.DataFrame) -> Costs:
    mine = costs.filter(*(pl.col(name).eq_missing(pl.lit(value)) for name, value in key.items()))
    found: Costs = {}
    columns = ("collective", "algorithm", "protocol", "latency_us", "bandwidth_gbytes_per_s")
    for collective, algorithm, protocol, latency, bandwidth in mine.select(columns).iter_rows():
        found.setdefault(collective, {})[f"{algorithm}/{protocol}"] = (latency, bandwidth)
    return found


def _fingerprints(part: pl.DataFrame, nccl_version: str | None) -> list[str]:
    """The machine fingerprints of some rows; none for simulated rows."""
    if nccl_version is None:
        return []
    measured = part.filter(pl.col("source") != "simulator")["node_fingerprint"]
    version = NcclVersion.parse(nccl_version)
    return [with_nccl(node, version) for node in measured.drop_nulls().unique().sort()]
