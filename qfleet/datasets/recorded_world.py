"""The world that a data set was recorded in, as far as the data know it: its spec and its spaces."""

import numpy as np
from gymnasium import spaces

from qfleet.data import Array, Spec, State, Step
from qfleet.data.space_format import EnvSpaces
from qfleet.datasets.format import DatasetManifest


def plain_spaces(spec: Spec) -> EnvSpaces | None:
    """The spaces of recorded rows of numbers, whose environment nobody knows; None for anything else."""
    if spec.dtype != "float32" or len(spec.obs) != 1 or spec.stack != 1:
        return None
    counts = spec.actions
    action = spaces.Discrete(counts[0]) if len(counts) == 1 else spaces.MultiDiscrete(list(counts))
    return EnvSpaces(spaces.Box(-np.inf, np.inf, spec.obs, np.float32), action, masked=spec.masked)


class RecordedWorld:
    """Shows spec and spaces; nobody can act in it."""

    num = 1

    def __init__(self, manifest: DatasetManifest) -> None:
        self.env_id = manifest.env_id
        self.spec: Spec = manifest.spec.spec()
        self.spaces: EnvSpaces | None = manifest.env_spaces() or plain_spaces(self.spec)

    def reset(self) -> Step:
        """Refused."""
        raise self._refusal()

    def send(self, action: Array) -> None:
        """Refused."""
        raise self._refusal()

    def receive(self) -> Step:
        """Refused."""
        raise self._refusal()

    def abandon(self, lanes: Array) -> None:
        """Refused."""
        raise self._refusal()

    def state_dict(self) -> State:
        """It has no state."""
        return {}

    def load_state_dict(self, state: State) -> Step:
        """Refused."""
        raise self._refusal()

    def close(self) -> None:
        """Nothing to close."""

    def _refusal(self) -> TypeError:
        return TypeError(f"{self.env_id} is known from a data set only: nobody can act in it")
