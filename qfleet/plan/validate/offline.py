"""Settings that do not go with a data set, or only with one."""

from collections.abc import Callable

from qfleet.plan import schema
from qfleet.plan.schema import Plan
from qfleet.plan.traits import clones, has_one_member, is_distributional, learns_from_data
from qfleet.plan.validate.pairs import Pair
from qfleet.plan.validate.placement import has_actor_learners

Condition = Callable[[Plan], bool]


def _offline(also: Condition) -> Condition:
    return lambda plan: learns_from_data(plan) and also(plan)


def _online(also: Condition) -> Condition:
    return lambda plan: not learns_from_data(plan) and also(plan)


NO_ACTORS = "A data set is learned from without acting."
OFFLINE_PAIRS: tuple[Pair, ...] = (
    Pair(
        "replay.type",
        "runtime.type",
        _offline(lambda plan: not isinstance(plan.runtime, schema.InlineRuntime)),
        f"{NO_ACTORS} There is nothing that could run in other processes beside the learner.",
        "Leave runtime.type at inline.",
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
        "replay.type",
        "algo.view.type",
        _offline(lambda plan: isinstance(plan.algo.view, schema.SequencesView)),
        "Only single steps are read from a data set so far.",
        "Leave algo.view.type at steps, and net.memory.type off.",
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
        "replay.type",
        "env.normalize",
        _offline(lambda plan: plan.env.normalize != "off"),
        "Running statistics are those of rollouts, and there are none.",
        "Leave env.normalize off.",
    ),
    Pair(
        "replay.type",
        "steer.batch.type",
        _offline(lambda plan: isinstance(plan.steer.batch, schema.GrowingBatch)),
        "The batch size of a data set is the same in all epochs.",
        "Leave steer.batch.type off.",
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
