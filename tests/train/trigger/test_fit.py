"""`dynamiccl-train trigger`: quiet series, thresholds, and a run that the export takes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_trigger import alarms_of, count_onsets, t3_noise
from mlflow import MlflowClient

from dynamiccl.datasets.store import write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.train import trigger_fit as fitting
from dynamiccl.train.policy import script
from dynamiccl.train.trigger import RUNGS, Detector, FloatArray, TriggerModule
from tests.calls import call, calls_table, traced
from tests.cli.conftest import Shell
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.stores import new_store


def t3(random: np.random.Generator, steps: int, width: int, sigma: float) -> FloatArray:
    return t3_noise(random, steps, width) * np.float32(sigma)


def series_of(times: FloatArray) -> fitting.Series:
    """A series of each column of log times."""
    return fitting.Series.of(
        list(times.T), [np.zeros(len(times), dtype=np.float32)] * times.shape[1]
    )


def write_calls(data: Path, *rows: dict[str, object]) -> Path:
    write_part(data, calls_table(*rows), kind="calls", provenance={})
    return data


def timed(log_times: np.ndarray, **columns: object) -> list[dict[str, object]]:
    return [call(i, float(np.exp(t)), **columns) for i, t in enumerate(log_times)]


def test_a_series_is_a_task_key_under_one_config(tmp_path: Path) -> None:
    times = 5.0 + 0.05 * np.random.default_rng(0).standard_normal(400)
    rows = [
        {
            **row,
            "comm": f"{i % 2:016x}",
            "actual_protocol": ("LL", "SIMPLE")[i // 2 % 2],
            "ranks_agree": i != 17,
        }
        for i, row in enumerate(timed(times))
    ]
    untold = [traced(i, 1.0) for i in range(300)]  # of a trace that does not tell the config
    series, counts = fitting.read_series(write_calls(tmp_path, *rows, *untold))
    assert np.diff(series.starts).tolist().count(100) == 3
    assert (counts["series"], counts["calls"], counts["unusable"]) == (4, 399, 301)
    assert series.usual_scale == pytest.approx(0.05, rel=0.2)
    assert np.median(series.values) == pytest.approx(0.0, abs=0.1)


def test_a_stretch_that_was_slow_is_left_out_and_single_slow_calls_stay(tmp_path: Path) -> None:
    times = 5.0 + t3(np.random.default_rng(0), 1_000, 1, 0.05)[:, 0]
    stretch, single = times.copy(), times.copy()
    stretch[400:600] += np.log(1.5)
    single[::50] += 1.0
    series, counts = fitting.read_series(write_calls(tmp_path / "stretch", *timed(stretch)))
    assert 200 <= counts["disturbed"] <= 240
    assert series.usual_scale == pytest.approx(0.05, rel=0.15)
    assert np.mean(series.values > 5.0) < 0.02
    series, counts = fitting.read_series(write_calls(tmp_path / "single", *timed(single)))
    assert counts["disturbed"] == 0
    assert (series.values > 10.0).sum() >= 20


def test_too_few_calls_and_averages_are_refused(tmp_path: Path, data_dir: Path) -> None:
    write_calls(tmp_path, *timed(np.full(100, 5.0)))
    with pytest.raises(NotEnoughData, match=r"100 quiet calls .* 256 .*DYNAMICCL_CALLS_DIR"):
        fitting.read_series(tmp_path)
    with pytest.raises(NotEnoughData, match=r"0 quiet calls .*averages vary less"):
        fitting.read_series(data_dir)


def test_what_is_drawn_keeps_what_neighbours_have_in_common() -> None:
    random = np.random.default_rng(0)
    wander = np.zeros((3_000, 2), dtype=np.float32)
    for step in range(1, 3_000):
        wander[step] = 0.9 * wander[step - 1] + random.standard_normal(2)
    values, sizes, scales = series_of(wander).draw(random, 50, 1_000)
    assert values.shape == sizes.shape == (1_000, 50)
    assert scales.shape == (50,)
    inside = np.arange(999) % fitting.BLOCK != fitting.BLOCK - 1
    pairs = np.corrcoef(values[:-1][inside].ravel(), values[1:][inside].ravel())
    assert pairs[0, 1] == pytest.approx(0.9, abs=0.03)
    borders = np.corrcoef(values[:-1][~inside].ravel(), values[1:][~inside].ravel())
    assert abs(borders[0, 1]) < 0.2
    short = series_of(wander[:400].T.reshape(-1, 20).T)
    assert np.isfinite(short.draw(random, 5, 200)[0]).all()  # they are drawn together
    # A split is by time and loses nothing.
    series = series_of(wander[:100])
    first, rest = series.split(0.6)
    assert [np.diff(each.starts).tolist() for each in (first, rest)] == [[60] * 2, [40] * 2]
    np.testing.assert_array_equal(first.values[:60], series.values[:60])
    np.testing.assert_array_equal(rest.values[:40], series.values[60:100])


def test_peaks_are_the_largest_values_between_rests_and_their_tail_is_extrapolated() -> None:
    values = np.array([(1, 0), (3, 2), (0, 5), (4, 0), (0, 1)], dtype=float)
    assert fitting.peaks_of(values).tolist() == [5.0, 4.0, 3.0, 1.0]
    with pytest.raises(NotEnoughData, match="never vary"):
        fitting.threshold_of(fitting.peaks_of(0.0 * values), 0.1)
    drawn = fitting.peaks_of(np.random.default_rng(0).exponential(2.0, (1, 50_000)))
    for share in (0.2, 0.02, 2e-4, 2e-6):
        wanted = pytest.approx(-2.0 * np.log(share), abs=1.5)
        assert fitting.threshold_of(drawn, 50_000 * share) == wanted


#: By how many calls thresholds are calibrated, and on how many they are tried.
CALLS = 200_000


@pytest.fixture(scope="module")
def calibrated() -> object:
    """A Trigger whose forecast is the level alone, for two false alarms in 100,000 calls."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    scales = np.exp(random.uniform(np.log(0.02), np.log(0.5), 30)).astype(np.float32)
    series = series_of(t3(random, 1_000, 30, 1.0) * scales)
    module = TriggerModule(series.usual_scale).eval()
    peaks = fitting.find_peaks(module, series, CALLS, seed=1)
    assert len(peaks) == len(RUNGS)
    module.set_thresholds([fitting.threshold_of(each, 2e-5 * CALLS) for each in peaks])
    thresholds = module.thresholds.tolist()
    assert thresholds == sorted(thresholds)  # smaller references need higher ones
    return script(module)


@pytest.mark.parametrize("sigma", [0.02, fitting.scale_of_rung(0.25)])
def test_a_wanted_rate_of_false_alarms_is_kept(sigma: float, calibrated: object) -> None:
    quiet = t3(np.random.default_rng(5), 256 + CALLS // 500, 500, sigma) + np.float32(5.0)
    onsets = count_onsets(alarms_of(calibrated, quiet)[256:])
    # Three times the Poisson deviation is allowed, and a fifth for the threshold's own.
    wanted = 2e-5 * CALLS
    assert onsets <= 1.2 * wanted + 3.0 * np.sqrt(wanted) + 1.0


@pytest.fixture
def few_calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        few = {"STEPS": 1, "JUDGED_CALLS": 250, "CALLS_PER_RUNG": 10_000}
        few |= {"_CHUNKS": 2}
        for name, count in few.items():
            patched.setattr(f"dynamiccl.train.trigger_fit.{name}", count)
        yield


@pytest.mark.usefixtures("few_calls")
def test_a_run_holds_a_trigger_with_its_facts_and_the_export_takes_it(
    policy: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = 5.0 + t3(np.random.default_rng(0), 300, 6, 0.05)
    rows = [
        row
        for key in range(6)
        for row in timed(times[:, key], comm=f"{key:016x}", size_bytes=1 << (20 + key))
    ]
    data, uri = write_calls(tmp_path / "site", *rows), new_store(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    found = shell("dynamiccl-train", "trigger", "--data", data, "--json")
    folder = Path(found.json["run_directory"])
    facts = json.loads((folder / "trigger" / "trigger.json").read_bytes())
    assert facts["counts"]["calls"] == 1_800
    assert facts["usual_scale"] == pytest.approx(0.05, rel=0.1)
    assert facts["thresholds"].keys() == {f"{rung:.3f}" for rung in RUNGS}
    assert json.loads((folder / "summary.json").read_bytes())["facts"] == facts
    assert found.json["facts"] == facts
    detector = Detector.load(folder)
    assert [detector.observe([0], [5.0])[0].tolist() for _ in range(40)][-1] == [0]
    run = MlflowClient(uri).get_run(found.json["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["false_alarms_per_1e5"] == "0.5"
    assert run.data.params["series_calls"] == "1800"
    assert run.data.tags["kind"] == "trigger"
    wanted = {"loss", "threshold_1.000", "forecast_error"}
    assert wanted <= set(run.data.metrics)
    # Equal seeds train alike.
    module, *_ = fitting.make_trigger(fitting.read_series(data)[0])
    assert module.thresholds.tolist() == list(facts["thresholds"].values())
    exporting = ("dynamiccl-deploy", "export", policy, "--out", "with", "--json")
    done = shell(*exporting, "--trigger", folder)
    assert "was trained without a Trigger" in done.err
    assert json.loads(done.out)["trigger"] == facts
    open_artifact(Path("with"))


@pytest.mark.soak
def test_the_forecaster_learns_what_follows_from_the_calls_before() -> None:
    """Calls that alternate: the level alone is wrong about each of them."""
    swing = np.where(np.arange(2_000) % 2 == 1, 1.0, -1.0)[:, None] * 0.05
    times = t3(np.random.default_rng(0), 2_000, 10, 0.02)
    training, rest = series_of((swing + times).astype(np.float32)).split(0.6)
    module = TriggerModule(training.usual_scale)
    before = fitting.forecast_error(module, rest, seed=1)
    fitting.train(module, training, rest, steps=60, seed=0)
    assert fitting.forecast_error(module, rest, seed=1) < 0.85 * before


@pytest.mark.usefixtures("few_calls")
def test_what_cannot_be_learned_leaves_the_level() -> None:
    training, rest = series_of(t3(np.random.default_rng(0), 600, 4, 1.0)).split(0.6)
    module = TriggerModule(1.0)
    _, errors = fitting.train(module, training, rest, steps=2, seed=0)
    error = fitting.forecast_error(module, rest, seed=0)
    assert error == errors["forecast_error"] <= errors["level_error"]
