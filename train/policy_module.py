"""The policy as it is exported: one TorchScript module from observation to action and Q values.

B batch, K calls in the window, W features of a call, F features of the context, A actions
"""

import torch
from torch import nn

from dynamiccl.datasets.features import NOISE_FEATURE
from dynamiccl.train.networks import (
    MASKED_Q,
    Z_MAX,
    Z_MIN,
    LogTimeDuelingQFunction,
    ObservationEncoder,
)


class PolicyModule(nn.Module):
    """(window_BKW, context_BF, mask_BA) -> (action_B int64, q_BA).

    The best allowed action is taken only when its predicted log time undercuts that of ABSTAIN by
    more than `margin`, and by more than the noise band of the collective on the system (a feature
    of the context): where the policy cannot be sure, NCCL's own choice stands.
    """

    context_mean: torch.Tensor
    context_scale: torch.Tensor

    def __init__(self, q_func: LogTimeDuelingQFunction, margin: float) -> None:
        """Take over the weights and scaling of a trained Q function (not a copy)."""
        super().__init__()
        encoder = q_func.encoder
        if not isinstance(encoder, ObservationEncoder):
            raise TypeError(f"cannot export an encoder of type {type(encoder).__name__}")
        self.layers = encoder.layers
        self.value = q_func.value
        self.advantage = q_func.advantage
        self.margin = float(margin)
        self.noise_feature = NOISE_FEATURE
        self.masked_q = MASKED_Q
        self.z_min = Z_MIN
        self.z_max = Z_MAX
        self.register_buffer("context_mean", encoder.context_mean)
        self.register_buffer("context_scale", encoder.context_scale)

    def forward(
        self, window_BKW: torch.Tensor, context_BF: torch.Tensor, mask_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose; see the class."""
        scaled_BF = (context_BF - self.context_mean) / self.context_scale
        hidden_BH = self.layers(torch.cat([window_BKW.flatten(1), scaled_BF], dim=1))
        advantage_BA = self.advantage(hidden_BH)
        z_BA = self.value(hidden_BH) + advantage_BA - advantage_BA[:, 0:1]
        q_BA = (-torch.exp(z_BA.clamp(self.z_min, self.z_max))).masked_fill(
            mask_BA < 0.5, self.masked_q
        )
        allowed_z_BA = z_BA.masked_fill(mask_BA < 0.5, float("inf"))
        best_z_B, best_B = allowed_z_BA.min(dim=1)
        threshold_B = context_BF[:, self.noise_feature].clamp(min=self.margin)
        abstain_B = (allowed_z_BA[:, 0] - best_z_B) <= threshold_B
        action_B = torch.where(abstain_B, torch.zeros_like(best_B), best_B)
        return action_B, q_BA
