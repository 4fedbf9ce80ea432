"""Every variant, and every two choices together, end bit-equal whether or not they were cut in two."""

import json
from pathlib import Path

import pytest

from qfleet.errors import UsageError
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, Settings, checkpoints, resumed, same, small, trained, until
from tests.support.variants import (
    ACTOR,
    APART,
    FRESH,
    IQN,
    NOISY,
    PQN,
    R2D2,
    SPECTRAL,
    VARIANTS,
    all_meetings,
    meetings,
    pairwise,
    settings_of,
)

PAIRWISE = {"-".join(chosen.values()): chosen for chosen in pairwise()}
JOINT: Settings = {"net.decoupled": True, "env.bins": 3}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_that_was_cut_in_two_ends_as_if_it_had_not(variant: str, tmp_path: Path) -> None:
    changes = {**JUDGED, **VARIANTS[variant]}
    whole = trained(small(changes), tmp_path / "whole")
    assert whole.status["updates"] > 20
    for steps in (117, 238):
        run = trained(until(small(changes), steps), tmp_path / str(steps))
        assert same(resumed(run, steps=300).path, whole.path)


@pytest.mark.parametrize("cell", PAIRWISE)
def test_every_two_choices_together(cell: str, tmp_path: Path) -> None:
    plan = small({**settings_of(PAIRWISE[cell]), "until.steps": 200})
    whole = trained(plan, tmp_path / "whole")
    assert whole.status["updates"] > 10
    run = trained(until(plan, 101), tmp_path / "part")
    assert same(resumed(run, steps=200).path, whole.path)


def test_every_valid_pair_of_variants_is_covered() -> None:
    assert not all_meetings().difference(*(meetings(chosen) for chosen in PAIRWISE.values()))
    for meeting in APART:
        with pytest.raises(UsageError, match="does not go with"):
            small(settings_of(dict(meeting)))


@pytest.mark.parametrize(
    ("env_id", "changes"),
    [
        ("Pendulum-v1", JOINT),
        ("toys/BoxAction-v0", {**JOINT, **NOISY, "net.dueling": True, "algo.rule.type": "munchausen"}),
        ("toys/BoxAction-v0", {**JOINT, **ACTOR, "algo.n_step": 3, "algo.rescale": True}),
        ("toys/BoxAction-v0", {**JOINT, **FRESH, **SPECTRAL, "net.dropout": 0.1}),
        ("toys/Masked-v0", R2D2),
        ("toys/Masked-v0", {**IQN, **NOISY, **ACTOR, "algo.rule.type": "munchausen"}),
        ("toys/Masked-v0", PQN),
        ("Acrobot-v1", R2D2),
    ],
)
def test_other_environments_resume_exactly_too(
    env_id: str, changes: Settings, tmp_path: Path, reference: Reference
) -> None:
    run = trained(until(small(changes, env_id), 170), tmp_path)
    assert same(resumed(run, steps=300).path, reference(changes, env_id).path)


@pytest.mark.parametrize("variant", ["r2d2", "pqn", "rainbow"])
def test_many_stops_equal_none(variant: str, tmp_path: Path, reference: Reference) -> None:
    changes = {**JUDGED, **VARIANTS[variant]}
    run = trained(until(small(changes), 20), tmp_path)
    for steps in range(45, 301, 25):
        run = resumed(run, steps=steps)
    assert same(resumed(run, steps=300).path, reference(changes).path)


@pytest.mark.usefixtures("every_save")
def test_fresh_experience_is_learned_from_block_by_block(tmp_path: Path) -> None:
    run = trained(small({**PQN, "save.keep": 100}), tmp_path)
    counts = []
    for checkpoint in checkpoints(run.path):
        state = json.loads((checkpoint / "state.json").read_text())["line"]
        rows = state["feed"]["replay"]["row"]
        # A block is 8 rows and the one after; it is learned from in the turn after the one that completed it.
        counts.append((rows, state["updates"]))
        assert state["updates"] == 2 * 4 * max(0, (rows - 2) // 8)
    assert len(counts) >= 6
    assert counts[-1][1] > 0
