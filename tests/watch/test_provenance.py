"""The commit of a folder is found without running anything that its repository names."""

import os
import subprocess
from pathlib import Path

import pytest

from qfleet.watch import collect_provenance
from qfleet.watch import provenance as module
from qfleet.watch.provenance import git_state

WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", *WHO, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, check=True, timeout=20, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, text: str = "1") -> str:
    (folder / "a").write_text(text)
    git(folder, "add", "a")
    git(folder, "commit", "-q", "--no-verify", "-m", "a")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "a repo"
    folder.mkdir()
    git(folder, "init", "-q")
    return folder


def dirty(folder: Path) -> bool | None:
    found = git_state(folder)
    assert found is not None
    answer: bool | None = found["dirty"]
    return answer


def test_the_commit_and_whether_files_differ(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    assert collect_provenance()["git"] is None  # no commit yet
    head = commit(repo)
    assert collect_provenance()["git"] == {"commit": head, "dirty": False}
    (repo / "a").write_text("2")
    assert dirty(repo) is True
    git(repo, "add", "a")
    assert dirty(repo) is True  # staged
    git(repo, "commit", "-q", "-m", "b")
    assert dirty(repo) is False
    (repo / "new").write_text("not tracked")
    assert dirty(repo) is False
    (repo / "a").unlink()
    assert dirty(repo) is True


def test_a_file_written_at_the_time_of_the_commit_differs(repo: Path) -> None:
    commit(repo, "1")
    when = (repo / ".git/index").stat()
    (repo / "a").write_text("2")  # as long as before
    os.utime(repo / "a", ns=(when.st_atime_ns, when.st_mtime_ns))
    assert dirty(repo) is True


def test_a_folder_without_repository_has_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_a_missing_folder_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "missing").mkdir()
    monkeypatch.chdir(tmp_path / "missing")
    (tmp_path / "missing").rmdir()
    assert collect_provenance()["git"] is None


def test_branches_that_are_packed_detached_or_in_another_work_tree(repo: Path, tmp_path: Path) -> None:
    first = commit(repo)
    below = repo / "below" / "that"
    below.mkdir(parents=True)
    assert git_state(below) == {"commit": first, "dirty": False}
    git(repo, "checkout", "-q", "-b", "feature/x-1.0")
    git(repo, "pack-refs", "--all")
    assert git_state(repo) == {"commit": first, "dirty": False}
    git(repo, "checkout", "-q", "--detach")
    assert git_state(repo) == {"commit": first, "dirty": False}
    git(repo, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    second = commit(tmp_path / "other", "2")
    assert git_state(tmp_path / "other") == {"commit": second, "dirty": False}
    assert git_state(repo) == {"commit": first, "dirty": False}
    git(repo, "gc", "-q")
    assert git_state(tmp_path / "other") == {"commit": second, "dirty": False}


def test_a_repository_of_sha256(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--object-format=sha256")
    head = commit(tmp_path)
    assert git_state(tmp_path) == {"commit": head, "dirty": False}


HOSTILE = """
[core]
    fsmonitor = {mark} fsmonitor
    hooksPath = {hooks}
    sshCommand = {mark} ssh
    editor = {mark} editor
    pager = {mark} pager
    alternateRefsCommand = {mark} alternates
    attributesFile = {attributes}
[filter "x"]
    clean = {mark} clean
    smudge = {mark} smudge
    process = {mark} process
    required = true
[diff]
    external = {mark} external
[diff "x"]
    textconv = {mark} textconv
    command = {mark} diff
[merge "x"]
    driver = {mark} merge
[alias]
    status = !{mark} alias
[include]
    path = {include}
[credential]
    helper = !{mark} credential
[remote "origin"]
    url = ext::{mark} remote
    promisor = true
[protocol "ext"]
    allow = always
[extensions]
    partialClone = origin
"""
HOOKS = (
    "post-index-change",
    "pre-commit",
    "post-checkout",
    "reference-transaction",
    "fsmonitor-watchman",
    "pre-auto-gc",
)


def test_nothing_that_the_repository_names_is_run(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters, hooks, monitors, aliases, helpers, in settings, attributes and included files, also of a submodule."""
    inner = repo / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    commit(inner)
    git(repo, "add", "inner")
    head = commit(repo)
    mark, marks = tmp_path / "mark", tmp_path / "marks"
    mark.write_text(f'#!/bin/sh\necho "$@" >>"{marks}"\ncat\n')
    mark.chmod(0o755)
    hooks = tmp_path / "hooks"
    for folder in (hooks, repo / ".git/hooks", inner / ".git/hooks"):
        folder.mkdir(exist_ok=True)
        for name in HOOKS:
            (folder / name).write_text(f'#!/bin/sh\necho {name} >>"{marks}"\n')
            (folder / name).chmod(0o755)
    (tmp_path / "attributes").write_text("* filter=x diff=x merge=x\n")
    (tmp_path / "include").write_text(f"[core]\n\tfsmonitor = {mark} included\n")
    parts = {"mark": mark, "hooks": hooks, "attributes": tmp_path / "attributes", "include": tmp_path / "include"}
    for folder in (repo, inner):
        (folder / ".git/config").write_text((folder / ".git/config").read_text() + HOSTILE.format(**parts))
        (folder / ".gitattributes").write_text("* filter=x diff=x merge=x\n")
        (folder / ".git/info").mkdir(exist_ok=True)
        (folder / ".git/info/attributes").write_text("* filter=x diff=x\n")
        (folder / "a").write_text("other")  # a filter would be asked what it is
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"{mark} variable")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"{mark} counted")
    assert git_state(repo) == {"commit": head, "dirty": True}
    assert not marks.exists(), marks.read_text()
    subprocess.run(["git", "status"], cwd=repo, timeout=20, capture_output=True)
    assert marks.exists()  # asked plainly, git runs them: the traps above are real


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main", "packed-refs", "index", "commondir", "../.git"])
@pytest.mark.parametrize("what", ["link", "fifo", "folder", "huge", "binary", "missing", "strange"])
def test_any_content_of_the_git_folder_is_handled_quickly(
    repo: Path, tmp_path: Path, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIT_LIMIT_SECONDS", 1.0)
    git(repo, "checkout", "-q", "-b", "main")
    head = commit(repo)
    target = (repo / ".git" / name).resolve() if name == "../.git" else repo / ".git" / name
    if target.is_dir():
        target.rename(tmp_path / "kept")
    target.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("the user's secret\n")
    if what == "link":
        target.symlink_to(tmp_path / "secret")
    elif what == "fifo":
        os.mkfifo(target)
    elif what == "folder":
        target.mkdir()
    elif what == "huge":
        with target.open("wb") as file:
            file.truncate(1 << 40)
    elif what == "binary":
        target.write_bytes(bytes(range(256)))
    elif what == "strange":
        target.write_text("ref: refs/heads/../../../../secret\n")
    found = git_state(repo)
    assert found is None or found["commit"] == head
    assert "secret" not in str(found)
