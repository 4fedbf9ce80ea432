"""Acting: the policy, the actor, exploration and evaluation."""

from qfleet.act.actor import Actor, run_actor
from qfleet.act.evaluate import EvaluationResult, evaluate_policy, num_eval_lanes
from qfleet.act.explore import Explore, Explorer, make_epsilon, make_explorer
from qfleet.act.no_actor import NoActor
from qfleet.act.policy import Policy
from qfleet.act.policy_inputs import add_reward
from qfleet.act.population_policy import PopulationPolicy

__all__ = [
    "Actor",
    "EvaluationResult",
    "Explore",
    "Explorer",
    "NoActor",
    "Policy",
    "PopulationPolicy",
    "add_reward",
    "evaluate_policy",
    "make_epsilon",
    "make_explorer",
    "num_eval_lanes",
    "run_actor",
]
