"""The list of breaks for scripts/mutate stays true: each text stands once in its file, and its tests exist."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import mutate  # noqa: E402

BREAKS = mutate.load()


def test_there_are_sixty_with_names_of_their_own() -> None:
    assert len(BREAKS) >= 60
    assert len({each.name for each in BREAKS}) == len(BREAKS)


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.name)
def test_a_break_still_fits(each: mutate.Break) -> None:
    assert (ROOT / each.file).read_text("utf-8").count(each.old) == 1
    assert each.new != each.old
    compile((ROOT / each.file).read_text("utf-8").replace(each.old, each.new), each.file, "exec")
    for test in each.tests:
        file, _, rest = test.partition("::")
        name = rest.rpartition("::")[2] or "test_"
        text = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^ *def {name}", text, re.MULTILINE), f"there is no test {test}"


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    mutate.Break("twice", "a.py", "x = 1", "x = 2", []).apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 2\n"
    with pytest.raises(SystemExit, match="0 times"):
        mutate.Break("gone", "a.py", "x = 1", "x = 2", []).apply(tmp_path)
