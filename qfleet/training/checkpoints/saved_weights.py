"""The saved weights of a run: of its best checkpoint, of its latest, or of any that can be read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qfleet.act import Policy
from qfleet.data import Array
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.nets import load_state_arrays
from qfleet.plan.schema import OwnTorso, Plan
from qfleet.save import Checkpoint, Checkpoints
from qfleet.training.checkpoints.checkpointer import MALFORMED, malformed, one_line, require_same_plan
from qfleet.training.checkpoints.migrations import read_arrays
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

    def without(self, prefix: str) -> "SavedWeights":
        """These weights but for the arrays whose names begin like this."""
        kept = {name: value for name, value in self.arrays.items() if not name.startswith(prefix)}
        return replace(self, arrays=kept)

    def row(self) -> dict[str, Any]:
        """The fields of an evaluation row that say whose score it is; `checkpoint` is its step, as in metrics.jsonl."""
        name = self.checkpoint.path.name
        return {"which": self.which, "step": self.step, "checkpoint": self.step, "checkpoint_name": name}

    def text(self, plan: Plan) -> str:
        """What they are, for a message."""
        if "spec" not in self.checkpoint.meta:  # `Policy.save` wrote it
            return "weights of a saved policy"
        untrained = ", untrained" if self.step <= max(0, plan.algo.learn_start_steps) else ""
        return f"{self.which} weights, step {self.step}{untrained}"


def read_weights(
    folder: Path, max_bytes: int, which: str = "best", warn: Callable[[str], object] | None = None
) -> SavedWeights:
    """The weights of a run's best or latest checkpoint; a run without an evaluation has only a latest one.

    `any` is the best one, or the latest where the best cannot be read. A file of more than `max_bytes` is damaged.
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
            return weights_in(checkpoints.load(step, whole=False), "best", max_bytes)
        except NoCheckpointError as error:
            if which == "best":
                raise best_unreadable(folder, error) from error
            checkpoints.warn(f"{error.what} The latest checkpoint is used instead.")
    return checkpoints.restore(lambda checkpoint: weights_in(checkpoint, "latest", max_bytes), whole=False)


def best_step(folder: Path) -> int | None:
    """The step of the best checkpoint, if the run was evaluated; both files that say so may be missing."""
    step = read_json(folder / "best.json").get("step")
    best = read_json(folder / "status.json").get("best")
    status_step = best.get("env_steps") if isinstance(best, dict) else None
    steps = [found for found in (step, status_step) if isinstance(found, int) and 0 <= found < 10**12]
    return steps[0] if steps else None


def weights_in(checkpoint: Checkpoint, which: str, max_bytes: int) -> SavedWeights:
    """A checkpoint's weights."""
    return SavedWeights(read_arrays(checkpoint, "model.safetensors", max_bytes), checkpoint, which)


def best_unreadable(folder: Path, error: NoCheckpointError) -> NoCheckpointError:
    """The error for a best checkpoint that cannot be read."""
    return NoCheckpointError(
        f"the best checkpoint of {folder.name} cannot be used: {error.what}",
        "Other weights of the run are not its best, so nothing was done with them.",
        "Ask for the newest weights that can be read, --which latest (load(path, which='latest')), or restore the run "
        "folder from a copy.",
    )


def load_into_policy(policy: Policy, weights: SavedWeights, plan: Plan, *, own_env: bool) -> None:
    """Load the weights into a policy; the error says whether the plan, the user's own objects or the file is wrong."""
    try:
        load_state_arrays(policy.net, weights.arrays)
    except MALFORMED as error:
        require_same_plan(weights.checkpoint.meta.get("plan", {}), plan)
        if not (own_env or isinstance(plan.net.torso, OwnTorso)):
            raise malformed(weights.checkpoint, error) from error
        raise UsageError(
            f"the weights of {weights.checkpoint.path.name} do not fit its network: {one_line(error)}",
            "The torso or the environment is not the one this run was trained with.",
            "Use the torso and environment of the beginning.",
        ) from error
