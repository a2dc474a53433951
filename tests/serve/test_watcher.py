"""The Trigger inside a brain: each call seen once, alike in Python, TorchScript and the plugin."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.datasets.manifest import trigger_file
from dynamiccl.errors import CorruptFile
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve import brain_module as watcher
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import KeyCalls, ScriptedBrain
from dynamiccl.serve.brain_module import write_brain
from dynamiccl.serve.export import export_artifact
from dynamiccl.train.policy import save_script
from dynamiccl.train.trigger import Detector, TriggerModule
from tests.serve.brains import FIRST_BIN, decided

SIZE = 1 << 20
WATCHED_KEYS = 6


@pytest.fixture(scope="module")
def module() -> TriggerModule:
    """One whose LSTM says something, though nothing sensible."""
    torch.manual_seed(3)
    made = TriggerModule(0.05)
    torch.nn.init.normal_(made.head.weight, std=0.3)
    return made.eval()


@pytest.fixture(scope="module")
def trigger(module: TriggerModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "trigger"
    folder.mkdir()
    save_script(module, folder / "trigger.pt")
    (folder / "trigger.json").write_text(json.dumps({"false_alarms_per_1e5": 0.5}))
    return folder / "trigger.pt"


@pytest.fixture(scope="module")
def watching(
    small_artifact: Artifact, trigger: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """The small artifact with a Trigger."""
    policy = small_artifact.directory.parent / "policy"
    return export_artifact(policy, tmp_path_factory.mktemp("with") / "artifact", trigger)


def questions(trigger: Path, seed: int, count: int) -> Iterator[list[KeyCalls]]:
    """Of a job that slows down, about keys that the small artifact has a table for."""
    random = np.random.default_rng(seed)
    for tasks, _ in watched_questions(Detector.load(trigger), random, count):
        yield [dataclasses.replace(task, bin=FIRST_BIN + 4 * task.bin) for task in tasks]


def watched_questions(
    trigger: Detector, random: np.random.Generator, count: int
) -> Iterator[tuple[list[KeyCalls], npt.NDArray[np.float64]]]:
    """Questions about a few keys of a job that slows down, and the interference (N, K) of each.

    Two keys are of one size. Between two questions there are none to more calls than a window
    holds, whose configs change; where there are none, calls are shown again.
    """
    told: list[list[Call]] = [[] for _ in range(WATCHED_KEYS)]
    levels: list[list[float]] = [[] for _ in range(WATCHED_KEYS)]
    seen = [0] * WATCHED_KEYS
    for question in range(count):
        slowness = 1.0 if question < count // 2 else 1.6
        for key in range(WATCHED_KEYS):
            for _ in range(random.integers(0, WINDOW_LENGTH + 3)):
                told[key].append(call_of_job(random, key, slowness))
            # What falls out of the window before a question is never seen.
            new = min(len(told[key]) - seen[key], WINDOW_LENGTH)
            seen[key] = len(told[key])
            for call in told[key][len(told[key]) - new :]:
                stream = 2 * key + (call.protocol is Protocol.LL128)
                facts = ([stream], [np.log(call.time_us)], [np.log(call.size_bytes)], [key])
                levels[key].append(float(trigger.observe(*facts)[1][0]))
        wanted = np.zeros((WATCHED_KEYS, WINDOW_LENGTH))
        tasks = []
        for key in range(WATCHED_KEYS):
            calls = told[key][-WINDOW_LENGTH:]
            collective = Collective.AllGather if key % 2 else Collective.AllReduce
            tasks.append(KeyCalls(collective, key // 2, tuple(calls), len(told[key])))
            if calls:
                wanted[key, -len(calls) :] = levels[key][-len(calls) :]
        yield tasks, wanted


def call_of_job(random: np.random.Generator, key: int, slowness: float) -> Call:
    protocol = Protocol.Simple if random.random() < 0.9 else Protocol.LL128
    time_us = float(slowness * (20.0 + 10.0 * key) * np.exp(0.02 * random.standard_t(3)))
    return Call(1 << (16 + key), time_us, Algorithm.Ring, protocol, 8)


def level_of_last(brain: ScriptedBrain, calls: list[Call], num_timed: int | None) -> float:
    task = KeyCalls(Collective.AllReduce, 80, tuple(calls), num_timed)
    return float(brain.interference([task])[0, -1])


def call(time_us: float, protocol: Protocol = Protocol.LL, level: float | None = None) -> Call:
    return Call(SIZE, time_us, Algorithm.Ring, protocol, 8, level)


def slowing(count: int, slow_from: int) -> list[Call]:
    random = np.random.default_rng(1)
    times = 50.0 * np.exp(0.01 * random.standard_normal(count))
    times[slow_from:] *= 2.0
    return [call(float(time_us)) for time_us in times]


def test_a_brain_finds_what_the_trigger_finds(watching: Artifact, trigger: Path) -> None:
    brain, random = ScriptedBrain(watching.directory / "brain.pt"), np.random.default_rng(0)
    for tasks, wanted in watched_questions(Detector.load(trigger), random, 30):
        found = brain.interference(tasks)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_interference_is_unknown_without_a_trigger_or_a_count_and_what_is_known_stays(
    watching: Artifact, small_artifact: Artifact
) -> None:
    brain, calls = ScriptedBrain(watching.directory / "brain.pt"), slowing(60, 40)
    assert {level_of_last(brain, calls[k : k + 8], None) for k in range(52)} == {-1.0}
    without = ScriptedBrain(small_artifact.directory / "brain.pt")
    assert level_of_last(without, slowing(8, 4), 8) == -1.0
    for count in range(1, 40):
        level = level_of_last(brain, [call(50.0 + count % 2, level=0.25)], count)
        assert level == 0.25


def test_streams_beyond_the_most_say_nothing_of_their_own(
    small_artifact: Artifact, trigger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "MAX_STREAMS", 1)
    policy = small_artifact.directory.parent / "policy"
    configs = small_artifact.manifest.actions().configs
    write_brain(policy / "policy.pt", configs, [], tmp_path / "brain.pt", trigger)
    brain = ScriptedBrain(tmp_path / "brain.pt")
    for count in range(1, 41):
        level = level_of_last(brain, [call(50.0, Protocol(count % 2))], count)
        # The one stream has a forecast from its 17th call on, and its key with it.
        assert (level == -1.0) == (count < 33)
    slow = [level_of_last(brain, [call(500.0)], 41 + 2 * each) for each in range(20)]
    assert max(slow) < 0.05


def test_levels_change_decisions(
    watching: Artifact, small_artifact: Artifact, trigger: Path
) -> None:
    with_levels = ScriptedBrain(watching.directory / "brain.pt")
    without = ScriptedBrain(small_artifact.directory / "brain.pt")
    pairs = [
        (decided(with_levels, tasks), decided(without, tasks))
        for tasks in questions(trigger, 0, 30)
    ]
    assert pairs[0][0] == pairs[0][1]  # nothing is known yet
    assert any(one != other for one, other in pairs[20:])


def test_a_trigger_needs_its_facts(trigger: Path, small_artifact: Artifact, tmp_path: Path) -> None:
    run = tmp_path / "run" / "trigger"
    shutil.copytree(trigger.parent, run)
    assert trigger_file(run.parent) == run / "trigger.pt"
    policy = small_artifact.directory.parent / "policy"
    shutil.copy(policy / "policy.pt", run / "trigger.pt")
    with pytest.raises(CorruptFile, match="no trigger"):
        export_artifact(policy, tmp_path / "artifact", run / "trigger.pt")
    (run / "trigger.json").unlink()
    with pytest.raises(CorruptFile, match=r"trigger\.json"):
        export_artifact(policy, tmp_path / "artifact", run / "trigger.pt")


def test_a_policys_trigger_is_exported(
    small_artifact: Artifact, trigger: Path, tmp_path: Path
) -> None:
    policy = Path(shutil.copytree(small_artifact.directory.parent / "policy", tmp_path / "policy"))
    shutil.copy(trigger, policy)
    manifest = dataclasses.replace(small_artifact.manifest, trigger={"usual_scale": 0.1})
    manifest.write(policy)
    exported = export_artifact(policy, tmp_path / "artifact")
    assert exported.manifest.trigger == {"usual_scale": 0.1}
    assert exported.manifest.files.keys() == small_artifact.manifest.files.keys()
    assert small_artifact.manifest.trigger is None
    brain, calls = ScriptedBrain(exported.directory / "brain.pt"), slowing(60, 40)
    levels = [level_of_last(brain, calls[k : k + 8], k + 8) for k in range(52)]
    assert levels[-1] == pytest.approx(1.0, abs=0.1)
