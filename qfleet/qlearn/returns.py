"""Returns of whole stretches of experience. Shapes: T rows, B lanes."""

import torch
from torch import Tensor


def lambda_returns(reward: Tensor, discount: Tensor, value: Tensor, last: Tensor, lambda_: float) -> Tensor:
    """Q(lambda) returns (Gallici et al. 2024, eq. 9), computed from the end.

    G_t = r_t + discount_t [(1 - lambda) V_{t+1} + lambda G_{t+1}]. The last row, and one whose successor holds a final
    observation, bootstraps from V_{t+1} alone: no later reward is known.

    reward, discount [T, B]: discount is gamma, or 0 at a terminal step; value [T + 1, B] max_a Q; last [T + 1, B].
    """
    next_return = value[-1]
    returns = torch.empty_like(reward)
    for row in range(len(reward) - 1, -1, -1):
        if row == len(reward) - 1:
            mixed = value[row + 1]
        else:
            continued = (1.0 - lambda_) * value[row + 1] + lambda_ * next_return
            mixed = torch.where(last[row + 1], value[row + 1], continued)
        next_return = returns[row] = reward[row] + discount[row] * mixed
    return returns
