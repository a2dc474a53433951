"""A trunk with an LSTM over the decisions about all keys of a job.

    B batch, K calls in the window, W features of a call, F features of the context, H hidden size,
    U units of the state

What a key's window cannot show, the job's other keys can: they are slowed down by the same network.
The state steps once for each decision about a key that has new calls, with what is seen of it and
what was decided about it last (mvfst-rl, Sivakumar et al. 2019, section 4.1; Mnih et al. 2016,
section 5.6). The last reward is in the window as it stands, as the time of the last call.
"""

import torch
from torch import nn

from dynamiccl.train.encoders import Trunk

#: Width of what the state is told of the last decision.
_DECISION_UNITS = 8


class StatefulTrunk(nn.Module):
    """(window, context, decided, h, c) -> features (B, H + U), h, c.

    `decided` (B,) is the action that was decided last about each key, -1 = none; h and c (B, U) are
    of the LSTM, zeros where a job begins.
    """

    def __init__(self, trunk: Trunk, hidden_size: int, num_actions: int, units: int) -> None:
        """Put a state of so many units behind a trunk whose features are `hidden_size` wide."""
        super().__init__()
        self.trunk = trunk
        self.decided = nn.Embedding(num_actions + 1, _DECISION_UNITS)
        self.core = nn.LSTMCell(hidden_size + _DECISION_UNITS, units)
        self.units = units
        #: Decisions about keys of a job from one that is left to NCCL to the next; 0 = never.
        self.probe_every: torch.Tensor
        self.register_buffer("probe_every", torch.tensor(0))
        self.width = hidden_size + units

    def forward(self, window_BKW: torch.Tensor, context_BF: torch.Tensor) -> torch.Tensor:
        """Features of keys of jobs that have just begun."""
        none_B = torch.full([window_BKW.size(0)], -1, dtype=torch.int64)
        zero_BU = window_BKW.new_zeros([window_BKW.size(0), self.units])
        return self.step(window_BKW, context_BF, none_B, zero_BU, zero_BU)[0]

    @torch.jit.export
    def step(
        self,
        window_BKW: torch.Tensor,
        context_BF: torch.Tensor,
        decided_B: torch.Tensor,
        h_BU: torch.Tensor,
        c_BU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, and the state after one decision of B jobs."""
        seen_BH = self.trunk(window_BKW, context_BF)
        h_BU, c_BU = self.core(
            torch.cat([seen_BH, self.decided(decided_B + 1)], dim=1), (h_BU, c_BU)
        )
        return torch.cat([seen_BH, h_BU], dim=1), h_BU, c_BU

    def unroll(
        self,
        seen_TNKH: torch.Tensor,
        decided_TNK: torch.Tensor,
        is_new_TNK: torch.Tensor,
        h_NU: torch.Tensor,
        c_NU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`step` over T rounds of N jobs with K keys each, from the trunk's features on.

        Key after key of a round; a key without new calls sees the state and leaves it alone.
        """
        rounds, jobs, keys, _ = seen_TNKH.shape
        told = torch.cat([seen_TNKH, self.decided(decided_TNK + 1)], dim=3)
        features = []
        for each in range(rounds):
            for key in range(keys):
                h_after, c_after = self.core(told[each, :, key], (h_NU, c_NU))
                features.append(h_after)
                is_new_N1 = is_new_TNK[each, :, key].unsqueeze(1)
                h_NU = torch.where(is_new_N1, h_after, h_NU)
                c_NU = torch.where(is_new_N1, c_after, c_NU)
        state_TNKU = torch.stack(features).view(rounds, keys, jobs, -1).transpose(1, 2)
        return torch.cat([seen_TNKH, state_TNKU], dim=3), h_NU, c_NU
