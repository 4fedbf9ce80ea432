"""Callback objects: what they see, what they may ask for, and that they change nothing unless they ask."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Callback, Run, RunView, train
from qfleet.data import Batch
from qfleet.errors import UsageError
from qfleet.learn import Learner, NonFiniteUpdate
from qfleet.plan import read_plan
from tests.support.run_fixtures import Reference
from tests.support.runs import (
    ACTOR,
    JUDGED,
    LOCAL,
    LSTM,
    RANDOM,
    Settings,
    checkpoints,
    events,
    resumed,
    rows,
    same,
    small,
    status,
    trained,
)

PROCESSES: Settings = {"runtime.type": "processes", "actors.num": 2, "runtime.chunk_rows": 4, **LOCAL}


class Watching(Callback):
    """Counts every call, and looks at everything that there is to see."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[tuple[Any, ...]] = []
        self.steps = 0
        self.closed = 0

    def on_start(self, run: RunView) -> None:
        self.calls.append("start")
        assert run.ending is None
        assert run.score is None

    def on_step(self, run: RunView) -> None:
        self.calls.append("step")
        self.steps += run.new_steps
        assert run.new_steps > 0
        sample = run.replay.sample(5)
        newest = run.replay.newest(3)
        assert (sample is None) == (len(run.replay) == 0)
        assert sample is None or len(sample.ids) == 5
        assert newest is None or len(newest.ids) == min(3, len(run.replay))
        assert len(run.replay) <= run.replay.capacity
        self.seen.append((run.env_steps, run.updates, run.episodes, run.seconds, run.return_mean, run.policy.version))

    def on_update(self, run: RunView) -> None:
        self.calls.append("update")
        assert run.learner.loss is not None
        assert run.learner.gradient_norm > 0
        assert np.isfinite(run.learner.value_mean)
        for value in run.learner.weights().values():
            value[...] = 0.0  # of a copy

    def on_evaluation(self, run: RunView) -> None:
        self.calls.append("evaluation")
        assert run.last_evaluation is not None
        assert run.last_evaluation["env_steps"] == run.env_steps
        run.last_evaluation["mean"] = 1e9
        run.best_evaluation["mean"] = 1e9  # type: ignore[index]

    def on_save(self, run: RunView) -> None:
        self.calls.append("save")
        assert run.checkpoint is not None
        assert (run.checkpoint / "manifest.json").is_file()

    def on_end(self, run: RunView) -> None:
        self.calls.append("end")
        assert run.ending is not None
        self.ending = run.ending

    def close(self) -> None:
        self.closed += 1


class Asking(Callback):
    """Calls a function at the first step from `at` on."""

    def __init__(self, at: int, ask: Any) -> None:
        self.at = at
        self.ask = ask
        self.asked = False

    def on_step(self, run: RunView) -> None:
        if run.env_steps >= self.at and not self.asked:
            self.asked = True
            self.ask(run)


def asked(run: Run) -> Settings:
    """The row of a change that a callback asked for."""
    (row,) = [row for row in run.metrics if row["kind"] == "callback"]
    return row


# What they see


@pytest.mark.parametrize("changes", [{}, JUDGED, RANDOM, LSTM, ACTOR])
@pytest.mark.usefixtures("every_save")
def test_a_callback_that_only_looks_changes_nothing(tmp_path: Path, reference: Reference, changes: Settings) -> None:
    callback = Watching()
    run = trained(small(changes), tmp_path, callbacks=[callback])
    assert same(run.path, reference(changes).path)
    assert run.status["exact"]
    assert callback.calls.count("update") > 10


@pytest.mark.usefixtures("every_save")
def test_every_moment_is_called_at_its_time(tmp_path: Path) -> None:
    callback = Watching()
    run = trained(small(JUDGED), tmp_path, callbacks=[callback])
    calls = callback.calls
    assert (calls[0], calls[-1], callback.closed) == ("start", "end", 1)
    assert (calls.count("start"), calls.count("end")) == (1, 1)
    assert calls.count("update") == run.status["updates"]
    assert callback.steps == run.status["env_steps"]
    validations = [row for row in run.metrics if row["kind"] == "eval" and row["split"] == "validation"]
    assert calls.count("evaluation") == len(validations) == 3
    assert calls.count("save") == len(events(run.path, "checkpoint_committed")) - 1  # the first is before the start
    assert callback.ending.state == "done"
    assert [row[0] for row in callback.seen][-1] == run.status["env_steps"]


def test_methods_that_were_not_written_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("called")

    class Ending(Callback):
        ended = 0

        def on_end(self, run: RunView) -> None:
            self.ended += 1

    for name in ("on_start", "on_step", "on_update", "on_evaluation", "on_save"):
        monkeypatch.setattr(Callback, name, fail)
    callback = Ending()
    trained(small(JUDGED), tmp_path, callbacks=[callback])
    assert callback.ended == 1


def test_the_view_cannot_be_written(tmp_path: Path) -> None:
    def write(run: RunView) -> None:
        for name in ("plan", "env_steps", "policy", "new_steps", "something"):
            with pytest.raises(AttributeError):
                setattr(run, name, 1)
        with pytest.raises(AttributeError):
            run.learner.learning_rate = 1.0  # type: ignore[misc]

    callback = Asking(50, write)
    trained(small(), tmp_path, callbacks=[callback])
    assert callback.asked


def test_the_replay_is_read_without_its_random_numbers(tmp_path: Path) -> None:
    found: list[Any] = []

    def read(run: RunView) -> None:
        same_numbers = [run.replay.sample(6, np.random.default_rng(3)) for _ in range(2)]
        found.extend([*same_numbers, run.replay.sample(6), run.replay.newest(10**6), len(run.replay)])
        with pytest.raises(UsageError, match="0 items"):
            run.replay.sample(0)

    trained(small(), tmp_path, callbacks=[Asking(150, read)])
    one, again, other, every, size = found
    assert isinstance(one, Batch)
    assert (one.ids == again.ids).all()
    assert (one.ids != other.ids).any()
    assert len(every.ids) == size
    assert (np.diff(every.ids) == 1).all()


# What they may ask for


def test_metrics_are_in_the_next_row_only(tmp_path: Path) -> None:
    class Logging(Callback):
        def on_step(self, run: RunView) -> None:
            run.log("newest", run.env_steps)
            run.log_mean("mean", np.float32(run.env_steps))
            if run.env_steps < 20:
                run.log("once", np.array([7]))

    run = trained(small(), tmp_path, callbacks=[Logging()])
    progress = [row for row in run.metrics if row["kind"] == "progress"]
    assert [row["callback.newest"] for row in progress] == [row["env_steps"] for row in progress]
    assert all(row["callback.mean"] < row["callback.newest"] for row in progress)
    assert progress[0]["callback.once"] == 7
    assert not any("callback.once" in row for row in progress[1:])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("a b", 1, "cannot be the name"), ("", 1, "cannot be the name"), ("x", "1", "given a str"), ("x", [1], "a list")],
)
def test_what_is_no_metric_is_refused(tmp_path: Path, name: str, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        train(small(), out=tmp_path, callbacks=[Asking(10, lambda run: run.log(name, value))])


def test_a_metric_that_is_not_finite_is_null(tmp_path: Path) -> None:
    run = trained(small(), tmp_path, callbacks=[Asking(10, lambda run: run.log("x", float("nan")))])
    assert run.metrics[0]["callback.x"] is None


def test_too_many_metrics_are_refused(tmp_path: Path) -> None:
    def flood(run: RunView) -> None:
        for number in range(1000):
            run.log(f"x{number}", number)

    with pytest.raises(UsageError, match="more than 200 metrics"):
        train(small(), out=tmp_path, callbacks=[Asking(10, flood)])


def test_metrics_are_curves_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    from qfleet.training.log.tensorboard import TensorBoardWriter

    seen: list[Any] = []
    monkeypatch.setattr(TensorBoardWriter, "__call__", lambda self, row: seen.append(row))
    callback = Asking(10, lambda run: run.log("x", 2))
    trained(small({"log.tensorboard": True}), tmp_path, callbacks=[callback])
    assert seen[0]["callback.x"] == 2.0
    assert isinstance(seen[0]["callback.x"], float)


def test_a_save_and_an_evaluation_come_when_asked_for(tmp_path: Path) -> None:
    def ask(run: RunView) -> None:
        run.request_save()
        run.request_evaluation()

    plan = small({**JUDGED, "save.every_steps": 10**6, "save.every_seconds": 10**6, "save.keep": 5})
    run = trained(plan, tmp_path, callbacks=[Asking(150, ask)])
    evaluations = [row["env_steps"] for row in run.metrics if row["kind"] == "eval" and row["split"] == "validation"]
    assert len(evaluations) == 4
    (extra,) = [steps for steps in evaluations if 150 <= steps < 160]
    assert extra in [event["step"] for event in events(run.path, "checkpoint_committed")]
    assert run.status["exact"]  # scores decide nothing that is learned


@pytest.mark.usefixtures("every_save")
def test_an_evaluation_that_was_asked_for_changes_no_weights(tmp_path: Path, reference: Reference) -> None:
    callback = Asking(150, lambda run: run.request_evaluation())
    run = trained(small({**RANDOM, **JUDGED}), tmp_path, callbacks=[callback])
    plain = reference({**RANDOM, **JUDGED})
    model = [(checkpoints(each.path)[-1] / "model.safetensors").read_bytes() for each in (run, plain)]
    assert model[0] == model[1]
    assert len(rows(run.path)) == len(rows(plain.path)) + 1


def test_an_evaluation_that_decides_is_named_in_not_exact(tmp_path: Path) -> None:
    plan = small({**JUDGED, "steer.learning_rate.type": "plateau", "steer.learning_rate.patience": 1})
    run = trained(plan, tmp_path, callbacks=[Asking(150, lambda run: run.request_evaluation())])
    assert not run.status["exact"]
    assert "scores change what is learned" in run.status["not_exact"][0]


def test_an_evaluation_needs_episodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"eval\.episodes=0"):
        train(small(), out=tmp_path, callbacks=[Asking(10, lambda run: run.request_evaluation())])


@pytest.mark.usefixtures("every_save")
def test_a_callback_stops_the_run_with_a_reason(tmp_path: Path, reference: Reference) -> None:
    callback = Watching()
    stop = Asking(130, lambda run: run.stop("enough is enough"))
    run = trained(small(JUDGED), tmp_path, callbacks=[stop, callback])
    found = run.status
    assert (found["state"], found["exit_code"]) == ("stopped", 75)
    assert found["reason"] == "stopped by a callback: enough is enough"
    assert 130 <= found["env_steps"] < 140
    assert callback.ending.reason == found["reason"]
    assert same(resumed(run).path, reference(JUDGED).path)


def test_a_run_that_a_callback_ends_as_done_has_a_score(tmp_path: Path) -> None:
    callback = Asking(130, lambda run: run.stop("good enough", done=True))
    run = trained(small(JUDGED), tmp_path, callbacks=[callback])
    assert (run.status["state"], run.exit_code) == ("done", 0)
    assert run.result() is not None


# Changes of settings


def test_a_learning_rate_that_was_changed_is_used_shown_and_named(tmp_path: Path, reference: Reference) -> None:
    callback = Asking(150, lambda run: run.change("optim.learning_rate", 1e-5))
    run = trained(small(), tmp_path, callbacks=[callback])
    rate = small().optim.learning_rate
    row = asked(run)
    assert (row["setting"], row["before"], row["after"]) == ("optim.learning_rate", rate, 1e-5)
    assert [event["after"] for event in events(run.path, "callback")] == [1e-5]
    progress = [each for each in run.metrics if each["kind"] == "progress"]
    assert [each.get("learning_rate") for each in progress if each["env_steps"] < 150] == [None] * 4
    assert {each["learning_rate"] for each in progress if each["env_steps"] > 160} == {1e-5}
    assert not run.status["exact"]
    assert run.status["not_exact"] == [
        "a callback changed optim.learning_rate, which the plan and the seed do not know"
    ]
    plain = [each for each in reference().metrics if each["kind"] == "progress"]
    assert progress[3]["loss"] == plain[3]["loss"]
    assert progress[-1]["loss"] != plain[-1]["loss"]


@pytest.mark.usefixtures("every_save")
def test_a_run_whose_settings_were_changed_goes_on_with_them(tmp_path: Path) -> None:
    def change(run: RunView) -> None:
        run.change("optim.learning_rate", 1e-5)
        run.change("algo.batch_size", 8)

    plan = small(JUDGED)
    whole = trained(plan, tmp_path / "whole", callbacks=[Asking(150, change)])
    parts = [Asking(150, change), Asking(210, lambda run: run.stop("a break"))]
    run = trained(plan, tmp_path / "parts", callbacks=parts)
    found = resumed(run)  # without callbacks: the changes are in the checkpoint
    assert same(found.path, whole.path)
    assert [row for row in found.metrics if row["kind"] == "progress"][-1]["batch_size"] == 8


def test_the_end_of_a_run_can_be_moved(tmp_path: Path) -> None:
    run = trained(small(), tmp_path, callbacks=[Asking(100, lambda run: run.change("until.steps", 150))])
    assert run.status["reason"] == "reached until.steps=150"
    assert run.status["env_steps"] < 160
    assert read_plan(run.path / "run.toml").until.steps == run.plan.until.steps == 150
    assert run.status["exact"]
    assert asked(run)["before"] == 300


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("algo.n_step", 5, "a callback cannot change 'algo.n_step'"),
        ("learning_rate", 0.1, "a callback cannot change 'learning_rate'"),
        ("optim.learning_rate", -1.0, "a number above 0"),
        ("optim.learning_rate", float("nan"), "a number above 0"),
        ("optim.learning_rate", "fast", "a number above 0"),
        ("algo.batch_size", 2.5, "a whole number"),
        ("algo.batch_size", 0, "a whole number"),
        ("algo.batch_size", 10**6, "batches of 1 to"),
        ("until.steps", True, "a whole number"),
    ],
)
def test_other_changes_are_refused(tmp_path: Path, path: str, value: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        train(small(), out=tmp_path, callbacks=[Asking(10, lambda run: run.change(path, value))])
    assert text in f"{raised.value.what} {raised.value.why}"


def test_fresh_experience_has_no_batch_size(tmp_path: Path) -> None:
    fresh = {"replay.type": "fresh", "replay.rows": 8, "replay.minibatches": 2, "algo.target.type": None}
    gone = ("algo.batch_size", "algo.learn_start_steps", "algo.target.every_updates", "replay.capacity")
    plan = small({**fresh, **dict.fromkeys((*gone, "replay.samples_per_insert"))})
    callback = Asking(100, lambda run: run.change("algo.batch_size", 8))
    with pytest.raises(UsageError, match=r"replay\.type=fresh"):
        train(plan, out=tmp_path / "a", callbacks=[callback])
    seen = Watching()
    trained(plan, tmp_path / "b", callbacks=[seen])
    assert seen.calls.count("update") > 0


# State


class Counter(Callback):
    """Keeps a number in checkpoints, and shows it."""

    def __init__(self) -> None:
        self.count = 0
        self.loaded = 0

    def on_step(self, run: RunView) -> None:
        self.count += 1
        run.log("count", self.count)
        run.log_mean("mean", self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.loaded += 1


@pytest.mark.usefixtures("every_save")
def test_a_callback_with_state_resumes_exactly(tmp_path: Path) -> None:
    whole = trained(small(JUDGED), tmp_path / "whole", callbacks=[Counter()])
    stop = Asking(145, lambda run: run.stop("a break"))  # between two rows: means are half done
    run = trained(small(JUDGED), tmp_path / "parts", callbacks=[Counter(), stop])
    again = Counter()
    assert same(resumed(run, callbacks=[again]).path, whole.path)
    assert again.loaded == 1


@pytest.mark.parametrize("callbacks", [[], [Watching()]])
def test_a_callback_that_is_not_passed_again_is_named(tmp_path: Path, callbacks: list[Callback]) -> None:
    run = trained(small(), tmp_path, callbacks=[Counter(), Asking(100, lambda run: run.stop())])
    resumed(run, callbacks=callbacks)
    texts = [event["text"] for event in events(run.path, "warning")]
    assert any("a callback that was not passed again" in text and "Counter" in text for text in texts)


def test_states_go_to_callbacks_of_the_same_class_in_order(tmp_path: Path) -> None:
    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {"name": self.name}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.name = state["name"]

    run = trained(small(), tmp_path, callbacks=[Named("a"), Counter(), Named("b")])
    found = [Counter(), Named("?"), Named("?"), Named("new")]
    resumed(run, callbacks=found, steps=310)
    assert [each.name for each in found[1:]] == ["a", "b", "new"]  # type: ignore[attr-defined]


def test_a_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class Wrong(Callback):
        def state_dict(self) -> Any:
            return {"weights": np.zeros(3)}

    with pytest.raises(UsageError, match="cannot be saved"):
        train(small(), out=tmp_path, callbacks=[Wrong()])


def test_a_run_that_goes_back_starts_its_callbacks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Learner.update
    failing: list[int] = []

    def broken(self: Learner, batch: Any) -> Any:
        if self.updates == 30 and len(failing) < 5:
            failing.append(1)
            raise NonFiniteUpdate("loss nan")
        return update(self, batch)

    monkeypatch.setattr(Learner, "update", broken)
    seen = Watching()
    counter = Counter()
    run = trained(small(), tmp_path, callbacks=[seen, counter])
    assert events(run.path, "rollback")
    assert seen.calls.count("start") == 2
    assert counter.loaded == 1
    assert run.metrics[-2]["callback.count"] <= counter.count


# Errors


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("moment", ["on_start", "on_step", "on_update", "on_evaluation", "on_save", "on_end"])
def test_a_callback_that_raises_ends_the_run_which_can_be_resumed(
    tmp_path: Path, reference: Reference, moment: str
) -> None:
    def fail(run: RunView) -> None:
        raise RuntimeError("mine")

    callback = Watching()
    setattr(callback, moment, fail)
    with pytest.raises(RuntimeError, match="mine"):
        train(small(JUDGED), out=tmp_path, callbacks=[callback])
    (run,) = tmp_path.iterdir()
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 1)
    assert callback.closed == 1
    assert same(resumed(run).path, reference(JUDGED).path)


def test_what_is_no_callback_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for wrong, text in ((Watching, "the class Watching"), (3, "given a int")):
        with pytest.raises(UsageError, match=text):
            train(small(), out=tmp_path, callbacks=[wrong])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())


def test_functions_and_objects_go_together(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def stop(row: dict[str, Any]) -> bool:
        seen.append(row)
        return bool(row["env_steps"] > 120)

    callback = Watching()
    run = trained(small(), tmp_path, callbacks=iter([stop, callback]))
    assert seen == run.metrics
    assert run.status["reason"] == "stopped by a callback"
    assert callback.ending.reason == "stopped by a callback"


def test_a_signal_ends_the_run_with_its_callbacks(tmp_path: Path) -> None:
    callback = Watching()
    stop = Asking(100, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    run = trained(small(), tmp_path, callbacks=[stop, callback])
    assert run.exit_code == 143
    assert callback.calls[-1] == "end"


# Other runtimes


@pytest.mark.parametrize(
    "changes",
    [
        PROCESSES,
        {**PROCESSES, "runtime.replay_process": True},
        {"learners.num": 2},
        {"learners.num": 2, "learners.bundles": True},
    ],
    ids=["processes", "replay process", "learners", "actor-learners"],
)
def test_callbacks_see_runs_with_other_processes(tmp_path: Path, changes: Settings) -> None:
    class Changing(Watching):
        def on_step(self, run: RunView) -> None:
            super().on_step(run)
            run.log("x", run.env_steps)
            if run.env_steps > 150:
                run.change("optim.learning_rate", 1e-5)
                run.change("until.steps", 250)

    callback = Changing()
    run = trained(small({**changes, **JUDGED}), tmp_path, callbacks=[callback])
    assert callback.steps == run.status["env_steps"] < 280
    assert callback.calls.count("update") == run.status["updates"] > 0
    assert run.status["reason"] == "reached until.steps=250"
    progress = [row for row in run.metrics if row["kind"] == "progress"]
    assert progress[-1]["learning_rate"] == 1e-5
    assert progress[-1]["callback.x"] <= progress[-1]["env_steps"]


@pytest.mark.timeout(90)  # a pool that does not know the new end takes no more rollouts
def test_actors_act_up_to_an_end_that_was_moved_away(tmp_path: Path) -> None:
    run = trained(small(PROCESSES), tmp_path, callbacks=[Asking(150, lambda run: run.change("until.steps", 400))])
    assert run.status["reason"] == "reached until.steps=400"
    assert 400 <= run.status["env_steps"] < 402  # the last rollout is cut there


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({**PROCESSES, "runtime.replay_process": True}, "batches of 1 to 16 items"),
        ({"learners.num": 2}, "batches of 2 to 16 items"),
        ({"learners.num": 2, "learners.bundles": True}, "Every actor-learner draws batches of its own"),
    ],
)
def test_a_batch_has_room_in_messages(tmp_path: Path, changes: Settings, text: str) -> None:
    callback = Asking(50, lambda run: run.change("algo.batch_size", 17))
    with pytest.raises(UsageError) as raised:
        train(small(changes), out=tmp_path, callbacks=[callback])
    assert text in raised.value.why


def test_numbers_that_no_progress_row_has_shown_are_in_the_row_of_the_end(tmp_path: Path) -> None:
    class Last(Callback):
        def on_step(self, run: RunView) -> None:
            run.log("last", run.env_steps)

    run = trained(small({"log.every_steps": 10_000}), tmp_path, callbacks=[Last()])
    assert rows(run.path)[-1]["kind"] == "end"
    assert rows(run.path)[-1]["callback.last"] == run.status["env_steps"]
