"""Questions about a plan that several rules ask."""

from qfleet.plan.schema import FreshReplay, Plan, ScalarHead


def is_fresh(plan: Plan) -> bool:
    """Does it learn from fresh experience only?"""
    return isinstance(plan.replay, FreshReplay)


def is_distribution(plan: Plan) -> bool:
    """Does its head describe a distribution?"""
    return not isinstance(plan.net.head, ScalarHead)


def is_alone(plan: Plan) -> bool:
    """Is there one member, not a population?"""
    return plan.population.num == 1


def is_together(plan: Plan) -> bool:
    """Are there several learners?"""
    return plan.learners.num > 1
