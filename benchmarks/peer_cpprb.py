"""cpprb's prioritised replay, the fastest of the peers: with plain vectors, and with frames that it stores once."""

import argparse
from typing import Any

import numpy as np

from benchmarks.replay_cases import MANY, SLOTS, Part, tell

BETA = 0.4
SHAPES = {"vector": (4,), "frames": (84, 84, 4)}


def make_buffer(what: str, slots: int) -> Any:
    """The buffer, and for frames the options by which it keeps each of them once."""
    import cpprb

    kind = {"shape": SHAPES[what], "dtype": np.float32 if what == "vector" else np.uint8}
    columns = {"obs": kind, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    if what == "vector":
        return cpprb.PrioritizedReplayBuffer(slots, columns | {"next_obs": kind}, alpha=0.6)
    return cpprb.PrioritizedReplayBuffer(slots, columns, alpha=0.6, next_of="obs", stack_compress="obs")


def steps(what: str, num: int) -> dict[str, Any]:
    """So many steps."""
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 255, (num + 1, *SHAPES[what])).astype(np.float32 if what == "vector" else np.uint8)
    zeros = np.zeros(num, np.float32)
    return {"obs": obs[:-1], "next_obs": obs[1:], "act": np.zeros(num, np.int64), "rew": zeros, "done": zeros}


def make(what: str, slots: int) -> Part:
    """A full buffer and what can be done with it."""
    buffer, many = make_buffer(what, slots), steps(what, MANY)
    one = {name: column[0] for name, column in many.items()}
    priority = {size: np.random.default_rng(1).random(size).astype(np.float32) for size in range(1_000)}
    for _ in range(slots // MANY + 1):
        buffer.add(**many)

    def learn(size: int) -> None:
        buffer.update_priorities(buffer.sample(size, beta=BETA)["indexes"], priority[size])

    return Part(
        lambda: buffer.add(**one), lambda: buffer.add(**many), lambda size: buffer.sample(size, beta=BETA), learn
    )


def main() -> None:
    """Measure and say it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(SLOTS))
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    tell(make, given.what, given.slots, given.seconds)


if __name__ == "__main__":
    main()
