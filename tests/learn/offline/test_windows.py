"""Windows of recorded episodes, against windows cut by hand; steps, against an online replay of the same episodes."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.data import Array, Batch, Rollout, Sequences, Spec
from qfleet.datasets.format import open_dataset
from qfleet.distributed.learners.worker import build_learner
from qfleet.learn.offline.dataset_source import DatasetSource, make_dataset_source
from qfleet.learn.offline.recorded_replay import recorded_rollouts
from qfleet.learn.offline.windows import episode_windows
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.replay import Replay, Uniform, make_cut, make_n_step, make_replay
from tests.support.recorded import SPEC, make_dataset, make_episode

MEMORY = Spec((3,), "float32", (2,), state=(11,))
VIEW: dict[str, Any] = {"net.memory.type": "gru", "net.memory.size": 8, "algo.view.type": "sequences"}
VIEW |= {"algo.view.burn_in": 2, "algo.view.length": 3, "algo.view.stride": 3}


def plan_for(folder: Path, **settings: Any) -> Plan:
    given = {"replay.type": "dataset", "replay.path": str(folder), "replay.split": "all", "algo.discount": 0.5}
    return make_plan("Logs-v0", overrides={**given, "algo.n_step": 1, "algo.batch_size": 4, **settings})


def source_for(plan: Plan, spec: Spec = SPEC) -> DatasetSource:
    return make_dataset_source(plan, make_replay(plan, spec, 1, np.random.default_rng(0)))


def epoch_of(source: DatasetSource) -> list[Any]:
    """All batches of the first epoch."""
    return [source.batch_at(np.array([position])) for position in range(len(source.order))]


def test_windows_cover_an_episode_and_no_more() -> None:
    lengths = np.array([1, 3, 4, 6, 7])
    apart = episode_windows(np.zeros(5, np.int64), lengths, length=3, stride=3)
    assert apart.begin.tolist() == [0, 0, 0, 3, 0, 3, 0, 3, 6]
    assert apart.num_steps.tolist() == [1, 3, 3, 1, 3, 3, 3, 3, 1]
    overlapping = episode_windows(np.array([10]), np.array([7]), length=4, stride=2)
    assert overlapping.begin.tolist() == [10, 12, 14]
    assert overlapping.num_steps.tolist() == [4, 4, 3]  # a fourth window would hold steps of the third only


def test_windows_are_those_cut_by_hand(tmp_path: Path) -> None:
    """Two episodes of 4 steps (ids 0 and 1), burn-in 2, length 3, n = 2: rows at -2 to 4 and 1 to 7 of each."""
    make_dataset(tmp_path / "a", [4, 4])
    batches = epoch_of(source_for(plan_for(tmp_path / "a", **VIEW, **{"algo.n_step": 2}), MEMORY))
    found = {float(batch.obs[2, 0, 0]): batch for batch in batches}
    assert sorted(found) == [0.0, 3.0, 100.0, 103.0]
    first = found[0.0]
    assert first.obs[:, 0, 0].tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert first.last[:, 0].tolist() == [True, True, False, False, False, False, True]
    assert first.gain[:, 0].tolist()[:6] == [0, 0, 1, 2, 3, 4]
    assert first.reward[:, 0].tolist() == [1 + 0.5 * 2, 2 + 0.5 * 3, 3 + 0.5 * 4]
    assert first.discount[:, 0].tolist() == [0.25, 0.25, 0.0]  # episode 0 is terminated
    assert first.ahead[:, 0].tolist() == [4, 5, 6]
    assert first.state.tolist() == [[0.0] * 11]
    second = found[103.0]
    assert second.obs[:, 0, 0].tolist() == [101, 102, 103, 104, 0, 0, 0]
    assert second.last[:, 0].tolist() == [False, False, False, True, True, True, True]
    assert second.reward[:, 0].tolist() == [104, 0, 0]
    assert second.discount[:, 0].tolist() == [0.5, 0, 0]  # truncated: it bootstraps from the final observation
    assert second.ahead[:, 0].tolist() == [3, 3, 4]
    assert second.action[:3, 0].tolist() == make_episode(1, 4).action[1:].tolist()


def test_every_step_is_learned_from_once_per_epoch(tmp_path: Path) -> None:
    lengths = [5, 1, 9, 3, 7, 12]
    make_dataset(tmp_path / "a", lengths, file_bytes=500)
    source = source_for(plan_for(tmp_path / "a", **VIEW), MEMORY)
    seen: Counter[int] = Counter()
    for batch in epoch_of(source):
        learned = ~batch.last[2:5]
        seen.update(batch.obs[2:5, :, 0][learned].astype(int).tolist())
    assert seen == Counter(number * 100 + t for number, length in enumerate(lengths) for t in range(length))


def test_steps_of_windows_are_counted_as_they_are_learned_from(tmp_path: Path) -> None:
    lengths = [5, 1, 9, 3, 7]
    make_dataset(tmp_path / "a", lengths, file_bytes=500)
    source = source_for(plan_for(tmp_path / "a", **VIEW, **{"algo.batch_size": 2}), MEMORY)
    for _ in range(len(source.order)):  # two epochs
        batch = source.next_batch(0)
        assert isinstance(batch, Sequences)
    assert source.steps == 2 * sum(lengths)
    assert source.take_metrics()["epoch"] == 2.0


def test_a_batch_of_several_files_is_its_items_one_by_one(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [5, 1, 9, 3, 7, 12], file_bytes=500)
    source = source_for(plan_for(tmp_path / "a", **VIEW), MEMORY)
    positions = np.arange(len(source.order))
    whole = source.batch_at(positions)
    singles = epoch_of(source)
    assert sorted(whole.ids.tolist()) == positions.tolist()
    for at, one in enumerate(singles[position] for position in whole.ids.tolist()):
        for name in Sequences.__slots__:
            if getattr(one, name) is not None:
                axis = int(name not in ("state", "weight", "ids"))
                np.testing.assert_array_equal(getattr(whole, name).take([at], axis), getattr(one, name))


def test_a_burn_in_from_before_the_episode_is_its_beginning(tmp_path: Path) -> None:
    """The network's values of a first window do not depend on the length of the burn-in."""
    make_dataset(tmp_path / "a", [3])
    found = []
    for burn_in in (0, 2, 9):
        plan = plan_for(tmp_path / "a", **VIEW | {"algo.view.burn_in": burn_in}, **{"net.torso.type": "mlp"})
        batch = source_for(plan, MEMORY).batch_at(np.array([0]))
        learner = build_learner(plan, SPEC, MEMORY, NO_CUSTOM_PARTS)
        tensors = learner.to_tensors(batch)
        with torch.no_grad():
            out, _ = learner.gradients.view.forward(learner.net, tensors, current=True, bootstrap=False)
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_is_outside_of_an_episode_changes_nothing(tmp_path: Path) -> None:
    """Neither the loss nor its gradient depends on rows behind the end."""
    make_dataset(tmp_path / "a", [4, 4])
    plan = plan_for(tmp_path / "a", **VIEW, **{"net.torso.type": "mlp"})
    batch = source_for(plan, MEMORY).batch_at(np.arange(4))
    assert isinstance(batch, Sequences)
    after: list[Any] = []
    outside = batch.last.copy()
    for item in range(4):
        final = np.flatnonzero(batch.last[2:, item])
        if len(final):
            outside[2 + final[0], item] = False  # the final observation is bootstrapped from
    assert 0 < outside.sum() < outside.size
    for value in (0.0, 1e3):
        batch.obs[outside] = value
        learner = build_learner(plan, SPEC, MEMORY, NO_CUSTOM_PARTS)
        learner.update(batch)
        after.append(torch.cat([tensor.flatten() for tensor in learner.online_tensors]))
    assert torch.equal(after[0], after[1])


def test_windows_need_no_decoding_to_be_counted(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [5, 1, 9], file_bytes=300)
    source = source_for(plan_for(tmp_path / "a", **VIEW), MEMORY)
    assert sum(source.order.counts) == len(source.order) == 2 + 1 + 3
    assert source.shards.num_loads == 0


# Steps: what an online replay of the same episodes cuts


def online_replay(plan: Plan, folder: Path, spec: Spec) -> Replay:
    """The episodes as an actor would have sent them, in a replay of one lane."""
    dataset = open_dataset(str(folder))
    replay = Replay(
        spec, 1, 1_000, Uniform(), np.random.default_rng(0), cut=make_cut(plan.algo), n_step=make_n_step(plan)
    )
    for rollout in recorded_rollouts(dataset, dataset.files(), spec):
        for row in range(len(rollout.last)):  # one row after the other, as inline runs do
            one = slice(row, row + 1)
            mask = None if rollout.mask is None else rollout.mask[one]
            columns = (rollout.obs[one], rollout.action[one], rollout.reward[one], rollout.discount[one])
            replay.add(Rollout(*columns, rollout.last[one], (0, 0, 0), 0, mask))
    return replay


def by_observation(batch: Batch) -> dict[float, list[Array]]:
    names = ("obs", "action", "reward", "discount", "next_obs", "next_mask", "mask")
    columns = [getattr(batch, name) for name in names if getattr(batch, name) is not None]
    assert len(columns) == (7 if batch.mask is not None else 5)
    return {float(np.ravel(row[0])[-1]): list(row) for row in zip(*columns, strict=True)}


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [SPEC, Spec((1,), "uint8", (3,), stack=3), Spec((2, 2), "uint8", (3,), stack=2, masked=True)],
    ids=["vectors", "stacks", "masks"],
)
def test_steps_are_those_of_an_online_replay(tmp_path: Path, n_step: int, spec: Spec) -> None:
    lengths = [5, 1] if spec.dtype == "uint8" else [5, 1, 8, 3]
    make_dataset(tmp_path / "a", lengths, spec=spec, file_bytes=150)
    plan = plan_for(tmp_path / "a", **{"algo.n_step": n_step, "algo.batch_size": sum(lengths)})
    offline = source_for(plan, spec).next_batch(0)
    replay = online_replay(plan, tmp_path / "a", spec)
    assert len(replay) == sum(lengths)
    online = replay.read_batch(np.arange(len(replay)), np.ones(len(replay), np.float32))
    assert isinstance(offline, Batch)
    assert isinstance(online, Batch)
    found, expected = by_observation(offline), by_observation(online)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        for value, other in zip(values, found[key], strict=True):
            np.testing.assert_array_equal(value, other)


def test_the_next_batches_are_those_at_their_positions(tmp_path: Path) -> None:
    """Several are cut together."""
    make_dataset(tmp_path / "a", [5, 1, 9, 3, 7, 12], file_bytes=500)
    source = source_for(plan_for(tmp_path / "a", **VIEW), MEMORY)
    other = source_for(plan_for(tmp_path / "a", **VIEW), MEMORY)
    for _ in range(6):
        batch = source.next_batch(0)
        expected = other.batch_at(np.sort(batch.ids))
        order = np.argsort(batch.ids)
        for name in ("obs", "action", "gain", "last", "reward", "discount", "ahead"):
            np.testing.assert_array_equal(
                getattr(batch, name)[:, order], getattr(expected, name)[:, np.argsort(expected.ids)]
            )
