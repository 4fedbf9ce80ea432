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
