"""Histories are written so that a kill leaves no hole, and the audit finds every kind of broken promise in them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfleet.audit.checks import check_history, check_records
from qfleet.audit.history import FLUSH_LINES, OPERATIONS, History, NoHistory, Record
from qfleet.audit.records import read_history

OPENED = {
    "ratio": "1/2",
    "start_steps": 4,
    "band": 4,
    "ahead": 0,
    "capacity": 10,
    "env_steps": 0,
    "updates": 0,
    "tail": 0,
    "head": 0,
}
SUPERVISING = {
    "restarts": 1,
    "window_seconds": 600.0,
    "hung_seconds": 10.0,
    "start_seconds": 20.0,
    "replace_seconds": 5.0,
}


class Story:
    """A run of one worker that keeps all promises; each test spoils it in one place."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.now = 0.0
        self.steps = self.updates = self.tail = self.head = 0
        self.learner("opened", **OPENED)
        self.learner("published", version=1)
        self.supervisor("supervising", **SUPERVISING)

    def note(self, role: str, op: str, **fields: Any) -> None:
        assert set(OPERATIONS[role][op].split()) <= fields.keys(), op
        self.records.append({"role": role, "op": op, "at": self.now, **fields})

    def learner(self, op: str, **fields: Any) -> None:
        self.note("learner", op, **fields)

    def actor(self, op: str, **fields: Any) -> None:
        self.note("actor", op, **fields)

    def supervisor(self, op: str, **fields: Any) -> None:
        self.note("supervisor", op, **fields)

    def begin(self, worker: int, incarnation: int) -> None:
        self.learner("began", worker=worker, incarnation=incarnation)
        self.supervisor("started", worker=worker, incarnation=incarnation)

    def send(self, *source: int, steps: int = 4) -> None:
        self.actor("sent", source=source, steps=steps)

    def accept(self, *source: int, steps: int = 4, **changed: Any) -> None:
        self.steps += steps
        self.head += steps
        self.tail = max(0, self.head - 10)
        told = {"steps": steps, "env_steps": self.steps, "tail": self.tail, "head": self.head, **changed}
        self.learner("accepted", source=source, **told)

    def deliver(self, *source: int, steps: int = 4) -> None:
        self.send(*source, steps=steps)
        self.accept(*source, steps=steps)

    def update(self, times: int = 1) -> None:
        for _ in range(times):
            self.updates += 1
            self.learner("sampled", ids=[self.head - 1, self.tail])
            self.learner("update", number=self.updates, env_steps=self.steps, forgiven=0)
            self.learner("published", version=self.updates + 1)

    def lose(self, worker: int, incarnation: int, kind: str = "dead") -> None:
        self.learner("dismissed", worker=worker)
        self.learner("sealed", worker=worker, tail=self.tail, head=self.head)
        self.supervisor(kind, worker=worker, incarnation=incarnation)

    def commit(self) -> None:
        self.learner("committed", env_steps=self.steps, updates=self.updates)

    def close(self, **changed: Any) -> None:
        told = {"env_steps": self.steps, "updates": self.updates, "forgiven": 0, "done": True, **changed}
        self.learner("closed", **told)

    def rules(self) -> set[str]:
        return {violation.rule for violation in check_records(self.records)}


def good() -> Story:
    """Two rollouts, a death, a replacement, a duplicate, a late one."""
    story = Story()
    story.begin(0, 0)
    story.actor("loaded", worker=0, incarnation=0, version=1)
    story.deliver(0, 0, 0)
    story.deliver(0, 0, 1)
    story.actor("acked", source=(0, 0, 1), verdict="accept")
    story.send(0, 0, 1)
    story.learner("duplicate", source=(0, 0, 1))
    story.update(2)
    story.commit()
    story.send(0, 0, 2)  # never answered: it may have happened or not
    story.lose(0, 0)
    story.learner("refused", source=(0, 0, 2))
    story.now = 1.0
    story.begin(0, 1)
    story.deliver(0, 1, 0)
    story.actor("loaded", worker=0, incarnation=1, version=3)
    story.update(2)
    return story


def test_a_replay_of_its_own_process_stores_once_what_was_accepted_and_draws_what_it_holds() -> None:
    story = good()
    story.note("replay", "stored", source=(0, 0, 0), tail=0, head=4)
    story.note("replay", "drawn", ids=[0, 3], tail=0, head=4)
    story.note("replay", "stored", source=(0, 0, 2), tail=0, head=8)  # who would have noted it was killed
    assert story.rules() == set()
    story.note("replay", "drawn", ids=[4], tail=0, head=4)
    assert story.rules() == {"sampled"}
    story.note("replay", "stored", source=(0, 0, 0), tail=0, head=8)
    assert story.rules() == {"sampled", "twice"}
    story.note("replay", "stored", source=(0, 0, 3), tail=0, head=8)
    assert story.rules() == {"sampled", "twice", "invented"}


def test_a_good_history_is_good() -> None:
    story = good()
    story.close()
    assert check_records(story.records) == []


def test_accepted_twice() -> None:
    story = good()
    story.accept(0, 1, 0)
    assert "twice" in story.rules()


def test_accepted_but_never_sent() -> None:
    story = good()
    story.accept(0, 1, 1)
    assert story.rules() == {"invented"}


def test_more_steps_than_were_sent() -> None:
    story = good()
    story.send(0, 1, 1, steps=3)
    story.accept(0, 1, 1, steps=4)
    assert story.rules() == {"invented"}


def test_what_was_cut_off_must_be_sealed_before_more_follows() -> None:
    story = good()
    story.send(0, 1, 1)
    story.accept(0, 1, 1, steps=2)
    assert story.rules() == set()
    story.deliver(0, 1, 2)
    assert story.rules() == {"seal"}


def test_a_gap() -> None:
    story = good()
    story.send(0, 1, 1)
    story.deliver(0, 1, 2)
    assert story.rules() == {"gap"}


def test_an_old_incarnation() -> None:
    story = good()
    story.accept(0, 0, 2)
    assert "incarnation" in story.rules()


def test_accepted_between_a_fault_and_the_replacement() -> None:
    story = good()
    story.lose(0, 1)
    story.deliver(0, 1, 1)
    assert story.rules() == {"incarnation"}


def test_going_back_to_an_old_incarnation() -> None:
    story = good()
    story.learner("began", worker=0, incarnation=0)
    assert story.rules() == {"incarnation"}


def test_rows_that_were_not_sealed() -> None:
    story = good()
    story.learner("began", worker=0, incarnation=2)
    story.deliver(0, 2, 0)
    assert story.rules() == {"seal"}


def test_steps_that_do_not_add_up() -> None:
    story = good()
    story.send(0, 1, 1)
    story.accept(0, 1, 1, env_steps=story.steps + 5)
    assert story.rules() == {"env_steps"}


def test_a_duplicate_that_never_came_and_a_refusal_of_what_was_expected() -> None:
    story = good()
    story.learner("duplicate", source=(0, 1, 1))
    assert story.rules() == {"lost"}
    story = good()
    story.learner("refused", source=(0, 1, 1))
    assert story.rules() == {"lost"}


def test_acknowledged_but_not_accepted() -> None:
    story = good()
    story.actor("acked", source=(0, 1, 1), verdict="duplicate")
    assert story.rules() == {"acked"}


@pytest.mark.parametrize("offset", [0, -11])
def test_sampled_before_it_came_or_after_it_left(offset: int) -> None:
    story = good()
    story.learner("sampled", ids=[story.head + offset])
    assert story.rules() == {"sampled"}


@pytest.mark.parametrize(
    ("tail", "head", "text"),
    [
        (7, 17, "17 items were made of 16 steps"),
        (5, 16, "11 items are more than capacity=10"),
        (1, 11, "went back"),
        (17, 16, "went back"),
    ],
)
def test_a_queue_that_cannot_be(tail: int, head: int, text: str) -> None:
    story = good()
    story.send(0, 1, 1)
    story.accept(0, 1, 1, tail=tail, head=head)
    (found,) = check_records(story.records)
    assert found.rule == "items"
    assert text in found.text


def test_an_update_too_many() -> None:
    story = good()
    story.update()
    assert story.rules() == {"ratio"}


def test_an_update_too_few_is_only_wrong_at_the_end() -> None:
    story = good()
    story.deliver(0, 1, 1)
    assert story.rules() == set()
    story.close()
    assert story.rules() == {"ratio"}
    story.records[-1]["done"] = False
    assert story.rules() == set()


def test_forgiven_updates_are_not_missing() -> None:
    story = good()
    story.deliver(0, 1, 1)
    story.close(forgiven=2)
    assert story.rules() == set()


def test_updates_are_numbered_one_by_one() -> None:
    story = good()
    story.deliver(0, 1, 1)
    story.updates += 1
    story.update()
    assert "update" in story.rules()


def test_accepted_beyond_the_band_unless_rescued() -> None:
    story = good()
    for sequence in (1, 2):
        story.deliver(0, 1, sequence)
    story.send(0, 1, 3)
    story.accept(0, 1, 3, rescued=True)
    assert story.rules() == set()
    story.deliver(0, 1, 4)
    assert story.rules() == {"band"}


def test_versions_that_go_back() -> None:
    story = good()
    story.learner("published", version=story.updates + 1)
    assert story.rules() == {"version"}
    story = good()
    story.actor("loaded", worker=0, incarnation=1, version=2)
    assert story.rules() == {"version"}
    story = good()
    story.actor("loaded", worker=0, incarnation=1, version=99)
    assert story.rules() == {"version"}


@pytest.mark.parametrize("field", ["env_steps", "updates"])
def test_a_commit_with_other_counts(field: str) -> None:
    story = good()
    story.learner("committed", **{"env_steps": story.steps, "updates": story.updates, field: 1})
    assert story.rules() == {"counters"}


def test_a_restart_goes_on_from_the_commit_and_what_came_after_may_come_again() -> None:
    story = good()
    story.steps, story.updates, story.head, story.tail = 8, 2, 8, 0
    story.learner("opened", **{**OPENED, "env_steps": 8, "updates": 2, "head": 8})
    story.learner("published", version=3)
    story.learner("sealed", worker=0, tail=0, head=8)
    story.learner("began", worker=0, incarnation=1)
    story.deliver(0, 1, 0)
    story.update(2)
    story.close()
    assert story.rules() == set()


def test_a_restart_from_where_nothing_was_committed() -> None:
    story = good()
    story.learner("opened", **{**OPENED, "env_steps": 12, "updates": 4, "head": 12})
    assert story.rules() == {"counters"}


def test_what_was_accepted_before_the_commit_may_not_come_again() -> None:
    story = good()
    story.steps, story.head, story.tail = 8, 8, 0
    story.learner("opened", **{**OPENED, "env_steps": 8, "updates": 2, "head": 8})
    story.learner("began", worker=0, incarnation=0)
    story.accept(0, 0, 0)
    assert "twice" in story.rules()


def test_a_failed_worker_must_be_replaced_in_time() -> None:
    story = good()
    story.lose(0, 1)
    story.now += 6.0
    assert story.rules() == set()
    story.learner("published", version=10)
    assert story.rules() == {"late"}


def test_a_budget_that_is_not_kept() -> None:
    story = good()
    story.lose(0, 1)
    story.begin(0, 2)
    assert story.rules() == {"budget"}


def test_quarantine_only_over_budget_and_for_good() -> None:
    story = good()
    story.lose(0, 1)
    story.supervisor("quarantined", worker=0)
    assert story.rules() == set()
    story.now += 700.0
    story.supervisor("started", worker=0, incarnation=2)
    assert story.rules() == {"budget"}
    story = good()
    story.supervisor("quarantined", worker=0)
    assert story.rules() == {"budget"}


@pytest.mark.parametrize(("incarnation", "rules"), [(2, {"order"}), (1, {"order", "incarnation"})])
def test_two_at_once(incarnation: int, rules: set[str]) -> None:
    story = good()
    story.supervisor("started", worker=0, incarnation=incarnation)
    assert story.rules() == rules


def test_a_fault_of_one_that_does_not_run() -> None:
    story = good()
    story.supervisor("hung", worker=0, incarnation=0)
    assert story.rules() == {"order"}


def test_a_silent_worker_must_be_noticed() -> None:
    story = good()
    for _ in range(20):
        story.now += 2.0
        story.actor("ticked", worker=0, incarnation=1)
    story.learner("sampled", ids=[])
    assert story.rules() == set()
    story.now += 16.0
    story.learner("sampled", ids=[])
    assert story.rules() == {"silent"}


def test_a_worker_that_never_starts_must_be_noticed() -> None:
    story = Story()
    story.begin(0, 0)
    story.now += 24.0
    story.learner("sampled", ids=[])
    assert story.rules() == set()
    story.now += 2.0
    story.learner("sampled", ids=[])
    assert story.rules() == {"silent"}


def test_a_second_driver_may_start_all_workers_again() -> None:
    story = good()
    story.now += 5.0
    story.supervisor("supervising", **SUPERVISING)
    story.supervisor("started", worker=0, incarnation=2)
    assert story.rules() == set()


def test_nothing_comes_before_opened() -> None:
    record: Record = {"role": "learner", "op": "published", "at": 0.0, "version": 1}
    assert [violation.rule for violation in check_records([record])] == ["order"]


# Files


def test_a_history_in_files_is_the_history(tmp_path: Path) -> None:
    story = good()
    files = {role: History(tmp_path / f"{role}.jsonl") for role in OPERATIONS}
    for record in story.records:
        files[record["role"]].note(**{name: value for name, value in record.items() if name != "at"})
    for file in files.values():
        file.close()
    assert [record for _, _, record in read_history(tmp_path) if record is None] == []
    assert len(list(read_history(tmp_path))) == len(story.records)
    assert check_history(tmp_path) == []
    with (tmp_path / "learner.jsonl").open("a") as more:
        more.write('{"role":"learner","op":"update","at":1,"number":9,"env_steps":12,"forgiven":0}\n{"half')
    assert {violation.rule for violation in check_history(tmp_path)} == {"update", "ratio"}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"role":"actor","op":"sent"}\nnonsense\n\xff\n{"role":"x","op":"y"}\n')
    found = check_history(tmp_path)
    assert [violation.text.split()[0] for violation in found] == [f"a.jsonl:{number}" for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(("role", "op", "fields"), [("actor", "sent", {"steps": 1}), ("actor", "update", {})])
def test_a_record_without_its_fields_is_an_error(tmp_path: Path, role: str, op: str, fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{role} {op}"):
        History(tmp_path / "a.jsonl").note(role, op, **fields)


def test_lines_wait_until_there_are_many_or_time_has_passed(tmp_path: Path) -> None:
    now = [0.0]
    history = History(tmp_path / "a.jsonl", clock=lambda: now[0])

    def written() -> int:
        return len(list(read_history(tmp_path)))

    history.note("learner", "sampled", ids=[])
    assert written() == 0
    now[0] = 1.0
    history.note("learner", "sampled", ids=[])
    assert written() == 2
    for _ in range(FLUSH_LINES):
        history.note("learner", "sampled", ids=[])
    assert written() == 2 + FLUSH_LINES
    history.note("learner", "sampled", ids=[])
    history.note("learner", "published", version=1)  # others may act on it
    assert written() == 4 + FLUSH_LINES
    history.note("learner", "sampled", ids=[])
    history.close()
    history.close()
    assert written() == 5 + FLUSH_LINES


def test_a_history_that_grows_too_large_ends_and_says_so(tmp_path: Path) -> None:
    history = History(tmp_path / "a.jsonl", limit_bytes=2000)
    for version in range(1, 200):
        history.note("learner", "published", version=version)
    history.close()
    assert (tmp_path / "a.jsonl").stat().st_size <= 2100
    assert "incomplete" in {violation.rule for violation in check_history(tmp_path)}


def test_a_torn_line_is_cut_off_when_the_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"role":"actor","op":"sent","at":0,"source":[0,0,0],"steps":1}\n{"role":"act')
    history = History(file)
    history.note("actor", "sent", source=(0, 0, 1), steps=1)
    history.close()
    assert [record["source"] for _, _, record in read_history(tmp_path) if record] == [[0, 0, 0], [0, 0, 1]]


KILLED = """
import os, pathlib, signal, sys
from qfleet.audit.history import History
history = History(pathlib.Path(sys.argv[1]))
for sequence in range(1000):
    history.note("actor", "sent", source=(0, 0, sequence), steps=1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_written_what_it_sent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a.jsonl")]
    done = subprocess.run(command, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    assert len(list(read_history(tmp_path))) == 1000


def test_no_history_takes_anything() -> None:
    nothing = NoHistory()
    nothing.note("learner", "anything")
    nothing.close()
