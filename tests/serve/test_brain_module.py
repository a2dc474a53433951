"""`brain.pt` against the tables, the feature code and the policy that it was made of."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.features import HISTORY_SLICE, Observations
from dynamiccl.datasets.history import Call
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.questions import cold_questions, table_supports
from dynamiccl.errors import ArtifactMismatch, CorruptFile
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve.artifact import Artifact, open_artifact
from dynamiccl.serve.brain import (
    BrainConfig,
    KeyCalls,
    ScriptedBrain,
    raw_calls,
)
from dynamiccl.serve.brain_module import traced_features, write_brain
from dynamiccl.serve.export import verify_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.train.policy import TorchPolicy
from tests.calls import history_arrays
from tests.serve.brains import CONFIG, FIRST_BIN, NUM_BINS, SIZES, random_windows, seal, task


@pytest.fixture(name="artifact")
def artifact_fixture(small_artifact: Artifact) -> Artifact:
    return small_artifact


@pytest.fixture
def brain(artifact: Artifact) -> ScriptedBrain:
    return ScriptedBrain(artifact.directory / "brain.pt")


@pytest.fixture
def copied(artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact.directory, tmp_path / "copy"))


def test_without_a_history_it_decides_what_the_table_says(
    artifact: Artifact, brain: ScriptedBrain
) -> None:
    """So it does for sizes outside of the table and for empty windows; other shapes have none."""
    table = DecisionTable.read(artifact.directory / artifact.tables[0].path)
    tasks = [task(1 << 10, 5.0), task(1 << 33, 9e5), task(1 << 20)]
    assert brain.decide(CONFIG, []) == brain.decide(CONFIG, tasks) == table
    assert 0 < table.entries["act"].sum() < table.entries.size
    strange = replace(CONFIG, system="b"), replace(CONFIG, num_nodes=2), BrainConfig("", 1, 8)
    assert [brain.decide(other, []) for other in strange] == [None] * 3


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
    cold = brain.decide(CONFIG, [])
    times = [np.exp2(k) for k in range(8)]
    tasks = [task(size, *times) for size in SIZES]
    warm = brain.decide(CONFIG, tasks)
    assert cold is not None
    assert warm is not None
    differs = cold.entries != warm.entries
    columns = [t.bin - FIRST_BIN for t in tasks]
    assert differs[Collective.AllReduce, columns].any()
    differs[Collective.AllReduce, columns] = False
    assert not differs.any()


def test_warm_decisions_are_those_of_features_and_policy(
    artifact: Artifact, brain: ScriptedBrain
) -> None:
    policy = TorchPolicy.load(artifact.directory)
    (support,) = table_supports(artifact.manifest)
    asked = cold_questions(artifact.manifest, support)
    configs = Catalogue.from_json(artifact.manifest.catalogue).configs
    windows = random_windows(np.random.default_rng(7), NUM_BINS)
    tasks = [KeyCalls(Collective.AllGather, FIRST_BIN + i, tuple(w)) for i, w in enumerate(windows)]
    table = brain.decide(CONFIG, tasks)
    assert table is not None
    first = Collective.AllGather * NUM_BINS
    observations = Observations.cold(asked.context[first : first + NUM_BINS].copy())
    for row, calls in enumerate(windows):
        observations.window[row], observations.context[row, HISTORY_SLICE] = history_arrays(calls)
    actions = policy.act(observations, asked.mask[first : first + NUM_BINS])
    wanted = DecisionTable.from_configs(
        [[configs[a] for a in actions]] * 5, num_nodes=1, num_ranks=8, first_bin=FIRST_BIN
    )
    np.testing.assert_array_equal(
        table.entries[Collective.AllGather], wanted.entries[Collective.AllGather]
    )


def test_brain_of_another_policy_is_refused(copied: Path) -> None:
    manifest = Manifest.read(copied)
    questions = [cold_questions(manifest, s) for s in table_supports(manifest)]
    configs = list(manifest.actions().configs)
    turned = [configs[0], *configs[:0:-1]]
    write_brain(copied / "policy.pt", turned, questions, copied / "brain.pt")
    seal(copied)
    with pytest.raises(ArtifactMismatch, match=r"NCCL cannot run: .* AllGather has no Tree"):
        verify_artifact(copied)


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


def test_brain_that_plays_otherwise_on_a_history_is_refused(copied: Path, tmp_path: Path) -> None:
    manifest = verify_artifact(copied).manifest
    other = ActsOnAHistory(torch.jit.load(str(copied / "policy.pt")))  # type: ignore[no-untyped-call]
    torch.jit.script(other).save(str(tmp_path / "other.pt"))  # type: ignore[no-untyped-call]
    questions = [cold_questions(manifest, s) for s in table_supports(manifest)]
    configs = manifest.actions().configs
    write_brain(tmp_path / "other.pt", configs, questions, copied / "brain.pt")
    seal(copied)
    with pytest.raises(ArtifactMismatch, match=r"on a history brain\.pt does not decide what"):
        verify_artifact(copied)


def test_file_that_is_no_torchscript_is_refused_and_without_one_tables_are_used(
    copied: Path,
) -> None:
    (copied / "brain.pt").write_bytes(b"PK")
    seal(copied)
    with pytest.raises(CorruptFile, match=r"brain\.pt is not a TorchScript file"):
        verify_artifact(copied)
    (copied / "brain.pt").unlink()
    seal(copied)
    assert open_artifact(copied).tables == verify_artifact(copied).tables != []


def test_calls_are_right_aligned_and_the_oldest_are_dropped() -> None:
    calls = [Call(1 << 20, float(i), None, None, None) for i in range(1, 12)]
    raw = raw_calls([calls, calls[:2], []])
    assert raw[0, :, 2].tolist() == [float(i) for i in range(4, 12)]
    assert raw[1, :, 2].tolist() == [0.0] * 6 + [1.0, 2.0]
    assert raw[1, 7].tolist() == [1.0, 1 << 20, 2.0, -1.0, -1.0, 0.0, -1.0, -1.0]
    assert not raw[2].any()
