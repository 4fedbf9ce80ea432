"""How fast `qfleet data collect` records: environment steps per second beside the same actors without writing.

Both play the same policy in equally many native environments of this process: `ours` records and writes a data set,
`limit` drops what the actor returns. The files of every round are removed again.
"""

import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from qfleet.build.threads import torch_threads
from qfleet.datasets.format import BlockWriter, publish
from qfleet.datasets.storage import open_place
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.workflow.behaviours import Behaviour
from qfleet.workflow.playing import Amount, describe_world, make_playing_world, make_recording, record_into

BAR = 0.9
# Each with the steps of a round: a few seconds.
WORLDS = {
    "CartPole": ("CartPole-v1", {"env.num": 64}, 600_000),
    "MinAtar Breakout": ("MinAtar/Breakout-v1", {"env.num": 16}, 100_000),
}


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row for every world and round."""
    found = []
    for name, (env_id, settings, steps) in WORLDS.items():
        plan = make_plan(env_id, overrides=settings)
        play(plan, steps // 20)  # imports, and pages of memory
        record(plan, steps // 20)
        for _ in range(rounds):
            limit = play(plan, steps)
            ours = record(plan, steps)
            found.append({"row": f"collect {name}", "unit": "env steps/s", "ours": ours, "limit": limit, "bar": BAR})
    return found


def play(plan: Plan, steps: int) -> float:
    """Steps per second of the actor alone."""
    with torch_threads(1), closing(make_playing_world(plan)) as world:
        recording = make_recording(plan, world, BEHAVIOURS, Amount(steps=steps), trust_env=False)
        actor = recording.actor
        actor.record_probability = False
        began = time.perf_counter()
        actor.start()
        while actor.steps < steps:
            actor.send()
            actor.receive()
        return actor.steps / (time.perf_counter() - began)


def record(plan: Plan, steps: int) -> float:
    """Steps per second of the same actor with everything that collecting does, until the manifest is written."""
    folder = Path(tempfile.mkdtemp(prefix="qfleet-collect-"))
    place = open_place(folder)
    try:
        with torch_threads(1), closing(make_playing_world(plan)) as world:
            description = describe_world(plan, world)
            recording = make_recording(plan, world, BEHAVIOURS, Amount(steps=steps, cut=True), trust_env=False)
            began = time.perf_counter()
            written = record_into(BlockWriter(place, description, plan.seed), recording)
            publish(place, description, written, {"made_by": "benchmark"})
            return recording.steps / (time.perf_counter() - began)
    finally:
        shutil.rmtree(folder)


BEHAVIOURS = [Behaviour("random", 1.0)]

if __name__ == "__main__":
    for row in measure(3):
        print(row["row"], f"{row['ours']:,.0f} of {row['limit']:,.0f} {row['unit']}: {row['ours'] / row['limit']:.2f}")
