"""`brain.pt` in Python and in `dynamiccl-brain`: as its tables, its features and its policy say."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from dynamiccl.datasets.features import HISTORY_SLICE, TUNED, Observations
from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.datasets.manifest import trigger_file
from dynamiccl.datasets.questions import cold_questions, table_supports
from dynamiccl.errors import ArtifactMismatch, CorruptFile
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.schedule import config_columns
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import BrainConfig, History, KeyCalls, ScriptedBrain, raw_calls
from dynamiccl.serve.brain_module import traced_features, write_brain
from dynamiccl.serve.build import BRAIN_NAME, find_torch
from dynamiccl.serve.export import check_brain, export_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.train.networks import Imitator, OutputHead, StatefulTrunk, Trunk
from dynamiccl.train.policy import (
    State,
    StatefulPolicyModule,
    TorchPolicy,
    load_script,
    save_script,
)
from dynamiccl.train.trigger import Detector, TriggerModule
from tests.calls import history_arrays
from tests.serve.brains import (
    CONFIG,
    FIRST_BIN,
    NUM_BINS,
    Leader,
    decided,
    make_artifact,
    make_manifest,
    question_of,
    random_windows,
    task,
)


def random_history(seed: int) -> list[KeyCalls]:
    random = np.random.default_rng(seed)
    keys = [(c, b) for c in TUNED for b in range(FIRST_BIN - 3, FIRST_BIN + NUM_BINS + 3)]
    # The artifact's Trigger tells interference, no leader does.
    windows = [
        tuple(replace(call, interference=None) for call in window)
        for window in random_windows(random, len(keys))
    ]
    return [KeyCalls(*key, window, len(window)) for key, window in zip(keys, windows, strict=True)]


@pytest.fixture(scope="module", name="runtime")
def runtime_fixture(torch_build_dir: Path) -> Iterator[Leader]:
    with Leader(torch_build_dir / BRAIN_NAME) as leader:
        yield leader


def why_not(runtime: Leader, artifact: Path, config: BrainConfig = CONFIG) -> str:
    """The same answer, to a brain that is new and to one that failed before."""
    line = json.dumps(question_of(artifact, config, brain=100))
    answer = runtime.told(line)
    assert runtime.told(line) == answer
    assert list(answer) == ["number", "error"]
    return str(answer["error"])


def test_decides_as_table_and_python_do(runtime: Leader, small_artifact: Artifact) -> None:
    artifact = small_artifact.directory
    python = ScriptedBrain(artifact / "brain.pt")
    table = DecisionTable.read(artifact / small_artifact.tables[0].path)
    assert runtime.table(artifact, CONFIG) == table
    for seed in range(5):
        tasks = random_history(seed)
        found = runtime.table(artifact, CONFIG, tasks)
        assert found == decided(python, tasks)
        assert found != table
        assert found == runtime.table(artifact, CONFIG, tasks, brain=2 + 300 * seed)
    assert runtime.table(artifact, CONFIG) == table  # nothing is remembered but what it is told


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "there is no such file"),
        (lambda module: module.symlink_to(module.rename(f"{module}.x")), "it is a symbolic link"),
        (lambda module: module.chmod(0o664), "others may write to it"),
        # It has no `decide`, as older releases have none.
        (
            lambda module: module.with_name("policy.pt").replace(module),
            "is of an older release; export the artifact again",
        ),
        *(
            (lambda module, k=k: module.write_bytes(module.read_bytes()[:k]), "")
            for k in (0, 10, 5000)
        ),
    ],
)
def test_brain_that_cannot_be_used_is_refused_in_one_line(
    spoil: Callable[[Path], object],
    said: str,
    runtime: Leader,
    copied: Path,
    small_artifact: Artifact,
) -> None:
    spoil(copied / "brain.pt")
    why = why_not(runtime, copied)
    assert said in why
    assert "\n" not in why
    runtime.table(small_artifact.directory, CONFIG)  # it hurts no other communicator
    unknown = replace(CONFIG, num_nodes=2, num_ranks=16)
    why = why_not(runtime, small_artifact.directory, unknown)
    assert why == "brain.pt knows no 16 ranks on 2 nodes of box"


def test_question_that_no_leader_asks_is_refused(runtime: Leader, small_artifact: Artifact) -> None:
    """Numbers that become indices are checked, and the form of the line."""
    history = History((task(1 << 20, *range(1, 9)),), None)
    whole = question_of(small_artifact.directory, CONFIG, history, number=7)
    assert "table" in runtime.told(json.dumps(whole))
    collective, index, num_timed, calls = whole["tasks"][0]
    tasks: list[list[Any]] = [
        [5, index, num_timed, calls],
        [-1, index, num_timed, calls],
        [collective, 249, num_timed, calls],
        [collective, -1, num_timed, calls],
        [collective, index, num_timed, [*calls, calls[0]]],
        [collective, index, num_timed, [calls[0][:-1]]],
        [collective, index, num_timed, [[*calls[0], 0]]],
        [collective, index, num_timed],
    ]
    lines = [json.dumps(whole | {"tasks": [task]}) for task in tasks]
    lines += [json.dumps(whole | other) for other in ({"x": 1}, {"table": 0}, {"brain": "1"})]
    text = json.dumps(whole)
    for line in (*lines, text[:-1], text + "x", "", "{}" + text):
        answer = runtime.told(line)
        assert answer["error"] == "its question is impossible"
        assert answer["number"] in {0, 7}


def test_needs_torch_from_where_it_was_built(torch_build_dir: Path) -> None:
    command = ["readelf", "--dynamic", "--wide", str(torch_build_dir / BRAIN_NAME)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"Library runpath: [{find_torch()}/lib" in dynamic
    assert "Shared library: [libtorch_cpu.so]" in dynamic


def test_features_are_those_of_history_arrays() -> None:
    windows = random_windows(np.random.default_rng(0), 1000)
    call = Call(1 << 20, 50.0, Algorithm.Ring, Protocol.LL, 8)
    # Unchanged and changed configs are told apart.
    windows.append([call, call, replace(call, num_channels=4), replace(call, num_channels=None)])
    # Of more than fit the oldest are dropped.
    windows.append([replace(call, time_us=float(k)) for k in range(1, 12)])
    window, history = traced_features()(torch.from_numpy(raw_calls(windows)))
    for row, calls in enumerate(windows):
        wanted_window, wanted_history = history_arrays(calls)
        np.testing.assert_allclose(window[row], wanted_window, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(history[row], wanted_history, rtol=1e-6, atol=1e-6)


class ActsOnAHistory(nn.Module):
    """What a policy decides, but NCCL's own choice once there were calls."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        action, q = self.policy(window, context, mask)
        is_warm = window.abs().sum(dim=[1, 2]) > 0.0
        return torch.where(is_warm, torch.zeros_like(action), action), q


def test_brain_must_decide_as_its_policy(small_artifact: Artifact, tmp_path: Path) -> None:
    manifest, policy = small_artifact.manifest, TorchPolicy.load(small_artifact.directory)
    [asked] = [cold_questions(manifest, s) for s in table_supports(manifest)]
    table = DecisionTable.read(small_artifact.directory / small_artifact.tables[0].path)
    configs = list(manifest.actions().configs)
    other = ActsOnAHistory(load_script(small_artifact.directory / "policy.pt"))
    save_script(other, tmp_path / "other.pt")
    for name, played, said in (
        (small_artifact.directory / "policy.pt", configs, ""),
        (tmp_path / "other.pt", configs, r"on a history brain\.pt does not decide what"),
        (small_artifact.directory / "policy.pt", [configs[0]] * 8, "without a history brain"),
        (small_artifact.directory / "policy.pt", [configs[0], *configs[:0:-1]], "has no Tree"),
    ):
        write_brain(name, played, [asked], tmp_path / "brain.pt")
        brain = ScriptedBrain(tmp_path / "brain.pt")
        if not said:
            check_brain(brain, policy, table, asked)
            continue
        with pytest.raises(ArtifactMismatch, match=said):
            check_brain(brain, policy, table, asked)
    (tmp_path / "brain.pt").write_bytes(b"PK")
    with pytest.raises(CorruptFile, match=r"brain\.pt is not a TorchScript file"):
        ScriptedBrain(tmp_path / "brain.pt")


UNITS = 8
MEASURED = (Collective.AllReduce, Collective.AllGather)
KEYS = [(c, b) for c in MEASURED for b in range(FIRST_BIN, FIRST_BIN + 3)]


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact whose policy has random weights, large enough that its state matters."""
    torch.manual_seed(7)
    manifest = make_manifest()
    shape = (WINDOW_LENGTH, len(manifest.window_features))
    actions = len(manifest.catalogue)
    trunk = StatefulTrunk(Trunk(shape, len(manifest.features), [16], "mlp"), 16, actions, UNITS)
    member = Imitator(trunk, trunk.width, actions)
    assert isinstance(member.head, OutputHead)
    with torch.no_grad():
        # Features are not scaled here: what is seen of one key must not drown the state.
        trunk.core.weight_ih.mul_(0.05)
        trunk.core.weight_hh.mul_(4.0)
        member.head.layer.weight[:, :16].mul_(0.01)
        member.head.layer.weight[:, 16:].mul_(20.0)
    trunk.probe_every.fill_(50)
    policy = StatefulPolicyModule(member, 0.0, 0.0).eval()
    return make_artifact(tmp_path_factory.mktemp("stateful"), policy)


def questions(seed: int, calls: int) -> Iterator[list[KeyCalls]]:
    """What a leader asks until a job has made so many calls: all keys that were called."""
    random = np.random.default_rng(seed)
    told: dict[tuple[Collective, int], list[Call]] = {key: [] for key in KEYS}
    made = 0
    while made < calls:
        for key in KEYS:
            new = (
                random_windows(random, 1)[0][: random.integers(9)] if random.random() < 0.7 else []
            )
            told[key] += [replace(call, interference=None) for call in new]
            made += len(new)
        yield [
            KeyCalls(collective, bin_, tuple(seen[-WINDOW_LENGTH:]), len(seen))
            for (collective, bin_), seen in told.items()
            if seen
        ]


class InPython:
    """The policy as training has it, and the state kept by hand."""

    def __init__(self, artifact: Artifact) -> None:
        self.policy = TorchPolicy.load(artifact.directory)
        (support,) = table_supports(artifact.manifest)
        self.asked = cold_questions(artifact.manifest, support)
        self.configs = artifact.manifest.actions().configs
        self.table = DecisionTable.read(artifact.directory / artifact.tables[0].path)
        zero = np.zeros((1, self.policy.state_units), dtype=np.float32)
        self.state: State = (zero, zero)
        self.latest: dict[int, tuple[int, int]] = {}

    def decide(self, tasks: list[KeyCalls]) -> DecisionTable:
        entries = self.table.entries.copy()
        for asked in tasks:
            row = int(asked.collective) * NUM_BINS + asked.bin - FIRST_BIN
            context = self.asked.context[[row]]
            window = np.empty((1, *history_arrays(asked.calls)[0].shape), dtype=np.float32)
            window[0], context[0, HISTORY_SLICE] = history_arrays(asked.calls)
            action, timed = self.latest.get(row, (-1, -1))
            mask = self.asked.mask[[row]]
            found, after = self.policy.step(
                Observations(window, context), mask, np.array([action]), self.state
            )
            chosen = int(found[0]) if mask[0, 0] else 0
            if timed != asked.num_timed:
                self.state = after
            assert asked.num_timed is not None
            self.latest[row] = int(found[0]), asked.num_timed
            entries[int(asked.collective), asked.bin - FIRST_BIN] = tuple(
                config_columns(self.configs[chosen])
            )
        return replace(self.table, entries=entries)


@pytest.mark.parametrize("calls", [400, pytest.param(5_000, marks=pytest.mark.soak)])
def test_all_keep_one_state(calls: int, stateful: Artifact, torch_build_dir: Path) -> None:
    """Two jobs: each begins from zero. Floats of other libraries may tie."""
    differing, asked, remembered = np.zeros(2), 0, 0
    artifact = stateful.directory
    for job in range(2):
        brain, python = ScriptedBrain(stateful.directory / "brain.pt"), InPython(stateful)
        with Leader(torch_build_dir / BRAIN_NAME) as leader:
            assert leader.table(artifact, CONFIG) == decided(brain, []) == python.table
            for tasks in questions(job, calls):
                expected = python.decide(tasks)
                found = [decided(brain, tasks), leader.table(artifact, CONFIG, tasks)]
                asked += 1
                for index, table in enumerate(found):
                    assert table is not None
                    differing[index] += (table.entries != expected.entries).sum()
                if asked % 20 == 0:  # the same question to a brain that has heard nothing else
                    alone = ScriptedBrain(stateful.directory / "brain.pt")
                    remembered += int(decided(alone, tasks) != expected)
    assert asked > calls / 17
    assert remembered > 0, "the state changes no decision: the test shows nothing"
    assert (differing <= 0.001 * asked * len(KEYS)).all(), differing


def test_a_rollout_unrolls_as_it_was_stepped() -> None:
    torch.manual_seed(0)
    trunk = StatefulTrunk(Trunk((WINDOW_LENGTH, 20), 40, [16], "mlp"), 16, 5, UNITS)
    rounds, jobs, keys = 4, 3, 2
    seen = torch.randn(rounds, jobs, keys, 16)
    decided = torch.randint(-1, 5, (rounds, jobs, keys))
    is_new = torch.rand(rounds, jobs, keys) < 0.5
    zero = torch.zeros(jobs, UNITS)
    found, h, c = trunk.unroll(seen, decided, is_new, zero, zero)
    state = (torch.zeros(jobs, UNITS), torch.zeros(jobs, UNITS))
    for each in range(rounds):
        for key in range(keys):
            told = torch.cat([seen[each, :, key], trunk.decided(decided[each, :, key] + 1)], dim=1)
            after = trunk.core(told, state)
            assert torch.equal(found[each, :, key, 16:], after[0])
            for job in range(jobs):
                if is_new[each, job, key]:
                    state[0][job], state[1][job] = after[0][job].detach(), after[1][job].detach()
    assert torch.allclose(h, state[0])
    assert torch.allclose(c, state[1])


# The Trigger inside a brain: each call seen once.

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


def test_levels_change_decisions(
    watching: Artifact, small_artifact: Artifact, trigger: Path
) -> None:
    with_levels = ScriptedBrain(watching.directory / "brain.pt")
    without = ScriptedBrain(small_artifact.directory / "brain.pt")
    pairs = []
    for tasks, _ in watched_questions(Detector.load(trigger), np.random.default_rng(0), 30):
        known = [replace(each, bin=FIRST_BIN + 4 * each.bin) for each in tasks]
        pairs.append((decided(with_levels, known), decided(without, known)))
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


def test_own_trigger_is_exported(small_artifact: Artifact, trigger: Path, tmp_path: Path) -> None:
    policy = Path(shutil.copytree(small_artifact.directory.parent / "policy", tmp_path / "policy"))
    shutil.copy(trigger, policy)
    manifest = replace(small_artifact.manifest, trigger={"usual_scale": 0.1})
    manifest.write(policy)
    exported = export_artifact(policy, tmp_path / "artifact")
    assert exported.manifest.trigger == {"usual_scale": 0.1}
    assert exported.manifest.files.keys() == small_artifact.manifest.files.keys()
    assert small_artifact.manifest.trigger is None
    brain, calls = ScriptedBrain(exported.directory / "brain.pt"), slowing(60, 40)
    levels = [level_of_last(brain, calls[k : k + 8], k + 8) for k in range(52)]
    assert levels[-1] == pytest.approx(1.0, abs=0.1)
