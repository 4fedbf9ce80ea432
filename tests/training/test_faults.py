"""Numbers that are not finite, full disks, too little memory, worlds that cannot be repeated."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from qfleet import Run, resume, train
from qfleet.act import Policy
from qfleet.build import memory_check
from qfleet.build.make import make_components
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.data import Array, Batch, Report
from qfleet.errors import DivergedError, EnvError, StorageError, UsageError
from qfleet.learn import Learner, NonFiniteUpdate
from qfleet.save import verify_run
from qfleet.save.files import RealFiles
from qfleet.testing.toys import NotFinite, Random, Unrepeatable
from qfleet.training import checkpointing
from qfleet.training.checkpointing import Saver
from qfleet.training.log.run_log import RunLog
from qfleet.training.recovery import Recovery
from qfleet.watch.text import end_lines
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, Settings, checkpoints, events, resumed, rows, same, small, status, trained, until

BREAKING = "qfleet.testing.toys:toys/Breaking-v0"
NO_LIMIT: Settings = {"optim.clip_norm": None, "optim.learning_rate": 1e30}


def arrays(checkpoint: Path) -> list[Array]:
    """Every floating point array in the files that a policy could be made of."""
    names = ("model.safetensors", "optim.safetensors", "state.safetensors")
    found = [array for name in names for array in load_file(checkpoint / name).values()]
    return [array for array in found if array.dtype.kind == "f"]


def assert_finite(run: Path) -> None:
    """Whole, finite checkpoints, and no number in the rows that is not one."""
    assert checkpoints(run)
    assert all(verdict.ok for verdict in verify_run(run))
    assert all(np.isfinite(array).all() for folder in checkpoints(run) for array in arrays(folder))
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert "Infinity" not in (run / "metrics.jsonl").read_text()


# Environments


@pytest.mark.parametrize(
    "runtime", [{}, {"runtime.type": "processes", "actors.num": 1, "runtime.threads": 1}], ids=["inline", "processes"]
)
def test_a_failing_world_of_a_worker_is_an_event_and_the_run_goes_on(runtime: Settings, tmp_path: Path) -> None:
    toy: Settings = {"env.options": {"every": 5}, "env.workers": 2, "env.rebuilds": 1000}
    run = train(small({**toy, **runtime}, BREAKING), out=tmp_path).path
    assert status(run)["state"] == "done"
    found = events(run, "env_fault")
    assert found
    assert {row["fault"] for row in found} == {"raised"}
    assert all(len(row["lanes"]) == 1 and "the toy broke" in row["what"] for row in found)
    assert "ZeroDivisionError" in found[0]["cause"]


def test_a_warning_names_an_environment_that_is_given_up_once(tmp_path: Path) -> None:
    toy: Settings = {"env.options": {"every": 9}, "env.workers": 1, "env.rebuilds": 1}
    run = train(small(toy, BREAKING), out=tmp_path).path
    given_up = [row for row in events(run, "env_fault") if row["quarantined"]]
    assert given_up
    texts = [row["text"] for row in events(run, "warning") if "failed more often than env.rebuilds" in row["text"]]
    assert len(texts) == len(set(texts)) == len(given_up)


def test_environments_of_two_actors_that_are_given_up_are_distinguished(tmp_path: Path) -> None:
    plan = small()
    world = make_train_world(plan)
    run_log = RunLog(make_components(resolve(plan, world.spec), world), tmp_path)
    fault = {"kind": "died", "lanes": [0], "quarantined": [0], "what": "worker 0, at lane 0, ended with exit code 7"}
    for who in ({"actor": 0}, {"actor": 1}, {"actor": 1}, {}):
        run_log.faults.env_fault({**who, **fault})
    assert [text.partition(" failed")[0] for text in run_log.warnings] == [
        "actor 0, environment 0",
        "actor 1, environment 0",
        "environment 0",
    ]
    run_log.close()


def test_a_learner_or_actor_that_is_given_up_is_in_warnings_and_status(tmp_path: Path) -> None:
    plan = small({"learners.num": 2})
    world = make_train_world(plan)
    run_log = RunLog(make_components(resolve(plan, world.spec), world), tmp_path)
    run_log.faults.learner_event({"kind": "learner_lost", "learner": 1, "what": "it left", "replaced": True})
    assert run_log.train_state.lost == []
    run_log.faults.learner_event({"kind": "learner_lost", "learner": 1, "what": "it left", "replaced": False})
    run_log.faults.actor_event("actor_lost", worker=0, words="", restart_seconds=0.1)
    run_log.faults.actor_event("actor_lost", worker=0, words="", restart_seconds=None)
    assert run_log.train_state.lost == [
        "learner 1 (of 2) was lost for good at step 0: it left",
        "actor 0 (of 1) was lost for good at step 0: it did not say why",
    ]
    assert run_log.warnings == [
        "learner 1 is lost: it left; another one is started",
        *(
            f"{text}; it is not started again ({limit}.restarts), and the run goes on without it"
            for text, limit in zip(run_log.train_state.lost, ("learners", "runtime"), strict=True)
        ),
    ]
    assert run_log.write_status()["lost"] == run_log.train_state.lost
    assert [components for components in end_lines(status(tmp_path)) if components.startswith("lost: ")] == [
        f"lost: {text}" for text in run_log.train_state.lost
    ]
    run_log.close()


@pytest.mark.parametrize(("field", "word"), [("obs", "observation"), ("reward", "reward")])
def test_a_world_that_returns_what_is_not_a_number_ends_the_run(field: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=rf"{word}: expected finite numbers, got (nan|inf)"):
        train(small(env_id="toys/NotFinite-v0"), out=tmp_path, env=lambda: NotFinite(field, at=40))
    run = next(tmp_path.iterdir())
    found = status(run)
    assert (found["state"], found["exit_code"]) == ("failed", 4)
    assert word in found["reason"]
    assert events(run, "failed")[0]["exit_code"] == 4
    assert "Traceback" in next((run / "logs").iterdir()).read_text()
    assert_finite(run)


def test_a_run_resumes_exactly_after_its_environment_is_fixed(tmp_path: Path, reference: Reference) -> None:
    plan = small(env_id="toys/Random-v0")
    with pytest.raises(EnvError):
        train(plan, out=tmp_path, env=lambda: NotFinite("obs", at=45))
    run = resume(next(tmp_path.iterdir()), env=Random)
    assert same(run.path, reference(None, "toys/Random-v0").path)


# Divergence


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("judged", [{}, JUDGED])
def test_divergence_rolls_back_and_then_gives_up(
    judged: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted = record_actions(monkeypatch)
    with pytest.raises(DivergedError) as caught:
        train(small({**NO_LIMIT, **judged}), out=tmp_path)
    assert caught.value.exit_code == 3
    assert "optim.learning_rate=1e+30" in caught.value.fix
    run = next(tmp_path.iterdir())
    assert (status(run)["state"], status(run)["exit_code"]) == ("diverged", 3)
    assert [event["number"] for event in events(run, "rollback")] == [1, 2, 3, 4]
    assert_finite(run)
    assert all(np.isfinite(values).all() for values in acted)


def record_actions(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """The values that every action was chosen by."""
    seen: list[Array] = []
    act = Policy.act

    def acting(self: Policy, *arguments: Any, **options: Any) -> tuple[Array, Any, Array]:
        answer = act(self, *arguments, **options)
        seen.append(answer[2])
        return answer

    monkeypatch.setattr(Policy, "act", acting)
    return seen


def bad_updates(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Some calls of `update`, by number, find a loss that is not finite."""
    update, calls = Learner.update, [0]

    def updating(self: Learner, batch: Batch) -> Report:
        calls[0] += 1
        if bad(calls[0]):
            raise NonFiniteUpdate("loss nan, gradient norm nan")
        return update(self, batch)

    monkeypatch.setattr(Learner, "update", updating)


def test_one_bad_batch_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_updates(monkeypatch, lambda call: call in (10, 20, 21))
    run = trained(small(), tmp_path)
    assert run.exit_code == 0
    assert events(run.path, "rollback") == []
    train_state = json.loads((checkpoints(run.path)[-1] / "state.json").read_text())["book"]
    assert train_state["skipped"] == 3


@pytest.mark.usefixtures("every_save")
def test_five_bad_batches_in_a_row_mean_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_updates(monkeypatch, lambda call: 40 <= call < 45)
    run = trained(small(), tmp_path)
    assert run.exit_code == 0
    (event,) = events(run.path, "rollback")
    (warning,) = events(run.path, "warning")
    assert event["env_steps"] > warning["env_steps"] > 0
    assert warning["text"].startswith("rolled back to step ")
    (batch,) = (run.path / "debug").iterdir()
    assert {"obs", "action", "reward", "discount", "next_obs", "weight"} <= load_file(batch).keys()
    steps = [row["env_steps"] for row in run.metrics]
    assert steps == sorted(steps)
    assert run.status["updates"] == 81  # the ratio holds over a roll-back


@pytest.mark.usefixtures("every_save")
def test_a_roll_back_marks_the_run_not_exact_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        bad_updates(patch, lambda call: 40 <= call < 45)
        run = trained(small(), tmp_path)
    assert len(events(run.path, "rollback")) == 1
    assert run.status["exact"] is False
    assert json.loads((checkpoints(run.path)[-1] / "state.json").read_text())["book"]["exact"] is False
    assert resumed(run, steps=330).status["exact"] is False
    assert trained(small(), tmp_path / "undisturbed").status["exact"] is True


@pytest.mark.usefixtures("every_save")
def test_going_back_draws_other_batches_and_repeats_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(out: Path) -> Run:
        with monkeypatch.context() as patch:
            bad_updates(patch, lambda call: 40 <= call < 45)
            return trained(small(), out)

    one, two = disturbed(tmp_path / "1"), disturbed(tmp_path / "2")
    assert same(one.path, two.path)
    plain = trained(small(), tmp_path / "3")
    assert rows(one.path) != rows(plain.path)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that spoils the weights is noticed by the save that follows it, before anybody acts on them."""
    update, calls = Learner.update, [0]

    def updating(self: Learner, batch: Batch) -> Report:
        calls[0] += 1
        report = update(self, batch)
        if calls[0] == 40:
            next(self.net.parameters()).data.fill_(float("nan"))
        return report

    monkeypatch.setattr(Learner, "update", updating)
    monkeypatch.setattr(Saver, "due", lambda self: True)
    run = trained(small({"save.keep": 1_000}), tmp_path)
    assert [event["cause"] for event in events(run.path, "rollback")] == ["weights are not finite"]
    assert run.exit_code == 0
    assert_finite(run.path)


@pytest.mark.parametrize("last", [{"eval.test_episodes": 2}, {"eval.episodes": 2}])
def test_divergence_in_the_very_last_step_is_divergence_too(last: Settings, tmp_path: Path) -> None:
    """The only update makes weights that are finite, and values that are not."""
    with pytest.raises(DivergedError):
        train(until(small({**NO_LIMIT, **last, "replay.samples_per_insert": 4}), 44), out=tmp_path)
    assert status(next(tmp_path.iterdir()))["exit_code"] == 3


def test_a_roll_back_leaves_nothing_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    load = Recovery.load

    def loading(self: Recovery, **options: Any) -> int:
        lost = load(self, **options)
        seen.append(self.components.actor.in_flight)
        return lost

    monkeypatch.setattr(Recovery, "load", loading)
    bad_updates(monkeypatch, lambda call: 40 <= call < 45)
    trained(small(), tmp_path)
    assert seen == [0]


def test_growing_values_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Learner.update

    def growing(self: Learner, batch: Batch) -> Report:
        report = update(self, batch)
        return Report(report.loss, report.priority, {**report.stats, "value_mean": 3e6 + self.updates})

    monkeypatch.setattr(Learner, "update", growing)
    run = trained(small(), tmp_path)
    assert run.exit_code == 0
    (warning,) = events(run.path, "warning")
    assert "values have grown beyond 1e+06" in warning["text"]


# Memory


def test_a_replay_that_cannot_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"replay\.capacity=1000000000000 does not fit into memory") as caught:
        train(small({"replay.capacity": 10**12}), out=tmp_path)
    assert "GiB are available" in caught.value.why
    assert "Use replay.capacity=" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_the_capacity_that_is_offered_instead_does_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 100_000)
    with pytest.raises(UsageError) as caught:
        train(small({"replay.capacity": 100_000}), out=tmp_path)
    offered = int(caught.value.fix.split("=")[1].split()[0])
    assert trained(small({"replay.capacity": offered}), tmp_path).exit_code == 0


def test_a_network_that_cannot_fit_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 8 << 30)
    with pytest.raises(UsageError, match=r"the network that net\.\* asks for does not fit into memory"):
        train(small({"net.torso.sizes": [100_000, 100_000]}), out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_processes_than_the_machine_has_memory_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 8 << 30)
    asked = {"runtime.type": "processes", "actors.num": 400, "env.num": 400, "replay.capacity": 4_000}
    with pytest.raises(UsageError, match=r"actors\.num=400 processes do not fit into memory"):
        train(small(asked), out=tmp_path)
    assert not list(tmp_path.iterdir())


# Disks


class Full(RealFiles):
    """Files that refuse while `refusing` says so."""

    def __init__(self, refusing: Callable[[], bool]) -> None:
        self.refusing = refusing

    def write(self, path: Path, data: Any) -> None:
        if self.refusing() and path.name == "optim.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, data)


def full_disk(monkeypatch: pytest.MonkeyPatch, refusing: Callable[[int], bool]) -> list[int]:
    """Saves, by number, find the disk full; answers with the numbers tried."""
    tried: list[int] = []
    save = Saver.save

    def saving(self: Saver) -> None:
        tried.append(self.components.steps)
        self.checkpointer.checkpoints._files = Full(lambda: refusing(len(tried)))
        save(self)

    monkeypatch.setattr(Saver, "save", saving)
    return tried


@pytest.mark.usefixtures("every_save")
def test_a_disk_that_is_full_for_a_while_is_a_warning(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference()
    tried = full_disk(monkeypatch, lambda number: number in (2, 3, 5, 6))
    run = trained(small(), tmp_path)
    assert run.exit_code == 0
    assert [event["env_steps"] for event in events(run.path, "warning")] == [*tried[1:3], *tried[4:6]]
    assert all("No space left on device" in event["text"] for event in events(run.path, "warning"))
    assert same(run.path, whole.path)


def test_a_refused_save_is_tried_again_later_and_not_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full_disk(monkeypatch, lambda number: number in (2, 3))
    trained(small({"save.every_seconds": 1_000}), tmp_path)
    assert tried[2] // 50 > tried[1] // 50  # at the next multiple of save.every_steps, not at the next step


@pytest.mark.usefixtures("every_save")
def test_a_disk_that_stays_full_ends_the_run_and_keeps_the_last_commit(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        tried = full_disk(patch, lambda number: number > 2)
        with pytest.raises(StorageError, match="No space left on device"):
            train(small(), out=tmp_path)
    run = next(tmp_path.iterdir())
    assert len(tried) == 5
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 5)
    assert checkpoints(run)[-1].name == f"step_{tried[1]:012d}"
    assert all(verdict.ok for verdict in verify_run(run))
    assert not list(run.glob("checkpoints/.tmp-*"))
    assert same(resumed(run).path, reference().path)


class Stuck(RealFiles):
    """Files where no old checkpoint can be deleted."""

    def rename(self, source: Path, path: Path) -> None:
        if source.name.startswith("step_"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        super().rename(source, path)


@pytest.mark.usefixtures("every_save")
def test_a_commit_whose_clean_up_fails_is_a_commit(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Saver.save

    def saving(self: Saver) -> None:
        self.checkpointer.checkpoints._files = Stuck()
        save(self)

    monkeypatch.setattr(Saver, "save", saving)
    run = trained(small(), tmp_path)
    assert run.exit_code == 0
    assert len(checkpoints(run.path)) > 4  # one for each save: none went
    (warning,) = events(run.path, "warning")
    assert warning["text"].startswith("saved, but not tidied up: An old checkpoint in ")
    assert same(run.path, reference().path)


@pytest.mark.usefixtures("every_save")
def test_a_best_checkpoint_stays_the_best_when_best_json_cannot_be_written(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, document: Any) -> None:
        raise StorageError(f"cannot write {path.name}", "the system said: no", "wait")

    monkeypatch.setattr(checkpointing, "write_json", refuse)
    run = trained(small(JUDGED), tmp_path)
    assert run.exit_code == 0
    assert {event["text"] for event in events(run.path, "warning")} == {
        "saved, but not tidied up: cannot write best.json"
    }
    assert not (run.path / "best.json").exists()
    assert run.status["best"] == reference(JUDGED).status["best"]
    assert same(run.path, reference(JUDGED).path)


# Worlds that cannot be repeated


def test_an_environment_that_cannot_be_re_driven_is_reported_and_starts_new_episodes(tmp_path: Path) -> None:
    plan = small({"until.steps": 90, "replay.capacity": 1_000}, "toys/Random-v0")
    run = train(plan, out=tmp_path, env=Unrepeatable)
    saved = json.loads((checkpoints(run.path)[-1] / "state.json").read_text())["line"]["feed"]["replay"]["row"]
    ended = resume(run.path, steps=200, env=Unrepeatable)
    assert ended.exit_code == 0
    assert ended.status["exact"] is False
    (warning,) = events(run.path, "warning")
    assert warning["text"].startswith("not exact: 4 of 4 environments")
    assert events(run.path, "resumed")[0]["lost_episodes"] == 4
    last = replay_rows(ended.path)["last"]
    assert last[saved].all()
    # Once not exact, always: later, uneventful resumes do not whitewash it.
    resume(run.path, steps=230, env=Random)
    assert resume(run.path, steps=260, env=Random).status["exact"] is False
    assert [event["lost_episodes"] for event in events(run.path, "resumed")] == [4, 4, 0]


def replay_rows(run: Path) -> dict[str, Array]:
    """All rows of the newest checkpoint's replay, which must reach back to row 0."""
    from qfleet.save import decompress, unpack_tensors

    parts = sorted(checkpoints(run)[-1].glob("replay/*.zst"))
    tables = [unpack_tensors(decompress(part.read_bytes(), 2**30)) for part in parts]
    assert parts[0].name.startswith("rows_000000000000_")
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def test_a_roll_back_in_such_an_environment_is_reported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_updates(monkeypatch, lambda call: 40 <= call < 45)
    run = train(small(env_id="toys/Random-v0"), out=tmp_path, env=Unrepeatable)
    assert len(events(run.path, "rollback")) == 1
    assert run.status["exact"] is False
    assert any(event["text"].startswith("not exact") for event in events(run.path, "warning"))


# The run's own folder


@pytest.mark.parametrize("how", ["renamed", "removed", "removed and made again"])
def test_a_folder_that_is_moved_away_ends_the_run_at_the_next_write(tmp_path: Path, how: str) -> None:
    moved = tmp_path / "elsewhere"
    seen = list[int]()

    def move(row: dict[str, Any]) -> None:
        seen.append(row["env_steps"])
        if len(seen) == 2:
            folder = next((tmp_path / "runs").iterdir())
            folder.rename(moved)
            if how != "renamed":
                shutil.rmtree(moved)
            if how == "removed and made again":
                folder.mkdir()

    with pytest.raises(StorageError, match="was renamed or removed while the run was writing to it") as caught:
        train(small(), out=tmp_path / "runs", callbacks=[move])
    assert caught.value.exit_code == 5
    assert len(seen) == 2
    left = list((tmp_path / "runs").rglob("*"))
    assert len(left) == (how == "removed and made again"), "no second folder, nothing in one that was made meanwhile"
    if how == "renamed":
        assert all(verdict.ok for verdict in verify_run(moved))


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only")
def test_the_status_says_failed_also_where_a_full_disk_has_no_room_for_it(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        run = disk / "run"

        def fill(row: dict[str, Any]) -> None:
            if row["kind"] == "progress":
                with suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
                    while filler.write(bytes(4_096)):
                        continue

        with pytest.raises(StorageError):
            train(small({"until.steps": 100_000, "log.every_steps": 50}), out=disk, name="run", callbacks=[fill])
        assert (disk / "filler").stat().st_size > 4_096  # the disk was full
        assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 5)
        assert status(run)["resume"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
