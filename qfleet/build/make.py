"""Makes the components of a run from its plan, and joins them."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch

from qfleet.act import Actor, Explore, NoActor, Policy, PopulationPolicy, make_explorer
from qfleet.build.components import ActorSide, Components, LearnerSide
from qfleet.build.custom_parts import NO_CUSTOM_PARTS, CustomParts
from qfleet.build.seeds import EXPLORE, NOVELTY, SAMPLE, WEIGHTS, stream
from qfleet.data import Spec, World
from qfleet.errors import UsageError
from qfleet.learn import Learner, PopulationLearner, make_batch_source, make_count_bonus, make_learner, rate_factors
from qfleet.learn.transfer import with_mirror
from qfleet.nets import ImplicitQuantileHead, QNet, count_own_features, make_net, set_noise
from qfleet.plan.schema import BufferReplay, CountBonus, ImplicitHead, PeriodicReset, Plan, PrioritizedSampler
from qfleet.plan.traits import learns_from_data, mixes_data
from qfleet.plan.validate.placement import actor_learner_plan
from qfleet.qlearn import CustomHead, make_head
from qfleet.replay import CustomSampler, Mirror, make_replay
from qfleet.replay import Replay as ReplayBuffer


def make_components(plan: Plan, world: World, parts: CustomParts = NO_CUSTOM_PARTS) -> Components:
    """Components with one actor in this process; with a data set there is none."""

    def make_one_actor(learning: LearnerSide) -> ActorSide:
        if learns_from_data(plan):
            return NoActor(learning.policy)
        return make_actor(plan, world, learning.policy, parts.explore)

    return join_components(plan, world.spec, make_one_actor, parts)


def join_components(
    plan: Plan,
    spec: Spec,
    make_actors: Callable[["LearnerSide"], ActorSide],
    parts: CustomParts = NO_CUSTOM_PARTS,
    make_replay_for: Callable[[Plan, Spec], ReplayBuffer] | None = None,
) -> Components:
    """Join replay and learner to the actors; `spec` is the spec of the world."""
    device = torch.device(plan.runtime.device or "cpu")
    policies = [make_policy(plan, spec, device, parts, member) for member in range(plan.population.num)]
    stored = policy_spec(spec, policies[0])
    learners = make_learners(plan, spec, stored, policies, parts)
    own = actor_learner_plan(plan)
    replay = own_replay(own, stored, parts.sampler) if make_replay_for is None else make_replay_for(own, stored)
    if isinstance(plan.replay, BufferReplay) and plan.replay.on_device:
        use_mirror(replay, learners, device)
    counts = isinstance(plan.algo.bonus, CountBonus)
    bonus = make_count_bonus(plan, stored, stream(plan.seed, NOVELTY)) if counts else None
    batch_source = make_batch_source(own, replay, learners[0], own.env.num, bonus)
    if mixes_data(plan):
        from qfleet.build.offline.prefill import use_recorded_share  # an extra

        use_recorded_share(plan, batch_source, replay)
    learner = learners[0] if len(learners) == 1 else PopulationLearner(learners)
    return Components(
        plan, stored, make_actors(LearnerSide(batch_source, learner, join_policies(policies))), batch_source, learner
    )


def make_policy(
    plan: Plan, spec: Spec, device: torch.device, parts: CustomParts = NO_CUSTOM_PARTS, member: int = 0
) -> Policy:
    """A policy with fresh weights; a torso of the user's own is copied, so that the original does not change."""
    try:
        net = fresh_net(plan, spec, parts, 0, member)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if parts.torso is None:
            raise
        raise UsageError(
            f"the torso cannot read observations of shape {spec.input_shape}",
            f"Shown one, it raised {type(error).__name__}: {str(error).splitlines()[0]}.",
            f"Make its first layer take inputs [N, {', '.join(map(str, spec.input_shape))}].",
        ) from error
    if parts.head is not None:
        require_head(net, parts.head, spec)
    net.eval()  # a torso's dropout and the like are for learning
    if isinstance(plan.net.head, ImplicitHead) and isinstance(net.head, ImplicitQuantileHead):
        net.head.fractions = plan.net.head.act_fractions
        net.head.even = True
    return Policy(net.to(device), parts.head or make_head(plan, spec), spec.actions, device, spec)


def require_head(net: QNet, head: CustomHead, spec: Spec) -> None:
    """Refuse a user's own head whose values have the wrong shape, by trying it on two rows of zeros."""
    features = net.memory.size if net.memory is not None else count_own_features(net.torso, spec)
    with torch.no_grad():
        values = head.values(net.head(torch.zeros(2, features)))
    if values.shape != (2, spec.num_actions):
        raise UsageError(
            f"the head's values have shape {tuple(values.shape)} for two rows of features",
            f"There is one value per action: (2, {spec.num_actions}).",
            "Let make_layers return an output per action, and values turn outputs into [N, actions].",
        )


def fresh_net(plan: Plan, spec: Spec, parts: CustomParts, number: int, member: int) -> QNet:
    """A network whose weights depend on the seed, the number of the reset and the member of the population."""
    named = (number, member) if member else (number,) if number else ()
    seed = int(stream(plan.seed, WEIGHTS, *named).integers(2**63))
    return make_net(
        plan.net,
        spec,
        normalize=plan.env.normalize,
        seed=seed,
        torso=copy.deepcopy(parts.torso),
        head=parts.head,
        loss=parts.loss,
    )


def make_fresh(plan: Plan, spec: Spec, parts: CustomParts, member: int) -> Callable[[int], QNet]:
    """Makes the network with the fresh weights of a reset, by the number of the reset."""
    reset = plan.algo.reset
    if isinstance(reset, PeriodicReset) and reset.keep < 1.0 and parts.torso is not None:
        raise UsageError(
            f"algo.reset.keep={reset.keep:g} does not go with a torso of your own",
            "A reset moves the torso towards fresh weights, and only your own code could make these.",
            "Set algo.reset.keep=1: then only the head begins anew.",
        )
    return lambda number: fresh_net(plan, spec, parts, number, member)


def policy_spec(spec: Spec, policy: Policy) -> Spec:
    """The world's spec with the size of the policy's memory."""
    memory = policy.net.memory
    return spec if memory is None else replace(spec, state=(memory.state_size,))


def join_policies(policies: list[Policy]) -> Policy | PopulationPolicy:
    """The policy, or a population's policies as one."""
    return policies[0] if len(policies) == 1 else PopulationPolicy(policies)


def make_actor(
    plan: Plan,
    world: World,
    policy: Policy | PopulationPolicy,
    explore: Explore | None = None,
    *,
    worker: int = 0,
    incarnation: int = 0,
    exploration_step: Callable[[], int] | None = None,
) -> Actor:
    """An actor in its world, which holds this worker's share of all lanes."""
    part = slice(worker * world.num, (worker + 1) * world.num)
    explorer = make_explorer(plan.algo, world.spec.actions, plan.env.num, explore, part)
    worker_key = (worker, incarnation) if worker or incarnation else ()
    # For initial priorities, or for the returns of fresh experience.
    sampler = plan.replay.sampler if isinstance(plan.replay, BufferReplay) else None
    record_values = sampler is None or (isinstance(sampler, PrioritizedSampler) and sampler.initial == "actor")
    return Actor(
        world,
        policy,
        explorer,
        stream(plan.seed, EXPLORE, *worker_key),
        worker=worker,
        incarnation=incarnation,
        record_values=record_values,
        # A noisy network draws new values for every step: the probabilities of actions are not known.
        record_probability=plan.save.dataset is not None and not plan.net.noisy,
        exploration_step=exploration_step,
    )


def make_learners(plan: Plan, shown: Spec, spec: Spec, policies: list[Policy], parts: CustomParts) -> list[Learner]:
    """A learner for each policy, with shared normalisation. `shown` is the world's own spec."""
    factors = rate_factors(len(policies), plan.population.spread) if len(policies) > 1 else [1.0]
    nets = [learner_net(plan, policy) for policy in policies]
    for net in nets:
        net.normalize = nets[0].normalize
        net.rewards = nets[0].rewards
    return [
        make_custom_learner(plan, shown, spec, net, policy, parts, member, factor)
        for member, (net, policy, factor) in enumerate(zip(nets, policies, factors, strict=True))
    ]


def make_custom_learner(
    plan: Plan,
    shown: Spec,
    spec: Spec,
    net: QNet,
    policy: Policy,
    parts: CustomParts,
    member: int = 0,
    rate_factor: float = 1.0,
) -> Learner:
    """The learner of a policy, with the user's own parts where there are any."""
    return make_learner(
        plan,
        spec,
        net,
        policy.device,
        make_fresh(plan, shown, parts, member),
        rate_factor,
        head=parts.head,
        rule=parts.rule,
        loss=parts.loss,
        custom_optimizer=parts.optimizer,
    )


def learner_net(plan: Plan, policy: Policy) -> QNet:
    """The policy's network as it is trained: noise, dropout and random fractions are on."""
    net = copy.deepcopy(policy.net).train()
    set_noise(net, active=True)
    if isinstance(plan.net.head, ImplicitHead) and isinstance(net.head, ImplicitQuantileHead):
        net.head.fractions = plan.net.head.fractions
        net.head.even = False
    return net


def own_replay(plan: Plan, spec: Spec, sampler: CustomSampler | None = None) -> ReplayBuffer:
    """A replay in this process."""
    return make_replay(plan, spec, plan.env.num, stream(plan.seed, SAMPLE), sampler)


def use_mirror(replay: ReplayBuffer, learners: list[Learner], device: torch.device) -> None:
    """Batches hold places of rows, which learners read from a mirror on their device."""
    mirror = Mirror(replay.store, device)
    replay.mirrored = True
    for learner in learners:
        learner.transfer = with_mirror(learner.transfer, mirror)
