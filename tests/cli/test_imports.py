"""How commands import torch and numba."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.cli.entry import without_collection
from qfleet.cli.output import supervising

AFTER_LOADING = """
import sys
from qfleet.replay.numba_library import load_numba_library
EARLIER
load_numba_library()
print("scipy.linalg" in sys.modules)
import numba.np.arraymath
print(numba.np.arraymath._HAVE_BLAS)
import numpy as np
print(numba.njit(lambda a, b: np.dot(a, b))(np.ones(3), np.ones(3)))
"""


@pytest.fixture
def own_process():
    token = supervising.set(True)
    yield
    supervising.reset(token)
    gc.unfreeze()


def test_a_command_of_its_own_imports_without_collection_and_leaves_what_is_there(own_process):
    gc.unfreeze()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_in_another_program_nothing_is_left():
    before = gc.get_freeze_count()
    with without_collection():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize(("earlier", "there"), [("", "False"), ("import scipy.linalg", "True")])
def test_numbas_library_is_loaded_without_scipy_which_still_works_afterwards(earlier, there):
    code = AFTER_LOADING.replace("EARLIER", earlier)
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=root)
    assert done.stdout.split() == [there, "True", "3.0"], done.stderr
