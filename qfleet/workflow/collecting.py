"""Collecting a data set: a policy plays in its environment, and whole episodes are written."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from qfleet.act import Actor, Policy
from qfleet.act.explore import EpsilonGreedyExplorer
from qfleet.act.recording import RolloutRecorder
from qfleet.api import load
from qfleet.build.make import make_policy, policy_spec
from qfleet.build.resolve import resolve, usable_device
from qfleet.build.seeds import EXPLORE, stream
from qfleet.build.threads import torch_threads
from qfleet.data import Spec, World
from qfleet.datasets.format import Description, RecordedEpisode, Setting, spec_columns, write_dataset
from qfleet.datasets.storage import open_place
from qfleet.envs import TRAIN, make_world
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan

RANDOM = "random"
GREEDY = "greedy"
_EPSILON = re.compile(r"epsilon=(0(?:\.\d+)?|1(?:\.0+)?)")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Who chooses the actions: the greedy policy of a run, or with probability `epsilon` chance."""

    name: str
    epsilon: float
    run: Path | None = None


def parse_behaviour(text: str | None, run: Path | None, find: Callable[[str], Path]) -> Behaviour:
    """`random`, `greedy` or `epsilon=0.1` of the run that was named first, or the name of another run."""
    text = text or (RANDOM if run is None else GREEDY)
    if text == RANDOM:
        return Behaviour(RANDOM, 1.0)
    number = _EPSILON.fullmatch(text)
    if run is None and (text == GREEDY or number):
        raise UsageError(
            f"--policy {text} needs the policy of a run",
            "An environment was named, which has no policy of its own.",
            "Name a run first: qfleet data collect RUN URL --policy epsilon=0.1, or use --policy random.",
        )
    if number:
        return Behaviour(f"{run.name if run else ''}, {text}", float(number[1]), run)
    chosen = run if text == GREEDY and run is not None else find(text)
    return Behaviour(f"{chosen.name}, {GREEDY}", 0.0, chosen)


def collect(
    plan: Plan,
    url: str,
    behaviour: Behaviour,
    *,
    episodes: int | None = None,
    steps: int | None = None,
    trust_env: bool = False,
    show: Callable[[int, int], object] = lambda episodes, steps: None,
) -> str:
    """Write whole episodes until the wanted number of episodes or steps is reached; returns the data set's version."""
    require_amount(episodes, steps)
    with torch_threads(1), closing(make_playing_world(plan)) as world:
        description = Description(plan.env.id, world.spec, spec_columns(world.spec), world.spaces)
        played = limited(record(plan, world, behaviour, episodes, trust_env), episodes, steps, show)
        settings: dict[str, Setting] = {"made_by": "collect", "behaviour": behaviour.name, "seed": plan.seed}
        settings |= {"num_envs": plan.env.num, "episodes": episodes, "steps": steps}
        return write_dataset(open_place(url), description, played, settings)


def make_playing_world(plan: Plan) -> World:
    """The environment itself, also of a run that learned from a data set."""
    return make_world(plan.env, seed=plan.seed, stream=TRAIN)


def record(
    plan: Plan, world: World, behaviour: Behaviour, episodes: int | None, trust_env: bool
) -> Iterator[RecordedEpisode]:
    """Episodes of this behaviour, without end; with a number of `episodes` every lane plays as many."""
    policy = behaviour_policy(plan, world.spec, behaviour, trust_env)
    explorer = EpsilonGreedyExplorer(lambda step: behaviour.epsilon, world.spec.actions)
    actor = Actor(world, policy, explorer, stream(plan.seed, EXPLORE), record_probability=True)
    recorder = RolloutRecorder(
        world.spec, world.num, str(plan.seed), [behaviour.name], total_lanes=world.num, num_episodes=episodes
    )
    actor.start()
    while True:
        actor.send()
        for block in recorder.add(actor.receive()[0]):
            yield from block.episodes(plan.seed, plan.env.id)


def behaviour_policy(plan: Plan, spec: Spec, behaviour: Behaviour, trust_env: bool) -> Policy:
    """The policy of a run; for random actions a fresh one, whose values are not used."""
    import torch

    if behaviour.run is None:
        return make_policy(resolve(plan, spec), spec, torch.device(usable_device(plan)))
    policy = load(behaviour.run, trust_env=trust_env).policy
    if policy.spec is None or policy_spec(spec, policy) != policy_spec(policy.spec, policy):
        raise UsageError(
            f"the policy of {behaviour.run.name} does not fit {plan.env.id}",
            "It was trained on other observations or actions.",
            "Name a run that was trained in this environment.",
        )
    return policy


def limited(
    played: Iterator[RecordedEpisode], episodes: int | None, steps: int | None, show: Callable[[int, int], object]
) -> Iterator[RecordedEpisode]:
    """The first episodes, up to the wanted number of episodes or steps."""
    num_steps = 0
    for number, episode in enumerate(played, 1):
        yield episode
        num_steps += episode.num_steps
        show(number, num_steps)
        if number == episodes or (steps is not None and num_steps >= steps):
            return


def require_amount(episodes: int | None, steps: int | None) -> None:
    """Refuse a collection without an end."""
    if (episodes is None) == (steps is None):
        raise UsageError(
            "either --episodes or --steps must be given",
            "They say when the data set is complete.",
            "Example: qfleet data collect CartPole-v1 data/random --episodes 200",
        )
