"""What is in it for jobs worked out by hand, and for simulated ones, whose truth is known."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import polars as pl
import pytest
from bench_job import play, table_of

from dynamiccl.collect.sweep import parse_sweep
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.schema import STEPS
from dynamiccl.datasets.store import read
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.evaluate.job import POLICY, TABLE, Answer, Verdict, answer
from dynamiccl.evaluate.job_calls import Gains, Job, Measured, job_of
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WORKLOADS
from dynamiccl.simulator.world import World
from tests.calls import calls_frame, traced
from tests.data_sets import make_data, sweep_text
from tests.policies import hand_made_manifest
from tests.rows import MIB, default, forced, frame

RUNS: Final = 4


def sweep(
    best_us: float = 80.0, sizes: Sequence[int] = (MIB,), noise: float = 0.0, **columns: Any
) -> pl.DataFrame:
    """NCCL's own choice takes 100 us, Ring/LL `best_us`, Tree/LL 130, in RUNS runs each.

    With `noise` run 0 has all of it in Ring/LL, and run 1 as much less.
    """
    rows = []
    for size in sizes:
        for run in range(RUNS):
            place = {"run": f"cycle-{run}", "size_bytes": size, **columns}
            off = 1.0 + noise * {0: 1.0, 1: -1.0}.get(run, 0.0)
            rows += [
                default(100.0, **place),
                forced("Ring", "LL", best_us * off, **place),
                forced("Tree", "LL", 130.0, **place),
            ]
    return frame(*rows)


def steps_frame(count: int, step_us: float, **columns: Any) -> pl.DataFrame:
    """Steps of one rank; what is not named is idle."""
    plain = dict.fromkeys(("compute_us", "communication_us", "exposed_us", "idle_us"), 0.0)
    told = {"system": "trace", "sweep": "trace", "source": "kineto", "run": "job-1", "rank": 0}
    told |= {"source_file": "rank0.json", "step_us": step_us, **plain, **columns}
    rows = [{**told, "step": number} for number in range(count)]
    types = pl.Schema(STEPS)
    return pl.DataFrame([{n: row.get(n) for n in types} for row in rows], schema=types)


def job(
    calls: Sequence[dict[str, Any]], steps: pl.DataFrame | None = None, ranks_per_node: int = 8
) -> Job:
    """The job of some calls."""
    return job_of(calls_frame(*calls), steps, ranks_per_node)


def stepped(each: Sequence[dict[str, Any]], count: int = 4) -> list[dict[str, Any]]:
    """The same calls in each of `count` steps."""
    return [{**call, "step": step} for step in range(count) for call in each]


def exposed_job(exposed_us: float, **columns: Any) -> Job:
    """Four steps of 1,000 us with two all-reduces of 100 us, of which so much is exposed."""
    call = traced(0, 100.0, num_nodes=1, exposed_us=exposed_us, group="tp", **columns)
    steps = steps_frame(
        4, 1000.0, compute_us=1000.0 - 2 * exposed_us, communication_us=200.0,
        exposed_us=2 * exposed_us,
    )  # fmt: skip
    return job(stepped([call, call]), steps)


def against(found: Job, measured: pl.DataFrame, *chosen: Any, sm_price: float = 0.0) -> Answer:
    """What is in it for a job by a sweep, and by a policy and its manifest where given."""
    return answer(found, Measured(measured, None, found.nccl_version, sm_price), *chosen)


def arm_of(found: Answer) -> Any:
    """The arm that the verdict is about."""
    return next(iter(found.arms.values()))


def test_exposed_calls_save_their_share_of_the_step() -> None:
    """Two calls of 100 us each, a fifth faster: 40 us of 1,000."""
    found = against(exposed_job(100.0), sweep(80.0))
    arm = arm_of(found)
    assert found.told["verdict"] == "gain"
    for told, truth in ((arm.step, 0.04), (arm.communication, 0.2)):
        assert told.mean == pytest.approx(truth, rel=0.01)
        assert truth - 0.02 * truth < told.low < told.high < truth + 0.02 * truth
    assert found.told["sentence"].startswith(
        "Of the step's 1 ms 0.2 are exposed communication; the best "
    )
    assert "(4.0 %)" in found.told["sentence"]
    # What is hidden gains the step nothing.
    found = against(exposed_job(0.0), sweep(50.0))
    assert found.told["verdict"] == "nothing"
    assert arm_of(found).communication.mean == pytest.approx(0.5, rel=0.01)
    assert "no more can be saved" in found.told["sentence"]
    # Of a call no more is saved than what is exposed: 20 us faster and 10 exposed are between 0
    # (the hidden part takes it up) and 20 (the group's): of its 40 us of savings 20 are exposed,
    # and up to a quarter of the hidden time that is saved comes back to compute.
    step = arm_of(against(exposed_job(10.0), sweep(80.0))).step
    assert step.mean == pytest.approx(2 * 10.0 / 1000.0)
    assert step.low == pytest.approx(0.0, abs=1e-4)
    assert step.high == pytest.approx((20.0 + 0.25 * 0.2 * 180.0) / 1000.0, rel=0.02)
    # A config that is no faster, or by less than noise, gains nothing.
    for best_us, noise in ((101.0, 0.0), (99.5, 0.03)):
        told = against(exposed_job(100.0), sweep(best_us, noise=noise)).told
        assert told["verdict"] == "nothing"
        assert told["kinds"][0]["better_config"] == "NCCL's own"


def test_luck_in_choosing_is_not_taken_for_a_gain() -> None:
    """Twelve configs as fast as NCCL's own choice: the best of them looks faster than it is."""
    random, lows = np.random.default_rng(5), []
    for _ in range(12):
        rows = []
        for size, run in product((MIB // 2, MIB, 2 * MIB), range(RUNS)):
            place = {"size_bytes": size, "run": f"cycle-{run}"}
            own, *others = 100.0 * np.exp(random.normal(0.0, 0.05, 13))
            rows.append(default(own, **place))
            for channels, us in enumerate(others, 1):
                rows.append(forced("Ring", "LL", us, channels=channels, **place))
        lows.append(arm_of(against(exposed_job(100.0), frame(*rows))).step.low)
    # One in twenty is above the 90 % interval of nothing.
    assert sum(low > 0.0 for low in lows) <= 2


def test_a_config_may_be_best_where_it_was_not_measured() -> None:
    rows = []
    for size, run in product((MIB // 2, MIB, 2 * MIB), range(RUNS)):
        place = {"size_bytes": size, "run": f"cycle-{run}"}
        others = (forced("Ring", "LL", 99.0, channels=n, **place) for n in (1, 2))
        rows += [default(100.0, **place), *others]
        rows += [forced("Ring", "LL", 60.0, channels=4, **place)] if size != MIB else []
    found = against(exposed_job(100.0), frame(*rows))
    assert arm_of(found).communication.mean == pytest.approx(0.4, rel=0.1)
    # It is not where it hung, under whatever release.
    at: dict[str, Any] = {
        "channels": 4,
        "status": "timed_out",
        "size_bytes": MIB,
        "nccl_version": "2.20.3",
    }
    hung = frame(*rows, forced("Ring", "LL", None, **at))
    assert arm_of(against(exposed_job(100.0), hung)).communication.mean < 0.05


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
    assert found.told["verdict"] == "nothing"
    assert "no call of this job asks a tuner" in found.told["sentence"]
    assert why in found.told["kinds"][0]["reason"]
    assert found.told["asks_tuner_share"] == 0.0


def test_what_is_not_covered_is_said_with_the_sweep_that_covers_it() -> None:
    found = against(exposed_job(100.0, size_bytes=64 * MIB), sweep())
    assert found.told["verdict"] == "cannot-tell"
    for said in ("20 % of the step", "no size within an octave"):
        assert said in found.told["sentence"]
    again = parse_sweep(found.told["sweep"], where="test").file
    assert (again.sizes.ladder(), again.collectives) == ((64 * MIB,), ("AllReduce",))
    assert [(g.num_nodes, g.ranks_per_node) for g in again.groups] == [(1, 8)]
    assert arm_of(found).communication.mean == 0.0
    told = against(exposed_job(100.0, nccl_version="2.29.7"), sweep()).told
    assert told["verdict"] == "cannot-tell"
    assert "another minor version" in told["sentence"]
    # A gain beside it is told with its share.
    known = traced(0, 100.0, num_nodes=1, exposed_us=100.0)
    other = traced(1, 50.0, num_nodes=1, exposed_us=50.0, collective="AllGather")
    steps = steps_frame(4, 1000.0, communication_us=150.0, exposed_us=150.0, compute_us=850.0)
    told = against(job(stepped([known, other]), steps), sweep()).told
    assert told["verdict"] == "gain"
    assert "nothing is known of 5.0 %" in told["sentence"]
    assert told["not_covered_share"] == pytest.approx(0.05)


def test_groups_lie_as_the_trace_names_their_ranks_else_with_all_ranks_of_a_node() -> None:
    plain = [traced(0, 100.0), traced(1, 100.0, num_ranks=16), traced(2, 100.0, num_ranks=12)]
    rails = traced(3, 100.0, group_ranks=list(range(0, 64, 8)))
    kinds = job([*plain, rails]).kinds
    assert kinds["num_nodes"].to_list() == [1, 2, None, 8]
    assert job([rails], ranks_per_node=4).kinds["num_nodes"][0] == 8
    untold = traced(4, 100.0, num_ranks=None)
    told = against(job([*plain, rails, untold, traced(5, num_nodes=1)]), sweep()).told
    # Wherever its ranks lie by a guess: named or not, evenly or not.
    assert "on how many nodes the ranks of 4 calls lie" in " ".join(told["notes"])
    reasons = {kind["num_ranks"]: kind["reason"] for kind in told["kinds"]}
    assert reasons[None] == "the trace does not say how many ranks make it"
    assert "lie evenly is not known (--ranks-per-node)" in reasons[12]
    assert "AllReduce on 2 x 8 was not measured" in reasons[16]


def test_a_trace_without_steps_is_about_communication_alone() -> None:
    """Nor are steps that hold none of the calls taken for theirs."""
    calls = [traced(i, 100.0, num_nodes=1) for i in range(30)]
    for steps in (None, steps_frame(3, 1000.0, exposed_us=500.0)):
        found = against(job(calls, steps), sweep())
        assert arm_of(found).step is found.told["step"] is None
        assert found.told["verdict"] == "gain"
        assert arm_of(found).communication.mean == pytest.approx(0.2, rel=0.01)
        assert any("communication time only" in note for note in found.told["notes"])


def test_calls_without_a_time_are_weighed_by_the_benchmark_and_the_rest() -> None:
    """Three calls at 100 us and a fifth to save, one at 100 us that no config makes faster."""
    measured = pl.concat([sweep(80.0), sweep(100.0, collective="AllGather")])
    rows = [traced(i, None, num_nodes=1) for i in range(3)]
    rows.append(traced(3, None, num_nodes=1, collective="AllGather"))
    found = against(job(rows), measured)
    assert arm_of(found).communication.mean == pytest.approx(0.15, rel=0.01)
    assert any("4 calls have no time" in note for note in found.told["notes"])
    # A second call, of the first's kind: half of its 100 us are exposed, as of the steps.
    rows = [traced(0, 100.0, num_nodes=1, exposed_us=50.0), traced(1, None, num_nodes=1)]
    steps = steps_frame(4, 1000.0, communication_us=200.0, exposed_us=100.0, compute_us=900.0)
    step = arm_of(against(job(stepped(rows), steps), sweep(80.0))).step
    assert step.mean == pytest.approx(2 * 20.0 / 1000.0, rel=0.01)


def test_waiting_widens_the_interval_and_what_few_ranks_make_counts_by_their_share() -> None:
    """One rank's 200 us may hold waiting; the benchmark's 100 us are left of it at least."""
    row = traced(0, None, num_nodes=1, time_at_most_us=200.0, exposed_us=200.0)
    steps = steps_frame(4, 1000.0, communication_us=200.0, exposed_us=200.0, compute_us=800.0)
    found = against(job(stepped([row]), steps), sweep(80.0))
    told = arm_of(found).step
    assert told.mean == pytest.approx(0.04, rel=0.01)
    # Of the benchmark's 100 us 20 are saved; and a job so far from it gains more or less.
    assert 0.01 < told.low < 0.02
    assert any("waiting" in note for note in found.told["notes"])
    # Two of eight ranks that were traced make it: a quarter of it is the mean rank's.
    rows = stepped([traced(0, 100.0, num_nodes=1, exposed_us=100.0, ranks_seen=2)])
    plain = {"exposed_us": 25.0, "communication_us": 25.0}
    each = [steps_frame(4, 1000.0, source_file=f"rank{rank}", **plain) for rank in range(8)]
    step = arm_of(against(job(rows, pl.concat(each)), sweep(80.0))).step
    assert step.mean == pytest.approx(0.25 * 20.0 / 1000.0, rel=0.01)


def test_of_a_policy_it_is_told_that_it_saw_the_runs() -> None:
    measured = sweep()
    noise = measured.select("system", "collective", noise_band=0.01).unique()
    manifest = hand_made_manifest(measured, noise)
    found = against(exposed_job(100.0), measured, lambda *_: ABSTAIN_ACTION, manifest)
    notes = " ".join(found.told["notes"])
    assert "trained on these runs" in notes
    assert "the policy leaves the choice of all these calls to NCCL" in notes
    assert [*found.arms] == [POLICY, "table"]
    assert found.told["verdict"] == "nothing"


def test_what_cannot_be_read_is_said_in_one_line() -> None:
    with pytest.raises(NotEnoughData, match="none of the 2 calls"):
        job([traced(0, collective=None), traced(1, size_bytes=None)])
    two = pl.concat([sweep(), sweep(system="other")])
    with pytest.raises(UnknownName, match=r"'moon'.*choose from box, other"):
        Measured(two, "moon")
    with pytest.raises(UserError, match="2 systems; name one: --system box or other"):
        Measured(two)
    with pytest.raises(NotEnoughData, match="no task of box"):
        Measured(sweep().filter("is_default"))


def test_a_size_between_measured_ones_gains_between_and_what_ran_is_no_gain() -> None:
    """Ring/LL takes 80 us where NCCL's own choice, Ring/Simple, takes 100; it was read back."""
    rows = sweep(80.0, (MIB // 2, MIB, 2 * MIB, 4 * MIB))
    rows = rows.with_columns(actual_algorithm=pl.lit("Ring"), actual_protocol=pl.lit("Simple"))
    between = exposed_job(100.0, size_bytes=3 * MIB // 2)
    told = arm_of(against(between, rows)).communication
    assert told.low < 0.2 < told.high
    assert told.low > 0.0
    ran = {"actual_algorithm": "Ring", "actual_protocol": "LL"}
    other = against(exposed_job(100.0, size_bytes=3 * MIB // 2, **ran), rows)
    assert other.told["verdict"] == "cannot-tell"
    assert "NCCL ran Ring/LL in the job and Ring/Simple in the sweep" in other.told["sentence"]


def few_channels_policy(_kind: object, gains: Gains) -> int:
    """The action that is Ring/LL."""
    return [config.key for config in gains.configs].index("Ring/LL")


def beside(losses: Mapping[int, float], edge: float = 4096.0) -> pl.DataFrame:
    """Rows beside products of one edge, of NCCL's own 16 channels and of others."""
    rows = []
    for count, lost in losses.items():
        told = {"actual_num_channels": count, "compute_loss_us": 100.0 * lost, "size_bytes": MIB}
        columns: dict[str, Any] = {**told, "interference_kind": "matmul"}
        for run in range(3):
            where = {**columns, "interference_level": edge, "run": f"beside-{run}"}
            own = default(100.0, **where)
            rows.append(own if count == 16 else forced("Ring", "LL", 100.0, **where))
    return frame(*rows)


def few_channels() -> pl.DataFrame:
    """A sweep in which NCCL's own choice takes 16 channels and Ring/LL 4, and is as fast."""
    counts = pl.when("is_default").then(16).otherwise(4).cast(pl.Int64)
    return sweep(99.0).with_columns(actual_num_channels=counts)


def test_rows_beside_products_tell_what_compute_gets_back() -> None:
    """Of a step's 1,000 us 200 are hidden; compute loses 12 % to 16 channels, 3 % to four."""
    measured = pl.concat([few_channels(), beside({16: 0.12, 4: 0.03})])
    found = against(exposed_job(0.0), measured, few_channels_policy)
    arm = arm_of(found)
    saved = 0.2 * (0.12 - 0.99 * 0.03)
    assert arm.given_back.mean == pytest.approx(saved, rel=1e-3)
    assert arm.step.mean == pytest.approx(saved, rel=1e-3)
    least = 0.2 * (0.7 * 0.12 - 0.99 * 0.03)
    assert arm.given_back.low == pytest.approx(least, rel=0.02)
    assert arm.given_back.high == pytest.approx(1.3 * saved, rel=0.02)
    assert found.told["verdict"] == "gain"
    assert "0.0181 of them by what compute gets back" in found.told["sentence"]
    # Of other compute, which loses as much to few channels as to many, it gets nothing back.
    other = pl.concat([measured, beside({16: 0.2, 4: 0.2}, 512.0)])
    both = arm_of(against(exposed_job(0.0), other, few_channels_policy))
    assert both.given_back.low == pytest.approx(0.2 * (0.7 - 0.99) * 0.2, rel=0.02)
    assert both.given_back.high == pytest.approx(1.3 * saved, rel=0.02)
    # Of compute beside which the config was not measured nothing is known.
    own = pl.concat([measured, beside({16: 0.2}, 512.0)])
    alone = arm_of(against(exposed_job(0.0), own, few_channels_policy))
    assert alone.given_back.mean == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize(("exposed_us", "says"), [(0.0, True), (50.0, False)])
def test_a_hidden_group_may_have_fewer_by_max_ctas(exposed_us: float, says: bool) -> None:
    """Its gathers, whose channels no table lowers, are among its calls."""
    measured = pl.concat([few_channels(), beside({16: 0.12, 4: 0.03})])
    asks = pl.when("is_default").then(None).otherwise(4).cast(pl.Int64)
    measured = measured.with_columns(requested_num_channels=asks)
    plain = {"num_nodes": 1, "group": "fsdp", "exposed_us": exposed_us}
    calls = [traced(0, 100.0, **plain), traced(1, 100.0, collective="AllGather", **plain)]
    steps = steps_frame(4, 1000.0, communication_us=200.0, exposed_us=2 * exposed_us)

    def four(_kind: object, gains: Gains) -> int:
        return [config.key for config in gains.configs].index("Ring/LL/4ch")

    found = against(job(stepped(calls), steps), measured, four)
    told = [note for note in found.told["notes"] if "max_ctas = 4" in note]
    assert bool(told) is says
    assert all("process group 'fsdp'" in note for note in told)


def test_without_rows_beside_products_a_price_of_a_channel_bounds_what_compute_gets_back() -> None:
    """Of a step's 1,000 us 200 are hidden; 16 channels cost nothing, or 16 x 0.5 %, and 4 less."""
    found = against(exposed_job(0.0), few_channels(), few_channels_policy)
    assert arm_of(found).given_back is None
    assert any("not known, only bounded" in note for note in found.told["notes"])
    found = against(exposed_job(0.0), few_channels(), few_channels_policy, sm_price=0.005)
    back = arm_of(found).given_back
    most = 0.2 * (0.08 - 0.99 * 0.02)
    assert back.low <= 0.0 < back.mean == pytest.approx(most / 2, rel=0.01)
    assert back.high == pytest.approx(1.3 * most, rel=0.02)
    assert found.told["verdict"] == "nothing"
    assert any("0 to 0.5 % a channel" in note for note in found.told["notes"])


def test_a_price_says_nothing_beside_rows_of_products_as_in_tables_or_without_channels() -> None:
    lone = beside({16: 0.12})
    own = pl.concat([few_channels(), lone])
    found = against(exposed_job(0.0), own, lambda *_: ABSTAIN_ACTION, sm_price=0.005)
    assert found.told["kinds"][0]["lost_by"] == "matmul"
    for rows in (own, sweep(99.0), pl.concat([sweep(99.0), lone])):
        found = against(exposed_job(0.0), rows, few_channels_policy, sm_price=0.005)
        assert arm_of(found).given_back is None
        notes = " ".join(found.told["notes"])
        assert "--sm-price says nothing of 8 calls" in notes
        assert "a channel" not in notes


@pytest.mark.parametrize("priced", [True, False])
def test_a_hidden_call_that_stays_as_it_is_moves_no_interval(priced: bool) -> None:
    """Beside an exposed call that gains: by a price, or by rows beside products."""
    own = sweep(100.0, collective="AllGather")
    own = own.with_columns(actual_num_channels=pl.lit(24).cast(pl.Int64))
    lost = beside({16: 0.2}).with_columns(collective=pl.lit("AllGather"))
    steps = steps_frame(4, 1000.0, communication_us=200.0, exposed_us=100.0, compute_us=900.0)
    told = []
    for collective in ("AllReduce", "AllGather"):
        exposed = traced(0, 100.0, num_nodes=1, exposed_us=100.0)
        hidden = traced(1, 100.0, num_nodes=1, exposed_us=0.0, collective=collective)
        calls = [exposed, hidden] if collective == "AllGather" else [exposed]
        rows = pl.concat([sweep(80.0), own] if priced else [sweep(80.0), own, lost])
        found = against(job(stepped(calls), steps), rows, sm_price=0.008 * priced)
        assert found.told["verdict"] == "gain"
        told.append([*arm_of(found).step])
    assert told[0] == pytest.approx(told[1])


@pytest.mark.parametrize(
    ("ratio", "slower", "low", "mean"),
    [
        (None, 1.9, -0.18, 0.0),  # not known: perhaps all of it, and none as a rule
        (1.0, 1.9, -0.18, -0.18),  # compute ends with the call
        (2.5, 1.9, 0.0, 0.0),
        (2.0, 1.9, -0.06, 0.0),  # compute surely goes on for 160 us, and it takes 190
    ],
)
def test_a_slow_call_is_exposed(
    ratio: float | None, slower: float, low: float, mean: float
) -> None:
    """Two calls of 100 us a step of 1,000, which a config makes so much slower."""
    told = exposed_job(0.0, compute_ratio=ratio)
    found = against(told, sweep(100.0 * slower), few_channels_policy)
    step = arm_of(found).step
    assert step.mean == pytest.approx(mean, abs=0.002)
    # Of longer calls compute gets back nothing that it may keep.
    assert low - 0.05 < step.low < low + 0.005
    assert found.told["verdict"] != "gain"


SWEEP = sweep_text(
    system='"h100-ib-simulated"',
    collectives='["AllReduce"]',
    sizes='{ min = "64K", max = "64M" }',
    cycles=5,
    seed="5\nnoise_sigma = 0.02",
)


@pytest.fixture(name="known", scope="module")
def known_fixture(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(read(make_data(tmp_path_factory.mktemp("sweep") / "store", SWEEP)), None, None)


@pytest.mark.parametrize(
    ("name", "scenario", "verdict"),
    [
        ("decode", "quiet", "gain"),
        ("decode", "shared-node", "gain"),
        ("lora", "quiet", "nothing"),
        ("ddp", "quiet", "nothing"),
    ],
)
def test_truth_is_in_interval(name: str, scenario: str, verdict: Verdict, known: Measured) -> None:
    system = find_system("h100-ib")
    workload = WORKLOADS[name](Group(4, 8))
    around = find_scenario(scenario).model_copy(update={"first_use_us": 0.0})
    world = World(system, workload, all_configs(system, workload), around)
    own = play(world, np.zeros(len(world.keys), dtype=np.int64), 7, 600)
    found = answer(job_of(own.calls, own.steps, 8), known)
    played = play(world, table_of(found, world), 7, 600)
    arm = found.arms[TABLE]
    assert found.told["verdict"] == verdict
    assert arm.step is not None
    truths = (
        (arm.communication, 1.0 - played.communication_us / own.communication_us),
        (arm.step, 1.0 - played.job_us / own.job_us),
    )
    for told, truth in truths:
        assert told.low - 1e-9 <= truth <= told.high + 1e-9
