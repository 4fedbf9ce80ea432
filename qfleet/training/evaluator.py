"""The judge: the greedy policy on worlds of its own. Validation seeds steer the run, test seeds only report."""

from collections.abc import Callable
from typing import Any

from qfleet.act import EvaluationResult, Policy, lanes_for, play
from qfleet.build.components import EnvMaker
from qfleet.data import World
from qfleet.envs import TEST, VALIDATION, make_world
from qfleet.plan.schema import Plan
from qfleet.watch import summarize


class Evaluator:
    """Evaluates a policy; the validation world is kept between calls."""

    def __init__(self, plan: Plan, make: EnvMaker | None = None) -> None:
        self.plan = plan
        self.make = make
        self.validation: World | None = None

    def world(self, stream: int, episodes: int) -> World:
        """Worlds for so many episodes side by side."""
        return make_world(
            self.plan.env,
            seed=self.plan.seed,
            stream=stream,
            num=lanes_for(episodes),
            make=self.make,
            threads=self.plan.runtime.threads or 1,
        )

    def validate(self, policy: Policy, stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """The same validation episodes each time; None when it was cut short."""
        episodes = self.plan.eval.episodes
        self.validation = self.validation or self.world(VALIDATION, episodes)
        played = play(policy, self.validation, episodes, max_steps=self.plan.eval.max_steps, stop=stop)
        return None if stop() else evaluation("validation", played)

    def test(
        self, policy: Policy, episodes: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any] | None:
        """Episodes nothing else in the run has seen; None when it was cut short."""
        episodes = episodes or self.plan.eval.test_episodes
        world = self.world(TEST, episodes)
        try:
            played = play(policy, world, episodes, max_steps=self.plan.eval.max_steps, stop=stop)
        finally:
            world.close()
        return None if stop() else evaluation("test", played)

    def close(self) -> None:
        """Let go of the validation world."""
        if self.validation is not None:
            self.validation.close()
            self.validation = None


def evaluation(split: str, played: EvaluationResult) -> dict[str, Any]:
    """The fields of an evaluation row."""
    return {"split": split, "epsilon": 0.0, **played.row(), **summarize(played.returns)}
