"""What a stream's state goes through: warm-up, forecast, alarm, level, and learning anew."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.train.policy import script
from dynamiccl.train.trigger import (
    HALF_LIFE,
    NUMBERS,
    UNKNOWN,
    WARM_UP,
    Detector,
    TriggerModule,
)
from dynamiccl.train.trigger_fit import FloatArray
from tests.train.trigger.streams import t3

QUIET = np.log(100.0)
ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT / "datasets" / "sample" / "b300_nvlink_allreduce.csv"


@pytest.fixture
def detector() -> Detector:
    return Detector(TriggerModule(0.05).eval())


def run(detector: Detector, log_time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and levels (T, N) of streams (T, N)."""
    streams = np.arange(log_time.shape[1])
    pairs = [detector.observe(streams, row) for row in log_time]
    return np.array([a for a, _ in pairs]), np.array([level for _, level in pairs])


def noise(steps: int, width: int = 8, sigma: float = 0.05, seed: int = 0) -> FloatArray:
    return np.float32(QUIET) + t3(np.random.default_rng(seed), steps, width, sigma)


def test_the_first_calls_have_no_level_and_no_alarm(detector: Detector) -> None:
    times = noise(WARM_UP + 1)
    times[5:] += 3.0
    alarms, levels = run(detector, times)
    assert not alarms[:WARM_UP].any()
    assert (levels[:WARM_UP] == -1.0).all()
    assert (levels[WARM_UP] >= 0.0).all()


def test_a_slowdown_alarms_and_its_level_stays_as_long_as_it_does(detector: Detector) -> None:
    times = noise(900)
    times[300:700] += np.log(1.5)
    alarms, levels = run(detector, times)
    assert not alarms[:300].any()
    assert alarms[310:700].all()
    assert not alarms[720:].any()
    assert levels[:300].max() < 0.25
    assert np.median(levels[310:700]) == pytest.approx(0.5, abs=0.03)
    assert levels[650:700].mean() == pytest.approx(levels[310:360].mean(), abs=0.05)
    assert np.median(levels[720:]) < 0.01


def test_one_call_that_is_very_slow_alarms_nobody(detector: Detector) -> None:
    times = noise(200, width=3)
    times[100] += np.log([2.0, 30.0, 1e4]).astype(np.float32)
    alarms, levels = run(detector, times)
    assert not alarms.any()
    assert levels[100:110].max() < 0.1


def test_what_was_learned_on_a_slow_network_is_learned_anew_once_it_is_quiet(
    detector: Detector,
) -> None:
    times = noise(500)
    times[:150] += np.log(2.0)
    times[300:400] += np.log(2.0)
    alarms, levels = run(detector, times)
    assert (alarms[150:165].min(axis=0) == -1).all()
    assert (alarms[320:400] == 1).all()
    assert np.median(levels[320:400]) == pytest.approx(1.0, abs=0.1)


def test_the_level_follows_a_slow_drift_and_no_slowdown(detector: Detector) -> None:
    run(detector, noise(200, width=1))
    column = NUMBERS.index("level")
    before = float(detector._state[0, column])
    run(detector, noise(1_500, width=1, seed=1) + np.log(1.3))
    assert float(detector._state[0, column]) == pytest.approx(before, abs=0.01)

    times = noise(1_500) + np.linspace(0.0, 0.075, 1_500)[:, None].astype(np.float32)
    alarms, _ = run(Detector(TriggerModule(0.05).eval()), times)
    assert alarms.mean() < 0.01


def test_scale_is_that_of_each_stream_and_no_quiet_call_is_lost() -> None:
    detector = Detector(TriggerModule(0.05).eval())
    sigmas = np.array([0.02, 0.05, 0.2, 0.5], dtype=np.float32)
    times = QUIET + t3(np.random.default_rng(0), 1_200, 4) * sigmas
    run(detector, times)
    numbers = dict(zip(NUMBERS, detector._state.numpy().T[: len(NUMBERS)], strict=True))
    np.testing.assert_allclose(np.exp(numbers["log_scale"]), sigmas, rtol=0.25)
    # Those of a false start enter the history afterwards.
    assert (numbers["count"] + numbers["age"] == 1_200).all()


def test_times_without_noise_do_no_harm(detector: Detector) -> None:
    times = np.full((200, 2), QUIET)
    times[100:, 0] += np.log(1.2)
    alarms, levels = run(detector, times)
    assert not alarms[:100].any()
    assert not alarms[:, 1].any()
    assert alarms[110:, 0].all()
    assert levels[-1].tolist() == [pytest.approx(0.2, abs=1e-3), 0.0]


def test_sizes_that_differ_within_a_key_can_be_told() -> None:
    torch.manual_seed(0)
    module = TriggerModule(0.05)
    torch.nn.init.normal_(module.head.weight, std=1.0)
    random = np.random.default_rng(0)
    times, sizes = noise(60, width=4), random.normal(14.0, 0.05, (60, 4))
    told, untold = Detector(module.eval()), Detector(module)
    for time, size in zip(times, sizes, strict=True):
        with_sizes = told.observe(np.arange(4), time, size)
        without = untold.observe(np.arange(4), time)
    assert not np.allclose(told._state.numpy(), untold._state.numpy())
    assert with_sizes[0].tolist() == without[0].tolist() == [0] * 4


def test_streams_are_independent_and_any_of_them_may_come() -> None:
    module = TriggerModule(0.05).eval()
    times = noise(60, width=6)
    together, apart = Detector(module), Detector(module)
    for row in times:
        _, levels = together.observe(np.arange(6), row)
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(6), 60))
    position = np.zeros(6, dtype=int)
    last = np.zeros(6)
    for stream in order:
        _, level = apart.observe([stream], [times[position[stream], stream]])
        position[stream] += 1
        last[stream] = level[0]
    np.testing.assert_allclose(last, levels, atol=1e-5)


def test_a_stream_twice_in_a_call_and_a_negative_one_are_refused(detector: Detector) -> None:
    for streams in ([1, 1], [0, -1]):
        with pytest.raises(ValueError, match="different numbers from 0 on"):
            detector.observe(streams, [1.0, 1.0])
    alarm, level = detector.observe([], [])
    assert alarm.shape == level.shape == (0,)


def test_torchscript_computes_the_same() -> None:
    torch.manual_seed(0)
    module = TriggerModule(0.05)
    torch.nn.init.normal_(module.head.weight, std=0.3)
    ours, scripted = Detector(module.eval()), Detector(script(module))
    times = noise(400)
    times[200:300] += 0.4
    one, other = run(ours, times), run(scripted, times)
    assert np.array_equal(one[0], other[0])
    np.testing.assert_allclose(one[1], other[1], atol=1e-4)


def test_a_level_is_carried_to_other_configs_of_its_key_and_no_further() -> None:
    module = TriggerModule()
    carried = module.new_keys(2)
    one, other = torch.tensor([4, 9]), torch.tensor([5, 10])

    def tell(streams: torch.Tensor, first: float, second: float) -> list[float]:
        nonlocal carried
        carried, told = module.carry(carried, streams, torch.tensor([first, second]))
        return [round(each, 4) for each in told.tolist()]

    assert tell(one, UNKNOWN, UNKNOWN) == [UNKNOWN, UNKNOWN]
    assert tell(one, 0.8, 0.0) == [0.8, 0.0]
    # Another stream that feels less, or knows nothing, leaves it, faded; one that feels more wins.
    fade = 0.5 ** (1 / HALF_LIFE)
    assert tell(other, 0.0, 0.3) == [round(0.8 * fade, 4), 0.3]
    assert tell(other, UNKNOWN, 0.0) == [round(0.8 * fade**2, 4), 0.0]
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
    times = levels + t3(np.random.default_rng(0), 400, 6, spread)
    alarms, slow = run(Detector(TriggerModule(0.02).eval()), times)
    assert not alarms[:100].any()
    assert (alarms[110:200] == 1).all()
    assert not alarms[220:300].any()
    assert (alarms[310:400] == 1).all()
    wanted = np.exp(stressed - quiet) - 1.0
    np.testing.assert_allclose(np.median(slow[110:200], axis=0), wanted, rtol=0.1, atol=0.02)
