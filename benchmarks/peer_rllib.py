"""RLlib's DQN on Pong against the clock, its environment runner and learner in one process. Inside `.venv-peers`."""

import os
import secrets
from typing import Any

import gymnasium as gym

from benchmarks import peer_worlds
from benchmarks.pace import CAPACITY, EPSILON, LEARN_START, PONG, Meter

Settings = dict[str, Any]


def world(_: Any) -> Any:
    """Its own wrappers."""
    from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack

    peer_worlds.register_atari()
    return wrap_atari_for_new_api_stack(gym.make(PONG), dim=84, framestack=4)


def configured(blank: Any) -> Any:
    """One update of 32 per 4 steps; plain DQN and the network of Mnih et al. 2015."""
    filters = [(32, 8, 4, "valid"), (64, 4, 2, "valid"), (64, 3, 1, "valid")]
    net = {"conv_filters": filters, "conv_activation": "relu", "head_fcnet_hiddens": [512]}
    rule: Settings = {"double_q": False, "n_step": 1, "td_error_loss_fn": "huber"}
    plain: Settings = {"dueling": False, "noisy": False, "num_atoms": 1}
    pacing = {"train_batch_size_per_learner": 32, "training_intensity": 8, "target_network_update_freq": 1_000}
    store = {"replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": CAPACITY}}
    start = {"num_steps_sampled_before_learning_starts": LEARN_START, "epsilon": EPSILON, "lr": 1e-4}
    return (
        blank.environment("pong", clip_rewards=True)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=1, rollout_fragment_length=4)
        .learners(num_learners=0)
        .training(**rule, **plain, **pacing, **store, **start)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=16)
        .rl_module(model_config=net)
    )


def pong(meter: Meter) -> None:
    """Train by its own iterations."""
    # A token of its own, so that Ray keeps none in the user's home; Ray reads it when it is imported.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.tune.registry import register_env

    loopback: Settings = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=200 * 2**20, **loopback)
    register_env("pong", world)
    blank: Any = DQNConfig
    learn(meter, configured(blank()).build_algo())
    ray.shutdown()


def learn(meter: Meter, algorithm: Any) -> None:
    """Until the meter has seen enough."""
    steps = updates = 0
    while not meter(steps, updates):
        seen = algorithm.train()
        steps = int(seen["num_env_steps_sampled_lifetime"])
        learned = seen.get("learners", {}).get("default_policy", {})
        updates = int(learned.get("num_module_steps_trained_lifetime", 0)) // 32
    algorithm.stop()


if __name__ == "__main__":
    peer_worlds.run(__doc__, {"pong": pong})
