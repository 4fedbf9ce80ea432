"""Fitted Q evaluation (Le, Voloshin and Yue 2019): the values of a given policy, learned from recorded steps.

A network learns Q(s, a) = r + gamma sum_a' pi(a' | s') Q(s', a') on some episodes; its values in the first states of
the others estimate the policy's discounted return. Shapes: N episodes, M steps, F features, A actions, S seeds.
"""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.data import Array
from qfleet.datasets.estimates.estimate import DataEstimate, refuse, too_few
from qfleet.datasets.estimates.intervals import percentiles, resample_counts
from qfleet.datasets.estimates.valued_episode import ValuedEpisode

MIN_COVERAGE = 0.05  # the mean probability that the evaluated policy gives to recorded actions
ROWS_PER_BLOCK = 1_024
SPARE = 1.05  # a fit may be so much above the largest return that there can be


@dataclass(frozen=True, slots=True)
class FittedQSettings:
    """How the network is fitted; the same settings and seed give the same numbers."""

    gamma: float
    num_seeds: int = 3
    updates: int = 4_000
    batch_size: int = 256
    learning_rate: float = 1e-3
    target_rate: float = 0.05  # of the moving average that targets are computed with
    sizes: tuple[int, ...] = (64, 64)  # none: linear in the features
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """The steps of several episodes."""

    obs: Array  # [N + M, F], with the last observation of every episode
    target: Array  # [N + M, A]
    rows: Array  # [M] the row of the observation before each step; the next one is after it
    action: Array  # [M]
    reward: Array  # [M]
    bootstrap: Array  # [M]
    returns: Array  # [M]


def is_fitted(id: str, seed: int) -> bool:
    """Is this episode one that the network is fitted on? Half of all are, by their hash."""
    return hashlib.sha256(f"fitted {seed}\n{id}".encode()).digest()[0] < 128


def step_table(episodes: Sequence[ValuedEpisode], gamma: float) -> StepTable:
    """The steps of these episodes, one after the other."""
    starts = np.cumsum([0, *(each.num_steps + 1 for each in episodes)])
    rows = [begin + np.arange(each.num_steps) for begin, each in zip(starts[:-1], episodes, strict=True)]
    return StepTable(
        obs=np.concatenate([each.obs.reshape(len(each.obs), -1) for each in episodes]),
        target=np.concatenate([each.target for each in episodes]).astype(np.float32),
        rows=np.concatenate(rows),
        action=np.concatenate([each.action for each in episodes]),
        reward=np.concatenate([each.reward for each in episodes]).astype(np.float32),
        bootstrap=np.concatenate([each.bootstrap for each in episodes]).astype(np.float32),
        returns=np.concatenate([each.returns(gamma) for each in episodes]),
    )


def feature_scale(obs: Array) -> tuple[Array, Array]:  # [M, F] -> [F], [F]
    """The mean and the deviation of every feature, in blocks: as float64 all rows may not fit into memory."""
    blocks = [obs[at : at + ROWS_PER_BLOCK] for at in range(0, len(obs), ROWS_PER_BLOCK)]
    mean = np.sum([block.sum(0, dtype=np.float64) for block in blocks], axis=0) / len(obs)
    squares = np.sum([((block - mean) ** 2).sum(0) for block in blocks], axis=0)
    return mean, np.sqrt(squares / len(obs))


class ScaledNet(nn.Module):
    """Values from features, on the scale of the recorded returns, with which learning begins."""

    def __init__(self, table: StepTable, sizes: tuple[int, ...]) -> None:
        super().__init__()
        mean, deviation = feature_scale(table.obs)
        self.mean = torch.from_numpy(mean.astype(np.float32))
        self.deviation = torch.from_numpy(np.where(deviation > 1e-6, deviation, 1.0).astype(np.float32))
        self.offset = float(table.returns.mean())
        self.scale = max(1e-6, float(table.returns.std()))
        widths = [table.obs.shape[1], *sizes]
        layers: list[nn.Module] = []
        for before, width in pairwise(widths):
            layers += [nn.Linear(before, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], table.target.shape[1]))

    def forward(self, obs: Tensor) -> Tensor:  # [B, F] -> [B, A]
        """The values in the units of returns."""
        out: Tensor = self.layers((obs.float() - self.mean) / self.deviation)
        return self.offset + self.scale * out


def fit(table: StepTable, settings: FittedQSettings, seed: int) -> ScaledNet:
    """The network of one seed."""
    rng = np.random.Generator(np.random.Philox(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ScaledNet(table, settings.sizes)
    averaged = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), settings.learning_rate)
    for update in range(settings.updates):
        for group in optimizer.param_groups:  # falls to a tenth, so that the last values do not jump about
            group["lr"] = settings.learning_rate * (1.0 - 0.9 * update / settings.updates)
        items = rng.integers(0, len(table.rows), settings.batch_size)
        loss = fitting_loss(net, averaged, table, items, settings.gamma)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for moving, now in zip(averaged.parameters(), net.parameters(), strict=True):
                moving.lerp_(now, settings.target_rate)
    return net


def fitting_loss(net: ScaledNet, averaged: ScaledNet, table: StepTable, items: Array, gamma: float) -> Tensor:
    """The mean squared error, in units of the scale, against r + gamma sum_a pi(a | s') Q(s', a)."""
    rows = table.rows[items]
    action = torch.from_numpy(table.action[items])[:, None]
    with torch.no_grad():
        following = averaged(torch.from_numpy(table.obs[rows + 1]))
        expected = (torch.from_numpy(table.target[rows + 1]) * following).sum(1)
        target = torch.from_numpy(table.reward[items]) + gamma * torch.from_numpy(table.bootstrap[items]) * expected
    values = net(torch.from_numpy(table.obs[rows])).gather(1, action)[:, 0]
    loss: Tensor = (((values - target) / net.scale) ** 2).mean()
    return loss


def first_values(net: ScaledNet, episodes: Sequence[ValuedEpisode]) -> Array:  # [N]
    """sum_a pi(a | s_0) Q(s_0, a) of every episode."""
    obs = np.stack([each.obs[0].reshape(-1) for each in episodes])
    target = np.stack([each.target[0] for each in episodes])
    with torch.inference_mode():
        found: Array = (net(torch.from_numpy(obs)).numpy().astype(np.float64) * target).sum(1)
    return found


def fitted_q_estimate(
    episodes: Sequence[ValuedEpisode], settings: FittedQSettings, show: Callable[[str], object] = lambda text: None
) -> DataEstimate:
    """The policy's discounted return: the mean over seeds and over episodes that were not fitted on."""
    fitted = [each for each in episodes if is_fitted(each.id, settings.seed)]
    others = [each for each in episodes if not is_fitted(each.id, settings.seed)]
    if reason := too_few(min(len(fitted), len(others)), "episodes to fit on and as many others"):
        return refuse(reason)
    table = step_table(fitted, settings.gamma)
    coverage = float(np.mean(table.target[table.rows, table.action]))
    support = {"fitted_episodes": float(len(fitted)), "other_episodes": float(len(others)), "coverage": coverage}
    if coverage < MIN_COVERAGE:
        return refuse(f"the policy would do {coverage:.1%} of what was recorded; {MIN_COVERAGE:.0%} is needed", support)
    nets = []
    for number in range(settings.num_seeds):
        show(f"fitted Q evaluation {number + 1} of {settings.num_seeds}: {settings.updates:,} updates")
        nets.append(fit(table, settings, settings.seed + number))
    values = np.stack([first_values(net, others) for net in nets])  # [S, N]
    support["deviation_of_seeds"] = float(values.mean(1).std())
    return bounded(values, return_limit(episodes, settings.gamma), support, settings.seed)


def return_limit(episodes: Sequence[ValuedEpisode], gamma: float) -> float:
    """No return can be larger: every step with the largest recorded reward."""
    largest = max(float(np.abs(each.reward).max()) for each in episodes)
    longest = max(each.num_steps for each in episodes)
    return largest * (longest if gamma == 1.0 else 1.0 / (1.0 - gamma))


def bounded(values: Array, limit: float, support: dict[str, float], seed: int) -> DataEstimate:  # [S, N]
    """The mean with its interval over first states and seeds, but not over fitted episodes; refused if impossible."""
    value = float(values.mean())
    if not np.isfinite(value) or abs(value) > SPARE * limit:
        return refuse(f"the fit diverged: {value:.4g}, and no return is larger than {limit:.4g}", support)
    by_episode = resample_counts(values.shape[1], seed).astype(np.float64)
    by_seed = resample_counts(len(values), seed + 1).astype(np.float64)
    means = ((by_seed @ values) * by_episode).sum(1) / values.size
    return DataEstimate(value, *percentiles(means), support=support)
