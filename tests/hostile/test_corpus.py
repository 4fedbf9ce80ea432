"""Hostile run folders x every command that reads a run: nothing executed or done outside, bounded, right exit code."""

from pathlib import Path

import pytest

from tests.hostile.commands import COMMANDS, LIMIT_MEGABYTES, CommandResult, Server, find_violations, violations
from tests.hostile.corpus import CASES, SAMPLE
from tests.hostile.place import Case, Place, make_place, outside

pytestmark = pytest.mark.timeout(900)  # the server ends a command that takes too long


def prepared(case: Case, bases: Path, root: Path) -> Place:
    """The hostile folder of a case."""
    place = make_place(root, bases / case.base, bases / "other", case.folder)
    case.make(place)
    return place


def check(name: str, server: Server, bases: Path, root: Path) -> None:
    """Every command on one hostile folder, and its removal on a fresh one."""
    case = CASES[name]
    if case.skip:
        pytest.skip(case.skip)
    names = case.only or tuple(COMMANDS)
    found = find_violations(
        server, prepared(case, bases, root / "a"), case, tuple(each for each in names if each != "rm")
    )
    if "rm" in names:
        found += find_violations(server, prepared(case, bases, root / "b"), case, ("rm",))
    assert not found, f"{name}: {case.about}\n" + "\n".join(found)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_hostile_folder_does_no_harm(name: str, server: Server, bases: Path, tmp_path: Path) -> None:
    check(name, server, bases, tmp_path)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in CASES if name not in SAMPLE])
def test_no_hostile_folder_does_harm(name: str, server: Server, bases: Path, tmp_path: Path) -> None:
    check(name, server, bases, tmp_path)


def test_the_corpus_is_large() -> None:
    assert len(CASES) >= 200
    assert set(SAMPLE) <= set(CASES)


def test_a_good_folder_is_read_by_every_command(server: Server, bases: Path, tmp_path: Path) -> None:
    codes = dict.fromkeys(COMMANDS, (0,)) | {"sync": (2,)}
    place = make_place(tmp_path / "a", bases / "run", bases / "other", "hostile")
    assert not find_violations(server, place, Case("good", lambda place: None, codes=codes), tuple(COMMANDS))


GOOD = CommandResult(0, "", 1.0, 300, 0, "good", "", ())


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"code": 1}, "exit code 1"),
        ({"code": -11}, "ended by signal 11"),
        ({"stopped": "time"}, "stopped: time"),
        ({"megabytes": LIMIT_MEGABYTES + 1}, "held"),
        ({"left": 1}, "left 1 processes"),
        ({"out": "good\x1b[31m"}, "prints raw '\\x1b'"),
        ({"out": "good\nFORGED line"}, "forged line"),
        ({"out": ""}, "hides the good run"),
        ({"err": "This is a bug in qfleet"}, "bug:"),
        ({"audit": ("connect ('127.0.0.1', 1)",)}, "audit: connect"),
        ({"audit": ("start '/bin/sh' ['sh']",)}, "audit: start"),
    ],
)
def test_wrong_output_is_detected(result: dict[str, object], expected: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.canary.mkdir()
    got = CommandResult(**{**GOOD.__dict__, **result})
    assert not violations(place, "runs", Case("good", lambda place: None), GOOD, outside(place))
    found = violations(place, "runs", Case("good", lambda place: None), got, outside(place))
    assert [text for text in found if text.startswith(expected)], found


def test_changes_outside_the_folder_are_detected(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for folder in (place.canary, place.victim, place.run):
        folder.mkdir(parents=True)
    before = outside(place)
    (place.run / "file").write_text("inside")
    assert not violations(place, "runs", Case("good", lambda place: None), GOOD, before)
    (place.victim / "file").write_text("outside")
    (place.canary / "executed").touch()
    found = violations(place, "runs", Case("good", lambda place: None), GOOD, before)
    assert found[0] == "executed: executed"
    assert "outside: victim/file changed" in found
