"""What users call: train a plan, resume a run, load a run."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Policy
from qfleet.envs import absolute_id
from qfleet.errors import NoCheckpointError, QfleetError, UsageError
from qfleet.learn import restore
from qfleet.plan import check, diff, read_plan, write_plan
from qfleet.plan.schema import Plan
from qfleet.run.course import OUT_OF_TIME, SOLVED, Course
from qfleet.run.diary import Callback, Diary, Ending
from qfleet.run.judge import Judge
from qfleet.run.keeper import Keeper
from qfleet.run.memory import estimate as estimate_memory
from qfleet.run.memory import require_memory
from qfleet.run.resolve import require_device, resolve, usable_device
from qfleet.run.signals import Asked, listening
from qfleet.run.trust import require_trust, sign
from qfleet.run.video import record
from qfleet.run.wiring import LAYERS, EnvMaker, Line, make_line, make_policy, make_train_world, stream
from qfleet.save import Checkpoint, Checkpoints, hold_run, unpack_tensors
from qfleet.watch import (
    TensorBoardWriter,
    Watcher,
    auto_mode,
    find_run,
    make_watcher,
    new_run_dir,
    provenance,
    read_json,
    read_rows,
    write_card,
    write_json,
)

Path_ = str | Path


class Run:
    """A run on disk, and the policy it made."""

    def __init__(self, path: Path, plan: Plan, policy: Policy, make: EnvMaker | None = None) -> None:
        self.path, self.plan, self.policy, self.make = path, plan, policy, make

    @property
    def status(self) -> dict[str, Any]:
        """status.json as it is now."""
        return read_json(self.path / "status.json")

    @property
    def exit_code(self) -> int:
        """What the command line would have returned."""
        return int(self.status.get("exit_code") or 0)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every row of metrics.jsonl."""
        return read_rows(self.path / "metrics.jsonl")

    def result(self) -> dict[str, Any] | None:
        """The score on test episodes, if the run got that far."""
        score: dict[str, Any] | None = self.status.get("score")
        return score

    def evaluate(self, episodes: int = 100, seed: int | None = None) -> dict[str, Any]:
        """The greedy policy on test episodes, as a row of kind `eval`; another seed means other episodes."""
        plan = self.plan if seed is None else msgspec.structs.replace(self.plan, seed=seed)
        with threads(plan):
            return {"kind": "eval", **(Judge(plan, self.make).test(self.policy, max(1, episodes)) or {})}

    def record(self, file: Path_ | None = None, episodes: int = 1) -> Path:
        """A video of the greedy policy."""
        return record(self.plan, self.policy, Path(file or self.path / "videos" / "play.mp4"), episodes, self.make)

    def __repr__(self) -> str:
        """Where it is and how it stands."""
        return f"Run({str(self.path)!r}, state={self.status.get('state')!r})"


def train(
    plan: Plan,
    *,
    out: Path_ = "runs",
    name: str | None = None,
    env: EnvMaker | None = None,
    torso: nn.Module | None = None,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    weights_from: Path_ | None = None,
    command: list[str] | None = None,
) -> Run:
    """Train a plan in a new run directory under `out`, to its end."""
    plan = checked(plan)
    with threads(plan):
        world = make_train_world(plan, env)

    def begin(course: Course) -> list[str]:
        course.keeper.require_space()
        course.line.actor.start()
        course.save()
        return []

    with closing(world):
        plan = resolve(plan, world.spec, own_torso=torso is not None)
        require_memory(plan, world.spec)
        line = make_line(plan, world, torso)
        if weights_from is not None:
            adopt(line, find_run(weights_from, out))
        folder = new_run_dir(Path(out), plan.env.id, name)
        write_plan(plan, folder / "run.toml")
        write_json(folder / "provenance.json", {**provenance(command), "own_env": env is not None})
        sign(folder, plan.env)
        return conduct(line, folder, begin, env=env, callbacks=callbacks, watcher=watcher)


def resume(
    path: Path_,
    *,
    steps: int | None = None,
    out: Path_ = "runs",
    env: EnvMaker | None = None,
    torso: nn.Module | None = None,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    trust_env: bool = False,
    strict: bool = False,
) -> Run:
    """Go on with a run exactly where its newest valid checkpoint stands; `steps` moves its end."""
    folder = find_run(path, out)
    before = open_plan(folder, env, trust_env)
    plan = before if steps is None else with_steps(before, steps, read_json(folder / "status.json"))
    notes = [f"changed {name}: {old} -> {new}" for name, old, new in diff(before, plan)]
    with threads(plan):
        world = make_train_world(plan, env)

    def begin(course: Course) -> list[str]:
        lost = course.load(strict=strict)
        write_plan(plan, folder / "run.toml")
        course.diary.events.event("resumed", env_steps=course.steps, changes=notes, lost_episodes=lost)
        if plan.save.replay == "none":
            course.diary.warn(f"replay was not saved: refilling {plan.algo.learn_start_steps} steps before learning")
        return [f"resumed at step {course.steps}", *notes]

    with closing(world):
        require_device(plan)
        require_memory(plan, world.spec)
        line = make_line(plan, world, torso)
        return conduct(line, folder, begin, env=env, callbacks=callbacks, watcher=watcher)


def checked(plan: Plan) -> Plan:
    """The plan, once its values are seen to be in range: Python does not look when a Struct is made."""
    try:
        plan = msgspec.convert(msgspec.to_builtins(plan), Plan)
    except msgspec.ValidationError as error:
        raise UsageError("the plan holds a value it cannot have", f"{error}.", "See `qfleet plan schema`.") from error
    check(plan)
    # run.toml must not depend on the folder the command was typed in.
    return msgspec.structs.replace(plan, env=msgspec.structs.replace(plan.env, id=absolute_id(plan.env.id)))


def open_plan(folder: Path, env: EnvMaker | None, trust_env: bool) -> Plan:
    """A run's plan, if its environment may and can be made again."""
    plan = read_plan(folder / "run.toml")
    if env is None and read_json(folder / "provenance.json").get("own_env"):
        raise UsageError(
            f"{folder.name} was trained in an environment of its own, env.id={plan.env.id}",
            "That environment was a Python object, which a run directory cannot hold.",
            "Pass it again from Python: resume(path, env=...) or load(path, env=...).",
        )
    require_trust(folder, plan.env, trust_env or env is not None)
    return plan


def with_steps(plan: Plan, steps: int, status: dict[str, Any]) -> Plan:
    """The plan with another end; a score or time that was reached before no longer stops it."""
    reason, until = str(status.get("reason", "")), plan.until
    score = None if reason.startswith(SOLVED) else until.score
    seconds = None if reason.startswith(OUT_OF_TIME) else until.seconds
    return msgspec.structs.replace(
        plan, until=msgspec.structs.replace(until, steps=steps, score=score, seconds=seconds)
    )


def conduct(
    line: Line,
    folder: Path,
    begin: Callable[[Course], list[str]],
    *,
    env: EnvMaker | None,
    callbacks: Iterable[Callback],
    watcher: Watcher | None,
) -> Run:
    """Run a course under its lock, and leave a status behind whatever happens; `begin` says what is worth telling."""
    plan = line.plan
    watcher = watcher if watcher is not None else interactive_watcher()
    with threads(plan), own_torch_rng(plan), hold_run(folder), listening() as asked, logbook(folder) as log:
        diary = Diary(line, folder, watcher, callbacks)
        course = make_course(line, diary, env, asked)
        try:
            notes = begin(course)
            diary.write_status()
            if watcher is not None:
                watcher.start(introduction(plan, folder, notes))
            diary.callbacks += row_writers(plan, folder, course.steps)
            status = diary.write_status(*course.complete())
        except BaseException as error:
            log.exception("the run ended with an error")
            status = diary.write_failure(failure(error), begun=course.keeper.last is not None)
            raise
        finally:
            if watcher is not None:
                watcher.stop(status)
            course.close()
        write_card(folder)
    return Run(folder, plan, line.policy, env)


def interactive_watcher() -> Watcher | None:
    """In a terminal or a notebook somebody is looking; a script stays silent unless it asks for a watcher."""
    mode = auto_mode(sys.stdout)
    return make_watcher(mode) if mode == "live" else None


def row_writers(plan: Plan, folder: Path, first_step: int) -> list[Callback]:
    """Where rows go besides metrics.jsonl."""
    return [TensorBoardWriter(folder / "tensorboard", first_step=first_step)] if plan.log.tensorboard else []


def make_course(line: Line, diary: Diary, env: EnvMaker | None, asked: Asked) -> Course:
    """The course of a line, with its judge and keeper."""
    keep, events = line.plan.save.keep, diary.events.event
    checkpoints = Checkpoints(diary.folder / "checkpoints", keep=keep, events=events)
    keeper = Keeper(checkpoints, line, provenance(None)["versions"])
    return Course(line, Judge(line.plan, env), keeper, diary, asked)


def load(
    path: Path_,
    *,
    which: str = "best",
    out: Path_ = "runs",
    env: EnvMaker | None = None,
    torso: nn.Module | None = None,
    trust_env: bool = False,
) -> Run:
    """A run's policy, from its best checkpoint or its latest."""
    folder = find_run(path, out)
    plan = open_plan(folder, env, trust_env)
    judge = Judge(plan, env)
    world = judge.world(0, 1)
    try:
        policy = make_policy(plan, world.spec, torch.device(usable_device(plan)), torso)
    finally:
        world.close()
    try:
        restore(policy.net, weights_of(folder, which))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the weights of {folder.name} do not fit its network: {error}",
            "The torso or the environment is not the one this run was trained with.",
            "Use the torso and environment of the beginning.",
        ) from error
    return Run(folder, plan, policy, env)


def weights_of(folder: Path, which: str = "best") -> dict[str, Any]:
    """The weights of a run's best or latest checkpoint; without an evaluation yet, the best is the latest."""
    if which not in ("best", "latest"):
        raise UsageError(
            f"which={which!r} is not a checkpoint", "A run has a best one and a latest one.", "Use best or latest."
        )
    checkpoints = Checkpoints(folder / "checkpoints", writer=False)
    best = read_json(folder / "best.json").get("step")
    if which == "best" and isinstance(best, int):
        try:
            return model_of(checkpoints.load(best, whole=False))
        except NoCheckpointError as error:
            warnings.warn(f"{error.what} The latest checkpoint is used instead.", stacklevel=2)
    return checkpoints.restore(model_of, whole=False)


def model_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's weights."""
    return unpack_tensors(checkpoint.read("model.safetensors"))


def adopt(line: Line, source: Path) -> None:
    """Start from another run's weights, target network included."""
    weights, own = weights_of(source), line.learner.model_arrays()
    shapes = [{name: value.shape for name, value in values.items()} for values in (weights, own)]
    unlike = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if unlike:
        raise UsageError(
            f"--from {source.name}: its weights do not fit this plan's network",
            f"They differ in {', '.join(unlike[:4])}{', ...' if len(unlike) > 4 else ''}.",
            f"Use the same net.* settings: see `qfleet runs show {source.name}`.",
        )
    restore(line.learner.net, weights)
    restore(line.learner.target, weights)


def estimate(plan: Plan, env: EnvMaker | None = None) -> dict[str, int]:
    """Memory and disk a plan needs on this machine."""
    world = make_train_world(plan, env)
    try:
        return estimate_memory(plan, world.spec)
    finally:
        world.close()


@contextmanager
def threads(plan: Plan) -> Iterator[None]:
    """Torch's thread count for the time of a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(plan.runtime.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_torch_rng(plan: Plan) -> Iterator[None]:
    """Torch's generator, which random layers draw from, seeded for the time of a run and then as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(plan.seed, LAYERS).integers(2**63)))
        yield


@contextmanager
def logbook(folder: Path) -> Iterator[logging.Logger]:
    """logs/run-0.log: the traceback of an error that ended this run."""
    (folder / "logs").mkdir(exist_ok=True)
    log, handler = (
        logging.getLogger(f"qfleet.{folder.name}"),
        logging.FileHandler(folder / "logs" / "run-0.log", delay=True),
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    try:
        yield log
    finally:
        log.removeHandler(handler)
        handler.close()


def introduction(plan: Plan, folder: Path, notes: Iterable[str]) -> dict[str, Any]:
    """What a watcher is told first."""
    return {
        "run": str(folder),
        "env": plan.env.id,
        "device": plan.runtime.device,
        "threads": plan.runtime.threads,
        "until_steps": plan.until.steps,
        "notes": list(notes),
    }


def failure(error: BaseException) -> Ending:
    """How a run ends that raised."""
    if isinstance(error, QfleetError):
        state = "diverged" if error.exit_code == 3 else "failed"
        return Ending(state, error.exit_code, error.what)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", 130, "stopped by SIGINT before it had begun")
    return Ending("failed", 1, f"{type(error).__name__}: {error}")
