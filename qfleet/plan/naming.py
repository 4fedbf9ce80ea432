"""The name and description of a plan's algorithm, derived from the plan itself, not from how it was made."""

from qfleet.plan.paths import flatten
from qfleet.plan.presets import environments
from qfleet.plan.schema import (
    CategoricalHead,
    DoubleRule,
    FreshReplay,
    ImplicitHead,
    MunchausenRule,
    NoMemory,
    Plan,
    PrioritizedSampler,
    QuantileHead,
)

# The settings that distinguish algorithms, with the values of plain DQN; all others are numbers.
PLAIN = {
    "algo.rule.type": "max",
    "algo.n_step": 1,
    "algo.view.type": "steps",
    "net.head.type": "scalar",
    "net.dueling": False,
    "net.noisy": False,
    "net.decoupled": False,
    "net.memory.type": "off",
    "replay.type": "buffer",
    "replay.sampler.type": "uniform",
}
HEADS = {CategoricalHead: "C51", QuantileHead: "QR-DQN", ImplicitHead: "IQN"}


def algorithm_name(plan: Plan, preset: str | None = None) -> str:
    """The algorithm in a run's name: the given preset if it fits, another whose numbers it has, or its parts."""
    known = [name for name in environments.algorithm_presets() if is_same_algorithm(plan, name)]
    if preset in known:
        return preset
    found = [name for name in known if has_settings_of(plan, name)]
    if found:
        return max(found, key=lambda name: len(environments.settings_of(name, plan.env.id)))
    return "-".join(name for name, _ in algorithm_parts(plan) if name) or "dqn"


def algorithm_description(plan: Plan) -> str:
    """The algorithm as text: Double DQN, 5-step returns."""
    (_, rule), *rest = algorithm_parts(plan)
    kind = "PQN" if isinstance(plan.replay, FreshReplay) else HEADS.get(type(plan.net.head), "DQN")
    return ", ".join([f"{rule} {kind}".strip(), *(text for _, text in rest if text)])


def algorithm_parts(plan: Plan) -> list[tuple[str, str]]:
    """Differences from plain DQN, each as (part of a name, text); the rule comes first, empty for the plain one."""
    net = plan.net
    replay = plan.replay
    steps = plan.algo.n_step
    rule = {DoubleRule: ("double", "Double"), MunchausenRule: ("munchausen", "Munchausen")}
    head = HEADS.get(type(net.head), "").lower().replace("-", "")
    memory = "" if isinstance(net.memory, NoMemory) else str(net.memory.__struct_config__.tag)
    fresh = isinstance(replay, FreshReplay)
    per = not isinstance(replay, FreshReplay) and isinstance(replay.sampler, PrioritizedSampler)
    return [
        rule.get(type(plan.algo.rule), ("", "")),
        *([("pqn", "")] if fresh else []),
        *([(head, "")] if head else []),
        *([("dueling", "dueling")] if net.dueling else []),
        *([("noisy", "noisy layers")] if net.noisy else []),
        *([("decoupled", "decoupled actions")] if net.decoupled else []),
        *([(memory, f"{memory.upper()} memory")] if memory else []),
        *([("per", "prioritised replay")] if per else []),
        *([(f"n{steps}", f"{steps}-step returns")] if steps > 1 and not fresh else []),
    ]


def is_same_algorithm(plan: Plan, preset: str) -> bool:
    """Does the plan have the preset's algorithm, regardless of its numbers?"""
    flat = PLAIN | flatten(plan)
    if isinstance(plan.replay, FreshReplay):
        flat["algo.n_step"] = 1  # has no effect there
    settings = PLAIN | environments.settings_of(preset, plan.env.id)
    return all(flat[path] == settings[path] for path in PLAIN)


def has_settings_of(plan: Plan, preset: str) -> bool:
    """Does the plan have every setting of the preset, which sets numbers too and not only the algorithm?"""
    flat = flatten(plan)
    settings = environments.settings_of(preset, plan.env.id)
    return not settings.keys() <= PLAIN.keys() and all(flat.get(path) == value for path, value in settings.items())
