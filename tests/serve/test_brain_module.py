"""`brain.pt` against the tables, the feature code and the policy that it was made of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynamiccl.datasets.history import Call
from dynamiccl.datasets.questions import cold_questions, table_supports
from dynamiccl.errors import ArtifactMismatch, CorruptFile
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import (
    BrainConfig,
    ScriptedBrain,
    raw_calls,
)
from dynamiccl.serve.brain_module import traced_features, write_brain
from dynamiccl.serve.export import check_brain
from dynamiccl.serve.table import DecisionTable
from dynamiccl.train.policy import TorchPolicy, load_script, save_script
from tests.calls import history_arrays
from tests.serve.brains import CONFIG, FIRST_BIN, SIZES, decided, random_windows, task


@pytest.fixture
def brain(small_artifact: Artifact) -> ScriptedBrain:
    return ScriptedBrain(small_artifact.directory / "brain.pt")


def test_without_a_history_it_decides_what_the_table_says(
    small_artifact: Artifact, brain: ScriptedBrain
) -> None:
    """So it does for sizes outside of the table and for empty windows; other shapes have none."""
    table = DecisionTable.read(small_artifact.directory / small_artifact.tables[0].path)
    tasks = [task(1 << 10, 5.0), task(1 << 33, 9e5), task(1 << 20)]
    assert decided(brain, []) == decided(brain, tasks) == table
    assert 0 < table.entries["act"].sum() < table.entries.size
    strange = replace(CONFIG, system="b"), replace(CONFIG, num_nodes=2), BrainConfig("", 1, 8)
    assert [decided(brain, [], other) for other in strange] == [None] * 3


def test_features_are_those_of_history_arrays() -> None:
    windows = random_windows(np.random.default_rng(0), 1000)
    call = Call(1 << 20, 50.0, Algorithm.Ring, Protocol.LL, 8)
    # Unchanged and changed configs are told apart.
    windows.append([call, call, replace(call, num_channels=4), replace(call, num_channels=None)])
    window, history = traced_features()(torch.from_numpy(raw_calls(windows)))
    for row, calls in enumerate(windows):
        wanted_window, wanted_history = history_arrays(calls)
        np.testing.assert_allclose(window[row], wanted_window, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(history[row], wanted_history, rtol=1e-6, atol=1e-6)


def test_history_changes_decisions_where_there_is_one_and_only_there(brain: ScriptedBrain) -> None:
    cold = decided(brain, [])
    times = [np.exp2(k) for k in range(8)]
    tasks = [task(size, *times) for size in SIZES]
    warm = decided(brain, tasks)
    assert cold is not None
    assert warm is not None
    differs = cold.entries != warm.entries
    columns = [t.bin - FIRST_BIN for t in tasks]
    assert differs[Collective.AllReduce, columns].any()
    differs[Collective.AllReduce, columns] = False
    assert not differs.any()


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


def test_brain_that_decides_otherwise_than_its_policy_is_refused(
    small_artifact: Artifact, tmp_path: Path
) -> None:
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


def test_calls_are_right_aligned_and_the_oldest_are_dropped() -> None:
    calls = [Call(1 << 20, float(i), None, None, None) for i in range(1, 12)]
    raw = raw_calls([calls, calls[:2], []])
    assert raw[0, :, 2].tolist() == [float(i) for i in range(4, 12)]
    assert raw[1, :, 2].tolist() == [0.0] * 6 + [1.0, 2.0]
    assert raw[1, 7].tolist() == [1.0, 1 << 20, 2.0, -1.0, -1.0, 0.0, -1.0, -1.0]
    assert not raw[2].any()
