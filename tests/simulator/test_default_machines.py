"""Descriptions of machines: their constants against a search of our own, and wrong files."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import Algorithm
from dynamiccl.simulator.cost_model import CostModel
from dynamiccl.simulator.machine import (
    Basis,
    Machine,
    Pattern,
    find_machine,
    machine_names,
    parse_machine,
    read_machine,
)
from dynamiccl.simulator.system import Group
from tests.published import folder
from tests.simulator.recorded import Decision, read_decisions

DATA = folder("model")
DECISIONS = DATA / "nccl_default_decisions.csv"
#: Speeds that searches choose from (`speedArray*` and `sm90SpeedArray*`, search.cc of 2.27.7).
LISTED = (
    60.0, 50.0, 48.0, 45.0, 42.0, 40.0, 30.0, 28.0, 24.0, 22.0, 20.0, 18.0, 17.5, 15.0, 12.0, 11.0,
    10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12,
)  # fmt: skip
ALGORITHMS = {
    Pattern.RING: {Algorithm.Ring},
    Pattern.TREE: {Algorithm.Tree, Algorithm.PAT},
    Pattern.NVLS: {Algorithm.NVLS, Algorithm.NVLSTree},
}
GOOD = """
description = "two GPUs"
origin = "made up"
compute_capability = 9.0
cpu = "x86-intel"

"""
for pattern in ("ring", "tree"):
    GOOD += f"""
[[search]]
pattern = "{pattern}"
basis = "assumed"
nodes = [1, 1]
ranks_per_node = [2, 2]
channels = 2
gbytes_per_s = [20.0, 20.0]
paths = ["NVL", "PIX"]
"""


def error(machine: Machine, pattern: Pattern, decisions: Iterable[Decision]) -> float:
    """Largest relative error of the pattern's costs, or 1 where channels differ."""
    worst = 0.0
    for decision in decisions:
        model, call = CostModel(decision.version, machine), decision.call
        for cell, cost_us in decision.costs_us.items():
            if cell[0] in ALGORITHMS[pattern]:
                worst = max(worst, abs(model.cost_us(call, *cell) / cost_us - 1.0))
        if decision.chosen.algorithm in ALGORITHMS[pattern]:
            ran = model.resolve(call, replace(decision.chosen, num_channels=None))
            worst = max(worst, float(ran.num_channels != decision.chosen.num_channels))
        if worst > 1e-6:
            break
    return worst


def with_numbers(
    machine: Machine, group: Group, pattern: Pattern, channels: int, gbytes_per_s: float
) -> Machine:
    """Other numbers for one pattern; trees get as many channels as rings have."""
    searches = []
    for search in machine.searches:
        if not search.holds_for(group):
            continue
        new = search
        if search.pattern is pattern and group.num_nodes > 2:
            new = replace(new, inter_gbytes_per_s=gbytes_per_s)
        elif search.pattern is pattern:
            new = replace(new, intra_gbytes_per_s=gbytes_per_s)
        if (search.pattern is Pattern.NVLS) == (pattern is Pattern.NVLS):
            new = replace(new, channels=channels)
        searches.append(new)
    return replace(machine, searches=searches)


@pytest.mark.parametrize("pattern", [*Pattern])
def test_no_other_search_result_explains_the_powers_of_two(pattern: Pattern) -> None:
    """All listed speeds, for rings with all numbers of channels, against half of the record."""
    systems: dict[tuple[str, Group], list[Decision]] = {}
    for decision in read_decisions(DECISIONS):
        if not decision.held_out:
            systems.setdefault((decision.topology, decision.call.group), []).append(decision)
    machines = {find_machine(name).recorded_as: find_machine(name) for name in machine_names()}
    assert len(systems) == 5
    explained = 0
    for (topology, group), decisions in systems.items():
        machine = machines[topology]
        for search in machine.searches:
            if search.pattern is not pattern or not search.holds_for(group):
                continue
            counts = range(1, 25) if pattern is Pattern.RING else [search.channels]
            found = [
                (count, speed)
                for count in counts
                for speed in LISTED
                if error(with_numbers(machine, group, pattern, count, speed), pattern, decisions)
                < 1e-6
            ]
            several = group.num_nodes > 2
            ours = search.inter_gbytes_per_s if several else search.intra_gbytes_per_s
            assert (search.channels, ours) in found, (topology, group)
            # The channels' own limit hides the speed of a tree between two nodes.
            unique = pattern is not Pattern.TREE or group.num_nodes != 2
            assert len(found) == 1 or not unique, (topology, group, found)
            explained += 1
    assert explained == {Pattern.RING: 5, Pattern.TREE: 5, Pattern.NVLS: 2}[pattern]


def test_every_shipped_machine_says_where_it_is_from_and_can_decide() -> None:
    assert len(machine_names()) >= 7
    for name in machine_names():
        machine = find_machine(name)
        assert machine.origin
        assert machine.description
        for search in machine.searches:
            group = Group(search.nodes[0], search.ranks_per_node[0])
            assert search in parts_of(machine, group)
            # PCI and NVLink numbers are per channel, in GB/s: nothing carries more than 100.
            assert 0 < search.inter_gbytes_per_s <= 100
            assert 0 < search.intra_gbytes_per_s <= 100


def parts_of(machine: Machine, group: Group) -> list[object]:
    graph = machine.graph(group)
    return [graph.ring, graph.tree, graph.nvls]


def test_what_was_fitted_or_guessed_is_marked() -> None:
    basis = {
        name: {search.basis for search in find_machine(name).searches} for name in machine_names()
    }
    assert basis["h100-ib"] == {Basis.DERIVED, Basis.FITTED}
    assert basis["gb10-roce-ring"] == {Basis.READ, Basis.ASSUMED}
    assert basis["rtx5090-sockets"] == {Basis.READ}
    assert basis["a100-nvswitch"] == {Basis.DERIVED}


def test_description_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    machine = read_machine(path)
    assert (machine.name, machine.graph(Group(1, 2)).channels) == ("mine", 2)


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ('cpu = "x86-intel"', 'cpu = "vax"', UnknownName, r"value 'vax' in machine mine; choose"),
        ('"ring"', '"star"', UnknownName, r"value 'star' in machine mine; choose from ring, tree"),
        ('["NVL", "PIX"]', '["NVL", "FAR"]', UnknownName, r"'FAR' .* choose from LOC, NVL"),
        ("channels = 2\n", "", CorruptFile, r"channels"),
        ('origin = "made up"\n', "", CorruptFile, r"origin"),
        ("nodes = [1, 1]", "nodes = [1]", CorruptFile, r"machine mine"),
        ("nodes = [1, 1]", "knots = [1, 1]", CorruptFile, r"lacks 'nodes'"),
        ("channels = 2", "channels = ", CorruptFile, r"machine mine is not TOML"),
        ("channels = 2", "channels = 2\ncolour = 3", CorruptFile, r"colour"),
    ],
)
def test_wrong_description_is_refused(
    old: str, new: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        parse_machine("mine", GOOD.replace(old, new))


def test_unknown_machine_and_shape_are_named_with_the_choices() -> None:
    with pytest.raises(UnknownName, match="choose from a100-nvswitch, b300"):
        find_machine("dgx-2")
    with pytest.raises(UnknownName, match=r"'1 x 7' \(did you mean '1 x 2'\?\); choose"):
        parse_machine("mine", GOOD).graph(Group(1, 7))
