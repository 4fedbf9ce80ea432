"""The mathematics once more, slowly: numbers, lists and loops in plain Python, sharing nothing with the library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Numbers = Sequence[float]


def shrunk(x: float) -> float:
    """Pohlen et al. 2018, eq. in prop. A.2, with eps 0.001."""
    return math.copysign(1.0, x) * (math.sqrt(abs(x) + 1.0) - 1.0) + 0.001 * x


def stretched(y: float) -> float:
    """The x with shrunk(x) = y, found by halving."""
    low, high = -1e7, 1e7
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if shrunk(middle) < y else (low, middle)
    return (low + high) / 2


def worth(out: float, rescale: bool) -> float:
    """The return that an output stands for."""
    return stretched(out) if rescale else out


def shifted(value: float, reward: float, discount: float, rescale: bool) -> float:
    """What the output should be one step before this value."""
    return shrunk(reward + discount * value) if rescale else reward + discount * value


def projected(places: Numbers, masses: Numbers, low: float, high: float, num: int) -> list[float]:
    """Bellemare et al. 2017, eq. 7: every atom's share of every place by the triangle around the atom."""
    gap = (high - low) / (num - 1)
    shares = [0.0] * num
    for place, mass in zip(places, masses, strict=True):
        held = min(max(place, low), high)
        for atom in range(num):
            shares[atom] += mass * max(0.0, 1.0 - abs(held - (low + atom * gap)) / gap)
    return shares


def huber(error: float) -> float:
    """Huber 1964 with kappa 1."""
    return error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5


def quantile_huber_loss(predicted: Numbers, targets: Numbers, fractions: Numbers) -> float:
    """Dabney et al. 2018, eq. 10."""
    total = 0.0
    for quantile, fraction in zip(predicted, fractions, strict=True):
        for target in targets:
            error = target - quantile
            total += abs(fraction - (1.0 if error < 0 else 0.0)) * huber(error) / len(targets)
    return total


def softmax(values: Numbers, temperature: float = 1.0) -> list[float]:
    """Probabilities; -inf has none."""
    top = max(values)
    weights = [math.exp((value - top) / temperature) for value in values]
    return [weight / sum(weights) for weight in weights]


def open_values(values: Numbers, allowed: Sequence[bool] | None) -> list[float]:
    """-inf for what is not allowed, unless nothing is."""
    if allowed is None or not any(allowed):
        return list(values)
    return [value if fine else -math.inf for value, fine in zip(values, allowed, strict=True)]


def one_hot(values: Numbers, allowed: Sequence[bool] | None = None) -> list[float]:
    """All on the best."""
    seen = open_values(values, allowed)
    return [1.0 if place == seen.index(max(seen)) else 0.0 for place in range(len(seen))]


@dataclass
class Soft:
    """Munchausen's settings."""

    alpha: float
    temperature: float
    floor: float

    def bonus(self, values: Numbers, action: int, allowed: Sequence[bool] | None) -> float:
        """alpha * tau log pi(a|s), clipped."""
        chance = softmax(open_values(values, allowed), self.temperature)[action]
        scaled = self.temperature * math.log(chance) if chance > 0 else -math.inf
        return self.alpha * min(0.0, max(self.floor, scaled))

    def entropy(self, values: Numbers, allowed: Sequence[bool] | None) -> float:
        """tau times the policy's entropy."""
        chances = softmax(open_values(values, allowed), self.temperature)
        return -self.temperature * sum(chance * math.log(chance) for chance in chances if chance > 0)

    def chances(self, values: Numbers, allowed: Sequence[bool] | None) -> list[float]:
        """The policy."""
        return softmax(open_values(values, allowed), self.temperature)
