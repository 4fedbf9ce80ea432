"""What a callback sees of a run, and what it may ask for. Shapes: N items."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qfleet.act import Policy
from qfleet.build.components import Components
from qfleet.build.seeds import CALLBACKS, stream
from qfleet.data import Array, Batch, Sequences
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan
from qfleet.training.callbacks.requests import RunRequests
from qfleet.training.log.run_status import Ending, Row

if TYPE_CHECKING:
    from qfleet.training.callbacks.settings import ChangeableSettings
    from qfleet.training.log.run_log import RunLog


class LearnerView:
    """The learner; of several learners the one of this process, whose weights count."""

    __slots__ = ("_components", "_run_log")

    def __init__(self, run_log: "RunLog") -> None:
        self._components = run_log.components
        self._run_log = run_log

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._components.learner.updates

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update, schedule included."""
        return self._components.learner.current_rate()

    @property
    def loss(self) -> float | None:
        """The loss of the last update; None before the first one."""
        return self._run_log.train_state.last_loss

    @property
    def gradient_norm(self) -> float:
        """The norm of the last update's gradient, before clipping."""
        return self._run_log.train_state.gradient_norm

    @property
    def value_mean(self) -> float:
        """The mean value that the network gave to the last update's actions."""
        return self._run_log.train_state.value_mean

    @property
    def batch_size(self) -> int | None:
        """Items in the next batch; None where fresh experience is cut into minibatches."""
        return getattr(self._components.batch_source, "batch_size", None)

    def weights(self) -> dict[str, Array]:
        """A copy of the online network's weights, by name."""
        return {name: np.array(value) for name, value in self._components.learner.model_arrays().items()}


class ReplayView:
    """The replay. Reading it changes neither its contents nor the run's random numbers."""

    __slots__ = ("_components", "_rng")

    def __init__(self, components: Components) -> None:
        self._components = components
        self._rng = stream(components.plan.seed, CALLBACKS)

    def __len__(self) -> int:
        """Items that can be drawn; where the replay has a process of its own, this asks that process."""
        return len(self._components.batch_source.replay)

    @property
    def capacity(self) -> int:
        """The most items it can hold."""
        return self._components.batch_source.replay.capacity

    def sample(self, size: int, rng: np.random.Generator | None = None) -> Batch | Sequences | None:
        """A uniform sample of `size` items with replacement, in new memory; None while the replay is empty.

        Without an `rng` it draws from a generator that only callbacks use.
        """
        require_size(size)
        replay = self._components.batch_source.replay
        tail = replay.tail
        head = replay.head
        if head <= tail:
            return None
        return self._read((self._rng if rng is None else rng).integers(tail, head, size))

    def newest(self, size: int) -> Batch | Sequences | None:
        """The newest items, the oldest of them first; fewer than `size` if it holds fewer, None if it is empty."""
        require_size(size)
        replay = self._components.batch_source.replay
        tail = replay.tail
        head = replay.head
        return None if head <= tail else self._read(np.arange(max(tail, head - size), head))

    def _read(self, serials: Array) -> Batch | Sequences:
        return self._components.batch_source.replay.read_batch(serials, np.ones(len(serials), np.float32))


def require_size(size: int) -> None:
    """Refuse a number of items that is none."""
    if size < 1:
        raise UsageError(f"{size} items cannot be read from the replay", "There must be one at least.", "Ask for 32.")


@dataclass
class RunMoment:
    """What callbacks see of the moment in which they are called."""

    new_steps: int = 0
    checkpoint: Path | None = None
    ending: Ending | None = None
    score: Row | None = None


class RunView:
    """A run as its callbacks see it. Its attributes cannot be set; its methods ask the run for something.

    A request is carried out at the next safe point: when the present turn of the training loop is over.
    """

    __slots__ = ("_components", "_learner", "_moment", "_replay", "_requests", "_run_log", "_settings")

    def __init__(
        self, run_log: "RunLog", settings: "ChangeableSettings", requests: RunRequests, moment: RunMoment
    ) -> None:
        self._components = run_log.components
        self._run_log = run_log
        self._settings = settings
        self._requests = requests
        self._moment = moment
        self._learner = LearnerView(run_log)
        self._replay = ReplayView(run_log.components)

    # What it sees

    @property
    def plan(self) -> Plan:
        """The plan with every setting chosen, as in run.toml."""
        return self._components.plan

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run_log.folder

    @property
    def policy(self) -> Policy:
        """The policy that is evaluated and saved: of a population, the leader's. Look at it, do not change it."""
        return self._components.policy

    @property
    def learner(self) -> LearnerView:
        """Weights, learning rate, and numbers of the last update."""
        return self._learner

    @property
    def replay(self) -> ReplayView:
        """The replay: its size, and items to look at. Of several actor-learners, that of this process."""
        return self._replay

    @property
    def env_steps(self) -> int:
        """Environment steps so far, of all actors and learners."""
        return self._components.steps

    @property
    def new_steps(self) -> int:
        """Environment steps since the last call of `on_step`."""
        return self._moment.new_steps

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._components.learner.updates

    @property
    def episodes(self) -> int:
        """Training episodes that have ended so far."""
        return self._run_log.train_state.episodes

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, those before a resume included."""
        return self._run_log.seconds()

    @property
    def return_mean(self) -> float | None:
        """Mean return of the newest 100 training episodes; None before the first one has ended."""
        return self._run_log.train_state.return_mean()

    @property
    def last_evaluation(self) -> Row | None:
        """The row of the last validation, without its list of returns; None before the first one."""
        return copied(self._run_log.train_state.last_eval)

    @property
    def best_evaluation(self) -> Row | None:
        """The row of the best validation so far."""
        return copied(self._run_log.train_state.best)

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint."""
        return self._moment.checkpoint

    @property
    def ending(self) -> Ending | None:
        """In `on_end`: state, exit code and reason; None before."""
        return self._moment.ending

    @property
    def score(self) -> Row | None:
        """In `on_end`: the evaluation on test episodes, if the run got that far."""
        return copied(self._moment.score)

    # What it may ask for

    def log(self, name: str, value: Any) -> None:
        """Show a number in the next progress row, as `callback.NAME`; of several values the newest one.

        Args:
            name: of the metric; rows have it as `callback.NAME`.
            value: a number.
        """
        self._requests.add_metric(name, value, mean=False)

    def log_mean(self, name: str, value: Any) -> None:
        """Show the mean of all values since the last progress row, as `callback.NAME`.

        Args:
            name: of the metric; rows have it as `callback.NAME`.
            value: a number.
        """
        self._requests.add_metric(name, value, mean=True)

    def request_save(self) -> None:
        """Save a checkpoint at the next safe point."""
        self._requests.save = True

    def request_evaluation(self) -> None:
        """Evaluate the policy at the next safe point, besides the evaluations of the plan."""
        if not self.plan.eval.episodes:
            raise UsageError(
                "a callback asked for an evaluation, but eval.episodes=0",
                "The plan says that there are no validation episodes.",
                "Set eval.episodes to 20 or so.",
            )
        self._requests.evaluate = True

    def stop(self, reason: str = "", *, done: bool = False) -> None:
        """End the run at the next safe point: as one that can be resumed, or as done, with its score on test seeds.

        Args:
            reason: a few words for status.json.
            done: True: the run counts as done, with exit code 0 and a test score.
        """
        self._requests.stop(reason, done=done)

    def change(self, path: str, value: float) -> None:
        """Change `optim.learning_rate`, `algo.batch_size` or `until.steps` from the next safe point on.

        Args:
            path: of the setting, such as "optim.learning_rate".
            value: the new value.
        """
        self._requests.changes[path] = self._settings.checked(path, value)


def copied(row: Row | None) -> Row | None:
    """A copy, so that the run's own row stays as it is."""
    return None if row is None else dict(row)
