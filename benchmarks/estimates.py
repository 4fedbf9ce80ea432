"""Are off-policy estimates right? Policies ranked by fitted Q and by importance sampling, against their true returns.

CartPole: true returns by real episodes. FrozenLake: exact, by dynamic programming. Nothing is measured in seconds.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from benchmarks import report
from qfleet.build.threads import torch_threads
from qfleet.data import Array
from qfleet.datasets.estimates import (
    FittedQSettings,
    ValuedEpisode,
    epsilon_greedy_probabilities,
    fitted_q_estimate,
    importance_estimate,
)

LEAST_CORRELATION = 0.8
SUPPORT = ("effective episodes", "effective in its value", "mean weight")  # of importance sampling
TRUE_EPISODES = 100
CARTPOLE_GAMMA = 0.97
LAKE_GAMMA = 0.95
Probabilities = Callable[[Array], Array]  # observations [N, F] -> [N, A]


@dataclass(frozen=True)
class World:
    """An environment, who was recorded in it, and the policies whose returns are estimated."""

    name: str
    env: gymnasium.Env[Any, Any]
    encode: Callable[[Any], Array]  # [F]
    recorded: Probabilities
    policies: dict[str, Probabilities]
    fit: FittedQSettings


def play(world: World, chosen: Probabilities, number: int, seed: int) -> ValuedEpisode:
    """One episode; `target` is filled in later."""
    rng = np.random.default_rng([seed, number])
    obs, _ = world.env.reset(seed=int(rng.integers(2**31)))
    rows = [world.encode(obs)]
    steps: list[tuple[int, float, float]] = []
    ended = False
    cut = False
    while not (ended or cut):
        chance = chosen(rows[-1][None])[0]
        action = int(rng.choice(len(chance), p=chance))
        obs, reward, ended, cut, _ = world.env.step(action)
        rows.append(world.encode(obs))
        steps.append((action, float(reward), float(chance[action])))
    table = np.array(steps)
    nothing = np.zeros((len(rows), len(chance)))
    action_column = table[:, 0].astype(np.int64)
    return ValuedEpisode(f"e{number}", np.stack(rows), action_column, table[:, 1], ended, nothing, nothing, table[:, 2])


def with_target(episode: ValuedEpisode, policy: Probabilities) -> ValuedEpisode:
    """The episode with the probabilities of a policy."""
    target = policy(episode.obs)
    fields = (episode.id, episode.obs, episode.action, episode.reward, episode.terminated)
    return ValuedEpisode(*fields, target, target, episode.probability)


def noisy(score: Callable[[Array], Array], epsilon: float) -> Probabilities:
    """Epsilon-greedy in scores [N, A]."""
    return lambda obs: epsilon_greedy_probabilities(score(obs), epsilon)


def lean(weights: tuple[float, ...]) -> Callable[[Array], Array]:
    """Push right where the weighted sum of CartPole's observation is positive."""

    def score(obs: Array) -> Array:
        side = obs @ np.array(weights, np.float32)
        return np.stack([-side, side], 1)

    return score


def cartpole(updates: int) -> World:
    """Controllers of different quality, recorded while one of them acted at random half of the time."""
    good = (0.0, 0.2, 1.0, 1.0)
    policies = {f"good, epsilon {epsilon}": noisy(lean(good), epsilon) for epsilon in (0.05, 0.3, 0.5, 0.7, 0.9)}
    policies |= {
        "angle only, epsilon 0.1": noisy(lean((0.0, 0.0, 1.0, 0.0)), 0.1),
        "speed only, epsilon 0.3": noisy(lean((0.0, 1.0, 0.0, 0.0)), 0.3),
        "reversed, epsilon 0.2": noisy(lean((0.0, -0.2, -1.0, -1.0)), 0.2),
        "reversed, epsilon 0.6": noisy(lean((0.0, -0.2, -1.0, -1.0)), 0.6),
        "random": noisy(lean(good), 1.0),
    }
    return World(
        name="CartPole",
        env=gymnasium.make("CartPole-v1"),
        encode=lambda obs: np.asarray(obs, np.float32),
        recorded=noisy(lean(good), 0.6),
        policies=policies,
        fit=FittedQSettings(CARTPOLE_GAMMA, num_seeds=2, updates=updates),
    )


def lake_model(env: gymnasium.Env[Any, Any]) -> tuple[Array, Array]:  # [S, A, S], [S, A]
    """The chances of next states while the episode goes on, and mean rewards, from the environment's own table."""
    table = env.unwrapped.P  # type: ignore[attr-defined]
    chances = np.zeros((len(table), 4, len(table)))
    rewards = np.zeros((len(table), 4))
    for state, actions in table.items():
        for action, ways in actions.items():
            for chance, following, reward, ended in ways:
                chances[state, action, following] += chance * (not ended)
                rewards[state, action] += chance * reward
    return chances, rewards


def best_values(chances: Array, rewards: Array, gamma: float) -> Array:  # [S, A]
    """Value iteration (Bellman 1957) to its fixed point."""
    values = np.zeros_like(rewards)
    for _ in range(2_000):
        values = rewards + gamma * chances @ values.max(1)
    found: Array = values
    return found


def exact_return(chances: Array, rewards: Array, chosen: Array, gamma: float) -> float:
    """The value of the first state: V = (I - gamma P_pi)^-1 r_pi."""
    moves = np.einsum("sa,sat->st", chosen, chances)
    mean = (chosen * rewards).sum(1)
    return float(np.linalg.solve(np.eye(len(moves)) - gamma * moves, mean)[0])


def frozen_lake(updates: int) -> tuple[World, dict[str, float]]:
    """Policies between the best one and its opposite, and their exact returns; without the limit of 100 steps."""
    env = gymnasium.make("FrozenLake-v1", is_slippery=True, max_episode_steps=1_000)
    chances, rewards = lake_model(env)
    best = best_values(chances, rewards, LAKE_GAMMA)
    rng = np.random.default_rng(0)
    tables = {f"best, epsilon {epsilon}": (best, epsilon) for epsilon in (0.0, 0.15, 0.3, 0.5, 0.7, 1.0)}
    tables |= {f"arbitrary {at}": (rng.random(best.shape), 0.2) for at in range(3)}
    tables["worst"] = (-best, 0.2)
    policies = {name: noisy(lambda obs, table=table: obs @ table, eps) for name, (table, eps) in tables.items()}
    one_hot = np.eye(len(best), dtype=np.float32)
    world = World(
        name="FrozenLake",
        env=env,
        encode=lambda state: one_hot[int(state)],
        recorded=noisy(lambda obs: obs @ best, 0.7),
        policies=policies,
        fit=FittedQSettings(LAKE_GAMMA, num_seeds=2, updates=updates, sizes=(), learning_rate=1e-2),
    )
    true = {name: exact_return(chances, rewards, each(one_hot), LAKE_GAMMA) for name, each in policies.items()}
    return world, true


def played_return(world: World, policy: Probabilities) -> float:
    """The mean discounted return of real episodes."""
    found = [play(world, policy, number, 7).returns(world.fit.gamma)[0] for number in range(TRUE_EPISODES)]
    return float(np.mean(found))


def measure(world: World, true: dict[str, float], episodes: int) -> dict[str, Any]:
    """Both estimates of every policy from the same recorded episodes."""
    recorded = [play(world, world.recorded, number, 1) for number in range(episodes)]
    rows = []
    for name, policy in world.policies.items():
        seen = [with_target(each, policy) for each in recorded]
        fitted = fitted_q_estimate(seen, world.fit)
        weighted = importance_estimate(seen, world.fit.gamma, 0)
        rows.append({"policy": name, "true": true[name], "fitted_q": fitted.row(), "importance": weighted.row()})
        print(f"{world.name}: {name}: true {true[name]:.3f}, fitted {fitted.value}, {fitted.refused}", file=sys.stderr)
    return {
        "world": world.name,
        "gamma": world.fit.gamma,
        "recorded_episodes": episodes,
        "recorded_steps": sum(each.num_steps for each in recorded),
        "policies": rows,
        **{f"{key}_correlation": correlation(rows, key) for key in ("fitted_q", "importance")},
        "regret_at_1": regret(rows),
    }


def correlation(rows: list[dict[str, Any]], key: str) -> float | None:
    """Spearman's rank correlation with true returns over the policies that were not refused."""
    pairs = [(row["true"], row[key]["value"]) for row in rows if row[key]["value"] is not None]
    return rank_correlation(*map(np.array, zip(*pairs, strict=True))) if len(pairs) > 2 else None


def rank_correlation(first: Array, second: Array) -> float:
    """Spearman's: the correlation of ranks; equal numbers share their mean rank."""

    def ranks(values: Array) -> Array:
        found: Array = (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2
        return found

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def regret(rows: list[dict[str, Any]]) -> float | None:
    """How much worse the policy with the highest estimate is than the best one."""
    known = [row for row in rows if row["fitted_q"]["value"] is not None]
    if not known:
        return None
    chosen = max(known, key=lambda row: row["fitted_q"]["value"])
    return float(max(row["true"] for row in rows) - chosen["true"])


def page(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    parts = ["Off-policy estimates against true returns; `scripts/bench estimates` makes this page.\n"]
    for each in found["worlds"]:
        parts.append(f"## {each['world']}\n")
        parts.append(
            f"{each['recorded_episodes']:,} recorded episodes, {each['recorded_steps']:,} steps, discount "
            f"{each['gamma']:g}. Rank correlation of fitted Q with true returns over {len(each['policies'])} policies: "
            f"**{each['fitted_q_correlation']:.2f}** (bar: {LEAST_CORRELATION}). Regret at 1: "
            f"{each['regret_at_1']:.3g}.\n"
        )
        rows = [table_row(row) for row in each["policies"]]
        header = ("policy", "true return", "fitted Q", "95 %", "weighted importance", *SUPPORT)
        parts.append(report.table(header, rows))
    return "\n".join(parts)


def table_row(row: dict[str, Any]) -> tuple[Any, ...]:
    """One policy."""
    fitted = row["fitted_q"]
    weighted = row["importance"]
    span = None if fitted["low"] is None else f"{fitted['low']:.3g} to {fitted['high']:.3g}"
    value = "refused" if weighted["value"] is None else f"{weighted['value']:.3g}"
    rests_on = [weighted["support"].get(name) for name in ("effective_episodes", "effective_parts")]
    mean = [f"{weighted['support'][f'mean_weight_{end}']:.2g}" for end in ("low", "high")]
    estimate = fitted["value"] and f"{fitted['value']:.3g}"
    return (row["policy"], f"{row['true']:.3g}", estimate, span, value, *rests_on, " to ".join(mean))


def main() -> int:
    """Measure both worlds; write benchmarks/results/estimates.*, fail below the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1_000, help="recorded in each world")
    parser.add_argument("--updates", type=int, default=4_000, help="of a fit")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    with torch_threads(1):
        pole = cartpole(options.updates)
        played = {name: played_return(pole, policy) for name, policy in pole.policies.items()}
        lake, exact = frozen_lake(options.updates)
        worlds = [measure(pole, played, options.episodes), measure(lake, exact, 3 * options.episodes)]
    found = {"worlds": worlds}
    text = page(found)
    print(text)
    if not options.no_save:
        report.save("estimates", found, text)
    return int(any((each["fitted_q_correlation"] or 0.0) < LEAST_CORRELATION for each in worlds))


if __name__ == "__main__":
    sys.exit(main())
