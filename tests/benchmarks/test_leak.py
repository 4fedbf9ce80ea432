"""The search for leaks: its arithmetic, and a short run of it."""

from pathlib import Path

import pytest

from benchmarks.leak import Sample, leaks, slopes, watch


def samples(grow: float, num: int = 120) -> list[Sample]:
    """An hour of samples; megabytes grow from the start, and by more while buffers fill."""
    filling = [max(0.0, 1 - index / 20) for index in range(num)]
    seconds = [3600 * index / num for index in range(num)]
    return [
        Sample(at, 500 - 300 * fill + grow * at / 3600 + index % 3, 100 + index % 2, 20, 8, 0)
        for index, (at, fill) in enumerate(zip(seconds, filling, strict=True))
    ]


def test_growth_is_per_hour_and_the_warm_up_does_not_count() -> None:
    assert slopes(samples(grow=0))["megabytes"] == pytest.approx(0, abs=1)
    assert slopes(samples(grow=200))["megabytes"] == pytest.approx(200, abs=1)
    assert leaks(samples(grow=0)) == {}
    assert list(leaks(samples(grow=200))) == ["megabytes"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_run_holds_as_many_descriptors_and_threads_at_its_end_as_before(tmp_path: Path) -> None:
    found = watch(seconds=100, every=2, folder=tmp_path)
    late = found[len(found) // 2 :]
    assert len(late) > 10
    assert late[0].processes >= 6, "actors, their workers and the replay have processes of their own"
    for name, spread in (("descriptors", 6), ("threads", 3), ("processes", 2), ("shared", 1)):
        numbers = [getattr(each, name) for each in late]
        assert max(numbers[-5:]) <= max(numbers[:5]) + spread, (name, numbers)
