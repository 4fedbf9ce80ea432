"""What users call: train a plan, resume a run, load a run."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore, Policy
from qfleet.build.autotune import settled_machine
from qfleet.build.components import EnvMaker, Line, make_policy, make_train_world
from qfleet.build.memory_check import estimate as estimate_memory
from qfleet.build.memory_check import require_memory, require_network
from qfleet.build.resolve import require_device, resolve, usable_device
from qfleet.data import World
from qfleet.distributed.runtime import StoodBy, is_away, line_for, stand_by
from qfleet.envs import absolute_id
from qfleet.errors import UsageError
from qfleet.learn.learner import arrays
from qfleet.nets import under_own_names
from qfleet.plan import diff, read_plan, trusted_settings
from qfleet.plan.draft import show
from qfleet.plan.local_paths import local_path
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.plan.validate import check
from qfleet.save import Checkpoints
from qfleet.train.checkpointing import MALFORMED, malformed
from qfleet.train.env_trust import require_places, require_trust, sign
from qfleet.train.evaluator import Judge
from qfleet.train.migrations import room_for
from qfleet.train.private_plan import keep_plan
from qfleet.train.run_log import Callback
from qfleet.train.saved_weights import Weights, give, weights_of
from qfleet.train.session import conduct, interactive_watcher, noting, teller, threads
from qfleet.train.trainer import GAVE_UP, OUT_OF_TIME, SOLVED, Course
from qfleet.train.video import record
from qfleet.watch import Watcher, find_run, new_run_dir, provenance, read_json, read_rows, write_json
from qfleet.watch.run_directory import check_name, next_name

AnyPath = str | Path


class Run:
    """A run on disk, and the policy it made."""

    def __init__(
        self,
        path: Path,
        plan: Plan,
        policy: Policy,
        make: EnvMaker | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.path, self.plan, self.policy, self.make = path, plan, policy, make
        self.weights = weights  # of a run that was loaded: whose they are

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
            found = Judge(plan, self.make).test(self.policy, max(1, episodes)) or {}
        named = {} if self.weights is None else self.weights.row()
        return {"kind": "eval", **named, "seed": plan.seed, **found}

    def record(self, file: AnyPath | None = None, episodes: int = 1) -> Path:
        """A video of the greedy policy."""
        target = local_path(file or self.path / "videos" / "play.mp4")
        inside = self.path if target.is_relative_to(self.path) else None
        return record(self.plan, self.policy, target, episodes, self.make, run=inside)

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
    plan, out = checked(plan), local_path(out)
    if is_away(plan):
        from qfleet.distributed.ray import driver

        heard: dict[str, Any] = {"watcher": watcher, "callbacks": callbacks}
        own = (env, torso, explore)
        return driver.train(plan, own, out=out, name=name, weights_from=weights_from, command=command, **heard)
    if stand_by(plan, env, torso, explore):
        raise StoodBy(0)
    watcher = watcher if watcher is not None else interactive_watcher()
    with threads(plan):
        world = make_train_world(plan, env)

    told: list[str] = []  # of the run whose weights this one begins with, before there is a diary

    def begin(course: Course) -> list[str]:
        for text in told:
            teller(course.diary)(text)
        course.keeper.require_space()
        course.doubt(course.unpromised())
        course.doubt([] if course.line.partners is None else course.line.partners.chances())
        course.begin()
        return course.line.notes

    with closing(world):
        source = None if weights_from is None else find_run(weights_from, out)
        with closing(prepared(plan, world, env, torso, explore, source, told.append, noting(watcher))) as line:
            plan = line.plan
            chosen = next_name(plan.env.id, algorithm_name(plan)) if name is None else name
            folder = new_run_dir(out, plan.env.id, chosen)
            keep_plan(plan, folder / "run.toml")
            origin = {**provenance(command), "own_env": env is not None, "not_exact": line.doubts}
            write_json(folder / "provenance.json", origin)
            sign(folder, plan.env, trusted_settings(plan))
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
    trust_run: bool = False,
    strict: bool = False,
) -> Run:
    """Go on with a run exactly where its newest valid checkpoint stands; `steps` moves its end.

    What was an object of yours (env, torso, explore) is given again; going on is exact if it is the same one, and an
    explore function has no memory of its own. Code that a foreign run names needs `trust_env`, places need `trust_run`.
    """
    folder = find_run(path, out)
    before = open_plan(folder, env, trust_env or trust_run)
    require_places(folder, before, trust_run)
    plan = before if steps is None else extended(folder, before, steps)
    notes = [f"changed {name}: {old} -> {new}" for name, old, new in diff(before, plan)]
    if is_away(plan):
        from qfleet.distributed.ray import driver

        more: dict[str, Any] = {"watcher": watcher, "callbacks": callbacks, "trust_env": trust_env}
        own = (env, torso, explore)
        return driver.resume(plan, own, folder=folder, steps=steps, strict=strict, trust_run=trust_run, **more)
    if stand_by(plan, env, torso, explore):
        raise StoodBy(0)
    with threads(plan):
        world = make_train_world(plan, env)

    def begin(course: Course) -> list[str]:
        lost = course.come_back(strict=strict)
        keep_plan(plan, folder / "run.toml")
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
    tell: Callable[[str], object] = lambda text: None,
) -> Line:
    """The line of a new run, with nothing left open and nothing on the disk yet; what cannot be is refused here.

    `tell` hears what takes a while.
    """
    asked_threads = plan.runtime.threads
    plan = resolve(plan, world.spec, own_torso=torso is not None, own_explore=explore is not None)
    require_memory(plan, world.spec)
    plan, told, doubts = settled_machine(plan, asked_threads, world.spec, tell)
    line = line_for(plan, world, env, torso, explore)
    line.notes = [*getattr(world, "notes", ()), *told, *line.notes]
    line.doubts = doubts
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
    plan, out = checked(plan), local_path(out)
    if name is not None:
        require_free(out, name)
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


def extended(folder: Path, plan: Plan, steps: int) -> Plan:
    """A run's plan with another end, if the run is not past it."""
    require_ahead(folder, steps, plan)
    return with_steps(plan, steps, read_json(folder / "status.json"))


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
    """A run's policy, from its best checkpoint or its latest (`which`: best, latest, or any that can be read).

    `weights` of the answer says which one it is; a best checkpoint that cannot be read is an error.
    """
    folder = find_run(path, out)
    plan = open_plan(folder, env, trust_env)
    judge = Judge(plan, env)
    world = judge.world(0, 1)
    try:
        if torso is None:
            require_network(plan, world.spec)
        policy = make_policy(plan, world.spec, torch.device(usable_device(plan)), torso)
    finally:
        world.close()
    weights = weights_of(folder, room_for(arrays(policy.net).values()), which)
    give(policy, weights, plan, own_env=env is not None)
    return Run(folder, plan, policy, env, weights)


def adopt(line: Line, source: Path, warn: Callable[[str], object]) -> None:
    """Start from another run's weights, target network included."""
    own = line.learner.model_arrays()
    found = weights_of(source, room_for(own.values()), warn=warn)
    weights = found.arrays
    with suppress(KeyError):
        weights = under_own_names(own.keys(), weights)
    shapes = [{name: value.shape for name, value in values.items()} for values in (weights, own)]
    unlike = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if unlike:
        there = net_settings(source, line.plan)
        raise UsageError(
            f"--from {source.name}: its weights do not fit this plan's network",
            f"They differ in {', '.join(unlike[:4])}{', ...' if len(unlike) > 4 else ''}.",
            f"Give this run the same network: {there}"
            if there
            else f"Its net.* settings are the same; are the environment's spaces, too? See {source / 'run.toml'}.",
        )
    try:
        line.learner.begin_with(weights)
    except MALFORMED as error:
        raise malformed(found.checkpoint, error) from error
    line.notes.append(f"begins with the {found.text(line.plan)}, of {source.name}")


def net_settings(source: Path, plan: Plan) -> str:
    """The settings of another run's network that this plan does not have, as they are typed."""
    try:
        found = diff(read_plan(source / "run.toml"), plan)
    except UsageError:
        return f"see net.* in {source / 'run.toml'}"
    paths = [(path, value) for path, value, _ in found if path.startswith("net.") or path == "env.normalize"]
    return " ".join(f"{path}={show(value).strip('[]').replace(' ', '')}" for path, value in paths)


def estimate(plan: Plan, env: EnvMaker | None = None) -> dict[str, int]:
    """Memory and disk a plan needs on this machine."""
    world = make_train_world(plan, env)
    try:
        return estimate_memory(plan, world.spec)
    finally:
        world.close()
