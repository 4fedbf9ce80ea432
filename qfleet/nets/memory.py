"""Memory: a recurrent cell between torso and head. Shapes: T rows, N items, F features, H cell size, S state size.

A policy's whole memory is one vector per lane, so that it can be stored and sent like an observation: what the cell
holds, then the previous action as one-hot, then the previous reward.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class Memory(nn.Module):
    """An LSTM or GRU cell that also sees the previous action and reward (Kapturowski et al. 2019)."""

    def __init__(self, features: int, size: int, actions: int, kind: Literal["lstm", "gru"] = "lstm") -> None:
        super().__init__()
        inputs = features + actions + 1
        self.cell = nn.LSTMCell(inputs, size) if kind == "lstm" else nn.GRUCell(inputs, size)
        self.size = size
        self.actions = actions
        self.held = 2 * size if kind == "lstm" else size  # numbers the cell carries along

    @property
    def state_size(self) -> int:
        """S: numbers in a lane's state."""
        return self.held + self.actions + 1

    def blank(self, num: int, device: torch.device | None = None) -> Tensor:  # [N, S]
        """The state at the beginning of an episode."""
        return torch.zeros(num, self.state_size, device=device)

    def step(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # [N, F], [N, S] -> [N, H], [N, held]
        """One row: what the cell makes of it, and what it holds afterwards."""
        inputs = torch.cat([features, state[:, self.held : -1], squash(state[:, -1:])], 1)
        if isinstance(self.cell, nn.LSTMCell):
            hidden, carry = self.cell(inputs, (state[:, : self.size], state[:, self.size : self.held]))
            return hidden, torch.cat([hidden, carry], 1)
        hidden = self.cell(inputs, state[:, : self.size])
        return hidden, hidden

    def unroll(
        self, features: Tensor, action: Tensor, gain: Tensor, last: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:  # [T, N, F], [T, N], [T, N], [T, N], [N, S] -> [T, N, H], [N, S]
        """T rows one after the other; after a `last` row the state is blank again."""
        seen = functional.one_hot(action, self.actions).to(features.dtype)
        outs = []
        for row, now in enumerate(features.unbind(0)):
            out, held = self.step(now, state)
            outs.append(out)
            state = torch.cat([held, seen[row], gain[row].unsqueeze(1)], 1) * ~last[row].unsqueeze(1)
        return torch.stack(outs), state


def squash(reward: Tensor) -> Tensor:
    """Rewards of any size as numbers near one: sign(r) log(1 + |r|)."""
    return torch.sign(reward) * torch.log1p(reward.abs())
