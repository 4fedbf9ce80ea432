"""Acting: the policy, the actor, exploration and evaluation."""

from qfleet.act.actor import Actor, acting
from qfleet.act.evaluate import Played, lanes_for, play
from qfleet.act.explore import Explore, Explorer, make_epsilon, make_explorer
from qfleet.act.policy import Policy, carry
from qfleet.act.population_policy import Crowd

__all__ = [
    "Actor",
    "Crowd",
    "Explore",
    "Explorer",
    "Played",
    "Policy",
    "acting",
    "carry",
    "lanes_for",
    "make_epsilon",
    "make_explorer",
    "play",
]
