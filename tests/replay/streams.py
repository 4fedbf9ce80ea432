"""Random streams of steps, and a plain replay that keeps whole episodes in lists. R rows, L lanes, A actions."""

from dataclasses import dataclass, field

import numpy as np

from qfleet.data import Array, Batch, Rollout, Spec, State
from qfleet.replay import Replay, Span

FIELDS = ("obs", "action", "reward", "discount", "next_obs", "next_mask", "mask")


def rollout(rows: dict[str, Array], begin: int = 0, end: int | None = None) -> Rollout:
    """Rows [begin, end) of a stream as a rollout."""
    return Rollout(**{name: column[begin:end] for name, column in rows.items()}, source=(0, 0, begin), version=1)


def read_rows(replay: Replay) -> list[tuple[Span, State]]:
    """The rows that a checkpoint would hold."""
    return [((lanes, begin, end), replay.store.read(begin, end, lanes)) for lanes, begin, end in replay.spans()]


def restore_rows(replay: Replay, rows: list[tuple[Span, State]]) -> None:
    """Put them back."""
    for (lanes, begin, end), values in rows:
        replay.store.restore(begin, end, values, lanes)


def one_lane(obs: list[float], reward: list[float], discount: list[float], last: list[bool]) -> Rollout:
    """A stream of one lane written by hand; the action of row i is i % 2."""
    num = len(obs)
    return Rollout(
        obs=np.array(obs, np.float32).reshape(num, 1, 1),
        action=np.arange(num).reshape(num, 1) % 2,
        reward=np.array(reward, np.float32).reshape(num, 1),
        discount=np.array(discount, np.float32).reshape(num, 1),
        last=np.array(last).reshape(num, 1),
        source=(0, 0, 0),
        version=1,
    )


def random_stream(
    rng: np.random.Generator, spec: Spec, lanes: int, num: int, end: float | Array, *, values: bool = False
) -> dict[str, Array]:
    """Rows of lanes whose episodes end with probability `end` (one, or one per lane) per step, terminated or truncated.

    With `values`, also the actors' value estimates.
    """
    shape = (num, lanes)
    terminated, truncated = rng.random((2, *shape)) < np.asarray(end) / 2
    last = np.zeros(shape, np.bool_)
    for row in range(1, num):
        last[row] = (terminated[row - 1] | truncated[row - 1]) & ~last[row - 1]
    size = (*shape, *spec.obs)
    frames = rng.integers(1, 256, size) if spec.dtype == "uint8" else rng.normal(size=size)
    stream: dict[str, Array] = {
        "obs": frames.astype(spec.dtype),
        "action": rng.integers(0, spec.num_actions, shape),
        # The reward of a last row must not matter, so it is as random as any.
        "reward": (3 * rng.normal(size=shape)).astype(np.float32),
        "discount": (~terminated | last).astype(np.float32),
        "last": last,
    }
    if spec.masked:
        stream["mask"] = rng.random((*shape, spec.num_actions)) < 0.5
    if spec.state:
        stream["state"] = rng.normal(size=(*shape, *spec.state)).astype(np.float32)
    if values:
        stream["value"] = rng.normal(size=(*shape, 2)).astype(np.float32)
    return stream


@dataclass
class Episode:
    """One episode of one lane: `obs` is one longer than the others as soon as the next observation is known."""

    obs: list[Array] = field(default_factory=list)
    mask: list[Array] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    discount: list[float] = field(default_factory=list)
    over: bool = False
    taken: int = 0  # steps that are items already


@dataclass
class PlainReplay:
    """Keeps everything, and computes what item number i must look like."""

    spec: Spec
    lanes: int
    n_step: int
    discount: float
    clip: bool
    episodes: list[Episode] = field(default_factory=list)
    items: list[tuple[Episode, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.episodes = [Episode() for _ in range(self.lanes)]

    def add(self, rows: dict[str, Array], row: int, first: int = 0) -> None:
        """One row: the episode of every lane from `first` on grows; steps whose n-step window is whole become items."""
        for i in range(rows["last"].shape[1]):
            episode = self.episodes[first + i]
            episode.obs.append(rows["obs"][row, i])
            if self.spec.masked:
                episode.mask.append(rows["mask"][row, i])
            episode.over = bool(rows["last"][row, i])
            known = len(episode.action)  # steps whose next observation is here
            if not episode.over:
                episode.action.append(int(rows["action"][row, i]))
                episode.reward.append(float(rows["reward"][row, i]))
                episode.discount.append(float(rows["discount"][row, i]))
            self.queue(first + i, known if episode.over else max(0, known - self.n_step + 1))

    def queue(self, lane: int, ready: int) -> None:
        """Make the first `ready` steps of the lane's episode items; after the episode's end begin the next."""
        episode = self.episodes[lane]
        self.items += [(episode, step) for step in range(episode.taken, ready)]
        episode.taken = max(episode.taken, ready)
        if episode.over:
            self.episodes[lane] = Episode()

    def seal(self, lanes: range) -> int:
        """End these lanes' episodes; the newest step of each has no outcome. Returns their number."""
        marked = 0
        for lane in lanes:
            episode = self.episodes[lane]
            if episode.obs:
                for column in (episode.action, episode.reward, episode.discount):
                    column.pop()
                episode.over = True
                marked += 1
                self.queue(lane, len(episode.action))
        return marked

    def stack(self, episode: Episode, step: int) -> Array:
        """The newest frames up to a step, zeros before the episode began."""
        if self.spec.stack == 1:
            return episode.obs[step]
        blank = np.zeros(self.spec.obs, self.spec.dtype)
        first = step - self.spec.stack + 1
        return np.stack([episode.obs[i] if i >= 0 else blank for i in range(first, step + 1)])

    def item(self, number: int) -> dict[str, Array]:
        """One item as a batch would show it."""
        episode, step = self.items[number]
        end = min(step + self.n_step, len(episode.action)) if episode.over else step + self.n_step
        total, keep = 0.0, 1.0
        for reward, discount in zip(episode.reward[step:end], episode.discount[step:end], strict=True):
            total += keep * (min(max(reward, -1.0), 1.0) if self.clip else reward)
            keep *= self.discount * discount
        found: dict[str, Array] = {
            "obs": self.stack(episode, step),
            "action": np.array(episode.action[step], np.int64),
            "reward": np.array(total, np.float32),
            "discount": np.array(keep, np.float32),
            "next_obs": self.stack(episode, end),
        }
        return {**found, "next_mask": episode.mask[end], "mask": episode.mask[step]} if self.spec.masked else found

    def assert_equal(self, batch: Batch) -> None:
        """Every item of the batch is byte for byte what it must be."""
        expected = [self.item(number) for number in batch.ids.tolist()]
        for name in FIELDS:
            got = getattr(batch, name)
            if name.endswith("mask") and not self.spec.masked:
                assert got is None
                continue
            want = np.stack([item[name] for item in expected])
            assert got.dtype == want.dtype, name
            assert got.shape == want.shape, name
            assert got.tobytes() == want.tobytes(), name
