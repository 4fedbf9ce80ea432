"""The module path of child processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.system import child_process

# Starts a process with each start method in use, and prints the module path that the process has.
STARTS = """
import json, multiprocessing, os, sys
from qfleet.system.child_process import fork_server, safe_path

def report(connection):
    connection.send((sys.path, "selectors" in sys.modules, os.environ.get("PYTHONSAFEPATH")))

if __name__ == "__main__":
    found = []
    for context in (fork_server("qfleet.system.child_process"), multiprocessing.get_context("spawn")):
        mine, theirs = context.Pipe()
        process = context.Process(target=report, args=(theirs,))
        with safe_path():
            process.start()
        assert mine.poll(30)
        found.append(mine.recv())
        process.join(timeout=30)
    print(json.dumps(found))
"""


def poisoned(folder: Path, *names: str) -> Path:
    """A folder whose modules write their names to a file when they are imported."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(
            f"open({str(folder / 'marks')!r}, 'a').write('{name} ')\nraise ImportError\n"
        )
    return folder


def test_children_do_not_import_from_the_current_folder(tmp_path: Path) -> None:
    here = poisoned(tmp_path / "here", "selectors", "json", "struct", "numpy")
    (tmp_path / "there").mkdir()
    script = tmp_path / "there" / "script.py"
    script.write_text(STARTS)
    done = subprocess.run([sys.executable, str(script)], cwd=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for path, loaded, variable in json.loads(done.stdout):
        assert path[0] == str(script.parent)  # modules beside the user's script can be imported
        assert str(here) not in path
        assert "" not in path
        assert loaded
        assert variable is None  # programs that an environment starts are not affected
    assert not (here / "marks").exists()


def test_another_python_has_the_same_module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = poisoned(tmp_path / "here", "json", "selectors")
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "only_ours.py").write_text("NAME = 'found'\n")
    monkeypatch.setattr(sys, "path", [str(ours), *(each for each in sys.path if each not in ("", os.getcwd()))])
    command = child_process.python_command("import only_ours, qfleet; print(only_ours.NAME, *sys.argv[1:])", "a b", "c")
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60)
    assert done.stdout == "found a b c\n", done.stderr
    assert not (here / "marks").exists()


def test_safe_path_keeps_the_value_that_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(child_process.SAFE_PATH, "1")
    with child_process.safe_path():
        assert os.environ[child_process.SAFE_PATH] == "1"
    assert os.environ[child_process.SAFE_PATH] == "1"
    monkeypatch.delenv(child_process.SAFE_PATH)
    with child_process.safe_path(), child_process.safe_path():
        assert os.environ[child_process.SAFE_PATH] == child_process.SET_BY_PARENT
    assert child_process.SAFE_PATH not in os.environ
