"""Evaluation on recorded episodes: what is read and kept."""

from pathlib import Path

import numpy as np
import pytest

from qfleet import make_plan
from qfleet.act import Policy
from qfleet.build.make import make_policy
from qfleet.build.resolve import resolve
from qfleet.datasets.estimates import is_fitted
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.plan.schema import Plan
from qfleet.training.evaluation.on_data import OnDataSettings, evaluate_on_data, read_episodes, valued_episodes
from qfleet.workflow import collect, parse_behaviour

SMALL = {"env.num": 4, "net.torso.sizes": (8,), "runtime.threads": 1}


def find_no_run(name: str) -> Path:
    raise AssertionError(f"no run is named, and {name} was looked for")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Policy, Dataset]:
    import torch

    url = str(tmp_path_factory.mktemp("data") / "random")
    plan = make_plan("CartPole-v1", overrides=SMALL)
    collect(plan, url, parse_behaviour(None, None, find_no_run), episodes=100)
    dataset = open_dataset(url)
    spec = dataset.manifest.spec.spec()
    return plan, make_policy(resolve(plan, spec), spec, torch.device("cpu")), dataset


def test_observations_are_kept_only_of_episodes_that_are_fitted_on(recorded: tuple[Plan, Policy, Dataset]) -> None:
    _, policy, dataset = recorded
    settings = OnDataSettings("all", seed=3)
    episodes = list(valued_episodes(policy, dataset.manifest.spec.spec(), dataset, settings))
    assert len(episodes) == 100
    for each in episodes:
        assert len(each.obs) == (each.num_steps + 1 if is_fitted(each.id, 3) else 1)
        assert each.obs.base is None  # nothing larger stays in memory behind it
        assert len(each.values) == each.num_steps + 1


def test_only_what_fits_into_memory_is_read(recorded: tuple[Plan, Policy, Dataset]) -> None:
    plan, policy, dataset = recorded
    largest = 20_000
    settings = OnDataSettings("all", fit_updates=10, max_bytes=largest)
    read: list[int] = []

    def counted():  # type: ignore[no-untyped-def]
        for each in valued_episodes(policy, dataset.manifest.spec.spec(), dataset, settings):
            read.append(each.num_bytes)
            yield each

    episodes = read_episodes(counted(), settings, lambda text: None)
    assert sum(read[:-1]) < largest <= sum(read)
    assert len(episodes) == len(read) < 100
    found = evaluate_on_data(plan, policy, dataset, settings)
    assert found["memory_full"]
    assert found["episodes"] == len(episodes)
    assert not evaluate_on_data(plan, policy, dataset, OnDataSettings("all", episodes=30, fit_updates=10))[
        "memory_full"
    ]


def test_progress_is_said(recorded: tuple[Plan, Policy, Dataset]) -> None:
    said: list[str] = []
    found = evaluate_on_data(*recorded, OnDataSettings("all", fit_updates=10, fit_seeds=2), said.append)
    assert found["episodes"] == 100
    assert said[0].startswith("100 episodes of at most 1,000")
    assert said[1:] == ["fitted Q evaluation 1 of 2: 10 updates", "fitted Q evaluation 2 of 2: 10 updates"]
    assert np.isfinite(found["numbers"]["fitted_q"]["value"])
