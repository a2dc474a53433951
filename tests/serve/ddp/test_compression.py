import pytest
import torch

from dynamiccl.serve.ddp.compression import (
    SAMPLE,
    Pruning,
    largest,
    owe,
    propose,
    shared_places,
    take,
)
from dynamiccl.serve.ddp.laws import Decision, Method

CPU = torch.device("cpu")


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=made) * torch.rand(count, generator=made)


SPARSE = Decision(Method.SPARSE, 0.03)
HALF = Decision(Method.SPARSE, 0.03, quantised=True)


@pytest.mark.parametrize("decision", [SPARSE, HALF], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_sent_and_owed_and_pruned_are_the_gradient(decision: Decision, ranks: int) -> None:
    numel = 1001
    residual = numbers(numel, 1)
    weights = [numbers(numel - 1, 2).reshape(1, -1), torch.zeros(1)]
    kept = Pruning().kept(weights, decision, 0)
    assert kept is not None
    for step in range(3):
        gradient, before = numbers(numel, 10 + step), residual.clone()
        places = largest(numbers(numel, step), 31)
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


def test_positions_are_spread_evenly_where_ranks_agreed_on_none() -> None:
    agreed = torch.tensor([1, -1, 4], dtype=torch.int32)
    assert shared_places(agreed, 5, 1, 0, CPU).tolist() == [1, 4]
    for none in (None, torch.tensor([-1, -1], dtype=torch.int32)):
        assert shared_places(none, 5, 2, 1, CPU).tolist() == [1, 3]


@pytest.mark.parametrize("k", [1, 70, 5_000, 60_000])
def test_the_sampled_threshold_finds_the_k_largest(k: int) -> None:
    exact = 0
    for turn in range(8):
        values = numbers(5 * SAMPLE + 13, turn)
        found = largest(values, k, turn)
        # Below a sample's resolution, and in an unlucky draw, less than k may be found.
        assert found.numel() <= k
        assert len(set(found.tolist())) == found.numel()
        wanted = values.abs().topk(found.numel()).values
        assert torch.equal(values[found].abs().sort(descending=True).values, wanted)
        exact += found.numel() == k
    assert exact >= 7


def test_equal_values_and_matrices_of_an_even_width_are_no_trap() -> None:
    assert len(set(largest(torch.ones(4 * SAMPLE), 1000).tolist())) == 1000
    # One column alone is large: a sample that stayed in one column would see all of it, or none.
    columns = torch.zeros(4 * SAMPLE // 256, 256)
    columns[:, 3] = 1.0
    found = largest(columns.flatten(), columns.shape[0])
    assert found.numel() == columns.shape[0]
    assert (found % 256 == 3).all()
    # Zeros are never among them.
    values = torch.zeros(2 * SAMPLE)
    values[5] = 1.0
    assert largest(values, 100).tolist() == [5]


def test_pruning_takes_the_smallest_weights_and_no_bias() -> None:
    weight, bias = numbers(40_000).reshape(200, 200), torch.zeros(200)
    kept = Pruning().kept([weight, bias], Decision(Method.SPARSE, 0.2), 0)
    assert kept is not None
    of_weight = kept[:40_000].reshape(200, 200)
    # 0.5 x (1 - 0.2)
    assert 1.0 - of_weight.float().mean().item() == pytest.approx(0.4, abs=0.02)
    assert weight.abs()[of_weight].min() >= weight.abs()[~of_weight].max()
    assert kept[40_000:].all()
    # Nothing at ratio one or without weights.
    assert Pruning().kept([torch.ones(4, 4)], Decision(Method.SPARSE, 1.0), 0) is None
    assert Pruning().kept([torch.ones(4)], SPARSE, 0) is None
