"""The notebooks in examples/ run from their first cell to their last, and are stored without outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import qfleet
from tests.notebooks.kernel import run_cells

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


def cells_of(file: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["cells"]
    return cells


def code_of(file: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells_of(file) if cell["cell_type"] == "code"]


def names_from_qfleet(code: str) -> list[tuple[str, str]]:
    """The names that code imports from qfleet, as (module, name)."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).split(".")[0] == "qfleet"]
    return [(str(node.module), each.name) for node in ours for each in node.names]


def test_all_three_are_there() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["comparing_groups", "first_steps", "own_algorithm"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs(file: Path) -> None:
    code = [cell for cell in cells_of(file) if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
    document = json.loads(file.read_text("utf-8"))
    assert set(document["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_what_a_notebook_imports_and_calls_exists(file: Path) -> None:
    code = "\n".join(code_of(file))
    imported = names_from_qfleet(code)
    assert imported
    for module, name in imported:
        found = __import__(module, fromlist=[name])
        assert hasattr(found, name), f"{module}.{name}"
    objects = {"run": qfleet.Run, "best": qfleet.Run, "five_steps": qfleet.Group, "one_step": qfleet.Group}
    attributes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    used = [(node.value.id, node.attr) for node in attributes if isinstance(node.value, ast.Name)]
    known = [(objects[name], attribute) for name, attribute in used if name in objects]
    assert known
    of_objects = {"path", "plan", "policy"}  # not of their classes
    assert not [name for kind, name in known if not hasattr(kind, name) and name not in of_objects]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    outputs = run_cells(code_of(file), tmp_path, seconds=600)
    shown = [bundle for cell in outputs for bundle in cell]
    assert any("image/png" in bundle for bundle in shown) or file.stem == "own_algorithm"
    pages = "".join(bundle.get("text/html", "") for bundle in shown)
    assert "done: " in pages
    assert "<svg" in pages
    assert len(list((tmp_path / "runs").iterdir())) == (1 if file.stem == "first_steps" else 2)
