"""dynamiccl-brain: the artifact's policy in C++, the same as in Python."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.features import TUNED
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain_check import random_windows
from dynamiccl.serve.brain_server import Answer, _sized
from dynamiccl.serve.build import BRAIN_NAME, find_torch
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import BrainConfig, KeyCalls, ScriptedBrain
from tests.serve.brains import CONFIG, FIRST_BIN, NUM_BINS
from tests.serve.leader import Leader, encode_question, torch_brain
from tests.serve.test_brain_protocol import QUESTION, SPOILED, body, spoiled


def random_history(seed: int) -> list[KeyCalls]:
    random = np.random.default_rng(seed)
    keys = [(c, b) for c in TUNED for b in range(FIRST_BIN - 3, FIRST_BIN + NUM_BINS + 3)]
    windows = random_windows(random, len(keys))
    # A leader always tells how many calls there were.
    return [KeyCalls(*k, tuple(w), len(w) or None) for k, w in zip(keys, windows, strict=True)]


@pytest.fixture
def copied(small_artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_artifact.directory, tmp_path / "copy"))


@pytest.fixture(scope="module", name="brain")
def brain_fixture(torch_build_dir: Path) -> Iterator[bytes]:
    with torch_brain(torch_build_dir) as address:
        yield address


def config_of(artifact: Path) -> BrainConfig:
    return replace(CONFIG, artifact=str(artifact))


def why_not(brain: bytes, config: BrainConfig) -> str:
    with Leader(brain, config) as leader:
        said = leader.ask().error
        assert said is not None
        assert said == leader.ask().error
    return said


def test_decides_as_the_table_says_and_as_python_does_on_a_history(
    brain: bytes, small_artifact: Artifact
) -> None:
    python = ScriptedBrain(small_artifact.directory / "brain.pt")
    table = DecisionTable.read(small_artifact.directory / small_artifact.tables[0].path)
    with Leader(brain, config_of(small_artifact.directory)) as leader:
        assert leader.table([]) == table
        for seed in range(5):
            tasks = random_history(seed)
            decided = leader.table(tasks)
            assert decided == python.decide(CONFIG, tasks)
            assert decided != table
        assert leader.table([]) == table  # nothing is remembered but what it is told


def test_communicators_do_not_mix_and_one_that_ends_hurts_no_other(
    brain: bytes, small_artifact: Artifact, copied: Path
) -> None:
    (copied / "brain.pt").write_bytes(b"no module")
    with Leader(brain, config_of(small_artifact.directory)) as leader:
        table = leader.table([])
        with Leader(brain, config_of(copied)) as other:
            assert other.ask().error
            other.connection.sendall(b"\xff\xff\xff\xff")
            assert other.is_hung_up_on()
        with Leader(brain, CONFIG) as other:
            other.connection.sendall(b"\x18\0\0\0no message, 24 bytes long")
        assert leader.table([]) == table


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "No such file or directory"),
        (lambda module: module.symlink_to(module.rename(f"{module}.x")), "it is a symbolic link"),
        (lambda module: module.chmod(0o664), "others may write to it"),
        *(
            (lambda module, k=k: module.write_bytes(module.read_bytes()[:k]), "")
            for k in (0, 10, 5000)
        ),
    ],
)
def test_brain_that_cannot_be_used_is_refused_in_one_line(
    spoil: Callable[[Path], object], said: str, brain: bytes, copied: Path
) -> None:
    spoil(copied / "brain.pt")
    why = why_not(brain, config_of(copied))
    assert said in why
    assert "\n" not in why


def test_unknown_shape_is_refused(brain: bytes, small_artifact: Artifact) -> None:
    unknown = replace(config_of(small_artifact.directory), num_nodes=2, num_ranks=16)
    assert why_not(brain, unknown) == "brain.pt knows no 16 ranks on 2 nodes of box"


def test_question_that_no_leader_asks_is_refused(brain: bytes) -> None:
    whole = body(encode_question(QUESTION))
    others = [spoiled(*place) for *place, _ in SPOILED[1:]]
    for question in (*others, whole[:24], whole[:-1], whole + b"x"):
        with Leader(brain, CONFIG) as leader:
            leader.connection.sendall(_sized(question))
            assert leader.told() == Answer(QUESTION.number, error="its question is impossible")
    with Leader(brain, CONFIG) as leader:
        leader.connection.sendall(_sized(spoiled(8, "<I", 2)))
        assert leader.is_hung_up_on()  # another version


def test_needs_torch_from_where_it_was_built_and_a_leader(torch_build_dir: Path) -> None:
    program = torch_build_dir / BRAIN_NAME
    command = ["readelf", "--dynamic", "--wide", str(program)]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"Library runpath: [{find_torch()}/lib" in dynamic
    assert "Shared library: [libtorch_cpu.so]" in dynamic
    alone = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "is started by dynamiccl-arbiter" in alone.stderr
