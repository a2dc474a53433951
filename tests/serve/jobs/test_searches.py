"""Searches that drive a whole job: every rank plays what is tried, and ends with what was found."""

import threading
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.brain.policies import POLICIES
from dynamiccl.serve.brain.server import BrainServer
from dynamiccl.serve.brain_history import BrainConfig, History, KeyCalls
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import DecisionTable
from tests.serve.brains import FIRST_BIN, NUM_BINS, HintPolicy, make_artifact
from tests.serve.jobs.conftest import Player
from tests.serve.jobs.setting import Setting, fingerprint
from tests.serve.jobs.thinking import adaptive, brain, socket_of

#: The harness's NVLS/Simple, NCCL's own choice for large messages there, is made three times slow.
SLOW: Final = f"{int(Algorithm.NVLS)}:{int(Protocol.Simple)}:3"
JOB: Final = {
    "ranks": 8,
    "rate": 700,
    "calls": 9800,
    "pattern": 8,
    "slow": SLOW,
    "scatter": 3,
    "deadline": 90,
}
#: Where large messages are: Ring/Simple is the fastest that the artifact has.
LARGE: Final = range(92, FIRST_BIN + NUM_BINS)


@pytest.fixture
def hinted(tmp_path: Path) -> Path:
    """An artifact that knows the harness's machine, with a hint that is not quite right."""
    folder = tmp_path / "hinted"
    folder.mkdir()
    made = make_artifact(folder, HintPolicy()).directory
    PluginIndex.read(made).bound("box", fingerprint(22809)).write(made)
    return made


class Recorder:
    """A search that keeps what it was shown and what it answered."""

    def __init__(self, artifact: Path, policy: str) -> None:
        self.brain = POLICIES[policy](open_artifact(artifact), 0)
        self.shown: list[History] = []
        self.answers: list[DecisionTable] = []

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        self.shown.append(history)
        answer = self.brain.decide(config, history)
        if answer is not None:
            self.answers.append(answer)
        return answer


def known_environment(setting: Setting, artifact: Path) -> dict[str, str]:
    return adaptive(setting, DYNAMICCL_ARTIFACT=str(artifact), DYNAMICCL_SYSTEM="box")


@pytest.mark.parametrize("policy", [pytest.param("autoccl", marks=pytest.mark.soak), "search"])
def test_a_search_drives_a_job_and_what_it_found_comes_into_force(
    policy: str, play_job: Player, eight_ranks: Setting, hinted: Path
) -> None:
    recorder = Recorder(hinted, policy)
    with BrainServer(socket_of(eight_ranks), lambda: recorder) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        played = play_job(environment=known_environment(eight_ranks, hinted), **JOB)
        server.stop()
        thread.join(20)
    assert played.is_sound, str(played)
    assert played.switches > 3
    last = recorder.shown[-1]
    assert last.table is not None
    assert last.table in recorder.answers
    tried = {
        answer.at(Collective.AllReduce, task.bin) or ABSTAIN
        for answer in recorder.answers
        for task in last.tasks
    }
    assert len(tried) >= {"autoccl": 6, "search": 3}[policy]
    large = [t for t in last.tasks if t.bin in LARGE and t.collective is Collective.AllReduce]
    assert large
    for task in large:
        # What is in force may be a probe, now and then.
        late = [
            shown.table.at(task.collective, task.bin)
            for shown in recorder.shown[-9:]
            if shown.table
        ]
        assert sum(map(is_ring_simple, late)) >= 5, late
        used = [shown for shown in recorder.shown[-9:] if ran_ring_simple(shown, task)]
        assert len(used) >= 5


def ran_ring_simple(shown: History, task: KeyCalls) -> bool:
    """Whether the last call of a task key, as its ranks ran it, was Ring/Simple."""
    return any(
        (call.algorithm, call.protocol) == (Algorithm.Ring, Protocol.Simple)
        for each in shown.tasks
        if (each.collective, each.bin) == (task.collective, task.bin)
        for call in each.calls[-1:]
    )


def is_ring_simple(config: Config | None) -> bool:
    # The harness's times do not depend on channels.
    found = config or ABSTAIN
    return (found.algorithm, found.protocol) == (Algorithm.Ring, Protocol.Simple)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["search", "autoccl"])
def test_the_command_serves_a_search_to_a_job(
    policy: str, play_job: Player, eight_ranks: Setting, hinted: Path
) -> None:
    environment = known_environment(eight_ranks, hinted)
    with brain(eight_ranks, hinted, policy):
        played = play_job(environment=environment, **JOB | {"calls": 4200})
    assert played.is_sound, str(played)
    assert played.switches > 3
    assert "the brain gave no table" not in played.log
