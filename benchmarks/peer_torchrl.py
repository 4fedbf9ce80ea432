"""TorchRL's DQN on Pong against the clock. Runs inside `.venv-peers`."""

import torch
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import MLP, ConvNet, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

from benchmarks import peer_worlds
from benchmarks.pace import CAPACITY, EPSILON, LEARN_START, Meter

STEPS = 16  # per batch of its collector
ACTIONS = 6


class Scaled(nn.Module):
    """Bytes to floats."""

    def forward(self, obs: Tensor) -> Tensor:
        """Pictures from 0 to 1."""
        return obs.float() / 255.0


def network() -> nn.Module:
    """The network of Mnih et al. 2015 from its own parts."""
    torso = ConvNet(in_features=4, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1],
                    activation_class=nn.ReLU)  # fmt: skip
    head = MLP(in_features=3136, num_cells=[512], out_features=ACTIONS, activation_class=nn.ReLU)
    return nn.Sequential(Scaled(), torso, head)


def pong(meter: Meter) -> None:
    """One environment behind Gymnasium's wrappers, which cost less than its own transforms."""
    env = GymWrapper(peer_worlds.pong(), categorical_action_encoding=True)
    actor = QValueActor(network(), spec=env.action_spec, in_keys=["observation"], action_space="categorical")
    greedy = EGreedyModule(spec=env.action_spec, eps_init=EPSILON, eps_end=EPSILON)
    sizes = {"frames_per_batch": STEPS, "total_frames": -1, "init_random_frames": LEARN_START}
    collector = Collector(env, TensorDictSequential(actor, greedy), **sizes)
    memory = TensorDictReplayBuffer(storage=LazyMemmapStorage(CAPACITY), batch_size=32)
    loss = DQNLoss(actor, loss_function="smooth_l1", delay_value=True, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    learn(meter, collector, memory, loss)
    collector.shutdown()


def learn(meter: Meter, collector: Collector, memory: TensorDictReplayBuffer, loss: DQNLoss) -> None:
    """16 steps, then 4 updates."""
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4)
    target, steps, updates = HardUpdate(loss, value_network_update_interval=250), 0, 0
    for data in collector:
        memory.extend(data.reshape(-1))
        steps += STEPS
        for _ in range(STEPS // 4 if steps > LEARN_START else 0):
            optimizer.zero_grad()
            loss(memory.sample())["loss"].backward()
            optimizer.step()
            target.step()
            updates += 1
        if meter(steps, updates):
            return


if __name__ == "__main__":
    peer_worlds.run(__doc__, {"pong": pong})
