"""Which runtime a plan asks for: the line it needs, and what turns it."""

from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from qfleet.act import Actor, Explore
from qfleet.build.components import Components, EnvMaker, make_components, make_policy
from qfleet.build.inference_placement import settled
from qfleet.data import Spec, World
from qfleet.learn import Learner
from qfleet.plan.schema import Plan, ProcessesRuntime, RayRuntime
from qfleet.plan.validate.placement import has_actor_learners

if TYPE_CHECKING:
    from qfleet.distributed.learners.launcher import LearnerLauncher, UserParts
    from qfleet.distributed.ray.rpc import LearnerEndpoint


class RankFinished(SystemExit):
    """This process was another learner of a run that MPI has started, and that run is over."""


def is_on_ray(plan: Plan) -> bool:
    """Does this plan train in a process of Ray's?"""
    if not isinstance(plan.runtime, RayRuntime):
        return False
    import_module("qfleet.distributed.ray.driver")  # says so if Ray is not installed
    return True


def stand_by(plan: Plan, make: EnvMaker | None, torso: nn.Module | None, explore: Explore | None) -> bool:
    """If this process is another learner of a run that MPI has started, be that, and answer True when it is over."""
    if plan.learners.backend != "mpi" or plan.learners.num == 1:
        return False
    from qfleet.distributed import mpi

    if not mpi.is_worker_rank(plan):
        return False
    mpi.rank_main(make, torso, explore)
    return True


def components_for(
    plan: Plan,
    world: World,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    endpoint: "LearnerEndpoint | None" = None,
) -> Components:
    """The line that the plan's runtime turns, with its partners if several learners are asked for.

    A plan for Ray needs a `endpoint`; without one the line can be looked at but not run.
    """
    components = acting_components(plan, world, make, torso, explore, endpoint)
    runs_here = endpoint is not None or not isinstance(plan.runtime, RayRuntime)
    if plan.learners.num > 1 and isinstance(components.learner, Learner) and runs_here:
        from qfleet.distributed.learners.group import (
            LearnerGroup,  # most runs have one learner, and no time to import torch's groups
        )

        try:
            launcher = learner_launcher(plan, world.spec, components, (make, torso, explore))
            components.peers = LearnerGroup(
                plan, components.learner, launcher, components.batch_source if has_actor_learners(plan) else None
            )
        except BaseException:
            components.close()
            raise
    return components


def learner_launcher(plan: Plan, shown: Spec, components: Components, own: "UserParts") -> "LearnerLauncher":
    """Where the plan's other learners live."""
    from qfleet.distributed.learners.launcher import LocalLearnerLauncher

    if plan.learners.backend == "mpi":
        from qfleet.distributed.mpi import MpiLearnerLauncher

        return MpiLearnerLauncher(plan)
    if isinstance(plan.runtime, RayRuntime):
        from qfleet.distributed.ray.learners import RayLearnerLauncher

        return RayLearnerLauncher(plan, shown, components.spec, own)
    return LocalLearnerLauncher(plan, shown, components.spec, components.batch_source.replay.cut, own)


def acting_components(
    plan: Plan,
    world: World,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    endpoint: "LearnerEndpoint | None",
) -> Components:
    """A line with whoever acts. `world` is learned in, or only looked at where actors have their own."""
    if has_actor_learners(plan):
        components = make_components(plan, world, torso, explore)
        if isinstance(components.actor, Actor):
            components.actor.elapsed = lambda: all_steps(components, plan.learners.num)
        return components
    if isinstance(plan.runtime, ProcessesRuntime):
        # Most runs need no processes, nor the time to import them.
        from qfleet.distributed.actors.process import make_process_components, require_sendable

        require_sendable((make, torso, explore))
        plan, notes = settled(plan, world, lambda device: make_policy(plan, world.spec, device, torso), make)
        world.close()
        components = make_process_components(plan, world.spec, make, torso, explore)
        components.notes = notes
        return components
    if isinstance(plan.runtime, RayRuntime):
        from qfleet.distributed.ray.driver import make_ray_components  # an extra, and slow to import

        world.close()
        return make_ray_components(plan, world.spec, (make, torso, explore), endpoint)
    return make_components(plan, world, torso, explore)


def all_steps(components: Components, bundles: int) -> int:
    """Steps that all bundles have made; until the others have said how many, each as many as ours."""
    told = 0 if components.peers is None else components.peers.env_steps
    return components.batch_source.steps + told if told else components.batch_source.steps * bundles
