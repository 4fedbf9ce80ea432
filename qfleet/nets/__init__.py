"""Networks: torsos compute features, memories carry state, heads compute outputs per action."""

from qfleet.nets.ahead import AheadNetwork
from qfleet.nets.chain import Chain, Network, make_chain
from qfleet.nets.gradients import gradients_of, keep_freed_memory
from qfleet.nets.heads import ImplicitQuantileHead
from qfleet.nets.layers import (
    dormant_fraction,
    parametrized_layers,
    record_activations,
    refresh_spectral_norms,
    set_noise,
)
from qfleet.nets.normalize import Normalize
from qfleet.nets.qnet import (
    HeadLayers,
    LossLayers,
    QNet,
    Reduced,
    count_own_features,
    draws_random_numbers,
    make_net,
    require_memory,
)
from qfleet.nets.rescale import signed_hyperbolic, signed_parabolic
from qfleet.nets.torso import NATURE, Convolution
from qfleet.nets.weights import (
    can_share_weights,
    copy_array,
    load_state_arrays,
    match_names,
    state_arrays,
    write_weights,
)

__all__ = [
    "NATURE",
    "AheadNetwork",
    "Chain",
    "Convolution",
    "HeadLayers",
    "ImplicitQuantileHead",
    "LossLayers",
    "Network",
    "Normalize",
    "QNet",
    "Reduced",
    "can_share_weights",
    "copy_array",
    "count_own_features",
    "dormant_fraction",
    "draws_random_numbers",
    "gradients_of",
    "keep_freed_memory",
    "load_state_arrays",
    "make_chain",
    "make_net",
    "match_names",
    "parametrized_layers",
    "record_activations",
    "refresh_spectral_norms",
    "require_memory",
    "set_noise",
    "signed_hyperbolic",
    "signed_parabolic",
    "state_arrays",
    "write_weights",
]
