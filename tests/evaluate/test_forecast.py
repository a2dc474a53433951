"""The forecast on jobs worked out by hand: what is saved, and what sizes in between gain."""

import numpy as np
import polars as pl
import pytest

from dynamiccl.collect.sweep import parse_sweep
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.evaluate.forecast.between import AtSize, Choice, Found, between
from dynamiccl.evaluate.forecast.forecast import BEST, POLICY, TABLE, Conclusion
from dynamiccl.evaluate.forecast.gains import Gains, Measured
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.evaluate.forecast.output import parts_of, sweep_for, to_json
from dynamiccl.evaluate.forecast.picks import Pick, best, best_action, table
from dynamiccl.evaluate.forecast.saving import estimate, weigh
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.calls import call, traced
from tests.evaluate.jobs import RUNS, against, exposed_job, job, stepped, steps_frame, sweep
from tests.rows import MIB, frame

TREE, RING = (Algorithm.Tree, Protocol.LL128), (Algorithm.Ring, Protocol.Simple)
CONFIGS = (ABSTAIN, Config(*TREE), Config(*RING))
MEASURED_RUNS = ("a", "b", "c")


def test_exposed_calls_save_their_share_of_the_step() -> None:
    """Two calls of 100 us each, a fifth faster: 40 us of 1,000."""
    found = against(exposed_job(100.0), sweep(80.0))
    arm = found.arms[TABLE]
    assert arm.step is not None
    assert found.verdict is Conclusion.GAIN
    for told, truth in ((arm.step, 0.04), (arm.communication, 0.2)):
        assert told.low == pytest.approx(truth)
        assert told.mean == pytest.approx(truth)
        assert told.high == pytest.approx(truth)
    assert "would save 4.0%" in found.sentence


def test_a_call_saves_no_more_than_what_is_exposed_of_it() -> None:
    """20 us faster, 10 exposed: between 0 (the hidden part takes it up) and 20 (the group's)."""
    found = against(exposed_job(10.0), sweep(80.0))
    step = found.arms[TABLE].step
    assert step is not None
    assert step.mean == pytest.approx(2 * 10.0 / 1000.0)
    assert step.low == 0.0
    # Both calls are of one group: its 40 us of savings find 20 us that are exposed; and up to a
    # quarter of the hidden time that is saved comes back to compute.
    assert step.high == pytest.approx((20.0 + 0.25 * 0.2 * 180.0) / 1000.0)
    assert found.verdict is Conclusion.NOTHING


def test_hidden_communication_gains_the_step_nothing() -> None:
    found = against(exposed_job(0.0), sweep(50.0))
    assert found.verdict is Conclusion.NOTHING
    assert found.arms[TABLE].communication.mean == pytest.approx(0.5)
    assert "no more can be saved" in found.sentence


def test_configs_that_are_no_faster_are_nothing_to_gain() -> None:
    found = against(exposed_job(100.0), sweep(101.0))
    assert found.verdict is Conclusion.NOTHING
    picks = found.arms[TABLE].picks
    assert [pick.config for pick in picks if pick is not None] == [ABSTAIN]


def test_a_gain_within_the_noise_is_nothing_to_gain() -> None:
    """99 us on average, 3 more and 3 less in two of four runs."""
    found = against(exposed_job(100.0), sweep(99.5, noise=0.03))
    step = found.arms[TABLE].step
    assert step is not None
    assert step.low < 0.0 < step.high
    assert found.verdict is Conclusion.NOTHING


def test_luck_in_choosing_is_not_taken_for_a_gain() -> None:
    """Forty configs as fast as NCCL's own choice: the best of them looks faster than it is."""
    random = np.random.default_rng(5)
    configs = (ABSTAIN, *(Config(Algorithm.Ring, Protocol.LL, n) for n in range(1, 41)))
    kind = exposed_job(100.0).kinds[0]
    looks, fitted, surely = [], [], 0
    for _ in range(200):
        logs = random.normal(0.0, 0.05, (41, RUNS))
        logs[0] = 0.0
        luck = Gains(configs, logs, ("a", "b", "c", "d"), np.zeros(41), 100.0, (MIB,), 0.05)
        pick = table(kind, luck)
        assert isinstance(pick, Pick)
        looks.append(luck.means[best_action(luck)])
        fitted.append(pick.mean)
        weighed = weigh(exposed_job(100.0), [kind], np.array([100.0]))
        surely += estimate(weighed, [pick], "step").low > 0.0
    assert np.mean(looks) > 0.04
    assert abs(np.mean(fitted)) < 0.01
    # 5 % are above the 90 % interval of nothing; 40 draws of 200 would not be.
    assert surely <= 20


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"collective": "SendRecv"}, "asks no tuner"),
        ({"asks_tuner": False, "kernel": "cross_device_reduce_1stage"}, "cross_device_reduce"),
        ({"num_ranks": 1}, "one rank"),
        ({"decided": True}, "table of ours"),
    ],
)
def test_calls_that_ask_no_tuner_gain_nothing(columns: dict[str, object], why: str) -> None:
    found = against(exposed_job(100.0, **columns), sweep())
    assert found.verdict is Conclusion.NOTHING
    assert "no call of this job asks a tuner" in found.sentence
    assert why in found.weighed.kinds[0].why_not
    assert to_json(found)["asks_tuner_share_of_bytes"] == 0.0


def test_sizes_that_were_not_measured_are_said_with_the_sweep_that_covers_them() -> None:
    found = against(exposed_job(100.0, size_bytes=64 * MIB), sweep())
    assert found.verdict is Conclusion.CANNOT_TELL
    assert "20% of the step" in found.sentence
    assert "no size within an octave" in found.sentence
    plan = sweep_for(found)
    assert plan is not None
    again = parse_sweep(plan.text, where="test").file
    assert again.sizes.ladder() == (64 * MIB,)
    assert again.collectives == ("AllReduce",)
    assert [(g.num_nodes, g.ranks_per_node) for g in again.groups] == [(1, 8)]
    assert found.arms[TABLE].communication.mean == 0.0


def test_another_minor_version_of_nccl_covers_nothing() -> None:
    found = against(exposed_job(100.0, nccl_version="2.29.7"), sweep())
    assert found.verdict is Conclusion.CANNOT_TELL
    assert "another minor version" in found.sentence


def test_a_gain_beside_what_is_not_covered_is_told_with_its_share() -> None:
    known = traced(0, 100.0, num_nodes=1, exposed_us=100.0)
    other = traced(1, 50.0, num_nodes=1, exposed_us=50.0, collective="AllGather")
    steps = steps_frame(4, 1000.0, communication_us=150.0, exposed_us=150.0, compute_us=850.0)
    found = against(job(stepped([known, other]), steps), sweep())
    assert found.verdict is Conclusion.GAIN
    assert "nothing is known of 5%" in found.sentence
    assert to_json(found)["not_covered_share"] == pytest.approx(0.05)


def test_nodes_that_the_trace_does_not_say_are_asked_for_where_two_shapes_fit() -> None:
    both = pl.concat([sweep(80.0), sweep(90.0, num_nodes=2, ranks_per_node=4)])
    unknown = exposed_job(100.0, group_ranks=list(range(8)))
    unknown.kinds[0] = Kind(
        **{n: getattr(unknown.kinds[0], n) for n in Kind.__slots__} | {"num_nodes": None}
    )
    asked = against(unknown, both)
    assert asked.verdict is Conclusion.CANNOT_TELL
    assert "--group, one of 1x8, 2x4" in asked.sentence
    for group, saved in (((1, 8), 0.2), ((2, 4), 0.1)):
        told = against(unknown, both, groups=[group]).arms[TABLE].communication
        assert told.mean == pytest.approx(saved)
    placed = job(stepped([traced(0, 100.0, group_ranks=list(range(8)))]), None, ranks_per_node=4)
    assert placed.kinds[0].num_nodes == 2


def test_a_trace_without_steps_is_about_communication_alone() -> None:
    found = against(job([call(i, 100.0, decided=False) for i in range(30)]), sweep())
    assert found.arms[TABLE].step is None
    assert found.verdict is Conclusion.GAIN
    assert found.arms[TABLE].communication.mean == pytest.approx(0.2)
    assert any("communication time only" in note for note in found.notes)
    assert parts_of(found)[0].name == "asks a tuner, and is covered"


def test_steps_that_hold_none_of_the_calls_are_not_taken_for_theirs() -> None:
    calls = [traced(i, 100.0, num_nodes=1) for i in range(30)]
    found = against(job(calls, steps_frame(3, 1000.0, exposed_us=500.0)), sweep())
    assert found.weighed.job.steps is None
    assert found.arms[TABLE].step is None
    assert found.arms[TABLE].communication.mean == pytest.approx(0.2)


def test_a_policy_that_abstains_is_said_to() -> None:
    def abstains(_kind: Kind, gains: Gains) -> Pick:
        return Pick(ABSTAIN, gains.logs[0], gains.runs, gains.sizes, 0.0, 0.0, 0.0, is_close=False)

    found = against(exposed_job(100.0), sweep(), policy=abstains)
    assert found.verdict is Conclusion.NOTHING
    assert "the policy leaves the choice of all these calls to NCCL" in found.notes


def test_a_trace_without_times_is_weighed_by_the_benchmark() -> None:
    """Three calls at 100 us and a fifth to save, one at 100 us that no config makes faster."""
    measured = pl.concat([sweep(80.0), sweep(100.0, collective="AllGather")])
    rows = [traced(i, None, num_nodes=1, source="kineto") for i in range(3)]
    rows.append(traced(3, None, num_nodes=1, source="kineto", collective="AllGather"))
    found = against(job(rows), measured)
    assert found.arms[TABLE].communication.mean == pytest.approx(0.15)
    assert any("no times" in note for note in found.notes)


def test_waiting_for_other_ranks_widens_the_interval_downwards() -> None:
    """One rank's 200 us may hold waiting; the benchmark's 100 us are left of it at least."""
    row = traced(0, None, num_nodes=1, time_at_most_us=200.0, exposed_us=200.0)
    steps = steps_frame(4, 1000.0, communication_us=200.0, exposed_us=200.0, compute_us=800.0)
    found = against(job(stepped([row]), steps), sweep(80.0))
    told = found.arms[TABLE].step
    assert told is not None
    assert told.mean == pytest.approx(0.04)
    # 20 us of the benchmark's time, but the hidden part is not known to take anything up.
    assert told.low < 0.02 + 1e-9
    assert any("waiting" in note for note in found.notes)


def test_a_call_that_few_ranks_make_counts_by_their_share() -> None:
    """Two of eight ranks that were traced make it: a quarter of it is the mean rank's."""
    rows = stepped([traced(0, 100.0, num_nodes=1, exposed_us=100.0, ranks_seen=2)])
    steps = [
        steps_frame(4, 1000.0, exposed_us=25.0, communication_us=25.0, source_file=f"rank{rank}")
        for rank in range(8)
    ]
    found = against(job(rows, pl.concat(steps)), sweep(80.0))
    step = found.arms[TABLE].step
    assert step is not None
    assert step.mean == pytest.approx(0.25 * 20.0 / 1000.0)


def test_the_best_is_no_worse_than_the_table_and_a_policy_that_saw_the_runs_is_lowered() -> None:
    measured = sweep(95.0, noise=0.04)
    found = against(exposed_job(100.0), measured, policy=best, seen=True)
    own, top, policy = (found.arms[name].communication for name in (TABLE, BEST, POLICY))
    assert top.mean >= own.mean
    assert top.low == min(own.low, top.mean)
    fresh = against(exposed_job(100.0), measured, policy=best)
    assert policy.low <= fresh.arms[POLICY].communication.low
    assert any("trained on these runs" in note for note in found.notes)
    assert found.deciding.name == POLICY


def test_what_cannot_be_read_is_said_in_one_line() -> None:
    with pytest.raises(NotEnoughData, match="none of the 2 calls"):
        job([traced(0, collective=None), traced(1, size_bytes=None)])
    two = pl.concat([sweep(), sweep(system="other")])
    with pytest.raises(UserError, match="2 systems; name one: --system box or other"):
        Measured(two, None, None)
    with pytest.raises(UnknownName, match="choose from box, other"):
        Measured(two, "moon", None)
    alone = frame(*sweep().filter(pl.col("run") == "cycle-0").to_dicts())
    found = against(exposed_job(100.0), alone)
    assert found.verdict is Conclusion.CANNOT_TELL


def task(size: int, tree: float, ring: float, ran: Choice | None) -> AtSize:
    """Gains of both configs over NCCL's own choice, the same in all runs."""
    logs = np.repeat([[0.0], [tree], [ring]], len(MEASURED_RUNS), axis=1)
    return AtSize(size, logs, MEASURED_RUNS, 100.0, 0.0, ran)


def found(tasks: list[AtSize], size: int, ran: Choice | None = None) -> Found:
    answer = between(tasks, size, CONFIGS, ran)
    assert isinstance(answer, Found)
    return answer


def test_under_one_choice_gains_are_the_mean_by_distance() -> None:
    both = [task(MIB, 0.4, 0.0, RING), task(4 * MIB, 0.2, 0.0, RING)]
    answer = found(both, 2 * MIB)
    assert answer.logs[1] == pytest.approx(0.3)
    assert answer.sizes == (MIB, 4 * MIB)
    assert answer.blur[1] == pytest.approx(0.5 * 0.25 * 0.2)


def test_what_asks_for_nccls_own_choice_gains_nothing() -> None:
    assert found([task(MIB, 0.4, 0.07, RING)], MIB).logs[2] == pytest.approx(0.0)


def test_where_nccls_choice_changes_both_are_possible() -> None:
    """Tree below and Ring above: at the middle Tree gains 0 over Tree, or 0.2 over Ring."""
    both = [task(MIB, 0.0, -0.1, TREE), task(4 * MIB, 0.3, 0.0, RING)]
    answer = found(both, 2 * MIB)
    over_ring = 0.5 * (0.3 + 0.1)
    assert answer.logs[1] == pytest.approx(over_ring / 2)
    assert answer.blur[1] == pytest.approx(over_ring / 2)
    assert answer.logs[0] == pytest.approx(0.0)


def test_the_jobs_own_record_says_which_choice_it_was() -> None:
    both = [task(MIB, 0.0, -0.1, TREE), task(4 * MIB, 0.3, 0.0, RING)]
    assert found(both, 2 * MIB, RING).logs[1] == pytest.approx(0.2)
    assert found(both, 2 * MIB, TREE).logs[1] == pytest.approx(0.0)


def test_a_job_that_ran_something_else_is_not_covered() -> None:
    other = (Algorithm.NVLS, Protocol.Simple)
    answer = between([task(MIB, 0.4, 0.0, RING)], MIB, CONFIGS, other)
    assert answer == "NCCL ran NVLS/Simple in the job and Ring/Simple in the sweep"


def test_beyond_an_octave_nothing_is_known_and_within_one_it_is_blurred() -> None:
    tasks = [task(MIB, 0.4, 0.0, RING), task(2 * MIB, 0.2, 0.0, RING)]
    answer = found(tasks, 3 * MIB)
    assert answer.logs[1] == pytest.approx(0.2)
    # Tree's gain falls by 0.2 an octave here and Ring's by nothing.
    assert answer.blur[1] == pytest.approx(np.log2(1.5) * np.sqrt(0.2**2 / 2))
    assert "within an octave" in str(between(tasks, 5 * MIB, CONFIGS, None))
