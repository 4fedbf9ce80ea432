"""Publishing weights to actors on Ray, without Ray: not too often, and not too late."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qfleet.data import Spec
from qfleet.distributed.ray.rpc import LearnerEndpoint, RolloutInbox, WeightsView
from qfleet.plan import make_plan
from qfleet.plan.schema import RayRuntime
from tests.support.runs import SMALL

SPEC = Spec((3,), "float32", (2,))
WEIGHTS = {"a": torch.arange(6.0)}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launcher with a fake object store."""
    pytest.importorskip("ray")
    from qfleet.distributed.ray import actors

    monkeypatch.setattr(actors.ray, "put", lambda message: message)
    plan = make_plan("CartPole-v1", overrides={**SMALL, "runtime.type": "ray", "actors.num": 2})
    assert isinstance(plan.runtime, RayRuntime)
    return actors.RayActorLauncher(plan, plan.runtime, SPEC, WEIGHTS, (None, None, None), LearnerEndpoint())


def version(launcher: Any) -> int:
    """The version that is published."""
    return int(launcher.endpoint.published[0])


def test_weights_published_too_soon_are_published_later(launcher: Any) -> None:
    launcher.endpoint.open(RolloutInbox(SPEC, 2, 2, 2, source=(0, 0)))
    launcher.publish(1, WEIGHTS, 10)
    launcher.publish_at += 100.0
    launcher.publish(2, WEIGHTS, 20)
    launcher.publish(3, WEIGHTS, 30)
    assert version(launcher) == 1
    launcher.publish_steps(31)
    assert version(launcher) == 1
    launcher.publish_at = float("-inf")
    launcher.publish_steps(32)  # no update was made since
    assert (version(launcher), launcher.endpoint.env_steps) == (3, 32)


def test_weights_are_published_at_once_when_no_actor_runs(launcher: Any) -> None:
    inbox = launcher.endpoint.open(RolloutInbox(SPEC, 2, 2, 2, source=(0, 0)))
    launcher.publish(1, WEIGHTS, 10)
    launcher.publish_at += 100.0
    inbox.request_stop()  # all actors were stopped
    launcher.publish(2, WEIGHTS, 5)
    assert version(launcher) == 2


class Place:
    """A reference to a message in the object store."""

    def __init__(self, message: bytes) -> None:
        self.message = message


def test_weights_are_put_into_the_object_store_once_per_version(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from qfleet.distributed.ray import actors

    stored, fetched = list[Place](), list[Place]()

    def put(message: bytes) -> Place:
        stored.append(Place(message))
        return stored[-1]

    def get(call: Any, timeout: float) -> Any:
        if isinstance(call, Place):
            fetched.append(call)
            return call.message
        return call

    monkeypatch.setattr(actors.ray, "put", put)
    monkeypatch.setattr(actors.ray, "get", get)
    trainer = SimpleNamespace(weights=SimpleNamespace(remote=launcher.endpoint.weights))
    callers = [actors.LearnerCalls(trainer) for _ in range(4)]
    for worker in range(4):
        launcher.endpoint.open(RolloutInbox(SPEC, 2, 2, 2, source=(worker, 0)))
    for number in (1, 2, 3):
        launcher.publish_at = float("-inf")
        launcher.publish(number, {"a": WEIGHTS["a"] + number}, 10 * number)
        for caller in callers:
            launcher.publish_at = float("-inf")
            launcher.publish_steps(10 * number + 1)  # rollouts arrive meanwhile
            weights_view = WeightsView(launcher.layout)
            weights_view.newest = caller.fetch(number - 1)
            assert torch.equal(weights_view.read(number - 1)[1]["a"], WEIGHTS["a"] + number)  # type: ignore[index]
            assert caller.fetch(number) is None
    assert len(stored) == 3
    assert fetched == [place for place in stored for _ in callers]
