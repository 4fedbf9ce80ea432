"""Everything that you need to change the algorithm from Python, without a fork of qfleet.

| argument of `train` | what it is | replaces |
| --- | --- | --- |
| `rule` | a `Rule`: how the next state is valued | `algo.rule` |
| `loss` | a `Loss`: the loss of every row, alone or added to that of the head | `algo.loss` |
| `head` | a `CustomHead`: the last layers, and what their outputs mean | `net.head`, `net.dueling`, `net.decoupled` |
| `torso` | a `torch.nn.Module` from observations to features | `net.torso` |
| `sampler` | a `CustomSampler`: which items of the replay are learned from | `replay.sampler` |
| `optimizer` | an `OptimizerMaker`: a function that returns a `torch.optim.Optimizer` | `optim` |
| `explore` | an `Explore` function: which action is tried | `algo.explore` |
| `env`, `eval_env` | a function that returns an environment | `env.id` |

Shapes: N items of a batch, M rows learned from (M = N for single steps, length x N for sequences), A actions, B lanes
(copies of the environment), F features. Numbers are float32, actions int64.

What must hold: a part is the same function of its inputs each time; it draws random numbers only from the generator
that it is given, or from torch's own; it keeps no state outside of `state_dict` (samplers) and of layers made by
`make_layers` (heads, losses). Then a resumed run is exact.
"""

from qfleet.act import Explore
from qfleet.learn import OptimizerMaker
from qfleet.nets import QNet
from qfleet.qlearn import (
    ActionChoice,
    CustomHead,
    Head,
    Loss,
    LossInputs,
    NextValues,
    Rule,
    Tensors,
    greedy_probs,
    masked,
)
from qfleet.replay import CustomSampler

__all__ = [
    "ActionChoice",
    "CustomHead",
    "CustomSampler",
    "Explore",
    "Head",
    "Loss",
    "LossInputs",
    "NextValues",
    "OptimizerMaker",
    "QNet",
    "Rule",
    "Tensors",
    "greedy_probs",
    "masked",
]
