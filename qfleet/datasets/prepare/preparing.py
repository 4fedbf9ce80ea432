"""Preparing a data set: its episodes are split, and every file of the result holds episodes of one split only.

All is planned from the index. Units of work write data files of their own, so engines may do them anywhere, in any
order and more than once. A prepare that was killed and is started again writes the same files again; the manifest is
written last.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec

from qfleet.datasets.format import (
    FILE_BYTES,
    Dataset,
    Setting,
    WrittenFiles,
    describe,
    publish,
    require_free,
)
from qfleet.datasets.prepare.choice import Choice, ChoiceRule, choose
from qfleet.datasets.prepare.engines import Engine, LocalEngine
from qfleet.datasets.prepare.splits import SplitRule
from qfleet.datasets.prepare.strata import StrataRule
from qfleet.datasets.prepare.units import FileRules, Unit, plan_units
from qfleet.datasets.prepare.work import UnitDone, do_unit, unit_order, unit_result
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import UsageError

Show = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class PreparePlan:
    """What is done with every episode."""

    splits: SplitRule = field(default_factory=SplitRule)
    file_bytes: int = FILE_BYTES
    group: str = ""  # of the index, or `key`: what decides the split in place of the id
    unique: bool = False  # leave out episodes whose content was there before
    capacities: tuple[float, ...] = ()  # of the nodes that learn: a shard of the training split for each
    strata: StrataRule = field(default_factory=StrataRule)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # the user's own, by id
    keys_sha256: str = ""  # of the file they come from

    def choice_rule(self) -> ChoiceRule:
        """How episodes are chosen."""
        return ChoiceRule(self.splits, self.group, self.unique, self.capacities, self.strata, self.keys)

    def settings(self) -> dict[str, Setting]:
        """As the manifest has them."""
        found: dict[str, Setting] = {"made_by": "prepare", "split": str(self.splits), "salt": self.splits.salt}
        found |= {"file_bytes": self.file_bytes, "group": self.group, "unique": self.unique}
        found |= {"strata": str(self.strata), "keys_sha256": self.keys_sha256}
        return found | {"capacities": ",".join(f"{each:g}" for each in self.capacities)}

    def key(self, source: str) -> str:
        """Stands for what is done with this version of a data set."""
        text = msgspec.json.encode([source, self.settings()], order="sorted")
        return hashlib.sha256(text).hexdigest()[:8]


class UnitOrders(Sequence[bytes]):
    """The orders of all units, each made when it is asked for."""

    def __init__(self, units: Sequence[Unit], source: Dataset, target: Place) -> None:
        self.units = units
        self.source = source
        self.target = target

    def __len__(self) -> int:
        return len(self.units)

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [unit_order(unit, self.source, self.target) for unit in self.units[at]]
        return unit_order(self.units[at], self.source, self.target)


def prepare_dataset(
    dataset: Dataset,
    url: str,
    plan: PreparePlan,
    engine: Engine | None = None,
    show: Show = lambda done, num: None,
) -> str:
    """Write a prepared copy of a data set to a URL; returns its version. `show` is told how many files are done."""
    target = open_place(url)
    require_free(target)
    choice = choose(dataset.index, plan.choice_rule())
    require_train(dataset, choice, plan)
    rules = FileRules(plan.key(dataset.version), dataset.manifest.layout.row_bytes, plan.file_bytes)
    units = plan_units(dataset.files(), dataset.index, choice, rules)
    num_files = sum(len(unit.inputs) for unit in units)
    written = WrittenFiles()
    answers = (engine or LocalEngine()).map(do_unit, UnitOrders(units, dataset, target))
    done = 0
    for unit, answer in zip(units, answers, strict=True):
        written.add(written_by(unit, unit_result(answer), dataset.manifest.env_id))
        done += len(unit.inputs)
        show(done, num_files)
    settings = plan.settings() | {"dropped": choice.num_dropped}
    return publish(target, describe(dataset.manifest), written, settings, source=dataset.version)


def written_by(unit: Unit, done: UnitDone, env_id: str) -> WrittenFiles:
    """What a unit has written, with the index that was planned."""
    found = WrittenFiles(index=unit.index_rows(env_id))
    for file, statistics in zip(done.files, done.statistics, strict=True):
        found.add(WrittenFiles([file], [], {file.split: statistics}))
    return found


def require_train(dataset: Dataset, choice: Choice, plan: PreparePlan) -> None:
    """Refuse a result without a training split."""
    if "train" not in choice.splits.values():
        raise UsageError(
            f"no episode of {dataset.place.url} falls into the training split",
            f"It has {len(choice.splits):,} episodes, which the hashes of their ids divide by {plan.splits}.",
            "Collect more episodes, or choose another split or salt.",
        )
