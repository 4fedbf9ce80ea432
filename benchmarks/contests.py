"""What `benchmarks.speed` measures: each contest's contestants, their command lines, and the bars."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import command, peers
from benchmarks.pace import (
    CAPACITY,
    EPSILON,
    LEARN_START,
    PONG,
    bare_updates_per_second,
    first_update_seconds,
    gigabytes_per_million,
    steps_per_second,
    updates_per_second,
    whole_seconds,
)

Read = Callable[[command.Finished], float | None]
OURS, CEILING = "qfleet", "ceiling"
MANY_STEPS = 1_000_000  # of Pong that have to fit into memory
MEMORY_BAR_GIGABYTES = 7.4


@dataclass(frozen=True)
class Contestant:
    """Somebody's command; {seconds} in it is how long to measure. `times` brings the figure to the contest's unit."""

    name: str
    words: tuple[str, ...]
    read: Read
    times: float = 1.0
    peer: bool = False

    def command(self, seconds: float) -> list[str]:
        """The command line."""
        return [word.format(seconds=seconds) for word in self.words]


@dataclass(frozen=True)
class Contest:
    """One line of the table. Ours over a peer's and over the ceiling's figure has to reach the bars.

    With `less` ours has to stay below them. Without a ceiling `limit` is the bar for our own figure.
    """

    name: str
    what: str
    unit: str
    ours: Contestant
    peers: tuple[Contestant, ...] = ()
    ceiling: Contestant | None = None
    ceiling_is: str = ""
    peer_bar: float | None = None
    ceiling_bar: float | None = None
    limit: float | None = None
    less: bool = False
    rounds: int | None = None
    warm: bool = False  # a first round that does not count

    def field(self, with_peers: bool) -> list[Contestant]:
        """Who takes part."""
        rest = [*(self.peers if with_peers else ()), *([self.ceiling] if self.ceiling else [])]
        return [self.ours, *rest]


def here(module: str, *words: str) -> tuple[str, ...]:
    """One of our modules by our Python."""
    return (sys.executable, "-m", f"benchmarks.{module}", *words)


def ours(env: str, *words: str, preset: str = "dqn", read: Read = steps_per_second) -> Contestant:
    """Real training by a plan, with as much exploration as everybody has."""
    explore = ("algo.explore.type=constant", f"algo.explore.epsilon={EPSILON}")
    flags = ("--preset", preset, "--seconds", "{seconds}")
    return Contestant(OURS, here("timed", env, *flags, *explore, *words), read)


def peer(name: str, module: str, contest: str, *words: str, read: Read = steps_per_second) -> Contestant:
    """A peer's training, by the peers' Python."""
    flags = ("--seconds", "{seconds}", *words)
    return Contestant(name, tuple(peers.command(f"benchmarks.{module}", contest, *flags)), read, peer=True)


def bare(case: str, times: float = 1.0) -> Contestant:
    """Updates and nothing else."""
    return Contestant(CEILING, here("ceiling", case, "--seconds", "{seconds}"), bare_updates_per_second, times)


PICTURES = (
    f"replay.capacity={CAPACITY}",
    f"algo.learn_start_steps={LEARN_START}",
    "algo.batch_size=32",
    "replay.samples_per_insert=8",
    "log.every_steps=200",
)
PRIORITIZED = ("replay.sampler.type=prioritized", "algo.n_step=3", "algo.rule.type=double", "net.dueling=true")
FRESH = ("env.num=8", "replay.rows=128", "replay.epochs=4", "replay.minibatches=4", "log.every_steps=1024")
# The peers and the ceilings of these two learn by single steps and the plain maximum: so do we here.
SMALL = (
    "env.num=8",
    "algo.rule.type=max",
    "algo.n_step=1",
    f"algo.learn_start_steps={LEARN_START}",
    "net.torso.type=mlp",
    "net.torso.sizes=[120,84]",
    "algo.target.type=copy",
    "algo.batch_size=128",
    "replay.samples_per_insert=32",
    "replay.capacity=50000",
)
# One core learns, the other acts.
GRID = (
    "runtime.compile=true",
    "runtime.type=processes",
    "runtime.threads=1",
    "env.num=8",
    f"algo.learn_start_steps={LEARN_START}",
    "algo.rule.type=max",
    "algo.n_step=1",
    "replay.capacity=100000",
    "log.every_steps=1000",
)
SLOW = ("env.num=8", "env.workers=2", f"algo.learn_start_steps={LEARN_START}", "log.every_steps=200")
IMPORTS = (sys.executable, "-c", "import torch, gymnasium")
# The first row comes with the first updates; nothing after it matters.
START = ("log.every_steps=1008", "until.steps=1200", "eval.episodes=0", "eval.test_episodes=0")


def threaded(name: str, contest: str, read: Read = steps_per_second) -> tuple[Contestant, ...]:
    """Stable-Baselines3 on one and on two torch threads: which is faster depends on the machine."""
    return tuple(
        peer(f"{name}, {num} thread{'s' * (num > 1)}", "peer_sb3", contest, "--threads", str(num), read=read)
        for num in (1, 2)
    )


def contests(out: str, steps: int = MANY_STEPS) -> tuple[Contest, ...]:
    """Every line of the table; `out` is a folder for runs, `steps` how many Pong steps the memory is filled with."""
    return (*pictures(), *smaller(), *rest(out, steps))


def pictures() -> tuple[Contest, ...]:
    """Pong."""
    pong_peers = (
        peer("Stable-Baselines3, 1 environment", "peer_sb3", "pong1"),
        peer("Stable-Baselines3, 8 environments", "peer_sb3", "pong8"),
        peer("CleanRL's loop", "peer_cleanrl", "pong"),
        peer("Tianshou", "peer_tianshou", "pong"),
        peer("TorchRL", "peer_torchrl", "pong"),
        peer("RLlib", "peer_rllib", "pong"),
    )
    return (
        Contest(
            "pong",
            "Pong, standard 84x84 DQN, batch 32, one update per 4 steps",
            "env steps/s",
            ours(PONG, *PICTURES),
            pong_peers,
            bare("pong", times=4),
            "the update alone, x 4 steps",
            peer_bar=1.6,
            ceiling_bar=0.85,
        ),
        Contest(
            "pong32",
            "same, held to float32",
            "env steps/s",
            ours(PONG, *PICTURES, "runtime.precision=float32"),
            ceiling=bare("pong", times=4),
            ceiling_is="the update alone, x 4 steps",
            ceiling_bar=0.85,
        ),
        Contest(
            "prioritized",
            "same with prioritised replay, n=3, Double, duelling",
            "env steps/s",
            ours(PONG, *PICTURES, *PRIORITIZED),
            ceiling=bare("pong_prioritized", times=4),
            ceiling_is="the update alone, x 4 steps",
            ceiling_bar=0.8,
        ),
        Contest(
            "pqn",
            "PQN on Pong, 8 environments, 128 rows, 4 epochs of 4 minibatches",
            "env steps/s",
            ours(PONG, *FRESH, preset="pqn"),
            (peer("CleanRL's PQN loop", "peer_cleanrl", "pqn"),),
            bare("pqn", times=64),
            "the update alone, x 64 steps",
            peer_bar=1.5,
        ),
    )


def smaller() -> tuple[Contest, ...]:
    """CartPole and MinAtar."""
    return (
        Contest(
            "cartpole",
            "CartPole, MLP 120-84, batch 128, 8 environments, one update per 4 steps",
            "updates/s",
            ours("CartPole-v1", *SMALL, read=updates_per_second),
            threaded("Stable-Baselines3", "cartpole", updates_per_second),
            bare("cartpole"),
            "the update alone, eager, fused Adam",
            peer_bar=2.0,
            ceiling_bar=0.85,
        ),
        Contest(
            "eager",
            "same, not compiled, actors in a process of their own",
            "updates/s",
            ours("CartPole-v1", *SMALL, "runtime.compile=false", "runtime.type=processes", read=updates_per_second),
            ceiling=bare("cartpole"),
            ceiling_is="the update alone, eager, fused Adam",
            ceiling_bar=0.85,
        ),
        Contest(
            "minatar",
            "MinAtar Breakout, batch 32, 8 environments, one update per 4 steps",
            "env steps/s",
            ours("MinAtar/Breakout-v0", *GRID),
            threaded("Stable-Baselines3, same network", "minatar"),
            bare("minatar", times=4),
            "the update alone, eager, x 4 steps",
            peer_bar=2.0,
        ),
    )


def rest(out: str, steps: int) -> tuple[Contest, ...]:
    """A slow environment, the start, the memory."""
    train = command.qfleet("train", "CartPole-v1", "--json", "--out", out, *START)
    fill = here("memory", "--one", "uniform", "--capacity", str(steps))
    return (
        Contest(
            "slow",
            "8 environments of 5 ms per step on 2 processes",
            "env steps/s",
            ours("benchmarks.slow_env:Slow-v0", *SLOW),
            ceiling=Contestant(CEILING, here("slow_env", "--seconds", "{seconds}"), steps_per_second, times=2),
            ceiling_is="2 x one of them alone",
            ceiling_bar=0.9,
        ),
        Contest(
            "start",
            "`qfleet train CartPole-v1`: command to first update",
            "s",
            Contestant(OURS, tuple(train), first_update_seconds),
            ceiling=Contestant(CEILING, IMPORTS, whole_seconds),
            ceiling_is='`python -c "import torch, gymnasium"`',
            ceiling_bar=1.8,
            less=True,
            rounds=5,
            warm=True,
        ),
        Contest(
            "memory",
            "memory of 1,000,000 Pong steps",
            "GB",
            Contestant(OURS, fill, gigabytes_per_million),
            limit=MEMORY_BAR_GIGABYTES,
            less=True,
            rounds=1,
        ),
    )
