"""How many cores a run may use: what is visible, a container's limit, a member's share."""

import os
from pathlib import Path

import pytest

from qfleet.system import cores
from qfleet.system.cores import SHARE_VARIABLE, machine_cores, thread_variables, usable_cores


@pytest.fixture(autouse=True)
def ninety_nine_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", 99), ("250000 100000", 2), ("50000 100000", 1), ("nonsense", 99), ("1 0", 99)]
)
@pytest.mark.parametrize("own", ["0::/\n", "0::/user/run\n", "0::/../..\n", None])
def test_the_limit_of_a_container_counts(tmp_path: Path, text: str, own: str | None, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert machine_cores(tmp_path, tmp_path / "own") == expected


def test_the_lowest_limit_of_the_groups_around_counts(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/user/run/inner\n")
    for path, quota in (("user", 5), ("user/run", 3), ("user/run/inner", 4), ("other", 1)):
        (tmp_path / path).mkdir()
        (tmp_path / path / "cpu.max").write_text(f"{quota}00000 100000\n")
    assert machine_cores(tmp_path, tmp_path / "own") == 3


@pytest.mark.parametrize(("quota", "expected"), [("-1", 99), ("200000", 2)])
@pytest.mark.parametrize("path", ["cpu", "cpu/docker/a"])
def test_control_groups_of_version_1_count(tmp_path: Path, path: str, quota: str, expected: int) -> None:
    (tmp_path / "own").write_text("4:memory:/other\n1:cpu,cpuacct:/docker/a\n")
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / path / "cpu.cfs_period_us").write_text("100000")
    assert machine_cores(tmp_path, tmp_path / "own") == expected


@pytest.mark.parametrize(("share", "expected"), [("3", 3), ("0", 1), ("500", 8), ("", 8), ("-2", 8), ("x", 8)])
def test_a_member_of_a_sweep_has_its_share(share: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "machine_cores", lambda: 8)
    monkeypatch.setenv(SHARE_VARIABLE, share)
    assert usable_cores() == expected


def test_variables_of_threads_do_not_replace_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cores.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    assert thread_variables(2) == {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
