from pathlib import Path

import pytest

from tests.support.run_fixtures import no_waiting_for_the_disk  # noqa: F401


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels and runs keep what belongs to the user, so that no test writes into the real folders."""
    home = tmp_path_factory.mktemp("home")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(home))
    return home
