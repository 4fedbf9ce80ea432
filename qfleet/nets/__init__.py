"""Networks: torsos that make features, memories, heads that make outputs per action."""

from qfleet.nets.chain import Chain, Network, chain_of
from qfleet.nets.gradients import gradients_of, keep_freed_memory
from qfleet.nets.heads import DuelingHead, ImplicitQuantileHead, PlainHead
from qfleet.nets.layers import Noisy, Style, constraints, dormant_share, set_noise, settle_norms, watching
from qfleet.nets.memory import Memory
from qfleet.nets.normalize import Normalize
from qfleet.nets.precision import Reduced
from qfleet.nets.qnet import QNet, draws, make_net, require_memory
from qfleet.nets.rescale import shrink, stretch
from qfleet.nets.torso import NATURE, Convolution, Convolutions, Impala, Mlp
from qfleet.nets.weights import may_share, under_own_names, write_weights

__all__ = [
    "NATURE",
    "Chain",
    "Convolution",
    "Convolutions",
    "DuelingHead",
    "Impala",
    "ImplicitQuantileHead",
    "Memory",
    "Mlp",
    "Network",
    "Noisy",
    "Normalize",
    "PlainHead",
    "QNet",
    "Reduced",
    "Style",
    "chain_of",
    "constraints",
    "dormant_share",
    "draws",
    "gradients_of",
    "keep_freed_memory",
    "make_net",
    "may_share",
    "require_memory",
    "set_noise",
    "settle_norms",
    "shrink",
    "stretch",
    "under_own_names",
    "watching",
    "write_weights",
]
