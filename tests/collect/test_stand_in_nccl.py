"""The stand-in's NCCL: what it chooses, logs and asks of a tuner, release by release."""

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamiccl.collect.nccl_tests import parse_text
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator import h100
from dynamiccl.simulator.channels import default_channels
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.nccl_tests.releases import NCCL_RELEASES, tuner_versions
from tests.fakes.recording import build_recorder, compiler
from tests.fakes.running import StandIn, times_us, tuning_lines

NCCL = [str(release) for release in NCCL_RELEASES]
TUNING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
ONE_ROW = ("-b", "1M", "-e", "1M", "-g", "8")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(install_stand_in(tmp_path_factory.mktemp("nccl-tests")))


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recorder(tmp_path_factory.mktemp("recorder"))


def test_default_is_the_model_s_choice_with_nccl_s_channels(stand_in: StandIn) -> None:
    group, collective = h100.Group(1, 8), Collective.AllReduce
    text = stand_in.output(
        "all_reduce_perf", "-b", "256", "-e", "1G", "-f", "8", "-g", "8", settings=TUNING
    )
    chosen = {int(line.split()[1]): line for line in tuning_lines(text)}
    assert len(chosen) == 23  # the warm-up goes up in steps of two
    names = {Algorithm.Ring: "RING", Algorithm.Tree: "TREE", Algorithm.NVLS: "NVLS"}
    for size, line in chosen.items():
        config = h100.default_config(group, collective, size)
        assert config.algorithm is not None
        assert config.protocol is not None
        used = default_channels(group, collective, config.algorithm, config.protocol, size)
        assert f"Algo {names[config.algorithm]} proto {config.protocol.wire.upper()} " in line
        assert line.endswith(f"channel{{Lo..Hi}}={{0..{used - 1}}}")


@pytest.mark.parametrize("version", NCCL)
def test_lines_about_a_call_are_those_of_the_release(stand_in: StandIn, version: str) -> None:
    text = stand_in.output(
        "all_gather_perf",
        *ONE_ROW,
        settings={**TUNING, "FAKE_NCCL_VERSION": version, "NCCL_ALGO": "Ring"},
    )
    line = tuning_lines(text)[0]
    release = NcclVersion.parse(version)
    # A float32, as NCCL's table holds it.
    cell = (Algorithm.Ring, Protocol.LL)
    cost = h100.cost_table(h100.Group(1, 8), Collective.AllGather, 1 << 20)[cell]
    numbers = f"1048576 Bytes -> Algo 1 proto 0 time {cost:f}"
    if release < NcclVersion(2, 23):
        assert line == numbers
    elif release < NcclVersion(2, 24):
        assert line == f"AllGather: {numbers}"
    else:  # one rank's bytes
        channels = "channel{Lo..Hi}={0..23}"
        assert line == f"AllGather: 131072 Bytes -> Algo RING proto LL {channels}"
    separate = {**TUNING, "FAKE_NCCL_VERSION": version, "NCCL_DEBUG_FILE": "nccl.%h.%p.log"}
    output = stand_in.output("all_gather_perf", *ONE_ROW, settings=separate)
    [log] = stand_in.folder.glob("nccl.*.log")
    found = parse_text(log.read_text(encoding="utf-8") + output, where="stand-in")
    log.unlink()
    assert found.rejected == ()
    for row in found.rows:
        assert row["nccl_version"] == version
        assert (row["actual_algorithm"], row["actual_protocol"]) == ("Ring", "LL")
        named = None if release < NcclVersion(2, 24) else 24
        assert row.get("actual_num_channels") == named


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, "Algo RING proto SIMPLE"),
        ({"NCCL_ALGO": "^Ring,NVLS"}, "Algo TREE proto "),
        ({"NCCL_PROTO": "^ll"}, "Algo NVLS proto SIMPLE"),
        ({"NCCL_PROTO": "LL128"}, "Algo TREE proto LL128"),
        ({"NCCL_ALGO": "allreduce:tree;broadcast:ring", "NCCL_PROTO": "Simple"}, "Algo TREE proto"),
        ({"NCCL_ALGO": "Tree;allreduce:nvls"}, "Algo NVLS proto SIMPLE"),
        ({"NCCL_NVLS_ENABLE": "0", "NCCL_PROTO": "Simple"}, "Algo RING proto SIMPLE"),
        ({"NCCL_MIN_CTAS": "2", "NCCL_MAX_CTAS": "2"}, "channel{Lo..Hi}={0..1}"),
        ({"NCCL_MAX_NCHANNELS": "3"}, "channel{Lo..Hi}={0..2}"),
        ({"NCCL_MIN_CTAS": "40", "NCCL_PROTO": "LL"}, "channel{Lo..Hi}={0..31}"),
    ],
)
def test_environment_forces_the_choice(
    stand_in: StandIn, settings: dict[str, str], said: str
) -> None:
    text = stand_in.output("all_reduce_perf", *ONE_ROW, settings={**TUNING, **settings})
    lines = set(tuning_lines(text))
    assert len(lines) == 1
    assert said in lines.pop()
    for name, value in settings.items():
        assert f"{name} set by environment to {value}" in text


def test_forced_config_is_slower_or_faster_as_the_simulator_says(stand_in: StandIn) -> None:
    quiet = {"FAKE_NOISE": "0"}
    large = ("-b", "64M", "-e", "64M", "-g", "8")
    times = {
        channels: times_us(
            stand_in.output(
                "all_reduce_perf",
                *large,
                settings={**quiet, "NCCL_MIN_CTAS": channels, "NCCL_MAX_CTAS": channels},
            )
        )[0]
        for channels in ("1", "12", "16")
    }
    assert times["12"] < times["16"] < 0.5 * times["1"]
    plain = times_us(stand_in.output("all_reduce_perf", *large, settings=quiet))
    assert plain == [times["16"]] * 2
    expected = h100.true_us(
        h100.Group(1, 8), Collective.AllReduce, Algorithm.NVLS, Protocol.Simple, 64 << 20
    )
    assert plain[0] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, 3.0),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}, 8.0),
    ],
)
def test_slow_transports_are_slow_and_have_no_nvls(
    stand_in: StandIn, settings: dict[str, str], factor: float
) -> None:
    large = ("-b", "64M", "-e", "64M", "-g", "8")
    text = stand_in.output("all_reduce_perf", *large, settings={**TUNING, **settings})
    assert "Algo RING proto SIMPLE" in tuning_lines(text)[0]
    quiet = stand_in.output("all_reduce_perf", *large, settings={"FAKE_NOISE": "0", **settings})
    expected = h100.true_us(
        h100.Group(1, 8), Collective.AllReduce, Algorithm.Ring, Protocol.Simple, 64 << 20
    )
    assert times_us(quiet)[0] == pytest.approx(expected * factor, rel=1e-3)


def test_noise_is_the_launch_s_own_and_repeatable(stand_in: StandIn) -> None:
    arguments = ("-b", "1M", "-e", "64M", "-f", "2", "-g", "8", "-N", "2")
    texts = [
        stand_in.output("all_reduce_perf", *arguments, settings=settings)
        for settings in ({}, {}, {"FAKE_LAUNCH": "1"}, {"FAKE_SEED": "1"})
    ]
    first, again, other, seeded = map(times_us, texts)
    assert first == again
    assert len({tuple(t) for t in (first, other, seeded)}) == 3
    assert len(set(first)) > len(first) * 0.9  # each cycle and half draws anew


def test_dumps_describe_one_node_of_eight(stand_in: StandIn, tmp_path: Path) -> None:
    topology, graphs = tmp_path / "topo.xml", tmp_path / "graph.xml"
    settings = {"NCCL_TOPO_DUMP_FILE": str(topology), "NCCL_GRAPH_DUMP_FILE": str(graphs)}
    stand_in.output("all_reduce_perf", *ONE_ROW, settings=settings)
    system = ET.fromstring(topology.read_text(encoding="utf-8"))
    assert (system.tag, system.get("version")) == ("system", "1")
    gpus = list(system.iter("gpu"))
    assert [(g.get("dev"), g.get("rank"), g.get("sm")) for g in gpus] == [
        (str(i), str(i), "90") for i in range(8)
    ]
    assert {sum(int(link.get("count", 0)) for link in g.iter("nvlink")) for g in gpus} == {18}
    assert len(list(system.iter("net"))) == 8
    graph = ET.fromstring(graphs.read_text(encoding="utf-8"))
    assert {len(list(g.iter("channel"))) for g in graph} == {12}


@dataclass(frozen=True)
class Recorded:
    """A run under the recording tuner: its output, NCCL's log, and the tuner's calls."""

    output: str
    log: str
    calls: list[str]

    def of(self, *starts: str) -> list[list[str]]:
        """Calls that begin so, as words."""
        return [call.split() for call in self.calls if call.startswith(starts)]


def record(
    stand_in: StandIn, recorder: Path, tmp_path: Path, *arguments: str, **settings: str
) -> Recorded:
    files = {"RECORD_FILE": tmp_path / "calls.txt", "NCCL_DEBUG_FILE": tmp_path / "nccl.log"}
    for file in files.values():
        file.unlink(missing_ok=True)
    paths = {name: str(file) for name, file in files.items()}
    plugin = {"NCCL_TUNER_PLUGIN": str(recorder)}
    output = stand_in.output(
        "all_reduce_perf", *arguments, settings={**TUNING, **plugin, **paths, **settings}
    )
    calls, log = (file.read_text(encoding="utf-8") for file in files.values())
    return Recorded(output, log, calls.splitlines())


@needs_compiler
@pytest.mark.parametrize("version", NCCL)
def test_each_nccl_takes_its_own_abi(
    stand_in: StandIn, recorder: Path, tmp_path: Path, version: str
) -> None:
    run = record(stand_in, recorder, tmp_path, *ONE_ROW, "-n", "1", FAKE_NCCL_VERSION=version)
    text, calls = run.log, run.calls
    newest = tuner_versions(NcclVersion.parse(version))[0]
    assert newest == {"2.21": 2, "2.22": 3, "2.23": 3, "2.24": 4, "2.27": 4}.get(
        version[:4], 6 if version >= "2.30" else 5
    )
    if newest >= 5:
        assert f"TUNER/Plugin: Using recorder (v{newest})" in text
        assert calls[0] == "domains 1 of 8 to 8"
    else:
        assert "TUNER/Plugin: Using tuner plugin recorder" in text
    assert "NCCL INFO recording" in text
    inits = [call for call in calls if call.startswith("init")]
    assert inits == [f"init {i} ranks 8 nodes 1" for i in range(1, 9)]
    assert [c for c in calls if c.startswith("finalize")] == [f"finalize {i}" for i in range(1, 9)]
    asks = Counter(call for call in calls if call.startswith("ask"))
    # Warm-up, then for both halves one call, one iteration and one check, by eight ranks; 2.21
    # asks twice each time and has no table.
    assert len(asks) == 8
    assert set(asks.values()) == {14 if newest == 2 else 7}
    rows = {2: "nvls 1"}.get(newest, f"algorithms {7 if version >= '2.23' else 6}")
    assert f"ask 1 function 4 bytes 1048576 {rows}" in asks
    assert any(call.startswith("chunk") for call in calls) == (newest == 6)


@needs_compiler
def test_tuner_is_asked_in_the_benchmark_s_order(
    stand_in: StandIn, recorder: Path, tmp_path: Path
) -> None:
    arguments = ("-b", "1K", "-e", "8K", "-f", "4", "-n", "2", "-w", "1", "-c", "1", "-N", "2")
    run = record(stand_in, recorder, tmp_path, *arguments, "-g", "2")
    sizes = [1024, 2048, 4096, 8192] + 2 * (8 * [1024] + 8 * [4096])
    asked = [(int(call[1]), int(call[5])) for call in run.of("ask")]
    assert asked == [(context, size) for size in sizes for context in (1, 2)]
    run = record(stand_in, recorder, tmp_path, *arguments, "-g", "2", "-m", "4")
    summed = [int(call[5]) for call in run.of("ask 1")]
    # The timed calls of -m are one call of their sum; the others are single.
    assert summed[4:12] == [1024, 4096, 4096, 1024, 1024, 4096, 4096, 1024]
    old = {"FAKE_NCCL_TESTS_VERSION": "2.13.12"}
    run = record(stand_in, recorder, tmp_path, *arguments, "-g", "2", **old)
    assert [int(call[5]) for call in run.of("ask 1")][:2] == [8192, 1024]


@needs_compiler
@pytest.mark.parametrize("version", NCCL)
def test_tuner_forces_a_cell_and_channels(
    stand_in: StandIn, recorder: Path, tmp_path: Path, version: str
) -> None:
    quiet = {"FAKE_NOISE": "0", "FAKE_NCCL_VERSION": version}
    run = record(stand_in, recorder, tmp_path, *ONE_ROW, RECORD_FORCE="0,1,4", **quiet)
    lines = set(tuning_lines(run.log))
    if version >= "2.24":
        chosen = "Algo TREE proto LL128 channel{Lo..Hi}={0..3}"
        assert lines == {f"AllReduce: 1048576 Bytes -> {chosen}"}
    elif version < "2.22":
        assert lines == set()  # 2.21 logs its own choices only
    else:
        assert {line.partition("Algo")[2] for line in lines} == {" 0 proto 1 time 0.000000"}
    cell = (Algorithm.Tree, Protocol.LL128)
    group = h100.Group(1, 8)
    expected = h100.true_us(group, Collective.AllReduce, *cell, 1 << 20, num_channels=4)
    assert times_us(run.output) == [pytest.approx(expected, abs=0.01)] * 2


@needs_compiler
def test_tuner_that_abstains_changes_nothing(
    stand_in: StandIn, recorder: Path, tmp_path: Path
) -> None:
    sizes = ("-b", "256", "-e", "64M", "-f", "4", "-g", "8", "-n", "1")
    run = record(stand_in, recorder, tmp_path, *sizes)
    without = stand_in.output("all_reduce_perf", *sizes, settings=TUNING)
    assert tuning_lines(run.log) == tuning_lines(without)


@needs_compiler
def test_chunk_is_asked_for_each_part_and_has_an_effect(
    stand_in: StandIn, recorder: Path, tmp_path: Path
) -> None:
    large = ("-b", "64M", "-e", "64M", "-g", "2", "-n", "1")
    newest = {"FAKE_NCCL_VERSION": "2.30.7", "FAKE_NOISE": "0", "NCCL_ALGO": "Ring"}
    newest["NCCL_PROTO"] = "Simple"
    own = record(stand_in, recorder, tmp_path, *large, **newest)
    # All ranks are asked for the choice before any is asked for a chunk.
    assert [call[0] for call in own.of("ask", "chunk")][:8] == ["ask"] * 2 + ["chunk"] * 6
    parts = own.of("chunk 1")[:3]
    assert {part[5] for part in parts} == {"1"}
    assert {part[7] for part in parts} == {str(2 << 20)}
    share = -(-(64 << 20) // 24)
    assert [int(part[3]) for part in parts] == [share, share, (64 << 20) - 23 * share]
    other = record(stand_in, recorder, tmp_path, *large, RECORD_CHUNK="16384", **newest)
    assert times_us(other.output)[0] > 1.02 * times_us(own.output)[0]


def test_plugin_that_is_not_there_is_only_logged(stand_in: StandIn) -> None:
    settings = {**TUNING, "NCCL_TUNER_PLUGIN": "nowhere"}
    text = stand_in.output("all_reduce_perf", *ONE_ROW, settings=settings)
    assert "Could not find: nowhere libnccl-tuner-nowhere.so" in text
    old = {**settings, "FAKE_NCCL_VERSION": "2.24.3", "NCCL_TUNER_PLUGIN": "/no/such.so"}
    text = stand_in.output("all_reduce_perf", *ONE_ROW, settings=old)
    assert "Could not find: /no/such.so. Using internal tuner plugin." in text


def test_debug_levels_and_subsystems(stand_in: StandIn) -> None:
    def said(**settings: str) -> str:
        return stand_in.output("all_reduce_perf", *ONE_ROW, settings=settings)

    assert "NCCL" not in said().replace("nccl", "")
    assert "\nNCCL version 2.29.7+cuda12.9\n" in said(NCCL_DEBUG="VERSION")
    usual = said(NCCL_DEBUG="info", NCCL_ALGO="Ring")
    assert "Init COMPLETE" in usual
    assert "NCCL_ALGO set by environment" in usual
    assert "Bytes ->" not in usual
    assert "Init" not in said(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING")
    assert "Bytes ->" in said(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="^INIT")
