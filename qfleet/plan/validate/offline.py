"""Settings that do not go with a data set, or only with one; and those that do not go with one in the replay."""

from collections.abc import Callable

from qfleet.plan import schema
from qfleet.plan.schema import Plan
from qfleet.plan.traits import (
    begins_with_data,
    clones,
    has_one_member,
    is_distributional,
    learns_from_data,
    learns_in_epochs,
    mixes_data,
)
from qfleet.plan.validate.pairs import Pair
from qfleet.plan.validate.placement import has_actor_learners, has_replay_process

Condition = Callable[[Plan], bool]


def _offline(also: Condition) -> Condition:
    return lambda plan: learns_from_data(plan) and also(plan)


def _online(also: Condition) -> Condition:
    return lambda plan: not learns_from_data(plan) and also(plan)


def _skips_steps(plan: Plan) -> bool:
    view = plan.algo.view
    return learns_in_epochs(plan) and isinstance(view, schema.SequencesView) and view.stride > view.length


def _has_prioritized_sampler(plan: Plan) -> bool:
    return isinstance(plan.replay, schema.BufferReplay) and isinstance(plan.replay.sampler, schema.PrioritizedSampler)


def _loads_data(plan: Plan) -> bool:
    return begins_with_data(plan) and not mixes_data(plan)


NO_ACTORS = "A data set is learned from without acting."
OFFLINE_PAIRS: tuple[Pair, ...] = (
    Pair(
        "replay.type",
        "actors.num",
        _offline(lambda plan: plan.actors.num > 1),
        NO_ACTORS,
        "Leave actors.num at 1; learners.num is the number of processes that learn.",
    ),
    Pair(
        "replay.type",
        "runtime.replay_process",
        _offline(has_replay_process),
        "Every learner reads the data set itself; there is no replay to keep elsewhere.",
        "Leave runtime.replay_process off.",
    ),
    Pair(
        "replay.type",
        "learners.bundles",
        _offline(has_actor_learners),
        f"{NO_ACTORS} An actor-learner acts.",
        "Leave learners.bundles off: every learner reads its own part of the data set.",
    ),
    Pair(
        "replay.type",
        "population.num",
        _offline(lambda plan: not has_one_member(plan)),
        "Members of a population would need batches of their own, and each step is used once per epoch.",
        "Leave population.num at 1, or start several runs with --seeds.",
    ),
    Pair(
        "algo.view.stride",
        "algo.view.length",
        lambda plan: _skips_steps(plan),
        "In an epoch every step is learned from; between these windows some would not be.",
        "Use algo.view.stride of at most algo.view.length; with both equal each step is in one window.",
    ),
    Pair(
        "replay.type",
        "algo.bonus.type",
        _offline(lambda plan: isinstance(plan.algo.bonus, schema.CountBonus)),
        f"{NO_ACTORS} A bonus makes an actor explore.",
        "Leave algo.bonus.type off.",
    ),
    Pair(
        "replay.type",
        "algo.anneal.type",
        _offline(lambda plan: isinstance(plan.algo.anneal, schema.ExponentialAnneal)),
        "All epochs of a data set are learned from with one n and one discount.",
        "Leave algo.anneal.type off.",
    ),
    Pair(
        "algo.offline.type",
        "replay.type",
        _online(lambda plan: not isinstance(plan.algo.offline, schema.NoOfflineLoss)),
        "Who acts tries the actions whose values seem too high; only a data set has actions that nobody can try.",
        "Use replay.type=dataset, or leave algo.offline.type off.",
    ),
    Pair(
        "algo.offline.type",
        "custom.loss",
        lambda plan: not isinstance(plan.algo.offline, schema.NoOfflineLoss) and plan.custom.loss is not None,
        "A loss of your own replaces the plan's.",
        "Leave algo.offline.type off, and add the term to your loss.",
    ),
    Pair(
        "algo.offline.type",
        "net.head.type",
        lambda plan: clones(plan) and is_distributional(plan),
        "A cloned policy is made of one number per action, not of returns.",
        "Use net.head.type=scalar, or algo.offline.type=cql.",
    ),
    Pair(
        "algo.offline.type",
        "algo.rescale",
        lambda plan: clones(plan) and plan.algo.rescale,
        "A cloned policy has no values to rescale.",
        "Leave algo.rescale off, or use algo.offline.type=cql.",
    ),
    Pair(
        "until.epochs",
        "replay.type",
        _online(lambda plan: plan.until.epochs is not None),
        "Epochs are passes through a data set.",
        "Use until.steps, or replay.type=dataset.",
    ),
    Pair(
        "save.dataset",
        "replay.type",
        _offline(lambda plan: plan.save.dataset is not None),
        f"{NO_ACTORS} There is nothing new to record.",
        "Leave save.dataset out.",
    ),
    Pair(
        "save.dataset",
        "learners.bundles",
        lambda plan: plan.save.dataset is not None and has_actor_learners(plan),
        "Steps of actor-learners stay with them: they do not pass the process that records.",
        "Leave learners.bundles off, or leave save.dataset out.",
    ),
    Pair(
        "eval.on",
        "replay.type",
        _online(lambda plan: plan.eval.on == "data"),
        "Without a data set there are no recorded episodes to compare with.",
        "Leave eval.on out, or use replay.type=dataset.",
    ),
)

PREFILL_PAIRS: tuple[Pair, ...] = (
    Pair(
        "replay.prefill",
        "algo.bonus.type",
        lambda plan: begins_with_data(plan) and isinstance(plan.algo.bonus, schema.CountBonus),
        "Recorded steps have no bonus, so that what was recorded would look worse than what the run does.",
        "Leave algo.bonus.type off, or replay.prefill out.",
    ),
    Pair(
        "replay.prefill",
        "learners.bundles",
        lambda plan: begins_with_data(plan) and has_actor_learners(plan),
        "Every actor-learner has a replay of its own, and would learn from the whole data set.",
        "Leave learners.bundles off: then all learners share one replay.",
    ),
    Pair(
        "replay.prefill",
        "replay.sampler.initial",
        lambda plan: begins_with_data(plan) and getattr(getattr(plan.replay, "sampler", 0), "initial", "") == "actor",
        "These priorities are of values that an actor computed, and recorded steps have none.",
        "Use replay.sampler.initial=largest.",
    ),
    Pair(
        "replay.prefill",
        "replay.on_device",
        lambda plan: begins_with_data(plan) and bool(getattr(plan.replay, "on_device", False)),
        "The copy on the device is of the run's own steps.",
        "Leave replay.on_device off.",
    ),
    Pair(
        "replay.prefill",
        "runtime.replay_process",
        lambda plan: _loads_data(plan) and has_replay_process(plan),
        "A replay process that is lost begins anew with an empty replay: the recorded steps would be gone.",
        "Set replay.prefill_share, with which recorded steps stay beside the learner.",
    ),
    Pair(
        "replay.prefill",
        "save.replay",
        lambda plan: _loads_data(plan) and plan.save.replay == "none",
        "A resumed run would begin with an empty replay: the recorded steps would be gone.",
        "Set replay.prefill_share, with which recorded steps are read again, or save.replay=full.",
    ),
    Pair(
        "replay.prefill_share",
        "replay.filter.type",
        lambda plan: mixes_data(plan) and isinstance(getattr(plan.replay, "filter", None), schema.DuplicatesFilter),
        "The filter compares steps of one replay, and recorded steps have one of their own.",
        "Leave replay.filter.type off; `qfleet data prepare --unique` leaves out equal episodes.",
    ),
    Pair(
        "replay.prefill_share",
        "runtime.replay_process",
        lambda plan: mixes_data(plan) and has_replay_process(plan) and _has_prioritized_sampler(plan),
        "Weights of both parts of a batch are put on one scale, which only the replay's own process knows.",
        "Leave runtime.replay_process off, or use replay.sampler.type=uniform.",
    ),
    Pair(
        "replay.prefill_share",
        "custom.sampler",
        lambda plan: mixes_data(plan) and plan.custom.sampler is not None,
        "Both parts of a batch have samplers of one kind, whose weights are put on one scale.",
        "Leave replay.prefill_share out: then your sampler draws recorded steps too.",
    ),
    Pair(
        "replay.prefill_share",
        "algo.batch_size",
        lambda plan: mixes_data(plan) and plan.algo.batch_size < 2,
        "A batch has at least one recorded step and one of the run's own.",
        "Use a larger algo.batch_size, or leave replay.prefill_share out.",
    ),
)
