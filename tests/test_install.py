"""The command that an error names for a missing extra works for how this copy was installed."""

import ast
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qfleet import install
from qfleet.install import install_command

ROOT = Path(__file__).parents[1]


def installed(monkeypatch: pytest.MonkeyPatch, record: Any) -> None:
    """Let pip have recorded this about the installation; None: nothing."""

    class Found:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return record if record is None or isinstance(record, str) else json.dumps(record)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Found())


def checkout(folder: Path) -> Path:
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/setup").touch()
    return folder


@pytest.mark.parametrize("record", [None, "", "not json", "[]", {}])
def test_a_copy_from_an_index(monkeypatch: pytest.MonkeyPatch, record: Any) -> None:
    installed(monkeypatch, record)
    assert install_command("box2d") == 'pip install "qfleet[box2d]"'


def test_a_checkout_whose_scripts_made_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout(tmp_path / "a clone")
    installed(monkeypatch, {"url": folder.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    assert install_command("ray") == f"'{folder}/scripts/setup' ray"
    monkeypatch.chdir(folder)
    assert install_command("ray") == "scripts/setup ray"


def test_a_checkout_in_an_environment_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout(tmp_path / "clone")
    installed(monkeypatch, {"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert install_command("ray") == f'pip install --editable "{folder}[ray]"'
    installed(monkeypatch, {"url": folder.as_uri(), "dir_info": {}})
    assert install_command("ray") == f'pip install "{folder}[ray]"'


def test_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "my $wheels" / "qfleet-0.1.0-py3-none-any.whl"
    installed(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("plot") == 'pip install "qfleet[plot]"'  # the file is gone
    wheel.parent.mkdir()
    wheel.touch()
    assert install_command("plot") == f"pip install '{wheel}[plot]'"


def test_a_repository_and_a_file_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    vcs = {"vcs": "git", "commit_id": "0123abc", "requested_revision": "main"}
    installed(monkeypatch, {"url": "https://example.org/q.git", "vcs_info": vcs})
    assert install_command("tb") == 'pip install "qfleet[tb] @ git+https://example.org/q.git@0123abc"'
    installed(monkeypatch, {"url": "https://example.org/q.whl", "archive_info": {}})
    assert install_command("tb") == 'pip install "qfleet[tb] @ https://example.org/q.whl"'


def test_a_copy_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert install_command("tb") == f'pip install "{ROOT}[tb]"'


def test_no_message_names_an_extra_in_another_way() -> None:
    sources = [path for path in (ROOT / "qfleet").rglob("*.py") if path.name != "install.py"]
    assert not [str(path) for path in sources if re.search(r"qfleet\[", path.read_text("utf-8"))]


def test_extras_that_messages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    calls = [
        node
        for path in (ROOT / "qfleet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == install.install_command.__name__
    ]
    named = {node.args[0].value for node in calls if isinstance(node.args[0], ast.Constant)}
    assert {
        "plot",
        "pandas",
        "tb",
        "video",
        "minatar",
        "atari",
        "lz4",
        "mpi",
        "ray",
        "data",
        "minari",
        "s3",
        "hdfs",
        "spark",
    } == named
    assert named <= extras.keys()
