"""V-trace: off-policy corrected targets (Espeholt et al. 2018, section 4.1)."""

import torch


def vtrace(
    log_ratio_TR: torch.Tensor,
    reward_TR: torch.Tensor,
    value_SR: torch.Tensor,
    gamma: float,
    *,
    rho_most: float,
    c_most: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of the values, and advantages of the actions, both (T, R).

    `log_ratio_TR` is ln pi(a) / mu(a) of the actions that were taken, `value_SR` (T + 1, R) has the
    value after the last.

        v_t = V_t + d_t + gamma c_t (v_(t+1) - V_(t+1)),  d_t = rho_t (r_t + gamma V_(t+1) - V_t)
        advantage = rho_t (r_t + gamma v_(t+1) - V_t)

    rho and c are the ratio, clipped from above. On policy v_t is the n-step return.

    >>> off = vtrace(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]),
    ...              torch.tensor([[0.0], [0.0], [4.0]]), 0.5, rho_most=1.0, c_most=1.0)
    >>> off[0].flatten().tolist()
    [3.0, 4.0]
    """
    ratio_TR = log_ratio_TR.exp()
    rho_TR, c_TR = ratio_TR.clamp(max=rho_most), ratio_TR.clamp(max=c_most)
    delta_TR = rho_TR * (reward_TR + gamma * value_SR[1:] - value_SR[:-1])
    off_R = torch.zeros_like(value_SR[0])
    target = []
    for step in reversed(range(len(delta_TR))):
        off_R = delta_TR[step] + gamma * c_TR[step] * off_R
        target.append(value_SR[step] + off_R)
    target_TR = torch.stack(target[::-1])
    after_TR = torch.cat([target_TR[1:], value_SR[-1:]])
    return target_TR, rho_TR * (reward_TR + gamma * after_TR - value_SR[:-1])
