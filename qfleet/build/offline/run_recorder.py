"""`save.dataset`: everything that a run's actors do is recorded into a data set, whose manifest ends the run.

Data files are written as they fill. What is in none yet, unfinished episodes and those of a file that is not full, is
part of every checkpoint, with the list of files. A run that goes back to a checkpoint writes the later files again.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.act.recording import RolloutRecorder, Rows, recorded_columns, row_bytes
from qfleet.build.components import Components
from qfleet.data import Rollout, Spec, State, World
from qfleet.data.joint_actions import MAX_JOINT_ACTIONS
from qfleet.data.state_reader import saved_array, saved_numbers, saved_tree, saved_value
from qfleet.datasets.format import (
    BlockWriter,
    DataFile,
    Dataset,
    Description,
    EpisodeBlock,
    Setting,
    WrittenFiles,
    index_file,
    join_blocks,
    open_dataset,
    publish,
    require_arrow,
    require_free,
    spec_columns,
)
from qfleet.datasets.format.columns import WHOLE
from qfleet.datasets.format.manifest import MANIFEST
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import UsageError
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.plan.validate.placement import num_senders

RUN_FILE_BYTES = 16 << 20  # before compression: each checkpoint holds the file that is not full
MAX_PACKED_BYTES = 4 << 30  # of rows in a checkpoint, before compression


@dataclass(eq=False)
class RunRecorder:
    """Records the rollouts of all actors of a run."""

    plan: Plan
    place: Place
    description: Description
    actors: list[RolloutRecorder] = field(init=False)
    writer: BlockWriter = field(init=False)
    files: list[DataFile] = field(init=False)
    began_late: bool = False

    def __post_init__(self) -> None:
        num = num_senders(self.plan)
        lanes = self.plan.env.num // num
        shared: dict[str, Any] = {"prefix": str(self.plan.seed), "policies": [algorithm_name(self.plan)]}
        self.actors = [
            RolloutRecorder(self.description.spec, lanes, first_lane=lanes * worker, **shared) for worker in range(num)
        ]
        self.writer = BlockWriter(self.place, self.description, self.plan.seed, RUN_FILE_BYTES)
        self.files = []

    # While the run goes on

    def add(self, rollout: Rollout) -> None:
        """Record a rollout."""
        for block in self.actors[rollout.source[0]].add(rollout):
            self.writer.add(block)

    def seal(self, worker: int) -> None:
        """An actor is lost: its episodes end where they are."""
        if (block := self.actors[worker].end_all()) is not None:
            self.writer.add(block)

    # Checkpoints

    def state_dict(self) -> State:
        """The files so far, and what is in none of them."""
        self.take_files()
        return {
            "url": self.place.url,
            "files": msgspec.to_builtins(self.files),
            "waiting": pack_blocks(self.writer.waiting),
            "actors": [pack_actor(actor) for actor in self.actors],
        }

    def take_files(self) -> None:
        """Wait for the file that is being written; its index is read again at the end."""
        self.writer.finish_writing()
        self.files += [file for written in self.writer.finished for file in written.files]
        self.writer.finished.clear()

    def load_state_dict(self, state: State | None) -> None:
        """Go on from there; without a state of this place, record from the next episodes on."""
        self.writer.finish_writing()
        self.writer.finished.clear()
        if state is None or saved_value(state, "url") != self.place.url:
            self.begin_late()
            return
        spec = self.description.spec
        saved = saved_value(state, "actors")
        if not isinstance(saved, list) or len(saved) != len(self.actors):
            raise ValueError(f"actors: expected {len(self.actors)}")
        self.files = msgspec.convert(saved_value(state, "files"), list[DataFile])
        self.writer.restart(len(self.files))
        for block in unpack_blocks(saved_tree(state, "waiting"), spec, algorithm_name(self.plan)):
            self.writer.add(block)
        for actor, each in zip(self.actors, saved, strict=True):
            actor.load_state_dict(unpack_actor(each, spec))

    def begin_late(self) -> None:
        """The run began without this recording: the episodes under way are left out."""
        if not self.began_late:
            require_unused(self.place)
        self.began_late = True
        self.files = []
        self.writer.restart(0)
        for actor in self.actors:
            actor.skip_begun()

    # The end

    def require_open(self) -> None:
        """Refuse to record on after the manifest was written: a data set never changes."""
        if self.place.exists(MANIFEST):
            raise UsageError(
                f"{self.place.url} is complete: this run has recorded it to its end",
                "A data set never changes: its version is the hash of its manifest.",
                "Start a new run with another save.dataset, and --from this one to keep the weights.",
            )

    def publish(self, env_steps: int) -> Dataset:
        """Write what is left, unfinished episodes cut off, and the manifest."""
        settings: dict[str, Setting] = {"made_by": "train", "algorithm": algorithm_name(self.plan)}
        settings |= {"seed": self.plan.seed, "num_envs": self.plan.env.num, "env_steps": env_steps}
        if self.place.exists(MANIFEST):
            found = open_dataset(self.place)
            if found.manifest.settings != settings or found.manifest.files[: len(self.files)] != tuple(self.files):
                self.require_open()
            return found
        for actor in self.actors:
            if (block := actor.end_all()) is not None:
                self.writer.add(block)
        self.writer.end_file()
        self.take_files()
        written = WrittenFiles()
        for file in self.files:
            written.add(index_file(self.place, file, self.description, self.plan.seed, algorithm_name(self.plan)))
        publish(self.place, self.description, written, settings)
        return open_dataset(self.place)

    def close(self) -> None:
        """End the thread that writes."""
        self.writer.close()


def record_into(components: Components, world: World) -> None:
    """Record what arrives at the batch source of these components into the data set of their plan."""
    plan = components.plan
    spec = world.spec
    description = Description(plan.env.id, spec, spec_columns(spec), world.spaces)
    recorder = RunRecorder(plan, open_place(str(plan.save.dataset)), description)
    components.recorder = recorder
    components.batch_source.recorder = recorder


def resolve_recording(plan: Plan, spec: Spec) -> Plan:
    """The plan with the place of its data set in full; refused if the place is in use, or cannot hold this world."""
    require_arrow()
    if spec.num_actions > MAX_JOINT_ACTIONS:
        raise UsageError(
            f"save.dataset cannot hold {spec.num_actions:,} joint actions",
            f"An action is one number in a data set, and {MAX_JOINT_ACTIONS:,} of them are the most.",
            "Leave save.dataset out.",
        )
    place = open_place(str(plan.save.dataset))
    require_free(place)
    require_unused(place)
    return msgspec.structs.replace(plan, save=msgspec.structs.replace(plan.save, dataset=place.url))


def require_unused(place: Place) -> None:
    """Refuse a place where another run may go on with what it has recorded."""
    if found := [name for name in place.names() if name.startswith("data/")]:
        raise UsageError(
            f"{place.url} holds {len(found)} data files without a manifest",
            f"A run that has not ended recorded them, and needs them when it is resumed; the first is {found[0]}.",
            "Choose another folder for save.dataset, or remove those files.",
        )


# What checkpoints hold: columns of rows, compressed


def pack_rows(rows: Rows) -> State:
    """Columns of rows, compressed."""
    pa = require_arrow()
    packed: State = {"shape": list(rows["last"].shape)}
    for name, column in rows.items():
        data = pa.compress(np.ascontiguousarray(column).reshape(-1).view(np.uint8), codec="zstd", asbytes=True)
        packed[name] = np.frombuffer(data, np.uint8)
    return packed


def unpack_rows(state: State, spec: Spec) -> Rows:
    """The columns that `pack_rows` has packed; ValueError if they are not of this spec."""
    pa = require_arrow()
    leading = msgspec.convert(
        saved_value(state, "shape"), Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=2)]
    )
    if math.prod(leading) * row_bytes(spec) > MAX_PACKED_BYTES:
        raise ValueError(f"shape: {leading} rows are more than a checkpoint can hold")
    rows: Rows = {}
    for name, (kind, shape) in recorded_columns(spec).items():
        size = math.prod((*leading, *shape)) * np.dtype(kind).itemsize
        packed = saved_numbers(state, name, (None,), 0, 255)
        try:
            data = pa.decompress(packed.tobytes(), decompressed_size=size, codec="zstd", asbytes=True)
        except OSError as error:
            raise ValueError(f"{name}: {error}") from error
        rows[name] = np.frombuffer(data, kind).reshape(*leading, *shape).copy()
    return rows


def pack_actor(actor: RolloutRecorder) -> State:
    """What an actor's recorder holds."""
    state = actor.state_dict()
    return {**state, "begun": pack_rows(state["begun"]), "chunk": pack_rows(state["chunk"])}


def unpack_actor(state: State, spec: Spec) -> State:
    """The state of an actor's recorder."""
    rows = {name: unpack_rows(saved_tree(state, name), spec) for name in ("begun", "chunk")}
    return {**state, **rows}


def pack_blocks(blocks: list[EpisodeBlock]) -> State:
    """Episodes that are in no file yet, as rows with their ids."""
    if not blocks:
        return {}
    block = join_blocks(blocks)
    ends = block.starts + block.lengths
    last = np.zeros(len(block.action), np.bool_)
    last[ends] = True
    terminated = np.zeros(len(block.action), np.bool_)
    terminated[ends - 1] = block.terminated
    rows = {**block.observations, "action": block.action, "reward": block.reward, "probability": block.probability}
    rows |= {"last": last, "terminated": terminated, "cut": np.zeros_like(last), "policy": last.view(np.uint8)}
    rows |= {} if block.mask is None else {"mask": block.mask}
    return {"ids": block.ids, "truncated": block.truncated, "rows": pack_rows(rows)}


def unpack_blocks(state: State, spec: Spec, behaviour: str) -> list[EpisodeBlock]:
    """The episodes that `pack_blocks` has packed; ValueError if they are not whole ones of this spec."""
    if not state:
        return []
    ids = msgspec.convert(saved_value(state, "ids"), list[str])
    truncated = saved_array(state, "truncated", "b", (len(ids),))
    rows = unpack_rows(saved_tree(state, "rows"), spec)
    ends = np.flatnonzero(rows["last"])
    lengths = np.diff(ends, prepend=-1) - 1
    if len(ends) != len(ids) or not rows["last"][-1:].all() or (lengths < 1).any():
        raise ValueError("rows: they are not whole episodes")
    block = EpisodeBlock(
        ids=ids,
        behaviours=[behaviour] * len(ids),
        lengths=lengths,
        terminated=rows["terminated"][ends - 1],
        truncated=truncated,
        observations={WHOLE: rows[WHOLE]},
        action=rows["action"],
        reward=rows["reward"],
        probability=rows["probability"],
        mask=rows.get("mask"),
    )
    return [block]
