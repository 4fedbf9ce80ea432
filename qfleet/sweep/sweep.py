"""A sweep: several seeds of one plan side by side, each run in a process of its own.

A sweep, which users call a group, is a folder with `group.json` (its members), `plan.toml` (the plan of all members but
for their seeds), and a run folder `seed-<s>` for each member.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from qfleet.act import Explore
from qfleet.build.custom_parts import given_parts, record_parts, require_parts
from qfleet.build.worlds import EnvMaker
from qfleet.envs import AnyEnv
from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.files import is_folder, list_inside, remove_drafts
from qfleet.given_plan import as_plan, checked
from qfleet.learn import OptimizerMaker
from qfleet.plan import plan_hash, read_plan, trusted_settings
from qfleet.plan.local_paths import local_path
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import redacted_arguments, write_run_plan
from qfleet.qlearn import CustomHead, Loss, Rule
from qfleet.replay import CustomSampler
from qfleet.save import hold_run
from qfleet.sweep.capacity import Capacity, find_capacity
from qfleet.sweep.member_main import PLAN_FILE
from qfleet.sweep.member_parts import pack_member_parts
from qfleet.sweep.runner import FORMAT, Member, SweepRunner, file_hash
from qfleet.training.callbacks import AnyCallback
from qfleet.training.env_trust import require_places, require_trust, sign
from qfleet.watch import find_run, new_run_dir, read_json
from qfleet.watch.compare import Comparison, compare
from qfleet.watch.new_run_dir import check_name, next_name
from qfleet.watch.read_files import last_rows
from qfleet.watch.run_directory import GROUP_FILE, find_run_or_group, is_run, member_dirs
from qfleet.watch.run_listing import read_tables, remove_run
from qfleet.watch.sweep_console import GroupWatcher, default_group_watcher

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Group:
    """Several runs of one plan with different seeds: what `train_group` and `resume_group` return.

    Args:
        path: the folder of the group.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def status(self) -> dict[str, Any]:
        """group.json as it is now: `state`, `exit_code`, and the state of each member."""
        return read_json(self.path / GROUP_FILE)

    @property
    def exit_code(self) -> int:
        """What the command line would have returned."""
        return int(self.status.get("exit_code") or 0)

    @property
    def members(self) -> list[Path]:
        """The run folders of members that have begun; `qfleet.load` takes each."""
        return member_dirs(self.path)

    def compare(self) -> Comparison:
        """Scores of all members, and their aggregates with intervals."""
        return compare(self.path)

    def frame(self, kind: str | None = None) -> "DataFrame":
        """The rows of all members, with `member` and `seed` first, as a pandas DataFrame; needs the extra `pandas`.

        Args:
            kind: only rows of this kind, such as "progress" or "eval".
        """
        from qfleet.watch.notebook.frame import rows_frame

        return rows_frame([({"member": path.name, "seed": _seed_of(path)}, path) for path in self.members], kind)

    def plot(self, file: Path | str | None = None) -> "Figure":
        """The return of all members over steps, their IQM and its interval; `file` saves it. Needs the extra `plot`.

        Args:
            file: where to save it too.
        """
        from qfleet.watch.plot import draw_sides

        return draw_sides({self.path.name: self.members}, file)

    def __repr__(self) -> str:
        """Its folder and state."""
        from qfleet.watch.notebook.run_html import group_line

        return f"Group({str(self.path)!r}: {escaped(group_line(self.path))})"

    def _repr_html_(self) -> str:
        """Its members with their scores, and their curves, in a notebook."""
        from qfleet.watch.notebook.run_html import group_html

        return group_html(self.path, self.members)


def _seed_of(member: Path) -> int | None:
    """The seed in a member's name."""
    digits = member.name.removeprefix("seed-")
    return int(digits) if digits.isdecimal() and len(digits) < 20 else None


def train_group(
    plan: Plan | str,
    seeds: int | Sequence[int] = 5,
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    out: Path | str = "runs",
    name: str | None = None,
    env: EnvMaker | AnyEnv | None = None,
    eval_env: EnvMaker | AnyEnv | None = None,
    torso: nn.Module | None = None,
    head: CustomHead | None = None,
    rule: Rule | None = None,
    loss: Loss | None = None,
    sampler: CustomSampler | None = None,
    optimizer: OptimizerMaker | None = None,
    explore: Explore | None = None,
    callbacks: Iterable[AnyCallback] = (),
    progress: bool = True,
    weights_from: Path | str | None = None,
    watcher: GroupWatcher | None = None,
    command: list[str] | None = None,
) -> Group:
    """Train one plan with several seeds, as many at once as fit on the machine, each in a process of its own.

    Args:
        plan: the plan of every member, or the id of an environment; members differ in the seed only.
        seeds: how many, counted from the plan's own seed, or a list of seeds.
        preset: with an id, the name of a preset.
        overrides: with an id, settings by their paths.
        jobs: how many run at once; by default as many as cores and memory allow.
        out: the folder that gets the group.
        name: the name of the group; by default that of environment and algorithm, with a number.
        env: your own environment: a class or a function that returns one.
        eval_env: another environment for evaluations; by default the same as `env`.
        torso: a `torch.nn.Module` from observations to features, in place of `net.torso`.
        head: what the outputs of the network mean, in place of `net.head`.
        rule: how the next state is valued, in place of `algo.rule`.
        loss: the loss of every row, in place of `algo.loss`.
        sampler: which items of the replay are learned from, in place of `replay.sampler`.
        optimizer: a function that makes a `torch.optim.Optimizer`, in place of `optim`.
        explore: a function that chooses actions while training, in place of `algo.explore`.
        callbacks: callbacks of every member; each member has a copy of them in its own process.
        weights_from: a run whose best weights every member starts with.
        progress: show progress in a terminal or a notebook.
        watcher: your own display of progress; it sees the rows of all members in this process.
        command: the words of a command line, for `group.json`.

    Returns:
        The group, after all its members have ended.
    """
    parts = given_parts(env, eval_env, torso, head, rule, loss, sampler, optimizer, explore)
    plan = record_parts(checked(as_plan(plan, preset, overrides)), parts)
    packed = pack_member_parts(parts, callbacks)
    out = local_path(out)
    if name is not None:
        check_name(name)
    _require_no_recording(plan)
    members = [Member(f"seed-{each}", each, _plan_id(plan, each)) for each in _seed_list(plan, seeds)]
    capacity = find_capacity(plan, len(members), jobs, parts.env)
    source = None if weights_from is None else find_run(weights_from, out).resolve()
    folder = _new_group(plan, out, name)
    origin = {
        "command": None if command is None else redacted_arguments(command),
        "weights_from": None if source is None else str(source),
    }
    watcher = watcher if watcher is not None else default_group_watcher(progress)
    with hold_run(folder):
        runner = SweepRunner(folder, plan, members, capacity, origin, watcher)
        runner.options = {"parts": packed}
        runner.run(members)
    return Group(folder)


def _new_group(plan: Plan, out: Path, name: str | None) -> Path:
    """The folder of a new group, with its plan."""
    folder = new_run_dir(out, plan.env.id, next_name(plan.env.id, algorithm_name(plan)) if name is None else name)
    write_run_plan(plan, folder / PLAN_FILE)
    sign(folder, plan.env, trusted_settings(plan))
    return folder


def resume_group(
    path: Path | str,
    *,
    steps: int | None = None,
    jobs: int | None = None,
    out: Path | str = "runs",
    env: EnvMaker | AnyEnv | None = None,
    eval_env: EnvMaker | AnyEnv | None = None,
    torso: nn.Module | None = None,
    head: CustomHead | None = None,
    rule: Rule | None = None,
    loss: Loss | None = None,
    sampler: CustomSampler | None = None,
    optimizer: OptimizerMaker | None = None,
    explore: Explore | None = None,
    callbacks: Iterable[AnyCallback] = (),
    progress: bool = True,
    trust_env: bool = False,
    trust_run: bool = False,
    strict: bool = False,
    watcher: GroupWatcher | None = None,
) -> Group:
    """Resume the members that are not done; `steps` moves the end of all.

    Args:
        path: the folder of the group, its name in `out`, or "latest".
        steps: another end for every member, counted from its beginning.
        jobs: how many run at once; by default as many as cores and memory allow.
        out: the folder in which a group is looked for by its name.
        env: your own environment: a class or a function that returns one.
        eval_env: another environment for evaluations; by default the same as `env`.
        torso: a `torch.nn.Module` from observations to features, in place of `net.torso`.
        head: what the outputs of the network mean, in place of `net.head`.
        rule: how the next state is valued, in place of `algo.rule`.
        loss: the loss of every row, in place of `algo.loss`.
        sampler: which items of the replay are learned from, in place of `replay.sampler`.
        optimizer: a function that makes a `torch.optim.Optimizer`, in place of `optim`.
        explore: a function that chooses actions while training, in place of `algo.explore`.
        callbacks: callbacks of every member; each member has a copy of them in its own process.
        trust_env: allow the code that a folder of somebody else names as its environment.
        trust_run: allow that, and the addresses that it names.
        strict: refuse a damaged checkpoint; by default the next older one is taken.
        progress: show progress in a terminal or a notebook.
        watcher: your own display of progress.

    Returns:
        The group, after all its members have ended.
    """
    parts = given_parts(env, eval_env, torso, head, rule, loss, sampler, optimizer, explore)
    folder = find_run_or_group(path, out)
    plan, members, origin = _open(folder)
    require_trust(folder, plan.env, trust_env or trust_run or parts.env is not None)
    require_places(folder, plan, trust_run)
    require_parts(plan, parts, folder.name)
    packed = pack_member_parts(parts, callbacks)
    if steps is not None:
        plan = msgspec.structs.replace(plan, until=msgspec.structs.replace(plan.until, steps=steps))
        members = [Member(each.name, each.seed, _plan_id(plan, each.seed)) for each in members]
    watcher = watcher if watcher is not None else default_group_watcher(progress)
    with hold_run(folder):
        for member in members:
            _load_progress(member, folder / member.name, plan.until.steps)
            member.steps = steps if steps is not None else member.steps
        todo = [member for member in members if member.steps is not None or member.exit_code != 0]
        capacity = find_capacity(plan, len(todo), jobs, parts.env) if todo else Capacity(1, 1, ())
        runner = SweepRunner(folder, plan, members, capacity, origin, watcher)
        runner.options = {"trust_env": trust_env, "trust_run": trust_run, "strict": strict, "parts": packed}
        runner.run(todo)
    return Group(folder)


def _require_no_recording(plan: Plan) -> None:
    """Refuse one data set for all members: each would write its files over those of the others."""
    if plan.save.dataset is not None:
        raise UsageError(
            f"save.dataset={plan.save.dataset} does not go with a group",
            "A data set is recorded by one run, and all members of a group have one plan.",
            "Train the seeds one after another, each with a save.dataset of its own.",
        )


def _seed_list(plan: Plan, seeds: int | Sequence[int]) -> list[int]:
    numbers = [plan.seed + index for index in range(seeds)] if isinstance(seeds, int) else list(seeds)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"seeds={seeds} does not make a group",
            "Each member needs a seed of its own, 0 or above.",
            "Give how many there are to be, for example 5, or a list such as [0, 1, 2].",
        )
    return numbers


def _plan_id(plan: Plan, seed: int) -> str:
    return plan_hash(msgspec.structs.replace(plan, seed=seed))


def _open(folder: Path) -> tuple[Plan, list[Member], dict[str, Any]]:
    """The plan, members and origin of a sweep, checked against each other."""
    status = read_json(folder / GROUP_FILE)
    try:
        members = [
            Member(f"seed-{int(each['seed'])}", int(each["seed"]), str(each["plan"])) for each in status["members"]
        ]
    except (KeyError, TypeError, ValueError):
        members = []
    if status.get("format") != FORMAT or not members:
        raise UsageError(
            f"{folder / GROUP_FILE} is not a group that this version knows",
            f"It has format {status.get('format')} and {len(members)} members; format {FORMAT} is known.",
            "Restore the file from a copy, or resume the members one by one.",
        )
    plan = read_plan(folder / PLAN_FILE)
    # A kill while the end was moved left the plan as before or as after; both are right.
    if file_hash(folder / PLAN_FILE) not in (status.get("plan_sha256"), status.get("plan_sha256_before")):
        raise UsageError(
            f"{folder / PLAN_FILE} is not the plan that {folder.name} was started with",
            "Its hash is another; members of one group differ in nothing but the seed.",
            "Restore the file, or start another group: qfleet train --plan FILE --seeds N",
        )
    return plan, members, {key: status.get(key) for key in ("command", "weights_from")}


def _load_progress(member: Member, folder: Path, end: int) -> None:
    """Read a member's state from its folder; one that was killed before its first save starts again."""
    if os.path.lexists(folder) and not is_folder(folder.parent, folder.name):
        raise UsageError(
            f"{folder} is not the folder of a run",
            "A link or a file is in its place; a group keeps its members in folders of their own.",
            "Remove it, or restore the group from a copy.",
        )
    if not is_run(folder):
        _clear_remains(folder)
        return
    if not list_inside(folder, "checkpoints") and not last_rows(folder / "metrics.jsonl"):
        remove_run(folder)
        return
    status = read_json(folder / "status.json")
    member.shown = {key: status.get(key) for key in ("env_steps", "updates", "score")}
    if status.get("state") == "done":
        member.state = "done"
        member.exit_code = 0
        member.reason = str(status.get("reason") or "")
    # The end was moved and the sweep killed before this member knew of it.
    if _end_of(folder) < end:
        member.steps = end


def _end_of(folder: Path) -> float:
    """The last step of a run; a run whose plan cannot be read reports that when it is resumed."""
    with suppress(UsageError, KeyError, TypeError, ValueError):
        return int(read_tables(folder)["until"]["steps"])
    return math.inf


def _clear_remains(folder: Path) -> None:
    """Remove what is left of a member that was killed before it had a plan."""
    with suppress(OSError):  # other files stay, and the member reports that its name is taken
        remove_drafts(folder)
        folder.rmdir()
