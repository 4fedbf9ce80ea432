"""Supervised work: environments that hang, crash, leave, flood or start processes; each in a process of its own."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qfleet.system.descendants import descendants
from qfleet.watch.run_listing import run_state
from tests.cli.test_env_faults import write_env

ROOT = Path(__file__).parents[2]
# Work without torch and without an environment: what it does comes from the test.
SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from qfleet import heartbeat
from qfleet.system.descendants import descendants
from qfleet.training.process import hang_watch, supervise
hang_watch.GRACE_SECONDS = 0.5
{before}
def asked(number, frame):
    print("saving...", flush=True)
    heard.append(number)
heard = []
def work():
    heartbeat.update_run_info(env="Toy", step_seconds={limit})
    {work}
    return 0
sys.exit(supervise.run_supervised(work))
"""
IN = "os.write(1, b'%d\\n' % os.getpid()); "  # what it does in a moment can be disturbed from here on
HANG = "heartbeat.enter_env_call(heartbeat.STEP, 3); "
HEED = "signal.signal(signal.SIGTERM, asked); signal.signal(signal.SIGINT, asked); "
GIL_HELD = "sum(range(10**12))"  # no other Python code runs meanwhile, signal handlers neither


def start(
    work: str, limit: float = 60.0, before: str = "", first: str = "", stdin: int | None = None
) -> "subprocess.Popen[str]":
    """Work under a supervisor; a shell may do something first."""
    command = [sys.executable, "-c", SCRIPT.format(work=work, limit=limit, before=before)]
    command = ["sh", "-c", f'{first} exec "$@"', "sh", *command] if first else command
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=pipe, stderr=pipe, text=True)


def begun(process: "subprocess.Popen[str]") -> int:
    """The process that does the work, once it has come to `IN`."""
    assert process.stderr is not None
    return int(process.stderr.readline())


def run(work: str, limit: float = 60.0, before: str = "") -> tuple[int, str, str]:
    process = start(work, limit, before)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_finished_work_has_its_own_exit_code() -> None:
    assert run("print('fine')") == (0, "fine\n", "")
    assert run("print('fine'); return 75")[:2] == (75, "fine\n")


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (HANG + "os._exit(0)", 4, "error: Toy, lane 3: step() ended the process with exit code 0 (os._exit)"),
        (HANG + "os._exit(7)", 4, "error: Toy, lane 3: step() ended the process with exit code 7 (os._exit)"),
        ("os._exit(0)", 4, "error: Toy ended the process with exit code 0 (os._exit)"),
        ("ctypes.CDLL(None).exit(0)", 4, "error: Toy ended the process with exit code 0"),
        ("heartbeat.exit_at_once(143)", 143, ""),
        (HANG + "ctypes.string_at(0)", 4, "error: Toy, lane 3: step() crashed the process (SIGSEGV)"),
        ("ctypes.string_at(0)", 139, "the process was ended by SIGSEGV"),
        ("import atexit; atexit.register(os._exit, 0); return 4", 4, ""),
    ],
)
def test_only_finished_work_succeeds(work: str, code: int, said: str) -> None:
    found, _, err = run(work)
    assert found == code
    assert said in err


@pytest.mark.parametrize("hang", ["time.sleep(60)", GIL_HELD])
def test_a_hanging_call_is_reported_and_ended_in_time(hang: str) -> None:
    begin = time.monotonic()
    code, _, err = run(HANG + hang, limit=0.3)
    assert code == 4
    assert time.monotonic() - begin < 10
    assert "warning: Toy, lane 3: step() has not returned for 0 s; the run ends after 1 s" in err
    assert "error: Toy, lane 3: step() has not returned for 1 s" in err
    assert err.count("at: <string>") == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("hang", ["time.sleep(60)", GIL_HELD])
def test_a_signal_is_obeyed_although_a_call_hangs(hang: str, number: signal.Signals, code: int) -> None:
    process = start(HEED + HANG + "os.write(1, b'in\\n'); " + hang)
    assert process.stderr is not None
    assert process.stderr.readline() == "in\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert f"stopped by {number.name}; Toy, lane 3: step() did not return" in err


def test_a_second_signal_ends_what_holds_the_interpreter_at_once() -> None:
    process = start(HEED + "os.write(1, b'in\\n'); " + GIL_HELD)
    assert process.stderr is not None
    assert process.stderr.readline() == "in\n"
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    process.communicate(timeout=5)
    assert process.returncode == 143


def test_work_that_saves_after_a_signal_takes_its_time() -> None:
    process = start(HEED + "os.write(1, b'in\\n'); time.sleep(0.1)\n    while not heard: time.sleep(0.1)\n"
                    "    time.sleep(1.5); return 143")  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "in\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (143, "saving...\n")


NOTED = (
    "note = lambda *_: heard.append(heartbeat.num_stop_requests()); "
    "signal.signal(signal.SIGTERM, note); signal.signal(signal.SIGHUP, note); "
)
WAIT = "until = time.time() + {seconds}\n    while time.time() < until and 2 not in heard: time.sleep(0.1)\n    "


@pytest.mark.parametrize(("rounds", "most"), [(1, 1), (2, 2)])
def test_a_signal_to_all_processes_is_one_request(rounds: int, most: int) -> None:
    process = start(NOTED + IN + WAIT.format(seconds=1.2) + "print(heard); return 143")
    worker = begun(process)
    for _ in range(rounds):
        os.kill(worker, signal.SIGTERM)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 143
    assert max(json.loads(out)) == most


def test_two_signals_at_once_are_one_request() -> None:
    process = start(NOTED + IN + WAIT.format(seconds=0.8) + "print(heard); return 143")
    begun(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (143, "[1]\n")


def test_slow_calls_that_are_healthy_are_waited_for_after_a_signal() -> None:
    slow = "heartbeat.enter_env_call(0); time.sleep(1.0); heartbeat.leave_env_call(); heartbeat.enter_env_call(0); "
    process = start(HEED + slow + IN + WAIT.format(seconds=1.5) + "heartbeat.leave_env_call(); return 143")
    begun(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (143, "saving...\n")


def test_adopted_processes_that_have_ended_do_not_stay_as_zombies() -> None:
    orphans = "os.system('for i in 1 2 3 4 5; do (setsid sleep 0.05 &); done'); time.sleep(0.6); "
    count = "print(sum(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] == 'Z'"
    code, out, _ = run(orphans + count + " for pid in descendants(os.getppid())))")
    assert (code, out) == (0, "0\n")


def test_killed_work_is_reported_and_its_run_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "exit_code": None, "pid": 1}))
    code, _, err = run(f"heartbeat.update_run_info(folder={str(tmp_path)!r}); os.kill(os.getpid(), 9)")
    assert (code, err.splitlines()[0]) == (137, "error: killed by SIGKILL")
    status = json.loads((tmp_path / "status.json").read_text())
    assert status == {"state": "running", "exit_code": None, "pid": 1, "reason": "killed by SIGKILL"}
    assert run_state(tmp_path) == "killed"


def test_work_killed_for_lack_of_memory_is_reported() -> None:
    counter = "from qfleet.system import oom\ncounts = iter([3, 4])\noom.oom_kills = lambda: next(counts)"
    code, _, err = run("os.kill(os.getpid(), 9)", before=counter)
    assert code == 137
    assert "error: killed by SIGKILL, by the kernel, for lack of memory" in err


def test_what_a_shell_has_started_before_is_left_alone() -> None:
    mark = f"8{os.getpid()}{time.monotonic_ns()}"
    process = start("subprocess.Popen(['sleep', '60'])", first=f"setsid sleep {mark} >/dev/null 2>&1 &")
    process.communicate(timeout=10)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(path)]
    for path in left:
        os.kill(int(path.parent.name), signal.SIGKILL)
    assert process.returncode == 0
    assert len(left) == 1


def state_of(pid: int) -> str:
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[0]


def test_ctrl_z_stops_all_processes_and_a_call_that_was_stopped_does_not_hang() -> None:
    began = "subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(0.1); "
    process = start(began + HANG + IN + "time.sleep(0.3); heartbeat.leave_env_call()", limit=0.4)
    begun(process)
    process.send_signal(signal.SIGTSTP)
    time.sleep(2)
    family = [process.pid, *descendants(process.pid)]
    assert [state_of(pid) for pid in family] == ["T", "T", "T"]
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


def test_a_call_stopped_by_another_process_hangs() -> None:
    code, _, err = run(HANG + "os.kill(os.getpid(), signal.SIGSTOP)", limit=0.3)
    assert code == 4
    assert "step() has not returned for 0 s (it is stopped, not by Ctrl-Z here" in err


def test_an_environment_that_reads_the_keyboard_finds_nothing() -> None:
    leader, follower = pty.openpty()
    try:
        process = start("try: input()\n    except EOFError: print('nothing')", stdin=follower)
        assert process.communicate(timeout=10)[0] == "nothing\n"
    finally:
        process.kill()
        os.close(leader)
        os.close(follower)


def test_what_is_no_terminal_can_be_read() -> None:
    process = start("print(input())", stdin=subprocess.PIPE)
    assert process.communicate("words\n", timeout=10)[0] == "words\n"


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "said"
    work = f"print('words'); os.write(2, b'more'); open({str(file)!r}, 'w').write('done'); return 75"
    process = start(work, first=f"exec {closed};")
    process.communicate(timeout=10)
    assert (process.returncode, file.read_text()) == (75, "done")


def test_no_folder_for_temporary_files_is_needed() -> None:
    nowhere = "import tempfile\ntempfile.TemporaryFile = None"
    assert run("print('fine')", before=nowhere) == (0, "fine\n", "")


def test_unbuffered_output_appears_at_once() -> None:
    process = start("print('words', end=''); time.sleep(60)", first="export PYTHONUNBUFFERED=1;")
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 10)[0]
        assert os.read(process.stdout.fileno(), 99) == b"words"
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("name", "said"), [("step_000000000200", "its last checkpoint is whole"), (".tmp-1", "nothing was saved yet")]
)
def test_the_report_names_the_state_of_the_run_folder(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    _, _, err = run(f"heartbeat.update_run_info(folder={str(tmp_path)!r}); {HANG}os._exit(0)")
    assert f"  run: {tmp_path} ({said})" in err
    assert json.loads((tmp_path / "status.json").read_text())["exit_code"] == 4


def test_a_removed_folder_does_not_hide_how_a_run_ended(tmp_path: Path) -> None:
    code, _, err = run(f"heartbeat.update_run_info(folder={str(tmp_path / 'gone')!r}); {HANG}os._exit(0)")
    assert code == 4
    assert "nothing was saved yet" in err
    assert "Traceback" not in err


def test_what_an_environment_prints_is_bounded_and_not_mixed_with_ours() -> None:
    flood = "heartbeat.enter_env_call(0)\n    for _ in range(100): print('x' * 99_999)\n    os.system('seq 1000000')"
    code, out, err = run(flood + "\n    heartbeat.leave_env_call(); print('ours')")
    assert (code, out) == (0, "ours\n")
    assert 1_000_000 <= len(err) < 1_000_500
    assert "what it prints now is dropped" in err


@pytest.mark.parametrize("end", ["", "os._exit(0)", "ctypes.string_at(0)", "time.sleep(60)"])
def test_nothing_that_an_environment_has_started_is_left(end: str) -> None:
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    began = (
        f"subprocess.Popen(['sleep', '9{mark}']); "
        f"subprocess.Popen(['sh', '-c', 'setsid sleep 9{mark} & setsid sleep 9{mark} &'], start_new_session=True); "
        "time.sleep(0.2); heartbeat.enter_env_call(0); "
    )
    run(began + end + "; heartbeat.leave_env_call()" if end else began + "heartbeat.leave_env_call()", limit=0.3)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if f"9{mark}" in _text(path)]
    assert not left


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_the_work_ends_with_its_supervisor() -> None:
    process = start("os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)")
    assert process.stderr is not None
    worker = int(process.stderr.readline())
    assert worker in descendants(process.pid)
    process.kill()
    process.communicate(timeout=10)
    limit = time.monotonic() + 5
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < limit:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{worker}")


def qfleet(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of its own, as a user starts it."""
    command = [sys.executable, "-m", "qfleet", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90, check=False)


def test_env_check_survives_an_environment_that_leaves(tmp_path: Path) -> None:
    done = qfleet(tmp_path, "env", "check", write_env(tmp_path, "import os; os._exit(0)"))
    assert done.returncode == 4
    assert "step() ended the process with exit code 0 (os._exit)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--seeds", "2"]])
def test_a_run_is_saved_when_all_processes_get_the_signal(kind: list[str], tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", *kind, "--steps", "1000000", "eval.episodes=0", "until.score=none"]
    command = [sys.executable, "-m", "qfleet", *words, "save.every_steps=900000", "log.every_steps=200"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        limit = time.monotonic() + 60
        num = 2 if "--seeds" in kind else 1
        while len(list(tmp_path.rglob("metrics.jsonl"))) < num and time.monotonic() < limit:
            time.sleep(0.1)
        time.sleep(1)
        ours = [
            pid for pid in (process.pid, *descendants(process.pid)) if "qfleet" in _text(Path(f"/proc/{pid}/cmdline"))
        ]
        for pid in ours:
            os.kill(pid, signal.SIGTERM)
        assert process.wait(60) == 143
    found = [json.loads(path.read_text()) for path in tmp_path.rglob("status.json")]
    assert [(status["state"], status["exit_code"]) for status in found] == [("preempted", 143)] * num
    assert len(list(tmp_path.rglob("checkpoints/step_*"))) >= num


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [[], ["--seeds", "2"]])
def test_a_run_whose_environment_leaves_is_not_done(seeds: list[str], tmp_path: Path) -> None:
    from qfleet.watch import read_json

    name = write_env(tmp_path, "import os; os._exit(0)")
    done = qfleet(tmp_path, "train", name, *seeds, "--steps", "400", "env.num=2", "eval.episodes=0")
    assert done.returncode == 4
    (run,) = (tmp_path / "runs").iterdir()
    status = read_json(run / ("group.json" if seeds else "status.json"))
    assert (status["state"], status["exit_code"]) == ("failed", 4)


@pytest.mark.slow
def test_a_run_whose_environment_leaves_an_actor_is_not_done(tmp_path: Path) -> None:
    name = write_env(tmp_path, "import os; os._exit(0)")
    settings = ["runtime.type=processes", "runtime.inference=local", "runtime.restarts=1", "eval.episodes=0"]
    done = qfleet(tmp_path, "train", name, "--steps", "4000", "env.num=2", *settings)
    assert done.returncode == 4
