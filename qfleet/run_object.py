"""A run as a Python object: its status, its policy, evaluations, plots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.act import Policy
from qfleet.build.worlds import EnvMaker
from qfleet.envs import AnyEnv
from qfleet.escape import escaped
from qfleet.plan.local_paths import local_path
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.training.checkpoints.saved_weights import SavedWeights
from qfleet.watch import read_json, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from qfleet.training.evaluation.variants import TrainedPolicy

AnyPath = str | Path


@dataclass(eq=False)
class Run:
    """A run on disk, and the policy it made: what `train`, `resume` and `load` return.

    Attributes:
        path: the run directory.
        plan: the plan as it was run, with everything that was chosen for it.
        policy: the trained policy.
        make: makes the environments of evaluations, if the environment was a Python object; else None.
        weights: of a run that was loaded, which checkpoint its weights come from; else None.
    """

    path: Path
    plan: Plan
    policy: Policy
    make: EnvMaker | None = None  # of the user's own, for evaluations
    weights: SavedWeights | None = None  # of a run that was loaded: which checkpoint they come from

    @property
    def status(self) -> dict[str, Any]:
        """status.json as it is now: `state`, `exit_code`, `reason`, `score`, and the command that continues the run."""
        return read_json(self.path / "status.json")

    @property
    def exit_code(self) -> int:
        """What the command line would have returned."""
        return int(self.status.get("exit_code") or 0)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every row of metrics.jsonl as a dictionary; `kind` is `progress`, `eval` or `end`, among others."""
        return read_rows(self.path / "metrics.jsonl")

    def result(self) -> dict[str, Any] | None:
        """The score on test episodes (`mean`, `low`, `high`, ...), or None if the run did not get that far."""
        score: dict[str, Any] | None = self.status.get("score")
        return score

    def evaluate(
        self,
        episodes: int = 100,
        seed: int | None = None,
        *,
        env: str | EnvMaker | AnyEnv | None = None,
        options: Mapping[str, Any] | None = None,
        wrappers: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Play the greedy policy on test episodes, here or in another environment.

        Args:
            episodes: how many episodes.
            seed: another seed than the run's own means other episodes.
            env: another environment with the same spaces: its id, a function that makes it, or one of `gymnasium.make`.
            options: keyword arguments of its constructor, for another variant of it.
            wrappers: wrappers in place of the plan's.

        Returns:
            A row of kind `eval`: `mean`, its interval `low` to `high`, `median`, `iqm`, `episodes` and more.
        """
        from qfleet.training.evaluation.variants import make_variant

        return self.trained().evaluate(make_variant(env, options, wrappers), episodes, seed)

    def evaluate_variants(
        self, variants: Mapping[str, Mapping[str, Any]], episodes: int = 100, seed: int | None = None
    ) -> list[dict[str, Any]]:
        """Evaluate the greedy policy in the training environment and in variants of it.

        Args:
            variants: by name, what is different: {"windy": {"env": id, "options": {"wind": True}}}.
            episodes: how many episodes in each.
            seed: another seed than the run's own means other episodes.

        Returns:
            A row per environment with the `difference` of its mean to the first; a variant that fails has an `error`.
        """
        from qfleet.plan.validate.case import PYTHON
        from qfleet.training.evaluation.variants import OWN_WORLD, read_variants, with_differences

        named = [OWN_WORLD, *read_variants(variants, PYTHON)]
        return with_differences(self.trained().evaluate_each(named, episodes, seed))

    def trained(self) -> "TrainedPolicy":
        """The policy with all that an evaluation in any world needs."""
        from qfleet.training.evaluation.variants import TrainedPolicy

        return TrainedPolicy(self.plan, self.policy, self.make, self.weights)

    def record(self, file: AnyPath | None = None, episodes: int = 1) -> Path:
        """Make a video of the greedy policy; needs the extra `video` and an environment that draws pictures.

        Args:
            file: where to write it; by default `videos/play.mp4` in the run directory.
            episodes: how many episodes it shows.

        Returns:
            The file.
        """
        from qfleet.training.video import record

        target = local_path(file or self.path / "videos" / "play.mp4")
        inside = self.path if target.is_relative_to(self.path) else None
        return record(self.plan, self.policy, target, episodes, self.make, run=inside)

    def frame(self, kind: str | None = None) -> "DataFrame":
        """The rows of metrics.jsonl as a pandas DataFrame; needs the extra `pandas`.

        Args:
            kind: only rows of this kind, such as "progress" or "eval".
        """
        from qfleet.watch.notebook.frame import rows_frame

        return rows_frame([({}, self.path)], kind)

    def plot(self, file: AnyPath | None = None) -> "Figure":
        """Return, loss and speed over steps as a figure of matplotlib; needs the extra `plot`.

        Args:
            file: where to save it too.
        """
        from qfleet.watch.plot import draw_runs

        return draw_runs([self.path], file)

    def __repr__(self) -> str:
        """Its folder, state, score and steps."""
        from qfleet.watch.notebook.run_html import run_line

        return f"Run({str(self.path)!r}: {escaped(run_line(self.path))})"

    def _repr_html_(self) -> str:
        """How it stands, and a small curve, in a notebook."""
        from qfleet.watch.notebook.run_html import run_html

        return run_html(self.path, self.plan.env.id, algorithm_name(self.plan))
