"""Returns of whole stretches of experience. Shapes: T rows, B lanes."""

import torch
from torch import Tensor


def lambda_returns(reward: Tensor, discount: Tensor, value: Tensor, last: Tensor, trace: float) -> Tensor:
    """Q(lambda) returns (Gallici et al. 2024, eq. 9), computed from the end.

    G_t = r_t + discount_t [(1 - lambda) V_{t+1} + lambda G_{t+1}]. The last row, and one whose successor holds a final
    observation, takes V_{t+1} alone: nothing is known of what would have come after.

    reward, discount [T, B]: discount is gamma, or 0 where the world ended; value [T + 1, B] max_a Q; last [T + 1, B].
    """
    after = value[-1]
    returns = torch.empty_like(reward)
    for row in range(len(reward) - 1, -1, -1):
        if row == len(reward) - 1:
            mixed = value[row + 1]
        else:
            mixed = torch.where(last[row + 1], value[row + 1], (1.0 - trace) * value[row + 1] + trace * after)
        after = returns[row] = reward[row] + discount[row] * mixed
    return returns
