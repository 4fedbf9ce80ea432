"""What a checkpoint may and may not be read as, and how segments are shared."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qfleet import load, resume, train
from qfleet.envs.toys import Random
from qfleet.errors import UsageError
from qfleet.run import keeper
from tests.run.parts import checkpoints, same, small, trained, until


@pytest.mark.usefixtures("every_save")
def test_two_checkpoints_in_a_row_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "segment_rows", lambda bytes_per_row: 8)
    run = trained(small({"replay.capacity": 1_000, "save.keep": 4}), tmp_path)
    folders = checkpoints(run.path)
    linked = 0
    for older, newer in pairwise(folders):
        names = {path.name for path in older.glob("replay/*")} & {path.name for path in newer.glob("replay/*")}
        assert names
        assert all(not (older / "replay" / name).samefile(newer / "replay" / name) for name in names)
        linked += sum((newer / "replay" / name).stat().st_nlink > 1 for name in names)
    assert linked  # but further apart they do
    segment = sorted(folders[-1].glob("replay/*"))[0]
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)  # in place: every checkpoint that shares the file is spoiled, the one before is not
    whole = trained(small({"replay.capacity": 1_000, "save.keep": 4}), tmp_path / "whole")
    with pytest.warns(UserWarning, match="damaged"):
        again = resume(run.path)
    assert same(again.path, whole.path)


class Wider(Random):
    """The same world, shown with one number more."""

    def __init__(self) -> None:
        super().__init__()
        space = self.observation_space
        self.observation_space = type(space)(-np.inf, np.inf, (space.shape[0] + 1,), np.float32)  # type: ignore[index,call-arg]

    def reset(self, **options):  # type: ignore[no-untyped-def]
        obs, info = super().reset(**options)
        return np.append(obs, 0).astype(np.float32), info

    def step(self, action):  # type: ignore[no-untyped-def]
        obs, *rest = super().step(action)
        return np.append(obs, 0).astype(np.float32), *rest


def test_another_environment_is_refused_and_nothing_is_set_aside(tmp_path: Path) -> None:
    run = train(until(small(env_id="toys/Random-v0"), 90), out=tmp_path, env=Random)
    before = [folder.name for folder in checkpoints(run.path)]
    with pytest.raises(UsageError, match="obs="):
        resume(run.path, steps=120, env=Wider)
    assert [folder.name for folder in checkpoints(run.path)] == before
    assert resume(run.path, steps=120, env=Random).exit_code == 0


def test_another_torso_is_refused_and_nothing_is_set_aside(tmp_path: Path) -> None:
    run = train(until(small(), 90), out=tmp_path, torso=nn.Linear(4, 8))
    before = [folder.name for folder in checkpoints(run.path)]
    with pytest.raises(UsageError, match="does not fit"):
        resume(run.path, steps=120, torso=nn.Linear(4, 9))
    assert [folder.name for folder in checkpoints(run.path)] == before


def test_a_replay_that_was_never_saved_is_not_asked_for(tmp_path: Path) -> None:
    run = trained(until(small({"save.replay": "none"}), 90), tmp_path)
    plan = run.path / "run.toml"
    plan.write_text(plan.read_text().replace('replay = "none"', 'replay = "full"'))
    again = resume(run.path, steps=150)
    assert again.status["env_steps"] >= 150
    assert again.status["exact"] is False
    assert not list(run.path.glob("checkpoints/*.corrupt*"))


def test_a_torso_with_dropout_is_exact_too(tmp_path: Path) -> None:
    def torso() -> nn.Module:
        torch.manual_seed(0)  # its first weights are the user's own affair
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3))

    whole = train(small(), out=tmp_path / "whole", torso=torso())
    part = train(until(small(), 120), out=tmp_path / "part", torso=torso())
    again = resume(part.path, steps=small().until.steps, torso=torso())
    assert same(again.path, whole.path)


def test_looking_at_a_run_with_another_environment_is_a_clear_error(tmp_path: Path) -> None:
    run = train(until(small(env_id="toys/Random-v0"), 60), out=tmp_path, env=Random)
    with pytest.raises(UsageError, match="do not fit its network"):
        load(run.path, env=Wider)
