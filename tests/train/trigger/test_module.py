"""What a stream's state goes through: warm-up, forecast, alarm, level, and learning anew."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from bench_trigger import t3_noise

from dynamiccl.train import trigger
from dynamiccl.train.policy import script

QUIET = np.log(100.0)
ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT / "datasets" / "sample" / "b300_nvlink_allreduce.csv"


@pytest.fixture
def detector() -> trigger.Detector:
    return trigger.Detector(trigger.TriggerModule(0.05).eval())


def run(detector: trigger.Detector, log_time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and levels (T, N) of streams (T, N)."""
    streams = np.arange(log_time.shape[1])
    pairs = [detector.observe(streams, row) for row in log_time]
    return np.array([a for a, _ in pairs]), np.array([level for _, level in pairs])


def noise(steps: int, width: int = 8, sigma: float = 0.05, seed: int = 0) -> trigger.FloatArray:
    return np.float32(QUIET) + np.float32(sigma) * t3_noise(
        np.random.default_rng(seed), steps, width
    )


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
    run(detector, QUIET + t3_noise(np.random.default_rng(0), 700, 4) * sigmas)
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


def test_streams_are_independent_and_torchscript_computes_the_same() -> None:
    torch.manual_seed(0)
    module = trigger.TriggerModule(0.05).eval()
    torch.nn.init.normal_(module.head.weight, std=0.3)  # the forecast is not the level alone
    times = noise(120, width=4)
    times[60:90] += 0.4
    alarms, levels = run(trigger.Detector(module), times)
    scripted = run(trigger.Detector(script(module)), times)
    assert np.array_equal(alarms, scripted[0])
    np.testing.assert_allclose(levels, scripted[1], atol=1e-4)
    apart, place = trigger.Detector(module), np.zeros(4, dtype=int)
    for stream in np.random.default_rng(1).permutation(np.repeat(np.arange(4), 120)):
        _, level = apart.observe([stream], [times[place[stream], stream]])
        assert level[0] == pytest.approx(levels[place[stream], stream], abs=1e-5)
        place[stream] += 1


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
    times = levels + spread * t3_noise(np.random.default_rng(0), 400, 6)
    alarms, slow = run(trigger.Detector(trigger.TriggerModule(0.02).eval()), times)
    assert not alarms[:100].any()
    assert (alarms[110:200] == 1).all()
    assert not alarms[220:300].any()
    assert (alarms[310:400] == 1).all()
    wanted = np.exp(stressed - quiet) - 1.0
    np.testing.assert_allclose(np.median(slow[110:200], axis=0), wanted, rtol=0.1, atol=0.02)
