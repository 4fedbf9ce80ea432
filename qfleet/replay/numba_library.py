"""Loading numba's own library ahead of the first compiled loop."""

import sys
from importlib.util import find_spec

from numba.core.registry import cpu_target


def load_numba_library() -> None:
    """Load numba's library, but not SciPy's linear algebra, which numba only imports to see whether it is there.

    Functions that need it, such as `np.dot` in a compiled function of an environment, import it themselves.
    """
    absent = "scipy.linalg" not in sys.modules
    if absent:
        sys.modules["scipy.linalg"] = None  # type: ignore[assignment]  # importing it fails
    try:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    finally:
        if absent:
            del sys.modules["scipy.linalg"]
    from numba.np import arraymath

    arraymath._HAVE_BLAS = find_spec("scipy") is not None
