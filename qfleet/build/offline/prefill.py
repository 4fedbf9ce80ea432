"""A data set in the replay of a run that acts (`replay.prefill`): checked, pinned, and loaded."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from qfleet.build.components import Components
from qfleet.build.offline.plan_dataset import require_room
from qfleet.build.seeds import RECORDED, stream
from qfleet.data import Rollout, Spec
from qfleet.datasets.format import DataFile, Dataset, open_dataset
from qfleet.errors import UsageError
from qfleet.learn import ReplaySource
from qfleet.learn.offline.mixed_batches import RecordedShare
from qfleet.learn.offline.recorded_replay import load_recorded, recorded_rollouts
from qfleet.plan.schema import BufferReplay, Plan
from qfleet.plan.traits import begins_with_data, mixes_data
from qfleet.replay import Replay, make_sampler


def open_prefill(plan: Plan, spec: Spec) -> tuple[Dataset, list[DataFile]]:
    """The data set of `replay.prefill`, and its files to learn from: the split `train`, or all if it has none."""
    if not isinstance(plan.replay, BufferReplay):
        raise TypeError("this plan has no replay to begin with")
    dataset = open_dataset(plan.replay.prefill, plan.replay.prefill_version)
    require_same_world(plan, dataset, spec)
    return dataset, dataset.files("train") or dataset.require_files("all")


def require_same_world(plan: Plan, dataset: Dataset, spec: Spec) -> None:
    """Refuse a data set of another environment, or with other spaces."""
    manifest = dataset.manifest
    own = replace(spec, state=())
    if (manifest.env_id, manifest.spec.spec()) == (plan.env.id, own):
        return
    raise UsageError(
        f"replay.prefill={dataset.place.url} does not fit {plan.env.id}",
        f"It was recorded in {manifest.env_id}, with {manifest.spec.spec()}; this run has {own}.",
        "Record one with `qfleet data collect` in this environment, with the same env.* settings.",
    )


def resolve_prefill(plan: Plan, spec: Spec) -> tuple[Plan, list[str]]:
    """The plan with its data set pinned, and a note; plans without one as they are."""
    if not begins_with_data(plan):
        return plan, []
    dataset, files = open_prefill(plan, spec)
    num_steps = sum(file.steps for file in files)
    share = plan.replay.prefill_share if isinstance(plan.replay, BufferReplay) else None
    if share is None:
        require_capacity(plan, num_steps)
        how = "the first ones in the replay"
    else:
        require_room(dataset, files, spec)
        how = f"{share:.0%} of every batch"
    pinned = {"prefill": dataset.place.url, "prefill_version": dataset.version}
    plan = msgspec.structs.replace(plan, replay=msgspec.structs.replace(plan.replay, **pinned))
    return plan, [f"data set {dataset.version[:12]}: {num_steps:,} recorded steps, {how}"]


def require_capacity(plan: Plan, num_steps: int) -> None:
    """Refuse a replay that cannot hold all recorded steps."""
    if isinstance(plan.replay, BufferReplay) and plan.replay.capacity < num_steps:
        raise UsageError(
            f"replay.capacity={plan.replay.capacity} cannot hold replay.prefill={plan.replay.prefill}",
            f"It has {num_steps:,} steps, and those beyond the capacity would be lost before they are learned from.",
            f"Use replay.capacity={2 * num_steps}, or replay.prefill_share=0.5, with which they are kept beside it.",
        )


def use_recorded_share(plan: Plan, source: object, replay: Replay) -> None:
    """If the plan mixes batches, let this source draw its share of recorded steps."""
    buffer = plan.replay
    if not mixes_data(plan) or not isinstance(source, ReplaySource) or not isinstance(buffer, BufferReplay):
        return
    dataset, files = open_prefill(plan, replay.spec)
    recorded = load_recorded(
        dataset,
        files,
        replay.spec,
        stream(plan.seed, RECORDED),
        lambda items: make_sampler(buffer, items),
        cut=replay.cut,
        n_step=replay.n_step,
        compress=buffer.compress,
    )
    source.recorded = RecordedShare(recorded, buffer.prefill_share or 0.0)
    source.update_n_step()


def fill_replay(components: Components) -> None:
    """If the plan asks for it, write the data set into the replay of a new run; these are not steps of the run."""
    plan = components.plan
    source = components.batch_source
    if not begins_with_data(plan) or mixes_data(plan) or not isinstance(source, ReplaySource):
        return
    replay = source.replay
    dataset, files = open_prefill(plan, replay.spec)
    rows = np.zeros(replay.lanes, np.int64)
    for episode in episode_rollouts(dataset, files, replay.spec):
        lane = int(rows.argmin())
        rows[lane] += len(episode.last)
        replay.add(episode, episode.reward, slice(lane, lane + 1))
    if replay.tail:
        raise UsageError(
            f"replay.capacity={getattr(plan.replay, 'capacity', 0)} cannot hold replay.prefill={dataset.place.url}",
            f"Its episodes are of different lengths, and {replay.tail:,} items were overwritten by later ones: each of "
            f"{replay.lanes} lanes has the same number of rows.",
            "Use a larger replay.capacity, or replay.prefill_share=0.5, with which they are kept beside it.",
        )
    source.first_own = replay.head


def episode_rollouts(dataset: Dataset, files: list[DataFile], spec: Spec) -> Iterator[Rollout]:
    """The episodes of these files as rollouts of one lane."""
    for rollout in recorded_rollouts(dataset, files, spec):
        begin = 0
        for end in (np.flatnonzero(rollout.last[:, 0]) + 1).tolist():
            columns = {name: getattr(rollout, name) for name in ("obs", "action", "reward", "discount", "last")}
            extra = {name: getattr(rollout, name) for name in ("mask", "state")}
            parts = {name: value[begin:end] for name, value in (columns | extra).items() if value is not None}
            yield Rollout(**parts, source=(0, 0, 0), version=0)
            begin = end
