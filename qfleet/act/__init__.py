"""Acting: the policy, the actor, exploration and evaluation."""

from qfleet.act.actor import Actor, acting
from qfleet.act.evaluate import EvaluationResult, lanes_for, play
from qfleet.act.explore import Explore, Explorer, make_epsilon, make_explorer
from qfleet.act.policy import Policy, carry
from qfleet.act.population_policy import PopulationPolicy

__all__ = [
    "Actor",
    "EvaluationResult",
    "Explore",
    "Explorer",
    "Policy",
    "PopulationPolicy",
    "acting",
    "carry",
    "lanes_for",
    "make_epsilon",
    "make_explorer",
    "play",
]
