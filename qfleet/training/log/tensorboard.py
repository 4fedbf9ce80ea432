"""Rows as TensorBoard events, beside metrics.jsonl; needs the extra `tb`."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfleet.errors import UsageError
from qfleet.files import make_folder
from qfleet.install import install_command

FOLDERS = {"progress": "train", "eval": "eval"}
NOT_CURVES = frozenset({"kind", "env_steps", "returns", "seconds", "checkpoint"})


class TensorBoardWriter:
    """A row callback. `first_step` hides events from that step on which the run wrote before it was resumed."""

    def __init__(self, folder: Path | str, *, first_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoard events need the package tensorboardX",
                f"it cannot be imported: {error}",
                install_command("tb"),
            ) from error
        folder = make_folder(Path(folder).parent, Path(folder).name)  # refuses a link of that name
        # A random name, so that no link can be waiting in its place.
        suffix = f".{secrets.token_hex(8)}"
        self._writer = SummaryWriter(str(folder), purge_step=first_step, filename_suffix=suffix)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Write every number of the row as a curve over environment steps."""
        kind = str(row.get("kind"))
        folder = "test" if row.get("split") == "test" else FOLDERS.get(kind)
        if folder is not None:
            for name, value in row.items():
                if name not in NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{folder}/{name}", value, row["env_steps"])
        if kind in ("eval", "end"):
            self._writer.flush()

    def close(self) -> None:
        """Write buffered events and close the file."""
        self._writer.close()
