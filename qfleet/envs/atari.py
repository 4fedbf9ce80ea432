"""Atari with ALE's own vector environment: its threads step, resize and stack frames. B lanes, S frame size."""

from dataclasses import replace
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
from msgspec import Meta

from qfleet.data import Array, Spec, State, Step
from qfleet.data.space_format import EnvSpaces
from qfleet.data.state_reader import FLAGS, saved_array
from qfleet.envs.episodes import EpisodeRecorder
from qfleet.envs.options import Option, checked_options
from qfleet.envs.step_values import require_idle, reset_step
from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.plan.part import Positive, Scalar
from qfleet.plan.secrets import redacted_options

STACK = 4
FRAME_SIZE = 84
# The options of the native environment that may be set; how frames are stored fixes all others.
OPTIONS = {
    "episodic_life": Option(bool, False),
    "frameskip": Option(Annotated[int, Meta(ge=1, le=1_000)], 4),
    "full_action_space": Option(bool, False),
    "max_num_frames_per_episode": Option(Positive, 108_000),
    "maxpool": Option(bool, True),
    "noop_max": Option(Annotated[int, Meta(ge=0, le=10_000)], 30),
    "use_fire_reset": Option(bool, False),
}


def register() -> None:
    """Register ALE's ids with Gymnasium."""
    try:
        import ale_py
    except ImportError as error:
        raise UsageError(
            "Atari environments need the package ale-py.",
            f"Importing it failed: {error}.",
            f"Install it: {install_command('atari')}",
        ) from error
    gym.register_envs(ale_py)


class Atari:
    """One game in many lanes: grey frames of S x S, stacks of 4 padded with zeros, raw rewards, whole games.

    ALE reloads the ROM when a reset has a seed, which takes as long as a hundred steps or more. So a seed is used for
    the episodes of at least `reseed_steps` steps (0: one episode), and all actions since the seed are recorded.
    """

    def __init__(
        self,
        game: str,
        num: int,
        *,
        seed: int,
        stream: int,
        sticky: float,
        frame_size: int | None = None,
        threads: int = 1,
        reseed_steps: int = 0,
        options: dict[str, Scalar] | None = None,
    ) -> None:
        size = frame_size or FRAME_SIZE
        self.num = num
        self._reseed_steps = reseed_steps
        self._env = _native(game, num, size, sticky, threads, options or {})
        self.spec = Spec((size, size), "uint8", (int(self._env.single_action_space.n),), stack=STACK)
        native = self._env
        self.spaces = EnvSpaces(native.single_observation_space, native.single_action_space, stack=STACK)
        self._episodes = EpisodeRecorder(num, seed, stream)
        self._sent: Array | None = None
        self._abandoned = np.zeros(num, bool)
        self._last = reset_step(np.zeros((num, STACK, size, size), np.uint8))

    def reset(self) -> Step:
        """Begin the first episode in every lane."""
        self._drain()
        self._episodes.rewind()
        self._abandoned = np.zeros(self.num, bool)
        seeds = self._episodes.begin(np.ones(self.num, bool))
        self._last = reset_step(self._env.reset(seed=seeds)[0])
        return self._last

    def send(self, action: Array) -> None:
        """Send the actions to the native threads, which start at once."""
        self._sent = np.array(action, np.int64)
        self._env.send(self._sent)

    def receive(self) -> Step:
        """Wait for the native threads; reseed lanes that reset themselves after `reseed_steps` steps."""
        if self._sent is None:
            raise RuntimeError("receive() without send()")
        was_ended = self._last.terminated | self._last.truncated
        # The step in which a lane resets itself is recorded too, because it must be repeated as well.
        self._episodes.record(self._sent, np.ones(self.num, bool))
        self._last = self._receive_native()
        # The native environment continues an abandoned episode: its result is overwritten by the reset.
        reseeded = self._abandoned | (was_ended & (self._episodes.length > self._reseed_steps))
        self._abandoned = np.zeros(self.num, bool)
        if reseeded.any():
            self._episodes.begin(reseeded)
            self._reseed(reseeded)
        return self._last

    def abandon(self, lanes: Array) -> None:
        """Give up the episodes of these lanes (bool [B]): their next step begins a new one, as after a truncation."""
        require_idle(self._sent)
        self._abandoned = self._abandoned | lanes
        self._last = replace(self._last, truncated=self._last.truncated | lanes)

    def state_dict(self) -> State:
        """Each lane's seed and the actions since; `ended` marks lanes that reset on their next step."""
        require_idle(self._sent)
        ended = self._last.terminated | self._last.truncated
        return {**self._episodes.state_dict(), "ended": ended, "abandoned": self._abandoned.copy()}

    def load_state_dict(self, state: State) -> Step:
        """Repeat the recorded actions so that all lanes finish together: a lane with fewer actions starts later."""
        self._drain()
        # An invalid action would make the native environment wait forever.
        self._episodes.load_state_dict(state, self.spec.num_actions)
        abandoned = saved_array(state, "abandoned", FLAGS, (self.num,)).copy()
        start = int(self._episodes.length.max()) - self._episodes.length  # [B]
        actions = self._recorded_actions(start)
        self._last = reset_step(self._env.reset(seed=self._episodes.seed)[0])
        for number, action in enumerate(actions):
            self._reseed(start == number)
            self._env.send(action)
            self._last = self._receive_native()
        self._reseed(start == len(actions))
        self._abandoned = abandoned
        self._last.truncated |= abandoned
        return self._last

    def render(self) -> Array:
        """The first lane's newest frame in three equal channels, enlarged."""
        frame = self._last.obs[0, -1].repeat(4, axis=0).repeat(4, axis=1)
        return np.stack([frame] * 3, axis=-1)

    def close(self) -> None:
        """Stop the native threads."""
        if self._env is not None:
            self._drain()
            self._env.close()
            self._env = None

    def _recorded_actions(self, start: Array) -> Array:  # [T, B]; no-ops until a lane starts
        length = int(self._episodes.length.max())
        actions = np.zeros((length, self.num), np.int64)
        for lane in range(self.num):
            actions[start[lane] :, lane] = self._episodes.actions(lane)
        return actions

    def _reseed(self, lanes: Array) -> None:
        if not lanes.any():
            return
        obs = self._env.reset(seed=self._episodes.seed[lanes], options={"reset_mask": lanes})[0]
        self._last.obs[lanes] = obs[lanes]
        self._last.reward[lanes] = 0
        self._last.terminated[lanes] = self._last.truncated[lanes] = False

    def _receive_native(self) -> Step:
        # The native environment returns a new buffer each time, so no copy is needed.
        obs, reward, terminated, truncated, _ = self._env.recv()
        self._sent = None
        return Step(obs, reward.astype(np.float32), terminated, truncated)

    def _drain(self) -> None:
        if self._sent is not None:
            self._receive_native()


def atari_game(name: str) -> tuple[str, float]:
    """The ROM and the sticky-action probability of an Atari id; the id's frame skip is not used."""
    register()
    kwargs = gym.spec(name).kwargs
    return str(kwargs["game"]), float(kwargs["repeat_action_probability"])


def _native(game: str, num: int, size: int, sticky: float, threads: int, options: dict[str, Scalar]) -> Any:
    register()
    from ale_py.vector_env import AtariVectorEnv

    wrong = sorted(set(options) - set(OPTIONS))
    if wrong:
        raise UsageError(
            f"env.options.{wrong[0]}={options[wrong[0]]!r} has no effect on Atari.",
            f"The native Atari environment takes {', '.join(OPTIONS)}.",
            f"Remove env.options.{wrong[0]}; stickiness is env.sticky and the frame's side env.frame_size.",
        )
    # No fire at reset, as in gymnasium's AtariPreprocessing, so that frames are equal.
    settings: dict[str, Any] = {"noop_max": 30, "use_fire_reset": False, "episodic_life": False}
    settings |= checked_options(options, OPTIONS, "Atari")
    try:
        return AtariVectorEnv(
            game,
            num,
            num_threads=threads,
            repeat_action_probability=sticky,
            img_height=size,
            img_width=size,
            stack_num=STACK,
            reward_clipping=False,
            **settings,
        )
    except (TypeError, ValueError, gym.error.Error) as error:
        if not options:
            raise
        raise UsageError(
            f"env.options={redacted_options(options)} was refused by the Atari emulator.",
            f"Its error: {str(error).splitlines()[0]}",
            "Correct or remove these options.",
        ) from error
