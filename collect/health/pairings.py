"""The launches that pair up the GPUs of a cluster: each launch makes pairs of all GPUs at once.

A launch is one nccl-tests process for each GPU, split into communicators of two ranks by
NCCL_TESTS_SPLIT. `AND` with all bits of the rank but one pairs ranks that differ in this bit only:
the low bits, of the GPU's number, pair GPUs of one node; the high bits, of the node's number, pair
GPUs of the same number on two nodes, each pair over NICs of its own. So log2(ranks) launches
measure each GPU with log2(ranks) partners. `MOD` pairs nodes at a distance, for nodes that lack
partners where the number of nodes is no power of two.
"""

from dataclasses import dataclass

from dynamiccl.collect.sweep.splits import Split
from dynamiccl.errors import UserError

#: Partner nodes of each node: of a slow pair, other partners tell which of the two is slow.
_PARTNERS = 3


@dataclass(frozen=True, slots=True)
class Pairing:
    """One launch, by its split."""

    split: Split
    #: Whether some processes are in no pair.
    spare: bool
    #: Whether the pairs are of two nodes, or inside one.
    between_nodes: bool


def pairings(num_nodes: int, gpus: int) -> tuple[Pairing, ...]:
    """The launches for so many nodes of `gpus` each, those inside nodes first (pure).

    Raises UserError where nothing can be paired, and where the GPUs are no power of two.

    >>> [pairing.split.text for pairing in pairings(4, 2)]
    ['AND 0x6', 'AND 0x5', 'AND 0x3', 'MOD 6']
    """
    if gpus & (gpus - 1):
        lower = 1 << (gpus.bit_length() - 1)
        raise UserError(
            f"GPUs are paired up by the bits of their number, and {gpus} is no power of two; take "
            f"{lower} of each node"
        )
    if num_nodes * gpus < 3:
        raise UserError(
            f"{num_nodes} nodes of {gpus} GPUs make one pair at most, and nothing to compare it "
            "with; give more nodes or GPUs"
        )
    bits = (num_nodes * gpus - 1).bit_length()
    inside = gpus.bit_length() - 1
    every = (1 << bits) - 1
    masks = [Split("AND", every & ~(1 << bit)) for bit in range(bits)]
    found = [_pairing(split, num_nodes, gpus, between=False) for split in masks[:inside]]
    partners: dict[int, set[int]] = {node: set() for node in range(num_nodes)}
    at_distance = [Split("MOD", d * gpus) for d in range((num_nodes + 1) // 2, num_nodes)]
    for split in (*masks[inside:], *at_distance):
        if split.operation == "MOD" and _lacking(partners) == 0:
            break
        pairs = _node_pairs(split, num_nodes, gpus)
        if split.operation == "AND" or _helps(pairs, partners):
            found.append(_pairing(split, num_nodes, gpus, between=True))
            for one, other in pairs:
                partners[one].add(other)
                partners[other].add(one)
    return tuple(found)


def _pairing(split: Split, num_nodes: int, gpus: int, *, between: bool) -> Pairing:
    comms = split.comms(num_nodes, gpus, spare=True)
    return Pairing(split, 2 * comms.count < num_nodes * gpus, between)


def _node_pairs(split: Split, num_nodes: int, gpus: int) -> list[tuple[int, int]]:
    members = split.comms(num_nodes, gpus, spare=True).members
    return sorted({(pair[0] // gpus, pair[1] // gpus) for pair in members})


def _lacking(partners: dict[int, set[int]]) -> int:
    """How many nodes have fewer partners than wanted."""
    wanted = min(_PARTNERS, len(partners) - 1)
    return sum(len(others) < wanted for others in partners.values())


def _helps(pairs: list[tuple[int, int]], partners: dict[int, set[int]]) -> bool:
    wanted = min(_PARTNERS, len(partners) - 1)
    return any(
        other not in partners[one] and min(len(partners[one]), len(partners[other])) < wanted
        for one, other in pairs
    )
