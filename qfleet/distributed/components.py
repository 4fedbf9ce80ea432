"""The components that the runtime of a plan needs: actors and learners in this process, in others, or on Ray."""

from typing import TYPE_CHECKING

import torch

from qfleet.act import Actor, Policy
from qfleet.build.components import Components
from qfleet.build.custom_parts import CustomParts, pack_parts
from qfleet.build.inference_placement import choose_inference
from qfleet.build.make import make_components, make_policy
from qfleet.data import Spec, World
from qfleet.learn import BatchSource, Learner
from qfleet.plan.schema import Plan, ProcessesRuntime, RayRuntime
from qfleet.plan.traits import learns_from_data, learns_in_epochs
from qfleet.plan.validate.placement import has_actor_learners

if TYPE_CHECKING:
    from qfleet.distributed.learners.epoch_scatter import PositionSource
    from qfleet.distributed.learners.launcher import LearnerLauncher
    from qfleet.distributed.ray.rpc import LearnerEndpoint


def components_for(
    plan: Plan, world: World, custom_parts: CustomParts, endpoint: "LearnerEndpoint | None"
) -> Components:
    """The components for the plan's runtime, with other learners if there are several.

    A plan for Ray needs an `endpoint` to run; without one the components can only be inspected.
    """
    components = acting_components(plan, world, custom_parts, endpoint)
    runs_here = endpoint is not None or not isinstance(plan.runtime, RayRuntime)
    if plan.learners.num > 1 and isinstance(components.learner, Learner) and runs_here:
        from qfleet.distributed.learners.group import LearnerGroup  # slow to import, and most runs have one learner

        try:
            launcher = learner_launcher(plan, world.spec, components, custom_parts)
            source = components.batch_source
            components.peers = LearnerGroup(
                plan,
                components.learner,
                launcher,
                source if has_actor_learners(plan) else None,
                data_positions(source) if learns_in_epochs(plan) else None,
            )
        except BaseException:
            components.close()
            raise
    return components


def data_positions(source: BatchSource) -> "PositionSource":
    """The source of a data set, which the other learners read too."""
    from qfleet.learn.offline.dataset_source import DatasetSource  # an extra, and most runs act

    if not isinstance(source, DatasetSource):
        raise TypeError("this source has no positions")
    return source


def learner_launcher(
    plan: Plan, env_spec: Spec, components: Components, custom_parts: CustomParts
) -> "LearnerLauncher":
    """Launches the plan's other learners."""
    from qfleet.distributed.learners.launcher import LocalLearnerLauncher

    if plan.learners.backend == "mpi":
        from qfleet.distributed.mpi import MpiLearnerLauncher

        return MpiLearnerLauncher(plan)
    if isinstance(plan.runtime, RayRuntime):
        from qfleet.distributed.ray.learners import RayLearnerLauncher

        return RayLearnerLauncher(plan, env_spec, components.spec, custom_parts)
    return LocalLearnerLauncher(plan, env_spec, components.spec, components.batch_source.replay.cut, custom_parts)


def acting_components(
    plan: Plan, world: World, custom_parts: CustomParts, endpoint: "LearnerEndpoint | None"
) -> Components:
    """Components with their actors. `world` is trained in, or only shows its spaces where actors have their own."""
    if learns_from_data(plan):
        return make_components(plan, world, custom_parts)
    if has_actor_learners(plan):
        components = make_components(plan, world, custom_parts)
        if isinstance(components.actor, Actor):
            components.actor.exploration_step = lambda: total_env_steps(components, plan.learners.num)
        return components
    if isinstance(plan.runtime, ProcessesRuntime):
        # Slow to import, and most runs need no processes.
        from qfleet.distributed.actors.process import make_process_components

        pack_parts(custom_parts)  # refuse now what cannot be sent

        def make_policy_on(device: torch.device) -> Policy:
            return make_policy(plan, world.spec, device, custom_parts)

        plan, notes = choose_inference(plan, world, make_policy_on, custom_parts.env)
        world.close()
        components = make_process_components(plan, world.spec, custom_parts)
        components.notes = notes
        return components
    if isinstance(plan.runtime, RayRuntime):
        from qfleet.distributed.ray.driver import make_ray_components  # an extra, and slow to import

        world.close()
        return make_ray_components(plan, world.spec, custom_parts, endpoint)
    return make_components(plan, world, custom_parts)


def total_env_steps(components: Components, num_learners: int) -> int:
    """Steps of all learners' environments; before the others have reported theirs, each counts as ours."""
    own = components.batch_source.steps
    others = 0 if components.peers is None else components.peers.env_steps
    return own + others if others else own * num_learners
