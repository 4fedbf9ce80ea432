"""What users call: train a plan, resume a run, load a run."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore
from qfleet.act.predict import make_predictor
from qfleet.build.custom_parts import CustomParts, as_env_maker, given_parts, record_parts, require_parts, with_parts
from qfleet.build.memory_check import estimate
from qfleet.build.resolve import usable_device
from qfleet.build.worlds import EnvMaker, make_train_world
from qfleet.distributed.local_run import is_on_ray, prepare_components, resume_here, run_as_mpi_worker, train_here
from qfleet.envs import AnyEnv
from qfleet.given_plan import as_plan, checked, open_plan, require_ahead, require_whole_run, with_steps
from qfleet.learn import OptimizerMaker
from qfleet.plan import diff
from qfleet.plan.local_paths import local_path
from qfleet.plan.schema import Plan
from qfleet.qlearn import CustomHead, Loss, Rule
from qfleet.replay import CustomSampler
from qfleet.run_object import Run
from qfleet.training.callbacks import AnyCallback, checked_callbacks
from qfleet.training.checkpoints.saved_policy import restore_policy
from qfleet.training.env_trust import require_places
from qfleet.watch import Watcher, default_watcher, find_run, read_json
from qfleet.watch.new_run_dir import require_free

AnyPath = str | Path


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
    callbacks: Iterable[AnyCallback] = (),
    progress: bool = True,
    watcher: Watcher | None = None,
    weights_from: AnyPath | None = None,
    command: list[str] | None = None,
) -> Run:
    """Train a plan, or an environment id with a preset, in a new run directory under `out`, to its end.

    The parts from `env` to `explore` are your own Python objects in place of the plan's; `qfleet.custom` documents
    each. They work in every runtime, and are passed again to `resume`. The first Ctrl-C saves and returns the run.

    Args:
        plan: a plan, or the id of an environment.
        preset: with an id, the name of a preset, such as "rainbow-small".
        overrides: with an id, settings by their paths, such as {"algo.n_step": 3}.
        out: the folder that gets the run directory.
        name: the name of the run directory; by default that of environment and algorithm, with a number.
        env: your own environment: a class or a function that returns one.
        eval_env: another environment for evaluations; by default the same as `env`.
        torso: a `torch.nn.Module` from observations [N, *obs] to features [N, F], in place of `net.torso`.
        head: what the outputs of the network mean, in place of `net.head`.
        rule: how the next state is valued, in place of `algo.rule`.
        loss: the loss of every row, in place of `algo.loss`.
        sampler: which items of the replay are learned from, in place of `replay.sampler`.
        optimizer: a function that makes a `torch.optim.Optimizer`, in place of `optim`.
        explore: a function that chooses actions while training, in place of `algo.explore`.
        callbacks: objects of classes derived from `qfleet.Callback`, or functions of a row of metrics; a function that
            returns True stops the run.
        progress: show progress: a screen in a terminal or a notebook, else sparse lines on standard error.
        watcher: your own display of progress.
        weights_from: a run whose best weights this one starts with; nothing else is taken from it.
        command: the words of a command line, for `provenance.json`.

    Returns:
        The run, with its best policy if it is done.
    """
    watcher = watcher if watcher is not None else default_watcher(progress)
    plan = checked(as_plan(plan, preset, overrides))
    callbacks = checked_callbacks(callbacks)
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
    callbacks: Iterable[AnyCallback] = (),
    progress: bool = True,
    watcher: Watcher | None = None,
    trust_env: bool = False,
    trust_run: bool = False,
    strict: bool = False,
) -> Run:
    """Resume a run exactly from its newest valid checkpoint; `steps` moves its end.

    Parts of your own are passed again. The resumed run is exact if their source is the same, they keep no state of
    their own, and draw random numbers only from torch's generator or from the one that they are given. Code that a
    foreign run names needs `trust_env`, places need `trust_run`.

    Args:
        path: the run directory, its name in `out`, or "latest".
        steps: another end, counted from the beginning of the run.
        out: the folder in which a run is looked for by its name.
        env: your own environment: a class or a function that returns one.
        eval_env: another environment for evaluations; by default the same as `env`.
        torso: a `torch.nn.Module` from observations [N, *obs] to features [N, F], in place of `net.torso`.
        head: what the outputs of the network mean, in place of `net.head`.
        rule: how the next state is valued, in place of `algo.rule`.
        loss: the loss of every row, in place of `algo.loss`.
        sampler: which items of the replay are learned from, in place of `replay.sampler`.
        optimizer: a function that makes a `torch.optim.Optimizer`, in place of `optim`.
        explore: a function that chooses actions while training, in place of `algo.explore`.
        callbacks: objects of classes derived from `qfleet.Callback`, or functions of a row of metrics; a function that
            returns True stops the run.
        progress: show progress: a screen in a terminal or a notebook, else sparse lines on standard error.
        watcher: your own display of progress.
        trust_env: allow the code that the run directory of somebody else names as its environment.
        trust_run: allow that, and the addresses that it names.
        strict: refuse a damaged checkpoint; by default the next older one is taken.

    Returns:
        The run, after it has reached its end.
    """
    watcher = watcher if watcher is not None else default_watcher(progress)
    folder = find_run(path, out)
    callbacks = checked_callbacks(callbacks)
    custom_parts = given_parts(env, eval_env, torso, head, rule, loss, sampler, optimizer, explore)
    require_whole_run(folder)
    before = open_plan(folder, custom_parts.env, trust_env or trust_run)
    require_places(folder, before, trust_run)
    changed_parts = require_parts(before, custom_parts, folder.name)
    plan = record_parts(before, custom_parts)
    if steps is not None:
        require_ahead(folder, steps, before)
        plan = with_steps(plan, steps, read_json(folder / "status.json"))
    notes = [f"changed {name}: {old} -> {new}" for name, old, new in diff(before, plan)]
    options: dict[str, Any] = {"notes": notes, "changed_parts": changed_parts, "strict": strict}
    options |= {"watcher": watcher, "callbacks": callbacks}
    if is_on_ray(plan):
        from qfleet.distributed.ray import driver

        driver.resume(plan, custom_parts, folder, **options)
        return load_ended(folder, custom_parts)
    run_as_mpi_worker(plan, custom_parts)
    components = resume_here(plan, custom_parts, folder, **options)
    return Run(folder, plan, components.policy, custom_parts.eval_maker)


def load_ended(folder: Path, parts: CustomParts) -> Run:
    """A run that has ended in another process: with its best weights if it is done, else with its latest."""
    ended = read_json(folder / "status.json").get("state")
    which = "best" if ended == "done" else "latest"
    return load(folder, which=which, env=parts.eval_maker, torso=parts.torso, head=parts.head, trust_env=True)


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

    Args:
        path: the run directory, its name in `out`, or "latest".
        which: "best", "latest", or "any": the best, or if it cannot be read the latest.
        out: the folder in which a run is looked for by its name.
        env: the environment, if the run was trained in one that is a Python object.
        torso: the torso, if the run was trained with one of its own.
        head: the head, if the run was trained with one of its own.
        trust_env: allow the code that the run directory of somebody else names as its environment.

    Returns:
        The run, ready to act and to be evaluated.
    """
    from qfleet.training.evaluator import shown_world

    folder = find_run(path, out)
    make = as_env_maker("env", env)
    plan = open_plan(folder, make, trust_env)
    parts = CustomParts(make, torso=torso, head=head)
    require_parts(with_parts(plan, ("torso", "head")), parts, folder.name)
    with closing(shown_world(plan, make)) as world:
        device = torch.device(usable_device(plan))
        policy, weights = restore_policy(folder, plan, world.spec, parts, which, device)
    if world.spaces is not None:
        policy.predictor = make_predictor(plan, world.spaces)
    return Run(folder, plan, policy, make, weights)
