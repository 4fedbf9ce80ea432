"""Videos of a policy at play."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from qfleet.act import Policy, add_reward
from qfleet.build.worlds import EnvMaker
from qfleet.data import Array
from qfleet.envs import TEST, make_world
from qfleet.errors import StorageError, UsageError
from qfleet.files import make_folder, replace_inside
from qfleet.install import install_command
from qfleet.plan.schema import Plan

MODE = "rgb_array"
WRITE_RENDER = "Give it a render() that returns the picture as an array [height, width, 3] of bytes."
MAX_FRAMES = 20_000
FRAMES_PER_SECOND = 30
# Options of ffmpeg for each ending. It writes gif files too: other writers keep every frame in memory.
FORMATS: dict[str, dict[str, Any]] = {
    ".mp4": {},
    ".mkv": {},
    ".mov": {},
    ".gif": {"codec": "gif", "pixelformat": "rgb8", "quality": None, "output_params": ["-f", "gif"]},
}


def record(
    plan: Plan, policy: Policy, file: Path, episodes: int, make: EnvMaker | None = None, run: Path | None = None
) -> Path:
    """Play greedily and write a video, frame by frame; the file's ending chooses the format.

    `run` is the run folder that the file is in, if it is in one.
    """
    if file.suffix.lower() not in FORMATS:
        raise UsageError(
            f"cannot record into {file}",
            "The end of the name chooses the format.",
            f"Give a name that ends in {', '.join(FORMATS)}.",
        )
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no window: pictures are all that is wanted
    world = make_world(plan.env, seed=plan.seed, stream=TEST, num=1, make=make, render_mode=MODE)
    with closing(world):
        write(played(world, policy, episodes), file, run)
    return file


def played(world: Any, policy: Policy, episodes: int) -> Iterator[Array]:
    """The frames of these episodes, MAX_FRAMES at most."""
    now = world.reset()
    last = False
    done = 0
    frames = 1
    state = policy.initial_state(world.num)
    yield picture(world)
    while done < episodes and frames < MAX_FRAMES:
        action, state, _ = policy.act(now.obs, state, mask=now.mask)
        world.send(action)
        now = world.receive()
        state = add_reward(state, now.reward, np.array([last]))
        last = bool(now.terminated[0] | now.truncated[0]) and not last
        done += last
        frames += 1
        yield picture(world)


def picture(world: Any) -> Array:
    """What the first lane looks like now, with even sides as video codecs want them."""
    if not getattr(world, "has_render", True):
        raise _no_picture("It has no render() of its own.", WRITE_RENDER)
    try:
        frame = world.render()
    except Exception as error:
        raise _no_picture(f"Its render() raised {type(error).__name__}: {error}.", *_render_fix(world)) from error
    if not isinstance(frame, np.ndarray) or frame.ndim < 2:
        why = f"Its render() returned {type(frame).__name__ if frame is not None else None}, not a picture."
        raise _no_picture(why, *_render_fix(world))
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]


def _render_fix(world: Any) -> tuple[str, ...]:
    """The fix for an environment without pictures: most often it was made with another render_mode."""
    mode = getattr(world, "render_mode", None)
    if mode == MODE:
        return (WRITE_RENDER,)
    fix = 'Make it with that mode: env=lambda: gym.make("CartPole-v1", render_mode="rgb_array"). A class of your own'
    return (
        f"{fix} takes the argument render_mode=None and keeps it as self.render_mode.",
        f"It was made with render_mode={mode!r}, and only {MODE!r} makes pictures.",
    )


def _no_picture(why: str, fix: str, *before: str) -> UsageError:
    return UsageError("this environment cannot be recorded", " ".join((*before, why)), fix)


def write(frames: Iterator[Array], file: Path, run: Path | None = None) -> None:
    """Write frames as they come; the file appears when it is complete. `run` is the run folder around it, if any."""
    first = next(frames)  # an environment that cannot be drawn leaves no file
    ending = file.suffix.lower()
    try:
        with TemporaryDirectory(prefix="qfleet-video-") as private:
            draft = Path(private, f"draft{'.mp4' if ending == '.gif' else ending}")
            with closing(_writer(draft, FORMATS[ending])) as writer:
                _append(writer, first)
                for frame in frames:
                    _append(writer, frame)
            put_in_place(draft, file, run)
    except OSError as error:
        raise StorageError(
            f"cannot write {file}",
            f"The system said: {error.strerror or str(error).splitlines()[0]}.",
            "Free some space or choose another file.",
        ) from error


def put_in_place(draft: Path, file: Path, run: Path | None) -> None:
    """Move a finished film into its folder, which is made if it is missing; inside a run folder no link is followed."""
    if run is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        run = file.parent
    name = file.relative_to(run)
    make_folder(run, name.parent)
    replace_inside(run, name, draft.read_bytes())


def _writer(file: Path, settings: dict[str, Any]) -> Any:
    try:
        import imageio.v2 as imageio

        return imageio.get_writer(
            file,
            format="FFMPEG",
            mode="I",
            fps=FRAMES_PER_SECOND,
            macro_block_size=1,
            ffmpeg_log_level="error",
            **settings,
        )
    except ImportError as error:
        raise _no_ffmpeg(error) from error


def _append(writer: Any, frame: Array) -> None:
    try:
        writer.append_data(frame)
    except (FileNotFoundError, RuntimeError) as error:  # ffmpeg is started with the first frame
        raise _no_ffmpeg(error) from error


def _no_ffmpeg(error: Exception) -> UsageError:
    return UsageError(
        "recording needs imageio and ffmpeg", f"They cannot be used: {error}.", f"Run: {install_command('video')}"
    )
