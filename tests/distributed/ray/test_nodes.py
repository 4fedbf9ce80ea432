"""Versions of nodes, without a cluster: what is compared, and how a difference is said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfleet.errors import QfleetError, UsageError

nodes = pytest.importorskip("qfleet.distributed.ray.nodes")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(nodes.socket, "gethostname", lambda: "worker-7")


def test_a_node_with_the_same_versions_may_work() -> None:
    here = nodes.versions_here("CartPole-v1")
    assert here["environment"].startswith("gymnasium ")
    assert "code " in here["qfleet"]
    nodes.require_versions(here, dict(here))


@pytest.mark.parametrize("name", ["python", "torch", "numpy", "gymnasium", "qfleet", "environment"])
def test_each_version_counts_and_the_difference_is_named(name: str) -> None:
    here = nodes.versions_here("CartPole-v1")
    with pytest.raises(QfleetError) as raised:
        nodes.require_versions(here, {**here, name: "other"})
    assert f"{name} other instead of {here[name]}" in raised.value.what
    with pytest.raises(QfleetError, match=f"{name} none instead of"):
        nodes.require_versions(here, {other: value for other, value in here.items() if other != name})


def test_the_code_of_an_environment_in_a_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_world.py").write_text("x = 1\n")
    first = nodes.environment_version("my_world:My-v0")
    (tmp_path / "my_world.py").write_text("x = 2\n")
    assert first.startswith("my_world, code ")
    assert nodes.environment_version("my_world:My-v0") != first
    assert nodes.environment_version("no_such_world_anywhere:My-v0") == ""


def test_every_change_of_the_source_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "sub" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(nodes, "errors", SimpleNamespace(__file__=str(tmp_path / "__init__.py")))
    found = {nodes.code_hash.__wrapped__()}
    (tmp_path / "sub" / "a.py").write_text("x = 2\n")
    found.add(nodes.code_hash.__wrapped__())
    (tmp_path / "sub" / "a.py").rename(tmp_path / "sub" / "b.py")
    found.add(nodes.code_hash.__wrapped__())
    assert len(found) == 3


def test_errors_name_the_node_and_stay_the_users_own() -> None:
    report = nodes.name_node(UsageError("there is no environment Foo-v0", "why", "do"))
    assert report.what == "on node worker-7 (10.0.0.7): there is no environment Foo-v0"
    assert (report.why, report.fix, report.exit_code) == ("why", "do", UsageError.exit_code)


def test_the_end_of_a_long_error_is_kept() -> None:
    from qfleet.distributed.ray.worker import ERROR_CHARS, end_of

    text = "Ray says a lot " * 100 + "\nModuleNotFoundError: No module named 'qfleet'"
    assert end_of(text).endswith("ModuleNotFoundError: No module named 'qfleet'")
    assert len(end_of(text)) == ERROR_CHARS + 4
    assert end_of("short\n text") == "short text"


class Host:
    """A Ray actor whose place the table knows, or not."""

    def __init__(self, node_id: str) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: node_id)


def test_the_node_of_an_actor_is_found_in_rays_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def actors(actor_id: str) -> Any:
        if actor_id == "broken":
            raise RuntimeError("the table cannot be read")
        return {"State": "DEAD", "Address": {"NodeID": actor_id}}

    known = [{"NodeID": "b", "NodeManagerHostname": "worker-2", "NodeManagerAddress": "10.0.0.2"}]
    monkeypatch.setattr(nodes.ray_state, "actors", actors)
    monkeypatch.setattr(nodes.ray, "nodes", lambda: known)
    assert nodes.node_of(Host("b")) == "worker-2 (10.0.0.2)"
    assert nodes.node_of(Host("c")) == nodes.node_of(Host("broken")) == ""
