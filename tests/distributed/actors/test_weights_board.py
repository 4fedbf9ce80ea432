"""A board shows whole weights of one version, and versions that only rise, whatever its writer does meanwhile."""

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.act.policy import NonFiniteValues, Policy
from qfleet.act.population_policy import PopulationPolicy
from qfleet.data import Array
from qfleet.distributed.actors.weights_board import SharedWeightsBoard, layout_of
from qfleet.nets import QNet
from qfleet.qlearn import Scalar

CONTEXT = multiprocessing.get_context("forkserver")
NAMES = ("env_steps", "updates")
TIMEOUT_SECONDS = 60.0


def weights_of(version: int, size: int = 10) -> dict[str, Tensor]:
    """Every number is the version."""
    kinds = {"a": torch.float32, "b": torch.int64, "c": torch.bool, "d": torch.float64}
    shapes = {"a": (size, 7), "b": (), "c": (5,), "d": (0, 3)}
    return {name: torch.full(shapes[name], version).to(kinds[name]) for name in kinds}


def version_in(weights: dict[str, Tensor]) -> int:
    """The version that all numbers are."""
    version = int(weights["b"])
    assert bool((weights["a"] == version).all())
    return version


def memory_of(board: SharedWeightsBoard) -> Any:
    return np.frombuffer(board.region.view, np.uint8)


def test_published_weights_are_read_once() -> None:
    board = SharedWeightsBoard(layout_of(weights_of(0)))
    assert board.read(0) is None
    assert board.read(-1) is None
    for version in (1, 2, 5):
        board.publish(version, weights_of(version))
        found = board.read(version - 1)
        assert found is not None
        assert found[0] == version == version_in(found[1])
        assert found[1]["d"].shape == (0, 3)
        assert board.read(version) is None
    with pytest.raises(ValueError, match="version 5 after version 5"):
        board.publish(5, weights_of(5))


def test_readers_get_the_same_tensors_every_time() -> None:
    board = SharedWeightsBoard(layout_of(weights_of(0)))
    board.publish(1, weights_of(1))
    first = board.read(0)
    board.publish(2, weights_of(2))
    second = board.read(1)
    assert first is not None
    assert second is not None
    assert first[1] is second[1]
    assert version_in(first[1]) == 2


def make_policy(seed: int) -> Policy:
    torch.manual_seed(seed)
    return Policy(QNet(nn.Linear(3, 2), nn.Identity()), Scalar(), (2,))


def test_a_policy_loads_new_weights_in_place() -> None:
    learner, policy = make_policy(1).net, make_policy(2)
    board, obs = SharedWeightsBoard(layout_of(learner.state_dict())), np.ones((4, 3), np.float32)
    board.publish(1, learner.state_dict())
    policy.load_weights(*board.read(0) or pytest.fail("nothing there"))
    parameters = [parameter.data_ptr() for parameter in policy.net.parameters()]
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter += 1.0
    assert not np.array_equal(policy.forward(obs)[0], learner(torch.from_numpy(obs)).detach().numpy())
    board.publish(2, learner.state_dict())
    policy.load_weights(*board.read(1) or pytest.fail("nothing there"))
    assert policy.version == 2
    assert [parameter.data_ptr() for parameter in policy.net.parameters()] == parameters
    assert np.array_equal(policy.forward(obs)[0], learner(torch.from_numpy(obs)).detach().numpy())


def test_a_population_loads_new_weights_in_place() -> None:
    learners, population = (
        [make_policy(seed).net for seed in (1, 2)],
        PopulationPolicy([make_policy(seed) for seed in (3, 4)]),
    )
    weights = [learner.state_dict() for learner in learners]
    board = SharedWeightsBoard(layout_of(weights))
    for version in (1, 2):
        with torch.no_grad():
            for learner in learners:
                learner.torso.bias += version  # type: ignore[operator]
        board.publish(version, weights)
        population.load_weights(*board.read(version - 1) or pytest.fail("nothing there"))
        for policy, learner in zip(population.policies, learners, strict=True):
            pairs = zip(policy.net.parameters(), learner.parameters(), strict=True)
            assert all(torch.equal(own, other) for own, other in pairs)


def test_tensors_keep_their_order_in_memory() -> None:
    weights = {"w": torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last), "t": torch.randn(3, 5).t()}
    board = SharedWeightsBoard(layout_of(weights))
    board.publish(1, weights)
    _, found = board.read(0) or pytest.fail("nothing there")
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()


@pytest.mark.parametrize("other", [{"a": torch.zeros(3)}, {"a": torch.zeros(2, dtype=torch.int64)}])
def test_weights_of_another_layout_are_refused(other: dict[str, Tensor]) -> None:
    board = SharedWeightsBoard(layout_of({"a": torch.zeros(2)}))
    with pytest.raises(ValueError, match="a is"):
        board.publish(1, other)
    with pytest.raises(KeyError):
        board.publish(1, {"b": torch.zeros(2)})
    assert board.read(0) is None


@pytest.mark.parametrize("size", [10, 3000])
def test_a_half_written_version_is_never_read(size: int) -> None:
    """A reader sees any mixture of the buffer before and after; what it acts by stays as it was."""
    rng = np.random.default_rng(0)
    board = SharedWeightsBoard(layout_of(weights_of(0, size)))
    board.publish(1, weights_of(1, size))
    board.publish(2, weights_of(2, size))
    _, live = board.read(1) or pytest.fail("nothing there")
    memory = memory_of(board)
    before = memory.copy()
    board.publish(3, weights_of(3, size))
    after, changed = memory.copy(), np.flatnonzero(before != memory)
    place = np.arange(len(memory))
    seen = [sides < cut for cut in rng.choice(changed, 60) for sides in (place, -place + cut + cut)]
    seen += [np.repeat(rng.random(len(memory) // 8 + 1) < rng.random(), 8)[: len(memory)] for _ in range(100)]
    for new in seen:
        memory[:] = np.where(new, after, before)
        assert new[changed].all() or board.read(2) is None
        assert version_in(live) == 2 or new[changed].all()
    memory[:] = np.where(rng.random(len(memory)) < 0.5, after, before)
    assert (board.read(1) or pytest.fail("version 2 is still whole"))[0] == 2
    memory[:] = after
    assert version_in((board.read(2) or pytest.fail("nothing there"))[1]) == 3


def test_weights_with_a_wrong_version_are_not_read() -> None:
    board = SharedWeightsBoard(layout_of(weights_of(0)))
    board.publish(1, weights_of(1))
    header = next(header for header in board.headers if any(header))
    header[0] = 9  # the version's lowest byte
    assert board.read(0) is None


def test_numbers_are_written_with_and_without_weights() -> None:
    board = SharedWeightsBoard(layout_of(weights_of(0)), NAMES)
    assert board.numbers() == {"env_steps": 0, "updates": 0}
    board.publish(1, weights_of(1), env_steps=2**60)
    board.write_numbers(updates=1)
    assert board.numbers() == {"env_steps": 2**60, "updates": 1}
    with pytest.raises(KeyError, match="pause"):
        board.write_numbers(pause=1)


def test_half_written_numbers_are_not_read() -> None:
    board = SharedWeightsBoard(layout_of(weights_of(0)), NAMES)
    board.write_numbers(env_steps=0x0101010101010101)
    board.write_numbers(env_steps=0x0202020202020202, updates=1)
    memory = memory_of(board)
    before = memory.copy()
    known = board.numbers()
    board.write_numbers(env_steps=0x0303030303030303)
    after, changed = memory.copy(), np.flatnonzero(before != memory)
    fresh = SharedWeightsBoard(board.layout, board.names, region=board.region)
    for cut in changed[1:]:
        for new in (np.arange(len(memory)) < cut, np.arange(len(memory)) >= cut):
            memory[:] = np.where(new, after, before)
            assert fresh.numbers() == known == {"env_steps": 0x0202020202020202, "updates": 1}
    memory[:] = after
    assert fresh.numbers() == {"env_steps": 0x0303030303030303, "updates": 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_published(bad: float) -> None:
    board = SharedWeightsBoard(layout_of(weights_of(0)))
    board.publish(1, weights_of(1))
    broken = weights_of(2)
    broken["a"][3, 3] = bad
    with pytest.raises(NonFiniteValues):
        board.publish(2, broken)
    assert version_in((board.read(0) or pytest.fail("nothing there"))[1]) == 1


def hammer(board: SharedWeightsBoard, seconds: float, size: int) -> None:
    """New versions without a break."""
    torch.set_num_threads(1)
    deadline, version = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        version += 1
        board.publish(version, weights_of(version, size), env_steps=version, updates=version)


class Interrupted:
    """Memory whose reader now and then loses the processor half-way."""

    def __init__(self, flat: Array, rng: random.Random) -> None:
        self.flat, self.rng = flat, rng

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        half = len(self.flat) // 2
        first = self.flat[:half].copy()
        time.sleep(0.01 if self.rng.random() < 0.3 else 0.0)
        return np.concatenate([first, self.flat[half:]])


def watch(board: SharedWeightsBoard, process: multiprocessing.process.BaseProcess) -> list[int]:
    """Every version that can be read while the process lives, each found whole."""
    deadline, versions, last_number = time.monotonic() + TIMEOUT_SECONDS, [0], 0
    while process.is_alive():
        assert time.monotonic() < deadline
        numbers = board.numbers()
        assert numbers["env_steps"] == numbers["updates"] >= last_number
        last_number = numbers["updates"]
        if (found := board.read(versions[-1])) is not None:
            assert version_in(found[1]) == found[0] > versions[-1]
            versions.append(found[0])
        else:
            time.sleep(0.0001)
    return versions


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_reader_sees_whole_versions_while_a_writer_hammers(interrupted: bool) -> None:
    size = 20_000
    board = SharedWeightsBoard(layout_of(weights_of(0, size)), NAMES)
    process = CONTEXT.Process(target=hammer, args=(board, 2.0, size))
    process.start()
    if interrupted:
        board.flats = [Interrupted(flat, random.Random(0)) for flat in board.flats]  # type: ignore[misc]
    versions = watch(board, process)
    process.join(10)
    assert process.exitcode == 0
    assert len(versions) > 20
    last = board.numbers()["env_steps"]
    assert versions[-1] == last or (board.read(versions[-1]) or pytest.fail("nothing there"))[0] == last


def kill_hammers(boards: list[SharedWeightsBoard], size: int) -> None:
    rng = random.Random(5)
    for board in boards:
        child = os.fork()
        if child == 0:
            hammer(board, 1000.0, size)
        time.sleep(rng.uniform(0.01, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.chaos
def test_a_killed_writer_leaves_a_whole_version() -> None:
    size = 20_000
    boards = [SharedWeightsBoard(layout_of(weights_of(0, size)), NAMES) for _ in range(20)]
    process = CONTEXT.Process(target=kill_hammers, args=(boards, size))
    process.start()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 0
    found = [board.read(0) for board in boards if any(map(any, board.headers))]
    assert len(found) > 10
    for pair in found:
        assert pair is not None
        assert version_in(pair[1]) == pair[0]
