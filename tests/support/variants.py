"""Small plans of every variant, and few plans in which every two settings meet."""

import itertools
import random
from collections.abc import Iterator

from tests.support.runs import Settings

ACTOR: Settings = {
    "replay.sampler.type": "prioritized",
    "replay.sampler.initial": "actor",
    "replay.sampler.beta_updates": 50,
}
SEQUENCES: Settings = {
    "algo.view.type": "sequences",
    "algo.view.burn_in": 2,
    "algo.view.length": 6,
    "algo.view.stride": 4,
    "algo.batch_size": 8,
    "replay.samples_per_insert": 12,
    "net.memory.size": 8,
}
LSTM: Settings = {**SEQUENCES, "net.memory.type": "lstm"}
GRU: Settings = {**SEQUENCES, "net.memory.type": "gru"}
FRESH: Settings = {
    "replay.type": "fresh",
    "replay.rows": 8,
    "replay.minibatches": 4,
    "replay.capacity": None,
    "replay.samples_per_insert": None,
    "algo.learn_start_steps": None,
    "algo.batch_size": None,
    "algo.target.type": None,
    "algo.target.every_updates": None,
    "optim.type": "radam",
}
C51: Settings = {"net.head.type": "categorical", "net.head.atoms": 11, "net.head.low": 0, "net.head.high": 30}
QR: Settings = {"net.head.type": "quantile", "net.head.quantiles": 8}
IQN: Settings = {
    "net.head.type": "implicit",
    "net.head.fractions": 4,
    "net.head.target_fractions": 5,
    "net.head.act_fractions": 6,
    "net.head.cosines": 8,
}
NOISY: Settings = {
    "net.noisy": True,
    "algo.explore.type": "constant",
    "algo.explore.epsilon": 0,
    "algo.explore.steps": None,
}
MUNCHAUSEN: Settings = {"algo.rule.type": "munchausen"}
R2D2: Settings = {**LSTM, **ACTOR, "algo.n_step": 3, "algo.rescale": True}
PQN: Settings = {**FRESH, "net.layer_norm": True}
LADDER: Settings = {"algo.explore.type": "ladder", "algo.explore.warm_steps": 50, "algo.explore.steps": None}
SOFTMAX: Settings = {"algo.explore.type": "softmax", "algo.explore.end": 0.1}
RESET: Settings = {"algo.reset.type": "periodic", "algo.reset.every_updates": 8}
ANNEAL: Settings = {"algo.anneal.type": "exponential", "algo.anneal.n_step": 5, "algo.anneal.updates": 20}
SPECTRAL: Settings = {"net.spectral_norm": True, "net.torso.sizes": (16, 16)}  # of one size the torso has no layer
AVERAGE: Settings = {"algo.target.type": "average", "algo.target.tau": 0.05, "algo.target.every_updates": None}

VARIANTS: dict[str, Settings] = {
    "c51": C51,
    "qr": QR,
    "iqn": IQN,
    "noisy": NOISY,
    "munchausen": MUNCHAUSEN,
    "r2d2": R2D2,
    "gru": GRU,
    "pqn": PQN,
    "pqn-noisy": {**FRESH, "net.noisy": True, "net.dueling": True, "env.normalize": "both"},
    "spectral-dropout": {**SPECTRAL, "net.dropout": 0.1},
    "rainbow": {**C51, **NOISY, "net.dueling": True, "replay.sampler.type": "prioritized", "algo.n_step": 3},
}

# What can be chosen independently; the first of each is what a plan has anyhow.
AXES: dict[str, dict[str, Settings]] = {
    "head": {"scalar": {}, "c51": C51, "qr": QR, "iqn": IQN},
    "rule": {"double": {}, "max": {"algo.rule.type": "max"}, "munchausen": MUNCHAUSEN},
    "memory": {"off": {}, "lstm": LSTM, "gru": GRU},
    "sampler": {"uniform": {}, "prioritized": {"replay.sampler.type": "prioritized"}, "actor": ACTOR},
    "streams": {"plain": {}, "dueling": {"net.dueling": True}},
    "noise": {"still": {}, "noisy": {"net.noisy": True}},
    "explore": {"linear": {}, "ladder": LADDER, "softmax": SOFTMAX},
    "reward": {"plain": {}, "bonus": {"algo.bonus.type": "count", "algo.bonus.settle_steps": 30}},
    "course": {"steady": {}, "reset": RESET, "anneal": ANNEAL},
    "filter": {"all": {}, "once": {"replay.filter.type": "duplicates", "replay.filter.copies": 1}},
    "layers": {
        "plain": {},
        "norm": {"net.layer_norm": True},
        "spectral": SPECTRAL,
        "dropout": {"net.dropout": 0.1},
    },
    "return": {"n1": {"algo.n_step": 1}, "n3": {"algo.n_step": 3}},
    "scale": {"raw": {}, "rescaled": {"algo.rescale": True}, "normalised": {"env.normalize": "obs"}},
    "target": {"copy": {}, "average": AVERAGE},
    "optim": {"adam": {}, "radam": {"optim.type": "radam"}, "rmsprop": {"optim.type": "rmsprop"}},
}
Chosen = dict[str, str]
Meeting = tuple[tuple[str, str], tuple[str, str]]
# The only ones that `plan/validate/pairs.py` keeps apart.
APART: set[Meeting] = {
    (("head", "c51"), ("sampler", "actor")),
    (("filter", "once"), ("memory", "lstm")),
    (("filter", "once"), ("memory", "gru")),
    (("filter", "once"), ("reward", "bonus")),
    (("course", "anneal"), ("filter", "once")),
}


def settings_of(chosen: Chosen) -> Settings:
    """The settings of one choice per axis."""
    return {path: value for axis, name in chosen.items() for path, value in AXES[axis][name].items()}


def meetings(chosen: Chosen) -> set[Meeting]:
    """Every two choices that meet in a plan."""
    return set(itertools.combinations(sorted(chosen.items()), 2))


def all_meetings() -> set[Meeting]:
    """Every two choices that can meet."""
    names = sorted((axis, name) for axis, choices in AXES.items() for name in choices)
    return {(one, other) for one, other in itertools.combinations(names, 2) if one[0] != other[0]} - APART


def pairwise(seed: int = 0, tries: int = 50) -> Iterator[Chosen]:
    """Few plans in which every two choices that can meet do: each is the best of some random ones."""
    chance, left = random.Random(seed), all_meetings()
    while left:
        wanted = dict(chance.choice(sorted(left)))
        drawn = [{**{axis: chance.choice(list(names)) for axis, names in AXES.items()}, **wanted} for _ in range(tries)]
        best = max((one for one in drawn if not meetings(one) & APART), key=lambda one: len(meetings(one) & left))
        left -= meetings(best)
        yield best
