"""docs/worlds.md lists exactly the environments that the suite trains on."""

import re

from tests.worlds.tested_worlds import PACKAGES, ROOT, WORLDS

ROW = re.compile(r"^\| (?!package|---)[^|]+\|([^|]+)\|([^|]+)\|", re.MULTILINE)


def test_the_table_has_the_ids_and_packages_of_the_suite() -> None:
    page = (ROOT / "docs/worlds.md").read_text("utf-8")
    table = page.partition("## Environments of other packages")[2].partition("\n### ")[0]
    rows = ROW.findall(table)
    assert {found for _, ids in rows for found in re.findall(r"`([^`]+)`", ids)} == {world.id for world in WORLDS}
    commands = [command for install, _ in rows for command in re.findall(r"`pip install ([^`]+)`", install)]
    assert {package for command in commands for package in command.split()} == set(PACKAGES)


def test_packages_are_pinned() -> None:
    pins = [(ROOT / file).read_text("utf-8") for file in ("constraints.txt", "tests/worlds/constraints.txt")]
    assert all(re.search(rf"^{package}==", "\n".join(pins), re.MULTILINE) for package in PACKAGES)


def test_the_view_of_a_game_is_short() -> None:
    assert len((ROOT / "examples/pettingzoo_view.py").read_text("utf-8").splitlines()) < 60
