"""A run on Ray: the trainer (learner, log, checkpoints) in one Ray actor, the actors in others.

The replay is in the trainer's process, or in one of its own on any node (`runtime.replay_process`). The process that
was called, the driver, only starts them, passes signals on and shows what the trainer relays. When the driver ends, Ray
ends its job and every process that the job has started.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from qfleet import errors
from qfleet.build.components import Components, LearnerSide
from qfleet.build.custom_parts import CustomParts, pack_parts
from qfleet.build.make import join_components
from qfleet.build.memory_check import sample_replay
from qfleet.build.threads import operation_threads, torch_threads
from qfleet.build.worlds import make_train_world
from qfleet.data import Spec
from qfleet.data.wire_format import to_bytes
from qfleet.distributed.actors.pool import ActorPool, make_actor_pool
from qfleet.distributed.local_run import prepare_components
from qfleet.distributed.ray import messages
from qfleet.distributed.ray.relay import RelayReader
from qfleet.distributed.replay.client import RemoteReplay, join_remote_replay
from qfleet.distributed.worker.handle import WorkerHandle, await_ready
from qfleet.errors import QfleetError, UsageError
from qfleet.install import install_command
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.system.silence import SilenceTimer
from qfleet.system.worker_errors import WorkerHung, WorkerLost
from qfleet.training.callbacks import AnyCallback, Callback, split_callbacks
from qfleet.training.process.signals import StopRequest, listening
from qfleet.training.session import progress_note
from qfleet.watch import Watcher, find_run, program

try:
    import ray
except ImportError as error:
    raise UsageError(
        "runtime.type=ray, but Ray is not installed", "It is an extra.", f"Install it: {install_command('ray')}"
    ) from error

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qfleet.distributed.ray.actors import RayActorLauncher
from qfleet.distributed.ray.replay import make_ray_replay
from qfleet.distributed.ray.rpc import LearnerEndpoint
from qfleet.distributed.ray.session import session
from qfleet.distributed.ray.trainer_host import TrainerHost
from qfleet.distributed.ray.worker import PROCESS_ENDED, CallTransport, RayWorker

POLL_SECONDS = 0.25
START_SECONDS = 120.0
MAX_SILENT_SECONDS = 600.0  # the trainer answers every few tenths of a second, in a thread of its own
REPLY_SECONDS = 10.0
FAIL_SECONDS = 60.0
EXTRA_THREADS = 4  # of the trainer's process, besides one for each actor


def make_ray_components(
    plan: Plan, spec: Spec, custom_parts: CustomParts, endpoint: LearnerEndpoint | None
) -> Components:
    """The components of a run whose actors are on Ray; without an `endpoint` they can be inspected but not run."""
    runtime = ray_of(plan)

    def make_actors(learning: LearnerSide) -> ActorPool:
        replay = learning.batch_source.replay
        launcher = RayActorLauncher(plan, runtime, replay.spec, learning.learner.weights(), custom_parts, endpoint)
        # Ray may have to find a node first.
        return make_actor_pool(plan, spec, learning, launcher, custom_parts.explore, start_seconds=START_SECONDS)

    def make_replay(plan: Plan, spec: Spec) -> RemoteReplay:
        return make_ray_replay(plan, spec, runtime, custom_parts.sampler)

    if not runtime.replay_process:
        return join_components(plan, spec, make_actors, custom_parts)
    if endpoint is None:
        return join_components(
            plan, spec, make_actors, custom_parts, sample_replay
        )  # an empty replay, without a process
    return join_remote_replay(plan, spec, make_actors, custom_parts, make_replay)


def ray_of(plan: Plan) -> RayRuntime:
    """The plan's runtime, which is Ray."""
    if not isinstance(plan.runtime, RayRuntime):
        raise TypeError(f"runtime.type={plan.runtime.__struct_config__.tag} is not ray")
    return plan.runtime


def train(
    plan: Plan,
    custom_parts: CustomParts,
    *,
    out: str | Path,
    name: str | None,
    weights_from: str | Path | None,
    command: list[str] | None,
    watcher: Watcher | None,
    callbacks: Iterable[AnyCallback],
) -> Path:
    """Train on Ray; returns the run directory.

    Checks that need no Ray come first: starting it takes a while.
    """
    source = None if weights_from is None else find_run(weights_from, out)
    with torch_threads(operation_threads(plan)), closing(make_train_world(plan, custom_parts.env)) as world:
        components = prepare_components(plan, world, custom_parts, source, lambda text: None, progress_note(watcher))
        components.close()
    origin = None if source is None else str(source.absolute())
    task = messages.TrainTask(
        components.plan, str(Path(out).absolute()), fresh=True, name=name, weights_from=origin, command=command
    )
    return run_trainer(task, custom_parts, watcher, callbacks, components.notes)


def resume(
    plan: Plan,
    custom_parts: CustomParts,
    folder: Path,
    *,
    notes: list[str],
    changed_parts: list[str],
    strict: bool,
    watcher: Watcher | None,
    callbacks: Iterable[AnyCallback],
) -> Path:
    """Resume on Ray; returns the run directory."""
    task = messages.TrainTask(
        plan, str(folder.absolute()), fresh=False, notes=tuple(notes), changed_parts=tuple(changed_parts), strict=strict
    )
    return run_trainer(task, custom_parts, watcher, callbacks)


def run_trainer(
    task: messages.TrainTask,
    custom_parts: CustomParts,
    watcher: Watcher | None,
    callbacks: Iterable[AnyCallback],
    notes: Sequence[str] = (),
) -> Path:
    """Run the trainer on Ray, and deliver what it relays: plain functions of a row are called here.

    Callback objects see more than rows, so they are sent to the trainer.
    """
    objects, functions = split_callbacks(callbacks)
    reader = RelayReader(watcher, functions, notes)
    with session(task.plan):
        trainer = launch_trainer(task, custom_parts, objects)
        try:
            wait_until_ready(trainer, ray_of(task.plan))
            with listening(reader.watcher) as stop_request:
                result = wait_for_result(trainer, reader, stop_request)
        finally:
            trainer.stop()
            reader.close()
    if isinstance(result, messages.RunFailed):
        raise as_error(result)
    return Path(result.path)


def launch_trainer(
    task: messages.TrainTask, custom_parts: CustomParts, callbacks: Sequence[Callback] = ()
) -> WorkerHandle:
    """Start the trainer's process on this node, which has the run directory."""
    runtime = ray_of(task.plan)
    options = {
        "num_cpus": runtime.learner_cpus,
        "num_gpus": int((runtime.device or "").startswith("cuda")),
        "max_concurrency": task.plan.actors.num + EXTRA_THREADS,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    packed = pack_parts(custom_parts)
    host = ray.remote(TrainerHost).options(**options).remote()
    try:
        result = host.run.remote(to_bytes(task), packed, callbacks)
    except TypeError as error:
        raise UsageError(
            f"callbacks={callbacks!r} cannot be given to another process",
            f"On Ray they see the run in the process that trains, and Ray said: {error}",
            "Let them hold no open files, locks or generators: open these in on_start.",
        ) from error
    transport = CallTransport(host, host.start.remote(), messages.News, REPLY_SECONDS)
    return WorkerHandle(0, transport, RayWorker(host, result), start_seconds=START_SECONDS)


def wait_until_ready(trainer: WorkerHandle, runtime: RayRuntime) -> None:
    """Wait until the trainer's process has started, at most START_SECONDS."""
    try:
        await_ready([trainer])
    except WorkerLost as loss:
        raise UsageError(
            f"Ray did not start the learner on this node within {START_SECONDS:g} seconds",
            f"Ray said: {loss}",
            f"Is there room? It asks for runtime.learner_cpus={runtime.learner_cpus:g}.",
        ) from loss


def wait_for_result(trainer: WorkerHandle, reader: RelayReader, stop_request: StopRequest) -> messages.RunResult:
    """Deliver news and pass signals on until the run is over; returns its result."""
    try:
        return relay_until_over(trainer, reader, stop_request)
    except WorkerLost as error:
        raise QfleetError(
            "the learner's process on Ray has ended unexpectedly",
            f"Ray said: {str(error).removeprefix(PROCESS_ENDED)}",
            f"Go on from the last checkpoint: {program()} resume {reader.run or 'RUN'}",
        ) from error


def relay_until_over(trainer: WorkerHandle, reader: RelayReader, stop_request: StopRequest) -> messages.RunResult:
    """Deliver news and pass signals on until the run is over; raises WorkerLost if the trainer's process ends."""
    stop_sent = False
    silence = SilenceTimer(time.monotonic())
    trainer.ask(messages.GetNews(0))
    while True:
        parts = trainer.poll_reply(POLL_SECONDS)
        if silence.elapsed(time.monotonic()) > MAX_SILENT_SECONDS:
            raise WorkerHung(f"it did not answer for {MAX_SILENT_SECONDS:g} s")
        if stop_request.name is not None and not stop_sent:
            trainer.send(messages.RequestStop(stop_request.name))
            stop_sent = True
        if parts is None:
            continue
        silence.reset(time.monotonic())
        news: messages.News = parts[0]
        if deliver(trainer, reader, news):
            trainer.send(messages.StopByCallback())
        if news.result is not None:
            return news.result
        trainer.ask(messages.GetNews(reader.num_received))


def deliver(trainer: WorkerHandle, reader: RelayReader, news: messages.News) -> bool:
    """Deliver news; True if a callback wants the run to end. If a callback raises, the run fails first."""
    try:
        return reader.receive(news)
    except Exception as error:
        with suppress(WorkerLost):
            fail_run(trainer, reader, f"{type(error).__name__}: {error}")
        raise


def fail_run(trainer: WorkerHandle, reader: RelayReader, what: str) -> None:
    """Let the run fail, and wait until it is over, at most FAIL_SECONDS."""
    trainer.send(messages.FailByCallback(what))
    until = time.monotonic() + FAIL_SECONDS
    while time.monotonic() < until:
        news, _ = trainer.request(messages.GetNews(reader.num_received), messages.News, FAIL_SECONDS)
        if news.result is not None:
            return


def as_error(result: messages.RunFailed) -> Exception:
    """The error of a run, as an exception of the same class."""
    known = getattr(errors, result.error, None) if result.error else None
    if isinstance(known, type) and issubclass(known, QfleetError):
        return known(result.what, result.why, result.fix)
    if result.errno:
        return OSError(result.errno, result.what, result.file)
    return RuntimeError(f"{result.what}\n{result.trace}")
