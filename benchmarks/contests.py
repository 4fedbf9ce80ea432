"""What `benchmarks.speed` measures: each contest's plan and rules, and its bars on this kind of machine."""

import sys

from benchmarks import command
from benchmarks.contestants import CEILING, FEW_ROUNDS, OURS, Contest, Contestant, bare, ours, peer, threaded
from benchmarks.pace import (
    CAPACITY,
    LEARN_START,
    PONG,
    first_update_seconds,
    gigabytes_per_million,
    side_by_side_steps_per_second,
    steps_per_second,
    updates_per_second,
    whole_seconds,
)
from benchmarks.processor import has_bfloat16, kind

MANY_STEPS = 1_000_000  # of Pong that have to fit into memory
MEMORY_BAR_GIGABYTES = 7.4
# Everybody's rule: the plain maximum, rewards of one step, the Huber loss. So do the peers, who are told so.
SAME_RULE = ("algo.rule.type=max", "algo.n_step=1", "algo.loss=huber")
PACING = (
    f"replay.capacity={CAPACITY}",
    f"algo.learn_start_steps={LEARN_START}",
    "algo.batch_size=32",
    "algo.target.type=copy",
    "replay.samples_per_insert=8",
)
PICTURES = (*SAME_RULE, *PACING, "log.every_steps=200")
PRIORITIZED = (
    *PACING,
    "log.every_steps=200",
    "replay.sampler.type=prioritized",
    "algo.n_step=3",
    "algo.rule.type=double",
    "algo.loss=huber",
    "net.dueling=true",
)
FRESH = ("env.num=8", "replay.rows=128", "replay.epochs=4", "replay.minibatches=4", "log.every_steps=1024")
SMALL = (
    *SAME_RULE,
    "env.num=8",
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
    *SAME_RULE,
    "runtime.compile=true",
    "runtime.type=processes",
    "runtime.threads=1",
    "env.num=8",
    f"algo.learn_start_steps={LEARN_START}",
    "replay.capacity=100000",
    "log.every_steps=1000",
)
SLOW = ("env.num=8", "env.workers=2", f"algo.learn_start_steps={LEARN_START}", "log.every_steps=200")
IMPORTS = (sys.executable, "-c", "import torch, gymnasium")
# The first row comes with the first updates; nothing after it matters.
START = ("log.every_steps=1008", "until.steps=1200", "eval.episodes=0", "eval.test_episodes=0")


def contests(out: str, steps: int = MANY_STEPS, machine: str | None = None) -> tuple[Contest, ...]:
    """Every line of the table on a quiet machine of this kind, by default this one's.

    `out` is a folder for runs, `steps` how many Pong steps the memory is filled with.
    """
    half = has_bfloat16(machine or kind())
    return (pong(half), *more_pong(), pqn(half), seeds(out), *smaller(), slow(), start(out), memory(steps))


def pong(half: bool) -> Contest:
    """DQN on Pong beside everybody; `half` if the machine multiplies bfloat16."""
    mine = ours(PONG, *PICTURES)
    return Contest(
        "pong",
        "Pong, standard 84x84 DQN, plain maximum, one-step returns, Huber loss, batch 32, one update per 4 steps",
        "env steps/s",
        mine,
        (
            *threaded("Stable-Baselines3, 1 environment", "peer_sb3", "pong1"),
            *threaded("Stable-Baselines3, 8 environments", "peer_sb3", "pong8"),
            *threaded("CleanRL's loop", "peer_cleanrl", "pong"),
            *threaded("Tianshou", "peer_tianshou", "pong", start_seconds=10.0),
            *threaded("TorchRL", "peer_torchrl", "pong"),
            peer("RLlib", "peer_rllib", "pong", start_seconds=14.0),
        ),
        bare("pong", times=4),
        "the update alone, float32, x 4 steps",
        peer_bar=2.0 if half else 1.6,
        ceiling_bar=0.85,
        warm=mine,
        busy_peer_bar=1.5,
        alone_bar=0.95,
    )


def more_pong() -> tuple[Contest, ...]:
    """The same beside what bare torch allows."""
    return (
        Contest(
            "pong32",
            "same, held to float32",
            "env steps/s",
            ours(PONG, *PICTURES, "runtime.precision=float32"),
            ceiling=bare("pong", times=4),
            ceiling_is="the update alone, x 4 steps",
            ceiling_bar=0.85,
            rounds=FEW_ROUNDS,
        ),
        Contest(
            "prioritized",
            "same with prioritised replay, n=3, Double, duelling",
            "env steps/s",
            ours(PONG, *PRIORITIZED),
            ceiling=bare("pong_prioritized", times=4),
            ceiling_is="the update alone, float32, x 4 steps",
            ceiling_bar=0.8,
            rounds=FEW_ROUNDS,
        ),
    )


def pqn(half: bool) -> Contest:
    """PQN on Pong."""
    bar = 1.6 if half else 1.5
    mine = ours(PONG, *FRESH, preset="pqn", start_seconds=9.0)
    return Contest(
        "pqn",
        "PQN on Pong, 8 environments, 128 rows, 4 epochs of 4 minibatches",
        "env steps/s",
        mine,
        threaded("CleanRL's PQN loop", "peer_cleanrl", "pqn", start_seconds=9.0),
        bare("pqn", times=64),
        "the update alone, float32, x 64 steps",
        peer_bar=bar,
        warm=mine,
        busy_peer_bar=bar,
    )


def seeds(out: str) -> Contest:
    """A group of two beside one run that has one thread."""
    words = command.here("side_by_side", PONG, "--seconds", "{seconds}", "--out", out, *PICTURES)
    alone = ours(PONG, *PICTURES, "runtime.threads=1")
    return Contest(
        "seeds",
        "two seeds of Pong side by side, a group as it comes",
        "env steps/s",
        Contestant(OURS, words, side_by_side_steps_per_second, start_seconds=12.0),
        ceiling=Contestant(CEILING, alone.words, steps_per_second),
        ceiling_is="one run with 1 thread",
        ceiling_bar=1.8,
        warm=ours(PONG, *PICTURES),
    )


def smaller() -> tuple[Contest, ...]:
    """CartPole and MinAtar."""
    cartpole = ours("CartPole-v1", *SMALL, read=updates_per_second)
    minatar = ours("MinAtar/Breakout-v0", *GRID)
    return (
        Contest(
            "cartpole",
            "CartPole, MLP 120-84, batch 128, 8 environments, one update per 4 steps",
            "updates/s",
            cartpole,
            threaded("Stable-Baselines3", "peer_sb3", "cartpole", updates_per_second),
            bare("cartpole", threads=1),
            "the update alone, eager, fused Adam",
            peer_bar=3.0,
            ceiling_bar=0.85,
            warm=cartpole,
            busy_peer_bar=3.0,
        ),
        Contest(
            "eager",
            "same, not compiled, actors in a process of their own",
            "updates/s",
            ours("CartPole-v1", *SMALL, "runtime.compile=false", "runtime.type=processes", read=updates_per_second),
            ceiling=bare("cartpole", threads=1),
            ceiling_is="the update alone, eager, fused Adam",
            ceiling_bar=0.85,
            rounds=FEW_ROUNDS,
        ),
        Contest(
            "minatar",
            "MinAtar Breakout, batch 32, 8 environments, one update per 4 steps",
            "env steps/s",
            minatar,
            threaded("Stable-Baselines3, same network", "peer_sb3", "minatar"),
            bare("minatar", times=4),
            "the update alone, eager, x 4 steps",
            peer_bar=3.0,
            warm=minatar,
            busy_peer_bar=3.0,
        ),
    )


def slow() -> Contest:
    """Environments that take their time."""
    return Contest(
        "slow",
        "8 environments of 5 ms per step on 2 processes",
        "env steps/s",
        ours("benchmarks.slow_env:Slow-v0", *SLOW),
        ceiling=Contestant(CEILING, command.here("slow_env", "--seconds", "{seconds}"), steps_per_second, times=2),
        ceiling_is="2 x one of them alone",
        ceiling_bar=0.9,
        rounds=FEW_ROUNDS,
    )


def start(out: str) -> Contest:
    """How soon the first update comes."""
    train = command.qfleet("train", "CartPole-v1", "--json", "--out", out, *START)
    mine = Contestant(OURS, tuple(train), first_update_seconds, runs=out, start_seconds=3.5)
    return Contest(
        "start",
        "`qfleet train CartPole-v1`: command to first update",
        "s",
        mine,
        ceiling=Contestant(CEILING, IMPORTS, whole_seconds, start_seconds=2.0),
        ceiling_is='`python -c "import torch, gymnasium"`',
        ceiling_bar=1.35,
        less=True,
        rounds=5,
        warm=mine,
        timed=False,
    )


def memory(steps: int) -> Contest:
    """What a full replay takes."""
    fill = command.here("memory", "--one", "uniform", "--capacity", str(steps))
    return Contest(
        "memory",
        "memory of 1,000,000 Pong steps",
        "GB",
        Contestant(OURS, fill, gigabytes_per_million, start_seconds=steps * 2e-5),
        limit=MEMORY_BAR_GIGABYTES,
        less=True,
        rounds=1,
        timed=False,
        can_be_busy=False,
    )
