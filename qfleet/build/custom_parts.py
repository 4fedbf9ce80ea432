"""Parts of a run that the user has written: how they are named in run.toml, asked for again, and sent to processes."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

import gymnasium
import msgspec
from msgspec.structs import asdict
from torch import nn

from qfleet.act import Explore
from qfleet.build.env_instances import recipe_of
from qfleet.build.part_names import part_name
from qfleet.build.worlds import EnvMaker
from qfleet.errors import UsageError
from qfleet.learn import OptimizerMaker
from qfleet.plan import diff
from qfleet.plan.schema import Adam, BufferReplay, Custom, FreshReplay, Plan, ScalarHead, UniformSampler
from qfleet.plan.setting_text import format_value as setting_text
from qfleet.plan.sync_schema import Serving
from qfleet.qlearn import CustomHead, Loss, Rule
from qfleet.replay import CustomSampler
from qfleet.system.sent_objects import pack_object, unpack_object

# A resumed run compares what an environment shows with what was saved, so a new version of it need not be refused.
SCHEDULE = ("clip_norm", "warm_updates", "decay_updates", "base_batch", "scaling")  # kept with an optimiser of your own
ENVIRONMENTS = ("env", "eval_env")
LEARNING = ("head", "rule", "loss", "sampler", "optimizer")  # parts that a resumed run has had from its start
ATTRIBUTES = {"rule": ("needs_online", "needs_current")}  # that a part must have besides
METHODS = {  # that a part must have
    "head": ("make_layers", "values", "target", "loss"),
    "rule": ("__call__",),
    "loss": ("__call__",),
    "sampler": ("set_live", "draw", "update", "state_dict", "load_state_dict"),
    "optimizer": ("__call__",),
    "explore": ("__call__",),
}


@dataclass(frozen=True)
class CustomParts:
    """The user's own parts; None: as the plan says."""

    env: EnvMaker | None = None
    eval_env: EnvMaker | None = None
    torso: nn.Module | None = None
    head: CustomHead | None = None
    rule: Rule | None = None
    loss: Loss | None = None
    sampler: CustomSampler | None = None
    optimizer: OptimizerMaker | None = None
    explore: Explore | None = None

    @property
    def eval_maker(self) -> EnvMaker | None:
        """Makes the environments of evaluations."""
        return self.eval_env if self.eval_env is not None else self.env

    def given(self) -> Iterator[tuple[str, Any]]:
        """The names and values of the parts that are given."""
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                yield field.name, value

    def names(self) -> Custom:
        """What run.toml says of the given parts."""
        return Custom(**{name: part_name(value) for name, value in self.given()})


NO_CUSTOM_PARTS = CustomParts()


def record_parts(plan: Plan, parts: CustomParts) -> Plan:
    """The plan with the names of the given parts; settings that they replace are set to their defaults."""
    custom = parts.names()
    require_methods(parts)
    require_given(plan, custom)
    require_effect(plan, parts)
    algo = plan.algo
    net = plan.net
    replay = plan.replay
    if parts.rule is not None:
        algo = msgspec.structs.replace(algo, rule=type(algo)().rule)
    if parts.loss is not None:
        algo = msgspec.structs.replace(algo, loss=type(algo)().loss)
    if parts.head is not None:
        net = msgspec.structs.replace(net, head=ScalarHead(), dueling=False, decoupled=False)
    if parts.sampler is not None and isinstance(replay, BufferReplay):
        replay = msgspec.structs.replace(replay, sampler=UniformSampler())
    optim = plan.optim if parts.optimizer is None else Adam(**{name: getattr(plan.optim, name) for name in SCHEDULE})
    return msgspec.structs.replace(plan, custom=custom, algo=algo, net=net, replay=replay, optim=optim)


def replaced_settings(before: Plan, after: Plan) -> list[str]:
    """Notes about settings of a plan that parts of the user's own have replaced."""
    changes = [change for change in diff(before, after) if not change[0].startswith("custom.")]
    return [f"{path}={setting_text(old)} is replaced by a part of your own" for path, old, _ in changes]


def require_methods(parts: CustomParts) -> None:
    """Refuse a class where an object is needed, and an object without the methods of its part."""
    for name, value in parts.given():
        wanted = METHODS.get(name, ())
        if isinstance(value, type) and name in ("head", "rule", "loss", "sampler"):
            raise UsageError(
                f"{name}= was given the class {value.__name__}",
                "A part is an object, because it may have settings.",
                f"Write {name}={value.__name__}().",
            )
        lacking = [each for each in wanted if not callable(getattr(value, each, None))]
        lacking += [each for each in ATTRIBUTES.get(name, ()) if not hasattr(value, each)]
        if lacking:
            raise UsageError(
                f"{name}= was given {value!r}, which has no {', '.join(lacking)}",
                f"A {name} needs {', '.join((*wanted, *ATTRIBUTES.get(name, ())))}; see qfleet.custom.",
                "docs/custom.md shows a complete one.",
            )


def require_given(plan: Plan, custom: Custom) -> None:
    """Refuse a plan that names parts which are not given."""
    if missing := [name for name, value in asdict(plan.custom).items() if value and getattr(custom, name) is None]:
        raise UsageError(
            f"custom.{missing[0]} is {getattr(plan.custom, missing[0])}, but no {missing[0]} was given",
            "A part of your own is a Python object; a plan cannot hold it.",
            f"Pass it from Python, train(plan, {missing[0]}=...), or remove custom.{missing[0]} from the plan.",
        )


def require_effect(plan: Plan, parts: CustomParts) -> None:
    """Refuse parts that this plan would not use."""
    if isinstance(plan.replay, FreshReplay) and (parts.rule is not None or parts.sampler is not None):
        name = "rule" if parts.rule is not None else "sampler"
        raise UsageError(
            f"{name}= has no effect with replay.type=fresh",
            "Fresh experience is learned from once, with returns as targets: nothing is sampled or bootstrapped.",
            f"Leave {name}= out, or set replay.type=buffer.",
        )
    if parts.optimizer is not None and plan.learners.num > 1 and isinstance(plan.sync, Serving):
        raise UsageError(
            f"optimizer= does not go with sync.type={plan.sync.__struct_config__.tag}",
            "A parameter server's shards step pieces of the weights, which an optimiser of your own may not allow.",
            "Use sync.type=allreduce, or an optimiser of the plan (optim.type).",
        )


def require_parts(plan: Plan, parts: CustomParts, run: str) -> list[str]:
    """Refuse parts that are missing or new; returns why the run is not exact if one has changed since it began."""
    before = {name: value for name, value in asdict(plan.custom).items() if value is not None}
    now = asdict(parts.names())
    if missing := [name for name in before if now[name] is None]:
        arguments = ", ".join(f"{name}=..." for name in missing)
        loading = f" or load(path, {arguments})" if set(missing) <= {"env", "torso", "head"} else ""
        raise UsageError(
            f"{run} was trained with parts of your own: {', '.join(f'{name} {before[name]}' for name in missing)}",
            "They are Python objects, which a run directory cannot hold.",
            f"Pass them again from Python: resume(path, {arguments}){loading}.",
        )
    if unexpected := [name for name, _ in parts.given() if name in LEARNING and name not in before]:
        raise UsageError(
            f"{run} began without a {unexpected[0]} of your own",
            "A run learns in the same way from its start to its end.",
            f"Leave {unexpected[0]}= out, or start a new run: train(plan, {unexpected[0]}=..., weights_from={run!r}).",
        )
    return [
        f"custom.{name} has changed since the run began: {value} -> {now[name]}"
        for name, value in before.items()
        if now[name] != value and name not in ENVIRONMENTS
    ]


def with_parts(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with only these of its custom parts."""
    kept = {name: value for name, value in asdict(plan.custom).items() if name in names}
    return msgspec.structs.replace(plan, custom=Custom(**kept))


def given_parts(env: Any, eval_env: Any, *parts: Any) -> CustomParts:
    """The parts that a call was given, in the order of `CustomParts`."""
    return CustomParts(as_env_maker("env", env), as_env_maker("eval_env", eval_env), *parts)


def as_env_maker(argument: str, env: Any) -> EnvMaker | None:
    """A function that makes environments, from what the user gave: a function, a class, or one of `gymnasium.make`."""
    if env is None or (callable(env) and not isinstance(env, gymnasium.Env)):
        return env
    spec = getattr(env, "spec", None)
    if isinstance(env, gymnasium.Env) and spec is not None:
        return recipe_of(argument, env, spec)
    if isinstance(env, str):
        raise UsageError(
            f"{argument}={env!r} is the id of an environment",
            "An id belongs to the plan.",
            f"Write train({env!r}) or Plan.of({env!r}).",
        )
    raise UsageError(
        f"{argument}= was given a {type(env).__name__} object",
        "A run makes several environments, so it needs a function that makes one; an object of gymnasium.make works "
        "too, because it knows how it was made.",
        f"Write {argument}=lambda: {type(env).__name__}(...) or {argument}={type(env).__name__}.",
    )


def pack_parts(parts: CustomParts) -> bytes:
    """The parts as bytes for another process of this run; what a script or a notebook defines is sent whole."""
    for name, value in parts.given():
        try:
            pack_object(value)
        except Exception as error:
            raise UsageError(
                f"{name}={value!r} cannot be given to another process",
                f"Other processes of the run need it, and Python said: {error}.",
                "Let it hold no open files, locks or generators, or use runtime.type=inline with one learner.",
            ) from error
    return pack_object(parts)


def unpack_parts(packed: bytes) -> CustomParts:
    """The parts that the parent process has sent."""
    parts: CustomParts = unpack_object(packed)
    return parts
