"""Preparing a data set: its episodes are split, and every file of the result holds episodes of one split only.

Each input file is worked on by itself and makes output files of its own, so engines may take them in any order. A
prepare that was killed and is started again writes the same files again; the manifest is written last.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from qfleet.datasets.format import (
    FILE_BYTES,
    DataFile,
    Dataset,
    EpisodeWriter,
    Setting,
    WrittenFiles,
    describe,
    publish,
    require_free,
)
from qfleet.datasets.prepare.choice import Choice, choose
from qfleet.datasets.prepare.engines import Engine, LocalEngine
from qfleet.datasets.prepare.splits import SplitRule
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import UsageError


@dataclass(frozen=True, slots=True)
class PreparePlan:
    """What is done with every episode."""

    splits: SplitRule = field(default_factory=SplitRule)
    file_bytes: int = FILE_BYTES
    group: str = ""  # of the index: what decides the split in place of the id
    unique: bool = False  # leave out episodes whose content was there before
    capacities: tuple[float, ...] = ()  # of the nodes that learn: a shard of the training split for each


def prepare_file(
    dataset: Dataset, target: Place, plan: PreparePlan, choice: Choice, numbered: tuple[int, DataFile]
) -> WrittenFiles:
    """Write the episodes of one input file into files of their splits; `numbered` is its number and the file."""
    number, file = numbered
    writers: dict[int | None, EpisodeWriter] = {}
    for episode in dataset.episodes(file):
        split = choice.splits.get(episode.id)
        if split is None:
            continue
        shard = choice.shards.get(episode.id)
        if shard not in writers:
            prefix = f"{number:05d}-" if shard is None else f"s{shard:03d}-{number:05d}-"
            writers[shard] = EpisodeWriter(target, describe(dataset.manifest), prefix, plan.file_bytes)
        writers[shard].add(episode, split)
    written = WrittenFiles()
    for shard in sorted(writers, key=lambda each: -1 if each is None else each):
        written.add(writers[shard].finish())
    return written


def prepare_dataset(
    dataset: Dataset,
    url: str,
    plan: PreparePlan,
    engine: Engine | None = None,
    show: Callable[[int, int], object] = lambda done, num: None,
) -> str:
    """Write a prepared copy of a data set to a URL; returns its version. `show` is told how many files are done."""
    target = open_place(url)
    require_free(target)
    inputs = list(enumerate(dataset.files()))
    choice = choose(dataset.index, plan.splits, plan.group, plan.capacities, unique=plan.unique)
    written = WrittenFiles()
    results = (engine or LocalEngine()).map(partial(prepare_file, dataset, target, plan, choice), inputs)
    for done, result in enumerate(results, 1):
        written.add(result)
        show(done, len(inputs))
    require_train(dataset, written, plan)
    settings: dict[str, Setting] = {"made_by": "prepare", "split": str(plan.splits), "salt": plan.splits.salt}
    settings["file_bytes"] = plan.file_bytes
    settings |= {"group": plan.group, "unique": plan.unique, "dropped": choice.num_dropped}
    settings["capacities"] = ",".join(f"{each:g}" for each in plan.capacities)
    return publish(target, describe(dataset.manifest), written, settings, source=dataset.version)


def require_train(dataset: Dataset, written: WrittenFiles, plan: PreparePlan) -> None:
    """Refuse a result without a training split."""
    if not any(file.split == "train" for file in written.files):
        raise UsageError(
            f"no episode of {dataset.place.url} falls into the training split",
            f"It has {len(written.index)} episodes, which the hashes of their ids divide by {plan.splits}.",
            "Collect more episodes, or choose another split or salt.",
        )
