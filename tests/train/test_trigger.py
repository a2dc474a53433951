"""The Trigger: a stream's state, levels of recorded calls, and `dynamiccl-train trigger`."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch
from mlflow import MlflowClient

from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.steps import CALLS_USED, timed_calls
from dynamiccl.datasets.store import read, write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.simulator.record_jobs import all_configs, record_jobs, write_calls
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall, Workload, make_workload
from dynamiccl.simulator.world import T3_ROBUST_SIGMA, World
from dynamiccl.train import trigger
from dynamiccl.train import trigger_fit as fitting
from dynamiccl.train.cautious import cell_of
from dynamiccl.train.cautious_fit import share_table
from dynamiccl.train.environment import JobCalls, Tables
from dynamiccl.train.policy import script
from dynamiccl.train.trigger import (
    RUNGS,
    Detector,
    FloatArray,
    TriggerModule,
    interference_levels,
    level_shares_of,
)
from tests.calls import call, calls_table, traced
from tests.cli.conftest import Shell
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.stores import new_store

QUIET = np.log(100.0)
ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "datasets" / "sample" / "b300_nvlink_allreduce.csv"


@pytest.fixture
def detector() -> trigger.Detector:
    return trigger.Detector(trigger.TriggerModule(0.05).eval())


def run(detector: trigger.Detector, log_time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and levels (T, N) of streams (T, N)."""
    streams = np.arange(log_time.shape[1])
    pairs = [detector.observe(streams, row) for row in log_time]
    return np.array([a for a, _ in pairs]), np.array([level for _, level in pairs])


def t3(random: np.random.Generator, steps: int, width: int, sigma: float = 1.0) -> FloatArray:
    """Independent, of that robust sigma."""
    drawn = random.standard_t(3, (steps, width)) / T3_ROBUST_SIGMA
    return drawn.astype(np.float32) * np.float32(sigma)


def noise(steps: int, width: int = 8, sigma: float = 0.05, seed: int = 0) -> FloatArray:
    return np.float32(QUIET) + t3(np.random.default_rng(seed), steps, width, sigma)


def test_the_first_calls_have_no_level_and_no_alarm(detector: trigger.Detector) -> None:
    times = noise(trigger.WARM_UP + 1)
    times[5:] += 3.0
    alarms, levels = run(detector, times)
    assert not alarms[: trigger.WARM_UP].any()
    assert (levels[: trigger.WARM_UP] == -1.0).all()
    assert (levels[trigger.WARM_UP] >= 0.0).all()


def test_a_slowdown_alarms_as_long_as_it_lasts_and_slow_is_relearned(
    detector: trigger.Detector,
) -> None:
    times = noise(720)
    times[300:500] += np.log(1.5)
    times[600] += np.log(1e4)  # one call that is very slow alarms nobody
    alarms, levels = run(detector, times)
    assert not alarms[:300].any()
    assert alarms[310:500].all()
    assert not alarms[520:].any()
    assert levels[:300].max() < 0.25
    assert np.median(levels[310:500]) == pytest.approx(0.5, abs=0.03)
    assert levels[450:500].mean() == pytest.approx(levels[310:360].mean(), abs=0.05)
    assert np.median(levels[520:]) < 0.01
    assert levels[600:610].max() < 0.1
    times = noise(400)
    times[:150] += np.log(2.0)
    times[300:] += np.log(2.0)
    alarms, levels = run(trigger.Detector(trigger.TriggerModule(0.05).eval()), times)
    assert (alarms[150:165].min(axis=0) == -1).all()
    assert (alarms[320:] == 1).all()
    assert np.median(levels[320:]) == pytest.approx(1.0, abs=0.1)


def test_the_level_follows_a_slow_drift_and_no_slowdown(detector: trigger.Detector) -> None:
    run(detector, noise(200, width=1))
    column = trigger.NUMBERS.index("level")
    before = float(detector._state[0, column])
    run(detector, noise(800, width=1, seed=1) + np.log(1.3))
    assert float(detector._state[0, column]) == pytest.approx(before, abs=0.01)
    times = noise(1_000, width=4) + np.linspace(0.0, 0.05, 1_000)[:, None].astype(np.float32)
    alarms, _ = run(trigger.Detector(trigger.TriggerModule(0.05).eval()), times)
    assert alarms.mean() < 0.01
    # A stream twice in a call, and a negative one, are refused.
    for streams in ([1, 1], [0, -1]):
        with pytest.raises(ValueError, match="different numbers from 0 on"):
            detector.observe(streams, [1.0, 1.0])
    alarm, level = detector.observe([], [])
    assert alarm.shape == level.shape == (0,)


def test_scale_is_that_of_each_stream_and_no_quiet_call_is_lost(detector: trigger.Detector) -> None:
    sigmas = np.array([0.02, 0.05, 0.2, 0.5], dtype=np.float32)
    run(detector, QUIET + t3(np.random.default_rng(0), 700, 4) * sigmas)
    numbers = dict(
        zip(trigger.NUMBERS, detector._state.numpy().T[: len(trigger.NUMBERS)], strict=True)
    )
    np.testing.assert_allclose(np.exp(numbers["log_scale"]), sigmas, rtol=0.25)
    # Those of a false start enter the history afterwards.
    assert (numbers["count"] + numbers["age"] == 700).all()
    times = np.full((120, 1), QUIET)  # without noise
    times[100:] += np.log(1.2)
    alarms, levels = run(trigger.Detector(trigger.TriggerModule(0.05).eval()), times)
    assert [alarms[:100].any(), alarms[110:].all()] == [False, True]
    assert levels[-1] == pytest.approx(0.2, abs=1e-3)


def test_a_level_is_carried_to_other_configs_of_its_key_and_no_further() -> None:
    module = trigger.TriggerModule()
    carried = module.new_keys(2)
    one, other = torch.tensor([4, 9]), torch.tensor([5, 10])

    def tell(streams: torch.Tensor, first: float, second: float) -> list[float]:
        nonlocal carried
        carried, told = module.carry(carried, streams, torch.tensor([first, second]))
        return [round(each, 4) for each in told.tolist()]

    assert tell(one, trigger.UNKNOWN, trigger.UNKNOWN) == [trigger.UNKNOWN, trigger.UNKNOWN]
    assert tell(one, 0.8, 0.0) == [0.8, 0.0]
    # Another stream that feels less, or knows nothing, leaves it, faded; one that feels more wins.
    fade = 0.5 ** (1 / trigger.HALF_LIFE)
    assert tell(other, 0.0, 0.3) == [round(0.8 * fade, 4), 0.3]
    assert tell(other, trigger.UNKNOWN, 0.0) == [round(0.8 * fade**2, 4), 0.0]
    # The stream itself is believed at once.
    assert tell(one, 0.1, 0.0) == [0.1, 0.0]


#: Repeats of one AllGather there, 20 launches: their coefficient of variation, and one that stands
#: for single calls, which vary more than averages of many do.
REPEAT_NOISE, CALL_NOISE = 0.0015, 0.05


@pytest.mark.parametrize("spread", [REPEAT_NOISE, CALL_NOISE])
def test_cpu_stress_on_a_measured_b300_is_detected_at_every_size(spread: float) -> None:
    """AllReduce by Ring, quiet and with all cores of the node busy."""
    measured = pl.read_csv(MEASURED, infer_schema_length=None)
    runs = ["interference-a3-baseline", "interference-a3"]
    rows = measured.filter(pl.col("run").is_in(runs), algorithm="RING")
    sizes = rows["size_bytes"].unique().sort()
    assert sizes.to_list() == [1 << k for k in range(22, 28)]
    factor = 2.0 * (1.0 - 1.0 / pl.col("ranks_per_node"))
    time_us = pl.col("size_bytes") * factor / (1000.0 * pl.col("busbw_gbytes_per_s"))
    ordered = rows.sort("size_bytes").with_columns(log_time=time_us.log())
    quiet, stressed = (
        ordered.filter(mode=mode)["log_time"].to_numpy() for mode in ("isolated", "cpu_stress")
    )
    levels = np.where(np.arange(400)[:, None] // 100 % 2 == 1, stressed, quiet)
    times = levels + spread * t3(np.random.default_rng(0), 400, 6)
    alarms, slow = run(trigger.Detector(trigger.TriggerModule(0.02).eval()), times)
    assert not alarms[:100].any()
    assert (alarms[110:200] == 1).all()
    assert not alarms[220:300].any()
    assert (alarms[310:400] == 1).all()
    wanted = np.exp(stressed - quiet) - 1.0
    np.testing.assert_allclose(np.median(slow[110:200], axis=0), wanted, rtol=0.1, atol=0.02)


#: None of a test bin.
SIZES = (1 << 18, 1 << 20, 1 << 24)
SHARES = {"Ring": 1.0, "Tree": 0.4, "NVLS": 0.0}
LEVEL = 0.8


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    """Quiet calls of every config; in every other thousand they take longer, as SHARES say."""
    out = tmp_path_factory.mktemp("calls")
    group = Group(1, 8)
    work = tuple(WorkCall(group, Collective.AllReduce, size, 100.0) for size in SIZES)
    workload, system = Workload("three sizes", work), find_system("b300-nvlink")
    record_jobs(
        *(out, system, workload, find_scenario("quiet")),
        share=1.0,
        hold_calls=4.0,
        jobs=2,
        calls=4_000,
        seed=0,
        name="recorded",
    )
    quiet = read(out, "calls").select(CALLS_USED)
    share = pl.col("actual_algorithm").replace_strict(SHARES, return_dtype=pl.Float64)
    return quiet.with_columns(time_us=pl.col("time_us") * (1.0 + share * level()))


def level() -> pl.Expr:
    return pl.when(pl.col("sequence") // 1_000 % 2 == 1).then(LEVEL).otherwise(0.0)


def told(timed: pl.DataFrame) -> npt.NDArray[np.float32]:
    return timed.select(level()).to_series().to_numpy().astype(np.float32)


def the_same(value: float, timed: pl.DataFrame) -> npt.NDArray[np.float32]:
    return np.full(timed.height, value, dtype=np.float32)


def test_each_cell_has_its_own_share_where_it_was_disturbed_and_none_of_test_bins(
    calls: pl.DataFrame,
) -> None:
    found = level_shares_of(calls, told)
    assert set(found["octave"]) == {18, 20, 24}
    assert set(found["algorithm"]) == set(SHARES)
    for algorithm, share in found.select("algorithm", "share").iter_rows():
        assert share == pytest.approx(SHARES[algorithm], abs=0.06)
    for value in (0.0, -1.0):  # quiet, unknown
        assert level_shares_of(calls, partial(the_same, value)).is_empty()
    assert level_shares_of(calls.filter(pl.col("sequence") < 1_010), told).is_empty()
    moved = calls.with_columns(size_bytes=pl.lit(1 << 23, pl.Int64))
    assert with_split(moved.head(1))["split"].to_list() == [Split.TEST.value]
    assert level_shares_of(moved, told).is_empty()


def test_the_table_fills_up_what_was_not_recorded() -> None:
    one = {"system": "here", "collective": "AllReduce", "algorithm": "NVLS", "protocol": "Simple"}
    shares = pl.DataFrame(
        [{**one, "octave": 18, "share": 0.2}, {**one, "octave": 24, "share": 0.0}]
    )
    here, there = share_table(shares, ["here", "there"]).numpy()
    nvls, ring = cell_of(4, 2), cell_of(1, 0)
    all_reduce, all_gather = 4, 2
    assert here[all_reduce, nvls, [10, 18, 20, 23, 40]].tolist() == [0.2, 0.2, 0.2, 0.0, 0.0]
    assert (here[all_gather, nvls] == here[all_reduce, nvls]).all()
    assert (here[:, ring] == 1.0).all()
    # What NCCL's own choice runs is unknown: it is not called slow.
    assert (here[:, cell_of(7, 3)] == 0.0).all()
    assert (there == 1.0).all()
    assert (share_table(None, ["here"]).numpy() == 1.0).all()


def test_a_recording_gets_the_levels_that_the_environment_saw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TriggerModule(0.05).eval()
    system, workload = find_system("h100-ib"), make_workload(["lora"], Group(4, 8))
    world = World(system, workload, all_configs(system, workload), find_scenario("congested"))
    tables = Tables.of(world, ["default"])
    env = JobCalls(world, tables, 2, lambda: Detector(module))
    env.reset(seed=3)
    played, random = [], np.random.default_rng(0)
    seen: dict[tuple[str, int], float] = {}
    for number in range(600):
        # Two configs and NCCL's own: streams get long enough to be known.
        allowed = np.flatnonzero(world.mask.all(axis=0))[:3]
        key = env.jobs.key.copy()
        _, ran = env.step(allowed[random.integers(3, size=2)])
        played.append(ran)
        window = env.look(np.arange(2), key)["window"]  # a call is seen with its level
        seen_level = window[:, -1, WINDOW_COLUMN["interference"]]
        np.testing.assert_allclose(seen_level, env.level.clip(min=0.0), rtol=1e-6)
        seen |= {(f"played-{job}", number): float(env.level[job]) for job in range(2)}
    write_calls(tmp_path, world, "played", played)

    calls = timed_calls(read(tmp_path, "calls").select(CALLS_USED))
    levels = interference_levels(Detector(module), calls)
    expected = [seen[key] for key in calls.select("run", "sequence").iter_rows()]
    np.testing.assert_allclose(levels, expected, rtol=1e-4, atol=1e-4)
    assert (levels > 0.5).any()
    assert (levels < 0).any()


def series_of(times: FloatArray) -> fitting.Series:
    """A series of each column of log times."""
    return fitting.Series.of(
        list(times.T), [np.zeros(len(times), dtype=np.float32)] * times.shape[1]
    )


def keep_calls(data: Path, *rows: dict[str, object]) -> Path:
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
    series, counts = fitting.read_series(keep_calls(tmp_path, *rows, *untold))
    assert np.diff(series.starts).tolist().count(100) == 3
    assert (counts["series"], counts["calls"], counts["unusable"]) == (4, 399, 301)
    assert series.usual_scale == pytest.approx(0.05, rel=0.2)
    assert np.median(series.values) == pytest.approx(0.0, abs=0.1)


def test_a_stretch_that_was_slow_is_left_out_and_single_slow_calls_stay(tmp_path: Path) -> None:
    times = 5.0 + t3(np.random.default_rng(0), 1_000, 1, 0.05)[:, 0]
    stretch, single = times.copy(), times.copy()
    stretch[400:600] += np.log(1.5)
    single[::50] += 1.0
    series, counts = fitting.read_series(keep_calls(tmp_path / "stretch", *timed(stretch)))
    assert 200 <= counts["disturbed"] <= 240
    assert series.usual_scale == pytest.approx(0.05, rel=0.15)
    assert np.mean(series.values > 5.0) < 0.02
    series, counts = fitting.read_series(keep_calls(tmp_path / "single", *timed(single)))
    assert counts["disturbed"] == 0
    assert (series.values > 10.0).sum() >= 20


def test_too_few_calls_and_averages_are_refused(tmp_path: Path, data_dir: Path) -> None:
    keep_calls(tmp_path, *timed(np.full(100, 5.0)))
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
    series = series_of(t3(random, 1_000, 30) * scales)
    module = TriggerModule(series.usual_scale).eval()
    peaks = fitting.find_peaks(module, series, CALLS, seed=1)
    assert len(peaks) == len(RUNGS)
    thresholds = [fitting.threshold_of(each, 2e-5 * CALLS) for each in peaks]
    assert thresholds == sorted(thresholds)  # smaller references need higher ones
    module.thresholds.copy_(torch.tensor(thresholds))
    return script(module)


@pytest.mark.parametrize("sigma", [0.02, TriggerModule.half_shift / 0.25])
def test_a_wanted_rate_of_false_alarms_is_kept(sigma: float, calibrated: object) -> None:
    quiet = t3(np.random.default_rng(5), 256 + CALLS // 500, 500, sigma) + np.float32(5.0)
    alarmed = run(Detector(calibrated), quiet)[0][256:] != 0
    onsets = alarmed[0].sum() + (alarmed[1:] & ~alarmed[:-1]).sum()
    # Three times the Poisson deviation is allowed, and a fifth for the threshold's own.
    wanted = 2e-5 * CALLS
    assert onsets <= 1.2 * wanted + 3.0 * np.sqrt(wanted) + 1.0


@pytest.fixture
def few_calls() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        few = {"STEPS": 1, "JUDGED_CALLS": 250, "CALLS_PER_RUNG": 10_000, "_CHUNKS": 2}
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
    data, uri = keep_calls(tmp_path / "site", *rows), new_store(tmp_path)
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
    module, *_ = fitting.make_trigger(fitting.read_series(data)[0], 0.5)
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
