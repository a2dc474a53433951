import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import pytest

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.serve.ddp.laws import (
    DEAD_BAND,
    DENSE,
    FP16,
    Decision,
    Gradient,
    Interval,
    Law,
    Method,
    Settings,
    make_law,
)

#: The gradients of ResNet-18 as the paper counts them, 46.2 MB, between four ranks.
RESNET18 = Gradient(numel=11_550_000, num_bytes=46_200_000, ranks=4)


@dataclass(frozen=True)
class Link:
    """A network between ranks and the compute of a step beside it."""

    mbit_per_s: float
    #: Of one collective. Sparse steps have two a bucket.
    latency_s: float = 1e-3
    compute_s: float = 0.2
    overlap_s: float = 0.02
    codec_s: float = 0.05
    buckets: int = 1
    #: Bytes that a queue takes at once.
    queue: float = 0.0
    #: Standard deviation of each measured time's logarithm.
    jitter: float = 0.0

    def sparse_latency_s(self) -> float:
        """L of a sparse step."""
        return 2.0 * self.buckets * self.latency_s

    def transfer_s(self, decision: Decision, wire_bytes: float) -> float:
        """L + bytes/B."""
        all_s = self.sparse_latency_s() / (1.0 if decision.method is Method.SPARSE else 2.0)
        return all_s + max(0.0, wire_bytes - self.queue) / (self.mbit_per_s * 125e3)

    def room_s(self) -> float:
        """What the bytes of a sparse step may take by `Settings.slowdown`."""
        alone_s = self.compute_s + self.codec_s + self.sparse_latency_s()
        return self.overlap_s + Settings().slowdown * alone_s

    def best(self, gradient: Gradient) -> float:
        """The largest ratio that fits; from 0.2 in 32 bits."""
        room = self.room_s() * self.mbit_per_s * 125e3
        half, single = (
            room / gradient.wire_bytes(Decision(Method.SPARSE, 1.0, quantised=quantised))
            for quantised in (True, False)
        )
        return max(0.02, half if half < 0.2 else single)


def follow(
    law: Law, links: Sequence[Link], gradient: Gradient = RESNET18, seed: int = 0
) -> list[Decision]:
    """The decision of each step over a link each; decided one step late, as the hook does."""
    luck, decisions, waiting = random.Random(seed), [law.decision], None
    for link in links:
        if waiting is not None:
            law.update(waiting)
        before, decision = decisions[-1], law.decision
        decisions.append(decision)
        sparse = Method.SPARSE is before.method is decision.method
        # Values are sent at the positions that were told in the step before.
        count = before.count(gradient.numel) if sparse else 0
        wire_bytes = decision.wire_bytes(gradient.numel, 4, gradient.ranks, count)
        times = {
            "transfer_s": link.transfer_s(decision, wire_bytes),
            "latency_s": link.latency_s,
            "compute_s": link.compute_s,
            "overlap_s": link.overlap_s,
            "codec_s": link.codec_s if decision.method is Method.SPARSE else 0.01,
        }
        spread = {n: each * math.exp(luck.gauss(0.0, link.jitter)) for n, each in times.items()}
        waiting = Interval(decision, wire_bytes, **spread, norm=1.0)
    return decisions[1:]


def level(decisions: Sequence[Decision]) -> float:
    """The ratio around which the last eight steps go."""
    return median(decision.ratio for decision in decisions[-8:])


def settled_after(decisions: Sequence[Decision]) -> int:
    """Steps until medians of five stay within a tenth of the last level."""
    ratios = [decision.ratio for decision in decisions]
    middle = [median(ratios[i : i + 5]) / level(decisions) for i in range(len(ratios) - 4)]
    return max((i + 1 for i, each in enumerate(middle) if abs(each - 1.0) > 0.1), default=0)


def paper_ratio(mbit_per_s: float, *, steps: int = 400, **settings: float) -> float:
    """Mean of the ratio over the second half of a run in mode paper, before 16 bits double it."""
    law = make_law(Settings(mode="paper", tr_q=0.0, **settings), RESNET18)  # type: ignore[arg-type]
    decisions = follow(law, [Link(mbit_per_s)] * steps)
    late = decisions[steps // 2 :]
    return sum(decision.ratio for decision in late) / len(late)


PAPER = Settings(mode="paper", beta1=0.1, tr_q=0.0)
SPARSE = Decision(Method.SPARSE, 0.01)


def interval(wire_bytes: float, transfer_s: float | None, norm: float | None = None) -> Interval:
    return Interval(SPARSE, wire_bytes, transfer_s, norm=norm)


def test_algorithm_1_by_hand() -> None:
    law = make_law(PAPER, RESNET18)
    table = [
        # bytes, ms -> ratio after. Start-up adds 0.1 while RTT <= 2 x the least one.
        (1000, 10, 0.11),
        (1000, 10, 0.21),
        (1000, 19, 0.31),
        # 21 ms > 2 x 10 ms: start-up is over. BtlBw 100 kB/s, BDP 1000 B; 1000 > 900: halved.
        (1000, 21, 0.155),
        # 900 is not above 0.9 x BDP: 0.01 more. Its EBB, 90 kB/s, is not the largest.
        (900, 10, 0.165),
        # A better EBB, 200 kB/s, and a better RTT: BDP 1800 B, and 0.9 of it 1620 B.
        (1800, 9, 0.0825),
        (1620, 9, 0.0925),
        (1621, 9, 0.04625),
        (1700, 9, 0.023125),
        (1700, 9, 0.0115625),
        (1700, 9, 0.00578125),
        # Never below 0.005.
        (1700, 9, 0.005),
        (1700, 9, 0.005),
    ]
    for wire_bytes, time_ms, ratio in table:
        law.update(interval(wire_bytes, time_ms / 1e3))
        assert law.decision.ratio == pytest.approx(ratio), (wire_bytes, time_ms)
        assert law.decision.method is Method.SPARSE
    # What was not measured leaves the ratio; at ratio one it is a plain all-reduce.
    law.update(interval(1000, None))
    assert law.decision.ratio == 0.005
    law = make_law(replace(PAPER, beta1=0.5), RESNET18)
    for _ in range(2):
        law.update(interval(1000, 0.01))
    assert law.decision == DENSE


def test_sixteen_bits_double_the_ratio_below_tr_q_for_a_large_norm_only() -> None:
    settings = replace(PAPER, tr_q=0.2, tr_d=1.0, beta1=0.05)
    found = {}
    for norm in (None, 0.9, 1.1):
        law = make_law(settings, RESNET18)
        law.update(interval(1000, 0.01, norm))
        found[norm] = law.decision
    assert found[None] == found[0.9] == Decision(Method.SPARSE, 0.01 + 0.05)
    assert found[1.1] == Decision(Method.SPARSE, 2.0 * (0.01 + 0.05), quantised=True)
    high = make_law(replace(settings, beta1=0.3), RESNET18)
    high.update(interval(1000, 0.01, 1.1))
    assert high.decision == Decision(Method.SPARSE, 0.01 + 0.3)


def test_algorithm_1_stays_near_its_floor_where_rtt_is_the_transfers_own_time() -> None:
    """docs/ddp-hook.md: 4 ranks, L = 1 ms, 200 to 2,000 Mbit/s."""
    ratios = [paper_ratio(rate) for rate in (200, 500, 800, 1000, 2000)]
    assert all(0.005 - 1e-9 <= ratio <= 0.0095 for ratio in ratios), ratios


RATES = (200, 300, 500, 1000)
#: One collective of one bucket, and two of each of three that take ten times as long: 60 ms.
NEAR, FAR = Link(0), Link(0, latency_s=0.01, buckets=3)


@pytest.mark.parametrize("link", [NEAR, FAR], ids=["near", "far"])
def test_mode_model_sends_what_fits_the_budget(link: Link) -> None:
    ratios = []
    for rate in RATES:
        at = replace(link, mbit_per_s=rate)
        decisions = follow(make_law(Settings(), RESNET18), [at] * 60)
        ratios.append(level(decisions))
        assert at.best(RESNET18) / ratios[-1] == pytest.approx(1.0, abs=DEAD_BAND)
        assert settled_after(decisions) <= 20
    assert ratios == sorted(set(ratios))
    assert follow(make_law(Settings(), RESNET18), [Link(20_000)] * 40)[-1] == DENSE


def test_where_only_latency_counts_mode_model_sends_all() -> None:
    """All of a small model, which takes hardly longer than the floor of the ratio."""
    small, link = Gradient(90_000, 360_000, 8), Link(2000, 0.01, 0.04, 0.0, 0.001)
    assert follow(make_law(Settings(), small), [link] * 40, small)[-1].ratio == 1.0


@pytest.mark.parametrize("link", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize(("before", "after"), [(200, 800), (800, 200), (2000, 200), (100, 1000)])
def test_mode_model_settles_within_20_steps(link: Link, before: int, after: int) -> None:
    old, new = (replace(link, mbit_per_s=rate) for rate in (before, after))
    jitters = (0.0, *[0.07] * 7)
    took, levels = [], []
    for seed, jitter in enumerate(jitters):
        links = [replace(old, jitter=jitter)] * 40 + [replace(new, jitter=jitter)] * 40
        decisions = follow(make_law(Settings(), RESNET18), links, seed=seed)[40:]
        took.append(settled_after(decisions))
        levels.append(level(decisions))
    assert took[0] <= 15
    assert median(took) <= 20
    best = new.best(RESNET18)
    assert best / levels[0] == pytest.approx(1.0, abs=DEAD_BAND)
    assert best / median(levels) == pytest.approx(1.0, abs=0.3)


def test_steps_that_grow_faster_as_a_job_warms_up_do_not_pass_for_bandwidth() -> None:
    """More bytes take less time there, as if bytes took none."""
    warming = [replace(FAR, mbit_per_s=100, latency_s=0.01 + 0.1 * 0.8**n) for n in range(40)]
    for seed in range(8):
        links = [replace(link, jitter=0.1) for link in warming]
        decisions = follow(make_law(Settings(), RESNET18), links, seed=seed)
        assert max(decision.ratio for decision in decisions) <= 0.1


def test_a_queue_that_hides_the_rate_from_small_steps_does_not_lead_to_all_values() -> None:
    """All in 16 bits, which it does not take, tell the rate: twice as many are not tried."""
    decisions = follow(make_law(Settings(), RESNET18), [Link(200, queue=2e7)] * 60)
    assert FP16 in decisions
    assert DENSE not in decisions
    assert level(decisions) < 0.3


def test_beside_a_stream_that_comes_and_goes_mode_model_keeps_its_budget_on_the_whole() -> None:
    """Every other eight steps there is half of the link."""
    turn = [Link(500, jitter=0.1)] * 8 + [Link(250, jitter=0.1)] * 8
    decisions = follow(make_law(Settings(), RESNET18), turn * 8)
    used = [
        RESNET18.wire_bytes(decision) / (link.mbit_per_s * 125e3) / link.room_s()
        for decision, link in zip(decisions, turn * 8, strict=True)
    ]
    assert 0.6 <= fmean(used[16:]) <= 1.2
    assert not any(decision.method is Method.DENSE for decision in decisions)


def test_latency_above_the_budget_does_not_drive_mode_model_to_its_least_ratio() -> None:
    """A thousandth of the ratio would take as long: here 100 ms, with 17 ms of compute."""
    link = Link(2000, latency_s=0.1, compute_s=0.01, overlap_s=0.0, codec_s=0.007)
    assert level(follow(make_law(Settings(), RESNET18), [link] * 40)) > 0.05


def test_one_slow_step_does_not_move_mode_model() -> None:
    slow, quiet = ([Link(500)] * 40 + [Link(rate)] + [Link(500)] * 40 for rate in (5, 500))
    moved, kept = (follow(make_law(Settings(), RESNET18), links) for links in (slow, quiet))
    assert moved == kept


def test_all_values_are_sent_in_16_bits_where_that_is_predicted_to_be_fastest() -> None:
    # Compressing takes 0.4 s, halving 10 ms; 69 MB take 0.28 s at 2,000 Mbit/s.
    slow_codec = Link(2000, codec_s=0.4, compute_s=0.05)
    assert follow(make_law(Settings(), RESNET18), [slow_codec] * 40)[-1] == FP16
    # A small norm forbids 16 bits.
    decisions = follow(make_law(Settings(tr_d=5.0), RESNET18), [Link(200)] * 40)
    assert not any(decision.quantised for decision in decisions)


def test_wire_bytes_by_hand() -> None:
    # 4 ranks, 1000 values of 4 bytes: 2 x 3/4 x 4000.
    gradient = Gradient(1000, 4000, 4)
    sparse = Decision(Method.SPARSE, 0.01)
    assert gradient.wire_bytes(DENSE) == 6000.0
    assert gradient.wire_bytes(FP16) == 3000.0
    # 10 values as an all-reduce of 4 or 2 bytes each, and 3 positions of 4 bytes of 3 others.
    assert gradient.wire_bytes(sparse) == 2 * 3 / 4 * 10 * 4 + 3 * 3 * 4
    assert gradient.wire_bytes(replace(sparse, quantised=True)) == 2 * 3 / 4 * 10 * 2 + 3 * 3 * 4
    # Own positions: 10 of 4 bytes, with values of 4, of 3 others.
    assert replace(gradient, shared=False).wire_bytes(sparse) == 3 * 10 * (4 + 4)
    # A step sends the values of the positions that were agreed on in the step before.
    assert sparse.wire_bytes(1000, 4, 4, count=20) == 2 * 3 / 4 * 20 * 4 + 3 * 3 * 4


def test_loss_ends_the_start_up_of_mode_paper() -> None:
    for lost, ratio in ((None, 0.11), (0.0, 0.11), (1.0, 0.005)):
        law = make_law(PAPER, RESNET18)
        law.update(replace(interval(1000, 0.01), lost=lost))
        assert law.decision.ratio == pytest.approx(ratio)


def test_a_setting_outside_its_range_says_which() -> None:
    with pytest.raises(UnknownName, match="choose from model, paper"):
        Settings(mode="modell")  # type: ignore[arg-type]
    for settings, said in (
        ({"min_ratio": 0.0}, "min_ratio is 0: give a value above 0 and at most 1"),
        ({"slowdown": -0.1}, "slowdown is -0.1: give a value at least 0"),
        ({"excessive_rtt": 0}, "excessive_rtt is 0: give a value at least 1"),
    ):
        with pytest.raises(UserError, match=f"setting {said}"):
            Settings(**settings)
