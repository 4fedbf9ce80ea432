"""Variants: other worlds that a run's policy is evaluated in, which must have the same spaces as its own."""

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from qfleet.act import Policy, evaluate_policy
from qfleet.build.custom_parts import as_env_maker
from qfleet.build.threads import operation_threads, torch_threads
from qfleet.build.worlds import EnvMaker
from qfleet.data import Array, Spec, World
from qfleet.envs import TEST
from qfleet.errors import QfleetError, UsageError
from qfleet.plan import defaults_for, names_code, with_assignments
from qfleet.plan.draft import Assignment
from qfleet.plan.presets.pieces import ATARI
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import redacted_options
from qfleet.plan.setting_text import format_value
from qfleet.plan.validate.case import PYTHON
from qfleet.training.checkpoints.saved_weights import SavedWeights
from qfleet.training.evaluator import Evaluator, evaluation
from qfleet.training.log.run_status import Row
from qfleet.watch.statistics import NUM_RESAMPLES, estimate

TRAINING = "training"  # the name of the run's own environment in a table of variants
MOST_VARIANTS = 200
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
# They say how experience is gathered or learned from; an evaluation plays whole episodes with raw rewards.
WITHOUT_EFFECT = ("env.num", "env.clip_reward", "env.normalize")
EXAMPLE = "Write for example: qfleet eval latest env.options.gravity=-12"


@dataclass(frozen=True)
class Variant:
    """A world by its differences from the run's own: another environment, other settings of `env`."""

    name: str = ""
    env: "str | EnvMaker | None" = None
    settings: tuple[Assignment, ...] = ()

    @property
    def is_other(self) -> bool:
        """Does it differ from the run's own environment?"""
        return self.env is not None or bool(self.settings)


OWN_WORLD = Variant(TRAINING)


@dataclass(frozen=True)
class OtherWorld:
    """Where a policy is evaluated: a plan whose `env` is the variant's, and the function that makes it, if any."""

    plan: Plan
    make: EnvMaker | None = None
    spec: Spec | None = None  # that the policy was trained for

    def row(self) -> Row:
        """The fields of an evaluation row that say where it was."""
        env = self.plan.env
        fields: Row = {"env": env.id, "options": redacted_options(env.options)}
        return {**fields, "wrappers": list(env.wrappers)} if env.wrappers else fields

    def open(self, num: int) -> World:
        """The world with `num` lanes, if its spaces are those of the policy."""
        world = Evaluator(self.plan, self.make).world(TEST, num)
        try:
            if self.spec is not None:
                require_same_spaces(world.spec, self.spec, self.plan.env.id)
        except BaseException:
            world.close()
            raise
        return world


def read_variants(tables: Mapping[str, Any], origin: str) -> list[Variant]:
    """The variants in a table: {name: {"env": id, "options": {...}, "wrappers": [...], ...}}."""
    if not tables or len(tables) > MOST_VARIANTS:
        raise UsageError(
            f"{origin} has {len(tables)} variants",
            f"A table of variants has 1 to {MOST_VARIANTS}.",
            "Write each as a table: [windy] and, below, options = {wind = true}",
        )
    return [_read_named(name, table, origin) for name, table in tables.items()]


def _read_named(name: Any, table: Any, origin: str) -> Variant:
    named = isinstance(name, str) and NAME.fullmatch(name) and name != TRAINING
    if named and isinstance(table, Mapping):
        return _read_variant(name, table, origin)
    raise UsageError(
        f"{origin} has {format_value(name)}, which is not a variant",
        f"A variant has a name of 1 to 100 characters, which is not {TRAINING!r}, and a table of settings.",
        "Write for example [windy] and, below, options = {wind = true}",
    )


def _read_variant(name: str, table: Mapping[str, Any], origin: str) -> Variant:
    rest = {key: value for key, value in table.items() if key not in ("env", "options")}
    options = table.get("options", {})
    if not isinstance(options, Mapping):
        raise UsageError(
            f"{origin}: options of the variant {format_value(name)} are not a table",
            f"They are {format_value(options)}.",
            "Write for example options = {gravity = -12}",
        )
    values = {f"env.{key}": value for key, value in rest.items() if value is not None}
    values |= {f"env.options.{key}": value for key, value in options.items()}
    where = f"{origin}, {name}" if name else origin
    settings = tuple(Assignment(path, value, where, explicit=True) for path, value in values.items())
    return Variant(name, table.get("env"), settings)


def make_variant(env: Any = None, options: Mapping[str, Any] | None = None, wrappers: Any = None) -> Variant:
    """A variant from Python, without a name."""
    return _read_variant("", {"env": env, "options": options or {}, "wrappers": wrappers}, PYTHON)


def on_top_of(base: Variant, variant: Variant) -> Variant:
    """The variant with what a base says, where it does not say it itself; another environment takes no settings."""
    if variant.env is not None and base.env != variant.env:
        return variant
    own = {entry.path for entry in variant.settings}
    kept = tuple(entry for entry in base.settings if entry.path not in own)
    return Variant(variant.name, base.env if variant.env is None else variant.env, kept + variant.settings)


def refuse_named_code(variants: list[Variant], file: str) -> None:
    """Refuse code that a file of variants names: the file may come from anywhere."""
    for variant in variants:
        named = [str(variant.env)] if isinstance(variant.env, str) and names_code(variant.env) else []
        named += [str(entry) for entry in variant.settings if entry.path == "env.wrappers"]
        if named:
            raise UsageError(
                f"the variant {variant.name} names code to run: {', '.join(named)} ({file})",
                "A file may come from anywhere, so it may not choose which code is imported.",
                "If you trust it, add --trust-variants; or name the code yourself: qfleet eval RUN --env ID",
            )


def other_world(plan: Plan, make: EnvMaker | None, variant: Variant, spec: Spec | None = None) -> OtherWorld:
    """The world of a variant of a run; options of another environment begin empty, its wrappers stay."""
    _refuse_settings(variant)
    if variant.env is not None:
        plan, make = _with_env(plan, variant.env)
    if variant.settings:
        plan = with_assignments(plan, "run.toml", variant.settings)
    return OtherWorld(plan, make, spec)


def _with_env(plan: Plan, given: Any) -> tuple[Plan, EnvMaker | None]:
    """The plan with another environment, by its id or as the user's own function."""
    if not isinstance(given, str):
        return plan, as_env_maker("env", given)
    env = plan.env
    changes: dict[str, Any] = {"id": given}
    if given != env.id:
        bounds = defaults_for(given)[1].get("env.check_bounds", env.check_bounds)
        changes |= {"options": {}, "secrets": {}, "check_bounds": bounds}
        if not ATARI.search(given):
            changes |= {"sticky": None, "frame_size": None}
    return msgspec.structs.replace(plan, env=msgspec.structs.replace(env, **changes)), None


def _refuse_settings(variant: Variant) -> None:
    for entry in variant.settings:
        if not entry.path.startswith("env.") or entry.path == "env.id":
            raise UsageError(
                f"{entry} cannot be changed for an evaluation ({entry.origin})",
                "The policy is as it was trained; only its environment can be another: --env, and settings of env.",
                f"Write --env {entry.value}" if entry.path == "env.id" else EXAMPLE,
            )
        if entry.path in WITHOUT_EFFECT:
            raise UsageError(
                f"{entry} has no effect on an evaluation ({entry.origin})",
                "An evaluation plays whole episodes with raw rewards.",
                f"Leave {entry.path} out.",
            )


def require_same_spaces(found: Spec, trained: Spec, name: str) -> None:
    """Refuse a world whose observations or actions are not those that the policy was trained for."""
    parts: dict[str, tuple[object, object]] = {
        "observations of shape": (found.input_shape, trained.input_shape),
        "observations of type": (found.dtype, trained.dtype),
        "actions": (_counts(found), _counts(trained)),
    }
    different = {text: pair for text, pair in parts.items() if pair[0] != pair[1]}
    if not different:
        return
    raise UsageError(
        f"{name} has other spaces than the environment that the policy was trained in",
        "; ".join(f"{text}: {here}, and the policy's are {there}" for text, (here, there) in different.items()) + ".",
        "Choose a variant with the same observation and action spaces, or wrap it so that it has them (env.wrappers).",
    )


def _counts(spec: Spec) -> str:
    return " x ".join(map(str, spec.actions))


@dataclass(frozen=True)
class TrainedPolicy:
    """A run's policy and what is needed to evaluate it."""

    plan: Plan
    policy: Policy
    make: EnvMaker | None = None
    weights: SavedWeights | None = None

    def world(self, variant: Variant, seed: int | None = None) -> OtherWorld:
        """The world of a variant; another seed means other episodes."""
        plan = self.plan if seed is None else msgspec.structs.replace(self.plan, seed=seed)
        return other_world(plan, self.make, variant, self.policy.spec)

    def evaluate(self, variant: Variant, episodes: int, seed: int | None = None) -> Row:
        """The greedy policy on test episodes of a variant, as a row of kind `eval`."""
        world = self.world(variant, seed)
        episodes = max(1, episodes)
        with torch_threads(operation_threads(world.plan)), closing(world.open(episodes)) as opened:
            played = evaluate_policy(self.policy, opened, episodes, max_steps=world.plan.eval.max_steps)
        where = world.row() if variant.is_other or variant.name else {}
        named = {} if self.weights is None else self.weights.row()
        return {"kind": "eval", **named, "seed": world.plan.seed, **where, **evaluation("test", played)}

    def evaluate_each(
        self, variants: list[Variant], episodes: int, seed: int | None = None, add: "Callable[[Row], object]" = id
    ) -> list[Row]:
        """A row for each variant; one that fails has an `error`. `add` is called with each row once it is there."""
        rows: list[Row] = []
        for variant in variants:
            try:
                row = {**self.evaluate(variant, episodes, seed), "name": variant.name}
            except QfleetError as error:
                row = failed_row(variant.name, error)
            rows.append(row)
            add(row)
        return rows


def with_differences(rows: list[Row]) -> list[Row]:
    """The rows with differences to the first one, that of the training environment."""
    return [rows[0], *(with_difference(row, rows[0]) for row in rows[1:])]


def with_difference(row: Row, training: Row) -> Row:
    """The row with the difference of its mean to that of the training environment, and its 95 % interval."""
    if "error" in training or "error" in row:
        return row
    ours, theirs = (np.asarray(each["returns"], np.float64)[:, None] for each in (row, training))
    found = estimate(_mean_difference, ours, theirs, resamples=NUM_RESAMPLES)
    return {**row, "difference": found.value, "difference_low": found.low, "difference_high": found.high}


def _mean_difference(ours: Array, theirs: Array) -> Array:
    return np.asarray(ours.mean(axis=(-2, -1)) - theirs.mean(axis=(-2, -1)))


def failed_row(name: str, error: QfleetError) -> Row:
    """The row of a variant that could not be evaluated."""
    parts = {"error": error.what, "why": error.why, "fix": error.fix}
    return {"kind": "eval", "name": name, **parts, "exit_code": error.exit_code}
