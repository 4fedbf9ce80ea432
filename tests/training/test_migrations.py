"""Runs of older versions go on; what cannot go on is refused, and nothing of it is changed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qfleet import load, resume
from qfleet.data import Array
from qfleet.errors import UsageError
from qfleet.save import Checkpoints, pack_state, pack_tensors, unpack_state, unpack_tensors
from qfleet.training.checkpoints.checkpointer import decisive_settings
from qfleet.training.checkpoints.migrations import current_layer_name, with_new_settings
from qfleet.watch import read_rows
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, PONG, Settings, checkpoints, hashes, resumed, rows, same, small, status, trained
from tests.support.runs import until as ending
from tests.support.variants import FRESH

# What the first version wrote into a checkpoint.
KNOWN = (
    "algo.(batch_size|discount|explore|learn_start_steps|loss|n_step|rule|target)",
    "env",
    "net.(dueling|head.type|torso)",
    "optim.(clip_norm|eps|learning_rate|type|weight_decay)",
    "replay.(capacity|sampler.(type|alpha|beta|eps)|samples_per_insert)",
    "seed",
)
NEW_STATE = ("learning_rate", "batch_size", "refill", "memory")
NEW_COUNTS = ("skipped_in_a_row", "peak", "stale", "rate_waited", "batch_waited")


def old_name(name: str) -> str:
    """What a layer was called."""
    name = re.sub(r"\.linear\.(weight|bias)$", r".\1", name)
    return re.sub(r"torso\.layers\.([36])\.", lambda found: f"torso.layers.{int(found[1]) * 2 // 3}.", name)


def older(run: Path) -> Path:
    """Every checkpoint as the first version would have written it."""
    stored = Checkpoints(run / "checkpoints")
    for step in stored.steps():
        found = stored.load(step)
        blobs = {name: found.read(name) for name in found.files}
        for name in ("model.safetensors", "optim.safetensors"):
            arrays: dict[str, Array] = unpack_tensors(blobs[name])
            blobs[name] = pack_tensors({old_name(key): value for key, value in arrays.items()})
        state = unpack_state({name: blobs[name] for name in ("state.json", "state.safetensors")})
        for part in (state["line"], state["line"]["feed"], state["line"]["actor"]):
            for name in NEW_STATE:
                part.pop(name, None)
        for name in NEW_COUNTS:
            state["book"].pop(name)
        blobs.update(pack_state(state))
        known = {path: value for path, value in found.meta["plan"].items() if re.match("|".join(KNOWN), path)}
        stored.commit(step, blobs.items(), {**found.meta, "plan": known})
    return run


def without_new_settings(run: Path) -> None:
    """run.toml as the first version wrote it: no sections of later ones."""
    file = run / "run.toml"
    kept = [part for part in re.split(r"(?m)^(?=\[)", file.read_text()) if not re.match(LATER, part)]
    file.write_text("".join(kept))


LATER = r"\[(algo\.(view|bonus|reset|anneal)|net\.memory|replay\.filter|steer|population)"


@pytest.mark.parametrize(
    ("changes", "env_id"),
    [
        (JUDGED, "CartPole-v1"),
        ({"net.torso.sizes": (8, 9, 10), "net.dueling": True, "env.normalize": "both"}, "CartPole-v1"),
        ({"replay.sampler.type": "prioritized", "optim.type": "rmsprop"}, "CartPole-v1"),
        (PONG, "ALE/Pong-v5"),
    ],
)
def test_a_run_of_the_first_version_goes_on_exactly(
    changes: Settings, env_id: str, tmp_path: Path, reference: Reference
) -> None:
    whole = reference(changes, env_id)
    run = older(trained(ending(small(changes, env_id), 90), tmp_path).path)
    without_new_settings(run)
    again = resumed(run, steps=whole.plan.until.steps)
    assert again.status["exact"] is True
    assert load(run, which="best").policy is not None
    mine, yours = hashes(checkpoints(run)[-1]), hashes(checkpoints(whole.path)[-1])
    if changes is JUDGED:  # scores before this version are not among those that it counts, but the best one is
        assert {name for name in mine if mine[name] != yours[name]} <= {"state.json"}
        assert rows(run) == rows(whole.path)
    else:
        assert same(run, whole.path)


def test_fresh_experience_without_action_values_is_discarded(tmp_path: Path) -> None:
    run = trained(ending(small(FRESH), 90), tmp_path).path
    stored = Checkpoints(run / "checkpoints")
    for step in stored.steps():
        found = stored.load(step)
        blobs = {name: found.read(name) for name in found.files}
        state = unpack_state({name: blobs[name] for name in ("state.json", "state.safetensors")})
        del state["line"]["feed"]["told"]
        blobs.update(pack_state(state))
        stored.commit(step, blobs.items(), found.meta)
    again = resumed(run, steps=200)
    assert again.status["state"] == "done"
    assert again.status["exact"] is False
    told = [row["text"] for row in read_rows(run / "events.jsonl") if row["kind"] == "warning"]
    assert any("it is gathered anew" in text for text in told)


def test_settings_that_came_later_had_their_defaults() -> None:
    now = decisive_settings(small())
    before = {path: value for path, value in now.items() if re.match("|".join(KNOWN), path)}
    assert len(before) < len(now)
    found = with_new_settings(before)
    assert {path: found[path] for path in before} == before
    assert (found["algo.view.type"], found["net.memory.type"], found["population.num"]) == ("steps", "off", 1)
    assert with_new_settings({"algo.from_the_future": 1}) == {"algo.from_the_future": 1}


def test_a_torso_of_ones_own_keeps_its_names() -> None:
    assert current_layer_name("torso.layers.0.weight", "own") == "torso.layers.0.weight"
    assert current_layer_name("exp_avg.torso.layers.0.weight", "mlp") == "exp_avg.torso.layers.0.linear.weight"
    assert current_layer_name("torso.layers.4.bias", "nature") == "torso.layers.6.bias"
    assert current_layer_name("head.value.hidden.bias", "own") == "head.value.hidden.linear.bias"


# Refusals


def edit(run: Path, old: str, new: str) -> None:
    """Change run.toml by hand."""
    text = (run / "run.toml").read_text()
    assert text.count(old) == 1
    (run / "run.toml").write_text(text.replace(old, new))


def contents(run: Path) -> dict[str, Any]:
    """Everything a reader looks at."""
    names = ("status.json", "metrics.jsonl", "best.json", "run.toml")
    return {
        "files": {name: (run / name).read_bytes() for name in names if (run / name).exists()},
        "checkpoints": [hashes(folder) for folder in checkpoints(run)],
    }


def test_a_refused_resume_changes_nothing_of_a_run_that_is_done(tmp_path: Path) -> None:
    run = trained(ending(small(JUDGED), 120), tmp_path).path
    edit(run, "n_step = 5", "n_step = 3")
    before = contents(run)
    assert status(run)["state"] == "done"
    with pytest.raises(UsageError, match=r"algo\.n_step=3, but the run was trained with algo\.n_step=5"):
        resume(run, steps=300)
    assert contents(run) == before


def test_a_refused_resume_of_a_killed_run_says_that_it_failed(tmp_path: Path) -> None:
    run = trained(ending(small(), 60), tmp_path).path
    edit(run, "n_step = 5", "n_step = 3")
    killed = {**status(run), "state": "running", "exit_code": None}
    (run / "status.json").write_text(json.dumps(killed))
    with pytest.raises(UsageError):
        resume(run, steps=300)
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 2)


def test_an_end_that_is_past_is_refused(tmp_path: Path, reference: Reference) -> None:
    run = trained(ending(small(), 120), tmp_path)
    before, reached = contents(run.path), run.status["env_steps"]
    with pytest.raises(UsageError) as caught:
        resume(run.path, steps=5)
    assert (caught.value.what, caught.value.fix) == (
        f"--steps 5 is behind {run.path.name}, which has made {reached} steps",
        f"Give more than {reached}, or leave --steps out.",
    )
    assert contents(run.path) == before
    assert resumed(run, steps=120).exit_code == 0  # its own end, which the last step may have passed
    assert same(resumed(run, steps=300).path, reference().path)


# Evaluation

STEERED: Settings = {**JUDGED, "steer.learning_rate.type": "plateau", "steer.learning_rate.patience": 1}
POPULATION: Settings = {**JUDGED, "population.num": 2}


@pytest.mark.parametrize("changes", [STEERED, POPULATION])
def test_evaluations_that_decide_what_is_learned_stay_as_they_are(changes: Settings, tmp_path: Path) -> None:
    run = trained(ending(small(changes), 120), tmp_path).path
    edit(run, "\nepisodes = 3\n", "\nepisodes = 5\n")
    with pytest.raises(UsageError, match=r"eval\.episodes=5, but the run was trained with eval\.episodes=3"):
        resume(run, steps=300)


def test_evaluations_that_only_report_may_change(tmp_path: Path) -> None:
    run = trained(ending(small(JUDGED), 120), tmp_path).path
    edit(run, "\nepisodes = 3\n", "\nepisodes = 5\n")
    assert resume(run, steps=210).status["best"]["episodes"] == 5
    assert "eval.test_episodes" not in decisive_settings(small(STEERED))
