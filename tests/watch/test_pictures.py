import builtins
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.training.log.tensorboard import TensorBoardWriter
from qfleet.watch import RowLog
from qfleet.watch.plot import plot_runs


def make_run(path: Path, *, height: float = 100.0, evaluations: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "run.toml").write_text('[env]\nid = "CartPole-v1"\n')
    log = RowLog(path / "metrics.jsonl")
    for step in range(1000, 20_001, 1000):
        mean = height * step / 20_000
        loss = None if step == 1000 else 10.0 / step
        common = {"env_steps": step, "updates": step // 8, "seconds": step / 2000}
        log.row({"kind": "progress", **common, "return_mean": mean, "loss": loss, "steps_per_second": 2000.0})
        if evaluations and step % 5000 == 0:
            log.row({"kind": "eval", **common, "mean": mean, "low": mean - 5, "high": mean + 5, "episodes": 20})
    return path


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)


@pytest.mark.parametrize("num", [1, 3])
def test_a_picture_of_1200_by_900(tmp_path: Path, num: int) -> None:
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / f"cartpole-dqn-000{index}", height=100.0 * (index + 1)) for index in range(num)]
    windows = "matplotlib.pyplot" in sys.modules
    file = plot_runs(runs, tmp_path / "curves.png")
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 900)
    assert ("matplotlib.pyplot" in sys.modules) == windows


def test_every_run_is_named_and_every_panel_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpl = pytest.importorskip("matplotlib")
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    one = make_run(tmp_path / "a" / "same-name")
    two = make_run(tmp_path / "b" / "same-name", evaluations=False)
    three = make_run(tmp_path / "cartpole-per-0003")
    text = plot_runs([one, two, three], tmp_path / "curves.svg").read_text()
    for part in ("CartPole-v1", "cartpole-per-0003", str(one), str(two), "return", "loss", "steps per second"):
        assert f">{part}<" in text, part
    alone = plot_runs([three], tmp_path / "one.svg").read_text()
    assert ">evaluation, 95 % interval<" in alone
    assert ">training episodes<" in alone


def test_the_plot_shows_the_measured_values(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from qfleet.watch import read_rows
    from qfleet.watch.plot import _draw

    rows = read_rows(make_run(tmp_path / "a") / "metrics.jsonl")
    figure = figures.Figure()
    _draw(figure, {"a": rows}, "")
    returns, loss, speed = figure.axes
    training, evaluation, last = returns.lines
    assert last.get_xydata().tolist() == evaluation.get_xydata()[-1:].tolist()
    assert list(evaluation.get_xdata()) == [5000, 10_000, 15_000, 20_000]
    assert list(evaluation.get_ydata()) == [25, 50, 75, 100]
    assert len(training.get_xdata()) == 20
    band = returns.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (20, 105)
    assert len(loss.lines[0].get_xdata()) == 19  # a null is left out
    assert set(speed.lines[0].get_ydata()) == {2000.0}


def test_the_test_score_is_a_star_at_its_checkpoint_and_no_point_of_the_curve(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from qfleet.watch import read_rows
    from qfleet.watch.plot import _draw

    run = make_run(tmp_path / "a")
    score = {"split": "test", "checkpoint": 15_000, "mean": 80.0, "low": 70.0, "high": 95.0, "episodes": 100}
    RowLog(run / "metrics.jsonl").row({"kind": "eval", "env_steps": 20_000, **score})
    figure = figures.Figure()
    _draw(figure, {"a": read_rows(run / "metrics.jsonl")}, "")
    _, evaluation, *_, star = (returns := figure.axes[0]).lines
    assert list(evaluation.get_ydata()) == [25, 50, 75, 100]
    assert (list(star.get_xdata()), list(star.get_ydata()), star.get_marker()) == ([15_000], [80], "*")
    (bar,) = returns.containers
    assert bar.lines[2][0].get_segments()[0].tolist() == [[15_000, 70], [15_000, 95]]
    assert "test episodes, 95 % interval" in [text.get_text() for text in returns.get_legend().get_texts()]


def test_the_plot_shows_how_many_validations_the_best_was_chosen_from(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from qfleet.watch import read_rows
    from qfleet.watch.plot import _draw

    run = make_run(tmp_path / "a")
    score = {"split": "test", "checkpoint": 15_000, "mean": 80.0, "low": 70.0, "high": 95.0, "best_of": 4}
    RowLog(run / "metrics.jsonl").row({"kind": "eval", "env_steps": 20_000, **score})
    figure = figures.Figure()
    _draw(figure, {"a": read_rows(run / "metrics.jsonl")}, "")
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "test episodes of the best of 4 validations, 95 % interval" in texts
    assert "last evaluation: 100.0" in texts


def test_a_run_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has nothing to plot yet"):
        plot_runs([tmp_path / "empty"], tmp_path / "x.png")
    with pytest.raises(UsageError, match="nothing to plot"):
        plot_runs([], tmp_path / "x.png")


@pytest.mark.parametrize("name", ["curves.exe", "curves", "no/such/folder/x.png"])
def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot draw into"):
        plot_runs([make_run(tmp_path / "a")], tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a")
    without(monkeypatch, "matplotlib")
    with pytest.raises(UsageError) as caught:
        plot_runs([run], tmp_path / "x.png")
    assert caught.value.fix == install_command("plot")


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tensorboardX")
    with pytest.raises(UsageError) as caught:
        TensorBoardWriter(tmp_path)
    assert caught.value.fix == install_command("tb")


def test_tensorboard_events_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    writer = TensorBoardWriter(tmp_path)
    writer({"kind": "progress", "env_steps": 10, "updates": 2, "seconds": 1.0, "loss": 0.5, "return_mean": None})
    writer({"kind": "eval", "env_steps": 20, "updates": 4, "seconds": 2.0, "mean": 7.0, "returns": [7.0]})
    test = {"split": "test", "checkpoint": 10, "mean": 9.0, "updates": 4, "seconds": 3.0}
    writer({"kind": "eval", "env_steps": 20, **test})
    writer({"kind": "end", "env_steps": 20, "state": "done"})
    writer.close()
    events = scalars(tmp_path)
    assert events["train/loss"] == [(10, 0.5)]
    assert events["eval/mean"] == [(20, 7.0)]
    assert events["test/mean"] == [(20, 9.0)]
    assert not [name for name in events if "checkpoint" in name]
    assert "train/return_mean" not in events
    assert "eval/returns" not in events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.iterdir()
    data, found = file.read_bytes(), dict[str, list[tuple[int, float]]]()
    while data:  # each record: length (8 bytes), its checksum (4), the event, its checksum (4)
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


# Lengths, numbers of log.info, metrics of callbacks


def add_rows(run: Path, **fields: Any) -> Path:
    log = RowLog(run / "metrics.jsonl")
    for step in (1000, 2000, 3000):
        log.row({"kind": "progress", "env_steps": step, **fields})
    log.row({"kind": "eval", "env_steps": 3000, "mean": 1.0, **fields})
    return run


def test_lengths_infos_and_metrics_have_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpl = pytest.importorskip("matplotlib")
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    fields = {"callback.gap": 0.25, "length_mean": 12.5, "info.is_success": 0.5, "info.none": None, "other": 3.0}
    run = add_rows(make_run(tmp_path / "a"), **fields)
    text = plot_runs([run, make_run(tmp_path / "b")], tmp_path / "curves.svg").read_text()
    for name in ("return", "loss", "steps per second", "episode length", "info.is_success", "callback.gap"):
        assert f">{name}<" in text, name
    assert "info.none" not in text
    assert ">other<" not in text


def test_a_panel_shows_training_and_evaluations(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from qfleet.watch.plot import _draw, curve_rows

    figure = figures.Figure()
    _draw(figure, {"a": curve_rows(add_rows(make_run(tmp_path / "a"), **{"length_mean": 5.0, "info.x": 0.5}))}, "")
    *_, length, info = figure.axes
    assert [list(line.get_xdata()) for line in length.lines] == [[1000, 2000, 3000], [3000]]
    assert {value for line in info.lines for value in line.get_ydata()} == {0.5}


def test_a_row_with_very_many_names_has_few_panels(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from qfleet.watch.plot import MOST_PANELS, _draw, curve_rows

    rows = curve_rows(add_rows(make_run(tmp_path / "a"), **{f"info.x{number}": 1.0 for number in range(1000)}))
    assert max(len(row) for row in rows) < 100
    figure = figures.Figure()
    _draw(figure, {"a": rows}, "")
    assert len(figure.axes) == 3 + MOST_PANELS
