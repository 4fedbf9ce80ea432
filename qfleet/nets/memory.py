"""Memory: a recurrent cell between torso and head. Shapes: T rows, N items, F features.

A policy's recurrent state is one vector per lane, so that it can be stored and sent like an observation: the cell's
state, then the previous action as one-hot, then the previous reward. H is the cell's size, C the size of its state
(2 H for an LSTM), S the size of the whole vector.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class Memory(nn.Module):
    """An LSTM or GRU cell with the previous action and reward as inputs (Kapturowski et al. 2019)."""

    def __init__(self, features: int, size: int, actions: int, kind: Literal["lstm", "gru"] = "lstm") -> None:
        super().__init__()
        inputs = features + actions + 1
        self.cell = nn.LSTMCell(inputs, size) if kind == "lstm" else nn.GRUCell(inputs, size)
        self.size = size
        self.actions = actions
        self.cell_state_size = 2 * size if kind == "lstm" else size

    @property
    def state_size(self) -> int:
        """S: the size of a lane's state."""
        return self.cell_state_size + self.actions + 1

    def initial_state(self, num: int, device: torch.device | None = None) -> Tensor:  # [N, S]
        """The state at the beginning of an episode."""
        return torch.zeros(num, self.state_size, device=device)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # [N, F], [N, S] -> [N, H], [N, C]
        """One row: the cell's output and its next state."""
        inputs = torch.cat([features, state[:, self.cell_state_size : -1], squash(state[:, -1:])], 1)
        if isinstance(self.cell, nn.LSTMCell):
            hidden, cell = self.cell(inputs, (state[:, : self.size], state[:, self.size : self.cell_state_size]))
            return hidden, torch.cat([hidden, cell], 1)
        hidden = self.cell(inputs, state[:, : self.size])
        return hidden, hidden

    def unroll(
        self, features: Tensor, action: Tensor, reward: Tensor, last: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:  # [T, N, F], [T, N], [T, N], [T, N], [N, S] -> [T, N, H], [N, S]
        """T rows one after the other; after a `last` row the state is reset to zeros."""
        one_hot = functional.one_hot(action, self.actions).to(features.dtype)
        outs = []
        for row, row_features in enumerate(features.unbind(0)):
            out, cell_state = self.step(row_features, state)
            outs.append(out)
            state = torch.cat([cell_state, one_hot[row], reward[row].unsqueeze(1)], 1) * ~last[row].unsqueeze(1)
        return torch.stack(outs), state


def squash(reward: Tensor) -> Tensor:
    """sign(r) log(1 + |r|), which keeps rewards of any size small."""
    return torch.sign(reward) * torch.log1p(reward.abs())
