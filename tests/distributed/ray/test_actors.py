"""How weights are shown to actors on Ray, without Ray: never too often, and never too late."""

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
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A site whose object store is nothing but the parcel."""
    pytest.importorskip("ray")
    from qfleet.distributed.ray import actors

    monkeypatch.setattr(actors.ray, "put", lambda parcel: parcel)
    plan = make_plan("CartPole-v1", overrides={**SMALL, "runtime.type": "ray", "actors.num": 2})
    assert isinstance(plan.runtime, RayRuntime)
    return actors.RaySite(plan, plan.runtime, SPEC, WEIGHTS, (None, None, None), LearnerEndpoint())


def version(site: Any) -> int:
    """Of the weights that an actor is shown."""
    return int(site.desk.shown[0])


def test_weights_that_come_too_soon_are_shown_a_moment_later(site: Any) -> None:
    site.desk.open(RolloutInbox(SPEC, 2, 2, 2, source=(0, 0)))
    site.publish(1, WEIGHTS, 10)
    site.next_at += 100.0
    site.publish(2, WEIGHTS, 20)
    site.publish(3, WEIGHTS, 30)
    assert version(site) == 1
    site.tell(31)
    assert version(site) == 1
    site.next_at = float("-inf")
    site.tell(32)  # no update was made since
    assert (version(site), site.desk.env_steps) == (3, 32)


def test_nobody_begins_by_weights_from_before_a_run_went_back(site: Any) -> None:
    inbox = site.desk.open(RolloutInbox(SPEC, 2, 2, 2, source=(0, 0)))
    site.publish(1, WEIGHTS, 10)
    site.next_at += 100.0
    inbox.close()  # everyone was dismissed
    site.publish(2, WEIGHTS, 5)
    assert version(site) == 2


class Place:
    """Where the object store keeps a parcel; actors get this, and fetch the parcel from their own node's store."""

    def __init__(self, parcel: bytes) -> None:
        self.parcel = parcel


def test_weights_enter_the_object_store_once_per_version_however_many_fetch_them(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qfleet.distributed.ray import actors

    stored, fetched = list[Place](), list[Place]()

    def put(parcel: bytes) -> Place:
        stored.append(Place(parcel))
        return stored[-1]

    def get(call: Any, timeout: float) -> Any:
        if isinstance(call, Place):
            fetched.append(call)
            return call.parcel
        return call

    monkeypatch.setattr(actors.ray, "put", put)
    monkeypatch.setattr(actors.ray, "get", get)
    learner = SimpleNamespace(weights=SimpleNamespace(remote=site.desk.weights))
    lines = [actors.Telephone(learner, worker, 0) for worker in range(4)]
    for worker in range(4):
        site.desk.open(RolloutInbox(SPEC, 2, 2, 2, source=(worker, 0)))
    for number in (1, 2, 3):
        site.next_at = float("-inf")
        site.publish(number, {"a": WEIGHTS["a"] + number}, 10 * number)
        for line in lines:
            site.next_at = float("-inf")
            site.tell(10 * number + 1)  # rollouts come in while they fetch
            window = WeightsView(site.layout)
            window.offer(*line.fetch(number - 1))
            assert torch.equal(window.read(number - 1)[1]["a"], WEIGHTS["a"] + number)  # type: ignore[index]
            assert line.fetch(number) is None
    assert len(stored) == 3
    assert fetched == [place for place in stored for _ in lines]
