"""The environments that a run trains in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import msgspec

from qfleet.build.seeds import WORLDS, stream
from qfleet.build.threads import TASK_THREADS
from qfleet.data import Spec, World
from qfleet.envs import TRAIN, is_native, make_world
from qfleet.plan.schema import BufferReplay, InlineRuntime, Plan, ProcessesRuntime
from qfleet.plan.traits import begins_with_data, learns_from_data
from qfleet.plan.validate.placement import actor_learner_plan, has_actor_learners, has_central_inference, num_senders
from qfleet.system.child_process import fork_server
from qfleet.system.cores import usable_cores

ROLES = "qfleet.distributed.actors.main"  # its imports are all that a process of a run needs
EnvMaker = Callable[[], "gymnasium.Env[Any, Any]"]


def make_train_world(plan: Plan, make: EnvMaker | None = None) -> World:
    """The world to train in; where actors have worlds of their own, one lane that shows the spaces.

    Of a data set it is the recorded world, which nobody acts in.
    """
    if learns_from_data(plan):
        from qfleet.build.offline.plan_dataset import make_recorded_world  # an extra

        return make_recorded_world(plan)
    if isinstance(plan.runtime, ProcessesRuntime) or plan.learners.num > 1:
        fork_server(ROLES)  # before environments start one with fewer modules
    num = actor_learner_plan(plan).env.num if isinstance(plan.runtime, InlineRuntime) or has_actor_learners(plan) else 1
    threads = world_threads(plan, num)
    return make_world(plan.env, seed=plan.seed, stream=TRAIN, num=num, make=make, threads=threads, info=plan.log.info)


def resolve_data(plan: Plan, spec: Spec, make: EnvMaker | None) -> tuple[Plan, list[str]]:
    """The plan with what its data set decides, and notes about it; other plans as they are."""
    if begins_with_data(plan):
        from qfleet.build.offline.prefill import resolve_prefill  # an extra

        return resolve_prefill(plan, spec)
    if not learns_from_data(plan):
        return plan, []
    from qfleet.build.offline.plan_dataset import resolve_offline  # an extra

    return resolve_offline(plan, make)


def world_threads(plan: Plan, num: int) -> int:
    """Threads of a native world with `num` lanes: the cores that updates leave, all if none are made while it steps."""
    if not isinstance(plan.runtime, InlineRuntime):
        return 1  # this world only shows its spaces
    learning = (plan.runtime.threads or TASK_THREADS) if isinstance(plan.replay, BufferReplay) else 0
    return max(1, min(num, usable_cores() - learning))


def make_own_world(
    plan: Plan, worker: int, incarnation: int, make: EnvMaker | None = None, logs: Path | None = None
) -> World:
    """The world of an actor in a process of its own; every incarnation has other seeds."""
    worker_key = (worker, incarnation)
    num = plan.env.num // num_senders(plan)
    seed = int(stream(plan.seed, WORLDS, *worker_key).integers(2**31)) if any(worker_key) else plan.seed
    env = plan.env
    threads = 1
    if has_central_inference(plan) and is_native(env, make):
        threads = plan.actors.num
    elif has_central_inference(plan):
        env = msgspec.structs.replace(env, workers=max(env.workers, plan.actors.num))
    return make_world(env, seed=seed, stream=TRAIN, num=num, make=make, threads=threads, logs=logs, info=plan.log.info)
