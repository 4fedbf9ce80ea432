"""Gradient buckets, whose sums overlap the backward pass."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.distributed.learners.worker import build_learner
from qfleet.plan import make_plan
from qfleet.sync.buckets import Buckets, group_by_bytes
from qfleet.sync.comm import NoComm
from tests.distributed.learners.test_group import random_batch
from tests.sync.parts import ThreadComm, run_ranks


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "buckets"),
    [
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 4, 4], 100, [[2, 1, 0]]),
        ([4, 50, 4], 8, [[2], [1], [0]]),
        ([9], 1, [[0]]),
    ],
)
def test_buckets_hold_as_many_parameters_as_fit_from_the_last_to_the_first(
    sizes: list[int], bucket_bytes: int, buckets: list[list[int]]
) -> None:
    assert group_by_bytes(sizes, bucket_bytes) == buckets


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1], [3], []])
def test_sums_do_not_depend_on_the_order_of_gradients(order: list[int]) -> None:
    weights = [torch.zeros(shape) for shape in ((3, 4), (4,), (2, 4), (2,))]

    def act(comm: ThreadComm) -> list[list[Tensor]]:
        buckets, found = Buckets(BegunAtOnce(comm), weights, 40), []
        for number in range(2):
            gradients = [torch.full(weight.shape, float(10 * number + comm.rank)) for weight in weights]
            # Each rank in another order.
            for at in order if comm.rank else reversed(order):
                buckets.add(at, gradients[at])
            found.append(buckets.sums(gradients))
        return found

    for sums in run_ranks(3, act):
        for number, parts in enumerate(sums):
            assert [part.numel() for part in parts] == [12, 4, 8, 2]
            assert all(bool((part == 30.0 * number + 3.0).all()) for part in parts)


class BegunAtOnce:
    """Sums when it begins; there is nothing to wait for."""

    def __init__(self, comm: ThreadComm) -> None:
        self.comm = comm

    def begin_sum(self, values: Tensor) -> Callable[[], None]:
        self.comm.sum(values)
        return lambda: None


class EventComm(NoComm):
    """Records when sums begin."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def begin_sum(self, values: Tensor) -> Callable[[], None]:
        self.events.append("begun")
        return lambda: None


@pytest.mark.parametrize("dueling", [False, True], ids=["by hand", "by autograd"])
def test_the_first_sum_begins_before_the_last_gradient_is_known(dueling: bool) -> None:
    plan = make_plan("CartPole-v1", overrides={"net.torso.sizes": (16, 16), "net.dueling": dueling})
    spec = make_train_world(plan).spec
    learner, events = build_learner(resolve(plan, spec), spec, spec, NO_CUSTOM_PARTS), list[str]()
    buckets = Buckets(EventComm(events), learner.parameters, 300)

    def ready(at: int, gradient: Tensor) -> None:
        events.append(f"gradient {at}")
        buckets.add(at, gradient)

    half = learner.prepare_shared_update(random_batch(32), 0.5, ready)
    assert events.index("begun") < events.index("gradient 0")
    gradients = {event for event in events if event != "begun"}
    assert gradients == {f"gradient {at}" for at in range(len(learner.names))}
    assert events.count("begun") < len(buckets.buckets)  # the last one waits until all is known to be finite
    whole, sums = learner.prepare_shared_update(random_batch(32)), buckets.sums(half.gradients)
    for total, gradient in zip(sums, whole.gradients, strict=True):
        torch.testing.assert_close(total, gradient.reshape(-1) * 0.5)
