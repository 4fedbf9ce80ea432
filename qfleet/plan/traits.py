"""Properties of a plan that several rules check."""

from qfleet.plan.schema import (
    BufferReplay,
    CloningOfflineLoss,
    DatasetReplay,
    EpochsOrder,
    FreshReplay,
    Plan,
    ScalarHead,
)


def uses_fresh_replay(plan: Plan) -> bool:
    """Does the plan learn from fresh experience only?"""
    return isinstance(plan.replay, FreshReplay)


def learns_from_data(plan: Plan) -> bool:
    """Does the plan learn from a data set, without acting?"""
    return isinstance(plan.replay, DatasetReplay)


def learns_in_epochs(plan: Plan) -> bool:
    """Does the plan use every item of a data set once per epoch?"""
    return isinstance(plan.replay, DatasetReplay) and isinstance(plan.replay.order, EpochsOrder)


def begins_with_data(plan: Plan) -> bool:
    """Does the plan act, with a data set in its replay from the start?"""
    return isinstance(plan.replay, BufferReplay) and bool(plan.replay.prefill)


def mixes_data(plan: Plan) -> bool:
    """Does the plan act, and draw a share of every batch from a data set?"""
    return begins_with_data(plan) and getattr(plan.replay, "prefill_share", None) is not None


def clones(plan: Plan) -> bool:
    """Does the plan imitate recorded actions, without values of what follows?"""
    return isinstance(plan.algo.offline, CloningOfflineLoss)


def is_distributional(plan: Plan) -> bool:
    """Does the plan's head describe a distribution of returns?"""
    return not isinstance(plan.net.head, ScalarHead)


def has_one_member(plan: Plan) -> bool:
    """Is there a single member, not a population?"""
    return plan.population.num == 1


def has_several_learners(plan: Plan) -> bool:
    """Are there several learners?"""
    return plan.learners.num > 1


def has_one_learner(plan: Plan) -> bool:
    """Is there a single learner?"""
    return plan.learners.num == 1
