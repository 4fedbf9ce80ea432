"""What evaluations change while a run goes on, and what renews itself: it acts, is told, and survives being cut."""

import io
import json
import signal
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qfleet import train
from qfleet.build.components import Components
from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.build.make import make_components, make_fresh
from qfleet.build.worlds import make_train_world
from qfleet.errors import UsageError
from qfleet.learn import ReplaySource
from qfleet.nets.layers import Noisy
from qfleet.plan import check, make_plan
from qfleet.training.evaluator import Evaluator
from qfleet.training.plateau_control import Adjustment, PlateauControl
from qfleet.training.train_state import TrainState
from qfleet.watch import make_watcher, read_rows
from tests.support.command_server import CommandServer
from tests.support.run_fixtures import Reference
from tests.support.runs import (
    ACTOR,
    LSTM,
    RANDOM,
    Settings,
    checkpoints,
    events,
    hashes,
    resumed,
    rows,
    same,
    small,
    train_arguments,
    trained,
    until,
)

# The score of so short a run hardly moves, so that patience runs out soon and several times.
JUDGED: Settings = {"eval.every_steps": 50, "eval.episodes": 3, "eval.test_episodes": 2}
RATE: Settings = {**JUDGED, "steer.learning_rate.type": "plateau", "steer.learning_rate.patience": 1}
BATCH: Settings = {
    **JUDGED,
    "steer.batch.type": "grow",
    "steer.batch.patience": 1,
    "steer.batch.largest": 50,
}
STOP: Settings = {**JUDGED, "steer.stop_patience": 2}
RESET: Settings = {"algo.reset.type": "periodic", "algo.reset.every_updates": 20}
ANNEAL: Settings = {"algo.anneal.type": "exponential", "algo.anneal.updates": 15, "algo.n_step": 2}


def told(run: Path, kind: str) -> list[Settings]:
    """The rows of one kind."""
    return [row for row in rows(run) if row["kind"] == kind]


def one(run: Path, field: str) -> list[Any]:
    """One field of every progress row."""
    return [row[field] for row in told(run, "progress")]


# Counting


@pytest.fixture
def components() -> Iterator[Components]:
    changes = {**RATE, **BATCH, **STOP, "steer.learning_rate.patience": 2, "optim.learning_rate": 1e-3}
    changes |= {"steer.learning_rate.factor": 0.1, "steer.learning_rate.floor": 2e-5, "steer.stop_patience": 4}
    plan = small({**changes, "runtime.device": "cpu", "until.steps": 400})
    made = make_components(plan, make_train_world(plan))
    made.learner.updates = 1
    yield made
    made.close()


def test_only_a_strictly_better_score_resets_patience(components: Components) -> None:
    steering = PlateauControl(components, TrainState())
    acts = [[act.setting for act in steering.adjust(score)] for score in (5.0, 5.0, 4.0, 6.0, 6.0, 1.0)]
    rate, batch = "optim.learning_rate", "algo.batch_size"
    assert acts == [[], [batch], [rate, batch], [], [], [rate]]
    assert steering.train_state.stale == 2
    assert not steering.gave_up()
    steering.adjust(5.9)
    steering.adjust(6.0)
    assert steering.gave_up()


def test_the_rate_falls_to_its_floor_and_the_batch_grows_to_its_largest(components: Components) -> None:
    steering = PlateauControl(components, TrainState())
    acts = [act for score in [1.0] * 12 for act in steering.adjust(score)]
    found = [(act.before, act.after) for act in acts if act.setting == "optim.learning_rate"]
    assert found == [(1e-3, pytest.approx(1e-4)), (pytest.approx(1e-4), 2e-5)]
    assert [(act.before, act.after) for act in acts if act.setting == "algo.batch_size"] == [(16, 32), (32, 50)]
    assert components.learner.learning_rate == components.learner.current_rate() == 2e-5
    assert isinstance(components.batch_source, ReplaySource)
    assert components.batch_source.batch_size == 50
    assert components.batch_source.limiter.ratio == Fraction(5, 16)


def test_scores_before_the_first_update_do_not_count(components: Components) -> None:
    steering = PlateauControl(components, TrainState())
    components.learner.updates = 0
    assert [steering.adjust(9.0) for _ in range(9)] == [[]] * 9
    assert steering.train_state == TrainState()


def test_the_text_of_an_adjustment() -> None:
    assert Adjustment("algo.batch_size", 32, 64, 1).text == "algo.batch_size 32 -> 64: no better score in 1 evaluation"
    text = "optim.learning_rate 0.001 -> 0.0001: no better score in 3 evaluations"
    assert Adjustment("optim.learning_rate", 1e-3, 1e-4, 3).text == text


# Acting, and telling


def test_a_lower_rate_is_used_and_reported(tmp_path: Path) -> None:
    screen = io.StringIO()
    run = trained(small(RATE), tmp_path, watcher=make_watcher("plain", screen)).path
    acts = told(run, "steer")
    assert len(acts) >= 2
    assert [act["setting"] for act in acts] == ["optim.learning_rate"] * len(acts)
    assert acts[0]["before"] == 2 * acts[0]["after"] == acts[1]["before"] * 2
    assert [event["after"] for event in events(run, "steer")] == [act["after"] for act in acts]
    assert events(run, "warning") == []
    assert f"at {acts[0]['env_steps']} steps: optim.learning_rate 0.002 -> 0.001: no better score" in screen.getvalue()
    for row in told(run, "progress"):
        before = [act["after"] for act in acts if act["env_steps"] < row["env_steps"]]
        assert row["learning_rate"] == (before[-1] if before else 0.002)


def test_the_live_screen_shows_a_lower_rate(tmp_path: Path) -> None:
    screen = io.StringIO()
    trained(small(RATE), tmp_path, watcher=make_watcher("live", screen))
    assert "optim.learning_rate 0.002 -> 0.001: no better score in 1 evaluation" in screen.getvalue()


def test_a_lower_rate_changes_what_is_learned(tmp_path: Path, reference: Reference) -> None:
    run, plain = trained(small(RATE), tmp_path).path, reference(JUDGED).path
    first = told(run, "steer")[0]["env_steps"]
    early, late = ([row["loss"] for row in told(at, "progress")] for at in (run, plain))
    place = next(at for at, row in enumerate(told(run, "progress")) if row["env_steps"] > first + 30)
    assert early[: place - 1] == late[: place - 1]
    assert early[place:] != late[place:]


def test_a_larger_batch_keeps_the_number_of_updates(tmp_path: Path, reference: Reference) -> None:
    run, plain = trained(small(BATCH), tmp_path), reference(JUDGED)
    assert [act["after"] for act in told(run.path, "steer")] == [32, 50]
    assert one(run.path, "batch_size")[-1] == 50
    assert run.status["updates"] == plain.status["updates"] == int(Fraction(5, 16) * (run.status["env_steps"] - 40))


def test_patience_that_never_runs_out_changes_no_number(tmp_path: Path, reference: Reference) -> None:
    much: Settings = {"steer.learning_rate.patience": 99, "steer.batch.patience": 99, "steer.stop_patience": 99}
    run = trained(until(small({**RATE, **BATCH, **much, "until.steps": 6_000}), 300), tmp_path).path
    assert told(run, "steer") == []
    assert hashes(checkpoints(run)[-1]) == hashes(checkpoints(reference(JUDGED).path)[-1])


def test_plateau_control_never_uses_test_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    changes = {**RATE, **BATCH}
    plain = reference(changes).path

    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("a test seed was looked at")

    monkeypatch.setattr(Evaluator, "test", refuse)
    run = trained(small({**changes, "eval.test_episodes": 0}), tmp_path).path
    assert told(run, "steer") == told(plain, "steer") != []
    assert hashes(checkpoints(run)[-1]) == hashes(checkpoints(plain)[-1])


def test_test_episodes_are_not_those_that_validation_has_seen(tmp_path: Path) -> None:
    run = trained(small({**JUDGED, "eval.episodes": 8, "eval.test_episodes": 8}), tmp_path)
    found = {row["split"]: row["returns"] for row in run.metrics if row["kind"] == "eval"}
    assert len(found["validation"]) == len(found["test"]) == 8
    assert found["validation"] != found["test"]


# Giving up


def test_a_run_that_no_longer_improves_is_done(tmp_path: Path, reference: Reference) -> None:
    run = trained(small(STOP), tmp_path)
    found, whole = run.status, reference(JUDGED)
    assert (found["state"], found["exit_code"]) == ("done", 0)
    assert found["reason"] == "no better validation score within steer.stop_patience=2"
    assert found["env_steps"] < 300
    assert found["score"]["split"] == "test"
    (stop,) = told(run.path, "steer")
    scores = [row["mean"] for row in told(run.path, "eval") if row["split"] == "validation"]
    assert stop["text"] == f"stopping: no score above {max(scores):g} in 2 evaluations"
    assert [event["setting"] for event in events(run.path, "steer")] == ["steer.stop_patience"]
    # Asked to go on, it does, and ends as if it had never been patient.
    assert resumed(run).status["reason"] == found["reason"]
    more = resumed(run, steps=300)
    assert more.status["reason"] == "reached until.steps=300"
    assert hashes(checkpoints(more.path)[-1]) == hashes(checkpoints(whole.path)[-1])


def test_a_reached_score_ends_a_run_before_patience_does(tmp_path: Path) -> None:
    run = trained(small({**STOP, "until.score": 1.0}), tmp_path)
    assert run.status["reason"] == "validation interval is above until.score=1"


# Renewal


def test_resets_are_reported_and_counted(tmp_path: Path) -> None:
    run = trained(small(RESET), tmp_path).path
    assert [(row["number"], row["updates"]) for row in told(run, "reset")] == [(at, 20 * at) for at in (1, 2, 3, 4)]
    assert [event["text"] for event in events(run, "reset")] == [f"reset {at} of the network" for at in (1, 2, 3, 4)]
    for row in told(run, "progress"):
        assert row["resets"] == row["updates"] // 20


def test_the_seed_decides_the_fresh_weights(tmp_path: Path) -> None:
    whole = {**RESET, "algo.reset.keep": 0}
    plans = [until(small(changes), 104) for changes in (whole, whole, {**whole, "seed": 1}, {})]
    runs = [trained(plan, tmp_path) for plan in plans]
    assert runs[0].status["updates"] == 20  # just now
    nets = [run.policy.net.state_dict() for run in runs]
    name = "head.actions.out.weight"
    assert torch.equal(nets[0][name], nets[1][name])
    assert not any(torch.equal(nets[0][name], net[name]) for net in nets[2:])


def test_no_reset_goes_back_to_weights_there_were_before(components: Components) -> None:
    make = make_fresh(components.plan, components.spec, NO_CUSTOM_PARTS, 0)
    name = "head.actions.out.weight"
    first, second, again = (make(number).state_dict()[name] for number in (1, 2, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, components.policy.net.state_dict()[name])


def test_a_torso_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    torso = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    own = {**RESET, "net.torso.type": None, "net.torso.sizes": None}
    with pytest.raises(UsageError) as caught:
        train(small(own), out=tmp_path, torso=torso)
    assert str(caught.value) == (
        "algo.reset.keep=0.5 does not go with a torso of your own\n"
        "A reset moves the torso towards fresh weights, and only your own code could make these.\n"
        "Set algo.reset.keep=1: then only the head begins anew."
    )
    run = trained(small({**own, "algo.reset.keep": 1}), tmp_path, torso=torso)
    assert len(told(run.path, "reset")) == 4


def test_annealed_n_step_and_discount_are_in_the_rows(tmp_path: Path) -> None:
    run = trained(small({**RESET, **ANNEAL}), tmp_path).path
    assert {2, 3, 5, 7} <= set(one(run, "n_step"))
    for row in told(run, "progress"):
        since = row["updates"] % 20
        left = max(0.0, 1 - since / 15)
        assert row["n_step"] == round(10**left * 2 ** (1 - left))
        assert row["discount"] == pytest.approx(1 - 0.03**left * 0.01 ** (1 - left))


# Cut in two

SPECTRAL: Settings = {"net.spectral_norm": True, "net.torso.sizes": (16, 16)}
FRESH: Settings = {
    "replay.type": "fresh",
    "replay.rows": 8,
    "replay.minibatches": 4,
    "replay.capacity": None,
    "replay.samples_per_insert": None,
    "algo.rule.type": "max",
    "algo.batch_size": None,
    "algo.learn_start_steps": None,
    "algo.target.type": None,
    "algo.target.every_updates": None,
    "optim.decay_updates": 60,
}
CELLS: dict[str, Settings] = {
    "rate": RATE,
    "batch": BATCH,
    "both": {**RATE, **BATCH, "replay.sampler.type": "prioritized"},
    "decay": {"optim.decay_updates": 90},
    "reset": {**RESET, "algo.reset.keep": 0.5},
    "head": {**RESET, "algo.reset.keep": 1, "optim.type": "radam"},
    "anneal": {**ANNEAL, **ACTOR},
    "cycles": {**RESET, **ANNEAL, **ACTOR, **SPECTRAL},
    "memory": {**RESET, **ANNEAL, **ACTOR, **LSTM},
    "random": {**RESET, **RANDOM, **RATE},
    "fresh": {**RESET, **FRESH, **RATE},
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_stop_at_an_adjustment_changes_nothing(cell: str, tmp_path: Path, reference: Reference) -> None:
    whole = reference(CELLS[cell]).path
    acted = [row["env_steps"] for row in rows(whole) if row["kind"] in ("steer", "reset")]
    for steps in {*acted[:1], 171}:
        run = trained(until(small(CELLS[cell]), steps), tmp_path / str(steps))
        assert same(resumed(run, steps=300).path, whole)
    assert acted or cell in ("decay", "anneal")


class Killed(BaseException):
    """Stands for a process that is gone at once."""


@pytest.mark.parametrize("cell", ["both", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_kill_right_after_an_adjustment_changes_nothing(cell: str, tmp_path: Path, reference: Reference) -> None:
    whole, number = reference(CELLS[cell]).path, 0
    for kind in ("steer", "reset"):
        for number in range(min(2, len(told(whole, kind)))):
            left = [number]

            def die(row: Settings, kind: str = kind, left: list[int] = left) -> None:
                left[0] -= row["kind"] == kind
                if left[0] < 0:
                    raise Killed

            out = tmp_path / f"{kind}{number}"
            with pytest.raises(Killed):
                train(small(CELLS[cell]), out=out, callbacks=[die])
            run = next(out.iterdir())
            assert same(resumed(run).path, whole)
    assert number > 0


@pytest.mark.chaos
def test_sigkill_right_after_an_adjustment(tmp_path: Path, command_server: CommandServer, reference: Reference) -> None:
    changes = {**CELLS["both"], **RESET, "until.steps": 1_500, "eval.every_steps": 100}
    whole = reference(changes).path
    child, limit = command_server.start(*train_arguments(tmp_path, changes)), time.monotonic() + 60
    while time.monotonic() < limit and child.code is None:
        found = [file for file in tmp_path.glob("*/metrics.jsonl") if any_steer(file)]
        if found:
            break
        time.sleep(0.001)
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.output()
    run = next(tmp_path.iterdir())
    assert same(resumed(run).path, whole)


def any_steer(file: Path) -> bool:
    return any(row["kind"] == "steer" for row in read_rows(file))


# Many updates per step, and looking without disturbing


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("ratio", [2, 4])
def test_several_updates_per_step_are_counted_exactly(ratio: int, tmp_path: Path) -> None:
    run = trained(small({"replay.samples_per_insert": 16 * ratio, "save.keep": 100}), tmp_path)
    found = [json.loads((at / "state.json").read_text())["line"] for at in checkpoints(run.path)]
    assert len(found) >= 6
    for state in found:
        assert state["updates"] == ratio * max(0, state["actor"]["steps"] - 40)
    assert run.status["updates"] == ratio * (run.status["env_steps"] - 40) > 0


@pytest.mark.parametrize("changes", [RANDOM, {**LSTM, "net.noisy": True}, SPECTRAL], ids=["random", "lstm", "spectral"])
def test_counting_dormant_units_often_changes_no_number(changes: Settings, tmp_path: Path) -> None:
    often, seldom = (
        trained(small({**changes, "log.every_steps": every}), tmp_path / str(every)).path for every in (5, 150)
    )
    for name in ("model.safetensors", "optim.safetensors"):
        assert hashes(checkpoints(often)[-1])[name] == hashes(checkpoints(seldom)[-1])[name]
    shares = one(often, "dormant")
    assert len(shares) >= 50
    assert shares[0] is None
    assert all(0.0 <= share <= 1.0 for share in shares if share is not None)
    assert shares[-1] is not None
    assert one(seldom, "dormant") == [
        row["dormant"]
        for row in told(often, "progress")
        if row["env_steps"] in {row["env_steps"] for row in told(seldom, "progress")}
    ]


def test_dormant_units_are_counted_without_noise_which_is_restored() -> None:
    plan = small({"net.noisy": True, "runtime.device": "cpu"})
    components = make_components(plan, make_train_world(plan))
    layers = [layer for layer in components.policy.net.modules() if isinstance(layer, Noisy)]
    try:
        obs, rng = components.actor.world.reset().obs, np.random.default_rng(0)
        for _ in range(2):
            components.policy.act(obs, epsilon=0.1, rng=rng)
            assert [layer.active for layer in layers] == [True] * len(layers) != []
            components.dormant()
            assert not any(layer.active for layer in layers)
    finally:
        components.close()


def test_dropout_is_for_learning_only() -> None:
    plan = small({"net.dropout": 0.5, "runtime.device": "cpu"})
    components = make_components(plan, make_train_world(plan))
    try:
        obs = components.actor.world.reset().obs
        drawn = torch.get_rng_state()
        acted, _ = components.policy.forward(obs)
        assert (components.policy.forward(obs)[0] == acted).all()
        assert torch.equal(torch.get_rng_state(), drawn)
        shown = torch.from_numpy(obs)
        assert not torch.equal(components.learner.net(shown), components.learner.net(shown))
        assert torch.equal(components.learner.target(shown), components.learner.target(shown))
    finally:
        components.close()


# Settings that are refused, word for word

PLATEAU: Settings = {"steer.learning_rate.type": "plateau"}
GROW: Settings = {"steer.batch.type": "grow"}
BLIND = "Steering uses validation scores, and there are none with 0 episodes."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**PLATEAU, "eval.episodes": 0},
            "steer.learning_rate.type=plateau (Python) does not go with eval.episodes=0 (Python)\n"
            f"{BLIND}\nSet eval.episodes to 20 or so, or leave steer.learning_rate.type off.",
        ),
        (
            {**GROW, "eval.episodes": 0},
            "steer.batch.type=grow (Python) does not go with eval.episodes=0 (Python)\n"
            f"{BLIND}\nSet eval.episodes to 20 or so, or leave steer.batch.type off.",
        ),
        (
            {"steer.stop_patience": 3, "eval.episodes": 0},
            "steer.stop_patience=3 (Python) does not go with eval.episodes=0 (Python)\n"
            f"{BLIND}\nSet eval.episodes to 20 or so, or leave steer.stop_patience out.",
        ),
        (
            {**GROW, "replay.type": "fresh", "algo.rule.type": "max"},
            "steer.batch.type=grow (Python) does not go with replay.type=fresh (Python)\n"
            "Fresh experience is cut into replay.minibatches parts: how large they are follows from that.\n"
            "Use replay.type=buffer, or leave steer.batch.type off.",
        ),
        (
            {**PLATEAU, "steer.learning_rate.floor": 0.5},
            "steer.learning_rate.floor=0.5 (Python) is not below optim.learning_rate=0.0005 (defaults for X-v0)\n"
            "The learning rate is lowered towards the floor, so it must start above it.\n"
            "Set steer.learning_rate.floor to 5e-06 or so.",
        ),
        (
            {**GROW, "steer.batch.largest": 64},
            "steer.batch.largest=64 (Python) is not above algo.batch_size=64 (default)\n"
            "The batch grows up to the largest, so it must start below it.\n"
            "Set steer.batch.largest to 256 or so.",
        ),
        (
            {**GROW, "replay.capacity": 1_000},
            "steer.batch.largest=1024 (default) is more than replay.capacity=1000 (Python)\n"
            "A batch is drawn from the replay, which would never hold that many.\n"
            "Set steer.batch.largest to 1000 or less.",
        ),
        (
            {"steer.stop_patience": 20},
            "steer.stop_patience=20 (Python) never runs out: the run makes 20 evaluations\n"
            "The first score is the one that others are compared with, so it takes one evaluation more.\n"
            "Lower steer.stop_patience or eval.every_steps=5000, or raise until.steps.",
        ),
        (
            {**PLATEAU, "until.steps": 15_000},
            "steer.learning_rate.patience=3 (default) never runs out: the run makes 3 evaluations\n"
            "The first score is the one that others are compared with, so it takes one evaluation more.\n"
            "Lower steer.learning_rate.patience or eval.every_steps=5000, or raise until.steps.",
        ),
        (
            {"steer.batch.largest": 99},
            "steer.batch.largest=99 has no effect (Python)\n"
            "steer.batch.type is off (default); largest belongs to grow.\n"
            "Add steer.batch.type=grow, or leave steer.batch.largest out.",
        ),
        (
            {**PLATEAU, "steer.learning_rate.factor": 1.0},
            "steer.learning_rate.factor=1.0 is not valid (Python)\n"
            "steer.learning_rate.factor must be a number above 0 and below 1.\n"
            "Write for example steer.learning_rate.factor=0.5",
        ),
    ],
)
def test_what_is_refused(settings: Settings, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan("X-v0", overrides=settings)
    assert str(caught.value) == message


def test_a_shortened_run_may_keep_a_default_patience() -> None:
    patient = make_plan("X-v0", overrides={**PLATEAU, "steer.stop_patience": 9})
    check(until(patient, 5_000))
