"""Groups of runs: real members are ordinary runs; stand-ins show what a group makes of members that fail or stop."""

import io
import json
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import qfleet
from qfleet import Plan, load, resume_group, train_group
from qfleet.build import threads
from qfleet.errors import StorageError, UsageError
from qfleet.save import hold_run, verify_run
from qfleet.sweep import capacity, member_process, process_pool, runner
from qfleet.sweep.capacity import find_capacity
from qfleet.watch import find_run, read_json, write_json
from qfleet.watch.console import SafeStream
from qfleet.watch.run_listing import list_runs, remove_run
from qfleet.watch.sweep_console import JsonGroup, PlainGroup, QuietGroup
from tests.support.command_server import CommandProcess, CommandServer
from tests.support.runs import JUDGED, PONG, Settings, checkpoints, same, small, status, train_arguments, trained
from tests.sweep import stand_ins

LONG: Settings = {"until.steps": 1_000_000, "save.every_steps": 200, "log.every_steps": 200}


class Plays:
    """What the stand-ins are to do, and what they were told."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def set(self, **plays: str) -> None:
        write_json(self.file, {name.replace("_", "-"): play for name, play in plays.items()})

    def said(self) -> list[str]:
        log = Path(f"{self.file}.said")
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(lines)


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plays:
    monkeypatch.setattr(member_process, "run_member", stand_ins.play)
    monkeypatch.setattr(process_pool, "POLL_SECONDS", 0.02)
    monkeypatch.setenv("PLAYS", str(tmp_path / "plays.json"))
    return Plays(tmp_path / "plays.json")


def states(folder: Path) -> dict[str, Any]:
    return {each["name"]: each["state"] for each in read_json(folder / "group.json")["members"]}


# --- what a group makes of its members ---


def test_group_json_lists_the_members_canonically(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_3="0 done 5", seed_4="0 done 7")
    made = train_group(small({"seed": 3}), 2, out=tmp_path / "runs", command=["qfleet", "train"])
    text = (made.path / "group.json").read_text()
    document = json.loads(text)
    assert text == json.dumps(document, indent=1, sort_keys=True) + "\n"
    assert (document["state"], document["exit_code"], document["env"]) == ("done", 0, "CartPole-v1")
    assert [(each["name"], each["seed"]) for each in document["members"]] == [("seed-3", 3), ("seed-4", 4)]
    assert [each["plan"] for each in document["members"]] == [qfleet.plan.plan_hash(small({"seed": s})) for s in (3, 4)]
    assert [path.name for path in made.members] == ["seed-3", "seed-4"]
    assert made.compare().aggregates[made.path.name]["mean"].value == 6
    assert not (made.path / "run.lock").exists()


def test_a_member_that_fails_is_named_and_stops_no_other(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="0 done 5", seed_1="4 refused", seed_2="3 diverged", seed_3="0 done 6")
    made = train_group(small(), 4, out=tmp_path / "runs", jobs=1)
    assert states(made.path) == {"seed-0": "done", "seed-1": "failed", "seed-2": "diverged", "seed-3": "done"}
    assert made.exit_code == 3  # worse than 4
    assert made.status["reason"] == "2 of 4 members are done, not seed-1 (failed), seed-2 (diverged)"
    assert made.status["members"][1]["reason"] == "the world is flat"
    assert made.compare().sides[0].missing == (f"{made.path.name}/seed-1", f"{made.path.name}/seed-2")


def test_resuming_goes_on_with_what_is_unfinished(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="0 done 5", seed_1="4 refused", seed_2="143 preempted")
    made = train_group(small(), 3, out=tmp_path / "runs")
    assert made.exit_code == 4
    assert plays.said() == ["seed-0 train", "seed-1 train", "seed-2 train"]
    plays.set(seed_1="0 done 6", seed_2="0 done 7")
    again = resume_group(made.path, strict=True)
    assert plays.said() == ["seed-1 train --strict", "seed-2 resume --strict"]
    assert (again.path, again.exit_code) == (made.path, 0)
    assert resume_group(made.path).exit_code == 0
    assert plays.said() == []


def test_a_signal_is_the_groups_own_ending(plays: Plays, tmp_path: Path) -> None:
    class Impatient(QuietGroup):
        """Asks this process to stop once the first member has ended."""

        def finished(self, member: Any) -> None:
            if member["name"] == "seed-0":
                signal.raise_signal(signal.SIGTERM)

    plays.set(seed_0="0 done 5", seed_1="0 done 6", seed_2="0 done 7")
    watcher = Impatient(SafeStream(io.StringIO()))
    made = train_group(small(), 3, out=tmp_path / "runs", jobs=1, watcher=watcher)
    assert (made.exit_code, made.status["state"]) == (143, "preempted")
    assert made.status["reason"] == "stopped by SIGTERM, 1 of 3 members are done"
    assert states(made.path) == {"seed-0": "done", "seed-1": "waiting", "seed-2": "waiting"}
    assert resume_group(made.path).exit_code == 0


def test_more_steps_are_for_all_and_stay_in_the_plan(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="0 done 5", seed_1="0 done 6")
    made = train_group(small(), 2, out=tmp_path / "runs")
    plays.said()
    resume_group(made.path, steps=900)
    assert plays.said() == ["seed-0 resume --steps 900", "seed-1 resume --steps 900"]
    assert qfleet.plan.read_plan(made.path / "plan.toml").until.steps == 900
    assert resume_group(made.path).exit_code == 0  # the plan that was changed by us is known


def test_a_member_that_was_killed_before_its_first_save_begins_again(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="0 done 5", seed_1="4 refused", seed_2="4 refused")
    made = train_group(small(), 3, out=tmp_path / "runs")
    plays.said()
    (made.path / "seed-1").mkdir()
    (made.path / "seed-2").mkdir()
    (made.path / "seed-2" / "run.toml").write_text((made.path / "plan.toml").read_text())
    plays.set(seed_1="0 done 6", seed_2="0 done 7")
    assert resume_group(made.path).exit_code == 0
    assert plays.said() == ["seed-1 train", "seed-2 train"]


def test_half_a_plan_does_not_bar_a_members_name(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="4 refused")
    made = train_group(small(), 1, out=tmp_path / "runs")
    (made.path / "seed-0").mkdir()
    (made.path / "seed-0" / ".run.toml.0123456789abcdef.draft").write_text("see")
    resume_group(made.path)
    assert not (made.path / "seed-0").exists()
    (made.path / "seed-0").mkdir()
    (made.path / "seed-0" / "notes.txt").write_text("mine")
    resume_group(made.path)
    assert (made.path / "seed-0" / "notes.txt").read_text() == "mine"


class Killed(BaseException):
    """What a kill is to this process: nothing after it runs."""


@pytest.mark.parametrize("writes", range(3))
def test_a_kill_while_the_end_is_moved_leaves_a_group_that_goes_on(
    plays: Plays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    plays.set(seed_0="0 done 5", seed_1="0 done 6")
    made = train_group(small(), 2, out=tmp_path / "runs")
    before = qfleet.plan.read_plan(made.path / "plan.toml").until.steps
    plays.said()
    left = [writes]

    def counted(write: Any) -> Any:
        def writing(*arguments: Any) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            write(*arguments)

        return writing

    with monkeypatch.context() as patched:
        for name in ("write_run_plan", "write_file"):
            patched.setattr(runner, name, counted(getattr(runner, name)))
        with pytest.raises(Killed):
            resume_group(made.path, steps=900)
    moved = qfleet.plan.read_plan(made.path / "plan.toml").until.steps == 900
    assert moved == (writes == 2)
    assert resume_group(made.path).exit_code == 0
    assert plays.said() == (["seed-0 resume --steps 900", "seed-1 resume --steps 900"] if moved else [])
    assert qfleet.plan.read_plan(made.path / "plan.toml").until.steps == (900 if moved else before)
    assert "plan_sha256_before" not in made.status


def test_a_warning_of_a_member_is_shown(plays: Plays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_process, "run_member", stand_ins.warn_and_play)
    plays.set(seed_0="0 done 5")
    out = io.StringIO()
    train_group(small(), 1, out=tmp_path / "runs", watcher=PlainGroup(SafeStream(out)))
    assert "seed-0 warning: step_1 is damaged\n" in out.getvalue()


def test_a_plan_that_was_changed_by_hand_is_refused(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="4 refused")
    made = train_group(small(), 1, out=tmp_path / "runs")
    plan = made.path / "plan.toml"
    plan.write_text(plan.read_text().replace("batch_size = 16", "batch_size = 17"))
    with pytest.raises(UsageError, match="is not the plan that"):
        resume_group(made.path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 1}', '{"format": 2, "members": [{"seed": 0, "plan": "x"}]}'])
def test_a_group_file_of_another_kind_is_refused(plays: Plays, tmp_path: Path, text: str) -> None:
    plays.set(seed_0="4 refused")
    made = train_group(small(), 1, out=tmp_path / "runs")
    (made.path / "group.json").write_text(text)
    with pytest.raises(UsageError, match="is not a group that this version knows"):
        resume_group(made.path)


def test_two_at_once_are_refused(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="4 refused")
    made = train_group(small(), 1, out=tmp_path / "runs")
    with hold_run(made.path), pytest.raises(StorageError, match="is being written by"):
        resume_group(made.path)


def test_a_group_that_names_code_needs_trust(plays: Plays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("from qfleet.testing.toys import Random\nclass Own(Random): pass\n")
    plays.set(seed_0="4 refused")
    made = train_group(small(None, f"{tmp_path}/own.py:Own"), 1, out=tmp_path / "runs")
    assert resume_group(made.path).exit_code == 4
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    with pytest.raises(UsageError, match="names code to run"):
        resume_group(made.path)
    assert resume_group(made.path, trust_env=True).exit_code == 4
    assert plays.said()[-1].endswith("--trust-env")


@pytest.mark.parametrize("seeds", [0, [], [1, 1], [-1]])
def test_seeds_that_make_no_group(tmp_path: Path, seeds: Any) -> None:
    with pytest.raises(UsageError, match="does not make a group"):
        train_group(small(), seeds, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_plan_that_is_out_of_range_leaves_no_trace(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(small(), seed=-3)
    with pytest.raises(UsageError, match="a value it cannot have"):
        train_group(plan, 2, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_world_that_does_not_exist_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="CartPoel"):
        train_group(small(None, "CartPoel-v1"), 2, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_removing_the_last_member_removes_the_group(plays: Plays, tmp_path: Path) -> None:
    plays.set(seed_0="0 done 5", seed_1="0 done 6")
    made = train_group(small(), 2, out=tmp_path / "runs")
    first, second = made.members
    remove_run(first)
    assert made.members == [second]
    remove_run(second)
    assert list((tmp_path / "runs").iterdir()) == []


# --- room ---


@pytest.fixture
def seven_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (capacity, threads):
        monkeypatch.setattr(module, "usable_cores", lambda: 7)


@pytest.mark.usefixtures("seven_cores")
@pytest.mark.parametrize(
    ("settings", "num", "jobs", "expected"),
    [
        ({"runtime.threads": 2}, 9, None, (3, 2, 2)),
        ({"runtime.threads": 2}, 2, None, (2, 2, 3)),
        ({"runtime.threads": 8}, 9, None, (1, 8, 7)),
        ({}, 9, 9, (9, 1, 1)),
        # Each member of two actors and a learner keeps three cores busy.
        ({"runtime.type": "processes", "actors.num": 2}, 9, None, (2, 1, 3)),
        ({"runtime.type": "processes", "actors.num": 2, "runtime.replay_process": True}, 9, None, (1, 1, 7)),
    ],
)
def test_members_at_once_do_not_keep_more_cores_busy_than_there_are(
    settings: Settings, num: int, jobs: int | None, expected: tuple[int, int, int]
) -> None:
    found = find_capacity(small(settings), num, jobs)
    assert (found.jobs, found.threads, found.cores) == expected


@pytest.mark.usefixtures("seven_cores")
@pytest.mark.parametrize(
    ("settings", "num", "expected"),
    [
        ({}, 9, (7, 1)),  # their numbers do not depend on threads: one thread each is the fastest for all of them
        ({}, 3, (3, 2)),  # cores are left for second threads
        ({}, 1, (1, 2)),
        ({"runtime.parallel": "operations"}, 9, (1, 7)),  # another number of threads would change the numbers
        ({"runtime.threads": 2}, 9, (3, 2)),
    ],
)
def test_members_with_convolutions_share_the_cores(settings: Settings, num: int, expected: tuple[int, int]) -> None:
    plan = small({**PONG, "runtime.threads": None, **settings}, "ALE/Pong-v5")
    found = find_capacity(plan, num)
    assert (found.jobs, found.threads) == expected


def test_capacity_is_lowered_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "usable_cores", lambda: 8)
    each = capacity.PROCESS_BYTES + 1_000
    needs = {"replay_bytes": 1_000, "checkpoint_bytes": 0, "available_bytes": int(3.5 * each / 0.9)}
    monkeypatch.setattr(capacity, "estimate", lambda plan, spec: needs)
    room = find_capacity(small(), 5)
    assert (room.jobs, room.notes) == (3, ("memory for 3 at once, not for 5",))
    assert find_capacity(small(), 5, jobs=4).jobs == 3
    needs["available_bytes"] = 10
    assert find_capacity(small(), 5).jobs == 1


# --- real members ---


def with_seed(seed: int) -> Plan:
    return small({**JUDGED, "seed": seed})


def test_members_are_ordinary_runs_bit_equal_to_runs_of_their_own(tmp_path: Path) -> None:
    told = io.StringIO()
    made = train_group(with_seed(5), 2, out=tmp_path / "runs", name="pair", watcher=JsonGroup(SafeStream(told)))
    assert (made.exit_code, made.status["state"]) == (0, "done")
    for seed, path in zip((5, 6), made.members, strict=True):
        assert same(path, trained(with_seed(seed), tmp_path / "alone").path)
        assert all(ok for _, ok, _ in verify_run(path))
        assert find_run(f"pair/seed-{seed}", tmp_path / "runs") == path
    rows = [json.loads(line) for line in told.getvalue().splitlines()]
    for name in ("seed-5", "seed-6"):
        own = [
            {key: value for key, value in row.items() if key != "member"} for row in rows if row.get("member") == name
        ]
        assert own == [json.loads(line) for line in (made.path / name / "metrics.jsonl").read_text().splitlines()]
    assert (rows[-1]["kind"], rows[-1]["exit_code"], rows[-1]["env_steps"]) == (
        "end",
        0,
        sum(status(path)["env_steps"] for path in made.members),
    )
    assert load(made.members[0]).evaluate(2)["episodes"] == 2
    assert [run["name"] for run in list_runs(tmp_path / "runs")] in (
        ["pair/seed-6", "pair/seed-5"],
        ["pair/seed-5", "pair/seed-6"],
    )


def begun(child: CommandProcess, out: Path, num: int) -> list[Path]:
    """The members, once so many have written a row."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit and child.code is None:
        found = [file.parent for file in out.glob("*/*/metrics.jsonl") if file.stat().st_size]
        if len(found) == num:
            return sorted(found)
        time.sleep(0.02)
    raise AssertionError(child.output())


@pytest.mark.chaos
@pytest.mark.timeout(300)  # each member imports torch, which takes its time on a busy machine
def test_ctrl_c_saves_every_member_and_the_group_goes_on(tmp_path: Path, command_server: CommandServer) -> None:
    child = command_server.start(*train_arguments(tmp_path / "out", LONG), "--seeds", "2", "--jobs", "2", "--name", "g")
    members = begun(child, tmp_path / "out", 2)
    child.send(signal.SIGINT)
    assert child.wait(90) == 130, child.output()
    for path in members:
        assert (status(path)["state"], status(path)["exit_code"]) == ("interrupted", 130)
        assert checkpoints(path)[-1].name == f"step_{status(path)['env_steps']:012d}"
    assert states(tmp_path / "out" / "g") == {"seed-0": "interrupted", "seed-1": "interrupted"}
    furthest = max(status(path)["env_steps"] for path in members)
    again = resume_group(tmp_path / "out" / "g", steps=furthest + 200, jobs=2)
    assert again.exit_code == 0, again.status
    assert all(furthest + 200 <= status(path)["env_steps"] for path in again.members)


@pytest.mark.chaos
@pytest.mark.timeout(300)  # each member imports torch, which takes its time on a busy machine
@pytest.mark.slow
def test_members_save_and_leave_when_the_group_is_killed(tmp_path: Path, command_server: CommandServer) -> None:
    child = command_server.start(*train_arguments(tmp_path / "out", LONG), "--seeds", "2", "--jobs", "2", "--name", "g")
    members = begun(child, tmp_path / "out", 2)
    pids = [status(path)["pid"] for path in members]
    child.send(signal.SIGKILL)
    child.wait(10)
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    for path in members:
        assert (status(path)["state"], status(path)["exit_code"]) == ("preempted", 143)
        assert checkpoints(path)[-1].name == f"step_{status(path)['env_steps']:012d}"


def test_one_data_set_for_all_members_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    plan = small({"save.dataset": str(tmp_path / "data")})
    with pytest.raises(UsageError, match="does not go with a group"):
        train_group(plan, 2, out=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []
