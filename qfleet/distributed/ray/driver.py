"""A run on Ray: the course (learner, diary, checkpoints) in one of its processes, actors in others.

The replay is in the course's process, or has one of its own on any node (`runtime.replay_process`).

The process that was called only starts them, passes signals on and shows what it hears. When it ends, Ray's job ends
with it, and everything that the job has started.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from qfleet import errors
from qfleet.build.components import Components, LearnerSide, join_parts, make_train_world
from qfleet.build.memory_check import sample_replay
from qfleet.data import Spec
from qfleet.distributed.actors.pool import ActorPool, make_actor_pool
from qfleet.distributed.local_run import Own, prepared
from qfleet.distributed.ray.relay import RelayReader
from qfleet.distributed.replay.client import join_remote
from qfleet.errors import QfleetError, UsageError
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.training.log.run_log import Callback
from qfleet.training.process.signals import StopRequest, listening
from qfleet.training.session import interactive_watcher, noting, threads
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

LOOK_SECONDS = 0.25
START_SECONDS = 120.0
TELL_SECONDS = 10.0
FAIL_SECONDS = 60.0
CALLERS = 4  # threads of the course's process besides one for each actor


def make_ray_components(plan: Plan, spec: Spec, own: Own, desk: LearnerEndpoint | None) -> Components:
    """A line whose actors live on Ray; without a `desk` it can be looked at but not run."""
    runtime = ray_of(plan)

    def hire(learning: LearnerSide) -> ActorPool:
        site = RayActorLauncher(plan, runtime, learning.batch_source.replay.spec, learning.learner.weights(), own, desk)
        # A node may have to be found first.
        return make_actor_pool(plan, spec, learning, site, own[2], start_seconds=START_SECONDS)

    if not runtime.replay_process:
        return join_parts(plan, spec, hire, own[1])
    if desk is None:
        return join_parts(plan, spec, hire, own[1], sample_replay)  # nothing is started, and nothing as large made
    return join_remote(plan, spec, hire, own[1], lambda plan, stored: make_ray_replay(plan, stored, runtime))


def ray_of(plan: Plan) -> RayRuntime:
    """The plan's runtime, which is Ray."""
    if not isinstance(plan.runtime, RayRuntime):
        raise TypeError(f"runtime.type={plan.runtime.__struct_config__.tag} is not ray")
    return plan.runtime


def train(
    plan: Plan,
    own: Own,
    *,
    out: str | Path,
    name: str | None,
    weights_from: str | Path | None,
    command: list[str] | None,
    watcher: Watcher | None,
    callbacks: Iterable[Callback],
) -> Path:
    """Train on Ray; returns the run's folder.

    What can be refused without Ray is refused first: starting it takes a while.
    """
    source = None if weights_from is None else find_run(weights_from, out)
    with threads(plan), closing(make_train_world(plan, own[0])) as world:
        line = prepared(plan, world, own, source, lambda text: None, noting(watcher))
        line.close()
    origin = None if source is None else str(source.absolute())
    task = TrainTask(line.plan, str(Path(out).absolute()), fresh=True, name=name, weights_from=origin, command=command)
    return follow(task, own, watcher, callbacks, line.notes)


def resume(
    plan: Plan,
    own: Own,
    *,
    folder: Path,
    notes: list[str],
    strict: bool,
    watcher: Watcher | None,
    callbacks: Iterable[Callback],
) -> Path:
    """Resume on Ray; returns the run's folder."""
    task = TrainTask(plan, str(folder.absolute()), fresh=False, notes=notes, strict=strict)
    return follow(task, own, watcher, callbacks)


def follow(
    task: TrainTask, own: Own, watcher: Watcher | None, callbacks: Iterable[Callback], notes: Sequence[str] = ()
) -> Path:
    """Have a course run on Ray, and show what it tells."""
    hear = RelayReader(watcher if watcher is not None else interactive_watcher(), list(callbacks), notes)
    with session(task.plan):
        host = place(task.plan)
        try:
            trainer = started(host, task, own)
            with listening(hear.watcher) as asked:
                result = watched(host, trainer, hear, asked)
        finally:
            ray.kill(host, no_restart=True)
            hear.close()
    if result.error is not None:
        raise as_error(result)
    return Path(result.path)


def place(plan: Plan) -> Any:
    """The process for the course, on this node: the run's folder is here."""
    runtime = ray_of(plan)
    options = {
        "num_cpus": runtime.learner_cpus,
        "num_gpus": int((runtime.device or "").startswith("cuda")),
        "max_concurrency": plan.actors.num + CALLERS,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    host = ray.remote(TrainerHost).options(**options).remote()
    try:
        ray.get(host.ready.remote(), timeout=START_SECONDS)
    except (GetTimeoutError, RayError) as error:
        raise UsageError(
            f"Ray did not start the learner on this node within {START_SECONDS:g} seconds",
            f"It said: {' '.join(str(error).split())[:300]}",
            f"Is there room? It asks for runtime.learner_cpus={runtime.learner_cpus:g}.",
        ) from error
    return host


def started(host: Any, task: TrainTask, own: Own) -> Any:
    """The call that lasts as long as the course."""
    try:
        return host.run.remote(msgspec.json.encode(task), own)
    except TypeError as error:
        raise UsageError(
            "what was given as env, torso or explore cannot be sent to another process",
            f"Ray said: {str(error).splitlines()[0]}",
            "Define it at the top level of a module, or use runtime.type=inline.",
        ) from error


def watched(host: Any, trainer: Any, hear: RelayReader, asked: StopRequest) -> TrainResult:
    """Look a few times a second until the course is over; pass on what it is asked."""
    told = False
    call = None
    while True:
        call = host.news.remote(hear.heard) if call is None else call
        over = bool(ray.wait([trainer], timeout=LOOK_SECONDS)[0])
        if asked and not told:
            told = tell(host.ask.remote(asked.name))
        if over:
            return last_of(host, trainer, hear)
        if ray.wait([call], timeout=0)[0]:
            # A host that has died fails this call too; the course says why.
            with suppress(RayError):
                if shown(host, trainer, hear, ray.get(call, timeout=TELL_SECONDS)):
                    tell(host.halt.remote())
            call = None


def shown(host: Any, trainer: Any, hear: RelayReader, news: bytes) -> bool:
    """Pass news on: does a callback want the run to end? If one raises, the run fails before we do."""
    try:
        return hear.take(news)
    except Exception as error:
        tell(host.fail.remote(f"{type(error).__name__}: {error}"))
        ray.wait([trainer], timeout=FAIL_SECONDS)
        raise


def tell(call: Any) -> bool:
    """Was it heard?"""
    with suppress(GetTimeoutError, RayError):
        ray.get(call, timeout=TELL_SECONDS)
        return True
    return False


def last_of(host: Any, trainer: Any, hear: RelayReader) -> TrainResult:
    """The result of a course that is over, and its last news."""
    try:
        hear.take(ray.get(host.news.remote(hear.heard), timeout=TELL_SECONDS))
        return msgspec.json.decode(ray.get(trainer, timeout=TELL_SECONDS), type=TrainResult)
    except RayError as error:
        raise QfleetError(
            "the learner's process on Ray has ended before its time",
            f"Ray said: {' '.join(str(error).split())[:300]}",
            f"Go on from the last checkpoint: {program()} resume {hear.run or 'RUN'}",
        ) from error


def as_error(result: TrainResult) -> Exception:
    """The error of a course, of the same class as there."""
    name, *parts = result.error or ("", "", "", "")
    known = getattr(errors, name, None) if name else None
    if isinstance(known, type) and issubclass(known, QfleetError):
        return known(*parts)
    return RuntimeError(f"{parts[0]}\n{result.trace}")
