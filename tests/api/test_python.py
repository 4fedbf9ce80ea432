"""qfleet as a library: objects in, objects out, and nothing in the process left changed."""

import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet import Plan, Run, load, resume, train
from qfleet.build.memory_check import available_bytes
from qfleet.errors import StorageError, UsageError
from qfleet.nets import state_arrays
from qfleet.save import hold_run
from qfleet.testing.toys import Random
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, checkpoints, events, resumed, rows, same, settings, small, status, trained, until

TELLING = "toys/Random-v0"


class Torso(nn.Module):
    """A torso of the user's own; its weights depend on nothing but the call of its constructor."""

    def __init__(self, inputs: int = 4, features: int = 12) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layer = nn.Linear(inputs, features)

    def forward(self, obs: Tensor) -> Tensor:  # [N, 4] -> [N, 12]
        return torch.tanh(self.layer(obs))


def own_torso(**changes: Any) -> Plan:
    return small({"net.torso.type": "own", "net.torso.sizes": None, **changes})


def weights(run: Run) -> dict[str, Any]:
    return state_arrays(run.policy.net)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# A run as an object


def test_a_run_has_status_metrics_and_result(reference: Reference) -> None:
    run = reference(JUDGED, TELLING)
    assert repr(run).startswith(f"Run({str(run.path)!r}: done, score ")
    assert run.exit_code == 0
    assert run.metrics[-1]["kind"] == "end"
    result = run.result()
    assert result is not None
    # The policy that is handed back is the one whose score was reported.
    row = run.evaluate(episodes=4)
    assert (row["kind"], row["split"], row["episodes"]) == ("eval", "test", 4)
    assert row["mean"] == result["mean"]
    action, _, values = run.policy.act(np.zeros((3, 2), np.float32))
    assert action.tolist() == values.argmax(1).tolist()


def test_a_plan_from_python_is_the_plan_of_the_folder(tmp_path: Path) -> None:
    run = trained(Plan.of("CartPole-v1", overrides={**settings(), "until.steps": 80}), tmp_path)
    assert (run.plan.env.id, run.plan.until.steps, run.plan.runtime.device) == ("CartPole-v1", 80, "cpu")
    assert load(run.path).plan == run.plan


def test_loading_gives_the_best_policy_or_the_latest(tmp_path: Path) -> None:
    for seed in range(20):
        run = trained(small({**JUDGED, "seed": seed}, TELLING), tmp_path)
        if run.status["best"]["env_steps"] != run.status["env_steps"]:
            break
    best, latest = load(run.path), load(run.path, which="latest")
    assert equal(weights(best), weights(run))
    assert not equal(weights(latest), weights(best))
    assert best.evaluate(4)["mean"] == run.evaluate(4)["mean"]
    with pytest.raises(UsageError, match="which='worst'"):
        load(run.path, which="worst")


def test_runs_are_found_by_name(tmp_path: Path) -> None:
    trained(until(small(), 60), tmp_path, name="mine")
    assert load("mine", out=tmp_path).path == tmp_path / "mine"
    assert resumed(tmp_path / "mine", steps=90).status["env_steps"] >= 90


# Own objects


def test_an_own_torso_is_trained_saved_resumed_and_loaded(tmp_path: Path) -> None:
    whole = trained(own_torso(), tmp_path / "whole", torso=Torso())
    half = trained(until(own_torso(), 150), tmp_path / "half", torso=Torso())
    assert same(resumed(half, steps=300, torso=Torso()).path, whole.path)
    assert equal(weights(load(whole.path, torso=Torso())), weights(whole))


def test_the_module_that_was_given_is_left_as_it_was(tmp_path: Path) -> None:
    torso = Torso()
    before = state_arrays(torso)
    one = trained(own_torso(), tmp_path / "1", torso=torso)
    assert equal(state_arrays(torso), before)
    assert same(trained(own_torso(), tmp_path / "2", torso=torso).path, one.path)


def test_a_plan_with_an_own_torso_needs_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"net\.torso\.type is `own`, but no torso was given"):
        train(own_torso(), out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    run = trained(until(own_torso(), 60), tmp_path, torso=Torso())
    for call in (resume, load):
        with pytest.raises(UsageError, match=r"torso tests\.api\.test_python:Torso[\s\S]*Pass them again"):
            call(run.path)
    assert status(run.path)["state"] == "done"


@pytest.mark.parametrize("torso", [nn.Linear(7, 3), nn.Unflatten(1, (2, 2))])
def test_a_torso_that_does_not_fit_is_refused_before_anything_is_made(torso: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torso"):
        train(own_torso(), out=tmp_path, torso=torso)
    assert list(tmp_path.iterdir()) == []


class Walk(Random):
    """An environment of the user's own that counts its copies."""

    alive = 0

    def __init__(self) -> None:
        super().__init__()
        Walk.alive += 1

    def close(self) -> None:
        Walk.alive -= 1


def test_an_own_environment_is_an_object_too(tmp_path: Path) -> None:
    plan = small({**JUDGED}, "MyWalk-v0")
    whole = trained(plan, tmp_path / "whole", env=Walk)
    half = trained(until(plan, 150), tmp_path / "half", env=Walk)
    assert same(resumed(half, steps=300, env=Walk).path, whole.path)
    assert load(whole.path, env=Walk).evaluate(4)["mean"] == whole.result()["mean"]  # type: ignore[index]
    assert Walk.alive == 0
    with pytest.raises(UsageError, match="MyWalk-v0"):
        resume(half.path)


def test_worlds_are_closed_after_every_kind_of_failure(tmp_path: Path) -> None:
    plan = small(env_id="MyWalk-v0")
    run = trained(until(plan, 60), tmp_path, env=Walk)
    with pytest.raises(UsageError, match="memory"):
        train(small({"replay.capacity": 10**12}, "MyWalk-v0"), out=tmp_path, env=Walk)
    with pytest.raises(UsageError, match="no run"):
        train(plan, out=tmp_path, env=Walk, weights_from="nothing")
    with hold_run(run.path), pytest.raises(StorageError):
        resume(run.path, env=Walk)
    with pytest.raises(UsageError, match="no torso was given"):
        train(small({"net.torso.type": "own", "net.torso.sizes": None}, "MyWalk-v0"), out=tmp_path, env=Walk)
    with pytest.raises(ZeroDivisionError):
        train(plan, out=tmp_path, env=Walk, callbacks=[lambda row: 1 // 0])
    assert Walk.alive == 0


# Callbacks


def test_callbacks_see_every_row_and_may_stop_the_run(tmp_path: Path, reference: Reference) -> None:
    seen: list[dict[str, Any]] = []

    def callback(row: dict[str, Any]) -> bool:
        seen.append(row)
        return bool(row["kind"] == "progress" and row["env_steps"] > 120)

    run = trained(small(JUDGED), tmp_path, callbacks=[callback])
    assert seen == run.metrics
    assert (run.status["state"], run.exit_code, run.status["reason"]) == ("stopped", 75, "stopped by a callback")
    assert 120 < run.status["env_steps"] < 150
    assert same(resumed(run).path, reference(JUDGED).path)


def test_a_callback_that_raises_ends_the_run_which_can_still_be_resumed(tmp_path: Path, reference: Reference) -> None:
    def callback(row: dict[str, Any]) -> None:
        if row["env_steps"] > 200:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(small(), out=tmp_path, callbacks=[callback])
    run = next(tmp_path.iterdir())
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 1)
    assert same(resumed(run).path, reference().path)


# Nothing is left changed


def test_nothing_global_is_touched(tmp_path: Path) -> None:
    def world() -> tuple[Any, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        generators = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
        settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
        return handlers, generators, torch.get_num_threads(), settings

    torch.set_num_threads(2)
    try:
        before = world()
        threads = threading.active_count()
        run = trained(small({**JUDGED, "runtime.threads": 1}), tmp_path)
        run.evaluate(2)
        load(run.path)
        assert world() == before
        assert threading.active_count() == threads
    finally:
        torch.set_num_threads(1)


def test_the_callers_randomness_does_not_matter(tmp_path: Path, reference: Reference) -> None:
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert same(trained(small(), tmp_path).path, reference().path)


def test_a_run_outside_the_main_thread(tmp_path: Path, reference: Reference) -> None:
    ended: list[Run] = []
    thread = threading.Thread(target=lambda: ended.append(train(small(), out=tmp_path)))
    thread.start()
    thread.join(60)
    assert same(ended[0].path, reference().path)


# Weights of another run


def test_starting_from_another_runs_weights(tmp_path: Path) -> None:
    source = trained(small(), tmp_path, name="source")
    run = trained(until(small({"seed": 3}), 20), tmp_path, weights_from="source")
    assert equal(weights(run), weights(source))
    first = checkpoints(run.path)[0]
    assert first.name == "step_000000000000"
    assert run.status["updates"] == 0


@pytest.mark.parametrize("sizes", [(8,), (16, 16), (1,)])
def test_weights_that_do_not_fit_are_refused_before_anything_is_made(sizes: tuple[int, ...], tmp_path: Path) -> None:
    trained(until(small({"net.torso.sizes": sizes}), 20), tmp_path / "source", name="source")
    with pytest.raises(UsageError, match="source") as caught:
        train(small(), out=tmp_path / "out", weights_from=tmp_path / "source" / "source")
    assert "net" in caught.value.fix
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


# Runs that name code


def write_env(folder: Path) -> str:
    """A file with an environment that leaves a mark when it is imported."""
    file = folder / "mine.py"
    file.write_text(
        "from pathlib import Path\nfrom qfleet.testing.toys import Random\n"
        f"Path({str(folder / 'mark')!r}).touch()\nclass Mine(Random):\n    pass\n"
    )
    return f"{file}:Mine"


def test_code_that_a_foreign_run_names_is_not_imported(tmp_path: Path) -> None:
    env_id = write_env(tmp_path)
    run = trained(until(small(env_id=env_id), 60), tmp_path / "out")
    assert resumed(run, steps=90).exit_code == 0  # this user's own command made it
    assert load(run.path).evaluate(1)["episodes"] == 1
    foreign = Path(shutil.copytree(run.path, tmp_path / "elsewhere"))
    (tmp_path / "mark").unlink()
    for call in (resume, load):
        with pytest.raises(UsageError, match="names code to run") as caught:
            call(foreign)
        assert "--trust-env" in caught.value.fix
    assert not (tmp_path / "mark").exists()
    assert resume(foreign, steps=120, trust_env=True).exit_code == 0


def test_a_plan_that_was_changed_afterwards_is_foreign_too(tmp_path: Path) -> None:
    run = trained(until(small(env_id=write_env(tmp_path)), 60), tmp_path / "out")
    file = run.path / "run.toml"
    file.write_text(file.read_text().replace("mine.py:Mine", "other.py:Mine"))
    with pytest.raises(UsageError, match="names code to run"):
        resume(run.path)


def test_the_key_is_private(tmp_path: Path, own_home: Path) -> None:
    trained(until(small(env_id=write_env(tmp_path)), 20), tmp_path / "out")
    (file,) = own_home.rglob("trust.key")
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


# Replay that was not saved, memory that is limited


def test_without_a_saved_replay_the_run_refills_and_says_so(tmp_path: Path) -> None:
    run = trained(until(small({"save.replay": "none"}), 150), tmp_path)
    assert not list(checkpoints(run.path)[-1].glob("replay*"))
    updates, steps = run.status["updates"], run.status["env_steps"]
    ended = resume(run.path, steps=300)
    assert any("replay was not saved: refilling 40 steps" in event["text"] for event in events(run.path, "warning"))
    assert ended.status["exact"] is False
    # No update in the first 40 steps, and those that were missed are not made up for.
    later = [row for row in rows(run.path) if row["kind"] == "progress" and row["env_steps"] > steps]
    assert later[0]["updates"] == updates
    assert 0 < ended.status["updates"] - updates <= (300 + 4 - steps - 40) * 5 / 16 + 1


def test_the_page_cache_counts_as_free_memory(tmp_path: Path) -> None:
    gib = 2**30
    (tmp_path / "memory.max").write_text(f"{8 * gib}\n")
    (tmp_path / "memory.current").write_text(f"{7 * gib}\n")
    (tmp_path / "memory.stat").write_text(f"anon {gib}\ninactive_file {5 * gib}\nactive_file {gib}\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 * gib // 1024} kB\n")
    assert available_bytes(tmp_path, tmp_path / "meminfo") == 6 * gib
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path / "meminfo") == 64 * gib


def test_gymnasium_ids_registered_by_the_user_need_no_factory(tmp_path: Path) -> None:
    gym.register("OfTheUser-v0", entry_point=lambda **options: Random(**options))
    try:
        assert trained(until(small(env_id="OfTheUser-v0"), 60), tmp_path).exit_code == 0
    finally:
        del gym.registry["OfTheUser-v0"]


def test_a_preset_from_python_names_the_run(tmp_path: Path) -> None:
    short = {"until.steps": 20, "eval.episodes": 0, "eval.test_episodes": 0, "env.num": 4}
    names = [
        train(Plan.of("CartPole-v1", preset, short), out=tmp_path).path.name for preset in (None, "dqn", "pqn-small")
    ]
    assert names == [
        "cartpole-double-n5-0001",
        "cartpole-dqn-0001",
        "cartpole-pqn-0001",
    ]  # env.num is not that preset's
