"""An auxiliary loss on the torso's features: predict the features of the next observation.

From the features of an observation and the action taken, a small layer predicts the target network's features of the
next observation (self-prediction, as in Schwarzer et al. 2021, one step ahead). Its gradient shapes the torso.
Whether that helps depends on the task: on two MinAtar games it does not (docs/results.md).

    python examples/auxiliary_loss.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import qfleet
from qfleet.custom import LossInputs


@dataclass(frozen=True)
class PredictNextFeatures:
    """The TD loss, plus `weight` times one minus the cosine between predicted and real next features."""

    weight: float = 0.5

    def make_layers(self, features: int, actions: int) -> nn.Module:
        """The predictor. It is trained, saved and shared with other learners as a part of the network."""
        return nn.Linear(features + actions, features)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Loss [M] and priority [M] of every row."""
        loss, priority = inputs.td_loss()
        taken = functional.one_hot(inputs.action, inputs.out.shape[1]).to(loss.dtype)
        predicted = inputs.layers(torch.cat([inputs.features, taken], 1))
        # Where an episode ended (discount 0) there is no next observation to predict.
        goes_on = (inputs.batch.discount > 0).to(loss.dtype)
        likeness = functional.cosine_similarity(predicted, inputs.next_features())
        return loss + self.weight * goes_on * (1.0 - likeness), priority


if __name__ == "__main__":
    settings = {"until.steps": 20_000, "algo.n_step": 1}
    run = qfleet.train("MinAtar/Breakout-v0", loss=PredictNextFeatures(), overrides=settings)
    print(run, run.result())
