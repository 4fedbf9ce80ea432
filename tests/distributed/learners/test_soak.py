"""A short soak: learners and shards killed and stopped at random. The long one is `scripts/bench soak_learners`."""

from pathlib import Path

import pytest

from benchmarks.soak_learners import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("way", ["allreduce", "server", "server, at most 2 steps stale", "local"])
def test_no_update_is_lost_or_made_twice(tmp_path: Path, way: str) -> None:
    outcome = soak(way, 2, 1, tmp_path)
    assert not outcome.wrong
    assert sum(outcome.blows.values()) == 2
    assert outcome.updates > 0
