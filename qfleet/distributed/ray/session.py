"""Connecting to Ray: to one started here, on loopback with a token, or to the cluster at an address."""

import ipaddress
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray._private import ray_constants, services
from ray._raylet import AuthenticationMode, Config, get_authentication_mode
from ray.exceptions import AuthenticationError, RayError
from ray.job_config import JobConfig

from qfleet.distributed.ray import reaper as reaper_script
from qfleet.distributed.ray.reaper import children
from qfleet.errors import StorageError, UsageError
from qfleet.install import install_command
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.plan.validate.placement import has_actor_learners, has_replay_process

LOOPBACK = "127.0.0.1"
OLDEST_VERSION = (2, 55)  # older versions allow remote code execution
MAX_TEMP_CHARACTERS = 24  # the path of a Unix socket has 107 at most, and Ray adds some seventy
REACH_SECONDS = 5.0
# For a Ray that we start. When its driver is killed, Ray's helper processes end after this timeout.
OWN_RAY_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
# For a cluster that we join: one attempt, and a timeout for its reply.
JOINING_VARIABLES = {"RAY_gcs_server_port_wait_time_s": "1", "RAY_py_gcs_connect_timeout_s": "10"}
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@contextmanager
def session(plan: Plan) -> Iterator[None]:
    """Ray as the plan asks for it; a Ray that this process has already initialised is used as it is."""
    require_version(ray.__version__)
    runtime = plan.runtime
    if not isinstance(runtime, RayRuntime):
        raise TypeError("not a plan for Ray")
    least = cpus_for(plan, runtime, min(1, plan.actors.num))
    if ray.is_initialized():
        require_room(plan, least)
        yield
        return
    cpus = cpus_for(plan, runtime, plan.actors.num)
    with restored_sigterm(), started_locally(runtime, cpus) if runtime.address is None else joined(runtime):
        require_room(plan, least)
        yield


def cpus_for(plan: Plan, runtime: RayRuntime, num_actors: int) -> float:
    """The CPUs that all processes of a run ask for, with this number of actors."""
    actors = 0 if has_actor_learners(plan) else num_actors  # actor-learners act themselves
    replay = runtime.replay_cpus if runtime.replay_process else 0.0
    return runtime.learner_cpus * plan.learners.num + actors * runtime.actor_cpus + replay


@contextmanager
def restored_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler that Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def require_version(version: str) -> None:
    """Refuse versions that are known to be unsafe."""
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < OLDEST_VERSION:
        raise UsageError(
            f"Ray {version} is too old",
            "Versions before 2.55 allow remote code execution.",
            install_command("ray"),
        )


def require_room(plan: Plan, cpus: float) -> None:
    """Refuse a cluster that cannot run the learners and one actor.

    More actors wait until a node has room for them: a cluster may grow.
    """
    available = float(ray.cluster_resources().get("CPU", 0.0))
    if available + 1e-6 < cpus:
        beside = " beside runtime.replay_process=true" if has_replay_process(plan) else ""
        raise UsageError(
            f"learners.num={plan.learners.num} and one actor{beside} ask for {cpus:g} CPUs; "
            f"the Ray cluster has {available:g}",
            "Learners and at least one actor must have room at the start; further actors may wait for nodes.",
            "Lower one of them, or set runtime.actor_cpus, learner_cpus or replay_cpus to a fraction.",
        )


@contextmanager
def started_locally(runtime: RayRuntime, cpus: float) -> Iterator[None]:
    """Start a Ray for this machine only, for the time of a run."""
    folder = Path(tempfile.mkdtemp(prefix="qf-", dir=short_temp()))
    before = children(os.getpid())
    token = {} if any(os.environ.get(name) for name in TOKEN_VARIABLES) else {"RAY_AUTH_TOKEN_PATH": str(own_token())}
    try:
        with environment(**OWN_RAY_VARIABLES, **token), on_loopback():
            ray.init(
                address="local",
                num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
                object_store_memory=runtime.store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder / "r"),  # Ray makes this readable by all users: `folder` around it is private
                job_config=job_config(),
            )
            require_not_exposed()
            require_private(folder, Path(session_folder()))
            with reaper(folder, children(os.getpid()) - before):
                yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def job_config() -> JobConfig:
    """The job's configuration: Ray's processes search modules in the current directory only if this process does.

    Ray puts it first in their `sys.path`, except for a client job; `_client_job` has no other effect here.
    """
    here = os.getcwd()
    is_searched = here in sys.path or "" in sys.path
    return JobConfig(_client_job=True, _py_driver_sys_path=[here] if is_searched else [])


@contextmanager
def reaper(folder: Path, daemons: set[int]) -> Iterator[None]:
    """Run a process that cleans up after a killed driver, in a session of its own, so that no Ctrl-C reaches it."""
    command = [sys.executable, "-I", "-S", reaper_script.__file__, str(folder), *map(str, daemons)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:  # noqa: S603
        try:
            yield
        finally:
            # A driver that lives shuts Ray down itself.
            process.kill()


def short_temp() -> str:
    """A directory for temporary files with a path short enough for Ray's sockets."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= MAX_TEMP_CHARACTERS else "/tmp"  # noqa: S108  mkdtemp makes a private directory


@contextmanager
def on_loopback(only: bool = True) -> Iterator[None]:
    """Keep Ray on 127.0.0.1, which it replaces by a public address unless its cluster mode is off."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not only
    Config.initialize("")  # Ray reads the environment only when it is imported
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def require_not_exposed() -> None:
    """Refuse a Ray that is not on loopback with a token: the private names of Ray used above may change."""
    address = ray.util.get_node_ip_address()
    has_token = get_authentication_mode() == AuthenticationMode.TOKEN
    if address != LOOPBACK or not has_token:
        raise UsageError(
            f"Ray {ray.__version__} listens on {address}, {'with' if has_token else 'without'} a token",
            "A Ray that qfleet starts is for this machine alone and asks for a token.",
            "Use the version in constraints.txt, or start a cluster yourself and set runtime.address.",
        )


def session_folder() -> str:
    """The directory of Ray's logs and sockets."""
    return str(ray._private.worker._global_node.get_session_dir_path())


def require_private(folder: Path, used: Path) -> None:
    """Refuse a Ray whose logs and sockets other users can reach: they could read them, or replace a socket."""
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not ours or not used.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"Ray {ray.__version__} keeps its files in {used}, which others can reach",
            f"Its logs and sockets must be below {folder}, with mode 0700.",
            "Use the version in constraints.txt, or start a cluster yourself and set runtime.address.",
        )


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for a while; processes started meanwhile keep them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def own_token() -> Path:
    """The file with this user's token, readable by no other user; made when first needed."""
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qfleet" / "ray-token"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        descriptor, name = tempfile.mkstemp(dir=file.parent)  # 0600
        with open(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another run was first
            os.link(name, file)
        os.unlink(name)
    found = file.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StorageError(
            f"{file} is not a file of yours alone",
            "Any user who has this token can run code in your runs.",
            f"Remove it: rm {file}",
        )
    return file


@contextmanager
def joined(runtime: RayRuntime) -> Iterator[None]:
    """Join a running cluster."""
    address = str(runtime.address)
    host, _, port = address.rpartition(":")
    with environment(**token_mode(address, runtime.allow_no_token)):
        try:
            connect(address, host.strip("[]"), int(port))
            yield
        finally:
            ray.shutdown()


def connect(address: str, host: str, port: int) -> None:
    """Connect to the cluster at this address."""
    try:
        # Ray itself would try for minutes, and for a quarter of an hour if a listener never replies.
        socket.create_connection((host, port), timeout=REACH_SECONDS).close()
        only_loopback = is_loopback(address) and not is_reachable(services.get_node_ip_address(), port)
        with environment(**JOINING_VARIABLES), on_loopback(only_loopback):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, job_config=job_config())
    except AuthenticationError as error:
        raise UsageError(
            f"the cluster at runtime.address={address} refused the token",
            f"Ray said: {error.message}",
            "Give the cluster's own token: RAY_AUTH_TOKEN_PATH=FILE",
        ) from error
    except (OSError, RayError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"the Ray cluster at runtime.address={address} cannot be joined",
            f"There is none, or it refused the token. Ray said: {' '.join(str(error).split())[:300]}",
            "Give its token (RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE) and run this on one of its nodes.",
        ) from error


def is_reachable(host: str, port: int) -> bool:
    """Does a TCP connection succeed?"""
    try:
        socket.create_connection((host, port), timeout=REACH_SECONDS).close()
    except OSError:
        return False
    return True


def token_mode(address: str, allow_none: bool) -> dict[str, str]:
    """The variables for authentication: by token if there is one; without only to a cluster on this machine."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return {}
    given = any(os.environ.get(name) for name in TOKEN_VARIABLES) or (Path.home() / ".ray" / "auth_token").exists()
    if given and "RAY_AUTH_MODE" not in os.environ:
        return {"RAY_AUTH_MODE": "token"}
    if allow_none or is_loopback(address):
        return {}
    raise UsageError(
        f"runtime.address={address} is another machine's, and there is no token",
        "Without a token, anyone who can reach the Ray cluster can run code on all of its machines.",
        "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE on all of them, or runtime.allow_no_token=true.",
    )


def is_loopback(address: str) -> bool:
    """Is it an address that other machines cannot reach?"""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
