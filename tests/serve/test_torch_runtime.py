"""libdynamiccl-torch.so: the artifact's policy in C++, the same as in Python, and well-behaved."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.features import TUNED
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain_check import random_windows
from dynamiccl.serve.brain_history import KeyCalls
from dynamiccl.serve.build import TORCH_RUNTIME_NAME, find_torch
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import ScriptedBrain
from tests.serve.asking import Asking
from tests.serve.brains import CONFIG, FIRST_BIN, NUM_BINS


def random_history(seed: int) -> list[KeyCalls]:
    random = np.random.default_rng(seed)
    keys = [(c, b) for c in TUNED for b in range(FIRST_BIN - 3, FIRST_BIN + NUM_BINS + 3)]
    windows = random_windows(random, len(keys))
    return [KeyCalls(c, b, tuple(w)) for (c, b), w in zip(keys, windows, strict=True)]


@pytest.fixture
def copied(small_artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_artifact.directory, tmp_path / "copy"))


def opening_error(build_dir: Path, artifact: Path, kind: str = "torch") -> str:
    """Why a brain does not open."""
    with Asking(build_dir, kind, artifact) as leader:
        said = leader.hear()
    assert said.startswith("error: ")
    return said.removeprefix("error: ")


def test_decides_as_the_table_says_and_as_python_does_on_a_history(
    torch_build_dir: Path, small_artifact: Artifact
) -> None:
    brain = ScriptedBrain(small_artifact.directory / "brain.pt")
    table = DecisionTable.read(small_artifact.directory / small_artifact.tables[0].path)
    with Asking(torch_build_dir, "torch", small_artifact.directory) as leader:
        assert leader.table([]) == table
        for seed in range(5):
            tasks = random_history(seed)
            decided = leader.table(tasks)
            assert decided == brain.decide(CONFIG, tasks)
            assert decided != table
        assert leader.table([]) == table  # nothing is remembered but what it is told


@pytest.mark.parametrize(
    "line",
    [
        "1 5 80 0 1 1024 5.0 -1 -1 1 2 8",
        "1 4 80 0 9",
        "1 4 80 0 1 0 5.0 -1 -1 1 2 8",
        "1 4 80 0 1 1024 0 -1 -1 1 2 8",
        "1 4 80 0 1 1024 5.0 -1 -1 7 2 8",
        "1 4 80 0 1 1024 5.0 -1 -1 1 3 8",
        "1 4 80 0 1 1024 5.0 -1 -1 1 2 65",
    ],
)
def test_impossible_history_is_an_error_and_the_next_is_answered(
    torch_build_dir: Path, small_artifact: Artifact, line: str
) -> None:
    with Asking(torch_build_dir, "torch", small_artifact.directory) as leader:
        assert leader.say(line) == "error: task 0 is impossible"
        assert leader.say("0").startswith("44435441424c4500")


def test_built_with_another_torch_it_refuses(
    torch_build_dir: Path, small_artifact: Artifact
) -> None:
    library = str(torch_build_dir / "libother-torch.so")
    said = opening_error(torch_build_dir, small_artifact.directory, library)
    assert "it was built with torch 2." in said
    assert "(0123456789) and this process has torch 2." in said
    assert "libtorch_cpu.so" in said


def test_artifact_without_a_brain_and_unknown_shape_are_refused(
    torch_build_dir: Path, copied: Path
) -> None:
    brain = copied / "brain.pt"
    brain.rename(copied / "elsewhere.pt")
    assert "there is no such file" in opening_error(torch_build_dir, copied)
    brain.symlink_to(copied / "elsewhere.pt")
    assert "it is a symbolic link" in opening_error(torch_build_dir, copied)
    done = subprocess.run(
        [torch_build_dir / "ask_brain", "torch", copied, "box", "2", "16"],
        capture_output=True,
        text=True,
        check=True,
        input="",
    )
    assert done.stdout.startswith("error: ")


def test_brain_that_others_can_change_is_refused(torch_build_dir: Path, copied: Path) -> None:
    for mode in (0o664, 0o646):
        (copied / "brain.pt").chmod(mode)
        assert "others may write to it" in opening_error(torch_build_dir, copied)


@pytest.mark.parametrize("keep", [0, 10, 5000])
def test_damaged_brain_is_refused_in_one_line(
    torch_build_dir: Path, copied: Path, keep: int
) -> None:
    data = (copied / "brain.pt").read_bytes()
    (copied / "brain.pt").write_bytes(data[:keep])
    assert len(opening_error(torch_build_dir, copied)) < 256


def test_needs_torch_from_where_it_was_built_and_exports_one_function(
    torch_build_dir: Path,
) -> None:
    library = torch_build_dir / TORCH_RUNTIME_NAME
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    assert f"Library runpath: [{find_torch()}/lib" in dynamic
    assert "Shared library: [libtorch_cpu.so]" in dynamic
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    ours = {line.split()[-1] for line in symbols.splitlines() if "dynamiccl" in line.lower()}
    assert ours == {"dynamiccl_brain_v1"}


IN_A_JOB = """
import ctypes, os, sys, time
import torch
torch.set_num_threads(2)
torch.set_num_interop_threads(3)
class Config(ctypes.Structure):
    _fields_ = [(n, ctypes.c_char_p) for n in ("artifact", "system", "socket")] + [
        (n, ctypes.c_int32) for n in ("num_nodes", "num_ranks")]
class Brain(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("name", ctypes.c_char_p),
        ("open", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t)),
        ("decide", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
        ("close", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]
library = ctypes.CDLL(sys.argv[1])
library.dynamiccl_brain_v1.restype = ctypes.POINTER(Brain)
brain = library.dynamiccl_brain_v1().contents
config = Config(os.fsencode(sys.argv[2]), b"box", None, 1, 8)
state, reason = ctypes.c_void_p(), ctypes.create_string_buffer(256)
table, size = ctypes.create_string_buffer(10012), ctypes.c_size_t()
history = (ctypes.c_uint64 * 4)()
torch.ones(500, 500) @ torch.ones(500, 500)
threads = len(os.listdir("/proc/self/task"))
assert brain.open(ctypes.byref(config), ctypes.byref(state), reason, 256) == 0, reason.value
for _ in range(3):
    assert brain.decide(state, history, table, len(table), ctypes.byref(size), reason, 256) == 0
assert torch.get_num_threads() == 2, torch.get_num_threads()
assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
# A thread that was waited for stays listed until the kernel has buried it.
deadline = time.monotonic() + 10
while len(os.listdir("/proc/self/task")) != threads:
    assert time.monotonic() < deadline, "threads were left behind"
    time.sleep(0.01)
if sys.argv[3] == "close":
    brain.close(state)
print(size.value)
"""


@pytest.mark.parametrize("ending", ["close", "leave"])
def test_job_that_uses_torch_itself_keeps_its_settings(
    torch_build_dir: Path, small_artifact: Artifact, ending: str
) -> None:
    library = torch_build_dir / TORCH_RUNTIME_NAME
    done = subprocess.run(
        [sys.executable, "-c", IN_A_JOB, library, small_artifact.directory, ending],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 44 + 5 * NUM_BINS * 8 + 8
