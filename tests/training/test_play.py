"""Watching a policy: episodes and their pace, pictures in a terminal, windows, and what cannot be shown."""

import io
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console

from qfleet.act import Policy
from qfleet.build.make import make_policy
from qfleet.data import Array
from qfleet.envs import TEST, make_world
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan
from qfleet.testing import toys
from qfleet.training.evaluation import play, screens
from qfleet.training.evaluation.pictures import TerminalPicture, as_rgb, fitted, half_blocks, resized
from qfleet.training.evaluation.play import Moment, Pace, Player, played
from qfleet.training.evaluation.screens import PictureWindow, TerminalScreen, choose_mode, has_display
from qfleet.training.evaluation.variants import OtherWorld
from tests.support.runs import small

RED = np.array([240, 0, 0], np.uint8)


class Drawn(toys.Constant):
    """Three steps; half red, half black, in every mode but text."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array", "ansi"], "render_fps": 120}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(limit=3)
        self.render_mode = render_mode

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return f"step {self._step} \x1b[41mred\x1b[0m\x1b[2J\n" + "row\n" * 100
        frame = np.zeros((20, 40, 3), np.uint8)
        frame[:, :20] = RED
        return frame


class Pictured(Drawn):
    """Has no text."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"], "render_fps": 120}


class Interrupted(Pictured):
    """Ctrl-C comes in its second step."""

    def step(self, action: int) -> Any:
        if self._step == 1:
            raise KeyboardInterrupt
        return super().step(action)


def policy_for(plan: Plan, make: Any = None) -> Policy:
    world = make_world(plan.env, seed=0, stream=TEST, num=1, make=make)
    world.close()
    return make_policy(plan, world.spec, torch.device("cpu"))


def console(terminal: bool = True, **options: Any) -> Console:
    options = {"color_system": "truecolor", "width": 40, "height": 13, "legacy_windows": False, **options}
    return Console(file=io.StringIO(), force_terminal=terminal, highlight=False, _environ={"TERM": "xterm"}, **options)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(play.time, "sleep", lambda seconds: None)


def play_in(make: Any, shown: Console, episodes: int = 2, **options: Any) -> list[Moment]:
    plan = small()
    return Player(shown, episodes, **options).play(policy_for(plan, make), OtherWorld(plan, make))


def test_moments_follow_each_step_and_each_reset() -> None:
    plan = small()
    make = toys.Constant
    world = make_world(plan.env, seed=0, stream=TEST, num=1, make=lambda: make(limit=2))
    moments = list(played(policy_for(plan, make), world, 2, max_steps=100))
    assert [(each.episode, each.steps, each.total, each.ended) for each in moments] == [
        (1, 0, 0.0, ""),
        (1, 1, 1.0, ""),
        (1, 2, 2.0, "truncated"),
        (2, 0, 0.0, ""),
        (2, 1, 1.0, ""),
        (2, 2, 2.0, "truncated"),
    ]


def test_an_episode_without_end_is_cut() -> None:
    plan = small()
    world = make_world(plan.env, seed=0, stream=TEST, num=1, make=toys.Constant)
    moments = list(played(policy_for(plan, toys.Constant), world, 2, max_steps=4))
    ended = [each for each in moments if each.ended]
    assert [(each.steps, each.ended) for each in ended] == [(4, "cut at eval.max_steps")] * 2


def test_a_pipe_gets_one_line_per_episode_and_no_picture() -> None:
    shown = console(terminal=False)
    ended = play_in(toys.Constant, shown)  # it has no render() at all
    assert [each.total for each in ended] == [10.0, 10.0]
    assert text_of(shown) == "".join(f"episode {n}: return 10, 10 steps (truncated)\n" for n in (1, 2))


def test_a_dumb_terminal_gets_lines_too() -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    play_in(Drawn, shown, 1)
    assert text_of(shown).splitlines()[-1] == "episode 1: return 3, 3 steps (truncated)"
    assert "▀" not in text_of(shown)


def test_pictures_are_half_blocks_in_the_terminal() -> None:
    shown = console()
    ended = play_in(Pictured, shown)
    text = text_of(shown)
    assert len(ended) == 2
    assert "\x1b[38;2;240;0;0;48;2;240;0;0m▀▀▀" in text
    assert "episode 2: return 3, 3 steps (truncated)" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again


def test_an_environments_own_text_is_shown_without_its_control_codes() -> None:
    shown = console()
    play_in(Drawn, shown, 1)
    text = text_of(shown)
    assert "step 3 " in text
    assert "\x1b[41mred" in text
    assert "\x1b[2J" not in text
    frames = text.split("step 3")
    assert frames[-1].count("row") <= 13  # as many lines as the terminal has


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    shown = console()
    with pytest.raises(KeyboardInterrupt):
        play_in(Interrupted, shown)
    assert text_of(shown).count("\x1b[?25l") == text_of(shown).count("\x1b[?25h") == 1


def test_native_worlds_are_shown() -> None:
    pytest.importorskip("pygame")
    plan = small()
    shown = console()
    Player(shown, 1, 120).play(policy_for(plan), OtherWorld(plan))
    assert "▀" in text_of(shown)


@pytest.mark.atari
def test_atari_is_shown() -> None:
    pytest.importorskip("ale_py")
    changes = {"eval.max_steps": 3, "net.torso.type": "nature", "net.torso.sizes": None}
    plan = small(changes, "ALE/Pong-v5")
    shown = console()
    ended = Player(shown, 1, 120).play(policy_for(plan), OtherWorld(plan))
    assert ended[0].ended == "cut at eval.max_steps"
    assert "▀" in text_of(shown)


@pytest.mark.parametrize(
    ("modes", "window", "mode"),
    [
        (("human", "rgb_array"), True, "human"),
        (("human", "rgb_array"), False, "rgb_array"),
        (("human", "ansi", "rgb_array"), False, "ansi"),
        (("rgb_array",), True, "rgb_array"),
    ],
)
def test_the_mode_suits_the_display(modes: tuple[str, ...], window: bool, mode: str) -> None:
    assert choose_mode(modes, "X-v0", window=window) == mode


def test_what_cannot_be_shown_is_said_in_one_message() -> None:
    with pytest.raises(UsageError, match="X-v0 cannot be shown") as caught:
        choose_mode((), "X-v0", window=True)
    assert "Its render modes are: none" in caught.value.why
    with pytest.raises(UsageError) as caught:
        choose_mode(("human",), "X-v0", window=False)
    assert "there is no display" in caught.value.why
    with pytest.raises(UsageError, match="CartPole-v1 cannot be shown"):
        play_in(toys.Constant, console())


def test_a_picture_that_fails_is_named() -> None:
    class Broken(Pictured):
        def render(self) -> Any:
            raise ZeroDivisionError("no paint")

    with pytest.raises(UsageError, match="this environment cannot be shown") as caught:
        play_in(Broken, console())
    assert "no paint" in caught.value.why


def test_a_display_gets_the_environments_own_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    made: list[Any] = []

    class Window(Drawn):
        def __init__(self, render_mode: str | None = None) -> None:
            super().__init__(render_mode)
            made.append(render_mode)

    shown = console()
    play_in(Window, shown)
    assert "human" in made
    assert "▀" not in text_of(shown)
    play_in(Window, shown, window=False)
    assert made[-1] == "ansi"


def test_pictures_get_a_window_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")

    class OnlyPictures(Drawn):
        metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 120}

    monkeypatch.setenv("DISPLAY", ":0")
    drawn: list[Array] = []
    flip = pygame.display.flip
    monkeypatch.setattr(
        pygame.display, "flip", lambda: (drawn.append(pygame.surfarray.array3d(pygame.display.get_surface())), flip())
    )
    shown = console()
    assert len(play_in(OnlyPictures, shown)) == 2
    assert drawn[0].shape == (480, 240, 3)
    assert (drawn[0][:240] == RED).all()
    assert (drawn[0][240:] == 0).all()
    assert not pygame.display.get_init()


def test_a_closed_window_ends_the_play_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("DISPLAY", ":0")

    class Closed(Drawn):
        metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 120}

        def step(self, action: int) -> Any:
            pygame.event.post(pygame.event.Event(pygame.QUIT))
            return super().step(action)

    assert play_in(Closed, console()) == []


def test_a_display_that_cannot_be_used_leaves_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PictureWindow, "open", classmethod(lambda cls, shown: None))
    assert isinstance(screens.make_screen("rgb_array", console(), window=True), TerminalScreen)


def test_a_display_is_named_by_the_environment() -> None:
    assert not has_display({})
    assert not has_display({"DISPLAY": ""})
    assert has_display({"DISPLAY": ":0"})
    assert has_display({"WAYLAND_DISPLAY": "wayland-0"})


# --- pictures ---


@pytest.mark.parametrize(("height", "width"), [(400, 600), (600, 400), (3, 5), (210, 160), (1, 1), (1000, 2)])
def test_a_picture_fits_and_keeps_its_proportions(height: int, width: int) -> None:
    found = fitted(np.zeros((height, width, 3), np.uint8), 80, 20)
    assert found.shape[0] % 2 == 0
    assert found.shape[0] <= 40
    assert found.shape[1] <= 80
    if min(found.shape[:2]) > 10:
        assert found.shape[0] / found.shape[1] == pytest.approx(height / width, rel=0.1)


def test_small_pictures_are_means_of_pixels_and_large_ones_repeat_them() -> None:
    row = np.array([[0, 10, 20, 30]], np.uint8)[..., None].repeat(3, axis=2)
    assert resized(row, 2, 1)[0, :, 0].tolist() == [5.0, 25.0]
    assert resized(row, 3, 1)[0, :, 0].tolist() == [0.0, 10.0, 25.0]
    assert resized(row, 8, 1)[0, :, 0].tolist() == [0, 0, 10, 10, 20, 20, 30, 30]


def test_every_kind_of_picture_becomes_bytes() -> None:
    assert as_rgb(np.full((2, 2), 7, np.uint8)).tolist() == [[[7, 7, 7]] * 2] * 2
    assert as_rgb(np.full((1, 1, 4), 9, np.uint8)).tolist() == [[[9, 9, 9]]]
    assert as_rgb(np.full((1, 1, 1), 300)).tolist() == [[[255, 255, 255]]]
    assert as_rgb(np.array([[0.0, 1.0, np.nan]])).tolist() == [[[0] * 3, [255] * 3, [0] * 3]]


def test_a_half_block_has_two_pixels_and_equal_neighbours_are_one_segment() -> None:
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[0] = RED
    pixels[1, 3] = 255
    segments = list(half_blocks(pixels))
    assert [segment.text for segment in segments] == ["▀▀▀", "▀", "\n"]
    assert str(segments[0].style) == "#f00000 on #000000"
    assert str(segments[1].style) == "#f00000 on #f0f0f0"


def test_without_colours_pictures_are_shades() -> None:
    plain = console(color_system=None)
    plain.print(TerminalPicture(np.linspace(0, 255, 40, dtype=np.uint8)[None, :, None].repeat(3, 2).repeat(20, 0), 5))
    lines = text_of(plain).splitlines()
    assert lines[0].startswith(" ") or lines[0].startswith(".")
    assert lines[0].rstrip().endswith("@")
    assert "▀" not in text_of(plain)


# --- pace ---


class Clock:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


def test_the_pace_is_kept_whatever_drawing_takes() -> None:
    clock = Clock()
    pace = Pace(10, clock, clock.sleep)
    for took in (0.0, 0.03, 0.12, 0.0):
        clock.now += took
        pace.hold()
    assert clock.slept == [0.1, 0.07, 0.08]
    assert clock.now == pytest.approx(0.4)


def test_a_pause_is_not_made_up_for() -> None:
    clock = Clock()
    pace = Pace(10, clock, clock.sleep)
    clock.now = 60.0
    pace.hold()
    pace.hold()
    assert clock.slept == [0.1]


def test_a_terminal_is_drawn_at_a_bounded_rate() -> None:
    clock = Clock()
    screen = TerminalScreen(console(), "rgb_array", clock)
    drawn: list[float] = []

    class World:
        def render(self) -> Array:
            drawn.append(clock.now)
            return np.zeros((4, 4, 3), np.uint8)

    for _ in range(100):
        clock.now += 0.01
        screen.show(World(), "line", ended=False)
    screen.show(World(), "line", ended=True)
    screen.close()
    assert len(drawn) <= 16
    assert drawn[-1] == clock.now


@pytest.mark.parametrize(
    ("rate", "expected"), [(50, 50.0), (None, 30.0), (0, 30.0), (10_000, 30.0), ("x", 30.0), (True, 30.0)]
)
def test_the_environments_own_rate_is_used_if_it_is_sane(rate: Any, expected: float) -> None:
    class World:
        render_fps = rate

    assert play.world_rate(World()) == expected  # type: ignore[arg-type]
