"""Files inside a folder that a stranger may have made."""

import errno
import os
import socket
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from qfleet.escape import escaped, indented
from qfleet.files import (
    DRAFT_END,
    HardLinked,
    Identity,
    NotPlain,
    TooLarge,
    is_file,
    is_folder,
    make_folder,
    names_inside,
    open_inside,
    open_log,
    read_inside,
    remove_drafts,
    remove_file,
    remove_tree,
    rename_inside,
    replace_inside,
    require_plain,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    return tmp_path / "run"


def unharmed(run: Path) -> bool:
    """Nothing outside of the run's folder has changed."""
    outside = run.parent / "outside"
    return [each.name for each in outside.iterdir()] == ["file"] and (outside / "file").read_text() == "precious"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("../outside/file"),
    "link to a folder": lambda path: path.symlink_to("../outside"),
    "link to nothing": lambda path: path.symlink_to("../outside/new"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "fifo": lambda path: os.mkfifo(path),
    "socket": make_socket,
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_APPEND, os.O_WRONLY | os.O_CREAT])
def test_only_regular_files_are_opened(run: Path, kind: str, flags: int) -> None:
    ODD[kind](run / "x")
    with pytest.raises(NotPlain):
        os.close(open_inside(run, "x", flags))
    assert unharmed(run)


@pytest.mark.parametrize("name", ["sub/file", "sub/new"])
def test_a_folder_on_the_way_that_is_a_link_is_not_entered(run: Path, name: str) -> None:
    (run / "sub").symlink_to("../outside")
    refused: list[Callable[[], object]] = [
        lambda: open_inside(run, name, os.O_RDWR | os.O_CREAT),
        lambda: read_inside(run, name, 100),
        lambda: replace_inside(run, name, b"mine"),
        lambda: make_folder(run, name),
        lambda: remove_file(run, name),
        lambda: remove_tree(run, name),
        lambda: names_inside(run, "sub"),
        lambda: open_log(run / name),
        lambda: require_plain(run, "sub"),
    ]
    for act in refused:
        with pytest.raises(NotPlain):
            act()
    assert not is_file(run, name)
    assert unharmed(run)


@pytest.mark.parametrize("name", ["../outside/file", "/etc/passwd", "a/../../outside/file", "x\0y"])
def test_a_name_stays_below_its_folder(run: Path, name: str) -> None:
    with pytest.raises(ValueError, match="does not stay inside"):
        read_inside(run, name, 100)
    assert not is_file(run, name)


def test_a_file_with_a_second_name_is_not_written_to(run: Path) -> None:
    os.link(run.parent / "outside" / "file", run / "metrics.jsonl")
    assert read_inside(run, "metrics.jsonl", 100) == b"precious"
    with pytest.raises(HardLinked):
        open_inside(run, "metrics.jsonl", os.O_WRONLY | os.O_APPEND)
    replace_inside(run, "metrics.jsonl", b"mine")  # takes the name's place, not the file's
    assert unharmed(run)


def test_a_file_is_put_in_place_in_one_step_under_a_name_that_nobody_can_guess(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = list[str]()
    replace = os.replace

    def seen(old: str, new: str, **where: int) -> None:
        drafts.append(old)
        replace(old, new, **where)

    monkeypatch.setattr("qfleet.files.os.replace", seen)
    (run / "status.json").symlink_to("../outside/file")
    replace_inside(run, "status.json", b"one")
    replace_inside(run, "status.json", b"two")
    assert os.listdir(run) == ["status.json"]
    assert (run / "status.json").read_bytes() == b"two"
    assert not (run / "status.json").is_symlink()
    assert len(set(drafts)) == 2
    assert all(name.startswith(".status.json.") and len(name) > 30 for name in drafts)
    assert unharmed(run)


def test_a_write_that_fails_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qfleet.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_inside(run, "x", b"data")
    assert os.listdir(run) == []


def test_what_a_killed_writer_left_is_removed(run: Path) -> None:
    (run / f".status.json.0123456789abcdef{DRAFT_END}").write_text("half")
    (run / f".link{DRAFT_END}").symlink_to("../outside/file")
    (run / ".keep").write_text("mine")
    remove_drafts(run)
    assert os.listdir(run) == [".keep"]
    assert unharmed(run)


def test_sizes_are_looked_at_before_anything_is_read(run: Path) -> None:
    with open(run / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge, match=r"1,099,511,627,776 bytes, and 1,000 are the most"):
        read_inside(run, "huge", 1_000)


def test_removing_a_folder_leaves_what_its_links_lead_to(run: Path) -> None:
    (run / "sub").mkdir()
    (run / "sub" / "link").symlink_to("../../outside")
    remove_tree(run, "sub")
    (run / "link").symlink_to("../outside")
    with pytest.raises(OSError, match="link"):
        remove_tree(run, "link")
    remove_file(run, "link")
    remove_file(run, "link")
    assert os.listdir(run) == []
    assert unharmed(run)


def test_names_and_kinds_are_told_without_following_links(run: Path) -> None:
    (run / "folder").mkdir()
    (run / "file").write_text("")
    (run / "to_file").symlink_to("file")
    (run / "to_folder").symlink_to("folder")
    assert names_inside(run) == ["file", "folder", "to_file", "to_folder"]
    assert names_inside(run, "nowhere") == []
    assert [name for name in names_inside(run) if is_file(run, name)] == ["file"]
    assert [name for name in names_inside(run) if is_folder(run, name)] == ["folder"]
    rename_inside(run, "file", "other")
    assert not is_file(run, "file")


def test_a_log_is_its_owners_alone_and_is_added_to(run: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with os.fdopen(open_log(run / "logs" / "actor-0.log"), "wb") as file:
            file.write(line)
    assert (run / "logs" / "actor-0.log").read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE((run / "logs" / "actor-0.log").stat().st_mode) == 0o600
    os.close(open_log(os.devnull))
    with pytest.raises(FileNotFoundError):
        open_log(run / "gone" / "logs" / "actor-0.log")
    assert not (run / "gone").exists()


def test_a_folder_that_was_renamed_or_removed_is_not_the_same(run: Path) -> None:
    with closing(Identity(run)) as known:
        assert known.unchanged()
        run.rename(run.with_name("elsewhere"))
        assert not known.unchanged()
        run.mkdir()
        assert not known.unchanged()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain · text – α", "plain · text – α"),
        ("two\nlines", r"two\nlines"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("\r\x08\x7f\x9b", r"\r\x08\x7f\x9b"),
        ("a\u2028b\u202ec", r"a\u2028b\u202ec"),
        ("\udcff", r"\udcff"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode()


def test_lines_after_the_first_are_indented() -> None:
    assert indented("import os\nimport sys\n\x1b") == "import os\n  import sys\n  \\x1b"
