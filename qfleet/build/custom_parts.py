"""Parts of a run that the user has written: how they are named in run.toml, asked for again, and sent to processes."""

import hashlib
import inspect
import os
import pickle
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import gymnasium
import msgspec
from torch import nn

from qfleet.act import Explore
from qfleet.build.env_instances import recipe_of
from qfleet.build.worlds import EnvMaker
from qfleet.errors import UsageError
from qfleet.learn import OptimizerMaker
from qfleet.plan.schema import BufferReplay, Custom, Plan, ScalarHead, UniformSampler
from qfleet.qlearn import CustomHead, Loss, Rule
from qfleet.replay import CustomSampler

HASH_DIGITS = 16
MAX_SETTINGS_CHARS = 200
LEARNING = ("head", "rule", "loss", "sampler", "optimizer")  # parts that a resumed run has had from its start
SENT_SOURCE = "__qfleet_source__"  # attribute: the process that found the source, and the source
SIMPLE = (bool, int, float, str, type(None))


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


def part_name(value: Any) -> str:
    """`module:Class(setting=1) sha256:0123456789abcdef`: what a part is, and the hash of its source."""
    kind = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    name = f"{kind.__module__}:{kind.__qualname__}{settings_text(value)}"
    return f"{name} sha256:{hashlib.sha256(source_of(kind).encode()).hexdigest()[:HASH_DIGITS]}"


def settings_text(value: Any) -> str:
    """The plain settings of a dataclass object."""
    if not is_dataclass(value) or isinstance(value, type):
        return ""
    shown = [(field.name, getattr(value, field.name)) for field in fields(value)]
    text = ", ".join(f"{name}={each!r}" for name, each in shown if isinstance(each, SIMPLE))
    return f"({text[:MAX_SETTINGS_CHARS]})"


def source_of(kind: Any) -> str:
    """The source of a function or class. What a script or a notebook has sent here brings its source along."""
    number, text = getattr(kind, "__dict__", {}).get(SENT_SOURCE, (os.getpid(), ""))
    if number != os.getpid():
        return str(text)
    text = find_source(kind)
    if getattr(kind, "__module__", None) == "__main__":  # it is sent whole, and its source cannot be found there
        with suppress(AttributeError, TypeError):
            setattr(kind, SENT_SOURCE, (os.getpid(), text))
    return text


def find_source(kind: Any) -> str:
    """The source of a function or class of this process; of a class in a notebook, the sources of its methods."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        pass
    if not isinstance(kind, type):
        code = getattr(kind, "__code__", None)
        return repr(kind) if code is None else code_text(code)
    methods = sorted((name, each) for name, each in vars(kind).items() if inspect.isfunction(each))
    return "\n".join(find_source(method) for _, method in methods)


def code_text(code: Any) -> str:
    """Compiled code as text, for a function without source; without addresses, which change with each start."""
    constants = [code_text(each) if inspect.iscode(each) else repr(each) for each in code.co_consts]
    return "\n".join([code.co_code.hex(), *code.co_names, *constants])


def record_parts(plan: Plan, parts: CustomParts) -> Plan:
    """The plan with the names of the given parts; settings that they replace are set to their defaults."""
    custom = parts.names()
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
    return msgspec.structs.replace(plan, custom=custom, algo=algo, net=net, replay=replay)


def require_parts(plan: Plan, parts: CustomParts, run: str) -> list[str]:
    """Refuse parts that are missing or new; returns why the run is not exact if one has changed since it began."""
    before = {name: value for name, value in msgspec.structs.asdict(plan.custom).items() if value is not None}
    now = msgspec.structs.asdict(parts.names())
    if missing := [name for name in before if now[name] is None]:
        arguments = ", ".join(f"{name}=..." for name in missing)
        raise UsageError(
            f"{run} was trained with parts of your own: {', '.join(f'{name} {before[name]}' for name in missing)}",
            "They are Python objects, which a run directory cannot hold.",
            f"Pass them again from Python: resume(path, {arguments}) or load(path, {arguments}).",
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
        if now[name] != value
    ]


def with_parts(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with only these of its custom parts."""
    kept = {name: value for name, value in msgspec.structs.asdict(plan.custom).items() if name in names}
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
    import cloudpickle  # most runs need no other process

    for name, value in parts.given():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise UsageError(
                f"{name}={value!r} cannot be given to another process",
                f"Other processes of the run need it, and Python said: {error}.",
                "Let it hold no open files, locks or generators, or use runtime.type=inline with one learner.",
            ) from error
    return bytes(cloudpickle.dumps(parts))


def unpack_parts(packed: bytes) -> CustomParts:
    """The parts that the parent process has sent."""
    parts: CustomParts = pickle.loads(packed)  # noqa: S301 - from the parent process
    return parts
