"""The page for newcomers and the library's inline runtime are one algorithm: the same updates, bit for bit."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from examples import one_file_dqn
from qfleet.build.make import make_components
from qfleet.build.seeds import EXPLORE, SAMPLE, WEIGHTS, stream
from qfleet.build.worlds import make_train_world
from qfleet.envs.episodes import TRAIN
from qfleet.plan.schema import (
    Adam,
    Algo,
    AverageTarget,
    BufferReplay,
    DoubleRule,
    Env,
    LinearEpsilon,
    MlpTorso,
    Net,
    Plan,
    UniformSampler,
)
from qfleet.training.inline import InlineLoop

Learned = tuple[list[tuple[int, list[float]]], list[torch.Tensor]]

FILE = Path(one_file_dqn.__file__)
SEED = 3
# Small enough that the ring wraps and old steps are forgotten on the way.
SETTINGS = one_file_dqn.Settings(
    capacity=500, learn_start_steps=200, steps_per_update=4, batch_size=32, learning_rate=1e-3, epsilon_steps=800
)
UPDATES = 500


def plan_of(settings: one_file_dqn.Settings) -> Plan:
    """The page's settings as a plan."""
    return Plan(
        env=Env(id="CartPole-v1", num=settings.lanes),
        algo=Algo(
            rule=DoubleRule(),
            discount=settings.discount,
            explore=LinearEpsilon(start=1.0, end=settings.epsilon_end, steps=settings.epsilon_steps),
            target=AverageTarget(tau=settings.tau),
            learn_start_steps=settings.learn_start_steps,
            batch_size=settings.batch_size,
            loss="huber",
        ),
        optim=Adam(learning_rate=settings.learning_rate, clip_norm=None),
        net=Net(torso=MlpTorso(sizes=(128, 128))),
        replay=BufferReplay(
            capacity=settings.capacity,
            sampler=UniformSampler(),
            samples_per_insert=settings.batch_size / settings.steps_per_update,
        ),
        seed=SEED,
    )


def by_the_library(plan: Plan) -> Learned:
    """Steps and losses of every turn, and the weights after the last."""
    components = make_components(plan, make_train_world(plan))
    components.actor.start()
    runtime, turns = InlineLoop(components), []
    while components.learner.updates < UPDATES:
        losses = [tick.stats["loss"] for tick in runtime.turn() if "loss" in tick.stats]
        turns.append((components.actor.steps, losses))
    components.close()
    return turns, list(components.learner.net.parameters())


def by_the_page(settings: one_file_dqn.Settings) -> Learned:
    """The same from the page, given the generators that the library would make."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(SEED, WEIGHTS).integers(2**63)))
        net = one_file_dqn.make_net()
    envs = CartPoleVectorEnv(settings.lanes)
    envs.np_random = np.random.Generator(np.random.Philox(np.random.SeedSequence((SEED, TRAIN))))
    turns: list[tuple[int, list[float]]] = []
    for turn in one_file_dqn.train(settings, envs, net, stream(SEED, EXPLORE), stream(SEED, SAMPLE)):
        turns.append(turn)
        if sum(len(losses) for _, losses in turns) >= UPDATES:
            break
    return turns, list(net.parameters())


@pytest.fixture(scope="module")
def learned() -> Learned:
    return by_the_library(plan_of(SETTINGS))


def test_the_same_updates_bit_for_bit(learned: Learned) -> None:
    library, weights = learned
    page, page_weights = by_the_page(SETTINGS)
    assert page == library
    assert library[-1][0] > 3 * SETTINGS.capacity
    assert all(torch.equal(a, b) for a, b in zip(page_weights, weights, strict=True))


@pytest.mark.parametrize("change", [{"discount": 0.98}, {"tau": 0.03}, {"epsilon_end": 0.06}, {"capacity": 480}])
def test_any_other_setting_shows(learned: Learned, change: dict[str, float]) -> None:
    library, _ = learned
    page, _ = by_the_page(replace(SETTINGS, **change))  # type: ignore[arg-type]
    assert page != library


def test_the_page_stands_alone() -> None:
    text = FILE.read_text("utf-8")
    assert "import qfleet" not in text
    assert "from qfleet" not in text
    assert len(text.splitlines()) <= 180


@pytest.mark.learning
def test_the_page_balances_the_pole() -> None:
    """CartPole-v1, the page's own seed, at most 100k steps: mean of 20 fresh greedy episodes >= 475."""
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, timeout=110, check=True)
    assert float(done.stdout.split()[-1]) >= 475
