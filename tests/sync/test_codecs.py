"""Codecs: decoded means, bytes sent, and error feedback that loses nothing."""

import math
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from qfleet.plan.sync_schema import LEAST_COSINES, AllreduceSync, least_cosine_of
from qfleet.plan.sync_schema import Codec as CodecPlan
from qfleet.sync.average import CodedMean, cosine_of
from qfleet.sync.codecs import Codec, Exact, Half, Int8, PowerSgd, Sign, Ternary, TopK, sampled_indices
from qfleet.sync.comm import NoComm
from qfleet.sync.make import make_average
from tests.sync.parts import ThreadComm, run_ranks

NUM = 5_000
SHAPES = [(40, 100), (1_000,)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CODECS: dict[str, Callable[[], Codec]] = {
    "exact": Exact,
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "int8": lambda: Int8(1_024, generator()),
    "sign": lambda: Sign(1_024),
    "ternary": lambda: Ternary(1_024, generator()),
    "top-k": lambda: TopK(0.05),
    "sampled top-k": lambda: TopK(0.05, sampled_indices(generator())),
    "power": lambda: PowerSgd(2, SHAPES, generator()),
}
# Bytes per number that a codec may send at most.
BYTES = {
    "exact": 8.0,  # the tests compute in float64
    "fp16": 2.001,  # and a scale
    "bf16": 2.001,
    "int8": 1.2,
    "sign": 0.2,
    "ternary": 0.35,
    "top-k": 0.41,
    "sampled top-k": 0.41,
    "power": 8.0 * (2 * 140 + 1_000) / 5_000,
}


def vector(seed: int) -> Tensor:
    return torch.randn(NUM, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", CODECS)
def test_all_ranks_get_the_same_mean_within_the_byte_budget(name: str) -> None:
    def act(comm: ThreadComm) -> tuple[Tensor, Tensor, int]:
        own, mean = CODECS[name]().mean(vector(comm.rank), comm)
        return own, mean, comm.sent_bytes

    found = run_ranks(3, act)
    assert all(torch.equal(mean, found[0][1]) for _, mean, _ in found)
    assert all(sent <= BYTES[name] * NUM for _, _, sent in found)
    if name != "power":  # PowerSGD approximates the mean, not each rank's vector
        assert torch.allclose(torch.stack([own for own, _, _ in found]).mean(0), found[0][1], atol=1e-12)


def test_all_numbers_with_their_indices_give_the_exact_mean() -> None:
    """`TopK` with a share of one uses `Exact`: sending all numbers with their indices gives the same mean."""

    def act(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        values = vector(comm.rank).float()
        _, sent = TopK(0.5).send(comm, values, torch.randperm(NUM, generator=generator(comm.rank)))
        return sent, Exact().mean(values, comm)[1]

    for sent, exact in run_ranks(3, act):
        assert torch.equal(sent, exact)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("name", [name for name in CODECS if name != "exact"])
def test_a_value_that_is_not_finite_reaches_all_ranks_and_is_not_fed_back(name: str, bad: float) -> None:
    def act(comm: ThreadComm) -> list[bool]:
        average, finite = CodedMean(comm, CODECS[name]()), []
        for at in range(4):
            values = vector(10 * at + comm.rank)
            if at == 1 and comm.rank == 1:
                values[17] = bad
            finite.append(bool(torch.isfinite(average(values)).all()))
        assert average.error is not None
        return [*finite, bool(torch.isfinite(average.error).all())]

    assert run_ranks(2, act) == [[True, False, True, True, True]] * 2


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_huge_number_is_sent_at_once(name: str) -> None:
    values = vector(0)
    values[3] = 1e8
    average = CodedMean(NoComm(), CODECS[name]())
    assert float(average(values)[3]) == pytest.approx(1e8, rel=0.01)
    assert abs(float(average(torch.zeros(NUM).double())[3])) < 1e6  # and only once


def test_top_k_of_all_is_bit_equal_to_exact() -> None:
    exact = run_ranks(2, lambda comm: Exact().mean(vector(comm.rank), comm)[1])
    assert torch.equal(run_ranks(2, lambda comm: TopK(1.0).mean(vector(comm.rank), comm)[1])[0], exact[0])


@pytest.mark.parametrize("name", ["int8", "ternary"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    values = torch.linspace(-1, 1, 64, dtype=torch.float64)
    codec: Codec = Int8(64, generator()) if name == "int8" else Ternary(64, generator(), clip_deviations=10.0)
    found = torch.stack([codec.mean(values, NoComm())[1] for _ in range(4_000)])
    error = found.std(0) / 4_000**0.5
    assert (found.mean(0) - values).abs().max() < 5 * error.max() + 1e-6


def fed_back(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """After twenty means of two ranks: the mean of the given vectors, the decoded mean, the mean remaining error."""

    def act(comm: ThreadComm) -> tuple[Tensor, Tensor, Tensor]:
        average, given, through = CodedMean(comm, CODECS[name]()), torch.zeros(NUM).double(), torch.zeros(NUM).double()
        for at in range(20):
            given += vector(10 * at + comm.rank)
            through += average(vector(10 * at + comm.rank))
        assert average.error is not None
        return given, through, average.error

    (given, through, left), (given_too, _, left_too) = run_ranks(2, act)
    return (given + given_too) / 2, through, (left + left_too) / 2


@pytest.mark.parametrize("name", [name for name in CODECS if name not in ("exact", "power")])
def test_error_feedback_telescopes(name: str) -> None:
    given, through, left = fed_back(name)
    assert left.any()
    assert torch.allclose(through + left, given, atol=1e-9)


def test_error_feedback_of_power_sgd_telescopes() -> None:
    given, through, left = fed_back("power")
    assert torch.allclose((through + left)[:4_000], given[:4_000], atol=1e-9)
    assert torch.allclose(through[4_000:], given[4_000:], atol=1e-9)  # vectors are sent as they are


def test_a_low_rank_matrix_is_sent_exactly() -> None:
    left, right = torch.randn(40, 2, generator=generator()), torch.randn(2, 100, generator=generator(1))
    values = torch.cat([(left @ right).flatten(), torch.randn(1_000, generator=generator(2))]).double()
    codec = CODECS["power"]()
    for _ in range(3):
        _, mean = codec.mean(values, NoComm())
    assert torch.allclose(mean, values, atol=1e-5)


def test_the_warm_up_is_exact_and_a_misleading_codec_is_given_up() -> None:
    class Backwards:
        def mean(self, values: Tensor, comm: ThreadComm) -> tuple[Tensor, Tensor]:
            return -values, -Exact().mean(values, comm)[1]

    def act(comm: ThreadComm) -> tuple[list[str], list[float]]:
        events: list[str] = []
        average = CodedMean(
            comm,
            Backwards(),  # type: ignore[arg-type]
            warm_rounds=2,
            check_every=4,
            least_cosine=0.2,
            log_event=lambda kind, **fields: events.append(kind),
        )
        true = (vector(0) + vector(1)) / 2
        return events, [cosine_of(average(vector(comm.rank)), true) for _ in range(6)]

    for events, cosines in run_ranks(2, act):
        assert events == ["codec_checked", "codec_given_up"]
        assert [cosine > 0.99 for cosine in cosines] == [True, True, False, False, True, True]


@pytest.mark.parametrize("plan", [codec() for codec in LEAST_COSINES], ids=str)
def test_a_good_codec_stays_above_its_cosine_bound_and_a_bad_one_does_not(plan: CodecPlan) -> None:
    sync, cosines = AllreduceSync(codec=plan), list[float]()

    def note(kind: str, cosine: float, **fields: object) -> None:
        cosines.append(cosine)
        assert kind == "codec_checked"

    def act(comm: ThreadComm) -> None:
        average = make_average(sync, comm, SHAPES, 0, note)
        average.check_every = 1
        for at in range(60):
            average(vector(at).float() + vector(1_000 + 100 * comm.rank + at).float())  # part signal, part noise

    run_ranks(2, act)
    assert min(cosines) > 1.2 * least_cosine_of(sync) or min(cosines) > 0.99
    assert least_cosine_of(replace(sync, least_cosine=-1.0)) == -1.0  # the plan's own bound wins

    class Rolled:
        def mean(self, values: Tensor, comm: NoComm) -> tuple[Tensor, Tensor]:
            found = torch.roll(values, 1)
            return found, found

    events: list[str] = []
    average = make_average(sync, NoComm(), SHAPES, 0, lambda kind, **fields: events.append(kind))
    average.codec, average.check_every = Rolled(), 1  # type: ignore[assignment]
    average(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert events == ["codec_checked", "codec_given_up"]


def test_the_remaining_error_is_sent_when_a_codec_is_given_up() -> None:
    class FirstHalf:
        """Sends only the first two numbers."""

        def mean(self, values: Tensor, comm: ThreadComm) -> tuple[Tensor, Tensor]:
            own = torch.cat([values[:2], torch.zeros(2)])
            return own, Exact().mean(own, comm)[1]

    average = CodedMean(NoComm(), FirstHalf(), check_every=3, least_cosine=0.99)  # type: ignore[arg-type]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    means = [average(values.clone()) for _ in range(5)]
    assert torch.equal(sum(means, torch.zeros(4)), 5 * values)
    assert torch.equal(means[3], torch.tensor([1.0, 2.0, 12.0, 16.0]))


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_are_sent_if_too_many_pass_a_sampled_threshold(seed: int) -> None:
    values = torch.linspace(0.1, 1.0, 2_000)  # the largest come last
    found = sampled_indices(generator(seed))(values, 20)
    assert len(found) == 20
    assert len(found.unique()) < 20 or found.min() >= 1_980


def test_padding_does_not_change_the_scale_of_the_last_chunk() -> None:
    values = torch.ones(1_024 + 3)
    own, _ = Sign(1_024).mean(values, NoComm())
    assert torch.equal(own, values)
    loud = torch.cat([torch.zeros(64), torch.tensor([8.0, -8.0])])
    mean = torch.stack([Ternary(64, generator(seed)).mean(loud, NoComm())[0] for seed in range(3)]).mean(0)
    assert torch.allclose(mean, loud)  # nothing is clipped
