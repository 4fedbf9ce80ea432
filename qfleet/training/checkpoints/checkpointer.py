"""The state of a run to and from checkpoints."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from qfleet.build.components import Components
from qfleet.data import Array, State
from qfleet.data.state_reader import saved_tree, saved_value
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.files import is_file
from qfleet.plan import flatten
from qfleet.plan.schema import OwnTorso, Plan, SteadyBatch, SteadyRate
from qfleet.plan.secrets import redacted_settings
from qfleet.plan.validate.placement import has_actor_learners
from qfleet.save import Checkpoint, Checkpoints, Link, pack_state, pack_tensors, unpack_state
from qfleet.training.checkpoints.migrations import (
    lacks_values,
    max_file_bytes,
    read_arrays,
    with_new_settings,
    with_spans,
)
from qfleet.training.checkpoints.replay_segments import is_final, pack_rows, restore_rows, segments_of

# Parts of a plan that may change when a run is resumed; eval. is fixed if validation scores change what is learned.
FREE: tuple[str, ...] = ("until.", "eval.", "save.", "log.", "runtime.", "steer.stop_patience", "env.check_bounds")
FREE += ("custom.", "replay.path", "replay.cache_bytes", "replay.disk_bytes")  # a data set is named by its version
PREFILL = "replay.prefill"  # this one only, not what begins like it
MAX_STATE_BYTES = 256 << 20  # counters, generators, half-played episodes, priorities; rows come on top
EVALUATION_SETTINGS = ("eval.every_steps", "eval.episodes", "eval.max_steps")
MAX_ERROR_CHARS = 300  # of a message about malformed state
# The errors that values of another type, shape or size raise.
MALFORMED = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    msgspec.MsgspecError,
)


@dataclass(eq=False)
class Checkpointer:
    """Saves components and train state as checkpoints, and loads them."""

    checkpoints: Checkpoints
    components: Components
    versions: dict[str, str]
    last: Checkpoint | None = None
    previous: Checkpoint | None = None  # the one before the last
    committed_state: State = field(default_factory=dict)  # `stepless_state` of the last checkpoint
    discards_fresh_block: bool = False  # because an older version did not save all of it

    def save(self, step: int, train_state: State, meta: dict[str, Any]) -> Checkpoint:
        """Commit the present state, unless the last checkpoint holds it already."""
        again = self.last is not None and self.last.step == step
        if again and self.last is not None and self.committed_state == self.stepless_state(train_state):
            return self.last
        new = self.checkpoints.commit(step, self.blobs(train_state), {**self.identity(), **meta})
        # Only now: `blobs` reads from the last checkpoint and the one before it while the new one is written.
        self.previous = self.previous if again else self.last
        self.last = new
        self.committed_state = self.stepless_state(train_state)
        return new

    def stepless_state(self, train_state: State) -> State:
        """What can change without a step: the train state, and how learners are synchronised."""
        peers = self.components.peers
        return {"book": train_state, **({} if peers is None else peers.state_dict())}

    def identity(self) -> dict[str, Any]:
        """What a checkpoint belongs to, so that it is not loaded into another run."""
        plan = self.components.plan
        return {
            "versions": self.versions,
            "plan": decisive_settings(plan),
            "spec": as_json(asdict(self.components.spec)),
            "conditions": self.conditions(),
            "replay": plan.save.replay,
        }

    def require_space(self) -> None:
        """Refuse to begin if checkpoints do not fit on the disk even with the replay compressed to a twentieth."""
        learner = self.components.learner
        replay = self.components.batch_source.replay
        weights = sum(array.nbytes for array in (*learner.model_arrays().values(), *learner.optim_arrays().values()))
        num_replays = self.components.plan.learners.num if has_actor_learners(self.components.plan) else 1
        rows = num_replays * replay.store.rows * replay.store.lanes * replay.store.row_bytes
        self.checkpoints.require_space((self.components.plan.save.keep + 1) * (weights + rows // 20))

    def conditions(self) -> dict[str, Any]:
        """What bit-equal numbers depend on besides the plan."""
        runtime = self.components.plan.runtime
        threads = "any" if runtime.parallel == "tasks" else runtime.threads
        numbers = {"precision": runtime.precision, "compile": runtime.compile}
        return {"torch": self.versions.get("torch"), "device": runtime.device, "threads": threads, **numbers}

    def changed_conditions(self) -> list[str]:
        """Conditions that have changed since the last checkpoint was written."""
        before = self.last.meta["conditions"] if self.last is not None else {}
        return [
            f"{name} {before[name]} -> {now}" for name, now in self.conditions().items() if before.get(name, now) != now
        ]

    def blobs(self, train_state: State) -> Iterator[tuple[str, bytes | Link]]:
        """The files of a checkpoint, made one at a time."""
        components = self.components
        yield "model.safetensors", pack_tensors(components.learner.model_arrays())
        yield "optim.safetensors", pack_tensors(components.learner.optim_arrays())
        yield from pack_state({"line": components.state_dict(), "book": train_state}).items()
        if components.plan.save.replay == "full":
            yield from self.replay_files()
            yield from self.peer_files()

    def replay_files(self) -> Iterator[tuple[str, bytes | Link]]:
        """The rows of the replay, most of which are in an earlier checkpoint already."""
        replay = self.components.batch_source.replay
        for segment in segments_of(replay):
            yield segment.name, self.unchanged_file(segment.name) or pack_rows(replay, segment)

    def peer_files(self) -> Iterator[tuple[str, bytes | Link]]:
        """The state of other learners, each in a folder of its own; one that is lost meanwhile is left out."""
        for name, read in self.components.peers.state_files() if self.components.peers is not None else ():
            if (blob := self.unchanged_file(name) or read()) is not None:
                yield name, blob

    def unchanged_file(self, name: str) -> bytes | Link | None:
        """A file from an earlier checkpoint, if its content cannot have changed since.

        It is written twice and linked from then on, each time to the copy of the checkpoint before the last: two
        checkpoints in a row never share a file, so one bad sector damages only one of them.
        """
        if not is_final(name):
            return None
        try:
            if self.previous is not None and name in self.previous.files and is_file(self.previous.path, name):
                return self.previous.link(name)
            return self.last.read(name) if self.last is not None and name in self.last.files else None
        except NoCheckpointError:
            return None

    def load(self, checkpoint: Checkpoint) -> tuple[State, Array]:
        """Load the components; returns the train state and the lanes [B] whose environment could not be re-driven."""
        try:
            self.require_same_run(checkpoint.meta)
            train_state, lost = self.load_files(checkpoint)
        except MALFORMED as error:
            raise malformed(checkpoint, error) from error
        self.last = checkpoint
        self.previous = None
        self.committed_state = self.stepless_state(train_state)
        return train_state, lost

    def require_same_run(self, meta: dict[str, Any]) -> None:
        """Refuse a checkpoint of another plan or environment, or with malformed meta data."""
        require_same_plan(saved_tree(meta, "plan"), self.components.plan)
        require_same("the environment", as_json(asdict(self.components.spec)), saved_tree(meta, "spec"))
        saved_tree(meta, "conditions")
        if saved_value(meta, "replay") not in ("full", "none"):
            raise ValueError("replay: expected full or none")

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Load weights and the optimiser's moments; a torso of the user's own may have changed."""
        learner = self.components.learner
        model = max_file_bytes(learner.model_arrays().values())
        optim = max_file_bytes(learner.optim_arrays().values()) + model
        try:
            learner.load_model_arrays(read_arrays(checkpoint, "model.safetensors", model))
            learner.load_optim_arrays(read_arrays(checkpoint, "optim.safetensors", optim))
        except MALFORMED as error:
            if not isinstance(self.components.plan.net.torso, OwnTorso):
                raise
            raise UsageError(
                f"{checkpoint.path.name} does not fit this run's network: {one_line(error)}",
                "The checkpoint is whole, so the torso is not the one it was trained with.",
                "Resume with the torso of the beginning; the checkpoint was not touched.",
            ) from error

    def load_files(self, checkpoint: Checkpoint) -> tuple[State, Array]:
        """Load every file."""
        components = self.components
        self.load_weights(checkpoint)
        store = components.batch_source.replay.store
        max_bytes = MAX_STATE_BYTES + store.rows * store.lanes * store.row_bytes
        state = unpack_state({name: checkpoint.read(name, max_bytes) for name in ("state.json", "state.safetensors")})
        with_replay = checkpoint.meta["replay"] == "full"
        self.discards_fresh_block = with_replay and lacks_values(state["line"]["feed"])
        with_replay = with_replay and not self.discards_fresh_block
        if with_replay:
            replay = with_spans(state["line"]["feed"]["replay"], components.batch_source.replay)
            state["line"]["feed"]["replay"] = replay
            names = [name for name in checkpoint.files if name.startswith("replay/")]
            restore_rows(components.batch_source.replay.store, names, checkpoint.read, replay)
        lost = components.load_state_dict(state["line"], with_replay=with_replay)
        if components.peers is not None:
            components.peers.load_state_files(
                [name for name in checkpoint.files if name.startswith("bundles/")], checkpoint.read
            )
        return state["book"], lost


def malformed(checkpoint: Checkpoint, error: BaseException) -> NoCheckpointError:
    """A checkpoint with the right hashes that cannot have been written by this run; it stays in place."""
    return NoCheckpointError(
        f"{checkpoint.path.name} is malformed: {one_line(error)}",
        "Its files have the hashes that were recorded, but what they hold is no state of this run.",
        "Move that folder away to go on from an older checkpoint, or restore the run folder from a copy.",
    )


def one_line(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]


def decisive_settings(plan: Plan) -> dict[str, Any]:
    """The settings that a checkpoint's numbers depend on, as plain JSON values."""
    fixed = EVALUATION_SETTINGS if evaluation_decides(plan) else ()
    values = as_json(redacted_settings(flatten(plan)))
    return {p: value for p, value in values.items() if p in fixed or not is_free(p)}


def is_free(path: str) -> bool:
    """May this setting change when a run is resumed?"""
    return path.startswith(FREE) or path == PREFILL


def evaluation_decides(plan: Plan) -> bool:
    """Do validation scores change what is learned?"""
    steer = plan.steer
    return plan.population.num > 1 or steer.learning_rate != SteadyRate() or steer.batch != SteadyBatch()


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """The values after a round trip through JSON."""
    back: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return back


def require_same_plan(saved: dict[str, Any], plan: Plan) -> None:
    """Refuse another plan; evaluation settings are compared only if the checkpoint has them."""
    now = {
        path: value
        for path, value in decisive_settings(plan).items()
        if path in saved or path not in EVALUATION_SETTINGS
    }
    before = as_json(redacted_settings(with_new_settings(saved)))
    require_same("run.toml", now, {path: before[path] for path in before if path in now or not is_free(path)})


def require_same(where: str, now: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse to resume with another plan or environment: saved state would be misread."""
    changed = sorted(path for path in saved.keys() | now.keys() if saved.get(path) != now.get(path))
    if changed:
        path = changed[0]
        raise UsageError(
            f"{where} says {path}={now.get(path)}, but the run was trained with {path}={saved.get(path)}",
            f"A run goes on with the plan and environment it began with; changed: {', '.join(changed)}.",
            "Put the old value back, or start a new run with --from to keep the weights.",
        )
