import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.data import Spec
from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import plot_dataset
from qfleet.datasets.inspect.sample import as_picture, picture_columns, sample_observations, two_axes
from qfleet.datasets.prepare import parse_split
from qfleet.datasets.prepare.preparing import PreparePlan, prepare_dataset
from qfleet.errors import UsageError
from tests.support.recorded import make_dataset

PICTURES = Spec((10, 10, 4), "uint8", (3,))


@pytest.mark.parametrize("spec", [Spec((3,), "float32", (2,)), PICTURES, Spec((1,), "float32", (40,))])
def test_every_split_is_drawn(tmp_path: Path, spec: Spec) -> None:
    made = make_dataset(tmp_path / "a", [4] * 20, spec=spec)
    prepare_dataset(made, str(tmp_path / "b"), PreparePlan(parse_split("50/25/25", "x")))
    for name in ("a", "b"):
        target = plot_dataset(open_dataset(str(tmp_path / name)), str(tmp_path / f"{name}.png"))
        assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    first = (tmp_path / "a.png").read_bytes()
    assert plot_dataset(made, str(tmp_path / "a.png")).read_bytes() == first


def test_samples_are_even_and_bounded(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "a", [9] * 40, file_bytes=400)
    assert len(made.files()) > 8
    found = sample_observations(made, "all", 12)["obs"]
    assert len(found) == 12
    numbers = found[:, 0] // 100  # of the episodes
    assert (np.diff(numbers) >= 0).all()
    assert (numbers[0], numbers[-1]) == (0, 39)
    assert len(sample_observations(made, "all", 10**6)["obs"]) <= 4 * max(file.rows for file in made.files())


def test_pictures_are_told_from_vectors() -> None:
    shapes = {"grey": (84, 84), "layers": (10, 10, 4), "first": (3, 64, 64), "vector": (8,), "table": (2, 3)}
    arrays = {name: np.zeros((1, *shape), np.uint8) for name, shape in shapes.items()}
    assert picture_columns(arrays) == ["grey", "layers", "first"]
    assert as_picture(np.zeros((3, 64, 64), np.uint8)).shape == (64, 64, 3)
    layers = np.zeros((10, 10, 4), np.bool_)
    layers[2, 3, 1] = True
    assert as_picture(layers)[2, 3] == 2


def test_the_first_component_is_where_numbers_differ_most() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=200)
    values = np.stack([hidden, -hidden, hidden + 0.01 * rng.normal(size=200), rng.normal(size=200)], axis=1)
    places, labels = two_axes(values, list("abcd"))
    assert abs(np.corrcoef(places[:, 0], hidden)[0, 1]) > 0.99
    assert labels[0].startswith("first component (7")
    assert two_axes(values[:, :2], ["a", "b"])[1] == ["a", "b"]


@pytest.mark.parametrize("name", ["a.txt", "nowhere/a.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    made = make_dataset(tmp_path / "a", [4])
    (tmp_path / "a/data/all-00000.parquet").unlink()
    with pytest.raises(UsageError, match="cannot draw into"):
        plot_dataset(made, str(tmp_path / name))


def test_without_matplotlib_the_message_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *rest)

    for name in [each for each in sys.modules if each.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    made = make_dataset(tmp_path / "a", [4])
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(UsageError, match="plots need the package matplotlib") as caught:
        plot_dataset(made, str(tmp_path / "a.png"))
    assert "plot" in caught.value.fix
