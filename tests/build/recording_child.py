"""A run that is recorded, in a process that a test kills: begins it, or goes on from its newest checkpoint."""

import shutil
import sys
from pathlib import Path

from qfleet import resume, train
from qfleet.act import recording
from qfleet.build import run_recorder
from qfleet.plan import make_plan
from tests.build.test_run_recorder import PROCESSES, SETTINGS
from tests.support.traced import TRACED

STEPS = 2_000


def main(out: Path, runtime: str) -> None:
    """Run to the end, unless killed."""
    run_recorder.RUN_FILE_BYTES = 20_000
    recording.CHUNK_ROWS = 7
    if list(out.glob("run/checkpoints/step_*/manifest.json")):
        resume(out / "run", progress=False)
        return
    for name in ("run", "data"):  # it was killed before its first checkpoint
        shutil.rmtree(out / name, ignore_errors=True)
    settings = {**SETTINGS, "until.steps": STEPS, "save.dataset": str(out / "data"), "log.every_steps": 50}
    settings |= {"save.every_steps": 200, "save.every_seconds": 0, "save.max_share": 1}
    plan = make_plan(TRACED, overrides=settings | (PROCESSES if runtime == "processes" else {}))
    train(plan, out=out, name="run", progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
