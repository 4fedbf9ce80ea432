"""An actor as the pool sees it: its process, and the channel that brings its rollouts, faults and progress."""

import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from qfleet.data import Rollout
from qfleet.distributed.actors.messages import EnvFaultMessage
from qfleet.distributed.worker.transport import WorkerControl

POLL_SECONDS = 0.01


class RolloutChannel(Protocol):
    """What one incarnation of an actor sends, at the learner's end."""

    def get(self) -> Rollout | None:
        """The oldest rollout waiting, if any; also after the actor has ended. An invalid one is a ValueError."""

    def progress(self) -> int:
        """The actor's own progress counter; it also rises while the actor waits for room."""

    def env_faults(self) -> list[EnvFaultMessage]:
        """Environment faults reported since the last call."""

    def request_stop(self) -> None:
        """Tell the actor to end, if its messages get replies; else its process is signalled."""

    def close(self) -> None:
        """Free what belongs to this incarnation."""


@dataclass(eq=False)
class ActorHandle:
    """One incarnation of an actor, in whatever process it runs."""

    control: WorkerControl
    channel: RolloutChannel
    stop_seconds: float  # to close its environments, before it is killed

    def env_faults(self) -> list[dict[str, Any]]:
        """Environment faults reported since the last call."""
        return [asdict(message.fault) for message in self.channel.env_faults()]

    def request_stop(self) -> None:
        """Ask the actor to end, without waiting."""
        self.channel.request_stop()
        self.control.request_stop()

    def stop(self) -> None:
        """Stop the actor; kill it after `stop_seconds`. What it has sent can still be read."""
        self.request_stop()
        until = time.monotonic() + self.stop_seconds
        while self.control.is_alive() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self.control.stop()

    def kill(self) -> None:
        """End an actor that does not answer, without waiting for it. What it has sent can still be read."""
        self.request_stop()
        self.control.stop()

    def close(self) -> None:
        """Free the channel; the actor must have been stopped."""
        self.channel.close()
