"""What every test can rely on: quiet libraries, one thread each, repeatable examples, and no network."""

import ipaddress
import os
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Test modules come after this file, so libraries that read these at import see them; child processes inherit them.
for name, value in {
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "SDL_AUDIODRIVER": "dummy",
    "SDL_VIDEODRIVER": "dummy",
}.items():
    os.environ.setdefault(name, value)

from qfleet.system.child_process import fork_server  # noqa: E402  numpy comes with it, which reads these

# One fork server serves all tests of a process, whichever starts it: without this, after one that needs nothing of
# qfleet, every actor, learner and shard of the others would import torch anew.
fork_server("qfleet.distributed.actors.main")

# Machines that run tests are shared and slow at times, so examples have no deadline; CI repeats the same ones.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_connect = socket.socket.connect


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a Unix socket
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return bool(address[0] == "localhost")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that leave the machine fail, so no test comes to depend on one."""

    def connect(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            pytest.fail(f"a test tried to reach {address!r}; tests need no network")
        _connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
