"""A call in a process of its own returns, or is ended at its limit."""

import multiprocessing
import time

from qfleet.build.isolated_call import call_isolated


def test_an_isolated_call_returns_or_is_ended_at_its_limit() -> None:
    assert call_isolated(list, ((1.5, 2.5),), 30.0) == [1.5, 2.5]
    begin = time.monotonic()
    assert call_isolated(time.sleep, (60.0,), 0.2) is None
    assert time.monotonic() - begin < 20.0
    assert not [child for child in multiprocessing.active_children() if child.name == "qfleet-measure"]
