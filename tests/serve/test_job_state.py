"""A policy with a state that lives as long as its job: Python, brain and plugin decide alike."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamiccl.datasets.features import HISTORY_SLICE, Observations
from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.datasets.questions import cold_questions, table_supports
from dynamiccl.nccl import Collective
from dynamiccl.schedule import config_columns
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import KeyCalls, ScriptedBrain
from dynamiccl.serve.build import BRAIN_NAME
from dynamiccl.serve.table import DecisionTable
from dynamiccl.train.networks import Imitator, OutputHead, StatefulTrunk, Trunk
from dynamiccl.train.policy import State, StatefulPolicyModule, TorchPolicy
from tests.calls import history_arrays
from tests.serve.brains import (
    CONFIG,
    FIRST_BIN,
    NUM_BINS,
    decided,
    make_artifact,
    make_manifest,
    random_windows,
)
from tests.serve.leader import Leader

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
        for task in tasks:
            row = int(task.collective) * NUM_BINS + task.bin - FIRST_BIN
            context = self.asked.context[[row]]
            window = np.empty((1, *history_arrays(task.calls)[0].shape), dtype=np.float32)
            window[0], context[0, HISTORY_SLICE] = history_arrays(task.calls)
            action, timed = self.latest.get(row, (-1, -1))
            mask = self.asked.mask[[row]]
            found, after = self.policy.step(
                Observations(window, context), mask, np.array([action]), self.state
            )
            chosen = int(found[0]) if mask[0, 0] else 0
            if timed != task.num_timed:
                self.state = after
            assert task.num_timed is not None
            self.latest[row] = int(found[0]), task.num_timed
            entries[int(task.collective), task.bin - FIRST_BIN] = tuple(
                config_columns(self.configs[chosen])
            )
        return replace(self.table, entries=entries)


@pytest.mark.parametrize("calls", [400, pytest.param(5_000, marks=pytest.mark.soak)])
def test_python_brain_and_plugin_keep_the_same_state_for_a_whole_job(
    calls: int, stateful: Artifact, torch_build_dir: Path
) -> None:
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
