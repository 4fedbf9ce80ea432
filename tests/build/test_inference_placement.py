"""Where actions are chosen."""

import multiprocessing
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

import qfleet.testing.toys as toys
from qfleet.act import Policy
from qfleet.build.inference_placement import (
    ROUND_TRIP_SECONDS,
    Costs,
    choose_inference,
    measure,
    rank_placements,
    step_seconds,
)
from qfleet.build.make import make_policy
from qfleet.build.worlds import make_train_world
from qfleet.envs import time_env
from qfleet.errors import UsageError
from qfleet.plan import make_plan
from qfleet.plan.schema import Env, Plan, ProcessesRuntime
from tests.support.runs import SMALL


def plan_of(**settings: Any) -> Plan:
    overrides = {**SMALL, "runtime.type": "processes", "actors.num": 2, "env.num": 8, **settings}
    return make_plan("CartPole-v1", overrides=overrides)


def costs(step: float, local: float, central: float, cuda: float | None = None) -> Costs:
    looks = {("cpu", 4): local, ("cpu", 8): central}
    return Costs(step, looks if cuda is None else looks | {("cuda", 8): cuda})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (costs(1e-5, 1e-4, 2e-4), ("local", "cpu", 4)),  # a small network: nobody gains by waiting for others
        (costs(1e-5, 9e-3, 1e-2), ("central", "cpu", 8)),  # one that costs nearly the same for twice the batch
        (costs(1e-5, 9e-3, 2e-2, cuda=1e-3), ("central", "cuda", 8)),
    ],
)
def test_the_fastest_place_is_taken(found: Costs, expected: tuple[str, str, int]) -> None:
    best = rank_placements(plan_of(), found, cores=2)[0]
    assert (best.inference, best.device, best.batch) == expected


def test_speed_is_predicted_from_its_parts() -> None:
    (local, central) = rank_placements(plan_of(), costs(1e-3, 1e-3, 1.5e-3), cores=3)
    # Two actors on two cores: 4 steps of a millisecond each and one look.
    assert local.steps_per_second == pytest.approx(8 / (4e-3 + 1e-3))
    assert central.steps_per_second == pytest.approx(8 / (4e-3 + 1.5e-3 + 1.5e-4))


def test_a_slow_round_trip_favours_local_inference() -> None:
    near = Costs(1e-5, {("cpu", 4): 1e-3, ("cpu", 8): 1.1e-3}, round_trip_seconds=1e-5)
    assert rank_placements(plan_of(), near, cores=2)[0].inference == "central"
    assert rank_placements(plan_of(), replace(near, round_trip_seconds=5e-3), cores=2)[0].inference == "local"


def test_placements_that_the_plan_excludes_are_left_out() -> None:
    plan = plan_of(**{"runtime.inference": "central"})
    assert {place.inference for place in rank_placements(plan, costs(1e-5, 1e-4, 2e-4), cores=2)} == {"central"}


def test_one_actor_is_central_already() -> None:
    found = rank_placements(plan_of(**{"actors.num": 1}), Costs(1e-5, {("cpu", 8): 1e-4}), cores=2)
    assert [place.inference for place in found] == ["local"]


def test_the_placement_is_measured_noted_and_written_to_the_plan() -> None:
    plan = plan_of()
    world = make_train_world(plan)
    found = measure(plan, world, lambda device: make_policy(plan, world.spec, device))
    assert set(found.forward_seconds) >= {("cpu", 4), ("cpu", 8)}
    taken = [found.step_seconds, found.round_trip_seconds, *found.forward_seconds.values()]
    assert all(0 < seconds < 1 for seconds in taken)
    assert found.round_trip_seconds != ROUND_TRIP_SECONDS  # which stands for what could not be measured
    assert not [child for child in multiprocessing.active_children() if child.name == "qfleet-echo"]
    chosen, notes = choose_inference(plan, world, lambda device: make_policy(plan, world.spec, device))
    assert isinstance(chosen.runtime, ProcessesRuntime)
    assert chosen.runtime.inference in ("local", "central")
    assert chosen.runtime.inference_device == "cpu" or torch.cuda.is_available()
    assert "steps/s expected" in notes[0]
    assert choose_inference(chosen, world, lambda device: make_policy(plan, world.spec, device)) == (chosen, [])


def test_a_core_that_is_taken_away_for_moments_does_not_decide() -> None:
    plan = plan_of(**{"actors.num": 1})
    world = make_train_world(plan)

    def disturbed(device: torch.device) -> Policy:
        policy, calls = make_policy(plan, world.spec, device), count()
        look = policy.forward

        def now_and_then(*given: Any) -> Any:
            time.sleep(0.05 if next(calls) % 5 == 4 else 0.0)
            return look(*given)

        policy.forward = now_and_then  # type: ignore[method-assign]
        return policy

    assert max(measure(plan, world, disturbed).forward_seconds.values()) < 0.005  # the mean is twice that at least


def test_a_device_that_is_not_there_is_named() -> None:
    plan = plan_of(**{"runtime.inference_device": "xpu"})
    world = make_train_world(plan)
    with pytest.raises(UsageError, match=r"runtime\.inference_device=xpu cannot be used"):
        choose_inference(plan, world, lambda device: make_policy(plan, world.spec, device))


def test_a_network_that_fails_is_not_taken_for_a_missing_device() -> None:
    def broken(device: torch.device) -> Policy:
        raise IndexError("the torso looked too far")

    plan = plan_of()
    with pytest.raises(IndexError, match="the torso looked too far"):
        choose_inference(plan, make_train_world(plan), broken)


def test_an_environment_that_fails_is_left_to_the_actors() -> None:
    plan = make_plan("toys/Random-v0", overrides={**SMALL, "runtime.type": "processes", "actors.num": 2})
    make = partial(toys.Raising, at=2)
    world = make_train_world(plan, make)
    chosen, notes = choose_inference(plan, world, lambda device: make_policy(plan, world.spec, device), make)
    assert isinstance(chosen.runtime, ProcessesRuntime)
    assert (chosen.runtime.inference, chosen.runtime.inference_device) == ("local", "cpu")
    assert "not measured" in notes[0]
    assert "step() raised ZeroDivisionError" in notes[0]


@pytest.mark.parametrize(
    ("toy", "fault", "said"),
    [
        (toys.Hanging, "", "was not done after"),
        (toys.Crashing, "", "was ended by SIGSEGV"),
        (toys.Crashing, "exit", "ended with exit code 7"),
    ],
)
def test_an_environment_that_hangs_or_crashes_is_timed_in_a_process_of_its_own(toy: Any, fault: str, said: str) -> None:
    settings = {**SMALL, "runtime.type": "processes", "actors.num": 2, "env.step_timeout_seconds": 1.0}
    plan, make = make_plan("toys/Random-v0", overrides=settings), partial(toy, fault=fault)
    world = make_train_world(plan, make)
    chosen, notes = choose_inference(plan, world, lambda device: make_policy(plan, world.spec, device), make)
    assert isinstance(chosen.runtime, ProcessesRuntime)
    assert (chosen.runtime.inference, chosen.runtime.inference_device) == ("local", "cpu")
    assert said in notes[0]
    assert "when its steps were timed" in notes[0]


def test_an_environment_that_is_well_is_timed_in_a_process_of_its_own() -> None:
    taken = time_env(Env(id="toys/Random-v0"), toys.Random)
    assert 0 < taken < 1


class Strict(toys.Masked):
    """Takes no action that its mask forbids."""

    def step(self, action: Any) -> Any:
        assert self._info()["action_mask"][int(action)], "forbidden"
        return super().step(action)


def test_only_allowed_actions_are_measured() -> None:
    plan = plan_of()
    with closing(make_train_world(plan, Strict)) as world:
        assert world.spec.masked
        assert 0 < step_seconds(world) < 1
