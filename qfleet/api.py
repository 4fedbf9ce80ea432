"""What users call: train a plan, resume a run, load a run."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore, Policy
from qfleet.build.custom_parts import CustomParts, as_env_maker, given_parts, record_parts, require_parts, with_parts
from qfleet.build.make import make_policy
from qfleet.build.memory_check import estimate, require_network
from qfleet.build.resolve import torch_threads, usable_device
from qfleet.build.worlds import EnvMaker, make_train_world
from qfleet.distributed.local_run import is_on_ray, prepare_components, resume_here, run_as_mpi_worker, train_here
from qfleet.envs import AnyEnv, absolute_id
from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.learn import OptimizerMaker
from qfleet.nets import state_arrays
from qfleet.plan import check, diff, make_plan, names_code, read_plan
from qfleet.plan.local_paths import local_path
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.qlearn import CustomHead, Loss, Rule
from qfleet.replay import CustomSampler
from qfleet.save import Checkpoints
from qfleet.training.checkpoints.migrations import max_file_bytes
from qfleet.training.checkpoints.saved_weights import SavedWeights, load_into_policy, read_weights
from qfleet.training.env_trust import require_places, require_trust
from qfleet.training.log.run_log import Callback
from qfleet.training.trainer import GAVE_UP, OUT_OF_TIME, SOLVED
from qfleet.watch import Watcher, default_watcher, find_run, read_json, read_rows
from qfleet.watch.new_run_dir import require_free

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

AnyPath = str | Path
MAX_LOSS_LAYERS_BYTES = 256 << 20  # of a user's own loss, which are in the file but not in the policy


@dataclass(eq=False)
class Run:
    """A run on disk, and the policy it made."""

    path: Path
    plan: Plan
    policy: Policy
    make: EnvMaker | None = None  # of the user's own, for evaluations
    weights: SavedWeights | None = None  # of a run that was loaded: which checkpoint they come from

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
        from qfleet.training.evaluator import Evaluator

        plan = self.plan if seed is None else msgspec.structs.replace(self.plan, seed=seed)
        with torch_threads(plan.runtime.threads):
            found = Evaluator(plan, self.make).test(self.policy, max(1, episodes)) or {}
        named = {} if self.weights is None else self.weights.row()
        return {"kind": "eval", **named, "seed": plan.seed, **found}

    def record(self, file: AnyPath | None = None, episodes: int = 1) -> Path:
        """A video of the greedy policy."""
        from qfleet.training.video import record

        target = local_path(file or self.path / "videos" / "play.mp4")
        inside = self.path if target.is_relative_to(self.path) else None
        return record(self.plan, self.policy, target, episodes, self.make, run=inside)

    def frame(self, kind: str | None = None) -> "DataFrame":
        """The rows of metrics.jsonl as a pandas DataFrame, those of one kind if asked; needs the extra `pandas`."""
        from qfleet.watch.notebook.frame import rows_frame

        return rows_frame([({}, self.path)], kind)

    def plot(self, file: AnyPath | None = None) -> "Figure":
        """Return, loss and speed over steps as a figure of matplotlib; `file` saves it too. Needs the extra `plot`."""
        from qfleet.watch.plot import draw_runs

        return draw_runs([self.path], file)

    def __repr__(self) -> str:
        """Its folder, state, score and steps."""
        from qfleet.watch.notebook.run_html import run_line

        return f"Run({str(self.path)!r}: {escaped(run_line(self.path))})"

    def _repr_html_(self) -> str:
        """How it stands, and a small curve, in a notebook."""
        from qfleet.watch.notebook.run_html import run_html

        return run_html(self.path, self.plan.env.id, algorithm_name(self.plan))


def train(
    plan: Plan | str,
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    out: AnyPath = "runs",
    name: str | None = None,
    env: EnvMaker | AnyEnv | None = None,
    eval_env: EnvMaker | AnyEnv | None = None,
    torso: nn.Module | None = None,
    head: CustomHead | None = None,
    rule: Rule | None = None,
    loss: Loss | None = None,
    sampler: CustomSampler | None = None,
    optimizer: OptimizerMaker | None = None,
    explore: Explore | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
    watcher: Watcher | None = None,
    weights_from: AnyPath | None = None,
    command: list[str] | None = None,
) -> Run:
    """Train a plan, or an environment id with a preset, in a new run directory under `out`, to its end.

    The parts from `env` to `explore` are your own Python objects in place of the plan's; `qfleet.custom` documents
    each. They work in every runtime, and are passed again to `resume`. Progress is a screen in a terminal or a
    notebook, else sparse lines on standard error; `progress=False` shows nothing, `watcher` is your own. The first
    Ctrl-C saves and returns the run.
    """
    watcher = watcher if watcher is not None else default_watcher(progress)
    plan = checked(as_plan(plan, preset, overrides))
    out = local_path(out)
    custom_parts = given_parts(env, eval_env, torso, head, rule, loss, sampler, optimizer, explore)
    if is_on_ray(plan):
        from qfleet.distributed.ray import driver

        observers: dict[str, Any] = {"watcher": watcher, "callbacks": callbacks}
        folder = driver.train(
            plan, custom_parts, out=out, name=name, weights_from=weights_from, command=command, **observers
        )
        return load_ended(folder, custom_parts)
    run_as_mpi_worker(plan, custom_parts)
    source = None if weights_from is None else find_run(weights_from, out)
    folder, components = train_here(
        plan, custom_parts, out=out, name=name, source=source, command=command, callbacks=callbacks, watcher=watcher
    )
    return Run(folder, components.plan, components.policy, custom_parts.eval_maker)


def resume(
    path: AnyPath,
    *,
    steps: int | None = None,
    out: AnyPath = "runs",
    env: EnvMaker | AnyEnv | None = None,
    eval_env: EnvMaker | AnyEnv | None = None,
    torso: nn.Module | None = None,
    head: CustomHead | None = None,
    rule: Rule | None = None,
    loss: Loss | None = None,
    sampler: CustomSampler | None = None,
    optimizer: OptimizerMaker | None = None,
    explore: Explore | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
    watcher: Watcher | None = None,
    trust_env: bool = False,
    trust_run: bool = False,
    strict: bool = False,
) -> Run:
    """Resume a run exactly from its newest valid checkpoint; `steps` moves its end.

    Parts of your own are passed again. The resumed run is exact if their source is the same, they keep no state of
    their own, and draw random numbers only from torch's generator or from the one that they are given. Code that a
    foreign run names needs `trust_env`, places need `trust_run`. Progress is shown as by `train`.
    """
    watcher = watcher if watcher is not None else default_watcher(progress)
    folder = find_run(path, out)
    custom_parts = given_parts(env, eval_env, torso, head, rule, loss, sampler, optimizer, explore)
    before = open_plan(folder, custom_parts.env, trust_env or trust_run)
    require_places(folder, before, trust_run)
    changed_parts = require_parts(before, custom_parts, folder.name)
    plan = record_parts(before, custom_parts)
    if steps is not None:
        require_ahead(folder, steps, before)
        plan = with_steps(before, steps, read_json(folder / "status.json"))
    notes = [f"changed {name}: {old} -> {new}" for name, old, new in diff(before, plan)]
    options: dict[str, Any] = {"notes": notes, "changed_parts": changed_parts, "strict": strict}
    options |= {"watcher": watcher, "callbacks": callbacks}
    if is_on_ray(plan):
        from qfleet.distributed.ray import driver

        driver.resume(plan, custom_parts, folder=folder, **options)
        return load_ended(folder, custom_parts)
    run_as_mpi_worker(plan, custom_parts)
    components = resume_here(plan, custom_parts, folder, **options)
    return Run(folder, plan, components.policy, custom_parts.eval_maker)


def load_ended(folder: Path, parts: CustomParts) -> Run:
    """A run that has ended in another process: with its best weights if it is done, else with its latest."""
    ended = read_json(folder / "status.json").get("state")
    which = "best" if ended == "done" else "latest"
    return load(folder, which=which, env=parts.eval_maker, torso=parts.torso, head=parts.head, trust_env=True)


def as_plan(plan: Plan | str, preset: str | None, overrides: Mapping[str, Any] | None) -> Plan:
    """The plan that was given, or that of an environment id."""
    if isinstance(plan, str):
        return make_plan(plan, preset, overrides)
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    if preset is not None or overrides:
        raise UsageError(
            "preset= and overrides= do not go with a plan",
            "They make a plan from the id of an environment, and this plan is made already.",
            f'Write train("{plan.env.id}", preset=...) or Plan.of("{plan.env.id}", preset, overrides).',
        )
    return plan


def not_a_plan(given: Any) -> UsageError:
    """The error for a first argument that is neither a plan nor an id; an environment may know its own."""
    env_id = getattr(getattr(given, "spec", None), "id", "CartPole-v1")
    return UsageError(
        f"train was given a {type(given).__name__}",
        "It takes a plan, or the id of an environment.",
        f'Write train("{env_id}") or train("{env_id}", env=your_env).',
    )


def rehearse(
    plan: Plan,
    *,
    out: AnyPath = "runs",
    name: str | None = None,
    env: EnvMaker | None = None,
    weights_from: AnyPath | None = None,
) -> dict[str, int]:
    """The memory and disk that the plan needs; refuses what `train` would refuse, and writes nothing."""
    plan = checked(plan)
    out = local_path(out)
    if name is not None:
        require_free(out, name)
    source = None if weights_from is None else find_run(weights_from, out)
    with closing(make_train_world(plan, env)) as world:
        # Nothing is measured for a short run, and a long one is refused for the same reasons.
        short = msgspec.structs.replace(plan, until=msgspec.structs.replace(plan.until, steps=1))
        prepare_components(short, world, CustomParts(env), source, lambda text: None).close()
        return estimate(plan, world.spec)


def checked(plan: Plan) -> Plan:
    """The plan, with its values checked: msgspec does not check them when a Struct is made in Python."""
    try:
        plan = msgspec.convert(msgspec.to_builtins(plan), Plan)
    except msgspec.ValidationError as error:
        raise UsageError("the plan holds a value it cannot have", f"{error}.", "See `qfleet plan schema`.") from error
    check(plan)
    if not names_code(plan.env.id):
        return plan
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
    """Refuse an end that the run has passed; its own end, which the last step may have overshot, is allowed."""
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
    reason = str(status.get("reason", ""))
    until = plan.until
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
    env: EnvMaker | AnyEnv | None = None,
    torso: nn.Module | None = None,
    head: CustomHead | None = None,
    trust_env: bool = False,
) -> Run:
    """A run's policy, from its best checkpoint or its latest (`which`: best, latest, or any that can be read).

    `weights` of the run says which one it is; a best checkpoint that cannot be read is an error.
    """
    from qfleet.training.evaluator import Evaluator

    folder = find_run(path, out)
    make = as_env_maker("env", env)
    plan = open_plan(folder, make, trust_env)
    parts = CustomParts(make, torso=torso, head=head)
    require_parts(with_parts(plan, ("torso", "head")), parts, folder.name)
    with closing(Evaluator(plan, make).world(0, 1)) as world:
        if torso is None:
            require_network(plan, world.spec)
        policy = make_policy(plan, world.spec, torch.device(usable_device(plan)), parts)
    limit = max_file_bytes(state_arrays(policy.net).values())
    if plan.custom.loss is not None:
        limit += MAX_LOSS_LAYERS_BYTES
    weights = read_weights(folder, limit, which).without("loss_layers.")
    load_into_policy(policy, weights, plan, own_env=make is not None)
    return Run(folder, plan, policy, make, weights)
