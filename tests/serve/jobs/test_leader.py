"""The leader of mode adaptive, in the arbiter's worker: what it proposes at stops, and why."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pytest

from dynamiccl.collect.calls import FLAG_PROBE
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.serve.artifact import PluginIndex
from tests.cluster.slurm import wait_until
from tests.serve.brains import FIRST_BIN, NUM_BINS, HintPolicy, make_artifact
from tests.serve.jobs.conftest import Adaptive
from tests.serve.jobs.play import ALL, at
from tests.serve.jobs.setting import GPU, Setting, fingerprint
from tests.serve.jobs.thinking import (
    ONE,
    OTHER,
    Recorder,
    answering,
    counting,
    in_this_process,
    look,
    metrics_of,
    ranks_in,
    records_of,
    table_field,
)

NO_PROBES: Final = {"DYNAMICCL_PROBE_CALLS": "0"}
#: A few questions again and again, so that there are enough times of each; a record is a call.
TIMED: Final[dict[str, Any]] = {"rate": 1500, "max_group": 1, "pattern": 12}
SAMPLED: Final = {"DYNAMICCL_SAMPLE_PERCENT": "100"}
THINKING: Final = NO_PROBES | {"DYNAMICCL_ADAPT_INTERVAL_S": "0.2"}


# The kill file and new artifacts.


def test_a_kill_file_acts_at_the_next_stop(adaptive: Adaptive, tmp_path: Path) -> None:
    kill_file = tmp_path / "kill"
    played = adaptive(
        *at(4800, f"sh=touch {kill_file}"),
        *at(9600, f"sh=rm {kill_file}"),
        leader=NO_PROBES | {"DYNAMICCL_KILL_FILE": str(kill_file)},
        calls=16000,
    )
    assert played.switches == 2, played
    assert 1000 < played.calls - played.acted < 9000, played
    assert "the kill file is gone: back to the table" in played.log


def test_under_a_kill_file_nobody_gets_a_table(adaptive: Adaptive, tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    leader = {"DYNAMICCL_KILL_FILE": str(tmp_path / "kill")}
    played = adaptive(leader=leader)
    assert played.acted == 0
    assert "a kill file is there" in played.log


def swap(setting: Setting) -> str:
    return f"swap={setting.artifact},{setting.other_artifact}"


def test_a_new_artifact_acts_at_the_next_stop(adaptive: Adaptive) -> None:
    played = adaptive(*at(2000, swap(adaptive.setting)), leader=NO_PROBES, comms=3)
    assert "a new artifact" in played.log
    assert played.acted == played.calls
    assert [comm.switches for comm in played.communicators] == [1] * 5


#: How an artifact and its index are spoilt.
SPOILT: Final[dict[str, Callable[[Path, Path], object]]] = {
    "a table": lambda artifact, _: [
        path.write_bytes(path.read_bytes()[:-1] + b"\0") for path in artifact.rglob("*.dct")
    ],
    "format": lambda _, index: index.write_text("dynamiccl-index\t99\n"),
    # The system's name is another one's now.
    "machine": lambda _, index: index.write_text(index.read_text().replace(GPU, "NVIDIA Other")),
    "nothing": lambda artifact, _: [*map(Path.unlink, artifact.rglob("*.*"))],
    "open to all": lambda _, index: index.chmod(0o666),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_bad_artifact_is_refused_and_the_old_one_stays(what: str, adaptive: Adaptive) -> None:
    artifact = adaptive.setting.other_artifact
    SPOILT[what](artifact, artifact / "plugin.index")
    played = adaptive(*at(1000, swap(adaptive.setting)), leader=NO_PROBES)
    assert (played.acted, played.switches) == (played.calls, 0)


def test_a_file_system_that_stalls_delays_no_stop(adaptive: Adaptive, tmp_path: Path) -> None:
    """A named pipe that nobody reads lies where the leader writes its metrics first."""
    os.mkfifo(tmp_path / f"dynamiccl-{adaptive.setting.job}.prom.new")
    leader = {"DYNAMICCL_METRICS_DIR": str(tmp_path)}
    played = adaptive(leader=leader, calls=16000)
    assert played.switches > 8
    assert played.asked_longest_ms < 1000
    assert not list(tmp_path.glob("*.prom"))


# Probes and the guard.


@pytest.mark.parametrize(
    ("algorithm", "protocol"),
    [
        pytest.param(Algorithm.Ring, Protocol.LL128, id="ours-is-slow"),
        pytest.param(Algorithm.NVLS, Protocol.Simple, id="own-is-slow"),
    ],
)
def test_the_guard_withdraws(algorithm: Algorithm, protocol: Protocol, adaptive: Adaptive) -> None:
    calls_dir = adaptive.setting.root / "calls"
    played = adaptive(
        environment=SAMPLED | {"DYNAMICCL_CALLS_DIR": str(calls_dir)},
        slow=f"{int(algorithm)}:{int(protocol)}:5",
        **TIMED,
    )
    assert "choices withdrawn: collective" in played.log
    records = records_of(calls_dir, 0)
    timed = records[records["start_ns"] > 0]
    withdrawn = kept = 0
    for key in {(int(r["collective"]), int(r["size_bytes"])) for r in timed}:
        same = timed[(timed["collective"] == key[0]) & (timed["size_bytes"] == key[1])]
        took_us = (same["stop_ns"] - same["start_ns"]) / 1000
        ours, own = took_us[same["decided"] == 1], took_us[same["decided"] == 0]
        if len(ours) < 16 or len(own) < 16:
            continue  # the guard judges from eight on
        # The last call outside of probes: what was chosen in the end.
        in_the_end = same[same["flags"] & FLAG_PROBE == 0][-1]
        is_slower = median(ours) > 1.05 * median(own)  # the noise of an artifact that tells none
        assert bool(in_the_end["decided"]) != is_slower, key
        withdrawn += is_slower
        kept += not is_slower
    assert withdrawn > 0
    assert kept > 0 or algorithm is Algorithm.Ring


def test_probes_take_the_share_of_the_calls_that_was_asked_for(adaptive: Adaptive) -> None:
    calls_dir = adaptive.setting.root / "calls"
    # 64 calls in so many: 1 % with the 6400 of the default, here a tenth.
    probe_calls = 640
    adaptive(
        leader={"DYNAMICCL_PROBE_CALLS": str(probe_calls)},
        environment={"DYNAMICCL_CALLS_DIR": str(calls_dir)},
        # Later ones tell no table of a Broadcast.
        **TIMED | {"release": "2.28"},
    )
    is_probe = records_of(calls_dir, 0)["flags"] & FLAG_PROBE != 0
    edges = np.flatnonzero(np.diff(is_probe.astype(int))) + 1
    starts, ends = edges[::2], edges[1::2]
    assert len(starts) >= 2
    # Each probe is paid for before the next one.
    for start, end, following in zip(starts, ends, starts[1:], strict=False):
        pause = following - end
        assert pause >= probe_calls
        assert (end - start) <= 1.1 * 64 / probe_calls * pause + 1


# Metrics.


def test_the_leader_writes_metrics(adaptive: Adaptive, tmp_path: Path) -> None:
    leader = {"DYNAMICCL_METRICS_DIR": str(tmp_path)}
    adaptive(leader=leader, environment=SAMPLED, **TIMED | {"calls": 4500, "comms": 8})
    values = metrics_of((tmp_path / f"dynamiccl-{adaptive.setting.job}.prom").read_text())
    world = {name: value for (name, labels), value in values.items() if 'ranks="4"' in labels}
    assert world["dynamiccl_stops_agreed"] >= 4
    assert 0 < world["dynamiccl_timed_calls"] <= 4500
    assert world["dynamiccl_off"] == 0
    labels = {of for _, of in values}
    assert len(labels) > 4
    assert len(values) == len(labels) * len({name for name, _ in values})


# Brains.


@pytest.mark.parametrize("answers_with", [[ONE], [ONE, OTHER]], ids=["one", "in-turn"])
def test_a_brain_moves_the_table(answers_with: list[Config], adaptive: Adaptive) -> None:
    """It tells new calls from those that it has seen."""
    leader = THINKING | {"DYNAMICCL_BRAIN": counting(adaptive.setting.root, *answers_with)}
    if len(answers_with) == 1:
        leader |= {"DYNAMICCL_ADAPT_INTERVAL_S": "0.05"}
    played = adaptive(leader=leader, environment=SAMPLED, **TIMED)
    assert "the brain's" in played.log
    assert "the brain gave no table" not in played.log
    assert played.switches == 1 if len(answers_with) == 1 else played.switches >= 4


@pytest.mark.parametrize(
    ("brain", "why"),
    [
        (answering(table_field(ONE, 6)), "its table is for another communicator"),
        ("exit 3", "brain: it has ended with exit code 3"),
    ],
)
def test_a_brain_that_is_wrong_changes_nothing(brain: str, why: str, adaptive: Adaptive) -> None:
    job = TIMED | {"calls": 3000}
    leader = THINKING | {"DYNAMICCL_BRAIN": brain}
    played = adaptive(leader=leader, environment=SAMPLED, **job)
    assert (played.acted, played.switches) == (played.calls, 0)
    assert f"the brain gave no table: {why}" in played.log
    assert played.log.count("the brain gave no table") == 4  # each rank says it once


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_a_brain_that_goes_leaves_its_table(signal: str, adaptive: Adaptive) -> None:
    pid = adaptive.setting.root / "pid"
    leader = THINKING | {"DYNAMICCL_BRAIN": counting(adaptive.setting.root, ONE, OTHER)}
    gone = at(3000, f"sh=kill -{signal} $(tail -n 1 {pid})")
    played = adaptive(*gone, leader=leader, environment=SAMPLED, **TIMED)
    assert played.acted == played.calls
    assert played.switches >= 1
    assert played.asked_longest_ms < 1000
    started = pid.read_text().split()
    assert (len(started) > 1) == (signal == "KILL")  # the next question has another one
    wait_until(lambda: not Path("/proc", started[-1]).exists(), "the brain is gone")


@pytest.mark.parametrize("thinks", [False, True])
def test_an_arbiter_with_a_brain_ends_with_its_job(thinks: bool, adaptive: Adaptive) -> None:
    """Its worker has a thread that waits for a question, or minutes for an answer."""
    pid = adaptive.setting.root / "pid"
    brain = (
        f"echo $$ > {pid}; exec cat > /dev/null" if thinks else counting(adaptive.setting.root, ONE)
    )
    leader = THINKING | {"DYNAMICCL_BRAIN": brain}
    arbiter = adaptive.arbiter(**leader)
    with subprocess.Popen(["sleep", "600"]) as launcher:
        arbiter.ends_with = launcher.pid
        with arbiter:
            played = adaptive.under(arbiter.address, environment=SAMPLED, **TIMED | {"calls": 3000})
            assert ("the brain's" in played.log) != thinks
            launcher.kill()
            launcher.wait()
            wait_until(lambda: not arbiter.processes(), "the arbiter is gone", 3)
    wait_until(lambda: not Path("/proc", pid.read_text().strip()).exists(), "so is its brain")


def test_the_artifacts_policy_decides(torch_build_dir: Path, setting: Setting, known: Path) -> None:
    """In `dynamiccl-brain`, and in no rank."""
    seen = setting.root / "look"
    played = Adaptive(torch_build_dir, replace(setting, artifact=known))(
        *at(8000, look(seen), rank=ALL),
        leader=THINKING | SYSTEMS | {"DYNAMICCL_BRAIN": ""},
        environment=SYSTEMS | SAMPLED,
        **TIMED | {"ranks": 8, "calls": 9000},
    )
    assert "the brain gave no table" not in played.log
    assert "the brain's" in played.log
    assert played.switches >= 1, played
    assert len(ranks_in(seen)) == 8
    for rank in ranks_in(seen):
        assert "libtorch" not in rank
        assert "/libnccl-tuner-dynamiccl-adaptive.so" in rank
        assert "\ndynamiccl" not in rank


SYSTEMS: Final = {"DYNAMICCL_SYSTEMS": "23007=box 22809=box"}


# Searches: all ranks play what is tried, and end with what was found.

#: Where large messages are: Ring/Simple is the fastest that the artifact has, and the harness's
#: NVLS/Simple, NCCL's own choice there, is made three times slow.
LARGE: Final = range(92, FIRST_BIN + NUM_BINS)
SEARCHING: Final[dict[str, Any]] = {
    "release": "2.28",
    "ranks": 8,
    "rate": 700,
    "calls": 9800,
    "pattern": 8,
    "slow": f"{int(Algorithm.NVLS)}:{int(Protocol.Simple)}:3",
    "scatter": 3,
    "deadline": 90,
}


@pytest.fixture
def hinted(tmp_path: Path) -> Path:
    """An artifact that knows the harness's machine, with a hint that is not quite right."""
    folder = tmp_path / "hinted"
    folder.mkdir()
    made = make_artifact(folder, HintPolicy()).directory
    PluginIndex.read(made).bound("box", fingerprint(22809)).write(made)
    return made


def is_ring_simple(config: Config | None) -> bool:
    # The harness's times do not depend on channels.
    found = config or ABSTAIN
    return (found.algorithm, found.protocol) == (Algorithm.Ring, Protocol.Simple)


@pytest.mark.parametrize(
    ("policy", "probe_calls"),
    # The guard judges and withdraws what is tried: a trial has ended then.
    [
        pytest.param("search", "0", marks=pytest.mark.soak),
        *(("search", "400"), ("autoccl", "400")),
    ],
)
def test_a_search_drives_a_job_and_what_it_found_comes_into_force(
    policy: str, probe_calls: str, adaptive: Adaptive, hinted: Path
) -> None:
    recorder = Recorder(hinted, policy)
    brain = {"DYNAMICCL_BRAIN": in_this_process(adaptive.setting.root, lambda _: recorder)}
    played = replace(adaptive, setting=replace(adaptive.setting, artifact=hinted))(
        leader=THINKING | SYSTEMS | brain | {"DYNAMICCL_PROBE_CALLS": probe_calls},
        environment=SYSTEMS | SAMPLED,
        **SEARCHING,
    )
    assert played.switches >= 3
    assert "the brain gave no table" not in played.log
    last = recorder.shown[-1]
    assert last.table is not None
    tried = {
        answer.at(Collective.AllReduce, task.bin) or ABSTAIN
        for answer in recorder.answers
        for task in last.tasks
    }
    assert len(tried) >= {"autoccl": 6, "search": 3}[policy]
    assert ("choices withdrawn" in played.log) or (policy, probe_calls) != ("autoccl", "400")
    latest = recorder.shown[-9:]
    large = [t for t in last.tasks if t.bin in LARGE and t.collective is Collective.AllReduce]
    assert large
    for task in large:
        late = [shown.table.at(task.collective, task.bin) for shown in latest if shown.table]
        assert sum(map(is_ring_simple, late)) >= 5, late
        used = [
            each.calls[-1]
            for shown in latest
            for each in shown.tasks
            if (each.collective, each.bin) == (task.collective, task.bin)
        ]
        ring_simple = (Algorithm.Ring, Protocol.Simple)
        assert sum((call.algorithm, call.protocol) == ring_simple for call in used) >= 5
