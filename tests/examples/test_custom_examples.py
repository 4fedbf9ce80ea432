"""The examples of custom parts: short, they train, resume exactly, and work with processes and two learners."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from qfleet.custom import CustomSampler, Loss, Rule
from tests.support.runs import Settings, resumed, same, small, status, trained, until

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {
    "custom_rule": ("rule", "ExpectedSarsa"),
    "custom_loss": ("loss", "LogCosh"),
    "custom_sampler": ("sampler", "RecentFirst"),
    "auxiliary_loss": ("loss", "PredictNextFeatures"),
}
LEARNERS: Settings = {"learners.num": 2}
PROCESSES: Settings = {"runtime.type": "processes"}


def part_of(example: str) -> dict[str, Any]:
    """The part that an example makes, as the argument of `train`."""
    argument, name = EXAMPLES[example]
    spec = importlib.util.spec_from_file_location(example, FOLDER / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # As in a notebook: other processes cannot import it, so it is sent whole.
    kind = getattr(module, name)
    kind.__module__ = "__main__"
    return {argument: kind()}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short(example: str) -> None:
    assert len((FOLDER / f"{example}.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("settings", [{}, LEARNERS], ids=["inline", "two learners"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_and_resumes_exactly(example: str, settings: Settings, tmp_path: Path) -> None:
    whole = trained(small(settings), tmp_path / "whole", **part_of(example))
    half = trained(until(small(settings), 150), tmp_path / "half", **part_of(example))
    again = resumed(half, steps=300, **part_of(example))
    assert same(again.path, whole.path)
    assert status(again.path)["exact"] is True
    assert status(again.path)["updates"] > 0


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_works_with_actors_in_processes(example: str, tmp_path: Path) -> None:
    run = trained(small(PROCESSES), tmp_path, **part_of(example))
    assert (run.status["state"], run.status["updates"] > 0) == ("done", True)


def test_the_protocols_fit_the_examples() -> None:
    rule: Rule = part_of("custom_rule")["rule"]
    losses: list[Loss] = [part_of("custom_loss")["loss"], part_of("auxiliary_loss")["loss"]]
    sampler: CustomSampler = part_of("custom_sampler")["sampler"]
    assert all(map(callable, (rule, *losses, sampler.draw)))
