"""Acting: the policy, the actor, exploration and evaluation."""

from qfleet.act.actor import Actor, acting
from qfleet.act.evaluate import lanes_for, play
from qfleet.act.explore import make_epsilon
from qfleet.act.policy import Policy

__all__ = ["Actor", "Policy", "acting", "lanes_for", "make_epsilon", "play"]
