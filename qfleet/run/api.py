"""What users call: train a plan, resume a run, load a run."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore, Policy
from qfleet.data import World
from qfleet.envs import absolute_id
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.learn import restore
from qfleet.plan import check, diff, read_plan, write_plan
from qfleet.plan.schema import Plan
from qfleet.run.conduct import conduct, teller, threads
from qfleet.run.course import GAVE_UP, OUT_OF_TIME, SOLVED, Course, unpromised
from qfleet.run.diary import Callback
from qfleet.run.judge import Judge
from qfleet.run.measure import settled_machine
from qfleet.run.memory import estimate as estimate_memory
from qfleet.run.memory import require_memory
from qfleet.run.older import arrays_in
from qfleet.run.resolve import require_device, resolve, usable_device
from qfleet.run.runtime import StoodBy, is_away, line_for, stand_by
from qfleet.run.trust import require_trust, sign
from qfleet.run.video import record
from qfleet.run.wiring import EnvMaker, Line, make_policy, make_train_world
from qfleet.save import Checkpoint, Checkpoints
from qfleet.watch import Watcher, find_run, new_run_dir, provenance, read_json, read_rows, write_json
from qfleet.watch.runs import check_name

AnyPath = str | Path


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

    def record(self, file: AnyPath | None = None, episodes: int = 1) -> Path:
        """A video of the greedy policy."""
        return record(self.plan, self.policy, Path(file or self.path / "videos" / "play.mp4"), episodes, self.make)

    def __repr__(self) -> str:
        """Where it is and how it stands."""
        return f"Run({str(self.path)!r}, state={self.status.get('state')!r})"


def train(
    plan: Plan,
    *,
    out: AnyPath = "runs",
    name: str | None = None,
    env: EnvMaker | None = None,
    torso: nn.Module | None = None,
    explore: Explore | None = None,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    weights_from: AnyPath | None = None,
    command: list[str] | None = None,
) -> Run:
    """Train a plan in a new run directory under `out`, to its end."""
    plan = checked(plan)
    if is_away(plan):
        from qfleet.run import ray

        heard: dict[str, Any] = {"watcher": watcher, "callbacks": callbacks}
        own = (env, torso, explore)
        return ray.train(plan, own, out=out, name=name, weights_from=weights_from, command=command, **heard)
    if stand_by(plan, env, torso, explore):
        raise StoodBy(0)
    with threads(plan):
        world = make_train_world(plan, env)

    told: list[str] = []  # of the run whose weights this one begins with, before there is a diary

    def begin(course: Course) -> list[str]:
        for text in told:
            teller(course.diary)(text)
        course.keeper.require_space()
        course.doubt(unpromised(plan.runtime.device))
        course.doubt([] if course.line.partners is None else course.line.partners.chances())
        course.begin()
        return course.line.notes

    with closing(world):
        source = None if weights_from is None else find_run(weights_from, out)
        with closing(prepared(plan, world, env, torso, explore, source, told.append)) as line:
            plan = line.plan
            folder = new_run_dir(Path(out), plan.env.id, name)
            write_plan(plan, folder / "run.toml")
            write_json(folder / "provenance.json", {**provenance(command), "own_env": env is not None})
            sign(folder, plan.env)
            conduct(line, folder, begin, env=env, callbacks=callbacks, watcher=watcher)
    return Run(folder, plan, line.policy, env)


def resume(
    path: AnyPath,
    *,
    steps: int | None = None,
    out: AnyPath = "runs",
    env: EnvMaker | None = None,
    torso: nn.Module | None = None,
    explore: Explore | None = None,
    callbacks: Iterable[Callback] = (),
    watcher: Watcher | None = None,
    trust_env: bool = False,
    strict: bool = False,
) -> Run:
    """Go on with a run exactly where its newest valid checkpoint stands; `steps` moves its end.

    What was an object of yours (env, torso, explore) is given again; going on is exact if it is the same one, and an
    explore function has no memory of its own.
    """
    folder = find_run(path, out)
    before = open_plan(folder, env, trust_env)
    if steps is not None:
        require_ahead(folder, steps, before)
    plan = before if steps is None else with_steps(before, steps, read_json(folder / "status.json"))
    notes = [f"changed {name}: {old} -> {new}" for name, old, new in diff(before, plan)]
    if is_away(plan):
        from qfleet.run import ray

        heard: dict[str, Any] = {"watcher": watcher, "callbacks": callbacks}
        own = (env, torso, explore)
        return ray.resume(plan, own, folder=folder, steps=steps, trust_env=trust_env, strict=strict, **heard)
    if stand_by(plan, env, torso, explore):
        raise StoodBy(0)
    with threads(plan):
        world = make_train_world(plan, env)

    def begin(course: Course) -> list[str]:
        lost = course.come_back(strict=strict)
        write_plan(plan, folder / "run.toml")
        course.diary.events.event("resumed", env_steps=course.steps, changes=notes, lost_episodes=lost)
        if plan.save.replay == "none":
            course.diary.warn(f"replay was not saved: refilling {plan.algo.learn_start_steps} steps before learning")
        return [f"resumed at step {course.steps}", *notes]

    with closing(world):
        if plan.runtime.device is not None:
            require_device("runtime.device", plan.runtime.device)
        require_memory(plan, world.spec)
        with closing(line_for(plan, world, env, torso, explore)) as line:
            conduct(line, folder, begin, env=env, callbacks=callbacks, watcher=watcher)
    return Run(folder, plan, line.policy, env)


def prepared(
    plan: Plan,
    world: World,
    env: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    source: Path | None,
    warn: Callable[[str], object],
) -> Line:
    """The line of a new run, with nothing left open and nothing on the disk yet; what cannot be is refused here."""
    asked_threads = plan.runtime.threads
    plan = resolve(plan, world.spec, own_torso=torso is not None, own_explore=explore is not None)
    require_memory(plan, world.spec)
    plan, told = settled_machine(plan, asked_threads, world.spec)
    line = line_for(plan, world, env, torso, explore)
    line.notes = [*getattr(world, "notes", ()), *told, *line.notes]
    with ExitStack() as unless_all_is_well:
        unless_all_is_well.callback(line.close)
        if source is not None:
            adopt(line, source, warn)
        unless_all_is_well.pop_all()
    return line


def rehearse(
    plan: Plan,
    *,
    out: AnyPath = "runs",
    name: str | None = None,
    env: EnvMaker | None = None,
    weights_from: AnyPath | None = None,
) -> dict[str, int]:
    """Refuse what `train` would refuse, and make nothing; otherwise the memory and disk that the plan needs."""
    plan = checked(plan)
    if name is not None:
        require_free(Path(out), name)
    source = None if weights_from is None else find_run(weights_from, out)
    with closing(make_train_world(plan, env)) as world:
        # A short run's choices are not measured, and nothing else is refused for a long one.
        short = msgspec.structs.replace(plan, until=msgspec.structs.replace(plan.until, steps=1))
        prepared(short, world, env, None, None, source, lambda text: None).close()
        return estimate_memory(plan, world.spec)


def require_free(out: Path, name: str) -> None:
    """Refuse a name that no new run can have."""
    check_name(name)
    if (out / name).exists():
        raise UsageError(
            f"there is already a run called {name!r} in {out}",
            "a new run never writes into the directory of an old one",
            f"choose another --name, or go on with it: qfleet resume {out / name}",
        )


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


def require_ahead(folder: Path, steps: int, plan: Plan) -> None:
    """Refuse an end that the run is past already; its own end, which the last step may have overshot, is as it was."""
    reached = max(Checkpoints(folder / "checkpoints", writer=False).steps(), default=0)
    if steps >= reached or steps == plan.until.steps:
        return
    raise UsageError(
        f"--steps {steps} is behind {folder.name}, which has made {reached} steps",
        "Steps are counted from the beginning of the run, and what is learned cannot be taken back.",
        f"Give more than {reached}, or leave --steps out.",
    )


def with_steps(plan: Plan, steps: int, status: dict[str, Any]) -> Plan:
    """The plan with another end; a score, time or patience that ended it before no longer does."""
    reason, until = str(status.get("reason", "")), plan.until
    score = None if reason.startswith(SOLVED) else until.score
    seconds = None if reason.startswith(OUT_OF_TIME) else until.seconds
    patience = None if reason.startswith(GAVE_UP) else plan.steer.stop_patience
    return msgspec.structs.replace(
        plan,
        until=msgspec.structs.replace(until, steps=steps, score=score, seconds=seconds),
        steer=msgspec.structs.replace(plan.steer, stop_patience=patience),
    )


def load(
    path: AnyPath,
    *,
    which: str = "best",
    out: AnyPath = "runs",
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


def weights_of(folder: Path, which: str = "best", warn: Callable[[str], object] | None = None) -> dict[str, Any]:
    """The weights of a run's best or latest checkpoint; without an evaluation yet, the best is the latest."""
    if which not in ("best", "latest"):
        raise UsageError(
            f"which={which!r} is not a checkpoint", "A run has a best one and a latest one.", "Use best or latest."
        )
    checkpoints = Checkpoints(folder / "checkpoints", writer=False, warn=warn)
    best = read_json(folder / "best.json").get("step")
    if which == "best" and isinstance(best, int):
        try:
            return model_of(checkpoints.load(best, whole=False))
        except NoCheckpointError as error:
            checkpoints.warn(f"{error.what} The latest checkpoint is used instead.")
    return checkpoints.restore(model_of, whole=False)


def model_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's weights."""
    return arrays_in(checkpoint, "model.safetensors")


def adopt(line: Line, source: Path, warn: Callable[[str], object]) -> None:
    """Start from another run's weights, target network included."""
    weights, own = weights_of(source, warn=warn), line.learner.model_arrays()
    shapes = [{name: value.shape for name, value in values.items()} for values in (weights, own)]
    unlike = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if unlike:
        raise UsageError(
            f"--from {source.name}: its weights do not fit this plan's network",
            f"They differ in {', '.join(unlike[:4])}{', ...' if len(unlike) > 4 else ''}.",
            f"Use the same net.* settings: see `qfleet runs show {source.name}`.",
        )
    line.learner.begin_with(weights)


def estimate(plan: Plan, env: EnvMaker | None = None) -> dict[str, int]:
    """Memory and disk a plan needs on this machine."""
    world = make_train_world(plan, env)
    try:
        return estimate_memory(plan, world.spec)
    finally:
        world.close()
