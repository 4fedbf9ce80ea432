"""Raw observations, masks and actions of an environment, one or a batch of them. Shapes: B lanes, A actions.

One observation and a batch can always be told apart by their shapes: a batch has one axis more. Of a Dict or Tuple
every part has it, as in Gymnasium's vector environments; a list is a batch of single observations.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.data.space_format import EnvSpaces
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.single_env import check_finite
from qfleet.envs.space_parts import is_read
from qfleet.envs.spaces import adapt_actions, adapt_obs, make_spec
from qfleet.envs.step_values import as_mask, shown
from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.plan.schema import Env

COMPOSITE = (spaces.Dict, spaces.Tuple)


class RawSpaces:
    """Encodes observations as in training, and decodes actions as in training."""

    def __init__(self, kept: EnvSpaces, env: Env) -> None:
        self.kept = kept
        self._obs = adapt_obs(kept.observation, env.id)
        self._actions = adapt_actions(kept.action, env.bins, env.id)
        self._bounds = self._obs.bounds if env.check_bounds else None
        self.spec = make_spec(self._obs, self._actions, masked=kept.masked, stack=kept.stack)

    def encode(self, obs: Any) -> tuple[Array, bool]:  # -> [B, *input_shape]
        """The observations as the network reads them, and whether they were a batch."""
        space = self.kept.observation
        try:
            if isinstance(obs, list) and isinstance(space, COMPOSITE):
                singles = obs
                batched = True
            else:
                size = batch_size(space, obs, "observation")
                batched = size is not None
                singles = [obs] if size is None else [row_of(space, obs, row) for row in range(size)]
        except OutsideSpace as error:
            raise self._refused(error) from error
        if not singles:
            raise UsageError(
                "the policy was given a batch without observations",
                "There is nothing to choose an action for.",
                "Pass at least one observation.",
            )
        return self._encode_all(singles, batched), batched

    def _encode_all(self, singles: list[Any], batched: bool) -> Array:  # -> [B, *input_shape]
        rows = np.empty((len(singles), *self._obs.shape), self._obs.dtype)
        for number, single in enumerate(singles):
            try:
                self._encode_one(single, rows, number)
            except OutsideSpace as error:
                raise self._refused(error, f" (number {number} of the batch)" if batched else "") from error
        return rows

    def _encode_one(self, single: Any, rows: Array, number: int) -> None:
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            rows[number] = self._obs.encode(single)
        if self._obs.dtype != "uint8":
            check_finite("observation", rows[number])
        if self._bounds is not None:
            self._bounds.check(rows[number])

    def _refused(self, error: OutsideSpace, where: str = "") -> UsageError:
        return UsageError(
            escaped(f"the policy was given {error.field}{where}: expected {error.expected}, got {error.got}"),
            escaped(f"It takes one observation or a batch of {self.kept.observation}."),
            "Pass observations as the environment returns them; values beyond the bounds of the space can be clipped.",
        )

    def masks(self, mask: Any, num: int, batched: bool) -> Array:  # -> [B, A] bool
        """Masks of allowed actions, one per lane; as `info["action_mask"]` of the environment."""
        each = mask if batched and isinstance(mask, list | tuple | np.ndarray) else [mask]
        if len(each) != num:
            raise _mask_refused(f"{len(each)} masks for {num} observations", self.spec.num_actions)
        try:
            masks = np.stack([as_mask(one, self.spec.num_actions) for one in each])
        except OutsideSpace as error:
            raise _mask_refused(f"{error.got} where {error.expected} was expected", self.spec.num_actions) from error
        if not masks.any(1).all():
            raise _mask_refused("no allowed action", self.spec.num_actions)
        return masks

    def decode(self, actions: Array, batched: bool) -> Any:  # [B] -> raw actions
        """Raw actions: an int for one Discrete action, otherwise arrays; a batch as vector environments take it."""
        if batched:
            return np.stack([self.decode_one(index) for index in actions.tolist()])
        return self.decode_one(int(actions[0]))

    def decode_one(self, index: int) -> Any:
        """The raw action of an index of the values."""
        return self._actions.decode(index)


def batch_size(space: spaces.Space[Any], obs: Any, name: str) -> int | None:
    """The size of a batch; None for one observation."""
    if isinstance(space, COMPOSITE):
        parts = [(part, *_part_of(obs, key, name)) for key, part in children(space)]
        sizes = {batch_size(part, value, where) for part, value, where in parts}
        if len(sizes) != 1:
            got = ", ".join(sorted("single" if size is None else f"a batch of {size}" for size in sizes))
            raise OutsideSpace(name, "parts that are all single, or batches of one size", got or "nothing")
        return sizes.pop()
    if isinstance(space, spaces.Text):
        return None if isinstance(obs, str) else _length(obs, space, name)
    shape = _shape_of(obs, space, name)
    if shape == space.shape:
        return None
    if shape[1:] == space.shape and len(shape) > 0:
        return shape[0]
    batch = ", ".join(map(str, ("B", *(space.shape or ()))))
    raise OutsideSpace(f"{name} shape", f"{space.shape}, or [{batch}] for a batch", str(shape))


def children(space: spaces.Dict | spaces.Tuple[Any]) -> list[tuple[Any, spaces.Space[Any]]]:
    """The parts of a Dict or Tuple that the network reads, by key or index."""
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return [(key, part) for key, part in parts if is_read(part)]


def row_of(space: spaces.Space[Any], obs: Any, row: int) -> Any:
    """One observation of a batch."""
    if isinstance(space, COMPOSITE):
        # Of a tuple, too: parts that are not read need no value, and the others keep their numbers.
        return {key: row_of(part, obs[key], row) for key, part in children(space)}
    return obs[row]


def _part_of(obs: Any, key: Any, name: str) -> tuple[Any, str]:
    wanted = "a dict" if isinstance(key, str) else "a tuple or dict"
    if isinstance(obs, Mapping | tuple | np.ndarray):
        try:
            return obs[key], f"{name}[{key!r}]"
        except (KeyError, IndexError, TypeError) as error:
            raise OutsideSpace(f"{name}[{key!r}]", "a value", "none") from error
    raise OutsideSpace(name, wanted, shown(obs))


def _length(obs: Any, space: spaces.Space[Any], name: str) -> int:
    if isinstance(obs, list | tuple | np.ndarray):
        return len(obs)
    raise OutsideSpace(name, str(space), shown(obs))


def _shape_of(obs: Any, space: spaces.Space[Any], name: str) -> tuple[int, ...]:
    try:
        return np.shape(obs)
    except (ValueError, TypeError) as error:  # lists of different lengths
        raise OutsideSpace(name, str(space), shown(obs)) from error


def _mask_refused(got: str, num: int) -> UsageError:
    return UsageError(
        escaped(f"mask= has {got}"),
        f"A mask has a flag for each of the {num} actions, in the order of policy.values, and allows at least one.",
        'Pass info["action_mask"] of the environment, for a batch one per observation.',
    )
