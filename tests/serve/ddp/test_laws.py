"""What NetSense decides from a network that is followed, and what it takes of a gradient."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.serve.ddp.compression import SAMPLE, Places, Pruning, largest, owe, propose, take
from dynamiccl.serve.ddp.laws import (
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
    latency_s: float = 1e-3
    compute_s: float = 0.2
    overlap_s: float = 0.02
    codec_s: float = 0.05

    def transfer_s(self, wire_bytes: float) -> float:
        """L + bytes/B."""
        return self.latency_s + wire_bytes / (self.mbit_per_s * 125e3)


def follow(law: Law, links: Sequence[Link], gradient: Gradient = RESNET18) -> list[Decision]:
    """The decision of each step over a link each; decided one step late, as the hook does."""
    decisions, waiting = [], None
    for link in links:
        if waiting is not None:
            law.update(waiting)
        decision = law.decision
        decisions.append(decision)
        wire_bytes = gradient.wire_bytes(decision)
        waiting = Interval(
            decision=decision,
            wire_bytes=wire_bytes,
            transfer_s=link.transfer_s(wire_bytes),
            latency_s=link.latency_s,
            compute_s=link.compute_s,
            overlap_s=link.overlap_s,
            codec_s=link.codec_s if decision.method is Method.SPARSE else 0.01,
            norm=1.0,
        )
    return decisions


def settled(link: Link) -> Decision:
    """What mode model comes to on one network."""
    return follow(make_law(Settings(), RESNET18), [link] * 40)[-1]


PAPER = Settings(mode="paper", beta1=0.1, tr_q=0.0)


def interval(wire_bytes: float, transfer_s: float | None, norm: float | None = None) -> Interval:
    return Interval(Decision(Method.SPARSE, 0.01), wire_bytes, transfer_s, norm=norm)


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
    # Loss ends the start-up, too.
    for lost, ratio in ((None, 0.11), (0.0, 0.11), (1.0, 0.005)):
        law = make_law(PAPER, RESNET18)
        law.update(replace(interval(1000, 0.01), lost=lost))
        assert law.decision.ratio == pytest.approx(ratio)


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
    for rate in (200, 500, 800, 1000, 2000):
        law = make_law(Settings(mode="paper", tr_q=0.0), RESNET18)
        late = [decision.ratio for decision in follow(law, [Link(rate)] * 400)[200:]]
        assert 0.005 - 1e-9 <= sum(late) / len(late) <= 0.0095, rate


def test_mode_model_fills_its_budget_and_no_more() -> None:
    ratios = [settled(Link(rate)).ratio for rate in (200, 500, 800, 2000)]
    assert ratios == sorted(set(ratios))
    assert ratios[0] > 0.02
    assert settled(Link(20_000)) == DENSE
    link = Link(500)
    alone_s = link.compute_s + link.codec_s + link.latency_s
    budget_s = link.overlap_s + Settings().slowdown * alone_s + link.latency_s
    used_s = link.transfer_s(RESNET18.wire_bytes(settled(link)))
    assert 0.9 * budget_s <= used_s <= 1.01 * budget_s
    # Where the latency alone, 100 ms with 17 ms of compute, is above it, a thousandth of the ratio
    # would take as long.
    far = Link(2000, latency_s=0.1, compute_s=0.01, overlap_s=0.0, codec_s=0.007)
    assert settled(far).ratio > 0.05


@pytest.mark.parametrize(("before", "after"), [(200, 800), (800, 200), (2000, 200)])
def test_mode_model_reaches_its_new_ratio_within_20_steps_of_a_change(
    before: int, after: int
) -> None:
    links = [Link(before)] * 40 + [Link(after)] * 60
    decisions = follow(make_law(Settings(), RESNET18), links)
    assert decisions[39].ratio != pytest.approx(decisions[-1].ratio, rel=0.5)
    assert all(d.ratio == pytest.approx(decisions[-1].ratio, rel=0.1) for d in decisions[59:])


def test_one_slow_step_does_not_move_mode_model() -> None:
    quiet = [Link(500)] * 40
    decisions = follow(make_law(Settings(), RESNET18), [*quiet, Link(5), *quiet])
    assert len({decision.ratio for decision in decisions[30:]}) == 1


def test_all_values_are_sent_in_16_bits_where_that_is_predicted_to_be_fastest() -> None:
    # Compressing takes 0.4 s, halving 10 ms; 69 MB take 0.28 s at 2,000 Mbit/s.
    assert settled(Link(2000, codec_s=0.4, compute_s=0.05)) == FP16
    # A small norm forbids 16 bits.
    decisions = follow(make_law(Settings(tr_d=5.0), RESNET18), [Link(200)] * 40)
    assert not any(decision.quantised for decision in decisions)


@pytest.mark.parametrize("settings", [Settings(), Settings(mode="paper")], ids=["model", "paper"])
def test_a_restored_law_goes_on_as_the_one_that_was_saved(settings: Settings) -> None:
    law = make_law(settings, RESNET18)
    follow(law, [Link(300)] * 15)
    buffer = io.BytesIO()
    torch.save(law.state(), buffer)
    buffer.seek(0)
    again = make_law(settings, RESNET18)
    again.restore(torch.load(buffer, weights_only=True))  # as a checkpoint is read
    links = [Link(300)] * 3 + [Link(900)] * 12
    assert follow(again, links) == follow(law, links)
    assert again.state() == law.state()


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


def test_a_setting_outside_its_range_says_which() -> None:
    with pytest.raises(UnknownName, match="choose from model, paper"):
        Settings(mode="modell")  # type: ignore[arg-type]
    for settings, said in (
        ({"min_ratio": 0.0}, "min_ratio is 0: give a value above 0 and at most 1"),
        ({"slowdown": -0.1}, "slowdown is -0.1: give a value at least 0"),
        ({"bandwidth_window": 0}, "bandwidth_window is 0: give a value at least 1"),
    ):
        with pytest.raises(UserError, match=f"setting {said}"):
            Settings(**settings)


CPU = torch.device("cpu")


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=made) * torch.rand(count, generator=made)


SPARSE = Decision(Method.SPARSE, 0.03)
HALF = Decision(Method.SPARSE, 0.03, quantised=True)


@pytest.mark.parametrize("decision", [SPARSE, HALF], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_sent_and_error_feedback_and_pruned_are_the_gradient(
    decision: Decision, ranks: int
) -> None:
    numel = 1001
    residual = numbers(numel, 1)
    weights = [numbers(numel - 1, 2).reshape(1, -1), torch.zeros(1)]
    kept = Pruning(0.5).kept(weights, decision, 0)
    assert kept is not None
    for step in range(3):
        gradient, before = numbers(numel, 10 + step), residual.clone()
        places = largest(numbers(numel, step), 31)[0]
        sent = torch.zeros(numel)
        owe(gradient, residual, kept)
        values = take(residual, places, decision, ranks, torch.float32)
        sent[places] = values.float() * ranks
        lost = (gradient + before) * ~kept
        torch.testing.assert_close(sent + residual + lost, gradient + before, rtol=0, atol=1e-6)
        assert not sent[~kept].any()
        assert sent.any()
        assert not residual[~kept].any()


def test_what_16_bits_cannot_hold_stays_in_the_error_feedback() -> None:
    gradient = torch.tensor([1e6, 1.0, 0.0, 0.0])
    for ranks in (2, 3, 8):
        residual = gradient.clone()
        sent = take(residual, torch.tensor([0]), HALF, ranks, torch.float32)
        total = sum(sent for _ in range(ranks))
        assert 64_900.0 < float(total) <= 65_504.0
        assert residual.tolist() == [1e6 - ranks * float(sent), 1.0, 0.0, 0.0]
    # What is owed is of 32 bits, what an optimizer gets of the gradient's own.
    residual = torch.tensor([1e6, 0.0, 0.0, 0.0])
    sent = take(residual, torch.tensor([0]), SPARSE, 2, torch.float16)
    assert torch.isfinite((2 * sent).half()).all()
    assert residual[0] == 1e6 - 65_000.0


LAYOUT = (("a", 700), ("b", 3), ("c", 298))


def test_ranks_propose_the_largest_of_shares_that_are_a_bucket_together() -> None:
    ranks, residual = 4, numbers(1001)
    told = [propose(residual, LAYOUT, SPARSE, share, ranks, 0) for share in range(ranks)]
    assert {len(each) for each in told} == {8}
    places = torch.cat(told)
    places = places[places >= 0]
    assert len(set(places.tolist())) == len(places) == 32
    # In its share of each parameter, and so of another order of parameters the same.
    order = (2, 0, 1)
    parts = dict(zip("abc", torch.split(residual, [n for _, n in LAYOUT]), strict=True))
    moved = tuple(LAYOUT[i] for i in order)
    other = torch.cat([parts[name] for name, _ in moved])
    begins = {"c": 0, "a": 298, "b": 998}
    again = propose(other, moved, SPARSE, 1, ranks, 0).tolist()
    back = [p - begins["a"] if p < 998 else p - 298 for p in again]
    back = [b if p >= 298 else p + 703 for p, b in zip(again, back, strict=True)]
    assert sorted(back) == sorted(told[1].tolist())
    shares = [residual[:175], residual[700:700], residual[703:777]]
    best = torch.cat(shares).abs().topk(8).values
    found = residual[told[0].long()].abs().sort(descending=True).values
    assert torch.equal(found, best)


def test_fewer_values_than_asked_for_are_filled_up() -> None:
    residual = torch.zeros(1001)
    residual[[3, 500]] = torch.tensor([2.0, -1.0])
    assert propose(residual, LAYOUT, SPARSE, 0, 1, 0).tolist() == [3, 500] + [-1] * 29
    # A rank may have no share at all of a small bucket.
    assert propose(torch.ones(2), (("b", 2),), SPARSE, 0, 8, 0).tolist() == [-1]


def test_positions_follow_their_parameters_into_new_buckets_and_checkpoints() -> None:
    places, first = Places(), (("a", 2), ("b", 3))
    assert places.take(first, 2, 1, CPU).tolist() == [1, 3]
    places.put(first, torch.tensor([1, -1, 4], dtype=torch.int32))
    # They are in flight until the step has ended.
    assert places.state() == {}
    places.end_step()
    again = Places()
    again.restore(places.state())
    for each in (places, again):
        assert each.take((("b", 3), ("a", 2)), 1, 0, CPU).tolist() == [2, 4]
        assert each.take((("b", 3), ("a", 2)), 1, 0, CPU).tolist() == [0]


@pytest.mark.parametrize("k", [1, 70, 5_000, 60_000])
def test_the_sampled_threshold_finds_the_k_largest(k: int) -> None:
    exact = 0
    for turn in range(8):
        values = numbers(5 * SAMPLE + 13, turn)
        found = largest(values, k, turn)[0]
        # Below a sample's resolution, and in an unlucky draw, less than k may be found.
        assert found.numel() <= k
        assert len(set(found.tolist())) == found.numel()
        wanted = values.abs().topk(found.numel()).values
        assert torch.equal(values[found].abs().sort(descending=True).values, wanted)
        exact += found.numel() == k
    assert exact >= 7


def test_equal_values_and_matrices_of_an_even_width_are_no_trap() -> None:
    assert len(set(largest(torch.ones(4 * SAMPLE), 1000)[0].tolist())) == 1000
    # One column alone is large: a sample that stayed in one column would see all of it, or none.
    columns = torch.zeros(4 * SAMPLE // 256, 256)
    columns[:, 3] = 1.0
    found = largest(columns.flatten(), columns.shape[0])[0]
    assert found.numel() == columns.shape[0]
    assert (found % 256 == 3).all()
    # Zeros are never among them.
    values = torch.zeros(2 * SAMPLE)
    values[5] = 1.0
    assert largest(values, 100)[0].tolist() == [5]


def test_pruning_takes_the_smallest_weights_and_no_bias() -> None:
    weight, bias = numbers(40_000).reshape(200, 200), torch.zeros(200)
    kept = Pruning(0.5).kept([weight, bias], Decision(Method.SPARSE, 0.2), 0)
    assert kept is not None
    of_weight = kept[:40_000].reshape(200, 200)
    # 0.5 x (1 - 0.2)
    assert 1.0 - of_weight.float().mean().item() == pytest.approx(0.4, abs=0.02)
    assert weight.abs()[of_weight].min() >= weight.abs()[~of_weight].max()
    assert kept[40_000:].all()
    # Nothing at ratio one or without weights.
    assert Pruning(0.5).kept([torch.ones(4, 4)], Decision(Method.SPARSE, 1.0), 0) is None
    assert Pruning(0.5).kept([torch.ones(4)], SPARSE, 0) is None
    assert Pruning(0.0).kept([torch.ones(4, 4)], SPARSE, 0) is None
