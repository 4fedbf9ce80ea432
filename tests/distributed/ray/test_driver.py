"""Runs on a real Ray: same updates as inline, replaced actors, loopback only, and no process left."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qfleet import Callback, Run, RunView
from qfleet.api import rehearse
from qfleet.audit.checks import check_history
from qfleet.errors import UsageError
from qfleet.watch import read_json, read_rows
from tests.support.runs import (
    Settings,
    checkpoints,
    events,
    resumed,
    slow_to_close,
    small,
    status,
    train_arguments,
    trained,
)

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]
RAY: Settings = {"runtime.type": "ray", "actors.num": 2, "runtime.chunk_rows": 4, "runtime.hung_seconds": 20}
# Not compiled: the compiler leaves files in a directory that a test checks.
LONG: Settings = {
    "until.steps": 10_000_000,
    "log.every_steps": 500,
    "log.history": True,
    "save.every_steps": 20_000,
    "runtime.compile": False,
}
REPLAY: Settings = {"runtime.replay_process": True, "runtime.replay_cpus": 0.5}
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(autouse=True)
def _ray_is_there() -> None:
    pytest.importorskip("ray")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment variables of a command, with caches and temporary files in a directory of their own."""
    temp = Path("/tmp") / f"t{os.getpid()}"  # noqa: S108  sockets need short paths
    temp.mkdir(exist_ok=True)
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(temp)}
    yield {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    shutil.rmtree(temp)


@pytest.fixture
def begin(home: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `qfleet train`, and leaves none running."""
    begun: list[subprocess.Popen[str]] = []

    def start(
        changes: Settings, env_id: str = "CartPole-v1", out: Path = tmp_path, **more: str
    ) -> subprocess.Popen[str]:
        arguments = [*train_arguments(out, changes, env_id), "--name", f"run{len(begun)}"]
        command = [sys.executable, "-m", "qfleet", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun.append(subprocess.Popen(command, env={**home, **more}, cwd=tmp_path, text=True, **pipes))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate(timeout=30)


def wait_for(ready: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Poll until the result is true; returns it."""
    limit = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < limit, "it did not come in time"
        time.sleep(0.1)
    return found


def family(pid: int) -> dict[int, str]:
    """A process's descendants and their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found, more = set[int](), {pid}
    while more:
        found, more = found | more, {child for child, parent in parents.items() if parent in more}
    return {child: line for child in found - {pid} if (line := command_line(child))}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def acting(pid: int) -> list[int]:
    return sorted(child for child, line in family(pid).items() if "ray::ActorHost.run" in line)


def replays(pid: int) -> list[int]:
    return sorted(child for child, line in family(pid).items() if "ray::ReplayHost" in line)


def homes_of(pid: int) -> dict[str, int]:
    """The node processes that have started the trainer's and the replay's process."""
    found = {}
    for child, line in family(pid).items():
        for role in ("TrainerHost", "ReplayHost"):
            if f"ray::{role}" in line:
                found[role] = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def alive(pids: set[int]) -> dict[int, str]:
    return {pid: line for pid in pids if (line := command_line(pid))}


def steps(run: Path) -> int:
    rows = read_rows(run / "metrics.jsonl")
    return int(rows[-1]["env_steps"]) if rows else 0


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=150)
    assert process.returncode == code, out + err
    return out, err


def updates_due(run: Path) -> int:
    """The updates of an inline run with as many steps: 5 samples per insert in batches of 16, after 40 steps."""
    return 5 * (status(run)["env_steps"] - 40) // 16


def test_as_many_updates_as_inline(begin: Any, tmp_path: Path, reference: Any) -> None:
    process = begin({**RAY, "log.history": True, "eval.episodes": 2, "eval.test_episodes": 2})
    seen = wait_for(lambda: acting(process.pid) and set(family(process.pid)))
    ended(process)
    run, inline = tmp_path / "run0", reference()
    assert status(run)["updates"] == updates_due(run) > 0
    assert status(run)["env_steps"] - inline.status["env_steps"] in range(-1, 3)
    assert inline.status["updates"] == 5 * (inline.status["env_steps"] - 40) // 16
    assert status(run)["score"]["episodes"] == 2
    assert check_history(run / "history") == []
    assert not alive(seen)


def test_a_replay_on_ray_allows_as_many_updates_and_is_resumed(begin: Any, tmp_path: Path) -> None:
    learns: Settings = {"replay.sampler.type": "prioritized", "until.steps": 2_000, "log.history": True}
    process = begin({**RAY, **REPLAY, **learns})
    [host] = wait_for(lambda: replays(process.pid))
    seen = set(family(process.pid))
    ended(process)
    run = tmp_path / "run0"
    assert host in seen
    assert status(run)["updates"] == updates_due(run) > 500
    assert list(checkpoints(run)[-1].glob("replay/rows_*"))
    assert not events(run, "replay_lost")
    check_noted(run)
    wait_for(lambda: not alive(seen), 10)
    check_resumes(run)
    check_noted(run)


def check_noted(run: Path) -> None:
    """The replay's process has recorded its operations, and the history is sound."""
    noted = (run / "history" / "replay.jsonl").read_text()
    assert noted.count('"stored"') > 100
    assert noted.count('"drawn"') > 500
    assert check_history(run / "history") == []


def test_a_replay_that_is_killed_or_stops_on_ray_is_replaced(begin: Any, tmp_path: Path) -> None:
    often = {"save.every_steps": 500, "save.max_share": 1, "runtime.hung_seconds": 4}
    process = begin({**RAY, **REPLAY, **LONG, **often})
    run = tmp_path / "run0"
    for number, how in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        begun = steps(run)
        wait_for(lambda begun=begun: steps(run) > begun + 1_000)
        [victim] = replays(process.pid)
        os.kill(victim, how)
        lost = wait_for(lambda number=number: len(found := events(run, "replay_lost")) == number and found)
        assert lost[-1]["steps_lost"] >= 0
        wait_for(lambda victim=victim: set(replays(process.pid)) - {victim})
    begun = steps(run)
    wait_for(lambda: steps(run) > begun + 1_000)
    process.send_signal(signal.SIGINT)
    out, err = ended(process, 130)
    assert "Traceback" not in out + err
    assert "is lost" in lost[0]["cause"]
    assert "did not answer for 4 s" in lost[1]["cause"]
    assert status(run)["updates"] == updates_due(run)
    assert check_history(run / "history") == []


def test_rehearse_starts_no_replay() -> None:
    import ray

    plan = small({**RAY, **REPLAY, "algo.anneal.type": "exponential"})
    assert rehearse(plan)["replay_bytes"] > 0
    assert not ray.is_initialized()


def test_environments_on_ray_are_closed(begin: Any, tmp_path: Path) -> None:
    env_id, unclosed = slow_to_close(tmp_path)
    ended(begin({**RAY, "until.steps": 200}, env_id))
    assert unclosed() == set()


def test_two_learners_on_ray_make_as_many_updates_as_one(begin: Any, tmp_path: Path) -> None:
    halves = {"runtime.learner_cpus": 0.5, "runtime.actor_cpus": 0.5}
    process = begin({**RAY, **halves, "learners.num": 2, "sync.type": "server", "sync.shards": 2})
    seen = wait_for(lambda: acting(process.pid) and set(family(process.pid)))
    ended(process)
    run = tmp_path / "run0"
    assert status(run)["updates"] == updates_due(run) > 0
    assert [row["learners"] for row in events(run, "group_formed")] == [2]
    assert status(run)["together"]["sync"]["shards"] == 2
    wait_for(lambda: not alive(seen), 10)


def test_actor_learners_on_ray_train_and_are_resumed(begin: Any, home: dict[str, str], tmp_path: Path) -> None:
    bundles: Settings = {"runtime.type": "ray", "learners.num": 2, "learners.bundles": True, "until.steps": 400}
    process = begin({**bundles, "runtime.learner_cpus": 0.5, "log.history": True})
    seen = wait_for(lambda: set(family(process.pid)))
    ended(process)
    run = tmp_path / "run0"
    assert status(run)["env_steps"] >= 400
    # Each makes half of the steps, with half a batch, after half of the steps before learning.
    assert abs(status(run)["updates"] - 5 * (status(run)["env_steps"] // 2 - 20) // 8) <= 2
    assert [row["learners"] for row in events(run, "group_formed")] == [2]
    assert check_history(run / "history") == []
    assert list(checkpoints(run)[-1].glob("bundles/1-*/replay/rows_*"))
    wait_for(lambda: not alive(seen), 10)
    again = subprocess.run(
        [sys.executable, "-m", "qfleet", "resume", str(run), "--steps", "600", "--json"],
        env=home,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert status(run)["env_steps"] >= 600
    assert not events(run, "bundle_inexact")


def test_a_run_on_two_nodes_survives_the_loss_of_one(begin: Any, home: dict[str, str], tmp_path: Path) -> None:
    with cluster_of_two(home, tmp_path) as (cluster, address):
        refused = begin({**RAY, "runtime.address": address}, RAY_AUTH_TOKEN="b" * 40)
        first = begin({**RAY, "runtime.address": address, "learners.num": 2, "runtime.learner_cpus": 0.5})
        ended(first)
        assert [row["learners"] for row in events(tmp_path / "run1", "group_formed")] == [2]
        assert status(tmp_path / "run1")["updates"] == updates_due(tmp_path / "run1") > 0
        assert "refused the token" in ended(refused, 2)[1]
        # The learner fills the first node, so that the replay is on the second.
        full = {"runtime.learner_cpus": 2, "runtime.actor_cpus": 0.5, "until.steps": 2_000}
        apart = begin({**RAY, **REPLAY, **full, "runtime.address": address})
        homes = wait_for(lambda: len(found := homes_of(cluster.pid)) == 2 and found)
        ended(apart)
        assert homes["TrainerHost"] != homes["ReplayHost"]
        assert status(tmp_path / "run2")["updates"] == updates_due(tmp_path / "run2") > 500
        second = begin({**RAY, **LONG, "runtime.address": address, "runtime.actor_cpus": 0.5})
        run = tmp_path / "run3"
        wait_for(lambda: steps(run) > 1_000)
        tell(cluster, "remove", "removed")
        lost = wait_for(lambda: events(run, "actor_lost"))
        begun = steps(run)
        wait_for(lambda: steps(run) > begun + 5_000)
        second.send_signal(signal.SIGTERM)
        ended(second, 143)
        assert {event["incarnation"] for event in lost} == {0}
        assert check_history(run / "history") == []


def test_actors_wait_for_nodes_and_begin_when_one_joins(begin: Any, home: dict[str, str], tmp_path: Path) -> None:
    """The cluster has room for three of the six actors: the run begins with them, and no budget is used up."""
    with cluster_of_two(home, tmp_path) as (cluster, address):
        six = {**RAY, **LONG, "actors.num": 6, "env.num": 6, "runtime.hung_seconds": 5, "runtime.restarts": 1}
        process = begin({**six, "runtime.address": address})
        run = tmp_path / "run0"
        wait_for(lambda: steps(run) > 1_000)
        waiting = wait_for(lambda: len(found := events(run, "actor_waiting")) == 3 and found)
        assert len(acting(cluster.pid)) == 3
        assert read_rows(run / "metrics.jsonl")[-1]["actors"] == "3/6"
        tell(cluster, "add", "added")
        wait_for(lambda: len(acting(cluster.pid)) == 5)
        process.send_signal(signal.SIGTERM)
        ended(process, 143)
        assert len({event["worker"] for event in waiting}) == 3
        assert events(run, "actor_lost") == []
        warned = [event["text"] for event in events(run, "warning")]
        assert len([text for text in warned if "waits for a node with free CPUs" in text]) == 3
        assert check_history(run / "history") == []


def test_a_node_with_other_code_takes_no_part(begin: Any, home: dict[str, str], tmp_path: Path) -> None:
    """One node has a qfleet with another line, another has none: both are named, and nothing is learned from them."""
    changed, none = tmp_path / "changed", tmp_path / "none"
    shutil.copytree(ROOT / "qfleet", changed / "qfleet", ignore=shutil.ignore_patterns("__pycache__"))
    with open(changed / "qfleet" / "envs" / "cartpole.py", "a") as file:
        file.write("GRAVITY = 1.6\n")
    (none / "qfleet").mkdir(parents=True)
    (none / "qfleet" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'qfleet'\")\n")
    with cluster_of_two(home, tmp_path) as (cluster, address):
        tell(cluster, "remove", "removed")
        tell(cluster, f"add {changed}", "added")
        tell(cluster, f"add {none}", "added")
        # One actor fits beside the learner; the others are given to the other nodes.
        plan = {**RAY, **LONG, "actors.num": 4, "env.num": 4, "runtime.restarts": 1, "log.history": False}
        process = begin({**plan, "runtime.address": address})
        run = tmp_path / "run0"
        lost = wait_for(lambda: len(found := events(run, "actor_lost")) >= 4 and found)
        texts = {event["words"] for event in events(run, "actor_lost")}
        assert {event["steps_rescued"] for event in lost} == {0}
        assert any("it has other versions than the learner's node: qfleet code" in text for text in texts)
        assert any("No module named 'qfleet'" in text for text in texts)
        assert all("on node " in text for text in texts)
        process.send_signal(signal.SIGTERM)
        ended(process, 143)


@contextmanager
def cluster_of_two(home: dict[str, str], folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A cluster of two nodes with a token, and its address."""
    token = folder / "token"
    token.write_text("a" * 40)
    token.chmod(0o600)
    home |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    script = [sys.executable, str(ROOT / "tests/support/ray_cluster.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(script, env=home, stdin=pipe, stdout=pipe, text=True) as cluster:
        assert cluster.stdin
        assert cluster.stdout
        try:
            yield cluster, cluster.stdout.readline().strip()
        finally:
            print("end", file=cluster.stdin, flush=True)
            cluster.wait(timeout=60)


def tell(cluster: subprocess.Popen[str], word: str, reply: str) -> None:
    """Tell the cluster to do something, and wait for its word that it is done."""
    assert cluster.stdin
    assert cluster.stdout
    print(word, file=cluster.stdin, flush=True)
    assert cluster.stdout.readline().strip() == reply


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only")
def test_a_full_disk_ends_the_run_with_exit_code_5(begin: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        process = begin({**RAY, **LONG, "log.every_steps": 10}, out=disk)
        out, err = ended(process, 5)
        assert "Traceback" not in out + err
        assert "bug in qfleet" not in out + err
        assert "space" in err
        assert status(disk / "run0")["state"] == "failed"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_killed_actor_is_replaced_and_ctrl_c_saves(begin: Any, tmp_path: Path) -> None:
    process = begin({**RAY, **LONG})
    run = tmp_path / "run0"
    wait_for(lambda: steps(run) > 1_000)
    victims = wait_for(lambda: len(found := acting(process.pid)) == 2 and found)
    everyone = set(family(process.pid))
    os.kill(victims[0], signal.SIGKILL)
    lost = wait_for(lambda: events(run, "actor_lost"), 10)
    begun = steps(run)
    wait_for(lambda: len(set(acting(process.pid)) - set(victims)) == 1)
    wait_for(lambda: steps(run) > begun + 5_000)
    process.send_signal(signal.SIGINT)
    out, err = ended(process, 130)
    assert "Traceback" not in out + err
    assert lost[0]["cause"] == "dead"
    assert check_history(run / "history") == []
    assert status(run)["state"] == "interrupted"
    assert status(run)["updates"] == updates_due(run)
    wait_for(lambda: not alive(everyone), 10)
    check_resumes(run)


def check_resumes(run: Path) -> None:
    """Resume on Ray from another process."""
    before = status(run)["env_steps"]
    again = resumed(run, steps=before + 200)
    assert isinstance(again, Run)
    assert (again.exit_code, again.status["updates"]) == (0, updates_due(run))
    assert again.status["env_steps"] >= before + 200
    assert check_history(run / "history") == []


def listeners(pids: set[int]) -> dict[str, str]:
    """Addresses that these processes listen on, and one that does."""
    owners: dict[str, str] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:"):
                owners[target[8:-1]] = command_line(pid)
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1].partition(":")[0]: owners[line[9]] for line in lines if line[3] == "0A" and line[9] in owners}


def test_ray_listens_on_loopback_only_and_a_killed_driver_leaves_nothing(
    begin: Any, home: dict[str, str], tmp_path: Path
) -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: S108
    process = begin({**RAY, **LONG})
    wait_for(lambda: steps(tmp_path / "run0") > 1_000)
    everyone = family(process.pid)
    assert any("raylet" in line for line in everyone.values())
    addresses = listeners({process.pid, *everyone})
    assert addresses
    assert not addresses.keys() - LOOPBACK, addresses
    (folder,) = Path(home["TMPDIR"]).glob("qf-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.glob("r/session_*/sockets/*"))
    token = tmp_path / "cache" / "qfleet" / "ray-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert not [line for line in everyone.values() if token.read_text() in line]
    process.kill()
    wait_for(lambda: not alive(set(everyone)), 10)
    wait_for(lambda: not list(Path(home["TMPDIR"]).iterdir()), 10)
    assert set(os.listdir("/dev/shm")) <= before  # noqa: S108
    assert read_json(tmp_path / "run0" / "status.json")["state"] == "running"


class Sent(Callback):
    """Runs in the trainer's process, and leaves a file there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0

    def on_step(self, run: RunView) -> None:
        self.steps += run.new_steps
        run.log("steps", self.steps)
        if run.env_steps > 150:
            run.change("optim.learning_rate", 1e-5)

    def on_end(self, run: RunView) -> None:
        (self.folder / "ended").write_text(f"{os.getpid()} {self.steps} {run.ending and run.ending.state}")


def test_callback_objects_run_where_the_run_trains_and_functions_here(tmp_path: Path) -> None:
    seen: list[int] = []
    callback = Sent(tmp_path)
    functions = [lambda row: seen.append(os.getpid())]
    run = trained(small(RAY), tmp_path / "runs", callbacks=[callback, *functions])
    pid, steps, state = (tmp_path / "ended").read_text().split()
    assert (int(pid) != os.getpid(), int(steps), state) == (True, run.status["env_steps"], "done")
    assert set(seen) == {os.getpid()}
    assert callback.steps == 0
    progress = [row for row in run.metrics if row["kind"] == "progress"]
    assert progress[-1]["learning_rate"] == 1e-5
    assert progress[-1]["callback.steps"] <= run.status["env_steps"]


def test_a_callback_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    callback = Sent(tmp_path)
    callback.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="cannot be given to another process"):
        trained(small(RAY), tmp_path / "runs", callbacks=[callback])
