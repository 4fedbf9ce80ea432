"""The plan of a call: as it was given, checked, or as the run directory has it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from qfleet.build.worlds import EnvMaker
from qfleet.envs import absolute_env
from qfleet.errors import UsageError
from qfleet.files import is_file
from qfleet.plan import check, make_plan, read_plan
from qfleet.plan.schema import Plan
from qfleet.save import Checkpoints
from qfleet.training.checkpoints.saved_policy import SPACES_FILE
from qfleet.training.env_trust import require_trust
from qfleet.training.trainer import GAVE_UP, OUT_OF_TIME, SOLVED
from qfleet.watch import read_json

if TYPE_CHECKING:
    pass


def as_plan(plan: Plan | str, preset: str | None, overrides: Mapping[str, Any] | None) -> Plan:
    """The plan that was given, or that of an environment id."""
    if isinstance(plan, str):
        return make_plan(plan, preset, overrides)
    if not isinstance(plan, Plan):
        raise not_a_plan(plan)
    if preset is not None or overrides:
        raise UsageError(
            "preset= and overrides= do not go with a plan",
            "They make a plan from the id of an environment, and this plan is made already.",
            f'Write train("{plan.env.id}", preset=...) or Plan.of("{plan.env.id}", preset, overrides).',
        )
    return plan


def checked(plan: Plan) -> Plan:
    """The plan, with its values checked: msgspec does not check them when a Struct is made in Python."""
    try:
        plan = msgspec.convert(msgspec.to_builtins(plan), Plan)
    except msgspec.ValidationError as error:
        raise UsageError("the plan holds a value it cannot have", f"{error}.", "See `qfleet plan schema`.") from error
    check(plan)
    return msgspec.structs.replace(plan, env=absolute_env(plan.env))


def open_plan(folder: Path, env: EnvMaker | None, trust_env: bool) -> Plan:
    """A run's plan, if its environment may and can be made again."""
    plan = read_plan(folder / "run.toml")
    if env is None and read_json(folder / "provenance.json").get("own_env"):
        raise UsageError(
            f"{folder.name} was trained in an environment of its own, env.id={plan.env.id}",
            "That environment was a Python object, which a run directory cannot hold.",
            "Pass it again from Python: resume(path, env=...) or load(path, env=...).",
        )
    # The user's own environment replaces the one that the run names, but the run's wrappers are put around it.
    require_trust(folder, plan.env, trust_env or (env is not None and not plan.env.wrappers))
    return plan


def require_whole_run(folder: Path) -> None:
    """Refuse the folder of a policy that was saved alone."""
    if is_file(folder, SPACES_FILE) and not is_file(folder, "provenance.json"):
        raise UsageError(
            f"{folder.name} is a policy that was saved, not a run",
            "It has no optimiser, no replay and no history.",
            f"Start a new run with its weights: train(plan, weights_from={folder.name!r}).",
        )


def require_ahead(folder: Path, steps: int, plan: Plan) -> None:
    """Refuse an end that the run has passed; its own end, which the last step may have overshot, is allowed."""
    reached = max(Checkpoints(folder / "checkpoints", writer=False).steps(), default=0)
    if steps >= reached or steps == plan.until.steps:
        return
    raise UsageError(
        f"--steps {steps} is behind {folder.name}, which has made {reached} steps",
        "Steps are counted from the beginning of the run, and what is learned cannot be taken back.",
        f"Give more than {reached}, or leave --steps out.",
    )


def with_steps(plan: Plan, steps: int, status: dict[str, Any]) -> Plan:
    """The plan with another end; a score, time or patience that ended it before no longer does."""
    reason = str(status.get("reason", ""))
    until = plan.until
    score = None if reason.startswith(SOLVED) else until.score
    seconds = None if reason.startswith(OUT_OF_TIME) else until.seconds
    patience = None if reason.startswith(GAVE_UP) else plan.steer.stop_patience
    return msgspec.structs.replace(
        plan,
        until=msgspec.structs.replace(until, steps=steps, epochs=None, score=score, seconds=seconds),
        steer=msgspec.structs.replace(plan.steer, stop_patience=patience),
    )


def not_a_plan(given: Any) -> UsageError:
    """The error for a first argument that is neither a plan nor an id; an environment may know its own."""
    env_id = getattr(getattr(given, "spec", None), "id", "CartPole-v1")
    return UsageError(
        f"train was given a {type(given).__name__}",
        "It takes a plan, or the id of an environment.",
        f'Write train("{env_id}") or train("{env_id}", env=your_env).',
    )
