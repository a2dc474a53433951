"""Searches over spaces with known times: AutoCCL's, one valley each, and ours of few probes."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import numpy as np
import numpy.typing as npt
import pytest

from dynamiccl.nccl import Algorithm, Config, Protocol, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, AutoCcl, Choice, SearchSpace, Tuner
from dynamiccl.serve.search.policy_search import Belief, PolicySearch, Prior, Watch

CHANNELS = (1, 2, 4, 8, 16, 32)
CHUNKS = (1 << 16, 1 << 17, 1 << 18, 1 << 19)
CELLS = tuple(product((Algorithm.Tree, Algorithm.Ring), (Protocol.LL, Protocol.Simple)))
RAN = Choice(Config(Algorithm.Ring, Protocol.Simple, 8, 1 << 18))
KEY = ("AllReduce", 80)


def grid(default_runs: Choice | None = RAN) -> SearchSpace:
    """NCCL's own choice, and four subspaces of channels and chunk sizes."""
    configs = [Config(*cell, n, c) for cell, n, c in product(CELLS, CHANNELS, CHUNKS)]
    return SearchSpace([DEFAULT, *map(Choice, configs)], default_runs=default_runs)


def valleys(space: SearchSpace) -> npt.NDArray[np.float64]:
    """(A,) times, one valley a subspace; Tree/Simple/4ch/128K is 28 % below NCCL's own choice."""
    times = np.full(len(space.choices), 100.0)
    for action in space.actions:
        config = space.choices[action].config
        if action == space.default:
            continue
        assert config.num_channels is not None
        assert config.chunk_bytes is not None
        base = {CELLS[0]: 130.0, CELLS[1]: 80.0, CELLS[2]: 140.0, CELLS[3]: 95.0}
        off = abs(np.log2(config.num_channels / 4)) + abs(np.log2(config.chunk_bytes / (1 << 17)))
        times[action] = base[config.algorithm, config.protocol] * 1.08**off  # type: ignore[index]
    times[space.default] = times[space.choices.index(RAN)]
    return times


Noise = Callable[[int], float]


def quiet(_call: int) -> float:
    """No noise."""
    return 1.0


def played(
    tuner: Tuner, times_us: npt.NDArray[np.float64], calls: int, noise: Noise
) -> list[tuple[int, bool]]:
    """Run calls; returns the action of each, and whether it was another than the incumbent."""
    ran = []
    for call in range(calls):
        action = tuner.ask(KEY)
        ran.append((action, action != tuner.best(KEY)))
        tuner.tell(KEY, float(times_us[action]) * noise(call))
    return ran


def drive(
    tuner: Tuner, times_us: npt.NDArray[np.float64], calls: int, noise: Noise = quiet
) -> list[int]:
    """Run calls; returns the action of each."""
    return [action for action, _ in played(tuner, times_us, calls, noise)]


def count_probes(tuner: Tuner, times_us: npt.NDArray[np.float64], calls: int, noise: Noise) -> int:
    """Run calls; returns how many ran another action than the incumbent."""
    return sum(is_probe for _, is_probe in played(tuner, times_us, calls, noise))


def scatter(sigma: float, seed: int) -> Callable[[int], float]:
    """Normal noise of the log time."""
    drawn: Sequence[float] = np.exp(np.random.default_rng(seed).normal(0.0, sigma, 5000)).tolist()
    return lambda call: drawn[call]


SPACE = grid()
TIMES = valleys(SPACE)
BEST = int(np.argmin(TIMES))
RATIO = np.log(TIMES / TIMES[SPACE.default])
SIZE_BYTES = 1 << 24


def test_descent_finds_the_best_where_every_subspace_has_one_valley() -> None:
    tuner = AutoCcl(lambda _: SPACE)
    assert not tuner.is_over(KEY)
    ran = drive(tuner, TIMES, 100)
    assert tuner.best(KEY) == ran[-1] == BEST
    assert tuner.is_over(KEY)
    probed = set(ran) - {SPACE.default}
    assert len({SPACE.choices[action].subspace for action in probed}) == 4
    assert len(probed) < len(SPACE.actions) / 2
    # Nothing is measured twice but the incumbent.
    others = [action for action in ran if action != BEST]
    assert len(others) == len(set(others))
    # It never searches again.
    tuner.alarm(KEY)
    assert tuner.is_over(KEY)


def test_candidates_are_repeated_as_told_and_their_median_counts() -> None:
    tuner = AutoCcl(lambda _: SPACE, repeats=3)
    ran = drive(tuner, TIMES, 240, noise=lambda call: 5.0 if call % 3 == 1 else 1.0)
    assert tuner.best(KEY) == BEST
    assert ran[:3] == [SPACE.default] * 3
    assert len(set(ran[3:6])) == 1


def test_time_of_another_action_is_no_answer_and_keys_are_searched_apart() -> None:
    tuner = AutoCcl(lambda _: SPACE)
    drive(tuner, TIMES, 2)
    wanted = tuner.ask(KEY)
    for _ in range(5):  # the decision takes effect some calls later
        tuner.tell(KEY, 1.0, SPACE.default)
        assert tuner.ask(KEY) == wanted
    tuner.tell(KEY, float(TIMES[wanted]), wanted)
    assert tuner.ask(KEY) != wanted
    ran: dict[str, list[int]] = {"a": [], "b": []}
    for key in ["a", "b", "b"] * 30:
        ran[key].append(tuner.ask(key))
        tuner.tell(key, float(TIMES[ran[key][-1]]))
    assert ran["a"] == ran["b"][:30]


RING = Algorithm.Ring, Protocol.Simple


def ring(*channels: int | None) -> list[Choice]:
    return [Choice(Config(*RING, n)) for n in channels]


def test_cells_are_subspaces_and_transports_too_and_threads_an_axis_of_their_own() -> None:
    space = grid()
    assert {len(actions) for actions in space.subspaces} == {len(CHANNELS) * len(CHUNKS)}
    assert len(space.subspaces) == len(CELLS)
    ways = (Transport.P2P, Transport.SHM)
    two = SearchSpace([DEFAULT, *(Choice(Config(*RING, 2), transport=way) for way in ways)])
    assert len(two.subspaces) == 2
    threads = SearchSpace([DEFAULT, *(Choice(Config(*RING), n) for n in (128, 512, 256))])
    assert [threads.step(1, 1, 1), threads.step(1, 0, 1)] == [3, None]


def test_a_step_passes_over_holes_and_stops_at_the_end() -> None:
    configs = [(1, 10), (2, 10), (4, 10), (1, 20), (4, 20)]
    space = SearchSpace([DEFAULT, *(Choice(Config(*RING, n, c)) for n, c in configs)])
    assert space.step(4, 0, 1) == 5  # 2 channels with chunk 20 is a hole
    assert space.step(1, 0, 5) == 3
    assert space.step(2, 2, 1) is None
    assert sorted(space.neighbours(1)) == [2, 4]
    assert space.neighbours(space.default) == []
    # A knob that is left to NCCL is its largest; what may not be played keeps its index.
    space = SearchSpace([DEFAULT, *ring(None, 1, 16, 4)])
    assert [space.step(1, 0, by) for by in (-1, 1)] + [space.step(3, 0, 1)] == [3, None, 1]
    space = SearchSpace([DEFAULT, *ring(1, 2, 4)], playable=[1, 3])
    assert (space.actions, space.subspaces, space.step(1, 0, 1)) == ((0, 1, 3), ((1, 3),), 3)


def test_a_descent_starts_at_what_ncclss_own_choice_runs() -> None:
    space = grid()
    number = space.default_subspace()
    assert number == CELLS.index(RING)
    config = space.choices[space.start(number)].config
    assert (config.num_channels, config.chunk_bytes) == (8, 1 << 18)
    unknown = SearchSpace([DEFAULT, *ring(1, None, 4)])
    assert unknown.start(0) == 2
    assert unknown.default_subspace() is None


def test_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.0 us"):
        AutoCcl(lambda _: SPACE).tell(KEY, 0.0)


def believing(log_ratio: npt.NDArray[np.float64], sigma: float) -> Prior:
    """A prior with these means, as sure as if they were `sigma` off."""
    drawn = Prior.drawn(SPACE, SIZE_BYTES)
    share = sigma**2 / np.trace(drawn.covariance) * (len(log_ratio) - 1)
    return Prior(log_ratio - log_ratio[SPACE.default], share * drawn.covariance)


def search(prior: Prior) -> PolicySearch:
    return PolicySearch(lambda _: SPACE, lambda _: prior)


def rough(seed: int, sigma: float = 0.05) -> Prior:
    """The truth with an error."""
    return believing(RATIO + np.random.default_rng(seed).normal(0.0, sigma, len(RATIO)), 0.15)


@pytest.mark.parametrize("seed", range(3))
def test_a_belief_that_is_nearly_right_is_confirmed_in_few_probes(seed: int) -> None:
    tuner = search(rough(seed))
    probes = count_probes(tuner, TIMES, 1000, scatter(0.02, seed))
    assert TIMES[tuner.best(KEY)] <= 1.05 * TIMES[BEST]
    rival = AutoCcl(lambda _: SPACE)
    assert probes < 0.7 * count_probes(rival, TIMES, 1000, scatter(0.02, seed))


def test_drawn_machines_are_enough_to_find_something_better() -> None:
    tuner = search(Prior.drawn(SPACE, SIZE_BYTES))
    drive(tuner, TIMES, 5000, scatter(0.02, 3))
    assert TIMES[tuner.best(KEY)] < 0.95 * TIMES[SPACE.default]


def test_a_wrong_belief_does_not_slow_the_job() -> None:
    tuner = search(believing(-RATIO, 0.3))
    ran = drive(tuner, TIMES, 1000, scatter(0.02, 1))
    assert TIMES[ran].mean() < 1.01 * TIMES[SPACE.default]


@pytest.mark.parametrize("seed", range(3))
def test_it_stays_with_ncclss_own_choice_where_nothing_is_better(seed: int) -> None:
    times = TIMES.copy()
    times[[SPACE.default, SPACE.choices.index(RAN)]] = 75.0
    ratio = np.log(times / 75.0) + np.random.default_rng(seed).normal(0.0, 0.05, len(times))
    tuner = search(believing(ratio, 0.15))
    ran = drive(tuner, times, 1000, scatter(0.02, seed))
    assert tuner.best(KEY) == SPACE.default
    assert tuner.is_over(KEY)
    assert times[ran].mean() < 1.01 * 75.0


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_probes_never_cost_more_than_their_share_of_the_time(factor: float) -> None:
    times = TIMES.copy()
    times[np.arange(len(times)) != SPACE.default] *= factor  # all are much worse than predicted
    tuner = search(rough(1))
    paid = 0.0
    for call in range(2000):
        incumbent, action = tuner.best(KEY), tuner.ask(KEY)
        if action != incumbent:
            # One probe may surprise by its whole time; no other follows until it is paid.
            assert paid <= 0.007 * (call + 201)
        tuner.tell(KEY, float(times[action]))
        paid += max(0.0, times[action] / times[incumbent] - 1.0)
    assert paid > 0.0
    assert factor > 1.0 or tuner.is_over(KEY)


def test_noise_is_met_with_repeats_and_only_as_far_as_they_pay() -> None:
    configs = [Config(Algorithm.Ring, Protocol.Simple, n) for n in (1, 2)]
    space = SearchSpace([DEFAULT, *map(Choice, configs)])
    times = np.array([100.0, 97.0, 102.0])
    counts, prior = {}, Prior.drawn(space, SIZE_BYTES)
    for sigma in (0.001, 0.05, 1.0):
        each = []
        for seed in range(40):
            tuner = PolicySearch(lambda _: space, lambda _: prior)
            each.append(count_probes(tuner, times, 1000, scatter(sigma, seed)))
        counts[sigma] = float(np.mean(each))
    assert 2.0 <= counts[0.001] < 6.0
    assert counts[0.05] > counts[0.001]
    assert counts[1.0] < 30.0


def test_what_lost_is_not_probed_again_before_there_is_new_evidence() -> None:
    prior, noise = Prior.drawn(SPACE, SIZE_BYTES), scatter(0.2, 2)
    tuner = search(prior)
    lost: dict[int, int] = {}
    waits = []
    level = deque[float](maxlen=32)
    for call in range(3000):
        incumbent, action = tuner.best(KEY), tuner.ask(KEY)
        time_us = float(TIMES[action]) * noise(call)
        if action == incumbent:
            level.append(time_us)
        else:
            waits += [call - lost[action]] if action in lost else []
            lost.pop(action, None)
            if time_us > median(level):
                lost[action] = call
        tuner.tell(KEY, time_us)
        if tuner.best(KEY) != incumbent:
            lost.clear()
            level.clear()
    assert len(waits) > 5
    assert min(waits) >= 8


def test_scatter_is_seen_beside_stragglers_and_outlives_a_restart() -> None:
    random, watch = np.random.default_rng(0), Watch()
    for call in range(64):
        watch.add(0.002 * call + 3.0 * (call % 10 == 9) + random.normal(0.0, 0.05))
    assert watch.sigma() == pytest.approx(0.05, rel=0.4)
    assert watch.level() == pytest.approx(0.002 * 48, abs=0.05)
    seen = watch.sigma()
    watch.restart()
    assert (len(watch), watch.sigma()) == (0, seen)


def test_one_straggler_does_not_throw_out_the_best() -> None:
    straggler: Callable[[int], float] = lambda call: 6.0 if call in {8, 30} else 1.0  # noqa: E731
    tuner = search(rough(2, 0.01))
    drive(tuner, TIMES, 2000, straggler)
    assert TIMES[tuner.best(KEY)] <= 1.02 * TIMES[BEST]


def test_an_alarm_opens_the_search_again_and_the_change_is_found() -> None:
    tuner = search(rough(0))
    drive(tuner, TIMES, 3000)
    found = tuner.best(KEY)
    assert tuner.is_over(KEY)
    changed = TIMES.copy()
    congested = SPACE.choices[found].subspace
    changed[[choice.subspace == congested for choice in SPACE.choices]] *= 1.5
    drive(tuner, changed, 100)
    assert tuner.best(KEY) == found
    tuner.alarm(KEY)
    assert not tuner.is_over(KEY)
    drive(tuner, changed, 1500)
    assert changed[tuner.best(KEY)] < 0.9 * changed[found]


def test_decisions_that_take_effect_later_are_learned_from_all_the_same() -> None:
    tuner = search(rough(1))
    pipeline = [SPACE.default] * 10
    for _ in range(1000):
        pipeline.append(tuner.ask(KEY))
        action = pipeline.pop(0)
        tuner.tell(KEY, float(TIMES[action]), action)
    assert TIMES[tuner.best(KEY)] <= 1.02 * TIMES[BEST]


def test_age_takes_certainty_but_never_more_than_the_prior_had() -> None:
    drawn, action = Prior.drawn(SPACE, SIZE_BYTES), SPACE.subspaces[1][0]
    found = Belief(SPACE, drawn)
    found.observe(action, SPACE.default, -0.2, 0.0001)
    for _ in range(100):
        found.age(0.5)
    spread = found.gain_over(SPACE.default, np.array([action]))[1, 0]
    assert spread == pytest.approx(drawn.covariance[action, action] ** 0.5)


def test_what_ncclss_own_choice_runs_is_known_without_a_probe() -> None:
    drawn, twin = Prior.drawn(grid(default_runs=None), 1 << 20), SPACE.twin()
    assert twin == (SPACE.choices.index(RAN), True)
    expected = np.where(np.arange(len(SPACE.choices)) == SPACE.default, 0.0, 0.5)
    found = Belief(SPACE, Prior(expected, 0.1 * drawn.covariance))
    assert found.mean[twin[0]] == pytest.approx(0.0, abs=0.01)
    neighbour = SPACE.neighbours(twin[0])[0]
    assert abs(found.mean[neighbour]) < 0.2 < found.mean[SPACE.subspaces[2][0]]


def test_a_policy_is_one_observation_and_ncclss_own_choice_is_what_all_is_compared_with() -> None:
    drawn, said = Prior.drawn(SPACE, SIZE_BYTES), np.full(len(SPACE.choices), -0.3)
    said[SPACE.default] = 0.2
    prior = Prior.of_policy(SPACE, SIZE_BYTES, said)
    between = np.delete((prior.mean - drawn.mean) / (-0.5 - drawn.mean + 1e-12), SPACE.default)
    assert between == pytest.approx(between[0])
    assert 0.0 < between[0] < 1.0
    assert prior.covariance == pytest.approx((1.0 - between[0]) * drawn.covariance)
    for each in (prior, drawn):
        assert each.mean[SPACE.default] == 0.0
        assert not each.covariance[SPACE.default].any()


def test_a_transport_moves_what_has_it_together() -> None:
    configs = [Config(Algorithm.Ring, Protocol.Simple, count) for count in (1, 2, 4)]
    choices = [Choice(config, transport=how) for config in configs for how in (None, Transport.SHM)]
    space = SearchSpace([DEFAULT, *choices])
    found = Belief(space, Prior.drawn(space, 1 << 20))
    before = found.mean
    found.observe(2, 1, 0.3, 0.0001)  # by shared memory in place of what NCCL takes
    moved = found.mean - before
    assert moved[4] - moved[3] > 0.1
