"""Clusters that may be joined, tokens, and errors when Ray is missing or too old."""

import re
import socket
import sys
import time
from pathlib import Path

import msgspec
import pytest

from qfleet.distributed.local_run import is_on_ray
from qfleet.errors import EnvError, QfleetError, StorageError, UsageError
from qfleet.install import install_command
from qfleet.plan import make_plan

RAY = {"runtime.type": "ray", "actors.num": 2}


@pytest.mark.parametrize("address", ["auto", "ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:6379/x", "http://a:1"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(UsageError, match="is not host:port"):
        make_plan("CartPole-v1", overrides={**RAY, "runtime.address": address})


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head.cluster-1:6379", "[fe80::1]:6379"])
def test_good_addresses_pass(address: str) -> None:
    assert make_plan("CartPole-v1", overrides={**RAY, "runtime.address": address})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("qfleet.distributed.ray.driver")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=re.escape(install_command("ray"))):
        is_on_ray(make_plan("CartPole-v1", overrides=RAY))


def test_other_runtimes_need_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert not is_on_ray(make_plan("CartPole-v1"))
    assert not is_on_ray(make_plan("CartPole-v1", overrides={**RAY, "runtime.type": "processes"}))


@pytest.mark.ray
class TestWithRay:
    """Tests that need the package, but start nothing."""

    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("ray")
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def test_a_remote_cluster_needs_a_token(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from qfleet.distributed.ray.session import token_mode

        with pytest.raises(UsageError, match="there is no token"):
            token_mode("10.0.0.1:6379", allow_none=False)
        assert token_mode("10.0.0.1:6379", allow_none=True) == {}
        assert token_mode("127.0.0.1:6379", allow_none=False) == token_mode("[::1]:6379", allow_none=False) == {}
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
        assert token_mode("10.0.0.1:6379", allow_none=False) == {"RAY_AUTH_MODE": "token"}
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        with pytest.raises(UsageError, match="there is no token"):
            token_mode("10.0.0.1:6379", allow_none=False)

    def test_the_token_is_made_once_with_mode_0600(self) -> None:
        from qfleet.distributed.ray.session import own_token

        file = own_token()
        token = file.read_text()
        assert len(token) >= 32
        assert file.stat().st_mode & 0o777 == 0o600
        assert own_token().read_text() == token
        assert [path.name for path in file.parent.iterdir()] == ["ray-token"]
        file.chmod(0o644)
        with pytest.raises(StorageError, match="yours alone"):
            own_token()

    def test_an_unreachable_address_is_an_error_at_once(self) -> None:
        from qfleet.distributed.ray.session import connect

        with pytest.raises(UsageError, match="cannot be joined"):
            connect("127.0.0.1:9", "127.0.0.1", 9)

    @pytest.mark.parametrize("wrong", ["address", "token", "mode", "place"])
    def test_a_ray_that_others_can_reach_is_not_used(
        self, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from qfleet.distributed.ray import session

        begun: list[Path] = []
        stopped: list[bool] = []

        def init(_temp_dir: str, **settings: object) -> None:
            begun.append(Path(_temp_dir))
            begun[0].mkdir(mode=0o777)
            begun[0].chmod(0o777)  # as Ray does
            if wrong == "mode":
                begun[0].parent.chmod(0o755)

        mode = session.AuthenticationMode
        monkeypatch.setattr(session.ray, "init", init)
        monkeypatch.setattr(session.ray, "shutdown", lambda: stopped.append(True))
        address = "10.0.0.5" if wrong == "address" else "127.0.0.1"
        monkeypatch.setattr(session.ray.util, "get_node_ip_address", lambda: address)
        answer = mode.DISABLED if wrong == "token" else mode.TOKEN
        monkeypatch.setattr(session, "get_authentication_mode", lambda: answer)
        elsewhere = tmp_path / "ray"
        monkeypatch.setattr(session, "session_folder", lambda: elsewhere if wrong == "place" else begun[0] / "s")
        runtime = make_plan("CartPole-v1", overrides=RAY).runtime
        said = {"address": r"listens on 10\.0\.0\.5, with a token", "token": "without a token"}
        started = session.started_locally(runtime, 2.0)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=said.get(wrong, "others can reach")), started:
            pytest.fail("it was used")
        assert stopped == [True]
        assert not begun[0].parent.exists()

    def test_the_directory_of_ray_must_be_private(self, tmp_path: Path) -> None:
        from qfleet.distributed.ray.session import require_private

        inside = tmp_path / "r" / "session"
        inside.mkdir(parents=True)
        tmp_path.chmod(0o700)
        require_private(tmp_path, inside)
        for mode in (0o701, 0o750, 0o777):
            tmp_path.chmod(mode)
            with pytest.raises(UsageError, match="others can reach"):
                require_private(tmp_path, inside)
        tmp_path.chmod(0o700)
        link = tmp_path / "link"
        link.symlink_to(tmp_path.parent)
        with pytest.raises(UsageError, match="others can reach"):
            require_private(tmp_path, link / "other")

    @pytest.mark.slow
    def test_a_listener_that_never_replies_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from qfleet.distributed.ray.session import connect

        # Tests stay on loopback.
        monkeypatch.setattr("qfleet.distributed.ray.session.is_reachable", lambda host, port: False)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            began = time.monotonic()
            with pytest.raises(UsageError, match="cannot be joined"):
                connect(f"127.0.0.1:{port}", "127.0.0.1", port)
        assert time.monotonic() - began < 60

    def test_old_versions_are_refused(self) -> None:
        from qfleet.distributed.ray.session import require_version

        require_version("2.60.0")
        require_version("3.0.0.dev0")
        with pytest.raises(UsageError, match="too old"):
            require_version("2.54.1")

    def test_errors_come_back_as_the_same_class(self) -> None:
        from qfleet.distributed.ray.driver import as_error
        from qfleet.distributed.ray.messages import RunFailed

        error = as_error(RunFailed("EnvError", "what", "why", "fix"))
        assert isinstance(error, EnvError)
        assert (error.what, error.why, error.fix, error.exit_code) == ("what", "why", "fix", 4)
        strange = as_error(RunFailed("", "KeyError: 'x'", trace="Traceback ..."))
        assert not isinstance(strange, QfleetError)
        assert "KeyError: 'x'" in str(strange)
        assert not isinstance(as_error(RunFailed("Annotated", "what")), QfleetError)

    def test_components_can_be_inspected_without_a_cluster_but_not_run(self) -> None:
        from qfleet.api import rehearse
        from qfleet.distributed.ray.actors import RayActorLauncher

        plan = make_plan("CartPole-v1", overrides={**RAY, "env.num": 4})
        assert rehearse(plan)
        launcher = RayActorLauncher(plan, plan.runtime, None, {}, (None, None, None), None)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"qfleet\.distributed\.ray"):
            launcher.launch(0, 0)

    def test_an_actor_without_the_run_directory_writes_no_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from qfleet.distributed.actors.main import ActorSetup
        from qfleet.distributed.ray.actors import ActorHost

        seen: list[ActorSetup] = []
        monkeypatch.setattr(ActorHost, "act", lambda self, setup, *links: seen.append(setup))
        run = tmp_path / "elsewhere"
        plan = msgspec.json.encode(make_plan("CartPole-v1"))
        files = (str(run / "logs" / "actor-1.log"), str(run / "history" / "actor-1-000000.jsonl"))
        assert ActorHost().run(ActorSetup(plan, 1, 0, b"", *files), None, (), None, {}) == b""  # type: ignore[arg-type]
        assert [(setup.log, setup.history) for setup in seen] == [(None, None)]
