"""Videos: what is seen is what is written, frame by frame."""

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from qfleet.act import Policy
from qfleet.build.make import make_policy
from qfleet.data import Array
from qfleet.envs import TEST, make_world
from qfleet.errors import StorageError, UsageError
from qfleet.install import install_command
from qfleet.plan.schema import Plan
from qfleet.testing import toys
from qfleet.training import video
from tests.support.runs import small

pytest.importorskip("imageio_ffmpeg")


def policy_for(plan: Plan, make: Any = None) -> Policy:
    world = make_world(plan.env, seed=0, stream=TEST, num=1, make=make)
    world.close()
    return make_policy(plan, world.spec, torch.device("cpu"))


def frames_of(file: Path) -> list[Array]:
    imageio = pytest.importorskip("imageio.v2")
    return list(imageio.mimread(file, memtest=False))


class Pictures(toys.Constant):
    """Episodes of three steps; frame n is the colour 40 n. Odd sides, as no codec likes them."""

    def __init__(self) -> None:
        super().__init__(limit=3)
        self.drawn = 0

    def render(self) -> Any:
        self.drawn += 1
        return np.full((65, 67, 3), 40 * (self.drawn - 1) % 256, np.uint8)


class Unpictured(toys.Constant):
    """Draws nothing."""

    def render(self) -> Any:
        return None


class Broken(toys.Constant):
    """Its picture fails."""

    def render(self) -> Any:
        raise ZeroDivisionError("no paint")


@pytest.mark.parametrize("name", ["play.mp4", "deep/folder/play.gif"])
def test_cartpole_is_recorded_and_can_be_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setattr(video, "MAX_FRAMES", 12)
    plan = small()
    file = video.record(plan, policy_for(plan), tmp_path / name, episodes=5)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    frames = frames_of(file)
    assert len(frames) == 12
    assert frames[0].shape[:2] == (400, 600)
    assert np.mean(frames[0][..., :3] > 200) > 0.9  # the white of the page, and a cart in it
    assert not np.array_equal(frames[0], frames[-1])


def test_episodes_are_whole_and_as_many_as_asked_for(tmp_path: Path) -> None:
    plan = small(env_id="CartPole-v1")
    file = video.record(plan, policy_for(plan, Pictures), tmp_path / "play.mp4", 2, Pictures)
    frames = frames_of(file)
    assert frames[0].shape == (64, 66, 3)
    # A first picture and three steps; then a new beginning and three steps.
    colours = [float(frame.mean()) for frame in frames]
    assert colours == pytest.approx([40 * n % 256 for n in range(8)], abs=4)


def test_frames_are_not_kept(tmp_path: Path) -> None:
    seen: list[weakref.ref[Array]] = []
    alive: list[int] = []

    def frames() -> Iterator[Array]:
        for _ in range(100):
            frame = np.zeros((64, 64, 3), np.uint8)
            seen.append(weakref.ref(frame))
            alive.append(sum(one() is not None for one in seen))
            yield frame

    for name in ("play.mp4", "play.gif"):
        seen.clear()
        video.write(frames(), tmp_path / name)
        assert len(frames_of(tmp_path / name)) >= 1
    assert max(alive) <= 4


@pytest.mark.parametrize("name", ["play", "play.exe", "play.png", "mp4"])
def test_an_unknown_ending_is_refused_before_anything_is_made(name: str, tmp_path: Path) -> None:
    plan = small()
    with pytest.raises(UsageError, match="cannot record into") as caught:
        video.record(plan, policy_for(plan), tmp_path / "new" / name, 1)
    assert ".mp4" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["imageio", "imageio.v2", "imageio_ffmpeg"])
def test_a_missing_package_says_what_to_install(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [name for name in sys.modules if name.startswith("imageio")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as caught:
        video.write(iter([np.zeros((64, 64, 3), np.uint8)]), tmp_path / "play.mp4")
    assert caught.value.fix == f"Run: {install_command('video')}"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ffmpeg_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "no-such-program"))
    with pytest.raises(UsageError) as caught:
        video.write(iter([np.zeros((64, 64, 3), np.uint8)]), tmp_path / "play.mp4")
    assert "ffmpeg" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"play\.mp4"):
        video.write(iter([np.zeros((64, 64, 3), np.uint8)]), tmp_path / "file" / "play.mp4")


@pytest.mark.parametrize(("make", "why"), [(Unpictured, "rgb_array"), (Broken, "ZeroDivisionError: no paint")])
def test_an_environment_without_pictures_is_named(make: Any, why: str, tmp_path: Path) -> None:
    plan = small()
    with pytest.raises(UsageError, match="cannot be recorded") as caught:
        video.record(plan, policy_for(plan, make), tmp_path / "new" / "play.mp4", 1, make)
    assert why in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_an_own_environment_that_takes_no_render_mode_is_named(tmp_path: Path) -> None:
    (tmp_path / "blind.py").write_text("from qfleet.testing.toys import Random\n\nclass Blind(Random):\n    pass\n")
    plan = small(env_id=f"{tmp_path / 'blind.py'}:Blind")
    with pytest.raises(UsageError, match="takes no render_mode") as caught:
        video.record(plan, policy_for(plan), tmp_path / "play.mp4", 1)
    assert "render_mode=None" in caught.value.fix


def test_a_failure_half_way_leaves_no_file(tmp_path: Path) -> None:
    def frames() -> Iterator[Array]:
        yield np.zeros((64, 64, 3), np.uint8)
        raise gym.error.Error("half way")

    with pytest.raises(gym.error.Error, match="half way"):
        video.write(frames(), tmp_path / "play.mp4")
    assert list(tmp_path.iterdir()) == []


class Drawn(Pictures):
    """Draws only in the mode it was made with."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return super().render() if self.render_mode == "rgb_array" else None


def text_only() -> Any:
    return Drawn("ansi")


def refusal(make: Any, tmp_path: Path) -> UsageError:
    plan = small()
    with pytest.raises(UsageError, match="cannot be recorded") as caught:
        video.record(plan, policy_for(plan, make), tmp_path / "play.mp4", 1, make)
    return caught.value


@pytest.mark.parametrize(
    ("make", "mode"), [(lambda: gym.make("CartPole-v1"), "None"), (text_only, "'ansi'")], ids=["none", "ansi"]
)
def test_an_environment_made_without_the_render_mode_is_named(make: Any, mode: str, tmp_path: Path) -> None:
    error = refusal(make, tmp_path)
    assert f"made with render_mode={mode}" in error.why
    assert 'gym.make("CartPole-v1", render_mode="rgb_array")' in error.fix


def test_an_environment_without_render_needs_one(tmp_path: Path) -> None:
    error = refusal(toys.Constant, tmp_path)
    assert error.why == "It has no render() of its own."
    assert "[height, width, 3]" in error.fix


def test_a_class_that_takes_the_mode_is_given_it(tmp_path: Path) -> None:
    plan = small()
    file = video.record(plan, policy_for(plan, Drawn), tmp_path / "play.mp4", 1, Drawn)
    assert len(frames_of(file)) == 4
