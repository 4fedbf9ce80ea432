"""One recorded episode. Shapes: T steps, A actions."""

import hashlib
from dataclasses import dataclass

import numpy as np

from qfleet.data import Array


@dataclass(frozen=True, slots=True, eq=False)
class RecordedEpisode:
    """T actions between T + 1 observations, each stored once. Rewards are raw, and no discount is applied.

    Both ends may be true, as in Gymnasium. If neither is, the recording stopped before the episode's end: its last
    observation is learned from as that of a truncated one.
    """

    id: str  # unique in its data set
    observations: dict[str, Array]  # [T + 1, *shape] by the name of the column
    action: Array  # [T] int64, the number of the joint action
    reward: Array  # [T] float64
    terminated: bool
    truncated: bool
    probability: Array | None = None  # [T] float64, of the action, by the policy that chose it
    mask: Array | None = None  # [T + 1, A] bool, True = allowed
    seed: int | None = None
    env_id: str = ""
    behaviour: str = ""  # the name of the policy that chose the actions

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.action)

    @property
    def undiscounted_return(self) -> float:
        """The sum of its rewards."""
        return float(np.sum(self.reward))

    @property
    def num_bytes(self) -> int:
        """The bytes of its arrays."""
        arrays = [*self.observations.values(), self.action, self.reward, self.probability, self.mask]
        return sum(array.nbytes for array in arrays if array is not None)

    def content_hash(self) -> str:
        """SHA-256 of the arrays and the ends; not of the id, and not of where the episode came from."""
        digest = hashlib.sha256(f"{self.num_steps} {self.terminated} {self.truncated}".encode())
        arrays = {"action": self.action, "reward": self.reward, "probability": self.probability, "mask": self.mask}
        for name, array in [*sorted(self.observations.items()), *arrays.items()]:
            if array is not None:
                digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def episode_problems(episode: RecordedEpisode) -> list[str]:
    """What is wrong with the arrays of an episode; nothing if it may be written."""
    num = episode.num_steps
    lengths = {name: len(array) - 1 for name, array in episode.observations.items()}
    lengths["reward"] = len(episode.reward)
    if episode.probability is not None:
        lengths["probability"] = len(episode.probability)
    if episode.mask is not None:
        lengths["mask"] = len(episode.mask) - 1
    problems = [
        f"{name} belongs to {length} steps, and there are {num} actions"
        for name, length in lengths.items()
        if length != num
    ]
    if num == 0:
        problems.append("it has no steps")
    if not np.isfinite(episode.reward).all():
        problems.append("a reward is not a finite number")
    if episode.probability is not None and not ((episode.probability > 0) & (episode.probability <= 1)).all():
        problems.append("a probability is not above 0 and at most 1")
    for name, array in episode.observations.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            problems.append(f"{name} holds a number that is not finite")
    return problems
