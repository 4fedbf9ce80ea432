"""A run in this process, new or resumed. On Ray this is the process that trains, not the driver's."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.act.predict import make_predictor
from qfleet.build.components import Components
from qfleet.build.custom_parts import CustomParts, record_parts, replaced_settings
from qfleet.build.machine.choices import choose_machine_settings
from qfleet.build.make import make_components
from qfleet.build.memory_check import require_memory
from qfleet.build.resolve import require_device, resolve
from qfleet.build.threads import operation_threads, torch_threads
from qfleet.build.worlds import EnvMaker, make_train_world, resolve_data
from qfleet.data import Spec, World
from qfleet.distributed.starting_weights import load_weights_from
from qfleet.envs import VALIDATION, make_world
from qfleet.errors import UsageError
from qfleet.plan import needs_trust, trusted_settings
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import InlineRuntime, Plan, RayRuntime
from qfleet.plan.secrets import write_run_plan
from qfleet.plan.traits import begins_with_data, learns_from_data
from qfleet.training.callbacks import AnyCallback
from qfleet.training.checkpoints.saved_policy import keep_spaces
from qfleet.training.env_trust import sign
from qfleet.training.process.signals import StopRequest
from qfleet.training.session import progress_note, run_session, warner
from qfleet.training.trainer import Trainer
from qfleet.watch import Watcher, collect_provenance, new_run_dir, write_json
from qfleet.watch.new_run_dir import next_name

if TYPE_CHECKING:
    from qfleet.distributed.ray.rpc import LearnerEndpoint


class RankFinished(SystemExit):
    """This process was another learner of a run that MPI has started, and that run is over."""


def is_on_ray(plan: Plan) -> bool:
    """Does this plan train in a process of Ray's?"""
    if not isinstance(plan.runtime, RayRuntime):
        return False
    import_module("qfleet.distributed.ray.driver")  # raises if Ray is not installed
    return True


def run_as_mpi_worker(plan: Plan, custom_parts: CustomParts) -> None:
    """If MPI has started this process as another learner, run it; raises `RankFinished` when its run is over."""
    if plan.learners.backend != "mpi" or plan.learners.num == 1:
        return
    from qfleet.distributed import mpi

    if mpi.is_worker_rank(plan):
        mpi.rank_main(custom_parts)
        raise RankFinished(0)


def train_here(
    plan: Plan,
    custom_parts: CustomParts,
    *,
    out: Path,
    name: str | None,
    source: Path | None,
    command: list[str] | None,
    callbacks: Iterable[AnyCallback],
    watcher: Watcher | None,
    endpoint: "LearnerEndpoint | None" = None,
    stop_request: StopRequest | None = None,
) -> tuple[Path, Components]:
    """Train a checked plan to its end in a new run directory; returns the directory and the run's components.

    `source` is the run whose weights this one begins with. On Ray, actors reach the run through `endpoint`, and
    `stop_request` receives the signals that the driver passes on.
    """
    env = custom_parts.env
    warnings: list[str] = []  # of the run whose weights this one begins with, before there is a log

    def begin(trainer: Trainer) -> list[str]:
        for text in warnings:
            warner(trainer.run_log)(text)
        trainer.start()
        return [*trainer.components.notes, *use_spaces(trainer.components, world, folder)]

    with torch_threads(operation_threads(plan)):
        world = make_train_world(plan, env)
    with ExitStack() as closing_all:
        closing_all.callback(world.close)
        components = prepare_components(
            plan, world, custom_parts, source, warnings.append, progress_note(watcher), endpoint
        )
        closing_all.callback(components.close)
        plan = components.plan
        chosen = next_name(plan.env.id, algorithm_name(plan)) if name is None else name
        folder = new_run_dir(out, plan.env.id, chosen)
        origin = {**collect_provenance(command), "own_env": env is not None, "not_exact": components.inexact_reasons}
        write_origin(plan, folder, origin)
        observers: dict[str, Any] = {"callbacks": callbacks, "watcher": watcher, "stop_request": stop_request}
        run_session(components, folder, begin, env=custom_parts.eval_maker, **observers)
    return folder, components


def write_origin(plan: Plan, folder: Path, origin: dict[str, Any]) -> None:
    """Write the plan and the origin of a new run, signed if its settings need trust."""
    write_run_plan(plan, folder / "run.toml")
    write_json(folder / "provenance.json", origin)
    settings = trusted_settings(plan)
    if settings or needs_trust(plan.env):
        sign(folder, plan.env, settings)


def use_spaces(components: Components, world: World, folder: Path) -> list[str]:
    """Keep the environment's spaces in the run's folder, and let the policies predict in them; returns notes."""
    if world.spaces is not None:
        for policy in components.policies:
            policy.predictor = make_predictor(components.plan, world.spaces)
    note = keep_spaces(folder, world.spaces)
    return [] if note is None else [note]


def resume_here(
    plan: Plan,
    custom_parts: CustomParts,
    folder: Path,
    *,
    notes: Sequence[str],
    changed_parts: Sequence[str],
    strict: bool,
    callbacks: Iterable[AnyCallback],
    watcher: Watcher | None,
    endpoint: "LearnerEndpoint | None" = None,
    stop_request: StopRequest | None = None,
) -> Components:
    """Go on with the run in `folder` by `plan`; `notes` say what was changed in it. Returns the run's components.

    `changed_parts` are the user's own parts that are not those of the beginning.
    """
    env = custom_parts.env

    def begin(trainer: Trainer) -> list[str]:
        lost = trainer.resume(strict=strict)
        trainer.run_log.mark_inexact(changed_parts)
        write_run_plan(plan, folder / "run.toml")
        trainer.run_log.events.event("resumed", env_steps=trainer.steps, changes=list(notes), lost_episodes=lost)
        if plan.save.replay == "none" and not learns_from_data(plan):
            trainer.run_log.warn(f"replay was not saved: refilling {plan.algo.learn_start_steps} steps before learning")
        return [f"resumed at step {trainer.steps}", *notes, *use_spaces(trainer.components, world, folder)]

    with torch_threads(operation_threads(plan)):
        world = make_train_world(plan, env)
    with closing(world):
        if plan.runtime.device is not None:
            require_device("runtime.device", plan.runtime.device)
        require_memory(plan, world.spec)
        with closing(make_components_here(plan, world, custom_parts, endpoint)) as components:
            run_session(
                components,
                folder,
                begin,
                env=custom_parts.eval_maker,
                callbacks=callbacks,
                watcher=watcher,
                stop_request=stop_request,
            )
    return components


def prepare_components(
    plan: Plan,
    world: World,
    custom_parts: CustomParts,
    source: Path | None,
    warn: Callable[[str], object],
    show: Callable[[str], object] = lambda text: None,
    endpoint: "LearnerEndpoint | None" = None,
) -> Components:
    """The components of a new run, with every setting chosen and nothing on the disk yet; refuses what cannot run.

    `show` is called with what takes a while.
    """
    given = plan.runtime
    recorded = record_parts(plan, custom_parts)
    replaced = replaced_settings(plan, recorded)
    plan = resolve(recorded, world.spec)
    plan, data_notes = resolve_data(plan, world.spec, custom_parts.eval_maker)
    if plan.save.dataset is not None:
        from qfleet.build.offline.run_recorder import resolve_recording  # an extra

        plan = resolve_recording(plan, world.spec)
    require_eval_env(plan, custom_parts.eval_env, world.spec)
    require_memory(plan, world.spec)
    plan, notes, inexact_reasons = choose_machine_settings(plan, given, world.spec, show)
    components = make_components_here(plan, world, custom_parts, endpoint)
    components.notes = [*getattr(world, "notes", ()), *replaced, *data_notes, *notes, *components.notes]
    components.inexact_reasons = inexact_reasons
    with ExitStack() as close_on_error:
        close_on_error.callback(components.close)
        begin_with_data(components)
        if source is not None:
            load_weights_from(components, source, warn)
        close_on_error.pop_all()
    return components


def begin_with_data(components: Components) -> None:
    """Give a new run what it takes from its data set: means and deviations, or the first steps in its replay."""
    if learns_from_data(components.plan) and components.plan.env.normalize != "off":
        from qfleet.build.offline.data_statistics import use_data_statistics  # an extra

        use_data_statistics(components)
    if begins_with_data(components.plan):
        from qfleet.build.offline.prefill import fill_replay  # an extra

        fill_replay(components)


def require_eval_env(plan: Plan, make: EnvMaker | None, spec: Spec) -> None:
    """Refuse a user's own environment for evaluations that has other spaces than that of training."""
    if make is None:
        return
    with closing(make_world(plan.env, seed=plan.seed, stream=VALIDATION, num=1, make=make)) as world:
        found = world.spec
    if found != spec:
        raise UsageError(
            "eval_env has other spaces than the environment of training",
            f"Observations {found.input_shape} {found.dtype} and actions {found.actions}, "
            f"not {spec.input_shape} {spec.dtype} and {spec.actions}.",
            "Let both environments have the same observation and action spaces, and both or none action masks.",
        )


def make_components_here(
    plan: Plan, world: World, custom_parts: CustomParts, endpoint: "LearnerEndpoint | None"
) -> Components:
    """The components of a run: all in this process, unless the plan asks for others."""
    if isinstance(plan.runtime, InlineRuntime) and plan.learners.num == 1:
        components = make_components(plan, world, custom_parts)
    else:
        from qfleet.distributed.components import components_for  # most runs need no other process

        components = components_for(plan, world, custom_parts, endpoint)
    if plan.save.dataset is not None:
        from qfleet.build.offline.run_recorder import record_into  # an extra

        record_into(components, world)
    return components
