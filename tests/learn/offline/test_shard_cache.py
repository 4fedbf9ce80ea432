"""Open shards: the same batches from memory and from mapped files, ahead of need or not, in bounded memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from qfleet.data import Batch, Spec
from qfleet.errors import StorageError
from qfleet.learn.offline import open_shards
from qfleet.learn.offline.dataset_source import DatasetSource, make_dataset_source
from qfleet.learn.offline.read_ahead import ReadAhead
from qfleet.learn.offline.shards import decoded_row_bytes
from qfleet.plan import make_plan
from qfleet.replay import make_replay
from tests.support.recorded import SPEC, make_dataset

LENGTHS = [700] * 60
PICTURES = Spec((12, 10), "uint8", (2,), stack=3, masked=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """60 files of one episode."""
    make_dataset(tmp_path / "data", LENGTHS, file_bytes=50_000)
    return tmp_path / "data"


def source_for(data: Path, spec: Spec = SPEC, **settings: object) -> DatasetSource:
    given = {"replay.type": "dataset", "replay.path": str(data), "replay.split": "all", "replay.cache_bytes": 1 << 20}
    plan = make_plan("Logs-v0", overrides={**given, "algo.batch_size": 250, "algo.n_step": 2, **settings})
    return make_dataset_source(plan, make_replay(plan, spec, 1, np.random.default_rng(0)))


@pytest.fixture
def opened() -> Iterator[list[DatasetSource]]:
    sources: list[DatasetSource] = []
    yield sources
    for source in sources:
        source.close()


def assert_equal(one: Batch, other: Batch) -> None:
    for name in Batch.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@pytest.mark.parametrize("spec", [SPEC, PICTURES])
def test_batches_are_the_same_from_memory_from_new_files_and_from_old_ones(
    tmp_path: Path, spec: Spec, opened: list[DatasetSource], own_cache: Path
) -> None:
    """And with more files open than steps are mixed of, or not: reading ahead changes nothing."""
    lengths = LENGTHS if spec is SPEC else [150] * 70
    make_dataset(tmp_path / "set", lengths, spec=spec, file_bytes=20_000)
    memory = source_for(tmp_path / "set", spec, **{"replay.cache_bytes": 1 << 30})
    again = source_for(tmp_path / "set", spec, **{"replay.disk_bytes": 0})
    made = source_for(tmp_path / "set", spec)
    opened += [memory, again, made]
    num = 2 * len(memory.order) // 250
    batches = [memory.next_batch(0) for _ in range(num)]
    for source in (again, made):
        for batch in batches:
            assert_equal(source.next_batch(0), batch)
    assert memory.shards.disk is None
    assert again.shards.num_decoded > len(memory.shards.files)
    assert made.shards.num_decoded == len(made.shards.files)
    found = source_for(tmp_path / "set", spec)
    opened.append(found)
    for batch in batches[:20]:
        assert_equal(found.next_batch(0), batch)
    assert found.shards.num_decoded == 0
    metrics = found.take_metrics()
    assert metrics["shard_bytes"] == 0
    assert 0 < metrics["mapped_bytes"] <= 1 << 20  # type: ignore[operator]
    assert all(path.suffix == ".arrays" for path in (own_cache / "decoded").iterdir())


def test_another_transformation_has_files_of_its_own(tmp_path: Path, own_cache: Path) -> None:
    make_dataset(tmp_path / "set", [300] * 60, spec=PICTURES, file_bytes=50_000)
    for stack in (3, 2):
        spec = Spec((12, 10), "uint8", (2,), stack=stack, masked=True)
        source = source_for(tmp_path / "set", spec)
        source.next_batch(0)
        source.close()
        assert source.shards.num_decoded > 0


def test_open_files_and_those_read_ahead_stay_in_bounds(data: Path, opened: list[DatasetSource]) -> None:
    source = source_for(data)
    opened.append(source)
    for _ in range(2 * len(source.order) // 250):
        source.next_batch(0)
        ahead = source.shards._ahead
        assert ahead is not None
        size = source.shards.num_bytes() + len(ahead.tasks) * source.shards.largest_bytes()
        assert size <= 1 << 20
        assert len(ahead.tasks) <= ahead.num


def test_the_disk_is_bounded_too(data: Path, opened: list[DatasetSource], own_cache: Path) -> None:
    source = source_for(data, **{"replay.disk_bytes": 1 << 20})
    opened.append(source)
    for _ in range(len(source.order) // 250):
        source.next_batch(0)
        assert kept_bytes(own_cache / "decoded") <= 1 << 20
    for text in source.take_warnings():  # all that fit may be open
        assert "files in use" in text


def kept_bytes(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.arrays"):
        with suppress(FileNotFoundError):  # the thread goes on
            found += path.stat().st_size
    return found


def test_a_full_disk_is_said_once_and_costs_no_batch(
    data: Path, opened: list[DatasetSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfleet.datasets.storage.array_cache.free_bytes", lambda folder: 0)
    source = source_for(data)
    plain = source_for(data, **{"replay.disk_bytes": 0})
    opened += [source, plain]
    for _ in range(len(source.order) // 250):
        assert_equal(source.next_batch(0), plain.next_batch(0))
    [text] = source.take_warnings()
    assert "no space left" in text
    assert source.take_warnings() == []


def test_the_next_files_are_read_ahead_of_need(data: Path, opened: list[DatasetSource]) -> None:
    source = source_for(data)
    opened.append(source)
    for _ in range(len(source.order) // 250):
        ahead = source.shards._ahead
        assert ahead is not None
        before = set(source.shards.shards)
        ready = set(ahead.tasks)
        source.next_batch(0)
        if before:
            assert set(source.shards.shards) - before <= ready
        for task in ahead.tasks.values():
            assert task.done.acquire(timeout=20)
            task.done.release()


@pytest.mark.parametrize("disk_bytes", [0, 1 << 30])
@pytest.mark.parametrize("damage", ["missing", "changed", "cut short"])
def test_a_file_that_is_damaged_during_the_run_is_named_when_it_is_due(
    data: Path, damage: str, disk_bytes: int, opened: list[DatasetSource]
) -> None:
    """Reading ahead finds it first; the error comes where its steps are needed, not before and not without a name."""
    source = source_for(data, **{"replay.disk_bytes": disk_bytes})
    opened.append(source)
    source.next_batch(0)
    position = 5 * 700
    number = int(
        next(s for s in source.order.locate(np.arange(position, len(source.order)))[0] if s not in here(source))
    )
    path = data / source.shards.files[number].name
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    else:
        path.write_bytes(path.read_bytes()[:-9])
    due = int(np.flatnonzero(source.order.locate(np.arange(len(source.order)))[0] == number)[0])
    with pytest.raises(StorageError) as error:
        read_epoch(source)
    assert source.shards.files[number].name in str(error.value)
    assert error.value.exit_code == 5
    assert source.steps - 250 <= due + 4_096


def read_epoch(source: DatasetSource) -> None:
    for _ in range(len(source.order) // 250):
        source.next_batch(0)


def here(source: DatasetSource) -> set[int]:
    ahead = source.shards._ahead
    assert ahead is not None
    return set(source.shards.shards) | set(ahead.tasks)


def test_a_cached_file_is_not_asked_for_again(data: Path, opened: list[DatasetSource]) -> None:
    """Its content is that of the hash in the manifest, whatever happens to the data set."""
    source = source_for(data)
    opened.append(source)
    whole = [source.next_batch(0) for _ in range(len(source.order) // 250)]
    for file in source.shards.files:
        (data / file.name).unlink()
    again = source_for(data)
    opened.append(again)
    for batch in whole:
        assert_equal(again.next_batch(0), batch)


def test_the_thread_ends_with_the_source(data: Path) -> None:
    before = threading.active_count()
    source = source_for(data)
    source.next_batch(0)
    assert threading.active_count() == before + 1
    source.close()
    assert threading.active_count() == before


def test_the_thread_ends_while_it_works() -> None:
    began = threading.Event()
    go_on = threading.Event()

    def load(number: int) -> int:
        began.set()
        assert go_on.wait(20)
        return number

    ahead = ReadAhead(load, 2)
    ahead.want([1, 2, 3])
    assert began.wait(20)
    threading.Timer(0.1, go_on.set).start()
    thread = ahead.thread.thread
    ahead.close()
    assert thread is not None
    assert not thread.is_alive()
    assert ahead.tasks == {}


def test_what_is_not_wanted_any_more_is_not_made() -> None:
    made: list[int] = []
    ahead = ReadAhead(lambda number: made.append(number) or time.sleep(0.05) or number, 2)  # type: ignore[func-returns-value]
    ahead.want([1, 2])
    ahead.want([3])
    assert ahead.take(2) is None
    assert ahead.take(3) == 3
    assert 2 not in made
    ahead.close()


def test_what_is_in_memory_is_said(data: Path) -> None:
    plan = make_plan("Logs-v0", overrides={"replay.type": "dataset", "replay.path": str(data), "replay.split": "all"})
    files = source_for(data).shards.files
    note = lambda **more: open_shards.memory_note(files, SPEC, replaced(plan, **more))  # noqa: E731
    size = sum(file.rows for file in files) * decoded_row_bytes(SPEC) / 2**20
    assert note() == f"decoded it takes {size:.1f} MiB, all in memory"
    assert "mapped from files in" in note(cache_bytes=1 << 20)
    assert "decoded again in every epoch" in note(cache_bytes=1 << 20, disk_bytes=0)


def replaced(plan: object, **more: object) -> object:
    import msgspec

    return msgspec.structs.replace(plan.replay, **more)  # type: ignore[attr-defined]
