"""The handle of an actor, with a fake process and channel; and the ring of its environments' faults."""

import time

from qfleet.data import Rollout
from qfleet.distributed.actors.handle import ActorHandle
from qfleet.distributed.actors.messages import EnvFaultMessage
from qfleet.distributed.actors.process import FAULT_BYTES, FAULT_SLOTS, FaultRing
from qfleet.envs.workers.pool import EnvFault
from qfleet.system.worker_errors import WorkerDied, WorkerLost

FAULT = EnvFault("raised", 1, (2, 3), (2,), "it raised", "Traceback ...", 0.5, (3,))


class FakeActor:
    """A process that ends some looks after it was asked to, and a channel; both record what was called."""

    def __init__(self, looks: int) -> None:
        self.looks, self.calls = looks, list[str]()

    def is_alive(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def is_pending(self) -> bool:
        return False

    def why_lost(self) -> WorkerLost:
        return WorkerDied("its process was ended by SIGKILL")

    def request_stop(self) -> None:
        self.calls.append("request_stop")

    def stop(self) -> None:
        self.calls.append("stop")

    def get(self) -> Rollout | None:
        return None

    def progress(self) -> int:
        return 7

    def env_faults(self) -> list[EnvFaultMessage]:
        return [EnvFaultMessage(FAULT)]

    def close(self) -> None:
        self.calls.append("close")


def test_an_actor_has_time_to_end_before_it_is_killed() -> None:
    process, channel = FakeActor(looks=3), FakeActor(0)
    handle = ActorHandle(process, channel, stop_seconds=30.0)
    handle.stop()
    assert process.calls == ["request_stop", "stop"]
    assert channel.calls == ["request_stop"]  # what it has sent can still be read
    assert process.looks < 0
    handle.close()
    assert channel.calls == ["request_stop", "close"]


def test_an_actor_that_does_not_end_is_killed_in_time() -> None:
    process = FakeActor(looks=10**9)
    begin = time.monotonic()
    ActorHandle(process, FakeActor(0), stop_seconds=0.05).stop()
    assert time.monotonic() - begin < 10
    assert process.calls == ["request_stop", "stop"]


def test_a_hung_actor_is_killed_without_waiting() -> None:
    process, channel = FakeActor(looks=10**9), FakeActor(0)
    handle = ActorHandle(process, channel, stop_seconds=30.0)
    begin = time.monotonic()
    handle.kill()
    assert time.monotonic() - begin < 5
    assert process.calls == ["request_stop", "stop"]
    assert channel.calls == ["request_stop"]  # what it has sent can still be read


def test_the_cause_of_a_loss_is_that_of_the_process() -> None:
    handle = ActorHandle(FakeActor(0), FakeActor(0), stop_seconds=0.0)
    assert not handle.control.is_alive()
    assert str(handle.control.why_lost()) == "its process was ended by SIGKILL"
    assert handle.channel.progress() == 7
    (fault,) = handle.env_faults()
    assert (fault["kind"], fault["lanes"], fault["quarantined"]) == ("raised", (2, 3), (3,))


def reports(ring: FaultRing) -> list[float]:
    return [message.fault.seconds for message in ring.read()]


def fault(seconds: float, cause: str = "") -> EnvFaultMessage:
    return EnvFaultMessage(EnvFault("died", 0, (), (), "it died", cause, seconds))


def test_faults_arrive_once_and_in_order_and_are_dropped_while_the_ring_is_full() -> None:
    ring = FaultRing()
    for number in range(FAULT_SLOTS + 5):
        ring.report(fault(float(number)))
    assert reports(ring) == [float(number) for number in range(FAULT_SLOTS)]
    assert reports(ring) == []
    ring.report(EnvFaultMessage(FAULT))
    assert ring.read() == [EnvFaultMessage(FAULT)]


def test_a_fault_that_is_too_long_is_dropped() -> None:
    ring = FaultRing()
    ring.report(fault(1.0, "x" * FAULT_BYTES))
    ring.report(fault(2.0))
    assert reports(ring) == [2.0]


def test_a_malformed_fault_is_skipped() -> None:
    ring = FaultRing()
    ring.report(fault(1.0))
    ring.ring.put(EnvFaultMessage("nonsense"), {})  # type: ignore[arg-type]
    ring.report(fault(2.0))
    assert reports(ring) + reports(ring) == [1.0, 2.0]
