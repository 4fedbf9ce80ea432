"""Which runtime a plan asks for: the line it needs, and what turns it."""

from typing import TYPE_CHECKING

from torch import nn

from qfleet.act import Actor, Explore
from qfleet.build.components import EnvMaker, Line, make_line, make_policy
from qfleet.build.inference_placement import settled
from qfleet.data import Spec, World
from qfleet.learn import Learner
from qfleet.plan.schema import Plan, Processes, Ray
from qfleet.plan.validate.placement import has_bundles

if TYPE_CHECKING:
    from qfleet.distributed.learners.launcher import Own, Quarters
    from qfleet.distributed.ray.rpc import Desk


class StoodBy(SystemExit):
    """This process was another learner of a run that MPI has started, and that run is over."""


def is_on_ray(plan: Plan) -> bool:
    """Does this plan train in a process of Ray's?"""
    if not isinstance(plan.runtime, Ray):
        return False
    from qfleet.distributed.ray import driver  # noqa: F401  says so if Ray is not installed

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


def line_for(
    plan: Plan,
    world: World,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    desk: "Desk | None" = None,
) -> Line:
    """The line that the plan's runtime turns, with its partners if several learners are asked for.

    A plan for Ray needs a `desk`; without one the line can be looked at but not run.
    """
    line = acting_line(plan, world, make, torso, explore, desk)
    runs_here = desk is not None or not isinstance(plan.runtime, Ray)
    if plan.learners.num > 1 and isinstance(line.learner, Learner) and runs_here:
        from qfleet.distributed.learners.group import (
            Team,  # most runs have one learner, and no time to import torch's groups
        )

        try:
            quarters = quarters_for(plan, world.spec, line, (make, torso, explore))
            line.learner.partners = Team(plan, line.learner, quarters, line.feed if has_bundles(plan) else None)
        except BaseException:
            line.close()
            raise
    return line


def quarters_for(plan: Plan, shown: Spec, line: Line, own: "Own") -> "Quarters":
    """Where the plan's other learners live."""
    from qfleet.distributed.learners.launcher import OwnQuarters

    if plan.learners.backend == "mpi":
        from qfleet.distributed.mpi import MpiQuarters

        return MpiQuarters(plan)
    if isinstance(plan.runtime, Ray):
        from qfleet.distributed.ray.learners import RayQuarters

        return RayQuarters(plan, shown, line.spec, own)
    return OwnQuarters(plan, shown, line.spec, line.feed.replay.cut, own)


def acting_line(
    plan: Plan,
    world: World,
    make: EnvMaker | None,
    torso: nn.Module | None,
    explore: Explore | None,
    desk: "Desk | None",
) -> Line:
    """A line with whoever acts. `world` is learned in, or only looked at where actors have their own."""
    if has_bundles(plan):
        line = make_line(plan, world, torso, explore)
        if isinstance(line.actor, Actor):
            line.actor.elapsed = lambda: all_steps(line, plan.learners.num)
        return line
    if isinstance(plan.runtime, Processes):
        # Most runs need no processes, nor the time to import them.
        from qfleet.distributed.actors.process import make_process_line, require_sendable

        require_sendable((make, torso, explore))
        plan, notes = settled(plan, world, lambda device: make_policy(plan, world.spec, device, torso), make)
        world.close()
        line = make_process_line(plan, world.spec, make, torso, explore)
        line.notes = notes
        return line
    if isinstance(plan.runtime, Ray):
        from qfleet.distributed.ray.driver import make_ray_line  # an extra, and slow to import

        world.close()
        return make_ray_line(plan, world.spec, (make, torso, explore), desk)
    return make_line(plan, world, torso, explore)


def all_steps(line: Line, bundles: int) -> int:
    """Steps that all bundles have made; until the others have said how many, each as many as ours."""
    told = 0 if line.partners is None else line.partners.steps
    return line.feed.steps + told if told else line.feed.steps * bundles
