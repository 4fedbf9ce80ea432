"""Access to files inside an untrusted folder."""

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
    DRAFT_SUFFIX,
    FolderIdentity,
    HardLinked,
    NotRegularFile,
    TooLarge,
    is_file,
    is_folder,
    list_inside,
    make_folder,
    open_inside,
    open_log,
    read_inside,
    remove_drafts,
    remove_file,
    remove_tree,
    rename_inside,
    replace_inside,
    require_regular_files,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    return tmp_path / "run"


def unharmed(run: Path) -> bool:
    """Is everything outside of the run's folder unchanged?"""
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
def test_only_regular_files_can_be_opened(run: Path, kind: str, flags: int) -> None:
    ODD[kind](run / "x")
    with pytest.raises(NotRegularFile):
        os.close(open_inside(run, "x", flags))
    assert unharmed(run)


@pytest.mark.parametrize("name", ["sub/file", "sub/new"])
def test_a_linked_folder_within_a_name_is_refused(run: Path, name: str) -> None:
    (run / "sub").symlink_to("../outside")
    refused: list[Callable[[], object]] = [
        lambda: open_inside(run, name, os.O_RDWR | os.O_CREAT),
        lambda: read_inside(run, name, 100),
        lambda: replace_inside(run, name, b"mine"),
        lambda: make_folder(run, name),
        lambda: remove_file(run, name),
        lambda: remove_tree(run, name),
        lambda: list_inside(run, "sub"),
        lambda: open_log(run / name),
        lambda: require_regular_files(run, "sub"),
    ]
    for act in refused:
        with pytest.raises(NotRegularFile):
            act()
    assert not is_file(run, name)
    assert unharmed(run)


@pytest.mark.parametrize("name", ["../outside/file", "/etc/passwd", "a/../../outside/file", "x\0y"])
def test_a_name_that_leaves_its_folder_is_refused(run: Path, name: str) -> None:
    with pytest.raises(ValueError, match="does not stay inside"):
        read_inside(run, name, 100)
    assert not is_file(run, name)


def test_a_hard_linked_file_is_not_opened_for_writing(run: Path) -> None:
    os.link(run.parent / "outside" / "file", run / "metrics.jsonl")
    assert read_inside(run, "metrics.jsonl", 100) == b"precious"
    with pytest.raises(HardLinked):
        open_inside(run, "metrics.jsonl", os.O_WRONLY | os.O_APPEND)
    replace_inside(run, "metrics.jsonl", b"mine")  # replaces the name, not the linked file
    assert unharmed(run)


def test_a_file_is_replaced_atomically_through_a_draft_with_a_random_name(
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


def test_a_failed_write_leaves_no_draft(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qfleet.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_inside(run, "x", b"data")
    assert os.listdir(run) == []


def test_drafts_of_a_killed_writer_are_removed(run: Path) -> None:
    (run / f".status.json.0123456789abcdef{DRAFT_SUFFIX}").write_text("half")
    (run / f".link{DRAFT_SUFFIX}").symlink_to("../outside/file")
    (run / ".keep").write_text("mine")
    remove_drafts(run)
    assert os.listdir(run) == [".keep"]
    assert unharmed(run)


def test_a_file_too_large_is_refused_before_it_is_read(run: Path) -> None:
    with open(run / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge, match=r"1,099,511,627,776 bytes, and 1,000 are the most"):
        read_inside(run, "huge", 1_000)


def test_removing_a_folder_keeps_the_targets_of_its_links(run: Path) -> None:
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


def test_listing_and_file_types_do_not_follow_links(run: Path) -> None:
    (run / "folder").mkdir()
    (run / "file").write_text("")
    (run / "to_file").symlink_to("file")
    (run / "to_folder").symlink_to("folder")
    assert list_inside(run) == ["file", "folder", "to_file", "to_folder"]
    assert list_inside(run, "nowhere") == []
    assert [name for name in list_inside(run) if is_file(run, name)] == ["file"]
    assert [name for name in list_inside(run) if is_folder(run, name)] == ["folder"]
    rename_inside(run, "file", "other")
    assert not is_file(run, "file")


def test_a_log_is_private_to_its_owner_and_appended_to(run: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with os.fdopen(open_log(run / "logs" / "actor-0.log"), "wb") as file:
            file.write(line)
    assert (run / "logs" / "actor-0.log").read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE((run / "logs" / "actor-0.log").stat().st_mode) == 0o600
    os.close(open_log(os.devnull))
    with pytest.raises(FileNotFoundError):
        open_log(run / "gone" / "logs" / "actor-0.log")
    assert not (run / "gone").exists()


def test_a_renamed_or_removed_folder_has_changed_identity(run: Path) -> None:
    with closing(FolderIdentity(run)) as known:
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
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode()


def test_lines_after_the_first_are_indented() -> None:
    assert indented("import os\nimport sys\n\x1b") == "import os\n  import sys\n  \\x1b"
