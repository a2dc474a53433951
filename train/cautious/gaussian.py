"""A Gaussian process over configs with NCCL's cost model as its mean (cold tables).

What is modelled is y, the ln of a time over what was expected of it. The covariance of two (task,
action) rows of one system and collective is

    (wave + trend) x shapes x cells x knobs  +  own

    wave, trend   squared exponentials in log2 size, of one length and of five times that
    shapes        squared exponentials in log2 nodes and log2 ranks a node
    cells         1 for the same algorithm and protocol, else a constant
    knobs         of channels and chunk: squared exponentials where both rows ask for them, a
                  constant where one does
    own           NCCL's own choice has an offset of its own: what it is called is no proof

Rasmussen and Williams 2006, chapters 2, 4 and 5. Of many rows those that tell most are kept as
inducing points (pivoted Cholesky: Burt et al. 2020, "Convergence of Sparse Variational Inference in
Gaussian Processes Regression"), and all rows are summed up at them (Titsias 2009). With as few rows
as there are points it is exact.

    N rows measured, M others or inducing points, B batch, A actions, R = 6 numbers of a row: log2
    size, log2 nodes, log2 ranks a node, log2 channels and log2 chunk bytes (each plus 1, and 0
    where not asked for), and whether it is NCCL's own choice
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from dynamiccl.train.cautious.tasks import Rows

#: Where a row says whether it is NCCL's own choice.
_OWN: Final = 5
#: What the parameters begin with, and are pulled towards: lengths in octaves, spreads in ln time.
_BEGIN: Final = {
    "size_length": math.log(2.0),
    "nodes_length": math.log(1.5),
    "ranks_length": math.log(1.5),
    "knob_length": math.log(1.5),
    "wave_spread": math.log(0.2),
    "trend_spread": math.log(0.3),
    "own_spread": math.log(0.01),
    "noise_spread": math.log(0.03),
    "other_cell": -1.0,  # of a sigmoid
    "other_knob": 1.0,  # of a sigmoid
}
#: How far a parameter may stray, as the spread of a normal prior around where it begins.
_PRIOR: Final = 1.5
#: Inducing points of one system and collective at most.
MAX_POINTS: Final = 768
#: Keeps a matrix of nearly alike rows invertible.
_JITTER: Final = 1e-8


class Kernel(nn.Module):
    """The covariance of rows, with its parameters; scriptable."""

    values: torch.Tensor

    def __init__(self) -> None:
        """Start with parameters that are typical of systems."""
        super().__init__()
        self.values = nn.Parameter(torch.tensor(list(_BEGIN.values()), dtype=torch.float64))

    def forward(
        self,
        rows_NR: torch.Tensor,
        cells_N: torch.Tensor,
        others_MR: torch.Tensor,
        cells_M: torch.Tensor,
    ) -> torch.Tensor:
        """(..., N, M) of rows (..., N, R) and (..., M, R), and their cells (..., N), (..., M)."""
        task, task_own = self.tasks(rows_NR, others_MR)
        config, config_own = self.configs(rows_NR, cells_N, others_MR, cells_M)
        return task * config + task_own * config_own

    @torch.jit.export
    def tasks(
        self, rows_NR: torch.Tensor, others_MR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., N, M) the task factor of the covariance, and of its part `own`."""
        v = self.values
        apart = rows_NR[..., :3].unsqueeze(-2) - others_MR[..., :3].unsqueeze(-3)
        size = torch.square(apart[..., 0] * torch.exp(-v[0]))
        shapes = torch.square(apart[..., 1] * torch.exp(-v[1]))
        shapes = shapes + torch.square(apart[..., 2] * torch.exp(-v[2]))
        waves = torch.exp(2.0 * v[4] - 0.5 * size)
        waves = waves + torch.exp(2.0 * v[5] - 0.5 * size / 25.0)  # the trend is 5 times as long
        return waves * torch.exp(-0.5 * shapes), torch.exp(2.0 * v[6] - 0.5 * (size + shapes))

    @torch.jit.export
    def configs(
        self,
        rows_NR: torch.Tensor,
        cells_N: torch.Tensor,
        others_MR: torch.Tensor,
        cells_M: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., N, M) the config factor of the covariance, and of its part `own`."""
        v = self.values
        other_cell, other_knob = torch.sigmoid(v[8]), torch.sigmoid(v[9])
        same = (cells_N.unsqueeze(-1) == cells_M.unsqueeze(-2)).to(rows_NR.dtype)
        found = other_cell + (1.0 - other_cell) * same
        for knob in (3, 4):
            mine, other = rows_NR[..., knob].unsqueeze(-1), others_MR[..., knob].unsqueeze(-2)
            apart = mine - other
            near = torch.exp(-0.5 * torch.square(apart * torch.exp(-v[3])))
            near = other_knob + (1.0 - other_knob) * near
            asked = mine * other > 0.0
            neither = (apart == 0.0) & ~asked
            one = torch.where(neither, torch.ones_like(near), other_knob)
            found = found * torch.where(asked, near, one)
        return found, rows_NR[..., 5].unsqueeze(-1) * others_MR[..., 5].unsqueeze(-2)

    @torch.jit.unused
    def diagonal(self, rows_NR: torch.Tensor) -> torch.Tensor:
        """(N,) prior variance of each row."""
        spread = torch.exp(2.0 * self.values[4]) + torch.exp(2.0 * self.values[5])
        return spread + torch.exp(2.0 * self.values[6]) * rows_NR[:, _OWN]

    def noise(self) -> torch.Tensor:
        """Variance of one repeat."""
        return torch.exp(2.0 * self.values[7])

    @torch.jit.unused
    def penalty(self) -> torch.Tensor:
        """Negative log prior of the parameters."""
        begin = torch.tensor(list(_BEGIN.values()), dtype=torch.float64)
        return (torch.square((self.values - begin) / _PRIOR)).sum() / 2.0


class Factors:
    """The distinct tasks and configs of some rows: their covariances factorise."""

    def __init__(self, rows: Rows) -> None:
        """Find the distinct tasks and configs."""
        cells_N1 = rows.cells.unsqueeze(1).to(rows.numbers.dtype)
        told = torch.cat([rows.numbers, cells_N1], dim=1)
        tasks, self._task = torch.unique(told[:, :3], dim=0, return_inverse=True)
        configs, self._config = torch.unique(told[:, 3:], dim=0, return_inverse=True)
        none = torch.zeros(len(configs), 3).to(told)
        self._tasks, self._configs = tasks, torch.cat([none, configs[:, :-1]], dim=1)
        self._cells = configs[:, -1].to(rows.cells.dtype)

    def covariance(self, kernel: Kernel) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from n row indices to their covariance (n, N) with all rows."""
        tasks = kernel.tasks(self._tasks, self._tasks)
        configs = kernel.configs(self._configs, self._cells, self._configs, self._cells)

        def of(which: torch.Tensor) -> torch.Tensor:
            task, config = self._task[which], self._config[which]
            alike, own = (
                # Its backward pass is several times as fast as that of indexing.
                of_task.index_select(0, task).index_select(1, self._task)
                * of_config.index_select(0, config).index_select(1, self._config)
                for of_task, of_config in zip(tasks, configs, strict=True)
            )
            return alike + own

        return of


class Posterior(nn.Module):
    """Means, and spreads of differences, of rows; scriptable."""

    points: torch.Tensor
    cells: torch.Tensor
    weights: torch.Tensor
    known: torch.Tensor

    def __init__(self, kernel: Kernel, rows: Rows, max_points: int = MAX_POINTS) -> None:
        """Condition on rows under a kernel."""
        super().__init__()
        self.kernel = kernel
        with torch.no_grad():
            self.mean = float(rows.y.median())
            chosen, k_MN = inducing_points(kernel, rows, max_points)
            points, cells = rows.numbers[chosen], rows.cells[chosen]
            k_MM = k_MN[:, chosen]
            k_MM = k_MM + _JITTER * float(k_MM.diagonal().max()) * torch.eye(len(chosen)).to(k_MM)
            noise_N = kernel.noise() / rows.repeats
            low_MM = torch.linalg.cholesky(k_MM)
            scaled_MN = torch.linalg.solve_triangular(low_MM, k_MN, upper=False)
            inner_MM = (scaled_MN / noise_N) @ scaled_MN.T + torch.eye(len(chosen)).to(k_MM)
            inner_low = torch.linalg.cholesky(inner_MM)
            told_M1 = (scaled_MN / noise_N) @ (rows.y - self.mean).unsqueeze(1)
            weights = torch.linalg.solve_triangular(
                low_MM.T, torch.cholesky_solve(told_M1, inner_low), upper=True
            )
            up_MM = torch.linalg.solve_triangular(
                low_MM, torch.eye(len(chosen)).to(k_MM), upper=False
            )
            in_MM = torch.linalg.solve_triangular(inner_low, up_MM, upper=False)
        self.register_buffer("points", points)
        self.register_buffer("cells", cells)
        self.register_buffer("weights", weights.squeeze(1))
        # What the rows took from the variance: k_MM^-1 less what is left of it.
        self.register_buffer("known", up_MM.T @ up_MM - in_MM.T @ in_MM)

    def forward(
        self, numbers_BAR: torch.Tensor, cells_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means (B, A) of y, and spreads (B, A) of y minus that of action 0."""
        batch = numbers_BAR.size(0)
        points = self.points.unsqueeze(0).expand(batch, -1, -1)
        cells = self.cells.unsqueeze(0).expand(batch, -1)
        k_BAM = self.kernel(numbers_BAR, cells_BA, points, cells)
        means_BA = k_BAM @ self.weights + self.mean
        own_BAA = self.kernel(numbers_BAR, cells_BA, numbers_BAR, cells_BA)
        diagonal_BA = own_BAA.diagonal(dim1=1, dim2=2)
        prior_BA = diagonal_BA + diagonal_BA[:, :1] - 2.0 * own_BAA[:, :, 0]
        off_BAM = k_BAM - k_BAM[:, :1]
        taken_BA = ((off_BAM @ self.known) * off_BAM).sum(dim=2)
        return means_BA, torch.sqrt((prior_BA - taken_BA).clamp(min=0.0))


def inducing_points(kernel: Kernel, rows: Rows, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy choice of the rows that leave the least variance of the others.

    Returns their indices (M,), and their covariance (M, N) with all rows.
    """
    covariance = Factors(rows).covariance(kernel)
    if len(rows) <= most:
        every = torch.arange(len(rows))
        return every, covariance(every)
    left = kernel.diagonal(rows.numbers)
    factors = torch.zeros(most, len(rows), dtype=left.dtype)
    chosen = []
    for step in range(most):
        pick = int(left.argmax())
        chosen.append(pick)
        k_N = covariance(torch.tensor([pick]))[0]
        factor = (k_N - factors[:step].T @ factors[:step, pick]) / torch.sqrt(left[pick])
        factors[step] = factor
        left = (left - torch.square(factor)).clamp(min=0.0)
        left[pick] = 0.0
        if float(left.max()) < _JITTER:
            break
    points = torch.tensor(chosen)
    return points, covariance(points)


def fit_kernel(blocks: list[Rows], *, seed: int, steps: int = 60, most: int = 350) -> Kernel:
    """The kernel with the largest marginal likelihood of some blocks of rows, which share it.

    By Adam, on at most `most` rows of each block.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = [block.take(torch.randperm(len(block), generator=generator)[:most]) for block in blocks]
    parts = [(block, Factors(block), torch.arange(len(block))) for block in seen]
    kernel = Kernel()
    optimizer = torch.optim.Adam(kernel.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = kernel.penalty()
        for block, part, every in parts:
            k_NN = part.covariance(kernel)(every)
            low = torch.linalg.cholesky(k_NN + torch.diag(kernel.noise() / block.repeats + 1e-8))
            off = (block.y - block.y.median()).unsqueeze(1)
            inner = torch.linalg.solve_triangular(low, off, upper=False)
            loss = loss + torch.square(inner).sum() / 2.0 + low.diagonal().log().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return kernel.requires_grad_(requires_grad=False)
