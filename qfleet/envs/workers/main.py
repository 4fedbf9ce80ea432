"""The inside of a worker: a process that holds single environments and does what its slab says. L lanes."""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium as gym
import msgspec

from qfleet.data import Spec
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.env_id import called, find
from qfleet.envs.single_env import AnyEnv, EnvRaised, SingleEnv, describe, made
from qfleet.envs.step_timer import clock_steps
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.envs.workers.memory import DONE, IDLE, RAISED, RESET, WRONG, EnvWorkerMemory
from qfleet.errors import EnvError, QfleetError
from qfleet.files import open_log
from qfleet.plan.schema import Env
from qfleet.system.child_process import bound_log, die_with_parent
from qfleet.system.shared_memory import SharedMemory

# What is said through the socket: one byte each.
READY = b"+"
GO = b"!"
ANSWERED = b"."
LEAVE = b"q"
DESK_BYTES = 65_536
MADE_AT = DESK_BYTES - 1  # the byte that says that an environment was made and reset
TELL_SIGNAL = signal.SIGUSR1  # makes a worker say where it is
_LEAVE_SECONDS = 2
_LISTEN_SECONDS = 60.0
_SAY_CHARACTERS = 3_000  # five such texts fit on the desk in any alphabet


@dataclass(frozen=True, slots=True)
class EnvWorkerTask:
    """What makes the environments, in a form that can be sent to another process."""

    env: Env
    make: bytes | None  # the user's own function
    known: Any  # how Gymnasium knows the id in the process that began
    folder: str  # what an id or a module's name is relative to
    variables: dict[str, str] = field(default_factory=dict, repr=False)  # those that `env.secrets` names

    def maker(self) -> Callable[[], AnyEnv]:
        """A function that makes one environment, here."""
        os.environ.update(self.variables)
        if self.make is not None:
            return called(self.env, ForkingPickler.loads(self.make))
        if self.known is not None:
            gym.registry.setdefault(self.known.id, self.known)
        return find(self.env)


class EnvProbe(msgspec.Struct):
    """What a scout learned of an environment: its spec, or the error it met (class, what, why, fix)."""

    obs: tuple[int, ...] = ()
    dtype: str = ""
    actions: tuple[int, ...] = ()
    masked: bool = False
    error: tuple[str, str, str, str] | None = None
    traceback: str = ""
    notes: tuple[str, ...] = ()
    step_seconds: float = 0.0


class EnvWorker:
    """L environments, each made when it is first reset, and made again after it failed."""

    def __init__(self, task: EnvWorkerTask, spec: Spec, slab: EnvWorkerMemory) -> None:
        self._task = task
        self._spec = spec
        self._slab = slab
        self._envs: list[AnyEnv | None] = [None] * len(slab.command)
        self._make: Callable[[], AnyEnv] | None = None
        self._single: SingleEnv | None = None

    def obey(self) -> None:
        """Do what every lane is told; a lane that fails does not keep the others from it."""
        for lane, command in enumerate(self._slab.command.tolist()):
            if command != IDLE:
                self._slab.outcome[lane] = self._try(lane, command, int(self._slab.argument[lane]))
        self._slab.end()

    def close(self) -> None:
        """Close what was made."""
        for lane in range(len(self._envs)):
            self._drop(lane)

    def _try(self, lane: int, command: int, argument: int) -> int:
        try:
            self._do(lane, command, argument)
        except OutsideSpace as error:
            self._slab.say(lane, f"{error.field}: expected {error.expected}, got {error.got}")
            self._drop(lane)
            return WRONG
        except BaseException as error:  # sys.exit() is no way to leave either
            self._slab.say(lane, _described(error))
            self._drop(lane)
            return RAISED
        return DONE

    def _do(self, lane: int, command: int, argument: int) -> None:
        env, single = self._seated(lane, command)
        self._slab.begin(lane, time.monotonic())
        if command == RESET:
            single.begin(env, argument, self._slab.step, lane)
        else:
            single.advance(env, argument, self._slab.step, lane)
        single.check_numbers(self._slab.step, lane)

    def _seated(self, lane: int, command: int) -> tuple[AnyEnv, SingleEnv]:
        env = self._envs[lane]
        if env is None:
            if command != RESET:
                raise RuntimeError("a step before the first reset")
            self._slab.begin(lane, time.monotonic(), making=True)
            env = self._envs[lane] = self._made()
        if self._single is None:
            self._single = self._fitting(env)
        return env, self._single

    def _made(self) -> AnyEnv:
        self._make = self._make or self._task.maker()
        return made(self._make, self._task.env.id)

    def _fitting(self, env: AnyEnv) -> SingleEnv:
        given = self._task.env
        single = SingleEnv(env, given.bins, given.id, masked=self._spec.masked, check_bounds=given.check_bounds)
        if single.spec != self._spec:
            raise OutsideSpace("spaces of a new copy", str(self._spec), str(single.spec))
        return single

    def _drop(self, lane: int) -> None:
        env = self._envs[lane]
        self._envs[lane] = None
        if env is not None:
            with contextlib.suppress(Exception, SystemExit):
                env.close()


def work(
    task: EnvWorkerTask, spec: Spec, lanes: int, region: SharedMemory, desk: SharedMemory, line: socket.socket, log: str
) -> None:
    """A worker's life: it obeys until it is told to leave, or nobody is there to tell it anything."""
    settle(task.folder, desk, log)
    slab = EnvWorkerMemory(spec, lanes, region)
    seats = EnvWorker(task, spec, slab)
    line.settimeout(_LISTEN_SECONDS)
    with contextlib.suppress(ConnectionError):
        line.send(READY)
        while _told(line) == GO:
            seats.obey()
            bound_log()
            line.send(ANSWERED)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVE_SECONDS)  # an environment that cannot be closed
    seats.close()
    os._exit(0)


def scout(task: EnvWorkerTask, seed: int, desk: SharedMemory, log: str) -> None:
    """Make one environment, reset it, and leave what was seen of it on the desk."""
    settle(task.folder, desk, log)
    _leave_word(task, desk, lambda: _look(task, seed))


def clock(task: EnvWorkerTask, seed: int, desk: SharedMemory, log: str) -> None:
    """Make one environment, time its steps, and leave that on the desk."""
    settle(task.folder, desk, log)
    _leave_word(task, desk, lambda: _clock(task, seed, desk))


def _leave_word(task: EnvWorkerTask, desk: SharedMemory, look: Callable[[], "EnvProbe"]) -> None:
    try:
        found = look()
    except QfleetError as error:
        found = EnvProbe(error=(type(error).__name__, *_parts(error)), traceback=_trace(error.__cause__ or error))
    except BaseException as error:
        head = f"{task.env.id}: the environment could not be made: it {describe(error)}"
        parts = (head[:_SAY_CHARACTERS], "This came from inside it.", "Mend the environment.")
        found = EnvProbe(error=("EnvError", *parts), traceback=_trace(error))
    data = msgspec.json.encode(found)
    desk.view[: len(data)] = data
    os._exit(0)


def _clock(task: EnvWorkerTask, seed: int, desk: SharedMemory) -> EnvProbe:
    env = task.env
    world = SyncVectorEnv(
        task.maker(), 1, seed=seed, stream=0, name=env.id, bins=env.bins, check_bounds=env.check_bounds
    )
    world.reset()
    desk.view[MADE_AT] = 1
    return EnvProbe(step_seconds=clock_steps(world))


def _look(task: EnvWorkerTask, seed: int) -> EnvProbe:
    env = made(task.maker(), task.env.id)
    single = SingleEnv(env, task.env.bins, task.env.id)
    try:
        single.learn_masks(env, seed)
    except EnvRaised as raised:
        error = raised.error
        raise EnvError(
            f"{task.env.id}, lane 0: reset() {describe(error)}",
            f"This came from inside the environment, in its first reset (seed {seed}).",
            "Mend the environment.",
        ) from error
    with contextlib.suppress(Exception):
        env.close()
    spec = single.spec
    return EnvProbe(spec.obs, spec.dtype, spec.actions, spec.masked, notes=single.notes)


def settle(folder: str, desk: SharedMemory, log: str) -> None:
    """Make this process one that ends with its parent, leaves the terminal alone, and tells where it crashed."""
    die_with_parent()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # what an environment starts is ended with it
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    _redirect(log)
    faulthandler.enable(desk.fileno(), all_threads=False)
    faulthandler.register(TELL_SIGNAL, desk.fileno(), all_threads=False)
    os.chdir(folder)


def _redirect(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    kept = open_log(log)
    for fd, to in ((0, nothing), (1, kept), (2, kept)):
        os.dup2(to, fd)
    os.close(nothing)
    os.close(kept)


def _told(line: socket.socket) -> bytes:
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            return line.recv(1)
    return b""


def _described(error: BaseException) -> str:
    """One line that says what happened, and the traceback that begins where the environment was called."""
    if isinstance(error, EnvRaised):
        call = f"{error.call}()"
        error = error.error
    else:
        call = "the environment"
    return f"{call} {describe(error)}\n{_trace(error)}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_SAY_CHARACTERS:]


def _parts(error: QfleetError) -> tuple[str, str, str]:
    return error.what[:_SAY_CHARACTERS], error.why[:_SAY_CHARACTERS], error.fix[:_SAY_CHARACTERS]
