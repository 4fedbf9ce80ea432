"""Networks: torsos that make features, heads that make one output per action."""

from qfleet.nets.normalize import Normalize
from qfleet.nets.qnet import QNet, make_net
from qfleet.nets.torso import Mlp, Nature

__all__ = ["Mlp", "Nature", "Normalize", "QNet", "make_net"]
