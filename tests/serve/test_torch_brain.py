"""dynamiccl-brain: the artifact's policy in C++, the same as in Python."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.features import TUNED
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import (
    BrainConfig,
    History,
    KeyCalls,
    ScriptedBrain,
)
from dynamiccl.serve.build import BRAIN_NAME, find_torch
from dynamiccl.serve.table import DecisionTable
from tests.serve.brains import CONFIG, FIRST_BIN, NUM_BINS, decided, random_windows, task
from tests.serve.leader import Leader, question_of


def random_history(seed: int) -> list[KeyCalls]:
    random = np.random.default_rng(seed)
    keys = [(c, b) for c in TUNED for b in range(FIRST_BIN - 3, FIRST_BIN + NUM_BINS + 3)]
    # The artifact's Trigger tells interference, no leader does.
    windows = [
        tuple(replace(call, interference=None) for call in window)
        for window in random_windows(random, len(keys))
    ]
    return [KeyCalls(*key, window, len(window)) for key, window in zip(keys, windows, strict=True)]


@pytest.fixture(scope="module", name="brain")
def brain_fixture(torch_build_dir: Path) -> Iterator[Leader]:
    with Leader(torch_build_dir / BRAIN_NAME) as leader:
        yield leader


def why_not(brain: Leader, artifact: Path, config: BrainConfig = CONFIG) -> str:
    """The same answer, to a brain that is new and to one that failed before."""
    line = json.dumps(question_of(artifact, config, brain=100))
    answer = brain.told(line)
    assert brain.told(line) == answer
    assert list(answer) == ["number", "error"]
    return str(answer["error"])


def test_decides_as_the_table_says_and_as_python_does_on_a_history(
    brain: Leader, small_artifact: Artifact
) -> None:
    artifact = small_artifact.directory
    python = ScriptedBrain(artifact / "brain.pt")
    table = DecisionTable.read(artifact / small_artifact.tables[0].path)
    assert brain.table(artifact, CONFIG) == table
    for seed in range(5):
        tasks = random_history(seed)
        found = brain.table(artifact, CONFIG, tasks)
        assert found == decided(python, tasks)
        assert found != table
        assert found == brain.table(artifact, CONFIG, tasks, brain=2 + 300 * seed)
    assert brain.table(artifact, CONFIG) == table  # nothing is remembered but what it is told


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "No such file or directory"),
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
    brain: Leader,
    copied: Path,
    small_artifact: Artifact,
) -> None:
    spoil(copied / "brain.pt")
    why = why_not(brain, copied)
    assert said in why
    assert "\n" not in why
    brain.table(small_artifact.directory, CONFIG)  # it hurts no other communicator


def test_unknown_shape_is_refused(brain: Leader, small_artifact: Artifact) -> None:
    unknown = replace(CONFIG, num_nodes=2, num_ranks=16)
    why = why_not(brain, small_artifact.directory, unknown)
    assert why == "brain.pt knows no 16 ranks on 2 nodes of box"


def test_question_that_no_leader_asks_is_refused(brain: Leader, small_artifact: Artifact) -> None:
    """Numbers that become indices are checked, and the form of the line."""
    history = History((task(1 << 20, *range(1, 9)),), None)
    whole = question_of(small_artifact.directory, CONFIG, history, number=7)
    assert "table" in brain.told(json.dumps(whole))
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
        answer = brain.told(line)
        assert answer["error"] == "its question is impossible"
        assert answer["number"] in {0, 7}


def test_needs_torch_from_where_it_was_built(torch_build_dir: Path) -> None:
    command = ["readelf", "--dynamic", "--wide", str(torch_build_dir / BRAIN_NAME)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"Library runpath: [{find_torch()}/lib" in dynamic
    assert "Shared library: [libtorch_cpu.so]" in dynamic
