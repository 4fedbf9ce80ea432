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
from qfleet.datasets.prepare.engines import Engine, LocalEngine
from qfleet.datasets.prepare.splits import SplitRule
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import UsageError


@dataclass(frozen=True, slots=True)
class PreparePlan:
    """What is done with every episode."""

    splits: SplitRule = field(default_factory=SplitRule)
    file_bytes: int = FILE_BYTES


def prepare_file(dataset: Dataset, target: Place, plan: PreparePlan, numbered: tuple[int, DataFile]) -> WrittenFiles:
    """Write the episodes of one input file into files of their splits; `numbered` is its number and the file."""
    number, file = numbered
    writer = EpisodeWriter(target, describe(dataset.manifest), f"{number:05d}-", plan.file_bytes)
    for episode in dataset.episodes(file):
        writer.add(episode, plan.splits.split_of(episode.id))
    return writer.finish()


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
    written = WrittenFiles()
    results = (engine or LocalEngine()).map(partial(prepare_file, dataset, target, plan), inputs)
    for done, result in enumerate(results, 1):
        written.add(result)
        show(done, len(inputs))
    require_train(dataset, written, plan)
    settings: dict[str, Setting] = {"made_by": "prepare", "split": str(plan.splits), "salt": plan.splits.salt}
    settings["file_bytes"] = plan.file_bytes
    return publish(target, describe(dataset.manifest), written, settings, source=dataset.version)


def require_train(dataset: Dataset, written: WrittenFiles, plan: PreparePlan) -> None:
    """Refuse a result without a training split."""
    if not any(file.split == "train" for file in written.files):
        raise UsageError(
            f"no episode of {dataset.place.url} falls into the training split",
            f"It has {len(written.index)} episodes, which the hashes of their ids divide by {plan.splits}.",
            "Collect more episodes, or choose another split or salt.",
        )
