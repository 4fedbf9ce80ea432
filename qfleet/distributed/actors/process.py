"""Actors in processes of their own on this machine, joined to the learner by shared memory."""

import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from qfleet.act import Explore
from qfleet.build.components import ROLES, Components, EnvMaker, LearnerSide, join_parts
from qfleet.data import Rollout, Spec
from qfleet.data.wire_format import lz4_block
from qfleet.distributed.actors.main import ActorSetup, EnvFaultMessage, FinalError, serve
from qfleet.distributed.actors.pool import COUNTS, IN_FLIGHT, ActorPool, make_actor_pool
from qfleet.distributed.actors.weights_board import SharedWeightsBoard, layout_of
from qfleet.distributed.replay.client import RemoteReplay, join_remote
from qfleet.distributed.replay.process import make_shared_replay
from qfleet.envs import is_native
from qfleet.envs.options import secret_variables
from qfleet.envs.workers.pool import CLOSE_SECONDS
from qfleet.errors import UsageError
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.plan.validate.placement import is_central, num_senders
from qfleet.system.child_process import fork_server, hidden_main
from qfleet.system.oom import oom_kills
from qfleet.system.ring import RolloutRing, SharedCounters

GAUGES = ("progress", "waits", *COUNTS)
END_SECONDS = 0.5
CLOSING_SECONDS = CLOSE_SECONDS + 2 * END_SECONDS  # for an actor whose environments have processes of their own
USAGE = 2  # exit code of what another try cannot mend


class ActorProcess:
    """One actor's process."""

    def __init__(
        self, process: BaseProcess, post: ActorSetup, words: Connection, patience: float = END_SECONDS
    ) -> None:
        self.patience = patience  # seconds that it may take to end, once it was asked to
        self.process = process
        self.belt = post.belt
        self.gauges = post.gauges
        self.worker = post.worker
        self.words = words
        self.heard = list[dict[str, Any]]()
        self.last: FinalError | None = None
        self.oom_kills = oom_kills()  # when it began

    def alive(self) -> bool:
        """Does the process live?"""
        return self.process.is_alive()

    def progress(self) -> int:
        """As its gauge says."""
        return self.gauges.read(self.worker)["progress"]

    def get(self) -> Rollout | None:
        """The oldest rollout in its ring."""
        return self.belt.get()

    def ask(self) -> None:
        """Ask it to end; a stopped process would not hear, so it goes on for that."""
        if self.process.is_alive() and self.process.pid is not None:
            self.process.terminate()
            with suppress(OSError):
                os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Ask, then kill."""
        self.ask()
        self.process.join(self.patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_SECONDS)
        if self.process.pid:  # the group of nobody would be our own
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what its environments have started

    def troubles(self) -> list[dict[str, Any]]:
        """What went wrong in its environments since this was last asked."""
        self.listen()
        heard = self.heard
        self.heard = []
        return heard

    def last_words(self) -> str:
        """What it said, or how the process ended; an error of usage is raised, for another try cannot mend it."""
        self.listen()
        if self.last is None:
            code = self.process.exitcode
            if code == -signal.SIGKILL and oom_kills() > self.oom_kills:
                return "its process was killed by the kernel, for lack of memory"
            return f"its process ended with exit code {code}"
        if self.last.exit_code == USAGE:
            raise UsageError(self.last.what, self.last.why, self.last.fix)
        return self.last.what

    def listen(self) -> None:
        """Take in what it has said."""
        with suppress(EOFError, OSError, msgspec.DecodeError):
            while self.words.poll(0):
                said = msgspec.msgpack.decode(self.words.recv_bytes(1 << 16), type=EnvFaultMessage | FinalError)
                if isinstance(said, FinalError):
                    self.last = said
                else:
                    self.heard.append(said.fault)

    def close(self) -> None:
        """Free the belt."""
        self.belt.close()
        self.words.close()


class ProcessActorLauncher:
    """Starts actors' processes and shows them the weights."""

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
        self.own = (make, torso, explore)
        self.needs_main = b"__main__" in require_sendable(self.own)
        if plan.runtime.compress:
            lz4_block()  # here, where its absence is told at once
        self.lanes = plan.env.num // num_senders(plan)
        device = torch.device(self.runtime.inference_device or "cpu")
        self.board = SharedWeightsBoard(layout_of(weights), device=device)
        self.gauges = SharedCounters(GAUGES, num_senders(plan))
        self.before = dict.fromkeys(COUNTS, 0)  # of actors that have been replaced
        self.folder: Path | None = None
        self.context = fork_server(ROLES)
        self.patience = CLOSING_SECONDS if has_workers(plan, make) else END_SECONDS

    def hire(self, worker: int, incarnation: int) -> ActorProcess:
        """Start one with a belt of its own: what an old incarnation still writes, nobody reads."""
        for name in COUNTS:
            self.before[name] += self.gauges.read(worker)[name]
        self.gauges.clear(worker)
        squeezed = IN_FLIGHT if self.runtime.compress else ()
        belt = RolloutRing(self.spec, self.lanes, self.runtime.chunk_rows, self.runtime.slots, compress=squeezed)
        mine, theirs = self.context.Pipe(duplex=False)
        log = self.file("logs", f"actor-{worker}.log")
        notes = self.file("history", f"actor-{worker}-{incarnation:06d}.jsonl") if self.plan.log.history else None
        plan = msgspec.json.encode(self.plan)
        more: dict[str, Any] = {"log": log, "history": notes, "variables": secret_variables(self.plan.env)}
        post = ActorSetup(plan, worker, incarnation, belt, self.board, self.gauges, theirs, *self.own, **more)
        process = self.context.Process(target=serve, args=(post,), name=f"qfleet-actor-{worker}", daemon=True)
        with hidden_main(not self.needs_main):
            process.start()
        theirs.close()
        return ActorProcess(process, post, mine, self.patience)

    def file(self, *parts: str) -> str | None:
        """A file in the run's folder, once there is one."""
        return None if self.folder is None else str(self.folder.joinpath(*parts))

    def publish(self, version: int, weights: Any, steps: int) -> None:
        """Show the newest weights."""
        self.board.publish(version, weights, env_steps=steps)

    def counts(self) -> dict[str, int]:
        """As the gauges say."""
        return {name: self.before[name] + sum(self.gauges.column(name)) for name in COUNTS}

    def tell(self, steps: int) -> None:
        """Show how many steps came in."""
        self.board.tell(env_steps=steps)

    def close(self) -> None:
        """Free the board."""
        self.board.close()
        self.gauges.close()


def has_workers(plan: Plan, make: EnvMaker | None) -> bool:
    """Do actors step their environments in processes of their own?"""
    return plan.env.workers > 0 or (is_central(plan) and not is_native(plan.env, make))


def require_sendable(own: tuple[Any, ...]) -> bytes:
    """What is given as Python objects must be something that another process can be given: answers what it is sent."""
    sent = b""
    for name, thing in zip(("env", "torso", "explore"), own, strict=True):
        try:
            sent += bytes(ForkingPickler.dumps(thing))
        except Exception as error:
            raise UsageError(
                f"{name}={thing!r} cannot be given to another process",
                f"runtime.type=processes sends it to the actors, and Python said: {error}.",
                "Define it at the top level of a module, or use runtime.type=inline.",
            ) from error
    return sent


def make_process_components(
    plan: Plan, spec: Spec, make: EnvMaker | None = None, torso: nn.Module | None = None, explore: Explore | None = None
) -> Components:
    """A line whose actors live in processes of their own."""
    runtime = plan.runtime
    if not isinstance(runtime, ProcessesRuntime):
        raise TypeError("not a plan for processes")

    def hire(learning: LearnerSide) -> ActorPool:
        site = ProcessActorLauncher(
            plan, learning.batch_source.replay.spec, learning.learner.weights(), make, torso, explore
        )
        return make_actor_pool(plan, spec, learning, site, explore)

    if not runtime.replay_process:
        return join_parts(plan, spec, hire, torso)

    def remember(plan: Plan, stored: Spec) -> RemoteReplay:
        return make_shared_replay(plan, stored, fork_server(ROLES), runtime)

    return join_remote(plan, spec, hire, torso, remember)
