"""Actor processes on this machine, connected to the learner by shared memory."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from qfleet.build.components import Components, LearnerSide
from qfleet.build.custom_parts import NO_CUSTOM_PARTS, CustomParts, pack_parts
from qfleet.build.make import join_components
from qfleet.build.worlds import ROLES, EnvMaker
from qfleet.data import Rollout, Spec
from qfleet.data.wire_format import MessageTooLarge, lz4_block
from qfleet.distributed.actors.handle import ActorHandle
from qfleet.distributed.actors.launcher import COMPRESSED_COLUMNS, COUNTS, actor_files
from qfleet.distributed.actors.main import ActorSetup, LearnerLinks, act_until_signalled
from qfleet.distributed.actors.messages import EnvFaultMessage
from qfleet.distributed.actors.pool import ActorPool, make_actor_pool
from qfleet.distributed.actors.weights_board import SharedWeightsBoard, layout_of
from qfleet.distributed.replay.client import RemoteReplay, join_remote_replay
from qfleet.distributed.replay.process import make_shared_replay
from qfleet.distributed.worker.local import LocalWorker
from qfleet.envs import is_native
from qfleet.envs.options import secret_variables
from qfleet.envs.workers.pool import CLOSE_SECONDS
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.plan.validate.placement import has_central_inference, num_senders
from qfleet.system.child_process import fork_server
from qfleet.system.ring import Ring, RolloutRing, SharedCounters
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

COUNTERS = ("progress", *COUNTS)
STOP_SECONDS = 0.5
CLOSING_SECONDS = CLOSE_SECONDS + 2 * STOP_SECONDS  # for an actor with environment workers
FAULT_SLOTS = 32
FAULT_BYTES = 1 << 14


class FaultRing:
    """Environment faults of an actor, in shared memory; one that comes while the ring is full is dropped."""

    def __init__(self) -> None:
        self.ring = Ring(EnvFaultMessage, FAULT_SLOTS, FAULT_BYTES)

    def report(self, message: EnvFaultMessage) -> None:
        """Report a fault, unless the learner has not read the last ones for a while."""
        with suppress(MessageTooLarge):
            self.ring.put(message, {})

    def read(self) -> list[EnvFaultMessage]:
        """Faults reported since the last call."""
        faults = []
        with suppress(ValueError):  # a malformed one is no reason to lose the actor
            while (parts := self.ring.get()) is not None:
                faults.append(parts[0])
        return faults


@dataclass(eq=False)
class SharedRollouts:
    """The learner's end of an actor on this machine: rollouts, faults and progress in shared memory."""

    worker: int
    rollouts: RolloutRing
    faults: FaultRing
    counters: SharedCounters  # of all actors

    def get(self) -> Rollout | None:
        """The oldest rollout in the actor's ring."""
        return self.rollouts.get()

    def progress(self) -> int:
        """The actor's progress counter."""
        return self.counters.read(self.worker)["progress"]

    def env_faults(self) -> list[EnvFaultMessage]:
        """Environment faults reported since the last call."""
        return self.faults.read()

    def request_stop(self) -> None:
        """An actor on this machine is signalled."""

    def close(self) -> None:
        """Free the rings."""
        self.rollouts.close()
        self.faults.ring.close()


class ProcessActorLauncher:
    """Starts actor processes and publishes weights to them."""

    def __init__(self, plan: Plan, spec: Spec, weights: Any, custom_parts: CustomParts) -> None:
        if not isinstance(plan.runtime, ProcessesRuntime):
            raise TypeError(f"runtime.type={plan.runtime.__struct_config__.tag} has no processes")
        self.plan = plan
        self.spec = spec
        self.runtime = plan.runtime
        self.custom_parts = pack_parts(custom_parts)
        if plan.runtime.compress:
            lz4_block()  # fail now, not in the actors, if lz4 is missing
        self.lanes = plan.env.num // num_senders(plan)
        device = torch.device(self.runtime.inference_device or "cpu")
        self.board = SharedWeightsBoard(layout_of(weights), device=device)
        self.counters = SharedCounters(COUNTERS, num_senders(plan))
        self.replaced_counts = dict.fromkeys(COUNTS, 0)
        self.folder: Path | None = None
        self.context = fork_server(ROLES)
        self.stop_seconds = CLOSING_SECONDS if has_workers(plan, custom_parts.env) else STOP_SECONDS

    def launch(self, worker: int, incarnation: int) -> ActorHandle:
        """Start an actor with rings of its own: what an old incarnation still writes is never read."""
        for name in COUNTS:
            self.replaced_counts[name] += self.counters.read(worker)[name]
        self.counters.clear(worker)
        compressed = COMPRESSED_COLUMNS if self.runtime.compress else ()
        shape = (self.spec, self.lanes, self.runtime.chunk_rows, self.runtime.slots)
        rollouts = RolloutRing(*shape, compress=compressed, num_info=len(self.plan.log.info))
        faults = FaultRing()
        files = actor_files(self.plan, self.folder, worker, incarnation)
        setup = ActorSetup(msgspec.json.encode(self.plan), worker, incarnation, self.custom_parts, *files)
        links = LearnerLinks(rollouts, self.board, self.counters, faults.report)
        process = self.start_process(setup, links)
        channel = SharedRollouts(worker, rollouts, faults, self.counters)
        return ActorHandle(LocalWorker(process), channel, self.stop_seconds)

    def start_process(self, setup: ActorSetup, links: LearnerLinks) -> WorkerProcess:
        """Start the process of an actor."""
        variables = secret_variables(self.plan.env)
        options = WorkerOptions(setup.log, starts_processes=True, stops_on_sigterm=True, variables=variables)
        name = f"actor-{setup.worker}"
        process = WorkerProcess(self.context, name, act_until_signalled, (setup, links), options)
        process.start()
        return process

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


def make_process_components(plan: Plan, spec: Spec, custom_parts: CustomParts = NO_CUSTOM_PARTS) -> Components:
    """The components of a run whose actors have processes of their own."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime):
        raise TypeError("not a plan for processes")

    def make_actors(learning: LearnerSide) -> ActorPool:
        replay = learning.batch_source.replay
        launcher = ProcessActorLauncher(plan, replay.spec, learning.learner.weights(), custom_parts)
        return make_actor_pool(plan, spec, learning, launcher, custom_parts.explore)

    if not runtime.replay_process:
        return join_components(plan, spec, make_actors, custom_parts)

    def make_replay(plan: Plan, stored: Spec) -> RemoteReplay:
        return make_shared_replay(plan, stored, fork_server(ROLES), runtime, custom_parts.sampler)

    return join_remote_replay(plan, spec, make_actors, custom_parts, make_replay)
