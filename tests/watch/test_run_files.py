import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from qfleet.errors import StorageError, UsageError
from qfleet.watch import (
    CLOCK_FIELDS,
    EventLog,
    RowLog,
    collect_provenance,
    read_json,
    read_rows,
    without_clock,
    write_json,
)
from qfleet.watch.read_files import MOST_JSON_BYTES, MOST_ROW_BYTES


def test_rows_come_back_in_order_and_at_once(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "metrics.jsonl")
    log.row({"kind": "progress", "env_steps": 1, "loss": 0.1})
    log.row({"kind": "eval", "env_steps": 2, "returns": [1.0, 2.5]})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows == [
        {"kind": "progress", "env_steps": 1, "loss": 0.1},
        {"kind": "eval", "env_steps": 2, "returns": [1.0, 2.5]},
    ]
    assert list(rows[0]) == ["kind", "env_steps", "loss"]


def test_values_that_json_lacks(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "m")
    row = {
        "a": float("nan"),
        "b": [np.float32("inf"), np.int64(3)],
        "c": np.arange(2),
        "d": Path("x"),
        "e": np.bool_(True),
    }
    log.row(row)
    assert (tmp_path / "m").read_text() == '{"a":null,"b":[null,3],"c":[0,1],"d":"x","e":true}\n'


def test_floats_come_back_exactly(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=100).tolist()
    RowLog(tmp_path / "m").row({"x": values})
    assert read_rows(tmp_path / "m") == [{"x": values}]


def test_truncating_to_a_checkpoint_and_resuming_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, cut = RowLog(tmp_path / "whole"), RowLog(tmp_path / "cut")
    for step in range(5):
        whole.row({"env_steps": step})
    for step in range(3):
        cut.row({"env_steps": step})
    position = cut.position()
    cut.row({"env_steps": 99})
    cut.close()
    again = RowLog(tmp_path / "cut")
    assert again.cut(position) == 0
    for step in range(3, 5):
        again.row({"env_steps": step})
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_cut_returns_how_many_bytes_were_missing(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "m")
    log.row({"a": 1})
    good = log.position()
    assert log.cut(good + 100) == 100
    assert log.cut(good - 2) == good - 2  # the middle of a row: the torn row goes too
    assert log.position() == 0


@pytest.mark.parametrize("size", [1, 70_000])
def test_a_torn_last_line_is_ignored_and_overwritten(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"a":1}\n{"b":"' + b"x" * size)
    assert read_rows(path) == [{"a": 1}]
    RowLog(path).row({"c": 3})
    assert path.read_bytes() == b'{"a":1}\n{"c":3}\n'


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none") == []


def test_a_full_disk_is_a_storage_error_and_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RowLog(tmp_path / "m")
    log.row({"a": 1})
    write = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) <= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StorageError) as caught:
        log.row({"b": 2})
    monkeypatch.undo()
    assert caught.value.exit_code == 5
    assert "No space left" in caught.value.why
    assert (tmp_path / "m").read_bytes() == b'{"a":1}\n'


def test_events_only_grow_even_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"old"}\n{"kind":"to')
    assert EventLog(path).event("saved", step=12)
    assert EventLog(path).event("fault", cause="disk", lost_steps=3)
    kinds = [row["kind"] for row in read_rows(path)]
    assert kinds == ["old", "saved", "fault"]
    assert read_rows(path)[1]["step"] == 12
    assert path.read_bytes().startswith(b'{"kind":"old"}\n{"kind":"to\n')


def test_an_event_that_cannot_be_written_does_not_raise(tmp_path: Path) -> None:
    assert EventLog(tmp_path / "no" / "folder" / "events.jsonl").event("fault") is False


def test_write_json_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"state": "running"})
    write_json(path, {"state": "done", "loss": float("inf")})
    assert json.loads(path.read_text()) == {"state": "done", "loss": None}
    assert os.listdir(tmp_path) == ["status.json"]


def test_write_json_keeps_the_old_one_when_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"state": "running"})

    def refuse(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError):
        write_json(path, {"state": "done"})
    assert json.loads(path.read_text()) == {"state": "running"}
    assert os.listdir(tmp_path) == ["status.json"]


def plant(kind: str, path: Path, target: Path) -> None:
    """Something that is not a regular file, under a name that qfleet uses."""
    if kind == "link":
        target.write_text("precious")
        path.symlink_to(target)
    elif kind == "link to nothing":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


ODD = ["link", "link to nothing", "pipe", "folder"]


def unharmed(target: Path) -> bool:
    """Nothing was written through a planted link."""
    return not target.exists() or target.read_text() == "precious"


def test_a_document_is_never_written_through_a_link(tmp_path: Path) -> None:
    plant("link", tmp_path / "status.json", tmp_path / "target")
    write_json(tmp_path / "status.json", {"state": "done"})
    assert not (tmp_path / "status.json").is_symlink()
    assert unharmed(tmp_path / "target")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
def test_logs_write_into_regular_files_only(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "log", tmp_path / "target"
    early = EventLog(path)
    plant(kind, path, target)
    for make in (RowLog, EventLog):
        with pytest.raises(StorageError, match="cannot write") as caught:
            make(path)
        assert "not a regular file" in caught.value.why
        assert "remove it" in caught.value.fix
    assert early.event("fault") is False
    assert unharmed(target)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
def test_reading_never_waits_nor_follows(tmp_path: Path, kind: str) -> None:
    plant(kind, tmp_path / "file", tmp_path / "target")
    (tmp_path / "target").write_text('{"a":1}\n')
    assert read_json(tmp_path / "file") == {}
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(tmp_path / "file")


def test_files_larger_than_any_run_writes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}')
    assert read_json(path) == {"a": 1}
    os.truncate(path, MOST_JSON_BYTES + 1)
    assert read_json(path) == {}
    assert read_rows(path) == []  # one line that is not JSON
    os.truncate(path, MOST_ROW_BYTES + 1)
    with pytest.raises(UsageError, match="cannot read") as caught:
        read_rows(path)
    assert "bytes" in caught.value.why


def test_a_document_of_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}'.ljust(MOST_JSON_BYTES))
    assert read_json(path) == {"a": 1}


def test_clock_fields() -> None:
    row = {"kind": "progress", "seconds": 1.0, "steps_per_second": 2.0, "updates_per_second": 3.0, "loss": 4.0}
    assert without_clock(row) == {"kind": "progress", "loss": 4.0}
    assert "env_steps" not in CLOCK_FIELDS


def test_provenance_has_versions_and_machine_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-secret")
    facts = collect_provenance(["qfleet", "train", "CartPole-v1"])
    assert facts["command"] == ["qfleet", "train", "CartPole-v1"]
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["hardware"]["cores"] >= 1
    assert facts["hardware"]["memory_bytes"] > 1e8
    text = json.dumps(facts)
    assert "hunter2" not in text
    assert f'"{os.uname().nodename}"' not in text
