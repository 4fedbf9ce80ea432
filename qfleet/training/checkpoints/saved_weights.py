"""The weights of a run, and which ones they are: of its best checkpoint, of its latest, or any that can be read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.act import Policy
from qfleet.data import Array
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.learn import restore
from qfleet.plan.schema import OwnTorso, Plan
from qfleet.save import Checkpoint, Checkpoints
from qfleet.training.checkpoints.checkpointer import MALFORMED, malformed, require_same_plan, shortened
from qfleet.training.checkpoints.migrations import arrays_in
from qfleet.watch import read_json

WHICH = ("best", "latest", "any")


@dataclass(frozen=True)
class SavedWeights:
    """Arrays by name, the checkpoint they come from, and what they are of their run: `best` or `latest`."""

    arrays: dict[str, Array]
    checkpoint: Checkpoint
    which: str

    @property
    def step(self) -> int:
        """The environment step they were saved at."""
        return self.checkpoint.step

    def row(self) -> dict[str, Any]:
        """The fields of an evaluation row that say whose score it is; `checkpoint` is its step, as in metrics.jsonl."""
        name = self.checkpoint.path.name
        return {"which": self.which, "step": self.step, "checkpoint": self.step, "checkpoint_name": name}

    def text(self, plan: Plan) -> str:
        """The same in words."""
        untrained = ", untrained" if self.step <= max(0, plan.algo.learn_start_steps) else ""
        return f"{self.which} weights, step {self.step}{untrained}"


def weights_of(
    folder: Path, most_bytes: int, which: str = "best", warn: Callable[[str], object] | None = None
) -> SavedWeights:
    """The weights of a run's best or latest checkpoint; of a run without an evaluation the latest, and called so.

    `any` is the best one, or the latest where the best cannot be read. A file of more than `most_bytes` is damaged.
    """
    if which not in WHICH:
        raise UsageError(
            f"which={which!r} is not a checkpoint",
            "A run has a best one and a latest one; `any` takes the latest if the best cannot be read.",
            "Use best, latest or any.",
        )
    checkpoints = Checkpoints(folder / "checkpoints", writer=False, warn=warn)
    step = best_step(folder)
    if which != "latest" and step is not None:
        try:
            return found(checkpoints.load(step, whole=False), "best", most_bytes)
        except NoCheckpointError as error:
            if which == "best":
                raise lost_best(folder, error) from error
            checkpoints.warn(f"{error.what} The latest checkpoint is used instead.")
    return checkpoints.restore(lambda checkpoint: found(checkpoint, "latest", most_bytes), whole=False)


def best_step(folder: Path) -> int | None:
    """The step of the best checkpoint, if the run was evaluated; both files that say so may be missing."""
    noted = read_json(folder / "best.json").get("step")
    status = read_json(folder / "status.json").get("best")
    told = status.get("env_steps") if isinstance(status, dict) else None
    steps = [step for step in (noted, told) if isinstance(step, int) and 0 <= step < 10**12]
    return steps[0] if steps else None


def found(checkpoint: Checkpoint, which: str, most_bytes: int) -> SavedWeights:
    """A checkpoint's weights."""
    return SavedWeights(arrays_in(checkpoint, "model.safetensors", most_bytes), checkpoint, which)


def lost_best(folder: Path, error: NoCheckpointError) -> NoCheckpointError:
    """The best checkpoint cannot be read, and nothing else is called the best."""
    return NoCheckpointError(
        f"the best checkpoint of {folder.name} cannot be used: {error.what}",
        "Other weights of the run are not its best, so nothing was done with them.",
        "Ask for the newest weights that can be read, --which latest (load(path, which='latest')), or restore the run "
        "folder from a copy.",
    )


def give(policy: Policy, weights: SavedWeights, plan: Plan, *, own_env: bool) -> None:
    """Write the weights into a policy; what does not fit is another plan, an object of the user's, or malformed."""
    try:
        restore(policy.net, weights.arrays)
    except MALFORMED as error:
        require_same_plan(weights.checkpoint.meta.get("plan", {}), plan)
        if not (own_env or isinstance(plan.net.torso, OwnTorso)):
            raise malformed(weights.checkpoint, error) from error
        raise UsageError(
            f"the weights of {weights.checkpoint.path.name} do not fit its network: {shortened(error)}",
            "The torso or the environment is not the one this run was trained with.",
            "Use the torso and environment of the beginning.",
        ) from error
