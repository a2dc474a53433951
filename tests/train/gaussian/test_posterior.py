"""The Gaussian process itself, against its textbook formulas."""

import pytest
import torch

from dynamiccl.train.cautious.gaussian import Kernel, Posterior, fit_kernel, inducing_points
from dynamiccl.train.cautious.tasks import Rows

SIZE, NODES, _, CHANNELS, _, OWN = range(6)


def some_rows(count: int, seed: int = 0) -> Rows:
    """Rows of four cells over sizes, some with channels, with a smooth y."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.zeros(count, 6, dtype=torch.float64)
    numbers[:, SIZE] = 10.0 + 20.0 * torch.rand(count, generator=random, dtype=torch.float64)
    numbers[:, NODES] = torch.randint(0, 3, (count,), generator=random).to(torch.float64)
    numbers[:, CHANNELS] = torch.randint(0, 4, (count,), generator=random).to(torch.float64)
    numbers[::7, OWN] = 1.0
    cells = torch.randint(0, 4, (count,), generator=random)
    y = 0.2 * torch.sin(numbers[:, SIZE] / 3.0 + cells) + 0.05 * numbers[:, CHANNELS]
    return Rows(numbers, cells, y, torch.full((count,), 3.0, dtype=torch.float64))


def kernel() -> Kernel:
    return Kernel().requires_grad_(requires_grad=False)


def test_covariances_are_those_of_a_kernel() -> None:
    rows = some_rows(60)
    k_nn = kernel()(rows.numbers, rows.cells, rows.numbers, rows.cells)
    assert torch.allclose(k_nn, k_nn.T)
    assert torch.linalg.eigvalsh(k_nn).min() > -1e-9
    assert torch.allclose(k_nn.diagonal(), kernel().diagonal(rows.numbers))


def test_posterior_is_exact_with_as_many_points_as_rows() -> None:
    told, asked, k = some_rows(80), some_rows(8, seed=1), kernel()
    posterior = Posterior(k, told)
    means, spreads = posterior(asked.numbers.unsqueeze(0), asked.cells.unsqueeze(0))

    k_nn = k(told.numbers, told.cells, told.numbers, told.cells) + torch.diag(
        k.noise() / 3.0 * torch.ones(80)
    )
    k_mn = k(asked.numbers, asked.cells, told.numbers, told.cells)
    k_mm = k(asked.numbers, asked.cells, asked.numbers, asked.cells)
    off = told.y - told.y.median()
    assert torch.allclose(
        means[0], k_mn @ torch.linalg.solve(k_nn, off) + told.y.median(), atol=1e-5
    )
    left = k_mm - k_mn @ torch.linalg.solve(k_nn, k_mn.T)
    wanted = left.diagonal() + left[0, 0] - 2.0 * left[:, 0]
    assert torch.allclose(spreads[0], wanted.clamp(min=0.0).sqrt(), atol=1e-4)
    assert spreads[0, 0] == 0.0  # of itself an action is sure


def test_few_points_know_less_and_nearly_the_same() -> None:
    told, asked, k = some_rows(200), some_rows(40, seed=2), kernel()
    whole, few = Posterior(k, told), Posterior(k, told, max_points=60)
    assert len(few.points) == 60
    numbers, cells = asked.numbers.unsqueeze(0), asked.cells.unsqueeze(0)
    (mean, spread), (mean_few, spread_few) = whole(numbers, cells), few(numbers, cells)
    assert (mean - mean_few).abs().mean() < 0.02
    assert (spread_few + 1e-6 >= spread).all()


def test_points_stop_where_all_rows_are_alike() -> None:
    rows = some_rows(1)
    many = rows.take(torch.zeros(50, dtype=torch.int64))
    assert len(inducing_points(kernel(), many, most=10)[0]) == 1


def test_fitted_kernel_finds_noise_and_length() -> None:
    torch.manual_seed(0)
    rows = some_rows(250)
    noisy = Rows(
        rows.numbers,
        rows.cells,
        rows.y + 0.1 * torch.randn(250),
        torch.ones(250, dtype=torch.float64),
    )
    quiet, loud = (float(fit_kernel([each], seed=0).noise()) ** 0.5 for each in (rows, noisy))
    assert quiet < 0.03
    assert loud == pytest.approx(0.1, rel=0.3)
