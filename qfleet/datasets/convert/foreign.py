"""Files of other formats: read within limits, without following links, and never executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qfleet.datasets.format import require_arrow
from qfleet.errors import StorageError, UsageError
from qfleet.files import list_inside, open_inside, read_inside
from qfleet.plan.local_paths import local_path

MAX_FILE_BYTES = 1 << 30
MAX_DECODED_BYTES = 4 << 30  # of one table
MAX_EPISODE_BYTES = 1 << 30  # of one episode: no data file holds more
MAX_JSON_BYTES = 16 << 20
MAX_NAMES = 1_000_000  # of the files of one source


def foreign_problem(path: Path | str, reason: str) -> StorageError:
    """The error for a file of another format that cannot be read."""
    return StorageError(
        f"{path} cannot be imported: {reason}",
        "It is damaged, or it is not in the format that was named.",
        "Check --format and the file; docs/datasets.md says what is read.",
    )


@contextmanager
def clear_errors(path: Path | str) -> Iterator[None]:
    """Turn what libraries raise for a file that is not as it should be into one clear error."""
    arrow = require_arrow()
    try:
        yield
    except (StorageError, UsageError):
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise foreign_problem(path, " ".join(str(error).split())[:300]) from error
    except (MemoryError, arrow.ArrowException) as error:
        raise foreign_problem(path, " ".join(str(error).split())[:300]) from error


def read_foreign(folder: Path, name: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a file below a folder; no link is followed."""
    with clear_errors(folder / name):
        return read_inside(folder, name, max_bytes)


def open_foreign(folder: Path, name: str) -> Any:
    """The same as an open file."""
    with clear_errors(folder / name):
        return open(open_inside(folder, name), "rb")


def require_decoded_size(num_bytes: int, most: int = MAX_DECODED_BYTES) -> None:
    """Refuse what would take more memory than an importer may."""
    if num_bytes > most:
        raise ValueError(f"it would take {num_bytes:,} bytes of memory, and {most:,} are the most")


def source_files(source: str, endings: tuple[str, ...]) -> tuple[Path, list[str]]:
    """The folder and the names of the files of a source: one file, or all files of a folder with these endings."""
    path = local_path(source)
    if not path.is_dir():
        return path.parent, [path.name]
    with clear_errors(path):
        names = [name for name in list_inside(path) if name.endswith(endings) and name[0] not in "._"]
    if not names or len(names) > MAX_NAMES:
        raise foreign_problem(path, f"it has {len(names):,} files that end in {' or '.join(endings)}")
    return path, sorted(names)
