"""What a plan is, in a name and in words: read from the plan itself, whoever made it and whatever was changed."""

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

# The settings that make one algorithm another, as plain DQN has them; the rest are numbers.
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


def algorithm_name(plan: Plan, asked: str | None = None) -> str:
    """The algorithm in a run's name: the preset that was asked for, another whose numbers it has, or its parts."""
    known = [name for name in environments.algorithm_presets() if is_like(plan, name)]
    if asked in known:
        return asked
    found = [name for name in known if has_numbers_of(plan, name)]
    if found:
        return max(found, key=lambda name: len(environments.settings_of(name, plan.env.id)))
    return "-".join(name for name, _ in parts_of(plan) if name) or "dqn"


def algorithm_words(plan: Plan) -> str:
    """The algorithm in words: Double DQN, 5-step returns."""
    (_, rule), *rest = parts_of(plan)
    kind = "PQN" if isinstance(plan.replay, FreshReplay) else HEADS.get(type(plan.net.head), "DQN")
    return ", ".join([f"{rule} {kind}".strip(), *(words for _, words in rest if words)])


def parts_of(plan: Plan) -> list[tuple[str, str]]:
    """What differs from plain DQN, each as part of a name and in words; the rule first, empty for the plain one."""
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


def is_like(plan: Plan, preset: str) -> bool:
    """Is the plan this preset's algorithm, whatever its numbers?"""
    flat = PLAIN | flatten(plan)
    if isinstance(plan.replay, FreshReplay):
        flat["algo.n_step"] = 1  # has no effect there
    settings = PLAIN | environments.settings_of(preset, plan.env.id)
    return all(flat[path] == settings[path] for path in PLAIN)


def has_numbers_of(plan: Plan, preset: str) -> bool:
    """Does the plan have all that a preset sets, and does that say more than which algorithm it is?"""
    flat = flatten(plan)
    settings = environments.settings_of(preset, plan.env.id)
    return not settings.keys() <= PLAIN.keys() and all(flat.get(path) == value for path, value in settings.items())
