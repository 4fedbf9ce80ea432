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
from qfleet.plan.validate.placement import has_bundles

if TYPE_CHECKING:
    from qfleet.distributed.learners.launcher import LearnerLauncher, Own
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

    if not mpi.is_partner(plan):
        return False
    mpi.learn_beside(make, torso, explore)
    return True


def components_for(
    plan: Plan,
    world: World,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    desk: "LearnerEndpoint | None" = None,
) -> Components:
    """The line that the plan's runtime turns, with its partners if several learners are asked for.

    A plan for Ray needs a `desk`; without one the line can be looked at but not run.
    """
    line = acting_components(plan, world, make, torso, explore, desk)
    runs_here = desk is not None or not isinstance(plan.runtime, RayRuntime)
    if plan.learners.num > 1 and isinstance(line.learner, Learner) and runs_here:
        from qfleet.distributed.learners.group import (
            LearnerGroup,  # most runs have one learner, and no time to import torch's groups
        )

        try:
            quarters = quarters_for(plan, world.spec, line, (make, torso, explore))
            line.learner.peers = LearnerGroup(
                plan, line.learner, quarters, line.batch_source if has_bundles(plan) else None
            )
        except BaseException:
            line.close()
            raise
    return line


def quarters_for(plan: Plan, shown: Spec, line: Components, own: "Own") -> "LearnerLauncher":
    """Where the plan's other learners live."""
    from qfleet.distributed.learners.launcher import LocalLearnerLauncher

    if plan.learners.backend == "mpi":
        from qfleet.distributed.mpi import MpiLearnerLauncher

        return MpiLearnerLauncher(plan)
    if isinstance(plan.runtime, RayRuntime):
        from qfleet.distributed.ray.learners import RayLearnerLauncher

        return RayLearnerLauncher(plan, shown, line.spec, own)
    return LocalLearnerLauncher(plan, shown, line.spec, line.batch_source.replay.cut, own)


def acting_components(
    plan: Plan,
    world: World,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    desk: "LearnerEndpoint | None",
) -> Components:
    """A line with whoever acts. `world` is learned in, or only looked at where actors have their own."""
    if has_bundles(plan):
        line = make_components(plan, world, torso, explore)
        if isinstance(line.actor, Actor):
            line.actor.elapsed = lambda: all_steps(line, plan.learners.num)
        return line
    if isinstance(plan.runtime, ProcessesRuntime):
        # Most runs need no processes, nor the time to import them.
        from qfleet.distributed.actors.process import make_process_components, require_sendable

        require_sendable((make, torso, explore))
        plan, notes = settled(plan, world, lambda device: make_policy(plan, world.spec, device, torso), make)
        world.close()
        line = make_process_components(plan, world.spec, make, torso, explore)
        line.notes = notes
        return line
    if isinstance(plan.runtime, RayRuntime):
        from qfleet.distributed.ray.driver import make_ray_components  # an extra, and slow to import

        world.close()
        return make_ray_components(plan, world.spec, (make, torso, explore), desk)
    return make_components(plan, world, torso, explore)


def all_steps(line: Components, bundles: int) -> int:
    """Steps that all bundles have made; until the others have said how many, each as many as ours."""
    told = 0 if line.peers is None else line.peers.steps
    return line.batch_source.steps + told if told else line.batch_source.steps * bundles
