"""Run in the fresh venv: play the original environment, made by Gymnasium, with a saved policy and raw observations.

python play.py RUN ID OPTIONS_AS_JSON STEPS
"""

import json
import runpy
import sys
from typing import Any

import gymnasium as gym
import numpy as np

import qfleet


def make(env_id: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    file, _, name = env_id.rpartition(":")
    if file.endswith(".py"):
        env: gym.Env[Any, Any] = runpy.run_path(file)[name](**options)
        return env
    return gym.make(env_id, **options)


def check_action(policy: qfleet.Policy, env: gym.Env[Any, Any], obs: Any, info: dict[str, Any]) -> Any:
    """The action of `predict`: one of the environment's, allowed, the one of the highest value, the same in a batch."""
    mask = info.get("action_mask")
    action, _ = policy.predict(obs, mask=mask)
    assert env.action_space.contains(np.asarray(action, env.action_space.dtype)), action
    values = policy.values(obs)
    assert np.isfinite(values).all()
    if values.ndim == 1:
        allowed = values if mask is None else np.where(np.asarray(mask, bool), values, -np.inf)
        assert np.array_equal(policy.raw_action(int(allowed.argmax())), action)
    pair = [obs, obs] if isinstance(obs, dict | tuple) else np.stack([obs, obs])
    both, _ = policy.predict(pair, mask=None if mask is None else np.stack([mask, mask]))
    assert np.array_equal(both[0], action)
    assert np.array_equal(both[1], action)
    return action


def play(policy: qfleet.Policy, env: gym.Env[Any, Any], steps: int) -> int:
    """Take this many steps; returns how many episodes ended."""
    obs, info = env.reset(seed=1)
    ended = 0
    for _ in range(steps):
        obs, _, terminated, truncated, info = env.step(check_action(policy, env, obs, info))
        if terminated or truncated:
            ended += 1
            obs, info = env.reset()
    return ended


if __name__ == "__main__":
    run, env_id, options, steps = sys.argv[1:]
    loaded = qfleet.Policy.load(run)
    world = make(env_id, json.loads(options))
    episodes = play(loaded, world, int(steps))
    world.close()
    print(json.dumps({"steps": int(steps), "episodes": episodes, "qfleet": qfleet.__file__}))
