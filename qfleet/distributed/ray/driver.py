"""A run on Ray: the trainer (learner, log, checkpoints) in one Ray actor, the actors in others.

The replay is in the trainer's process, or in one of its own on any node (`runtime.replay_process`). The process that
was called, the driver, only starts them, passes signals on and shows what the trainer relays. When the driver ends, Ray
ends its job and every process that the job has started.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from qfleet import errors
from qfleet.build.components import Components, LearnerSide
from qfleet.build.make import UserParts, join_components
from qfleet.build.memory_check import sample_replay
from qfleet.build.resolve import torch_threads
from qfleet.build.worlds import make_train_world
from qfleet.data import Spec
from qfleet.distributed.actors.pool import ActorPool, make_actor_pool
from qfleet.distributed.local_run import prepare_components
from qfleet.distributed.ray.relay import RelayReader
from qfleet.distributed.replay.client import join_remote_replay
from qfleet.errors import QfleetError, UsageError
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.training.log.run_log import Callback
from qfleet.training.process.signals import StopRequest, listening
from qfleet.training.session import interactive_watcher, progress_note
from qfleet.watch import Watcher, find_run, program

try:
    import ray
except ImportError as error:
    raise UsageError(
        "runtime.type=ray, but Ray is not installed", "It is an extra.", 'Install it: pip install "qfleet[ray]"'
    ) from error

from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qfleet.distributed.ray.actors import RayActorLauncher
from qfleet.distributed.ray.replay import make_ray_replay
from qfleet.distributed.ray.rpc import LearnerEndpoint
from qfleet.distributed.ray.session import session
from qfleet.distributed.ray.trainer_host import TrainerHost, TrainResult, TrainTask

POLL_SECONDS = 0.25
START_SECONDS = 120.0
REPLY_SECONDS = 10.0
FAIL_SECONDS = 60.0
EXTRA_THREADS = 4  # of the trainer's process, besides one for each actor


def make_ray_components(plan: Plan, spec: Spec, user_parts: UserParts, endpoint: LearnerEndpoint | None) -> Components:
    """The components of a run whose actors are on Ray; without an `endpoint` they can be inspected but not run."""
    runtime = ray_of(plan)
    torso = user_parts[1]

    def make_actors(learning: LearnerSide) -> ActorPool:
        launcher = RayActorLauncher(
            plan, runtime, learning.batch_source.replay.spec, learning.learner.weights(), user_parts, endpoint
        )
        # Ray may have to find a node first.
        return make_actor_pool(plan, spec, learning, launcher, user_parts[2], start_seconds=START_SECONDS)

    if not runtime.replay_process:
        return join_components(plan, spec, make_actors, torso)
    if endpoint is None:
        return join_components(plan, spec, make_actors, torso, sample_replay)  # an empty replay, without a process
    return join_remote_replay(plan, spec, make_actors, torso, lambda plan, spec: make_ray_replay(plan, spec, runtime))


def ray_of(plan: Plan) -> RayRuntime:
    """The plan's runtime, which is Ray."""
    if not isinstance(plan.runtime, RayRuntime):
        raise TypeError(f"runtime.type={plan.runtime.__struct_config__.tag} is not ray")
    return plan.runtime


def train(
    plan: Plan,
    user_parts: UserParts,
    *,
    out: str | Path,
    name: str | None,
    weights_from: str | Path | None,
    command: list[str] | None,
    watcher: Watcher | None,
    callbacks: Iterable[Callback],
) -> Path:
    """Train on Ray; returns the run directory.

    Checks that need no Ray come first: starting it takes a while.
    """
    source = None if weights_from is None else find_run(weights_from, out)
    with torch_threads(plan.runtime.threads), closing(make_train_world(plan, user_parts[0])) as world:
        components = prepare_components(plan, world, user_parts, source, lambda text: None, progress_note(watcher))
        components.close()
    origin = None if source is None else str(source.absolute())
    task = TrainTask(
        components.plan, str(Path(out).absolute()), fresh=True, name=name, weights_from=origin, command=command
    )
    return run_trainer(task, user_parts, watcher, callbacks, components.notes)


def resume(
    plan: Plan,
    user_parts: UserParts,
    *,
    folder: Path,
    notes: list[str],
    strict: bool,
    watcher: Watcher | None,
    callbacks: Iterable[Callback],
) -> Path:
    """Resume on Ray; returns the run directory."""
    task = TrainTask(plan, str(folder.absolute()), fresh=False, notes=notes, strict=strict)
    return run_trainer(task, user_parts, watcher, callbacks)


def run_trainer(
    task: TrainTask,
    user_parts: UserParts,
    watcher: Watcher | None,
    callbacks: Iterable[Callback],
    notes: Sequence[str] = (),
) -> Path:
    """Run the trainer on Ray, and deliver what it relays."""
    reader = RelayReader(watcher if watcher is not None else interactive_watcher(), list(callbacks), notes)
    with session(task.plan):
        host = launch_host(task.plan)
        try:
            training = start_training(host, task, user_parts)
            with listening(reader.watcher) as stop_request:
                result = wait_for_result(host, training, reader, stop_request)
        finally:
            ray.kill(host, no_restart=True)
            reader.close()
    if result.error is not None:
        raise as_error(result)
    return Path(result.path)


def launch_host(plan: Plan) -> Any:
    """Start the trainer's process on this node, which has the run directory."""
    runtime = ray_of(plan)
    options = {
        "num_cpus": runtime.learner_cpus,
        "num_gpus": int((runtime.device or "").startswith("cuda")),
        "max_concurrency": plan.actors.num + EXTRA_THREADS,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    host = ray.remote(TrainerHost).options(**options).remote()
    try:
        ray.get(host.ready.remote(), timeout=START_SECONDS)
    except (GetTimeoutError, RayError) as error:
        raise UsageError(
            f"Ray did not start the learner on this node within {START_SECONDS:g} seconds",
            f"Ray said: {' '.join(str(error).split())[:300]}",
            f"Is there room? It asks for runtime.learner_cpus={runtime.learner_cpus:g}.",
        ) from error
    return host


def start_training(host: Any, task: TrainTask, user_parts: UserParts) -> Any:
    """Start training; returns the future of its result."""
    try:
        return host.run.remote(msgspec.json.encode(task), user_parts)
    except TypeError as error:
        raise UsageError(
            "the given env, torso or explore cannot be sent to another process",
            f"Ray said: {str(error).splitlines()[0]}",
            "Define it at the top level of a module, or use runtime.type=inline.",
        ) from error


def wait_for_result(host: Any, training: Any, reader: RelayReader, stop_request: StopRequest) -> TrainResult:
    """Relay news and signals until the run is over; returns its result."""
    stop_sent = False
    call = None
    while True:
        call = host.news.remote(reader.num_received) if call is None else call
        over = bool(ray.wait([training], timeout=POLL_SECONDS)[0])
        if stop_request and not stop_sent:
            stop_sent = delivered(host.request_stop.remote(stop_request.name))
        if over:
            return final_result(host, training, reader)
        if ray.wait([call], timeout=0)[0]:
            # A host that has died fails this call too; the result has the cause.
            with suppress(RayError):
                if relay_news(host, training, reader, ray.get(call, timeout=REPLY_SECONDS)):
                    delivered(host.stop_by_callback.remote())
            call = None


def relay_news(host: Any, training: Any, reader: RelayReader, news: bytes) -> bool:
    """Deliver news; True if a callback wants the run to end. If a callback raises, the run fails first."""
    try:
        return reader.receive(news)
    except Exception as error:
        delivered(host.fail_by_callback.remote(f"{type(error).__name__}: {error}"))
        ray.wait([training], timeout=FAIL_SECONDS)
        raise


def delivered(call: Any) -> bool:
    """Wait for a call; True if it was handled."""
    with suppress(GetTimeoutError, RayError):
        ray.get(call, timeout=REPLY_SECONDS)
        return True
    return False


def final_result(host: Any, training: Any, reader: RelayReader) -> TrainResult:
    """The result of a run that is over; delivers its last news."""
    try:
        reader.receive(ray.get(host.news.remote(reader.num_received), timeout=REPLY_SECONDS))
        return msgspec.json.decode(ray.get(training, timeout=REPLY_SECONDS), type=TrainResult)
    except RayError as error:
        raise QfleetError(
            "the learner's process on Ray has ended unexpectedly",
            f"Ray said: {' '.join(str(error).split())[:300]}",
            f"Go on from the last checkpoint: {program()} resume {reader.run or 'RUN'}",
        ) from error


def as_error(result: TrainResult) -> Exception:
    """The error of a run, as an exception of the same class."""
    name, *parts = result.error or ("", "", "", "")
    known = getattr(errors, name, None) if name else None
    if isinstance(known, type) and issubclass(known, QfleetError):
        return known(*parts)
    return RuntimeError(f"{parts[0]}\n{result.trace}")
