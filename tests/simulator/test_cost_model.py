"""NCCL's cost model and the H100 nodes, against figures by hand and NCCL's own record."""

import csv
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator import h100
from dynamiccl.simulator.cost_model import CostModel, Pair
from dynamiccl.simulator.machine import (
    RELEASES,
    find_machine,
    machine_names,
    release_of,
)
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.physics import largest_chunk_bytes
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


def rows_of(name: str, place: Path = MODEL) -> list[dict[str, str]]:
    with (place / name).open(encoding="utf-8", newline="") as file:
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


HERE = Path(__file__).parents[2] / "dynamiccl" / "simulator"
MIB, GIB = 1 << 20, 1 << 30
Cell = tuple[Algorithm, Protocol]
RING_LL, RING_LL128, RING_SIMPLE = RINGS = [(RING, protocol) for protocol in Protocol]
TREE_LL, TREE_LL128, TREE_SIMPLE = TREES = [(TREE, protocol) for protocol in Protocol]
NVLS_SIMPLE, NVLS_TREE_SIMPLE = (NVLS, SIMPLE), (NVLS_TREE, SIMPLE)
NODE, TWO, FOUR = Group(1, 8), Group(2, 8), Group(4, 8)
SYSTEM, NCCL = h100.H100System(), h100.default_model()


def all_reduce(size: int, group: Group = FOUR) -> Call:
    return Call(group, AR, size)


def test_shipped_ramps_are_those_of_the_source() -> None:
    # Not applied: the second ramp that its source fits to rings of part of a node.
    left_out = {"ring_multinode_ramp", "ring_sync_per_node", "alltoall_nic_ramp"}
    source = rows_of("h100_corrections.csv")
    shipped = rows_of("h100_corrections.csv", HERE)
    assert len(shipped) == 74
    assert shipped == [row for row in source if row["table"] not in left_out]


# --- Several nodes ---
#
# NCCL's model of 4 x 8 ranks: NVLSTree 81.0 us, 8 x 24 x 5/6 GB/s; AllGather by a ring in LL128
# 79.2 us, 8 x 36.7 x 32/31 GB/s.
NVLS_TREE_GBYTES_PER_S, GATHER_GBYTES_PER_S = 160.0, 8 * 36.7 * 32 / 31


def test_true_times_are_nccls_but_for_factors_that_grow_with_the_size() -> None:
    """By what share of the bandwidth that NCCL counts on, at bytes a GPU."""
    for per_gpu, factor in (
        (64, 1.0),  # below the fitted sizes the source holds 1.0
        (256 << 10, 0.41),
        (2**20.5, 0.80),  # half-way to 2 MiB (0.88) in the logarithm
        (1 << 30, 1.0),
    ):
        size = round(per_gpu * 32)
        expected = 81.0 + size / (1000 * NVLS_TREE_GBYTES_PER_S * factor)
        assert h100.true_us(all_reduce(size), NVLS_TREE_SIMPLE) == pytest.approx(expected, rel=1e-6)
    for per_gpu, factor in ((1, 0.01), (4 << 10, 0.25), (32 * MIB, 0.87)):
        size = per_gpu * 32
        expected = 79.2 + size / (1000 * GATHER_GBYTES_PER_S * factor)
        found = h100.true_us(Call(FOUR, AG, size), RING_LL128)
        assert found == pytest.approx(expected, rel=1e-12)
    # Rings of parts of nodes, and trees, take what NCCL thinks.
    for size in (1 << 10, MIB, 1 << 30):
        for call, cell in ((Call(Group(4, 4), AG, size), RING_LL), (all_reduce(size), TREE_LL)):
            assert h100.true_us(call, cell) == NCCL.cost_us(call, *cell)


# --- One node ---


# h100_corrections.csv, one_node_algbw and one_node_latency; 3 lies half-way between 2 and 4.
@pytest.mark.parametrize(
    ("collective", "ranks", "algbw", "latency"),
    [(AG, 3, 485.5, 12.5), (RS, 8, 394.0, 30.0), (AR, 4, 236.0, 15.0), (AR, 8, 267.0, 31.0)],
)
def test_one_node_truth_goes_through_what_was_measured(
    collective: Collective, ranks: int, algbw: float, latency: float
) -> None:
    small, large = (
        SYSTEM.parts(Call(Group(1, ranks), collective, size), ABSTAIN).quiet_us
        for size in (64, 10**12)
    )
    assert small == pytest.approx(latency, abs=0.01)
    assert 10**12 / large / 1000 == pytest.approx(algbw, rel=1e-3)


# --- What NCCL decides ---


def test_default_decides_by_what_nccl_believes_and_not_by_what_is_true() -> None:
    wrong = []
    for size in (1 << k for k in range(10, 33)):
        call = all_reduce(size)
        cells = SYSTEM.cells(FOUR, AR)
        costs = {cell: NCCL.cost_us(call, *cell) for cell in cells}
        times = {cell: h100.true_us(call, cell) for cell in cells}
        believed, true = min(costs, key=costs.__getitem__), min(times, key=times.__getitem__)
        chosen = NCCL.resolve(call, ABSTAIN)
        assert (chosen.algorithm, chosen.protocol) == believed
        wrong += [size] if believed != true else []
    # Where NVLSTree has not reached its bandwidth yet, NCCL takes it too early.
    assert 8 * MIB in wrong
    assert NCCL.resolve(all_reduce(32 * MIB), ABSTAIN).algorithm is NVLS_TREE


# --- Channels, NICs and chunks ---

CALLS = [
    (group, collective, cell)
    for group in (Group(1, 2), NODE, FOUR, Group(32, 1))
    for collective in SYSTEM.collectives()
    for cell in SYSTEM.cells(group, collective)
]
SIZES = st.integers(64, 1 << 34)


@pytest.mark.parametrize(
    ("call", "cell", "asked", "used"),
    [
        # 24 asked and 22 used, as seen on 2.27.7 and 2.29.7: 1 MiB makes 2 MiB of traffic in 128
        # cells, and 6 of them to a channel.
        (all_reduce(MIB, NODE), RING_SIMPLE, 24, 22),
        # 32, 64 or 127 asked at 1 GiB: the communicator's 24, or the 16 of NVLS.
        (all_reduce(GIB, NODE), RING_SIMPLE, 64, 24),
        # 64 KiB of AllReduce is 128 KiB of traffic: eight channels of 16 KiB, four times for LL.
        (all_reduce(64 << 10), TREE_LL128, 16, 8),
        # One rank's share times the ranks, for a gather.
        (Call(FOUR, AG, 64 << 10), RING_SIMPLE, 16, 4),
        # NVLSTree is spread like a ring (enqueue.cc: only NVLS itself is a CollNet kind).
        (all_reduce(1024), NVLS_TREE_SIMPLE, 12, 1),
    ],
)
def test_request_is_a_maximum(call: Call, cell: Cell, asked: int, used: int) -> None:
    assert NCCL.num_channels(call, *cell, asked) == used


@pytest.mark.parametrize(("made", "asked", "used"), [(None, 32, 16), (32, 32, 32), (4, None, 4)])
def test_more_channels_need_another_comm(made: int | None, asked: int | None, used: int) -> None:
    assert h100.default_model(made).num_channels(all_reduce(GIB), *RING_SIMPLE, asked) == used


@given(where=st.sampled_from(CALLS), size=SIZES)
@settings(deadline=None, max_examples=200)
def test_asking_for_nccls_own_number(where: tuple[Group, Collective, Cell], size: int) -> None:
    group, collective, cell = where
    call = Call(group, collective, size)
    own, plain = NCCL.num_channels(call, *cell), h100.true_us(call, cell)
    assert h100.true_us(call, cell, own) == plain
    assert h100.channel_factor(call, cell, own) == 1.0
    chunk = largest_chunk_bytes(call.collective, cell[0], SIMPLE, h100.BUFFER_BYTES)
    assert h100.true_us(call, cell, chunk_bytes=chunk) == plain


@given(where=st.sampled_from(CALLS), size=SIZES)
@settings(deadline=None, max_examples=200)
def test_one_number_is_best(where: tuple[Group, Collective, Cell], size: int) -> None:
    group, collective, cell = where
    call = Call(group, collective, size)
    used = sorted({NCCL.num_channels(call, *cell, asked) for asked in range(1, 25)})
    times = [h100.channel_factor(call, cell, count) for count in used]
    best = times.index(min(times))
    assert all(a > b for a, b in pairwise(times[: best + 1]))
    assert all(a < b for a, b in pairwise(times[best:]))


def test_chunk_has_a_mild_effect_on_simple_alone() -> None:
    call = all_reduce(64 * MIB)
    sizes = [1 << k for k in range(14, 22)]
    times = [h100.true_us(call, RING_SIMPLE, chunk_bytes=c) for c in sizes]
    best = times.index(min(times))
    assert sizes[best] == 128 << 10  # a sixteenth of a rank's 2 MiB
    assert times[:best] == sorted(times[:best], reverse=True)
    assert times[best:] == sorted(times[best:])
    assert 0.7 < min(times) / h100.true_us(call, RING_SIMPLE) < 1.0
    assert max(times) / min(times) < 1.5
    assert h100.true_us(call, RING_LL128, chunk_bytes=1 << 16) == h100.true_us(call, RING_LL128)


@pytest.mark.parametrize(
    ("group", "cell", "channels", "rings"),
    [
        # 1 GiB, 2 x 15/16 of it through one NIC; LL sends as many flags as data.
        (TWO, RING_SIMPLE, 1, 15 / 8),
        (TWO, RING_LL, 1, 2 * 15 / 8),
        (TWO, RING_SIMPLE, 8, 15 / 64),
        # One rank a node has one NIC, whatever the channels.
        (Group(2, 1), RING_SIMPLE, 8, 1.0),
        # Two nodes: half of the bytes up one tree, half down the other. More: twice as many.
        (TWO, TREE_SIMPLE, 1, 1.0),
        (FOUR, TREE_SIMPLE, 1, 2.0),
        (NODE, RING_SIMPLE, 1, 0.0),
        # All heads send, so NCCL's bound of a channel is the lower one.
        (TWO, NVLS_TREE_SIMPLE, 1, 50 / (57.7 * 5 / 6)),
    ],
)
def test_line_rate_by_hand(group: Group, cell: Cell, channels: int, rings: float) -> None:
    """A ring had 115 GB/s with one channel, through one NIC of 50."""
    call = all_reduce(GIB, group)
    found = h100.least_transfer_us(call, cell, channels)
    assert found == pytest.approx(rings * GIB / 50_000)
    assert h100.true_us(call, cell, channels) >= found


def test_what_was_measured_with_nccls_own_channels_is_within_the_line_rate() -> None:
    """So the published figures stay as they are: the bound is for fewer channels alone."""
    over = [
        (call, cell)
        for group in SYSTEM.groups()
        for collective in SYSTEM.collectives()
        for size in (1 << 24, 1 << 28, 1 << 32)
        for call in [Call(group, collective, size)]
        for cell in SYSTEM.cells(group, collective)
        if h100.true_us(call, cell)
        < h100.least_transfer_us(call, cell, NCCL.num_channels(call, *cell))
    ]
    assert over == []


# --- Noise of sweeps ---

NOISE = Noise(seed=1, sigma=0.015, tail_probability=0.02, drift_sigma=0.005)


def test_noise_is_around_one_with_a_heavy_tail() -> None:
    factors = np.array([NOISE.factor(f"c{i % 50}", f"t{i}") for i in range(4000)])
    assert np.median(factors) == pytest.approx(1.0, abs=0.004)
    assert np.all(factors > 0.9)
    # 2 % of launches are in the tail; without one, 1.1 would be six standard deviations away.
    assert 0.005 < np.mean(factors > 1.1) < 0.03
    assert factors.max() > 1.5


@pytest.mark.parametrize(
    ("sigma", "drift_sigma", "own", "of_another_run"),
    [(0.0, 0.0, True, True), (0.0, 0.1, True, False), (0.1, 0.0, False, False)],
)
def test_drift_is_shared_by_a_run_and_the_rest_is_a_trial_s_own(
    sigma: float, drift_sigma: float, own: bool, of_another_run: bool
) -> None:
    noise = Noise(seed=1, sigma=sigma, tail_probability=0.0, drift_sigma=drift_sigma)
    first = noise.factor("cycle-0", "a")
    assert (noise.factor("cycle-0", "b") == first) is own
    assert (noise.factor("cycle-1", "a") == first) is of_another_run
    assert (first == 1.0) is of_another_run
