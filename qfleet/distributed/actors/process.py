"""Actor processes on this machine, connected to the learner by shared memory."""

from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore
from qfleet.build.components import Components, LearnerSide
from qfleet.build.make import join_components
from qfleet.build.worlds import ROLES, EnvMaker
from qfleet.data import Rollout, Spec
from qfleet.data.wire_format import lz4_block
from qfleet.distributed.actors.launcher import COMPRESSED_COLUMNS, COUNTS, actor_files
from qfleet.distributed.actors.main import ActorSetup, EnvFaultMessage, act_until_stopped
from qfleet.distributed.actors.pool import ActorPool, make_actor_pool
from qfleet.distributed.actors.weights_board import SharedWeightsBoard, layout_of
from qfleet.distributed.replay.client import RemoteReplay, join_remote_replay
from qfleet.distributed.replay.process import make_shared_replay
from qfleet.envs import is_native
from qfleet.envs.options import secret_variables
from qfleet.envs.workers.pool import CLOSE_SECONDS
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.plan.validate.placement import has_central_inference, num_senders
from qfleet.system.child_process import fork_server
from qfleet.system.ring import RolloutRing, SharedCounters
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

COUNTERS = ("progress", "waits", *COUNTS)
STOP_SECONDS = 0.5
CLOSING_SECONDS = CLOSE_SECONDS + 2 * STOP_SECONDS  # for an actor with environment workers


class ActorProcess:
    """The handle of an actor process."""

    def __init__(
        self, process: WorkerProcess, setup: ActorSetup, reports: Connection, stop_seconds: float = STOP_SECONDS
    ) -> None:
        self.stop_seconds = stop_seconds  # between SIGTERM and SIGKILL
        self.process = process
        self.channel = setup.channel
        self.counters = setup.counters
        self.worker = setup.worker
        self.reports = reports

    def alive(self) -> bool:
        """Is the process running?"""
        return self.process.is_alive()

    def progress(self) -> int:
        """The actor's progress counter."""
        return self.counters.read(self.worker)["progress"]

    def get(self) -> Rollout | None:
        """The oldest rollout in the actor's ring."""
        return self.channel.get()

    def request_stop(self) -> None:
        """Ask the actor to stop."""
        self.process.request_stop()

    def stop(self) -> None:
        """Request a stop, and kill the process after `stop_seconds`."""
        self.process.stop(self.stop_seconds)

    def env_faults(self) -> list[dict[str, Any]]:
        """Environment faults reported since the last call."""
        faults = list[dict[str, Any]]()
        with suppress(EOFError, OSError, msgspec.DecodeError):
            while self.reports.poll(0):
                faults.append(msgspec.msgpack.decode(self.reports.recv_bytes(1 << 16), type=EnvFaultMessage).fault)
        return faults

    def final_error(self) -> str:
        """The error that the actor reported, or how its process ended; a UsageError is raised."""
        error = self.process.final_error()
        return self.process.how_ended() if error is None else error.message()

    def close(self) -> None:
        """Free the ring, the pipe and the memory of the process."""
        self.channel.close()
        self.reports.close()
        self.process.close()


class ProcessActorLauncher:
    """Starts actor processes and publishes weights to them."""

    def __init__(
        self,
        plan: Plan,
        spec: Spec,
        weights: Any,
        make: EnvMaker | None,
        torso: nn.Module | None,
        explore: Explore | None,
    ) -> None:
        if not isinstance(plan.runtime, ProcessesRuntime):
            raise TypeError(f"runtime.type={plan.runtime.__struct_config__.tag} has no processes")
        self.plan = plan
        self.spec = spec
        self.runtime = plan.runtime
        self.user_parts = (make, torso, explore)
        self.needs_main = b"__main__" in require_sendable(self.user_parts)
        if plan.runtime.compress:
            lz4_block()  # fail now, not in the actors, if lz4 is missing
        self.lanes = plan.env.num // num_senders(plan)
        device = torch.device(self.runtime.inference_device or "cpu")
        self.board = SharedWeightsBoard(layout_of(weights), device=device)
        self.counters = SharedCounters(COUNTERS, num_senders(plan))
        self.replaced_counts = dict.fromkeys(COUNTS, 0)
        self.folder: Path | None = None
        self.context = fork_server(ROLES)
        self.stop_seconds = CLOSING_SECONDS if has_workers(plan, make) else STOP_SECONDS

    def launch(self, worker: int, incarnation: int) -> ActorProcess:
        """Start an actor with a ring of its own: rollouts that an old incarnation still writes are never read."""
        for name in COUNTS:
            self.replaced_counts[name] += self.counters.read(worker)[name]
        self.counters.clear(worker)
        compressed = COMPRESSED_COLUMNS if self.runtime.compress else ()
        channel = RolloutRing(self.spec, self.lanes, self.runtime.chunk_rows, self.runtime.slots, compress=compressed)
        reader, writer = self.context.Pipe(duplex=False)
        setup = ActorSetup(
            msgspec.json.encode(self.plan),
            worker,
            incarnation,
            channel,
            self.board,
            self.counters,
            writer,
            *self.user_parts,
            *actor_files(self.plan, self.folder, worker, incarnation),
        )
        variables = secret_variables(self.plan.env)
        options = WorkerOptions(setup.log, starts_processes=True, stops_on_sigterm=True, variables=variables)
        name = f"actor-{worker}"
        process = WorkerProcess(self.context, name, act_until_stopped, setup, options, needs_main=self.needs_main)
        process.start()
        writer.close()
        return ActorProcess(process, setup, reader, self.stop_seconds)

    def publish(self, version: int, weights: Any, steps: int) -> None:
        """Publish the newest weights and the step count."""
        self.board.publish(version, weights, env_steps=steps)

    def counts(self) -> dict[str, int]:
        """The counters of all actors, summed over all incarnations."""
        return {name: self.replaced_counts[name] + sum(self.counters.column(name)) for name in COUNTS}

    def publish_steps(self, steps: int) -> None:
        """Publish the number of steps received."""
        self.board.write_numbers(env_steps=steps)

    def close(self) -> None:
        """Free the board and the counters."""
        self.board.close()
        self.counters.close()


def has_workers(plan: Plan, make: EnvMaker | None) -> bool:
    """Do the actors have environment workers?"""
    return plan.env.workers > 0 or (has_central_inference(plan) and not is_native(plan.env, make))


def require_sendable(user_parts: tuple[Any, ...]) -> bytes:
    """Pickle the user's objects; refuse objects that cannot be sent to another process."""
    pickled = b""
    for name, value in zip(("env", "torso", "explore"), user_parts, strict=True):
        try:
            pickled += bytes(ForkingPickler.dumps(value))
        except Exception as error:
            raise UsageError(
                f"{name}={value!r} cannot be given to another process",
                f"runtime.type=processes sends it to the actors, and Python said: {error}.",
                "Define it at the top level of a module, or use runtime.type=inline.",
            ) from error
    return pickled


def make_process_components(
    plan: Plan, spec: Spec, make: EnvMaker | None = None, torso: nn.Module | None = None, explore: Explore | None = None
) -> Components:
    """The components of a run whose actors have processes of their own."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime):
        raise TypeError("not a plan for processes")

    def make_actors(learning: LearnerSide) -> ActorPool:
        launcher = ProcessActorLauncher(
            plan, learning.batch_source.replay.spec, learning.learner.weights(), make, torso, explore
        )
        return make_actor_pool(plan, spec, learning, launcher, explore)

    if not runtime.replay_process:
        return join_components(plan, spec, make_actors, torso)

    def make_replay(plan: Plan, stored: Spec) -> RemoteReplay:
        return make_shared_replay(plan, stored, fork_server(ROLES), runtime)

    return join_remote_replay(plan, spec, make_actors, torso, make_replay)
