"""What a plan with `replay.type=dataset` leaves open: the version, the end, and how the policy is evaluated."""

from contextlib import closing

import msgspec

from qfleet.build.memory_check import GIB, MEMORY_SHARE, available_bytes
from qfleet.build.worlds import EnvMaker
from qfleet.data import Spec
from qfleet.datasets.format import DataFile, Dataset, open_dataset
from qfleet.datasets.recorded_world import RecordedWorld
from qfleet.envs import VALIDATION, make_world
from qfleet.errors import UsageError
from qfleet.learn.offline.open_shards import memory_note, num_open
from qfleet.learn.offline.windows import dataset_windows
from qfleet.plan.schema import DatasetReplay, Plan
from qfleet.plan.traits import learns_in_epochs
from qfleet.replay import SequenceCut, Store, make_cut, ring_rows


def open_plan_dataset(plan: Plan) -> Dataset:
    """The data set that a plan names."""
    if not isinstance(plan.replay, DatasetReplay):
        raise TypeError("this plan learns from no data set")
    if not plan.replay.path:
        raise UsageError(
            "replay.path is missing",
            "This run learns from a data set: the folder that `qfleet data prepare` has made.",
            "Name it: replay.path=data/prepared",
        )
    return open_dataset(plan.replay.path, plan.replay.version)


def make_recorded_world(plan: Plan) -> RecordedWorld:
    """The world of the plan's data set; refused if it is not the plan's environment."""
    dataset = open_plan_dataset(plan)
    if dataset.manifest.env_id != plan.env.id:
        raise UsageError(
            f"env.id={plan.env.id} is not the environment of {dataset.place.url}",
            f"Its episodes were recorded in {dataset.manifest.env_id}.",
            f"Use env.id={dataset.manifest.env_id}.",
        )
    return RecordedWorld(dataset.manifest)


def resolve_offline(plan: Plan, make: EnvMaker | None = None) -> tuple[Plan, list[str]]:
    """The plan with its data set pinned, its end in steps, and its way of evaluation chosen; and notes."""
    dataset = open_plan_dataset(plan)
    replay = plan.replay
    if not isinstance(replay, DatasetReplay):
        raise TypeError("this plan learns from no data set")
    files = dataset.require_files(replay.split)
    num_steps = sum(file.steps for file in files)
    if not learns_in_epochs(plan):
        require_room(dataset, files, dataset.manifest.spec.spec())
    epoch_steps = steps_per_epoch(plan, dataset, files)
    until = plan.until
    if until.epochs is not None:
        until = msgspec.structs.replace(until, steps=until.epochs * epoch_steps)
    plan = msgspec.structs.replace(plan, replay=pinned(replay, dataset, plan.learners.num), until=until)
    notes = [
        f"data set {dataset.version[:12]}: {num_steps:,} steps of split {replay.split}, "
        f"{until.steps / epoch_steps:.1f} epochs",
    ]
    if learns_in_epochs(plan):
        notes.append(memory_note(files, dataset.manifest.spec.spec(), replay))
    if epoch_steps > num_steps:
        notes.append(f"an epoch learns from {epoch_steps:,} steps: windows overlap (algo.view.stride)")
    plan, more = choose_evaluation(plan, dataset, make)
    return plan, notes + more


def pinned(replay: DatasetReplay, dataset: Dataset, num_learners: int) -> DatasetReplay:
    """The settings with this version of the data set, and an order of steps that another number of learners keeps."""
    mixed = num_open(replay, num_learners)
    return msgspec.structs.replace(replay, path=dataset.place.url, version=dataset.version, open_shards=mixed)


def steps_per_epoch(plan: Plan, dataset: Dataset, files: list[DataFile]) -> int:
    """The steps that an epoch learns from: those in two windows count twice."""
    cut = make_cut(plan.algo)
    if not learns_in_epochs(plan) or not isinstance(cut, SequenceCut):
        return sum(file.steps for file in files)
    return sum(int(windows.num_steps.sum()) for windows in dataset_windows(dataset, files, cut))


def require_room(dataset: Dataset, files: list[DataFile], spec: Spec) -> None:
    """Refuse a data set that is to be in memory as a whole and does not fit."""
    row = Store(spec, 1, 1).row_bytes
    need = row * ring_rows(sum(file.rows for file in files), spec, 1, 1)
    have = available_bytes()
    if need > MEMORY_SHARE * have:
        raise UsageError(
            f"the data set {dataset.place.url} does not fit into memory",
            f"Its rows need {need / GIB:.1f} GiB, and {have / GIB:.1f} GiB are available.",
            "Learn in epochs, which reads files when they are due: leave replay.order.type (or replay.prefill) out.",
        )


def choose_evaluation(plan: Plan, dataset: Dataset, make: EnvMaker | None) -> tuple[Plan, list[str]]:
    """Evaluate in the world if it can be made here, else on recorded episodes of the other splits."""
    on = plan.eval.on
    notes = []
    if on != "data":
        missing = world_problem(plan, dataset.manifest.spec.spec(), make)
        if missing is not None and on == "world":
            raise missing
        on = "world" if missing is None else "data"
        if missing is not None:
            notes.append(f"evaluation is by recorded episodes only: {missing.what}")
    plan = msgspec.structs.replace(plan, eval=msgspec.structs.replace(plan.eval, on=on))
    return (plan, notes) if on == "world" else with_recorded_splits(plan, dataset, notes)


def with_recorded_splits(plan: Plan, dataset: Dataset, notes: list[str]) -> tuple[Plan, list[str]]:
    """The plan without evaluations on splits that the data set does not have."""
    changes: dict[str, int] = {}
    for split, field in (("validation", "episodes"), ("test", "test_episodes")):
        if getattr(plan.eval, field) and not dataset.files(split):  # type: ignore[arg-type]
            changes[field] = 0
            notes.append(f"eval.{field}=0: the data set has no split {split}")
    return msgspec.structs.replace(plan, eval=msgspec.structs.replace(plan.eval, **changes)), notes


def world_problem(plan: Plan, spec: Spec, make: EnvMaker | None) -> UsageError | None:
    """Why the policy cannot be evaluated in its world here; a world with other spaces is an error."""
    try:
        with closing(make_world(plan.env, seed=plan.seed, stream=VALIDATION, num=1, make=make)) as world:
            found = world.spec
    except UsageError as error:
        return error
    if found != spec:
        raise UsageError(
            f"{plan.env.id} has other spaces here than in the data set",
            f"Observations {found.input_shape} {found.dtype} and actions {found.actions}, "
            f"not {spec.input_shape} {spec.dtype} and {spec.actions}.",
            "Install the version of the environment that the data were recorded in, or set eval.on=data.",
        )
    return None
