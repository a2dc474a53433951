import pytest
import torch

from dynamiccl.serve.ddp.compression import SAMPLE, Pruning, add_up, compress, largest
from dynamiccl.serve.ddp.laws import Decision, Method


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=made) * torch.rand(count, generator=made)


def sent_by(packed: torch.Tensor, decision: Decision, numel: int) -> torch.Tensor:
    """What one rank's bytes say, as a dense tensor."""
    out = torch.empty(numel)
    add_up(packed, decision, 1, out)
    return out


SPARSE = Decision(Method.SPARSE, 0.03)
HALF = Decision(Method.SPARSE, 0.03, quantised=True)


@pytest.mark.parametrize("decision", [SPARSE, HALF], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("numel", [1001, 3 * SAMPLE + 1])
def test_sent_and_error_feedback_and_pruned_are_the_gradient(
    decision: Decision, numel: int
) -> None:
    residual = numbers(numel, 1)
    weights = [numbers(numel - 1, 2).reshape(1, -1), torch.zeros(1)]
    kept = Pruning(0.5).kept(weights, decision, 0)
    assert kept is not None
    for step in range(3):
        gradient, before = numbers(numel, 10 + step), residual.clone()
        packed = compress(gradient.clone(), residual, decision, kept=kept, turn=step)
        assert packed.numel() == decision.payload_bytes(numel)
        sent = sent_by(packed, decision, numel)
        lost = (gradient + before) * ~kept
        torch.testing.assert_close(sent + residual + lost, gradient + before, rtol=0, atol=1e-6)
        assert not sent[~kept].any()
        assert 0 < sent.count_nonzero() <= decision.count(numel)
        assert not residual[~kept].any()


def test_what_16_bits_cannot_hold_stays_in_the_error_feedback() -> None:
    gradient, residual = torch.tensor([1e6, 1.0, 0.0, 0.0]), torch.zeros(4)
    decision = Decision(Method.SPARSE, 0.25, quantised=True)
    sent = sent_by(compress(gradient.clone(), residual, decision), decision, 4)
    assert sent.tolist() == [65504.0, 0.0, 0.0, 0.0]
    assert torch.equal(sent + residual, gradient)


def test_a_gradient_that_is_not_finite_reaches_every_rank_and_no_error_feedback() -> None:
    for bad in (torch.inf, torch.nan):
        gradient, residual = numbers(100), numbers(100, 1)
        gradient[7], before = bad, residual.clone()
        packed = compress(gradient, residual, HALF)
        assert not torch.isfinite(sent_by(packed, HALF, 100).sum())
        assert torch.equal(residual, before)


def test_the_mean_of_ranks_is_that_of_what_each_sent() -> None:
    ranks, numel = 3, 500
    packed = [compress(numbers(numel, rank), torch.zeros(numel), HALF) for rank in range(ranks)]
    mean = torch.empty(numel)
    add_up(torch.cat(packed), HALF, ranks, mean)
    alone = torch.stack([sent_by(each, HALF, numel) for each in packed])
    torch.testing.assert_close(mean, alone.mean(0))


def test_fewer_values_than_asked_for_are_filled_up() -> None:
    gradient = torch.zeros(1000)
    gradient[[3, 500]] = torch.tensor([2.0, -1.0])
    packed = compress(gradient.clone(), torch.zeros(1000), SPARSE)
    assert packed.numel() == SPARSE.payload_bytes(1000)
    assert torch.equal(sent_by(packed, SPARSE, 1000), gradient)


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
