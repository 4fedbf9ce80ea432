"""Tianshou's DQN on Pong against the clock. Runs inside `.venv-peers`."""

import numpy as np
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.env import ShmemVectorEnv
from tianshou.env.atari.atari_network import DQNet, ScaledObsInputActionReprNet
from tianshou.utils.torch_utils import policy_within_training_step

from benchmarks import peer_worlds
from benchmarks.pace import CAPACITY, EPSILON, LEARN_START, Meter

LANES = 8


def pong(meter: Meter) -> None:
    """8 environments in processes of their own, its frame-sharing replay, two updates per 8 steps."""
    envs = ShmemVectorEnv([peer_worlds.pong] * LANES)
    space = peer_worlds.pong().action_space
    net = ScaledObsInputActionReprNet(DQNet(4, 84, 84, action_shape=space.n))  # type: ignore[attr-defined]
    policy = DiscreteQLearningPolicy(model=net, action_space=space, eps_training=EPSILON)
    rule = {"target_update_freq": 250, "is_double": False, "n_step_return_horizon": 1, "huber_loss_delta": 1.0}
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-4), **rule)
    store = {"ignore_obs_next": True, "save_only_last_obs": True, "stack_num": 4}
    memory = VectorReplayBuffer(CAPACITY, buffer_num=LANES, **store)
    collector = Collector[CollectStats](algorithm, envs, memory, exploration_noise=True)
    collector.reset()
    learn(meter, algorithm, collector, memory)
    envs.close()


def learn(meter: Meter, algorithm: DQN, collector: Collector, memory: VectorReplayBuffer) -> None:
    """Collect and update in turns, without the trainer's logging."""
    steps, updates = LEARN_START // LANES * LANES, 0
    with policy_within_training_step(algorithm.policy):
        collector.collect(n_step=steps, random=True)
        while not meter(steps, updates):
            collector.collect(n_step=LANES)
            steps += LANES
            for _ in range(LANES // 4):
                algorithm.update(memory, sample_size=32)
                updates += 1


if __name__ == "__main__":
    np.random.seed(0)
    peer_worlds.run(__doc__, {"pong": pong})
