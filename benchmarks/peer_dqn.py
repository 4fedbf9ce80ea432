"""A peer's DQN on CartPole-v1 with rl-zoo3's settings, judged as everybody is. Runs inside `.venv-peers`."""

import argparse
import importlib
import json
from typing import Any

import gymnasium as gym

from benchmarks.judge import Judge

# rl-zoo3 hyperparams/dqn.yml, CartPole-v1. Its exploration ends after 0.16 of 50,000 steps.
ZOO: dict[str, Any] = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
EXPLORE_STEPS = 8_000
MANY_STEPS = 2_000_000  # more than any time limit allows; exploration still ends at EXPLORE_STEPS
MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}


def lanes(num: int) -> Any:
    """Native vectorised CartPole, so that judging costs a peer as little as it can."""
    return gym.make_vec("CartPole-v1", num_envs=num, vectorization_mode="vector_entry_point")


def train(peer: str, seed: int, every_steps: int, target: float, max_steps: int) -> None:
    """Train until the judge is content or the steps are used up; prints rows as our own command does."""
    dqn = importlib.import_module(MODULES[peer]).DQN
    callbacks = importlib.import_module("stable_baselines3.common.callbacks")
    judge = Judge(lanes(20), lanes(100), target, seed)

    def on_step(seen: dict[str, Any], _: dict[str, Any]) -> bool:
        model = seen["self"]
        if model.num_timesteps % every_steps:
            return True
        verdict = judge(lambda obs: model.predict(obs, deterministic=True)[0])
        say("eval", model, split="validation", episodes=20, mean=verdict["screen"])
        if verdict["mean"] is not None:
            say("eval", model, split="test", episodes=100, mean=verdict["mean"])
        return not verdict["verified"]

    settings = ZOO | {"exploration_fraction": min(1.0, EXPLORE_STEPS / max_steps)}
    model = dqn("MlpPolicy", gym.make("CartPole-v1"), seed=seed, device="cpu", **settings)
    model.learn(max_steps, callback=callbacks.ConvertCallback(on_step))
    say("end", model)


def say(kind: str, model: Any, **fields: Any) -> None:
    """One row, at once."""
    print(json.dumps({"kind": kind, "env_steps": model.num_timesteps, **fields}), flush=True)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=sorted(MODULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every-steps", type=int, default=2_500)
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--max-steps", type=int, default=MANY_STEPS)
    given = parser.parse_args()
    importlib.import_module("torch").set_num_threads(given.threads)
    train(given.peer, given.seed, given.every_steps, given.target, given.max_steps)


if __name__ == "__main__":
    main()
