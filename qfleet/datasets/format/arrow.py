"""pyarrow, an extra: it is imported when the first data set is read or written."""

from typing import Any

from qfleet.errors import UsageError
from qfleet.install import install_command


def require_arrow() -> Any:
    """The module `pyarrow`, with `pyarrow.parquet` imported."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "data sets need the package pyarrow",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('data')}",
        ) from error
    return pyarrow
