"""`dynamiccl-train trigger`: from recorded calls to a run that the export takes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from dynamiccl.datasets.store import write_part
from dynamiccl.errors import UserError
from dynamiccl.serve.export import verify_artifact
from dynamiccl.train.trigger import RUNGS, Detector, TriggerModule
from dynamiccl.train.trigger_fit import (
    Series,
    TriggerSummary,
    fit_trigger,
    forecast_error,
    make_trigger,
    read_series,
    train,
)
from tests.calls import call, calls_table
from tests.cli.conftest import Shell
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.stores import new_store
from tests.train.trigger.streams import t3

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture(scope="module", autouse=True)
def few_calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        few = {"STEPS": 1, "JUDGED_CALLS": 250, "CALLS_PER_RUNG": 10_000}
        few |= {"_ONSETS": 50, "_HORIZON": 60}
        for name, count in few.items():
            patched.setattr(f"dynamiccl.train.trigger_fit.{name}", count)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    times = np.exp(5.0 + t3(np.random.default_rng(0), 300, 6, 0.05))
    rows = [
        call(i, float(times[i, key]), comm=f"{key:016x}", size_bytes=1 << (20 + key))
        for key in range(6)
        for i in range(300)
    ]
    write_part(folder, calls_table(*rows), kind="calls", provenance={})
    return folder


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def summary(data: Path, uri: str) -> TriggerSummary:
    return fit_trigger(data, experiment="x", tracking_uri=uri)


def test_a_run_holds_a_trigger_with_its_facts_and_is_tracked(
    summary: TriggerSummary, uri: str
) -> None:
    folder = Path(summary.run_directory)
    facts = json.loads((folder / "trigger" / "trigger.json").read_bytes())
    assert facts["counts"]["calls"] == 1_800
    assert facts["usual_scale"] == pytest.approx(0.05, rel=0.1)
    assert json.loads((folder / "summary.json").read_bytes())["facts"] == facts
    detector = Detector.load(folder)
    for _ in range(40):
        alarm, _ = detector.observe([0], [5.0])
    assert alarm.tolist() == [0]
    run = MlflowClient(uri).get_run(summary.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["false_alarms_per_1e5"] == "0.5"
    assert run.data.params["series_calls"] == "1800"
    assert run.data.tags["kind"] == "trigger"
    wanted = {"loss", "threshold_1.000", "forecast_error", "delay_1_5x_calls"}
    assert wanted <= set(run.data.metrics)


def test_equal_seeds_train_alike(summary: TriggerSummary, data: Path) -> None:
    module, _ = make_trigger(read_series(data)[0])
    assert module.thresholds.tolist() == list(summary.facts.thresholds.values())


def test_the_command_says_what_it_found_and_the_export_takes_its_run(
    data: Path, uri: str, policy: Path, shell: Shell
) -> None:
    arguments = ("dynamiccl-train", "trigger", "--data", data, "--tracking-uri", uri)
    found = shell(*arguments, "--json").json
    assert found["facts"]["thresholds"].keys() == {f"{rung:.3f}" for rung in RUNGS}
    exporting = ("dynamiccl-deploy", "export", policy, "--out", "with")
    done = shell(*exporting, "--trigger", found["run_directory"], "--json")
    assert "was trained without a Trigger" in done.err
    assert json.loads(done.out)["trigger"] == found["facts"]
    verify_artifact(Path("with"))


@pytest.mark.parametrize("rate", [0.0, -1.0, 2000.0])
def test_a_rate_that_cannot_be_wanted_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="false alarms in 100,000 calls cannot be wanted"):
        fit_trigger(Path("none"), rate, experiment="x", tracking_uri="sqlite:///none.db")


@pytest.mark.soak
def test_the_forecaster_learns_what_follows_from_the_calls_before() -> None:
    """Calls that alternate: the level alone is wrong about each of them."""
    random = np.random.default_rng(0)
    swing = np.where(np.arange(2_000) % 2 == 1, 1.0, -1.0) * 0.05
    times = [(swing + t3(random, 2_000, 1, 0.02)[:, 0]).astype(np.float32) for _ in range(10)]
    series = Series.of(times, [np.zeros(2_000, dtype=np.float32)] * 10)
    training, rest = series.split(0.6)
    module = TriggerModule(series.usual_scale)
    before = forecast_error(module, rest, seed=1)
    train(module, training, rest, steps=60, seed=0)
    assert forecast_error(module, rest, seed=1) < 0.85 * before


def test_what_cannot_be_learned_leaves_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamiccl.train.trigger_fit._CHUNKS", 2)
    series = Series.of(
        list(t3(np.random.default_rng(0), 600, 4).T), [np.zeros(600, dtype=np.float32)] * 4
    )
    training, rest = series.split(0.6)
    module = TriggerModule(1.0)
    trained = train(module, training, rest, steps=2, seed=0)
    assert forecast_error(module, rest, seed=0) == trained.error <= trained.level_error
