"""Adds group shapes without measurements to a manifest, for policies that use NCCL's cost model.

For a policy that looks at NCCL's own costs, where these are known of the shape: NCCL logged them,
or a model of the machine said so. Of the configs, those that leave channels and chunks to NCCL.
"""

from dataclasses import replace

from dynamiccl.datasets.manifest import Manifest, Shape, Support
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import UnknownName, UserError


def with_shape(manifest: Manifest, num_nodes: int, ranks_per_node: int) -> Manifest:
    """The manifest with one more support, of this shape, for each system whose costs are known.

    Raises UserError for a shape that was measured, for a policy that passed a gate (whose evidence
    is of the measured shapes) and for one that does not use costs, and UnknownName for a shape
    whose NCCL costs are not known.
    """
    asked = f"{num_nodes}x{ranks_per_node}"
    if manifest.cost_table() is None:
        raise UserError(
            f"the policy ({manifest.recipe}) does not look at NCCL's costs, and knows nothing of "
            f"{asked}: train recipe gaussian-process, or measure that shape"
        )
    if any(support.gated is not None for support in manifest.supports):
        raise UserError(
            f"the policy passed a gate for the shapes that were measured, and {asked} is none of "
            "them: export the run before the gate, or measure that shape"
        )
    known = [s for s in manifest.supports if s.launch_profile == DEFAULT_PROFILE]
    if any((s.num_nodes, s.ranks_per_node) == (num_nodes, ranks_per_node) for s in known):
        raise UserError(f"{asked} was measured, and has its table: leave out --group {asked}")
    others = [s for s in manifest.other_shapes if s.launch_profile == DEFAULT_PROFILE]
    found = [s for s in others if (s.num_nodes, s.ranks_per_node) == (num_nodes, ranks_per_node)]
    if not found:
        choices = sorted({f"{s.num_nodes}x{s.ranks_per_node}" for s in others})
        if not choices:
            raise UserError(
                f"NCCL's costs of {asked} are not in the training data: add them with "
                f"'dynamiccl-collect shapes --group {asked}', or import the log of a job of that "
                "shape, and train again"
            )
        raise UnknownName(
            "group",
            asked,
            choices,
            where="NCCL's costs in the training data; add them with "
            "'dynamiccl-collect shapes', or import the log of a job of that shape, and train again",
        )
    return replace(manifest, supports=[*manifest.supports, *(_carried(manifest, s) for s in found)])


def _carried(manifest: Manifest, shape: Shape) -> Support:
    place = shape.system, shape.launch_profile, shape.nccl_version
    measured = [
        s for s in manifest.supports if (s.system, s.launch_profile, s.nccl_version) == place
    ]
    configs = manifest.actions().configs
    bins: dict[str, dict[str, set[int]]] = {}
    for support in measured:
        for collective, actions in support.measured.items():
            for action, found in actions.items():
                config = configs[int(action)]
                if config.num_channels is None and config.chunk_bytes is None:
                    bins.setdefault(collective, {}).setdefault(action, set()).update(found)
    return replace(
        measured[0],
        num_nodes=shape.num_nodes,
        ranks_per_node=shape.ranks_per_node,
        num_ranks=shape.num_nodes * shape.ranks_per_node,
        measured={c: {a: sorted(b) for a, b in each.items()} for c, each in bins.items()},
        most_channels=None,
        costs=shape.costs,
        carried=True,
    )
