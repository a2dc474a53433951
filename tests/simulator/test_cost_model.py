"""NCCL's cost model against figures computed by hand and NCCL's own record; machines it runs on."""

import csv
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.cost_model import CostModel, Pair
from dynamiccl.simulator.machine import (
    RELEASES,
    find_machine,
    machine_names,
    release_of,
)
from dynamiccl.simulator.system import Call, Group
from tests.published import folder

MODEL = folder("model")
AR, AG, RS, BC = (
    Collective.AllReduce,
    Collective.AllGather,
    Collective.ReduceScatter,
    Collective.Broadcast,
)
RING, TREE, NVLS, NVLS_TREE, PAT = (
    Algorithm.Ring,
    Algorithm.Tree,
    Algorithm.NVLS,
    Algorithm.NVLSTree,
    Algorithm.PAT,
)
LL, LL128, SIMPLE = Protocol.LL, Protocol.LL128, Protocol.Simple
V27, V28, V29, V30 = (NcclVersion(2, *v) for v in ((27, 7), (28, 9), (29, 7), (30, 7)))


class Decision(NamedTuple):
    """A recorded decision of NCCL's own code."""

    version: NcclVersion
    topology: str
    call: Call
    #: Every cell that NCCL had.
    costs_us: Mapping[Pair, float]
    #: What it took, with the channels that ran.
    chosen: Config

    @property
    def held_out(self) -> bool:
        """Whether the size is no power of two: constants are fitted on those alone."""
        return self.call.size_bytes.bit_count() > 1


@cache
def decisions() -> list[Decision]:
    calls: dict[tuple[str, ...], list[dict[str, str]]] = {}
    names = ("nccl_version", "topology", "num_nodes", "ranks_per_node", "collective", "size_bytes")
    for row in rows_of("nccl_default_decisions.csv"):
        calls.setdefault(tuple(row[name] for name in names), []).append(row)
    found = []
    for (version, topology, nodes, ranks, collective, size), rows in calls.items():
        call = Call(Group(int(nodes), int(ranks)), Collective.parse(collective), int(size))
        [chosen] = [row for row in rows if row["chosen"] == "true"]
        config = Config(*cell_of(chosen), int(chosen["num_channels"]))
        costs = {cell_of(row): float(row["cost_us"]) for row in rows}
        found.append(Decision(NcclVersion.parse(version), topology, call, costs, config))
    return found


def rows_of(name: str) -> list[dict[str, str]]:
    with (MODEL / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cell_of(row: Mapping[str, str]) -> Pair:
    return Algorithm.parse(row["algorithm"]), Protocol.parse(row["protocol"])


@cache
def model_of(machine: str, version: NcclVersion, *opens: int | None) -> CostModel:
    return CostModel(version, find_machine(machine), *opens)


def test_choices_are_those_of_nccl_s_own_code() -> None:
    recorded = {find_machine(name).recorded_as: name for name in machine_names()}
    agree, held_out, channels = [], [], []
    for each in decisions():
        model, call = model_of(recorded[each.topology], each.version), each.call
        costs = {c: model.cost_us(call, *c) for c in model.cells(call.group, call.collective)}
        # The record holds float32.
        assert costs == pytest.approx(dict(each.costs_us), rel=1e-6)
        ran = model.resolve(call, ABSTAIN)
        agree.append((ran.algorithm, ran.protocol) == (each.chosen.algorithm, each.chosen.protocol))
        channels.append(ran == each.chosen)
        held_out += agree[-1:] if each.held_out else []
    assert (len(agree), len(held_out)) == (925, 300)
    assert min(map(np.mean, (agree, held_out, channels))) >= 0.95


def test_lines_are_those_that_h100_nodes_printed() -> None:
    model = model_of("h100-ib", NcclVersion(2, 27, 5))
    rows = rows_of("h100_ib_nccl2.27.5.csv")
    assert len(rows) == 250
    for row in rows:
        lines = model.lines(Group(int(row["nodes"]), int(row["ranks_per_node"])))
        line = lines[Collective.parse(row["collective"]), *cell_of(row)]
        # One digit is printed.
        assert line.latency_us == pytest.approx(float(row["latency_us"]), abs=0.0501)
        printed = float(row["algbw_gbytes_per_s"])
        assert line.algbw_gbytes_per_s == pytest.approx(printed, abs=0.0501)


# NCCL's model table of the broadcasts' log below, 2.29.7 on 2 x 1.
def test_sockets_have_the_table_that_nccl_logged() -> None:
    lines = model_of("rtx5090-sockets", V29).lines(Group(2, 1))
    for cell, *logged in [
        ((BC, RING, LL), 9.3, 1.2),
        ((BC, RING, SIMPLE), 22.4, 2.4),
        ((AG, RING, LL), 11.6, 2.4),
        ((AG, RING, SIMPLE), 22.4, 4.8),
        ((RS, PAT, SIMPLE), 17.6, 3.6),
        ((AR, TREE, LL), 16.8, 0.5),
        ((AR, TREE, SIMPLE), 36.4, 1.9),
        ((AR, RING, LL), 16.6, 1.2),
        ((AR, RING, SIMPLE), 36.4, 2.4),
    ]:
        line = lines[cell]
        assert [line.latency_us, line.algbw_gbytes_per_s] == pytest.approx(logged, abs=0.0501)


def test_calls_over_sockets_run_as_they_were_seen_to() -> None:
    """Broadcasts by the log's lines such as `channel{Lo..Hi}={0..3}`; AllReduce by its read-back.

    Of ebpf_broadcast_default_v2.18.nccl_debug.log, and of the source of rtx5090_socket_tables.csv
    (runs transition-8k and 3rank).
    """
    model = model_of("rtx5090-sockets", V29)
    for kib, protocol, channels in (
        *((8, LL, 1), (16, LL, 2), (32, SIMPLE, 1), (64, SIMPLE, 2), (128, SIMPLE, 4)),
        (128 << 10, SIMPLE, 4),
    ):
        ran = model.resolve(Call(Group(2, 1), BC, kib << 10), ABSTAIN)
        assert ran == Config(RING, protocol, channels)
    for ranks, size, cell in (
        *((2, 81920, (RING, LL)), (2, 86016, (RING, SIMPLE))),
        *((3, 2048, (TREE, LL)), (3, 4096, (RING, LL)), (3, 65536, (RING, LL))),
        (3, 131072, (RING, SIMPLE)),
    ):
        ran = model.resolve(Call(Group(ranks, 1), AR, size), ABSTAIN)
        assert (ran.algorithm, ran.protocol) == cell


@pytest.mark.parametrize(
    ("machine", "version", "group", "cell", "latency", "algbw"),
    [
        # NVLS went from a ratio to an efficiency.
        ("h100-ib", V28, Group(1, 8), (AR, NVLS, SIMPLE), 25.0, 8 * (80 * 0.85 * 7 / 8) * 8 / 14),
        ("h100-ib", V28, Group(1, 8), (AG, NVLS, SIMPLE), 25.0, 8 * 40 * 0.85 * 7 / 8 * 7 / 8),
        # NVLSTree costs more latency since 2.28.9. Two nodes count the network twice; 48 GB/s x 2
        # is more than Hopper's 57.7 a channel.
        ("h100-ib", V28, Group(2, 8), (AR, NVLS_TREE, SIMPLE), 25 + 2 * 20.9, 8 * 57.7 * 16 / 30),
        # 16 channels of 45 GB/s: 0.92 x 720 is beyond 16 x 40 from 2.29.7 on, and 16 x 34.5 before.
        ("b300", NcclVersion(2, 29, 2), Group(1, 8), (AG, RING, LL128), None, 16 * 34.5 * 8 / 7),
        ("b300", NcclVersion(2, 29, 7), Group(1, 8), (AG, RING, LL128), None, 16 * 40 * 8 / 7),
    ],
)
def test_a_release_has_lines_of_its_own(
    machine: str,
    version: NcclVersion,
    group: Group,
    cell: tuple[Collective, Algorithm, Protocol],
    latency: float | None,
    algbw: float,
) -> None:
    line = model_of(machine, version).lines(group)[cell]
    assert line.algbw_gbytes_per_s == pytest.approx(algbw)
    assert latency is None or line.latency_us == pytest.approx(latency)


def test_cells_and_channels_are_those_of_release_build_and_environment() -> None:
    cells = {v: model_of("h100-ib", v).cells(Group(1, 2), AR) for v in (V27, V28)}
    assert (NVLS, SIMPLE) not in cells[V27]  # three ranks of a node, until 2.28.7
    assert (NVLS, SIMPLE) in cells[V28]
    rings = model_of("gb10-roce-ring", V30)
    for collective in (AR, AG, BC):
        assert {a for a, _ in rings.cells(Group(4, 1), collective)} == {RING}
    # Twice what the search found, and what the environment asks for.
    group = Group(1, 8)
    most = [model_of("b300", V29).max_channels(group, each) for each in (RING, NVLS)]
    few = [model_of("b300", V29, None, 8).max_channels(group, each) for each in (RING, NVLS)]
    assert (most, few) == ([32, 24], [8, 8])
    assert model_of("gb10-roce-ring", V30, 64).max_channels(Group(4, 1), RING) == 64
    # 8 rings of 48 GB/s on two nodes are twice 8, and fast; 2 of 24 are not.
    h100 = model_of("h100-ib", V27)
    assert [h100.max_channels(Group(2, n), RING) for n in (1, 2, 4, 8)] == [4, 8, 16, 16]


def test_channels_may_be_one_more_than_asked_where_cells_do_not_divide_evenly() -> None:
    # 12 x 8 KiB of AllReduce in 2.27 are 12 cells; four bytes more are a thirteenth.
    model, group = model_of("h100-ib", V27), Group(1, 8)
    even = Call(group, AR, 12 * 8192)
    assert model.resolve(even, Config(RING, SIMPLE, 12)).num_channels == 12
    odd = Call(group, AR, 12 * 8192 + 4)
    assert model.resolve(odd, Config(RING, SIMPLE, 12)).num_channels == 13


def test_a_release_is_that_of_the_nearest_before() -> None:
    assert release_of(NcclVersion(2, 28, 8)).version == NcclVersion(2, 28, 7)
    assert [release.version for release in RELEASES] == sorted(r.version for r in RELEASES)


def test_every_shipped_machine_says_where_it_is_from_and_can_decide() -> None:
    assert len(machine_names()) >= 7
    for name in machine_names():
        machine = find_machine(name)
        assert machine.origin
        assert machine.description
        for search in machine.search:
            graph = machine.graph(Group(search.nodes[0], search.ranks_per_node[0]))
            assert search in (graph.ring, graph.tree, graph.nvls)
            # PCI and NVLink numbers are per channel, in GB/s: nothing carries more than 100.
            assert all(0 < speed <= 100 for speed in search.gbytes_per_s)
