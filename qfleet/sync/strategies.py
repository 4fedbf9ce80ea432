"""How learners agree: each strategy is a `step` that stands where the optimiser's step stood. Shapes: D numbers.

All learners begin with the same weights and make their steps in the same order. p is their number, x a learner's own
weights, g its gradient, eta the learning rate. What happens to the optimiser's moments is said with each strategy.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qfleet.sync.average import CodedMean, Tell
from qfleet.sync.buckets import Buckets
from qfleet.sync.codecs import Exact
from qfleet.sync.comm import Comm

Ready = Callable[[int, Tensor], None]  # a parameter's number, and its gradient
Step = Callable[[list[Tensor]], float]  # one's own optimiser: clips, steps, and answers the gradient's norm
NOISE = 1e-6  # residuals below this part of the weights
TELL_MEETINGS = 100  # from one word of ADMM's residuals to the next


class Sync(Protocol):
    """Several learners, one set of weights."""

    def step(self, gradients: list[Tensor]) -> float:
        """Make the step that everybody agrees on; the norm of the gradient it was made of."""
        ...


class Allreduce:
    """x <- x - eta mean(g): one learner with all batches. Moments stay equal, because all see the same gradient.

    With `buckets` sums are begun while gradients are still being computed; a codec needs the whole vector instead.
    """

    def __init__(self, step: Step, average: CodedMean, *, total: bool = False, buckets: Buckets | None = None) -> None:
        self.own = step
        self.average = average
        self.factor = average.comm.size if total else 1
        self.buckets = buckets

    def step(self, gradients: list[Tensor]) -> float:
        """Average, then step."""
        if self.buckets is not None:
            sums = self.buckets.sums(gradients)
            torch._foreach_mul_(sums, self.factor / self.average.comm.size)
            pairs = zip(sums, gradients, strict=True)
            return self.own([laid_out(total.view(own.shape), own) for total, own in pairs])
        mean = self.average(flat(gradients))
        return self.own(unflat(mean * self.factor if self.factor > 1 else mean, gradients))


class OptimizerSteps:
    """x <- x + mean(C(s)), s a learner's own step (Efficient-Adam, Chen et al. 2022); moments are one's own.

    What comes through of a gradient by a coarse codec is rare and large. Adam, which divides by the root of its mean
    square, would make ten times smaller steps of one number in a hundred. Its own steps are all of a size.

    Learners look ahead by what the codec still owes them, so that their weights differ a little.
    """

    def __init__(self, step: Step, average: CodedMean, weights: Sequence[Tensor]) -> None:
        self.own = step
        self.average = average
        self.weights = weights
        self.agreed = flat(weights)

    def step(self, gradients: list[Tensor]) -> float:
        """One's own, then everybody's instead; nobody moves if somebody had none to make."""
        before = flat(self.weights)
        norm = self.own(gradients)
        made = flat(self.weights) - before
        way = self.average(made if math.isfinite(norm) else torch.full_like(made, math.nan))
        if not bool(torch.isfinite(way).all()):
            place(before, self.weights)
            return math.nan
        self.agreed = self.agreed + way
        place(ahead(self.agreed, self.average), self.weights)
        return norm


class Local:
    """Local SGD: `every` steps of one's own, then the mean of all weights; moments are averaged too.

    With an outer rate it is DiLoCo (Douillard et al. 2023): the way made is a gradient for Nesterov's momentum.
    """

    def __init__(
        self,
        step: Step,
        average: CodedMean,
        weights: Sequence[Tensor],
        moments: Sequence[Tensor],
        *,
        every: int,
        outer_rate: float | None = None,
        outer_momentum: float = 0.9,
    ) -> None:
        self.own = step
        self.average = average
        self.weights = weights
        self.moments = moments
        self.every = every
        self.outer_rate = outer_rate
        self.outer_momentum = outer_momentum
        self.anchor = self.begun = flat(weights)
        self.velocity = torch.zeros_like(self.anchor)
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> float:
        """One's own step, and now and then everybody's."""
        norm = self.own(gradients)
        self.steps += 1
        if self.steps % self.every == 0:
            self.meet()
        return norm

    def meet(self) -> None:
        """Agree on the mean of the ways made since the last time: that is what a codec may shorten."""
        way = self.average(flat(self.weights) - self.begun)
        if self.outer_rate is not None:
            self.velocity = self.outer_momentum * self.velocity + way
            way = self.outer_rate * (way + self.outer_momentum * self.velocity)
        self.anchor = self.anchor + way
        # What the outer step makes of what is owed, nobody knows yet.
        self.begun = ahead(self.anchor, self.average) if self.outer_rate is None else self.anchor
        place(self.begun, self.weights)
        if self.moments:
            place(Exact().mean(flat(self.moments), self.average.comm)[1], self.moments)


class Easgd:
    """Elastic averaging (Zhang et al. 2015): x <- x - alpha (x - c), c <- c + alpha sum(x - c); moments are one's own.

    Stable for alpha p <= 1. Acted by and saved are rank 0's own weights.
    """

    def __init__(self, step: Step, average: CodedMean, weights: Sequence[Tensor], *, every: int, pull: float) -> None:
        self.own = step
        self.average = average
        self.weights = weights
        self.every = every
        self.alpha = pull / average.comm.size
        self.centre = flat(weights)
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> float:
        """One's own step; now and then learners and centre pull at each other."""
        norm = self.own(gradients)
        self.steps += 1
        if self.steps % self.every == 0:
            own = flat(self.weights)
            apart = self.alpha * (own - self.centre)
            self.centre = self.centre + self.average(apart.clone()) * self.average.comm.size
            place(own - apart, self.weights)
        return norm


class Admm:
    """Consensus ADMM (Boyd et al. 2011, section 7): `every` steps on one's own loss + rho/2 |x - z + u|^2 each.

    Then z <- mean(x + u), u <- u + x - z, and x begins at z (FedDyn, Acar et al. 2021). Residuals r = |x - z|
    and s = rho |z - z'| sqrt(p) say whether rho fits: ten times apart, and it is doubled or halved and u rescaled.
    Moments are one's own; rank 0's weights are saved.
    """

    def __init__(
        self,
        step: Step,
        average: CodedMean,
        weights: Sequence[Tensor],
        *,
        every: int,
        rho: float,
        tell: Tell = lambda kind, **fields: None,
    ) -> None:
        self.own = step
        self.average = average
        self.weights = weights
        self.every = every
        self.rho = rho
        self.tell = tell
        self.consensus = flat(weights)
        self.said = self.consensus.clone()  # x + u, of which the consensus is the mean
        self.dual = torch.zeros_like(self.consensus)
        self.steps = 0
        self.residuals = (0.0, 0.0)

    def step(self, gradients: list[Tensor]) -> float:
        """A step on the loss and the tie to the consensus."""
        tie = self.rho * (flat(self.weights) - self.consensus + self.dual)
        norm = self.own(unflat(flat(gradients) + tie, gradients))
        self.steps += 1
        if self.steps % self.every == 0:
            self.meet()
        return norm

    def meet(self) -> None:
        """Agree anew."""
        own = flat(self.weights)
        before = self.consensus
        comm = self.average.comm
        # As the change since the last time: what a codec leaves out of that is sent later, and counted once.
        said = self.said
        self.said = own + self.dual
        self.consensus = before + self.average(self.said - said)
        self.dual = self.dual + own - self.consensus
        place(self.consensus, self.weights)
        apart = ((own - self.consensus) ** 2).sum().reshape(1)
        comm.sum(apart)
        primal = math.sqrt(float(apart))
        moved = self.rho * float(torch.linalg.vector_norm(self.consensus - before)) * math.sqrt(comm.size)
        self.residuals = (primal, moved)
        if self.steps // self.every % TELL_MEETINGS == 1:
            self.tell("admm", meetings=self.steps // self.every, primal=primal, dual=moved, rho=self.rho)
        self.adapt(primal, moved)

    def adapt(self, primal: float, moved: float) -> None:
        """A stronger tie when learners drift apart, a weaker one when the consensus runs away; noise says nothing."""
        if max(primal, moved) <= NOISE * float(torch.linalg.vector_norm(self.consensus)):
            return
        factor = 2.0 if primal > 10.0 * moved else 0.5 if moved > 10.0 * primal else 1.0
        self.rho *= factor
        self.dual = self.dual / factor


class Gossip:
    """D-PSGD (Lian et al. 2017): a step, then the mean with the two neighbours on a ring; moments are one's own."""

    def __init__(self, step: Step, comm: Comm, weights: Sequence[Tensor]) -> None:
        self.own = step
        self.comm = comm
        self.weights = weights

    def step(self, gradients: list[Tensor]) -> float:
        """Hear both neighbours; two learners are each other's only one."""
        norm = self.own(gradients)
        own = flat(self.weights)
        comm = self.comm
        right = (comm.rank + 1) % comm.size
        left = (comm.rank - 1) % comm.size
        total = own + comm.swap(own, right, left)
        if comm.size > 2:
            total = total + comm.swap(own, left, right)
        place(total / min(comm.size, 3), self.weights)
        return norm


# What strategies share


def listener(sync: Sync | None) -> Ready | None:
    """Who wants to know of gradients as they are computed, if anybody."""
    return sync.buckets.ready if isinstance(sync, Allreduce) and sync.buckets is not None else None


def ahead(agreed: Tensor, average: CodedMean) -> Tensor:
    """The agreed weights with one's own part of what the codec still owes (step-ahead error feedback, Xu et al. 2021).

    A learner that does not see what it has asked for already would ask again and again until it comes, and overshoot.
    """
    return agreed if average.error is None else agreed + average.error / average.comm.size


def flat(tensors: Sequence[Tensor]) -> Tensor:  # -> [D]
    """All numbers in one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflat(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into tensors like these, laid out as they are: fused optimisers walk through memory in its order."""
    parts = torch.split(values, [tensor.numel() for tensor in like])
    return [laid_out(part.view(tensor.shape), tensor) for part, tensor in zip(parts, like, strict=True)]


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """The same numbers with the strides of another tensor of this shape."""
    return values if like.is_contiguous() else torch.empty_like(like, dtype=values.dtype).copy_(values)


@torch.no_grad()
def place(values: Tensor, into: Sequence[Tensor]) -> None:
    """A vector written into tensors."""
    for tensor, part in zip(into, unflat(values, into), strict=True):
        tensor.copy_(part)
