"""Opens the shards of a plan's data set: in memory if they fit, else mapped from files on this machine's disk."""

from collections.abc import Callable

from qfleet.data import Spec
from qfleet.datasets.epochs import EpochOrder
from qfleet.datasets.format import DataFile, Dataset
from qfleet.datasets.storage import ArrayCache, cache_folder
from qfleet.errors import UsageError
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.learn.offline.shards import decoded_row_bytes
from qfleet.plan.schema import DatasetReplay

LEAST_OPEN = 4
DECODED = "decoded"  # the folder of mapped files in the cache


def num_open(settings: DatasetReplay, num_learners: int) -> int:
    """Of how many shards steps are mixed: each learner is to have as many."""
    return settings.open_shards or -(-LEAST_OPEN // num_learners) * num_learners


def open_shards(
    dataset: Dataset,
    files: list[DataFile],
    spec: Spec,
    settings: DatasetReplay,
    warn: Callable[[str], object] = lambda text: None,
) -> ShardCache:
    """The shards of these files; those of a larger set than `replay.cache_bytes` are on disk."""
    fits = decoded_bytes(files, spec) <= settings.cache_bytes
    disk = None
    if settings.disk_bytes and not fits:
        disk = ArrayCache(cache_folder() / DECODED, settings.disk_bytes, warn)
    return ShardCache(dataset, files, spec, settings.cache_bytes, disk)


def make_order(
    dataset: Dataset,
    shards: ShardCache,
    settings: DatasetReplay,
    num_learners: int,
    seed: int,
    counts: tuple[int, ...] | None = None,
) -> EpochOrder:
    """The order of the items (steps, or as many of other items as `counts` says).

    The shards that are open together must fit, and others are read ahead if they fit too.
    """
    groups = prepared_for(shards.files)
    counts = counts or tuple(file.steps for file in shards.files)
    order = EpochOrder(counts, seed, num_open(settings, num_learners), groups)
    rows = [max(shards.files[shard].rows for shard in queue) for queue in order.queues]
    need = sum(rows) * decoded_row_bytes(shards.spec)
    if need > shards.max_bytes:
        raise UsageError(
            f"replay.cache_bytes={shards.max_bytes} is too small for {dataset.place.url}",
            f"It has {len(rows)} files open at a time, which take up to {need:,} bytes when they are decoded.",
            f"Use replay.cache_bytes={need} or more, fewer replay.open_shards, or prepare it with smaller files.",
        )
    if len(shards.files) > 1:
        shards.open_ahead(min(len(rows), (shards.max_bytes - need) // shards.largest_bytes()))
    return order


def prepared_for(files: list[DataFile]) -> tuple[int, ...]:
    """The learner that each file was prepared for by `qfleet data prepare --shards`; nothing if they were not."""
    names = [file.name.removeprefix("data/") for file in files]
    if not all(name[:1] == "s" and name[1:4].isdigit() and name[4:5] == "-" for name in names):
        return ()
    return tuple(int(name[1:4]) for name in names)


def decoded_bytes(files: list[DataFile], spec: Spec) -> int:
    """Bytes of decoded files."""
    return sum(file.rows for file in files) * decoded_row_bytes(spec)


def memory_note(files: list[DataFile], spec: Spec, settings: DatasetReplay) -> str:
    """What is in memory, and what is on disk."""
    size = decoded_bytes(files, spec)
    if size <= settings.cache_bytes:
        return f"decoded it takes {_mib(size)}, all in memory"
    text = f"decoded it takes {_mib(size)}, of which at most {_mib(settings.cache_bytes)} are open in each learner"
    if not settings.disk_bytes:
        return f"{text}; files are decoded again in every epoch (replay.disk_bytes=0)"
    return f"{text}, mapped from files in {cache_folder() / DECODED} (at most {_mib(settings.disk_bytes)})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
