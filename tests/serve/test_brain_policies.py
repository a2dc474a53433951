"""The policies that a brain process can run."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.history import Call
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain_policies import POLICIES, find_policy_maker
from dynamiccl.serve.search.policy_search import PolicySearch
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import BrainConfig, History, KeyCalls, ScriptedBrain
from dynamiccl.sizes import size_bin
from dynamiccl.train.policy import save_script
from dynamiccl.train.trigger.module import TriggerModule
from tests.serve.brains import CONFIG, HintPolicy, make_artifact, task

SIZE = 1 << 20
BIN = size_bin(SIZE)
KEY = (Collective.AllReduce, BIN)


def own_table(artifact: Artifact) -> DecisionTable:
    return DecisionTable.read(artifact.directory / artifact.tables[0].path)


def test_keep_keeps(small_artifact: Artifact) -> None:
    brain = POLICIES["keep"](small_artifact)
    assert brain.decide(CONFIG, History((task(SIZE, 5.0),), None)) is None


def test_table_puts_the_artifacts_table_in_force_and_keeps_it(small_artifact: Artifact) -> None:
    brain = POLICIES["table"](small_artifact)
    table = brain.decide(CONFIG, History((), None))
    assert table == own_table(small_artifact)
    assert brain.decide(CONFIG, History((task(SIZE, 5.0),), table)) is None
    with pytest.raises(UnknownName):
        brain.decide(BrainConfig("", "elsewhere", 1, 8), History((), None))


def test_artifact_asks_the_policy(small_artifact: Artifact) -> None:
    brain = POLICIES["artifact"](small_artifact)
    history = History((task(SIZE, *map(float, range(1, 9))),), None)
    wanted = ScriptedBrain(small_artifact.directory / "brain.pt").decide(CONFIG, history.tasks)
    assert brain.decide(CONFIG, history) == wanted
    assert brain.decide(BrainConfig("", "elsewhere", 1, 8), history) is None


def test_artifact_of_an_older_release_is_refused(small_artifact: Artifact, tmp_path: Path) -> None:
    older = replace(small_artifact, directory=tmp_path)
    with pytest.raises(UserError, match="--policy table"):
        POLICIES["artifact"](older)


def test_own_policy_is_imported(
    small_artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_search.py").write_text(
        "class Mine:\n    def decide(self, config, history):\n        return None\n"
        "def make(artifact):\n    return Mine()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    brain = find_policy_maker("my_search:make")(small_artifact)
    assert brain.decide(CONFIG, History((), None)) is None
    with pytest.raises(UserError, match="PYTHONPATH"):
        find_policy_maker("my_search:other")
    with pytest.raises(UnknownName, match="choose from keep, table, artifact"):
        find_policy_maker("mine")


def play(
    artifact: Artifact,
    time_us: Callable[[Config], float],
    steps: int,
    policy: str,
) -> list[Config]:
    """Let the search drive one task key; what was in force after each step."""
    brain = POLICIES[policy](artifact)
    in_force: DecisionTable | None = None
    calls: list[Call] = []
    played = []
    noise = np.random.default_rng(9)
    for _ in range(steps):
        config = (in_force.at(*KEY) if in_force else None) or ABSTAIN
        used = config if config != ABSTAIN else Config(Algorithm.Tree, Protocol.LL, 2)
        for _ in range(4):
            calls.append(
                Call(
                    SIZE,
                    time_us(config) * noise.uniform(0.98, 1.02),
                    used.algorithm,
                    used.protocol,
                    used.num_channels or 8,
                )
            )
        window = KeyCalls(*KEY, tuple(calls[-8:]))
        in_force = brain.decide(CONFIG, History((window,), in_force)) or in_force
        played.append(config)
    return played


def slowness(config: Config) -> float:
    """Ring/LL128 is best, NCCL's own choice is second."""
    if config == ABSTAIN:
        return 60.0
    return (
        50.0 if config.protocol is Protocol.LL128 and config.algorithm is Algorithm.Ring else 90.0
    )


@pytest.fixture(scope="module")
def hinted(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_artifact(tmp_path_factory.mktemp("hinted"), HintPolicy())


@pytest.mark.parametrize("policy", ["autoccl", "search"])
def test_tuners_settle_on_the_fastest_config_that_was_measured(
    hinted: Artifact, policy: str
) -> None:
    played = play(hinted, slowness, 200, policy)
    assert set(played) <= set(hinted.manifest.actions().configs)
    assert played[0] == ABSTAIN
    if policy == "autoccl":  # it goes through all subspaces
        assert len(set(played)) > 6
        assert set(played[-100:]) == {Config(Algorithm.Ring, Protocol.LL128)}
    else:  # the hint is wrong, and what it expects to be slow is tried when it can be paid for
        assert sum(slowness(config) > slowness(ABSTAIN) for config in played[-100:]) <= 5


def test_a_tuner_waits_for_new_calls_and_for_its_table_to_be_in_force(hinted: Artifact) -> None:
    brain = POLICIES["autoccl"](hinted)
    window = task(SIZE, 5.0, 5.1, 5.2)
    probe = brain.decide(CONFIG, History((window,), None))
    assert probe is not None
    assert probe.at(*KEY) is not None
    for calls in (window, task(SIZE, 5.2, 5.3, 5.4)):  # still NCCL's own choice
        assert brain.decide(CONFIG, History((calls,), None)) == probe
    assert brain.decide(CONFIG, History((task(1 << 40, 5.0, 5.0, 5.0),), probe)) is None


def test_a_tuner_is_told_of_interference(hinted: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[object] = []
    monkeypatch.setattr(PolicySearch, "alarm", lambda _, key: alarms.append(key))
    brain = POLICIES["search"](hinted)
    # What is next to nothing is no disturbance, and a fading one is still one.
    told = [None, 0.0, 0.04, 0.1, 0.4, 0.5, 0.1, None, 0.01, 0.1]
    found = []
    for index, level in enumerate(told):
        calls = tuple(replace(call, interference=level) for call in task(SIZE, 5, 5.1, 5.2).calls)
        window = KeyCalls(*KEY, tuple(replace(c, time_us=c.time_us + index) for c in calls))
        brain.decide(CONFIG, History((window,), None))
        found.append(len(alarms))
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert set(alarms) == {KEY}


def test_an_artifacts_trigger_tells_a_tuner_of_slow_calls(
    hinted: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[object] = []
    monkeypatch.setattr(PolicySearch, "alarm", lambda _, key: alarms.append(key))
    shutil.copytree(hinted.directory, tmp_path / "artifact")
    save_script(TriggerModule(0.02), tmp_path / "artifact" / "trigger.pt")
    brain = POLICIES["search"](replace(hinted, directory=tmp_path / "artifact"))
    random = np.random.default_rng(0)
    found = []
    for round_ in range(60):
        slow = 1.5 if 30 <= round_ < 45 else 1.0
        times = 5.0 * slow * np.exp(0.02 * random.standard_normal(4))
        brain.decide(CONFIG, History((task(SIZE, *times.tolist()),), None))
        found.append(len(alarms))
    assert found[29] == 0
    assert found[34] == found[44] == 1
    assert found[-1] == 2


def test_search_begins_with_the_artifacts_table_and_waits_for_calls(
    small_artifact: Artifact,
) -> None:
    table = own_table(small_artifact)
    brain = POLICIES["search"](small_artifact)
    assert brain.decide(CONFIG, History((), None)) == table
    for _ in range(200):  # the same two calls say nothing new
        assert brain.decide(CONFIG, History((task(SIZE, 5.0, 5.0),), table)) is None
    assert brain.decide(CONFIG, History((task(1 << 40, 5.0, 5.0, 5.0),), table)) is None
