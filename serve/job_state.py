"""How `brain.pt` queries its policy: with or without a state of the job.

N task keys, K calls in the window, W and F features, A actions, U units of the state
"""

from typing import Any

import torch
from torch import nn


class Stateless(nn.Module):
    """Queries each key by itself."""

    def __init__(self, policy: Any) -> None:
        """Take a loaded `policy.pt`."""
        super().__init__()
        self.policy = policy

    @torch.jit.export
    def tell(self, row_N: torch.Tensor, timed_N: torch.Tensor) -> None:
        """Ignore the number of calls of each key."""

    def forward(
        self,
        row_N: torch.Tensor,  # noqa: ARG002 - as Stateful has it
        window_NKW: torch.Tensor,
        context_NF: torch.Tensor,
        mask_NA: torch.Tensor,
    ) -> torch.Tensor:
        """(N,) actions of keys of the job."""
        return self.policy(window_NKW, context_NF, mask_NA)[0]  # type: ignore[no-any-return]


class Stateful(nn.Module):
    """Queries the keys in turn, and keeps the state of the job.

    A brain is one communicator's, so that is one job. The state steps for keys that have had calls
    since they were asked about before.
    """

    #: Row of a task key -> what was decided last, and how many calls there had been.
    decided: dict[int, int]
    timed: dict[int, int]
    fresh: dict[int, bool]

    def __init__(self, policy: Any) -> None:
        """Take a loaded `policy.pt` with a state."""
        super().__init__()
        self.policy = policy
        self.decided, self.timed, self.fresh = {}, {}, {}
        self.h = torch.zeros(1, int(policy.state_units))
        self.c = torch.zeros(1, int(policy.state_units))

    @torch.jit.export
    def tell(self, row_N: torch.Tensor, timed_N: torch.Tensor) -> None:
        """Take the number of calls of each key; -1 where the leader does not tell."""
        rows: list[int] = row_N.tolist()
        counts: list[int] = timed_N.tolist()
        for index in range(len(rows)):
            row, count = rows[index], counts[index]
            self.fresh[row] = count < 0 or self.timed.get(row, -1) != count
            self.timed[row] = count

    def forward(
        self,
        row_N: torch.Tensor,
        window_NKW: torch.Tensor,
        context_NF: torch.Tensor,
        mask_NA: torch.Tensor,
    ) -> torch.Tensor:
        """(N,) actions of keys of the job, in this order."""
        rows: list[int] = row_N.tolist()
        found: list[torch.Tensor] = []
        for index in range(len(rows)):
            row = rows[index]
            decided = torch.tensor([self.decided.get(row, -1)])
            action, _, h, c = self.policy.step(
                window_NKW[index : index + 1],
                context_NF[index : index + 1],
                mask_NA[index : index + 1],
                decided,
                self.h,
                self.c,
            )
            if self.fresh.get(row, True):
                self.h, self.c = h, c
            self.decided[row] = int(action)
            found.append(action)
        return torch.cat(found)


def asking(policy: Any) -> Any:
    """The wrapper that queries a loaded `policy.pt`."""
    return Stateful(policy) if hasattr(policy, "state_units") else Stateless(policy)
