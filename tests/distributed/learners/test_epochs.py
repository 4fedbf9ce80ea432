"""Several learners and one data set: each transition once per epoch by one learner, and the numbers of one learner."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.data import Batch
from qfleet.distributed.learners.epoch_scatter import EpochScatter
from qfleet.distributed.learners.group import LearnerGroup
from qfleet.distributed.learners.launcher import LocalLearnerLauncher
from qfleet.distributed.learners.messages import GroupJoined
from qfleet.distributed.learners.process_group import ProcessGroup
from qfleet.distributed.learners.worker import build_learner, open_dataset_source, open_own_source
from qfleet.errors import StorageError
from qfleet.learn import Learner
from qfleet.learn.offline.dataset_source import DatasetSource
from qfleet.learn.parameters_hash import parameters_hash
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.replay import make_cut
from tests.distributed.learners.test_group import process_of, strike
from tests.support.recorded import SPEC, make_dataset

LENGTHS = [40, 33, 25, 60, 51, 7, 24]  # 240 transitions
STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "server": {"sync.type": "server", "sync.shards": 2, "optim.clip_norm": None},
    "local": {"sync.type": "local", "sync.every_updates": 1, "optim.type": "sgd", "optim.clip_norm": None},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", LENGTHS, file_bytes=1_500)
    return tmp_path / "data"


def plan_for(data: Path, num: int, **more: Any) -> Plan:
    settings = {"replay.type": "dataset", "replay.path": str(data), "replay.split": "all", "learners.num": num}
    settings |= {"replay.open_shards": 4}  # the same for every number of learners
    settings |= {"algo.batch_size": 24, "net.torso.type": "mlp", "net.torso.sizes": (8,), "runtime.threads": 1}
    settings |= {"runtime.compile": False, "runtime.precision": "float32", "optim.learning_rate": 1e-4}
    return make_plan("Logs-v0", overrides=settings | more)


def single_learner(plan: Plan) -> Learner:
    return build_learner(plan, SPEC, SPEC, NO_CUSTOM_PARTS)


@contextmanager
def learner_group(plan: Plan, source: DatasetSource) -> Iterator[LearnerGroup]:
    launcher = LocalLearnerLauncher(plan, SPEC, SPEC, make_cut(plan.algo))
    group = LearnerGroup(plan, single_learner(plan), launcher, positions=source)
    try:
        yield group
    finally:
        group.close()


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The positions of every rank in every update that was completed."""
    found: list[list[list[int]]] = []
    complete = EpochScatter.complete

    def record(scatter: EpochScatter, report: Any) -> None:
        complete(scatter, report)
        ranks = range(scatter.speeds.num)
        found.append([scatter.positions[scatter.owners == rank].tolist() for rank in ranks])

    monkeypatch.setattr(EpochScatter, "complete", record)
    return found


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.online_tensors])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_learners_of_half_a_batch_are_one_learner_of_the_whole(
    data: Path, strategy: str, dealt: list[list[list[int]]]
) -> None:
    """Over an epoch, to rounding; both read the data set themselves."""
    plan = plan_for(data, 2, **STRATEGIES[strategy])
    alone = plan_for(data, 1, **{k: v for k, v in STRATEGIES[strategy].items() if not k.startswith("sync")})
    one = single_learner(alone)
    whole, parts = open_dataset_source(alone, SPEC), open_dataset_source(plan, SPEC)
    with learner_group(plan, parts) as group:
        for _ in range(10):
            expected, report = one.update(whole.next_batch(0)), group.update(parts.next_batch(0))
            if strategy == "allreduce":  # elsewhere the norm is that of the own part
                np.testing.assert_allclose(report.stats["gradient_norm"], expected.stats["gradient_norm"], rtol=1e-3)
        group.quiesce()
        torch.testing.assert_close(weights(group.learner), weights(one), rtol=1e-3, atol=1e-5)
    used = Counter(position for update in dealt for rank in update for position in rank)
    assert used == Counter(range(240))
    assert all(10 <= len(rank) <= 14 for update in dealt for rank in update)


def test_a_lost_learners_part_is_read_by_the_others(data: Path, dealt: list[list[list[int]]]) -> None:
    """Killed in mid-epoch: its positions are divided again, and none is used twice or left out."""
    plan = plan_for(data, 3)
    source = open_dataset_source(plan, SPEC)
    alone: list[int] = []
    with learner_group(plan, source) as group:
        update = group.learner.update

        def record(batch: Batch) -> Any:
            alone.extend(batch.ids.tolist())
            return update(batch)

        group.learner.update = record  # type: ignore[method-assign, assignment]
        for number in range(20):
            if number in (3, 11):
                strike(process_of(group.pool.handles[1 + number % 2]).pid, signal.SIGKILL)
            group.update(source.next_batch(0))
        assert group.learner.updates == 20
    used = Counter(position for made in dealt for rank in made for position in rank) + Counter(alone)
    assert used == Counter(range(480))  # positions count on: two epochs


def test_the_number_of_learners_changes_in_mid_epoch(data: Path, dealt: list[list[list[int]]]) -> None:
    """A new group goes on from the saved position."""
    state = open_dataset_source(plan_for(data, 2), SPEC).state_dict()
    for num, updates in ((2, 4), (3, 3), (2, 3)):
        plan = plan_for(data, num)
        source = open_dataset_source(plan, SPEC)
        source.load_state_dict(state)
        with learner_group(plan, source) as group:
            for _ in range(updates):
                group.update(source.next_batch(0))
        state = source.state_dict()
    source = open_dataset_source(plan_for(data, 1), SPEC)
    found = Counter[tuple[int, int]]()
    for update in dealt:
        for rank in update:
            shards, rows = source.order.locate(np.asarray(rank))
            found.update(zip(shards.tolist(), rows.tolist(), strict=True))
    assert len(found) == sum(found.values()) == 240


def test_a_learner_that_does_not_reach_the_data_set_says_so(data: Path) -> None:
    plan = plan_for(data, 2)
    (data / "manifest.json").unlink()
    with pytest.raises(StorageError, match="cannot open the data set") as raised:
        open_own_source(plan, SPEC)
    assert "all mount at one path" in raised.value.fix


def test_learners_report_the_parameters_that_they_begin_with(data: Path) -> None:
    plan = plan_for(data, 2)
    with learner_group(plan, open_dataset_source(plan, SPEC)) as group:
        before = parameters_hash(group.learner.online_tensors)
        group.update(open_dataset_source(plan, SPEC).next_batch(0))
        (formed,) = [event for event in group.take_events() if event["kind"] == "group_formed"]
        assert formed["parameters"] == [before, before]
        assert formed["updates"] == 0


def test_a_learner_that_begins_with_other_parameters_ends_the_run(data: Path) -> None:
    class Other:
        number = 1

        def reply(self, kind: type[Any], seconds: float) -> tuple[GroupJoined, dict[str, Any]]:
            return GroupJoined(1, "another state", "other parameters"), {}

    group: Any = ProcessGroup.__new__(ProcessGroup)
    group.learner = single_learner(plan_for(data, 1))
    group.members = [Other()]
    group.pool = SimpleNamespace(reply_timeout_seconds=1.0)
    with pytest.raises(RuntimeError, match="learner 1 did not begin with the same"):
        group.require_equal_states()
