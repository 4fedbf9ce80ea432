"""The keeper: a run at rest to and from checkpoints."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from qfleet.build.components import Components, together
from qfleet.data import Array, State
from qfleet.data.state_reader import saved_tree, saved_value
from qfleet.errors import NoCheckpointError, UsageError
from qfleet.files import is_file
from qfleet.plan import flatten
from qfleet.plan.schema import OwnTorso, Plan, SteadyBatch, SteadyRate
from qfleet.plan.secrets import hidden_settings
from qfleet.plan.validate.placement import has_bundles
from qfleet.save import (
    Checkpoint,
    Checkpoints,
    Link,
    pack_state,
    pack_tensors,
    unpack_state,
)
from qfleet.training.checkpoints.migrations import arrays_in, completed, lacks_values, room_for, with_spans
from qfleet.training.checkpoints.replay_segments import is_settled, packed_rows, restore_rows, segments_of

# Parts of a plan that may change while a run goes on; what validation decides fixes how it is done.
FREE = ("until.", "eval.", "save.", "log.", "runtime.", "steer.stop_patience", "env.check_bounds")
MOST_STATE_BYTES = 256 << 20  # counters, generators, half-played episodes, priorities; rows come on top
JUDGING = ("eval.every_steps", "eval.episodes", "eval.max_steps")
MOST_SAID = 300  # characters of what is malformed
# What values of another type, shape or size lead to.
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


class Checkpointer:
    """Saves a line into a run's checkpoints and brings it back."""

    def __init__(self, checkpoints: Checkpoints, line: Components, versions: dict[str, str]) -> None:
        self.checkpoints = checkpoints
        self.line = line
        self.versions = versions
        self.last: Checkpoint | None = None
        self.previous: Checkpoint | None = None  # the one before the last
        self.told: State = {}  # by the last checkpoint
        self.begun_anew = False  # a block of fresh experience, because an older version had not kept all of it

    def save(self, step: int, train_state: State, meta: dict[str, Any]) -> Checkpoint:
        """Commit everything as it is now, unless that is done already."""
        again = self.last is not None and self.last.step == step
        if again and self.last is not None and self.told == self.tells(train_state):
            return self.last
        new = self.checkpoints.commit(step, self.blobs(train_state), {**self.identity(), **meta})
        # Only now: `blobs` reads from the last checkpoint and the one before it while the new one is written.
        self.previous = self.previous if again else self.last
        self.last, self.told = new, self.tells(train_state)
        return new

    def tells(self, train_state: State) -> State:
        """What can be another one although no step was made: the book, and how learners agree."""
        return {"book": train_state} if self.line.peers is None else {"book": train_state, **together(self.line.peers)}

    def identity(self) -> dict[str, Any]:
        """What a checkpoint says about itself, so that it is not read as something else."""
        plan = self.line.plan
        return {
            "versions": self.versions,
            "plan": decisive(plan),
            "spec": as_json(asdict(self.line.spec)),
            "conditions": self.conditions(),
            "replay": plan.save.replay,
        }

    def require_space(self) -> None:
        """Refuse to begin where checkpoints cannot fit even if the replay packs to a twentieth."""
        learner = self.line.learner
        replay = self.line.batch_source.replay
        weights = sum(array.nbytes for array in (*learner.model_arrays().values(), *learner.optim_arrays().values()))
        bundles = self.line.plan.learners.num if has_bundles(self.line.plan) else 1
        rows = bundles * replay.store.rows * replay.store.lanes * replay.store.row_bytes
        self.checkpoints.require_space((self.line.plan.save.keep + 1) * (weights + rows // 20))

    def conditions(self) -> dict[str, Any]:
        """What bit-equal numbers depend on besides the plan."""
        runtime = self.line.plan.runtime
        numbers = {"precision": runtime.precision, "compile": runtime.compile}
        return {"torch": self.versions.get("torch"), "device": runtime.device, "threads": runtime.threads, **numbers}

    def changed_conditions(self) -> list[str]:
        """What is no longer as it was when the last checkpoint was written."""
        before = self.last.meta["conditions"] if self.last is not None else {}
        return [
            f"{name} {before[name]} -> {now}" for name, now in self.conditions().items() if before.get(name, now) != now
        ]

    def blobs(self, train_state: State) -> Iterator[tuple[str, bytes | Link]]:
        """The files of a checkpoint, made one at a time."""
        line = self.line
        yield "model.safetensors", pack_tensors(line.learner.model_arrays())
        yield "optim.safetensors", pack_tensors(line.learner.optim_arrays())
        yield from pack_state({"line": line.state_dict(), "book": train_state}).items()
        if line.plan.save.replay == "full":
            yield from self.segments()
            yield from self.bundles()

    def segments(self) -> Iterator[tuple[str, bytes | Link]]:
        """Replay rows, most of which are in an earlier checkpoint already."""
        replay = self.line.batch_source.replay
        for segment in segments_of(replay):
            yield segment.name, self.kept(segment.name) or packed_rows(replay, segment)

    def bundles(self) -> Iterator[tuple[str, bytes | Link]]:
        """What other learners remember, each in a folder of its own; one that is lost on the way is left out."""
        for name, read in self.line.peers.archive() if self.line.peers is not None else ():
            if (blob := self.kept(name) or read()) is not None:
                yield name, blob

    def kept(self, name: str) -> bytes | Link | None:
        """A segment as an earlier checkpoint holds it, if nothing has happened to it since.

        It is written twice and linked from then on, each time to the copy of the checkpoint before the last: two
        checkpoints in a row never share a file, so one bad sector spoils one of them.
        """
        if not is_settled(name):
            return None
        try:
            if self.previous is not None and name in self.previous.files and is_file(self.previous.path, name):
                return self.previous.link(name)
            return self.last.read(name) if self.last is not None and name in self.last.files else None
        except NoCheckpointError:
            return None

    def load(self, checkpoint: Checkpoint) -> tuple[State, Array]:
        """Bring the line back; returns the book and the lanes [B] whose world could not be re-driven."""
        try:
            self.require_fitting(checkpoint.meta)
            train_state, lost = self.unpack(checkpoint)
        except MALFORMED as error:
            raise malformed(checkpoint, error) from error
        self.last, self.previous, self.told = checkpoint, None, self.tells(train_state)
        return train_state, lost

    def require_fitting(self, meta: dict[str, Any]) -> None:
        """Refuse another plan or environment, and what a checkpoint cannot say of itself."""
        require_same_plan(saved_tree(meta, "plan"), self.line.plan)
        require_same("the environment", as_json(asdict(self.line.spec)), saved_tree(meta, "spec"))
        saved_tree(meta, "conditions")
        if saved_value(meta, "replay") not in ("full", "none"):
            raise ValueError("replay: expected full or none")

    def unpack_weights(self, checkpoint: Checkpoint) -> None:
        """Weights and moments; a torso of the user's own may be another one than it was."""
        learner = self.line.learner
        model = room_for(learner.model_arrays().values())
        optim = room_for(learner.optim_arrays().values()) + model
        try:
            learner.load_model_arrays(arrays_in(checkpoint, "model.safetensors", model))
            learner.load_optim_arrays(arrays_in(checkpoint, "optim.safetensors", optim))
        except MALFORMED as error:
            if not isinstance(self.line.plan.net.torso, OwnTorso):
                raise
            raise UsageError(
                f"{checkpoint.path.name} does not fit this run's network: {shortened(error)}",
                "The checkpoint is whole, so the torso is not the one it was trained with.",
                "Resume with the torso of the beginning; the checkpoint was not touched.",
            ) from error

    def unpack(self, checkpoint: Checkpoint) -> tuple[State, Array]:
        """Every file into its place."""
        line = self.line
        self.unpack_weights(checkpoint)
        store = line.batch_source.replay.store
        rest = MOST_STATE_BYTES + store.rows * store.lanes * store.row_bytes
        state = unpack_state({name: checkpoint.read(name, rest) for name in ("state.json", "state.safetensors")})
        with_replay = checkpoint.meta["replay"] == "full"
        self.begun_anew = with_replay and lacks_values(state["line"]["feed"])
        with_replay = with_replay and not self.begun_anew
        if with_replay:
            replay = with_spans(state["line"]["feed"]["replay"], line.batch_source.replay)
            state["line"]["feed"]["replay"] = replay
            names = [name for name in checkpoint.files if name.startswith("replay/")]
            restore_rows(line.batch_source.replay.store, names, checkpoint.read, replay)
        lost = line.load_state_dict(state["line"], with_replay=with_replay)
        if line.peers is not None:
            line.peers.adopt([name for name in checkpoint.files if name.startswith("bundles/")], checkpoint.read)
        return state["book"], lost


def malformed(checkpoint: Checkpoint, error: BaseException) -> NoCheckpointError:
    """A checkpoint with the right hashes that cannot have been written by this run; it stays in place."""
    return NoCheckpointError(
        f"{checkpoint.path.name} is malformed: {shortened(error)}",
        "Its files have the hashes that were recorded, but what they hold is no state of this run.",
        "Move that folder away to go on from an older checkpoint, or restore the run folder from a copy.",
    )


def shortened(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MOST_SAID]


def decisive(plan: Plan) -> dict[str, Any]:
    """The settings that a checkpoint's numbers depend on, as plain JSON values."""
    fixed = JUDGING if judged_decides(plan) else ()
    values = as_json(hidden_settings(flatten(plan)))
    return {p: value for p, value in values.items() if p in fixed or not p.startswith(FREE)}


def judged_decides(plan: Plan) -> bool:
    """Does what a validation finds change what is learned?"""
    steer = plan.steer
    return plan.population.num > 1 or steer.learning_rate != SteadyRate() or steer.batch != SteadyBatch()


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back."""
    back: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return back


def require_same_plan(saved: dict[str, Any], plan: Plan) -> None:
    """Refuse another plan; how validations were made is not guessed where an older version did not write it down."""
    now = {path: value for path, value in decisive(plan).items() if path in saved or path not in JUDGING}
    before = as_json(hidden_settings(completed(saved)))
    require_same("run.toml", now, {path: before[path] for path in before if path in now or not path.startswith(FREE)})


def require_same(where: str, now: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse to go on under another plan or in another world: what was stored for one would be misread by the other."""
    changed = sorted(path for path in saved.keys() | now.keys() if saved.get(path) != now.get(path))
    if changed:
        path = changed[0]
        raise UsageError(
            f"{where} says {path}={now.get(path)}, but the run was trained with {path}={saved.get(path)}",
            f"A run goes on with the plan and environment it began with; changed: {', '.join(changed)}.",
            "Put the old value back, or start a new run with --from to keep the weights.",
        )
