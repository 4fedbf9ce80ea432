"""Sums that are begun while gradients are still being computed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qfleet.build.components import make_train_world
from qfleet.build.resolve import resolve
from qfleet.distributed.learners.worker import lone_learner
from qfleet.plan import make_plan
from qfleet.sync.buckets import Buckets, grouped
from qfleet.sync.comm import NoComm, ThreadComm
from tests.distributed.learners.test_group import made_up
from tests.sync.parts import together


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 4, 4], 100, [[2, 1, 0]]),
        ([4, 50, 4], 8, [[2], [1], [0]]),
        ([9], 1, [[0]]),
    ],
)
def test_as_many_together_as_fit_last_ones_first(sizes: list[int], most: int, groups: list[list[int]]) -> None:
    assert grouped(sizes, most) == groups


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1], [3], []])
def test_sums_are_right_in_whatever_order_gradients_come(order: list[int]) -> None:
    weights = [torch.zeros(shape) for shape in ((3, 4), (4,), (2, 4), (2,))]

    def act(comm: ThreadComm) -> list[list[Tensor]]:
        buckets, found = Buckets(comm, weights, 40), []
        for number in range(2):
            gradients = [torch.full(weight.shape, float(10 * number + comm.rank)) for weight in weights]
            # Everybody in an order of its own.
            for at in order if comm.rank else reversed(order):
                buckets.ready(at, gradients[at])
            found.append(buckets.sums(gradients))
        return found

    for sums in together(3, act):
        for number, parts in enumerate(sums):
            assert [part.numel() for part in parts] == [12, 4, 8, 2]
            assert all(bool((part == 30.0 * number + 3.0).all()) for part in parts)


class Watched(NoComm):
    """Notes when sums are begun."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.told = told

    def begin(self, values: Tensor) -> Callable[[], None]:
        self.told.append("begun")
        return lambda: None


@pytest.mark.parametrize("dueling", [False, True], ids=["by hand", "by autograd"])
def test_the_first_sum_is_begun_before_the_last_gradient_is_known(dueling: bool) -> None:
    plan = make_plan("CartPole-v1", overrides={"net.torso.sizes": (16, 16), "net.dueling": dueling})
    spec = make_train_world(plan).spec
    learner, told = lone_learner(resolve(plan, spec), spec, spec, None), list[str]()
    buckets = Buckets(Watched(told), learner.parameters, 300)

    def ready(at: int, gradient: Tensor) -> None:
        told.append(f"gradient {at}")
        buckets.ready(at, gradient)

    half = learner.propose(made_up(32), 0.5, ready)
    assert told.index("begun") < told.index("gradient 0")
    heard = {word for word in told if word != "begun"}
    assert heard == {f"gradient {at}" for at in range(len(learner.names))}
    assert told.count("begun") < len(buckets.groups)  # the last one waits until all is known to be finite
    whole, sums = learner.propose(made_up(32)), buckets.sums(half.gradients)
    for total, gradient in zip(sums, whole.gradients, strict=True):
        torch.testing.assert_close(total, gradient.reshape(-1) * 0.5)
