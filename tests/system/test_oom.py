"""Counting the processes that the kernel killed because memory ran out."""

from pathlib import Path

import pytest

from qfleet.system.oom import oom_kills


@pytest.mark.parametrize(
    ("groups", "counter", "text"),
    [
        ("0::/user/run", "user/run/memory.events", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 3\n"),
        ("4:memory:/job\n0::/", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
    ids=["second version", "first version"],
)
def test_the_counter_of_this_control_group_is_read(tmp_path: Path, groups: str, counter: str, text: str) -> None:
    (tmp_path / "cgroup").write_text(groups + "\n")
    (tmp_path / counter).parent.mkdir(parents=True)
    (tmp_path / counter).write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 3


@pytest.mark.parametrize("text", [None, "", "oom_kill many\n", "nonsense\n"])
def test_without_a_counter_there_are_no_kills(tmp_path: Path, text: str | None) -> None:
    assert oom_kills(tmp_path / "nowhere", tmp_path) == 0
    (tmp_path / "cgroup").write_text("0::/\n")
    if text is not None:
        (tmp_path / "memory.events").write_text(text)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
