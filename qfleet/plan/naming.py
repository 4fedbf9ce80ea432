"""The name and description of a plan's algorithm, derived from the plan itself, not from how it was made."""

from qfleet.plan import schema
from qfleet.plan.paths import flatten
from qfleet.plan.presets.pieces import Settings
from qfleet.plan.schema import Plan

# The settings that distinguish algorithms; all others are numbers.
DISTINCTIVE = {
    "algo.rule.type",
    "algo.n_step",
    "algo.view.type",
    "algo.offline.type",
    "net.head.type",
    "net.dueling",
    "net.noisy",
    "net.decoupled",
    "net.memory.type",
    "replay.type",
    "replay.sampler.type",
}
# The presets of each algorithm, by the name that its parts make; the presets themselves set its numbers too.
PRESETS = {
    "dqn": ("dqn", "gorila", "dqn-small"),
    "double": ("double", "double-small"),
    "double-dueling": ("dueling", "dueling-small"),
    "double-per": ("per", "per-small"),
    "double-n3": ("nstep", "nstep-small"),
    "c51": ("c51",),
    "c51-n3": ("c51-small",),
    "qrdqn": ("qrdqn",),
    "qrdqn-n3": ("qrdqn-small",),
    "iqn": ("iqn",),
    "iqn-n3": ("iqn-small",),
    "double-noisy": ("noisy",),
    "double-noisy-n3": ("noisy-small",),
    "munchausen": ("munchausen",),
    "munchausen-n3": ("munchausen-small",),
    "double-c51-dueling-noisy-per-n3": ("rainbow", "rainbow-small"),
    "double-dueling-per-n3": ("apex", "apex-small"),
    "double-dueling-lstm-per-n5": ("r2d2", "r2d2-small"),
    "pqn": ("pqn", "pqn-small"),
    "munchausen-iqn-dueling-noisy-per-n3": ("btr", "btr-small"),
    "double-decoupled-per-n3": ("decqn",),
    "double-decoupled-n3": ("decqn-small",),
    "double-offline-cql": ("cql",),
    "offline-bc": ("bc",),
}
OFFLINE = {
    schema.ConservativeOfflineLoss: ("cql", "conservative (CQL)"),
    schema.CloningOfflineLoss: ("bc", "behaviour cloning"),
}
HEADS = {schema.CategoricalHead: "C51", schema.QuantileHead: "QR-DQN", schema.ImplicitHead: "IQN"}


def algorithm_name(plan: Plan, preset: str | None = None) -> str:
    """The algorithm in a run's name: the given preset if it fits, another whose numbers it has, or its parts."""
    parts = "-".join(name for name, _ in algorithm_parts(plan) if name) or "dqn"
    known = PRESETS.get(parts, ())
    if preset in known:
        return preset
    if not known:
        return parts
    from qfleet.plan.presets.catalog import settings_of

    settings = {name: settings_of(name, plan.env.id) for name in known}
    found = [name for name in known if has_settings(plan, settings[name])]
    return max(found, key=lambda name: len(settings[name])) if found else parts


def algorithm_description(plan: Plan) -> str:
    """The algorithm as text: Double DQN, 5-step returns."""
    (_, rule), *rest = algorithm_parts(plan)
    kind = "PQN" if isinstance(plan.replay, schema.FreshReplay) else HEADS.get(type(plan.net.head), "DQN")
    return ", ".join([f"{rule} {kind}".strip(), *(text for _, text in rest if text)])


def algorithm_parts(plan: Plan) -> list[tuple[str, str]]:
    """Differences from plain DQN, each as (part of a name, text); the rule comes first, empty for the plain one."""
    net = plan.net
    replay = plan.replay
    steps = plan.algo.n_step
    rule = {schema.DoubleRule: ("double", "Double"), schema.MunchausenRule: ("munchausen", "Munchausen")}
    head = HEADS.get(type(net.head), "").lower().replace("-", "")
    memory = "" if isinstance(net.memory, schema.NoMemory) else str(net.memory.__struct_config__.tag)
    fresh = isinstance(replay, schema.FreshReplay)
    per = isinstance(replay, schema.BufferReplay) and isinstance(replay.sampler, schema.PrioritizedSampler)
    offline = type(plan.algo.offline)
    has_targets = offline is not schema.CloningOfflineLoss
    if not has_targets:
        steps = 1
    return [
        rule.get(type(plan.algo.rule), ("", "")) if plan.custom.rule is None and has_targets else ("", ""),
        *([("pqn", "")] if fresh else []),
        *([("offline", "offline")] if isinstance(replay, schema.DatasetReplay) else []),
        *([OFFLINE[offline]] if offline in OFFLINE else []),
        *([(head, "")] if head else []),
        *([("dueling", "dueling")] if net.dueling else []),
        *([("noisy", "noisy layers")] if net.noisy else []),
        *([("decoupled", "decoupled actions")] if net.decoupled else []),
        *([(memory, f"{memory.upper()} memory")] if memory else []),
        *([("per", "prioritised replay")] if per else []),
        *([(f"n{steps}", f"{steps}-step returns")] if steps > 1 and not fresh else []),
        *([("custom", f"custom {', '.join(own)}")] if (own := custom_parts(plan)) else []),
    ]


def custom_parts(plan: Plan) -> list[str]:
    """The parts of the algorithm that are the user's own."""
    return [name for name in ("rule", "loss", "head", "sampler", "optimizer") if getattr(plan.custom, name) is not None]


def has_settings(plan: Plan, settings: Settings) -> bool:
    """Does the plan have every setting of a preset, which sets numbers too and not only the algorithm?"""
    flat = flatten(plan)
    return not settings.keys() <= DISTINCTIVE and all(flat.get(path) == value for path, value in settings.items())
