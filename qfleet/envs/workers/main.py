"""The process of an environment worker: it holds environments and executes the commands in its memory. L lanes."""

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import gymnasium as gym
import msgspec

from qfleet.data import Spec
from qfleet.data.space_format import MAX_BYTES, EnvSpaces, SpacesNotKept, write_spaces
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.env_id import env_maker, user_env_maker
from qfleet.envs.single_env import AnyEnv, EnvAdapter, EnvRaised, describe_error, make_checked_env
from qfleet.envs.step_timer import time_steps
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.envs.workers.memory import DONE, IDLE, OUTSIDE_SPACE, RAISED, RESET, EnvWorkerMemory
from qfleet.errors import EnvError, QfleetError
from qfleet.plan.schema import Env
from qfleet.system.child_process import limit_log
from qfleet.system.sent_objects import unpack_object
from qfleet.system.shared_memory import SharedMemory

# Messages through the socket, one byte each.
READY = b"+"
RUN = b"!"
FINISHED = b"."
STOP = b"q"
REPORT_BYTES = 2 * MAX_BYTES + 65_536  # spaces are a text in a text, whose quotes take two bytes each
MADE_FLAG_AT = REPORT_BYTES - 1  # the byte that is set once an environment was made and reset
_CLOSE_SECONDS = 2
_POLL_SECONDS = 60.0
_TEXT_CHARACTERS = 3_000  # five such texts fit into a report in any alphabet


@dataclass(frozen=True, slots=True)
class EnvWorkerTask:
    """How to make the environments, in a form that can be sent to another process."""

    env: Env
    make: bytes | None  # the user's own function, pickled
    registered: bytes | None  # Gymnasium's entry for the id in the parent process, pickled
    folder: str  # the folder that relative paths in ids start from
    variables: dict[str, str] = field(default_factory=dict, repr=False)  # those that `env.secrets` names
    info: tuple[str, ...] = ()  # numbers to read from the info of every step

    def maker(self) -> Callable[[], AnyEnv]:
        """A function that makes one environment in this process."""
        if self.make is not None:
            return user_env_maker(self.env, unpack_object(self.make))
        if self.registered is not None:
            entry = unpack_object(self.registered)
            gym.registry.setdefault(entry.id, entry)
        return env_maker(self.env)


@dataclass(frozen=True, slots=True)
class EnvWorkerSetup:
    """What the process of an environment worker is given."""

    task: EnvWorkerTask
    spec: Spec
    lanes: int
    region: SharedMemory
    connection: socket.socket


@dataclass(frozen=True, slots=True)
class EnvProbeSetup:
    """What a process is given that tries an environment; `report` takes its `EnvProbe`."""

    task: EnvWorkerTask
    seed: int
    timed: bool  # time its steps; otherwise find its spec
    report: SharedMemory


class EnvProbe(msgspec.Struct):
    """The report of a process that tried an environment: its spec, or the error (class, what, why, fix)."""

    obs: tuple[int, ...] = ()
    dtype: str = ""
    actions: tuple[int, ...] = ()
    masked: bool = False
    error: tuple[str, str, str, str] | None = None
    traceback: str = ""
    notes: tuple[str, ...] = ()
    step_seconds: float = 0.0
    spaces: str = ""  # as JSON; empty if they cannot be written


class EnvWorker:
    """L environments, each made at its first reset, and made again after a failure."""

    def __init__(self, task: EnvWorkerTask, spec: Spec, memory: EnvWorkerMemory) -> None:
        self._task = task
        self._spec = spec
        self._memory = memory
        self._envs: list[AnyEnv | None] = [None] * len(memory.command)
        self._maker: Callable[[], AnyEnv] | None = None
        self._adapter: EnvAdapter | None = None

    def run_commands(self) -> None:
        """Execute the command of every lane; a lane that fails does not affect the others."""
        for lane, command in enumerate(self._memory.command.tolist()):
            if command != IDLE:
                self._memory.outcome[lane] = self._run(lane, command, int(self._memory.argument[lane]))
        self._memory.clear_lane()

    def close(self) -> None:
        """Close all environments."""
        for lane in range(len(self._envs)):
            self._close_env(lane)

    def _run(self, lane: int, command: int, argument: int) -> int:
        try:
            self._execute(lane, command, argument)
        except OutsideSpace as error:
            self._memory.set_message(lane, f"{error.field}: expected {error.expected}, got {error.got}")
            self._close_env(lane)
            return OUTSIDE_SPACE
        except BaseException as error:  # sys.exit() must not end the worker either
            self._memory.set_message(lane, _error_message(error))
            self._close_env(lane)
            return RAISED
        return DONE

    def _execute(self, lane: int, command: int, argument: int) -> None:
        env = self._env(lane, command)
        if self._adapter is None:
            self._adapter = self._make_adapter(env)
        self._memory.start_lane(lane, time.monotonic())
        if command == RESET:
            self._adapter.reset(env, argument, self._memory.step, lane)
        else:
            self._adapter.step(env, argument, self._memory.step, lane)
        self._adapter.check_values(self._memory.step, lane)

    def _env(self, lane: int, command: int) -> AnyEnv:
        env = self._envs[lane]
        if env is None:
            if command != RESET:
                raise RuntimeError("a step before the first reset")
            self._memory.start_lane(lane, time.monotonic(), making=True)
            self._maker = self._maker or self._task.maker()
            env = make_checked_env(self._maker, self._task.env.id)
            self._envs[lane] = env
        return env

    def _make_adapter(self, env: AnyEnv) -> EnvAdapter:
        plan = self._task.env
        adapter = EnvAdapter(
            env,
            plan.bins,
            plan.id,
            masked=self._spec.masked,
            check_bounds=plan.check_bounds,
            info=self._task.info,
        )
        if adapter.spec != self._spec:
            raise OutsideSpace("spaces of a new copy", str(self._spec), str(adapter.spec))
        return adapter

    def _close_env(self, lane: int) -> None:
        env = self._envs[lane]
        self._envs[lane] = None
        if env is not None:
            with contextlib.suppress(Exception, SystemExit):
                env.close()


def env_worker_main(setup: EnvWorkerSetup) -> None:
    """The main function of a worker: execute commands until the parent sends STOP or ends."""
    memory = EnvWorkerMemory(setup.spec, setup.lanes, setup.region, num_info=len(setup.task.info))
    worker = EnvWorker(setup.task, setup.spec, memory)
    connection = setup.connection
    connection.settimeout(_POLL_SECONDS)
    with contextlib.suppress(ConnectionError):
        connection.send(READY)
        while _receive(connection) == RUN:
            worker.run_commands()
            limit_log()
            connection.send(FINISHED)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_CLOSE_SECONDS)  # ends the process if close() of an environment hangs
    worker.close()
    os._exit(0)


def probe_main(setup: EnvProbeSetup) -> None:
    """Make one environment, reset it, and report its spec or the time of its steps."""
    try:
        probe = _probe_speed(setup) if setup.timed else _probe_spec(setup)
    except QfleetError as error:
        what, why, fix = (text[:_TEXT_CHARACTERS] for text in (error.what, error.why, error.fix))
        probe = EnvProbe(error=(type(error).__name__, what, why, fix), traceback=_traceback(error.__cause__ or error))
    except BaseException as error:
        what = f"{setup.task.env.id}: the environment could not be made: it {describe_error(error)}"[:_TEXT_CHARACTERS]
        error_parts = ("EnvError", what, "This came from inside it.", "Mend the environment.")
        probe = EnvProbe(error=error_parts, traceback=_traceback(error))
    data = msgspec.json.encode(probe)
    setup.report.view[: len(data)] = data
    os._exit(0)


def _probe_speed(setup: EnvProbeSetup) -> EnvProbe:
    env = setup.task.env
    world = SyncVectorEnv(
        setup.task.maker(), 1, seed=setup.seed, stream=0, name=env.id, bins=env.bins, check_bounds=env.check_bounds
    )
    world.reset()
    setup.report.view[MADE_FLAG_AT] = 1
    return EnvProbe(step_seconds=time_steps(world))


def _probe_spec(setup: EnvProbeSetup) -> EnvProbe:
    task = setup.task
    env = make_checked_env(task.maker(), task.env.id)
    adapter = EnvAdapter(env, task.env.bins, task.env.id)
    try:
        adapter.detect_masks(env, setup.seed)
    except EnvRaised as raised:
        error = raised.error
        raise EnvError(
            f"{task.env.id}, lane 0: reset() {describe_error(error)}",
            f"This came from inside the environment, in its first reset (seed {setup.seed}).",
            "Mend the environment.",
        ) from error
    with contextlib.suppress(Exception):
        env.close()
    spec = adapter.spec
    text = ""
    with contextlib.suppress(SpacesNotKept):
        text = write_spaces(EnvSpaces(env.observation_space, env.action_space, spec.masked)).decode()
    return EnvProbe(spec.obs, spec.dtype, spec.actions, spec.masked, notes=adapter.notes, spaces=text)


def _receive(connection: socket.socket) -> bytes:
    """The next message; empty once the parent has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            return connection.recv(1)
    return b""


def _error_message(error: BaseException) -> str:
    """A line that names the error, and the traceback from the call of the environment on."""
    if isinstance(error, EnvRaised):
        call = f"{error.call}()"
        error = error.error
    else:
        call = "the environment"
    return f"{call} {describe_error(error)}\n{_traceback(error)}"


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_TEXT_CHARACTERS:]
