"""Cells in a real kernel, as a notebook runs them."""

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

Bundle = dict[str, Any]


def run_cells(cells: list[str], folder: Path, *, seconds: int = 120) -> list[list[Bundle]]:
    """Run cells in a new kernel in this folder; the MIME bundles that each cell has shown at its end."""
    notebook = new_notebook(cells=[new_code_cell(code) for code in cells])
    client = make_client(notebook, folder, seconds)
    client.execute()
    return [[bundle_of(output) for output in cell.outputs] for cell in notebook.cells]


def make_client(notebook: nbformat.NotebookNode, folder: Path, seconds: int) -> NotebookClient:
    """A client that starts a kernel in this folder."""
    where = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=seconds, resources=where, kernel_name="python3")


def bundle_of(output: Bundle) -> Bundle:
    """What an output shows: its MIME types; text of a stream under the stream's name."""
    return {output["name"]: output["text"]} if output["output_type"] == "stream" else dict(output.get("data", {}))
