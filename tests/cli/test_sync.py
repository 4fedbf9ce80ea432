"""`qfleet sync`: the requests it writes, and the exact messages of its errors."""

# Messages stay on one line, as they are shown.

import threading
import time
from pathlib import Path

import pytest

from qfleet.cli import main
from qfleet.plan import make_plan, write_plan
from qfleet.plan.sync_schema import LocalSync, ServerSync
from qfleet.training import requests
from qfleet.watch import write_json

WRONG = {
    "sync x": (
        "no setting is given",
        "Only how learners synchronise (sync.*) and how many there are (learners.num) can be changed.",
    ),
    "sync x algo.n_step=3": (
        "algo.n_step cannot be changed while a run goes on",
        "Only how learners synchronise (sync.*) and how many there are (learners.num) can be changed.",
    ),
    "sync alone sync.type=local": ("runs/alone has one learner", "A single learner does not synchronise."),
    "sync over sync.type=local": ("runs/over is not running", "Only a running run can be changed."),
    "sync pair sync.type=telepathy": (
        "sync.type=telepathy is not valid (command line)",
        "sync.type must be one of solo, allreduce, server, window, local, easgd, admm, gossip.",
    ),
    "sync pair sync.type=server sync.spare=2": (
        "sync.spare=2 (command line) is not below learners.num=2 (runs/pair/run.toml)",
        "A step uses the gradients of all but the spare learners, so at least one must remain.",
    ),
    "sync ranks learners.num=3": (
        "learners.num=3 is not possible: the run has 2",
        "MPI starts processes only once, and a stopped one is not started again.",
    ),
}


def make_run(name: str, learners: int, state: str = "running", **more: str) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    asked = {f"learners.{name}": value for name, value in more.items()}
    write_plan(make_plan("CartPole-v1", overrides={"learners.num": learners, **asked}), folder / "run.toml")
    write_json(folder / "status.json", {"state": state})
    return folder


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qfleet.watch.run_listing.is_locked", lambda path: True)  # as if processes wrote to them
    make_run("pair", 2)
    make_run("alone", 1)
    make_run("ranks", 2, backend="mpi")
    make_run("over", 2, "done")


@pytest.mark.parametrize("command", WRONG)
def test_wrong_use(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    what, why = WRONG[command]
    output = capsys.readouterr().err.splitlines()
    assert output[0] == f"error: {what}"
    assert output[1] == f"  why: {why}"
    assert output[2].startswith("   do: ")
    assert not any(requests.is_pending(folder) for folder in Path("runs").iterdir())


def test_a_running_run_receives_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    received: list[requests.SyncRequest | None] = []

    def listen() -> None:
        until = time.monotonic() + 20
        while not received and time.monotonic() < until:
            if (request := requests.take_request(Path("runs/pair"))) is not None:
                received.append(request)
                requests.finish_request(Path("runs/pair"))
            time.sleep(0.05)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert main(["sync", "pair", "sync.type=server", "sync.max_staleness=4", "learners.num=3"]) == 0
    thread.join(20)
    assert received == [requests.SyncRequest(ServerSync(max_staleness=4), 3)]
    assert capsys.readouterr().out == (
        "runs/pair: 3 learners agree by server from now on (before: 2 learners agree by allreduce)\n"
    )


def test_a_request_builds_on_the_current_sync_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(
        Path("runs/pair/status.json"),
        {"state": "running", "together": {"sync": {"type": "local", "every_updates": 4}, "learners": 3}},
    )
    monkeypatch.setattr("qfleet.cli.sync.await_applied", lambda folder: None)
    assert main(["sync", "pair", "sync.outer_rate=0.7"]) == 0
    assert requests.take_request(Path("runs/pair")) == requests.SyncRequest(
        LocalSync(every_updates=4, outer_rate=0.7), 3
    )


def test_waiting_for_a_run_is_limited(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("qfleet.cli.sync.APPLY_TIMEOUT_SECONDS", 0.3)
    assert main(["sync", "pair", "sync.type=local"]) == 2
    assert "has not answered within 0.3 seconds" in capsys.readouterr().err
