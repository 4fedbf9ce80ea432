"""Files of variants from elsewhere: no code of theirs runs, and they cost their reader neither memory nor time."""

import json
import os
from pathlib import Path

import pytest

from tests.hostile.commands import CommandResult, Server, executed, over_limits, unsafe_output
from tests.hostile.place import Place, make_place

FILE = "variants.toml"
REFUSED = {
    "module": '[a]\nenv = "evil:Evil"',
    "file": '[a]\nenv = "evil.py:Evil"',
    "id": '[a]\nid = "evil:Evil"',
    "wrapper": '[a]\nwrappers = ["evil.py:W"]',
    "wrapper-twice": '[good]\nenv = "CartPole-v0"\n[a]\nenv = "CartPole-v0"\nwrappers = ["evil:W"]',
    "wrapper-of-other-type": "[a]\nwrappers = 3",
    "other-settings": "[a]\n[a.algo]\nn_step = 3",
    "large": "# " + "x" * 1_100_000,
    "deep": "a = " + "[" * 20_000,
    "deep-tables": "[" + ".".join("a" * 20_000) + "]",
    "many": "\n".join(f"[v{n}]" for n in range(5_000)),
    "names": '["\\u001b[31mred\\nFORGED line"]\nenv = "CartPole-v0"',
    "name-long": f'["{"x" * 100_000}"]\nenv = "CartPole-v0"',
    "binary": "\x00\x01",
    "empty": "",
}
FAILING = {
    "escapes": '[a]\nenv = "\\u001b[31mred\\nFORGED line"',
    "copies": "[a]\nworkers = 1000000",
    "options-names": '[a]\noptions = {"\\u001b[31m" = 1}',
    "options-deep": "[a]\noptions = {a = {b = {c = 1}}}",
    "secrets": '[a]\nsecrets = {x = "no such variable"}',
}


@pytest.fixture
def place(bases: Path, tmp_path: Path) -> Place:
    made = make_place(tmp_path / "a", bases / "run", bases / "other", "hostile")
    for folder in (made.root, made.run):
        (folder / "evil.py").write_text(made.code)
    return made


def evaluated(server: Server, place: Place) -> CommandResult:
    arguments = ["eval", "runs/hostile", "--episodes", "1", "--variants", FILE, "--json"]
    result = server.run(place.root, arguments)
    assert not executed(place, result) + unsafe_output(result) + over_limits(result)
    assert "bug in qfleet" not in result.err
    return result


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused(name: str, server: Server, place: Place) -> None:
    (place.root / FILE).write_text(REFUSED[name])
    result = evaluated(server, place)
    assert result.code == 2, result.err
    assert result.err.startswith("error:")


@pytest.mark.parametrize("name", FAILING)
def test_a_variant_that_fails_alone(name: str, server: Server, place: Place) -> None:
    (place.root / FILE).write_text(FAILING[name] + '\n[old]\nenv = "CartPole-v0"\n')
    result = evaluated(server, place)
    assert result.code == 2, result.err
    rows = {row["name"]: row for row in json.loads(result.out)}
    assert "error" in rows["a"]
    assert rows["old"]["episodes"] == 1


def test_a_fifo_is_not_waited_for(server: Server, place: Place) -> None:
    os.mkfifo(place.root / FILE)
    assert evaluated(server, place).code == 2


def test_a_good_file_is_evaluated(server: Server, place: Place) -> None:
    (place.root / FILE).write_text('[old]\nenv = "CartPole-v0"\n')
    result = evaluated(server, place)
    assert result.code == 0, result.err
    assert [row["name"] for row in json.loads(result.out)] == ["training", "old"]
