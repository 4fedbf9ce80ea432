"""Remote storage is not there yet: an address is refused wherever a path is asked for, and no folder is made of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet import Plan
from qfleet.api import rehearse
from qfleet.cli import main
from qfleet.errors import UsageError
from qfleet.plan.local_paths import local_path
from qfleet.sweep.sweep import train_group
from qfleet.watch.compare import compare
from qfleet.watch.plot import plot_runs
from qfleet.watch.run_listing import list_runs

BUCKET = "s3://bucket/runs"
COMMANDS = [
    ["train", "CartPole-v1", "--out", BUCKET],
    ["train", "CartPole-v1", "--out", BUCKET, "--dry-run"],
    ["train", "CartPole-v1", "--out", BUCKET, "--seeds", "2"],
    ["train", "CartPole-v1", "--from", f"{BUCKET}/one"],
    ["train", "CartPole-v1", "--out", BUCKET, "runtime.type=processes"],
    ["resume", "latest", "--out", BUCKET],
    ["resume", f"{BUCKET}/one"],
    ["sync", "latest", "sync.type=mean", "--out", BUCKET],
    ["eval", "latest", "--out", BUCKET],
    ["record", "latest", "--out", BUCKET],
    ["plot", "latest", "--out", BUCKET],
    ["compare", "latest", "--out", BUCKET],
    ["verify", "latest", "--out", BUCKET],
    ["runs", "--out", BUCKET],
    ["runs", "show", "latest", "--out", BUCKET],
    ["runs", "rm", "latest", "--out", BUCKET],
    ["doctor", "--out", BUCKET],
]
PLAN = Plan.of("CartPole-v1", overrides={"until.steps": 10})
CALLS: list[Callable[[Any], Any]] = [
    lambda out: qfleet.train(PLAN, out=out),
    lambda out: train_group(PLAN, 2, out=out),
    lambda out: rehearse(PLAN, out=out),
    lambda out: qfleet.resume("latest", out=out),
    lambda out: qfleet.load("latest", out=out),
    lambda out: compare("latest", out=out),
    list_runs,
    lambda out: plot_runs([], f"{out}/plot.png"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_refuses_an_address(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "s3://bucket/runs" in (said := capsys.readouterr().err)
    assert "Remote storage is not supported yet" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("out", [BUCKET, Path("gs://bucket/runs")], ids=["text", "path"])
def test_python_refuses_an_address(
    call: Callable[[Any], Any], out: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="Remote storage is not supported yet"):
        call(out)
    assert not list(tmp_path.iterdir())


def test_a_file_address_is_answered_with_its_path() -> None:
    with pytest.raises(UsageError) as found:
        local_path("file:///home/me/runs")
    assert "/home/me/runs" in found.value.fix


@pytest.mark.parametrize("path", ["runs", "/tmp/a:b/c", "./s3/x", "a b", "C:/x", ""])  # noqa: S108
def test_paths_stay_as_they_are(path: str) -> None:
    assert local_path(path) == Path(path)
