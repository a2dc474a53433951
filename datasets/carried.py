"""Adds group shapes without measurements to a manifest, for policies that say how sure they are.

NCCL's own costs of such a shape help where they are known: NCCL logged them, or a model of the
machine said so. Of the configs, those that leave channels and chunks to NCCL.
"""

from dataclasses import replace

from dynamiccl.datasets.manifest import Manifest, Shape, Support
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import UserError


def with_shape(manifest: Manifest, num_nodes: int, ranks_per_node: int) -> Manifest:
    """The manifest with one more support, of this shape, for each system and NCCL release.

    Raises UserError for a shape that was measured, for a policy that passed a gate (whose evidence
    is of the measured shapes) and for one that does not say how sure it is of a new shape.
    """
    asked = f"{num_nodes}x{ranks_per_node}"
    if not manifest.knows_shapes:
        raise UserError(
            f"the policy ({manifest.recipe}) does not say how sure it is of a shape that nobody "
            f"measured, and knows nothing of {asked}: train recipe gaussian-process, or measure it"
        )
    if any(support.gated is not None for support in manifest.supports):
        raise UserError(
            f"the policy passed a gate for the shapes that were measured, and {asked} is none of "
            "them: export the run before the gate, or measure that shape"
        )
    known = [s for s in manifest.supports if s.launch_profile == DEFAULT_PROFILE]
    if any((s.num_nodes, s.ranks_per_node) == (num_nodes, ranks_per_node) for s in known):
        raise UserError(f"{asked} was measured, and has its table: leave out --group {asked}")
    place = num_nodes, ranks_per_node
    costs = {
        (s.system, s.nccl_version): s.costs
        for s in manifest.other_shapes
        if (s.num_nodes, s.ranks_per_node, s.launch_profile) == (*place, DEFAULT_PROFILE)
    }
    found = [
        Shape(system, *place, DEFAULT_PROFILE, version, costs.get((system, version)))
        for system, version in dict.fromkeys((s.system, s.nccl_version) for s in known)
    ]
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
        channels={},
        costs=shape.costs,
        carried=True,
    )
