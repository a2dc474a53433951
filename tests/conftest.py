"""Shared fixtures: one simulated data set, one trained run and one build for the whole session.

Tests run side by side (pytest-xdist): a file's tests on one worker, and the tests of a GROUPS entry
too. The order is random (pytest-randomly), but what takes longest begins first.
"""

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.data_sets import data_dir as data_dir  # noqa: PLC0414

# Fixtures for every test.
from tests.data_sets import make_data, sweep_text
from tests.once import once
from tests.plugin_build import adaptive_path as adaptive_path  # noqa: PLC0414
from tests.plugin_build import build_dir as build_dir  # noqa: PLC0414
from tests.plugin_build import plugin_path as plugin_path  # noqa: PLC0414
from tests.plugin_build import sweep_path as sweep_path  # noqa: PLC0414
from tests.plugin_build import torch_build_dir as torch_build_dir  # noqa: PLC0414
from tests.stores import new_store, uri_of

# CI repeats one set of examples, so that a run says something about the change; by hand they vary.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.pop("MLFLOW_TRACKING_URI", None)
# A shell's background jobs ignore it, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Files that one worker runs. The longest files have an entry too: groups are begun in this order.
GROUPS = {
    # Jobs of up to 16 processes each: two at once would be late for each other's limits.
    "jobs": ("serve/jobs/",),
    "start": ("test_start",),
    "slurm": (
        "cluster/test_steps",
        "cluster/test_sweeps",
    ),
    # Together on one worker these would be the last to end; all workers import what training needs
    # anyway, where they collect the tests.
    "online": ("train/test_online", "train/test_trigger"),
    "train": ("train/",),
    # Areas of goldens (`group_of`).
    "test_golden[commands]": (),
    "test_golden[tables": (),
    "evaluate": ("evaluate/", "benchmarks/"),
    "pages": ("test_pages",),
    "runner": ("collect/benchmark/test_launch",),
}


@dataclass(frozen=True)
class Soak:
    """Seed and duration of a soak test."""

    seed: int
    seconds: float


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak-seed", type=int, default=0, help="where soak tests begin (0)")
    group.addoption("--soak-seconds", type=float, default=60, help="how long each goes on (60)")


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> Soak:
    return Soak(pytestconfig.getoption("soak_seed"), pytestconfig.getoption("soak_seconds"))


class _Order:
    """Puts the long groups first, after pytest-randomly has shuffled; on a worker alone.

    One after the other, tests run as they were asked for or shuffled: of a slice of soak, or up to
    the first failure, only the first ones are run.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if not hasattr(config, "workerinput"):
            return
        order = {name: rank for rank, name in enumerate(GROUPS)}
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


class ByGroup(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives a group to one worker, so that its fixtures are made once.

    Not `--dist=loadgroup`, which pytest-xdist 3.8 quietly does not do under pytest 9.2: it writes
    the group into `item._nodeid`, which is not there any more.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    return ByGroup(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Order())


def group_of(nodeid: str) -> str:
    """The group of a test: its entry in GROUPS, else its file; of a golden its area."""
    file, _, test = nodeid.partition("::")
    place = file.removeprefix("tests/").removesuffix(".py")
    if place == "golden/test_golden":
        return test.partition("-")[0]
    for name, places in GROUPS.items():
        if place.startswith(places):
            return name
    return place


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[pytest.MonkeyPatch]:
    """Figures are made, but not drawn, which takes half of the time of a short fit or a report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", _save_empty)
        yield patch


def _save_empty(_figure: object, file: Path | io.StringIO, **_options: object) -> None:
    if isinstance(file, io.StringIO):
        file.write("<svg></svg>")
    else:
        file.touch()


@pytest.fixture
def drawn(undrawn: pytest.MonkeyPatch) -> Iterator[None]:
    """Figures are drawn after all."""
    undrawn.undo()
    yield
    undrawn.setattr("matplotlib.figure.Figure.savefig", _save_empty)


@dataclass(frozen=True)
class Trained:
    """A finished training run."""

    data: Path
    run_directory: Path
    run_id: str
    tracking_uri: str

    @property
    def policy(self) -> Path:
        return self.run_directory / "policy"


@pytest.fixture(scope="session")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The recipe, with fewer steps than its default, on the simulated data set."""

    def train(store: Path) -> None:
        import torch

        from dynamiccl.train.fit import fit
        from dynamiccl.train.recipe import make_recipe

        torch.set_num_threads(1)
        recipe = make_recipe("ddqn-dueling", ["steps=900", "steps_per_epoch=100"])
        summary = fit(data_dir, recipe, experiment="tests", tracking_uri=new_store(store), seed=0)
        found = {"run_directory": str(summary.run_directory), "run_id": summary.run_id}
        (store / "summary.json").write_text(json.dumps(found))

    store = once(tmp_path_factory, "trained", train)
    found = json.loads((store / "summary.json").read_text())
    return Trained(data_dir, Path(found["run_directory"]), found["run_id"], uri_of(store))


@pytest.fixture(scope="session")
def gated_dir(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained policy, gated by fresh simulated runs."""

    def gate(folder: Path) -> None:
        from dynamiccl.datasets.store import read
        from dynamiccl.evaluate.gate import pass_gate, write_gated
        from dynamiccl.train.policy import TorchPolicy

        fresh = make_data(folder / "fresh", sweep_text(name='"fresh"', cycles=8, seed=11))
        gated = pass_gate(TorchPolicy.load(trained.policy), read(fresh), known=read(trained.data))
        write_gated(gated, trained.policy, folder / "gated")

    return once(tmp_path_factory, "gated", gate) / "gated"
