"""What the hardware allows: bare updates in pure torch, no environment, no replay, no qfleet. It stays as it is."""

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Update = Callable[[], None]


def rate(update: Update, seconds: float, warm: int = 5) -> float:
    """Updates per second over so many seconds, after a few that do not count."""
    for _ in range(warm):
        update()
    num, begin = 0, time.monotonic()
    while (spent := time.monotonic() - begin) < seconds or num < 3:
        update()
        num += 1
    return num / spent


def fused_adam(net: nn.Module, learning_rate: float) -> torch.optim.Adam:
    """torch's fastest optimiser."""
    return torch.optim.Adam(net.parameters(), learning_rate, eps=1.5e-4, fused=True)


def pictures(num: int) -> Tensor:  # [N, 4, 84, 84] uint8
    """Four stacked frames, as a replay hands them out."""
    return torch.randint(0, 256, (num, 4, 84, 84), dtype=torch.uint8)


def scaled(obs: Tensor) -> Tensor:
    """Bytes to floats, channels last."""
    return obs.to(torch.float32, memory_format=torch.channels_last).div_(255.0)


class Streams(nn.Module):
    """Duelling streams (Wang et al. 2016)."""

    def __init__(self, features: int, width: int, actions: int) -> None:
        super().__init__()
        self.value = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))
        self.advantage = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, actions))

    def forward(self, features: Tensor) -> Tensor:
        """Values per action."""
        advantage = self.advantage(features)
        out: Tensor = self.value(features) + advantage - advantage.mean(1, keepdim=True)
        return out


def nature(actions: int, *, dueling: bool) -> nn.Module:
    """The network of Mnih et al. 2015, channels last."""
    head = [Streams(3136, 512, actions)] if dueling else [nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions)]
    convolutions = (
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
    )
    net = nn.Sequential(*convolutions, nn.Flatten(), *head)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def pong(seconds: float = 10.0, threads: int | None = None) -> float:
    """Updates/s of plain DQN: 84x84x4, Nature network, batch 32, one-step, squared error."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    num, actions = 32, 6
    online, target = nature(actions, dueling=False), nature(actions, dueling=False).requires_grad_(False)
    optimizer = fused_adam(online, 6.25e-5)
    obs, next_obs, action = pictures(num), pictures(num), torch.randint(0, actions, (num, 1))
    reward, discount = torch.randn(num), torch.full((num,), 0.99)

    def update() -> None:
        with torch.no_grad():
            goal = reward + discount * target(scaled(next_obs)).amax(1)
        loss = functional.mse_loss(online(scaled(obs)).gather(1, action).squeeze(1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return rate(update, seconds)


def pong_prioritized(seconds: float = 10.0, threads: int | None = None) -> float:
    """Updates/s with importance weights, new priorities, three-step targets, Double and duelling streams."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    num, actions = 32, 6
    online, target = nature(actions, dueling=True), nature(actions, dueling=True).requires_grad_(False)
    optimizer = fused_adam(online, 6.25e-5)
    obs, next_obs, action = pictures(num), pictures(num), torch.randint(0, actions, (num, 1))
    reward, discount, weight = torch.randn(num), torch.full((num,), 0.99**3), torch.rand(num)

    def update() -> None:
        with torch.no_grad():
            ahead = scaled(next_obs)
            best = online(ahead).argmax(1, keepdim=True)
            goal = reward + discount * target(ahead).gather(1, best).squeeze(1)
        value = online(scaled(obs)).gather(1, action).squeeze(1)
        loss = (functional.smooth_l1_loss(value, goal, reduction="none") * weight).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        (goal - value.detach()).abs().numpy()

    return rate(update, seconds)


def normalised(actions: int) -> nn.Module:
    """The same network with layer normalisation, channels last."""
    layers: list[nn.Module] = []
    for before, after, kernel, stride in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += [nn.Conv2d(before, after, kernel, stride), nn.GroupNorm(1, after), nn.ReLU()]
    head = (nn.Flatten(), nn.Linear(3136, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, actions))
    return nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def pqn(seconds: float = 10.0, threads: int | None = None) -> float:
    """Updates/s of PQN: minibatches of 256, squared error towards returns, clipped gradients, RAdam."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    num, actions = 256, 6
    online = normalised(actions)
    optimizer = torch.optim.RAdam(online.parameters(), 2.5e-4)
    obs, action, goal = pictures(num), torch.randint(0, actions, (num, 1)), torch.randn(num)

    def update() -> None:
        loss = functional.mse_loss(online(scaled(obs)).gather(1, action).squeeze(1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()

    return rate(update, seconds)


def cartpole(seconds: float = 5.0, threads: int | None = 1) -> float:
    """Updates/s of plain DQN on four numbers: MLP 120-84, batch 128, eager, one thread (two are slower)."""
    torch.set_num_threads(threads or 1)
    num, actions = 128, 2

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions))

    online, target = mlp(), mlp().requires_grad_(False)
    optimizer = fused_adam(online, 1e-3)
    obs, next_obs, action = torch.randn(num, 4), torch.randn(num, 4), torch.randint(0, actions, (num, 1))
    reward, discount = torch.randn(num), torch.full((num,), 0.99)

    def update() -> None:
        with torch.no_grad():
            goal = reward + discount * target(next_obs).amax(1)
        loss = functional.smooth_l1_loss(online(obs).gather(1, action).squeeze(1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return rate(update, seconds, warm=50)


def minatar(seconds: float = 10.0, threads: int | None = None) -> float:
    """Updates/s of plain DQN on 10x10x4: one convolution of 16 3x3 filters, 128 units, batch 32, one-step."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    num, actions = 32, 6

    def small() -> nn.Module:
        layers = (
            nn.Conv2d(4, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1024, 128),
            nn.ReLU(),
            nn.Linear(128, actions),
        )
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    online, target = small(), small().requires_grad_(False)
    optimizer = fused_adam(online, 2.5e-4)
    obs, next_obs = (torch.randint(0, 2, (num, 4, 10, 10), dtype=torch.uint8) for _ in range(2))
    action, reward, discount = torch.randint(0, actions, (num, 1)), torch.randn(num), torch.full((num,), 0.99)

    def update() -> None:
        with torch.no_grad():
            goal = reward + discount * target(scaled(next_obs)).amax(1)
        loss = functional.smooth_l1_loss(online(scaled(obs)).gather(1, action).squeeze(1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return rate(update, seconds, warm=50)


CASES: dict[str, Callable[..., float]] = {
    "pong": pong,
    "pong_prioritized": pong_prioritized,
    "pqn": pqn,
    "cartpole": cartpole,
    "minatar": minatar,
}


def main() -> None:
    """One JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help="all of them if none is named")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    for name in given.case or CASES:
        settings = {} if given.threads is None else {"threads": given.threads}
        print(json.dumps({"case": name, "updates_per_second": CASES[name](given.seconds, **settings)}), flush=True)


if __name__ == "__main__":
    main()
