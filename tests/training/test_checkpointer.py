"""What a checkpoint may and may not be read as, and how segments are shared."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qfleet import load, resume, train
from qfleet.build.components import Components
from qfleet.build.make import make_components
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.save import Checkpoints, decompress, unpack_tensors
from qfleet.testing.toys import Random
from qfleet.training.checkpoints import checkpointer
from qfleet.training.checkpoints import replay_segments as saved_rows
from tests.replay.streams import random_stream, rollout
from tests.support.runs import PONG, Settings, checkpoints, rows, same, small, trained, until


@pytest.mark.usefixtures("every_save")
def test_two_checkpoints_in_a_row_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "segment_rows", lambda bytes_per_row: 8)
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
        obs, *wait_until_idle = super().step(action)
        return np.append(obs, 0).astype(np.float32), *wait_until_idle


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


def test_a_resume_without_a_saved_replay_reads_no_replay_files(tmp_path: Path) -> None:
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


def test_loading_a_run_with_another_environment_is_a_clear_error(tmp_path: Path) -> None:
    run = train(until(small(env_id="toys/Random-v0"), 60), out=tmp_path, env=Random)
    with pytest.raises(UsageError, match="do not fit its network"):
        load(run.path, env=Wider)


# Lanes that move by themselves


def components_at_rest() -> Components:
    plan = small({"replay.capacity": 400, "env.num": 4})
    world = make_train_world(plan)
    components = make_components(resolve(plan, world.spec), world)
    components.actor.start()
    return components


def send(components: Components, worker: int, num: int, seed: int, end: float = 0.1) -> None:
    """So many rows of an actor's two lanes."""
    spec, rng = components.batch_source.replay.spec, np.random.default_rng(seed)
    rows = random_stream(rng, spec, 2, num, end)
    components.batch_source.insert(replace(rollout(rows), source=(worker, 0, seed)))


def everything(components: Components) -> list[bytes]:
    """All that can be drawn, in order."""
    replay = components.batch_source.replay
    batch = replay.read_batch(np.arange(replay.tail, replay.head), np.ones(len(replay), np.float32))
    return [getattr(batch, name).tobytes() for name in ("obs", "action", "reward", "discount", "next_obs")]


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_lanes_are_saved_and_restored_on_their_own(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "segment_rows", lambda bytes_per_row: 8)
    components, rng = components_at_rest(), np.random.default_rng(seed)
    store, linked = Checkpoints(tmp_path, keep=2), 0
    keeps = checkpointer.Checkpointer(store, components, {})
    for step in range(40):
        worker = int(rng.random() < 0.2)  # one is four times as fast
        send(components, worker, int(rng.choice([1, 8, 13])), step)
        if rng.random() < 0.3:
            components.batch_source.replay.seal(slice(2 * worker, 2 * worker + 2))
        if rng.random() < 0.6:
            found = keeps.save(step, {"step": step}, {})
            linked += sum((found.path / name).stat().st_nlink > 1 for name in found.files)
            again = components_at_rest()
            checkpointer.Checkpointer(store, again, {}).load(store.load(step))
            assert everything(again) == everything(components)
            assert again.batch_source.replay.spans() == components.batch_source.replay.spans()
            again.close()
    assert linked  # what had not changed was not written again
    components.close()


def test_a_segment_that_a_seal_has_changed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "segment_rows", lambda bytes_per_row: 8)
    components = components_at_rest()
    keeps = checkpointer.Checkpointer(Checkpoints(tmp_path), components, {})
    send(components, 0, 8, seed=0, end=0.0)
    first = keeps.save(0, {}, {})
    assert components.batch_source.replay.seal(slice(0, 2)) == 2  # the newest row of a whole segment becomes final
    send(components, 0, 1, seed=1, end=0.0)
    second = keeps.save(1, {}, {})
    whole = "replay/rows_000000000000_000000000008_00000_00002.zst"
    assert whole not in first.files
    assert unpack_tensors(decompress(second.read(whole), 2**20))["last"].any(1).tolist() == [False] * 7 + [True]
    components.close()


def test_missing_or_foreign_segments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_rows, "segment_rows", lambda bytes_per_row: 8)
    components, store = components_at_rest(), Checkpoints(tmp_path)
    send(components, 0, 20, 0)
    send(components, 1, 5, 1)
    keeps = checkpointer.Checkpointer(store, components, {})
    found = keeps.save(1, {}, {})
    blobs = {name: found.read(name) for name in found.files}
    segments = sorted(name for name in blobs if name.startswith("replay/"))
    assert len(segments) == 4
    for name in segments:
        store.commit(2, ((each, data) for each, data in blobs.items() if each != name), found.meta)
        with pytest.raises(NoCheckpointError, match="missing"):
            keeps.load(store.load(2))
    extra = {"replay/rows_000000000005_000000000008_00002_00004.zst": blobs[segments[0]]}
    store.commit(3, {**blobs, **extra}.items(), found.meta)
    with pytest.raises(NoCheckpointError, match="is not a part of the replay"):
        keeps.load(store.load(3))
    components.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", pytest.param("ALE/Pong-v5", marks=pytest.mark.atari)])
def test_compressed_frames_change_nothing_and_are_resumed_exactly(env_id: str, tmp_path: Path) -> None:
    changes: Settings = {"replay.capacity": 400, **(PONG if env_id.startswith("ALE") else {})}
    plain = trained(small(changes, env_id), tmp_path / "plain")
    packed = {**changes, "replay.compress": True}
    whole = trained(small(packed, env_id), tmp_path / "whole")
    assert rows(whole.path) == rows(plain.path)
    for name in ("model.safetensors", "optim.safetensors"):
        assert (checkpoints(whole.path)[-1] / name).read_bytes() == (checkpoints(plain.path)[-1] / name).read_bytes()
    part = trained(until(small(packed, env_id), 150), tmp_path / "part")
    again = resume(part.path, steps=small(packed, env_id).until.steps)
    assert again.status["exact"] is True
    assert same(again.path, whole.path)
