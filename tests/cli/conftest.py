"""The shell fixture that runs commands, and the data, policy and artifact for them.

The policy is a hand-made one of a few bytes: what training makes is tested there.
"""

import math
import shutil
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from dynamiccl import cli
from dynamiccl.datasets import store
from dynamiccl.datasets.store import measurements_table
from dynamiccl.train import options
from tests.cli.in_process import MODULES as MODULES  # noqa: PLC0414
from tests.cli.in_process import Done as Done  # noqa: PLC0414
from tests.cli.in_process import done_by
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame

ROOT = Path(__file__).parents[2]
COMMANDS = [
    (name, tuple(str(info.name) for info in import_module(module).app.registered_commands))
    for name, module in MODULES.items()
]
SWEEP = """
name = "grid"
system = "sim"
collectives = ["AllReduce"]
algorithms = ["Ring", "NVLSTree"]
groups = [{ num_nodes = 2, ranks_per_node = 8 }]
sizes = { min = "1M", max = "2M" }
cycles = 2
"""
LOG_ROW = "1048576 262144 float sum -1 100.0 10.49 18.35 0 102.0 10.28 17.99 0\n"


Shell = Callable[..., Done]


@pytest.fixture(name="shell")
def shell_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    """Run a command line in an empty directory.

    Without the lines that say how far it is, which a busy machine alone makes it say.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "EVERY_S", math.inf)
    monkeypatch.setattr(cli, "FIRST_LINE_S", 1e6)
    monkeypatch.setenv("COLUMNS", "200")

    def run(command: str, *words: object) -> Done:
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        done = done_by(command, *words)
        for number, handler in before.items():  # a worker of a study has its own
            signal.signal(number, handler)
        return done

    return run


def refused(done: Done, code: int) -> str:
    """Check that a command ended with one line on stderr, and return it."""
    assert (done.code, done.out) == (code, ""), done
    [line] = done.err.removesuffix("\n").split("\n")
    assert line.startswith("error: ")
    return line


@pytest.fixture(name="data")
def data_fixture(tmp_path: Path) -> Path:
    rows = [
        row
        for size in (1 << 20, 1 << 21, 1 << 22, 1 << 23)
        for row in (
            default(100.0, size_bytes=size),
            forced("Ring", "LL", 80.0, size_bytes=size),
            forced("Tree", "LL", 90.0, size_bytes=size),
        )
    ]
    store.write_part(tmp_path / "data", measurements_table(rows), provenance={})
    return tmp_path / "data"


@pytest.fixture(name="policy", scope="module")
def policy_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that takes the highest action that its mask allows."""
    import torch

    class Highest(torch.nn.Module):
        def forward(
            self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scores = mask * torch.arange(1, mask.shape[1] + 1) + 0.0 * window.sum() + context.sum()
            return scores.argmax(dim=1), scores

    folder = tmp_path_factory.mktemp("policy")
    torch.jit.script(Highest()).save(str(folder / "policy.pt"))  # type: ignore[no-untyped-call]
    rows = frame(
        *(default(size_bytes=1 << k) for k in (20, 22)),
        *(forced(a, "LL", size_bytes=1 << k) for a in ("Ring", "Tree") for k in (20, 22)),
    )
    noise = frame().select("system", "collective", noise_band="time_us")
    hand_made_manifest(rows, noise).write(folder)
    return folder


@pytest.fixture(name="exported", scope="module")
def exported_fixture(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dynamiccl.serve.export import export_artifact

    return export_artifact(policy, tmp_path_factory.mktemp("exported") / "artifact").directory


@pytest.fixture(name="artifact")
def artifact_fixture(exported: Path, tmp_path: Path) -> Path:
    """One of the test's own, in the directory that the shell is in."""
    return Path(shutil.copytree(exported, tmp_path / "artifact"))
