"""The stages of a workflow. Each is named by the hash of its inputs, so one that is done is never done again.

Data sets and runs are in folders whose names end with that hash. A stage that was killed leaves a data set without a
manifest, which is written again, or a run that is resumed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from qfleet.datasets.convert import Importer, import_dataset, make_importer
from qfleet.datasets.convert.minari_import import minari_folder
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.datasets.format.manifest import FORMAT, MANIFEST
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import prepare_dataset
from qfleet.datasets.storage import open_place
from qfleet.distributed.local_run import is_on_ray
from qfleet.distributed.preparing.options import PrepareOptions
from qfleet.errors import StorageError
from qfleet.files import is_file, replace_inside
from qfleet.plan import plan_hash
from qfleet.plan.local_paths import local_path
from qfleet.plan.schema import Plan
from qfleet.run_object import Run
from qfleet.save.lock import Locked, hold_run
from qfleet.training.evaluation.on_data import OnDataSettings, evaluate_on_data, load_for_data
from qfleet.watch import Watcher, find_run, read_json
from qfleet.workflow.collecting import Behaviour, collect, parse_mixture, require_amount
from qfleet.workflow.inputs import files_hash, hash_of, weights_hash
from qfleet.workflow.learning import first_parameters, learn
from qfleet.workflow.learning_plan import collecting_plan, learning_plan
from qfleet.workflow.plan import GivenWorkflow, PrepareStage, WorkflowPlan
from qfleet.workflow.progress import Say, Show, StageProgress
from qfleet.workflow.report import make_report, write_report

LOCKED = Locked(
    "workflow.lock", "workflow", "Two of them would do the same stages at once.", "choose another folder with --out"
)
SECONDS = "seconds.json"  # that each stage took
LATER = "a data set that is made later"
Result = TypeVar("Result")


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Console:
    """Where a workflow says what it does, and how its run is watched."""

    say: Say = silent
    note: Say = silent  # what somebody should know, even if the rest is not shown
    make_watcher: Callable[[], Watcher | None] = lambda: None


@dataclass(eq=False)
class Workflow:
    """A workflow in its folder; with a `store` its data sets are there."""

    given: GivenWorkflow
    folder: Path
    console: Console
    store: str
    command: list[str]
    stages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def plan(self) -> WorkflowPlan:
        """The tables of all stages."""
        return self.given.plan

    def do(self, name: str, inputs: Any, work: Callable[[str], tuple[Result, bool]]) -> Result:
        """Do a stage; `work` gets the hash of its inputs, and returns its result and whether it was there already."""
        key = hash_of({"stage": name, "inputs": inputs})
        began = time.monotonic()
        result, skipped = work(key)
        seconds = self.known_seconds(f"{name}-{key}", round(time.monotonic() - began, 3), skipped)
        self.stages.append({"stage": name, "inputs": key, "skipped": skipped, "seconds": seconds})
        self.console.say(f"{name:<9} {'done before' if skipped else f'done in {seconds:.1f} s'}")
        return result

    def known_seconds(self, stage: str, seconds: float, skipped: bool) -> float:
        """How long a stage took: one that was done before, when it was done."""
        known = read_json(self.folder / SECONDS) if is_file(self.folder, SECONDS) else {}
        if skipped:
            return float(known.get(stage, seconds))
        replace_inside(self.folder, SECONDS, msgspec.json.encode({**known, stage: seconds}))
        return seconds

    def progress(self, stage: str, unit: str) -> Show:
        """Called with how much is done, and of how much."""
        progress = StageProgress(stage, self.console.say)
        return lambda done, num: progress.show(done, num, unit)

    def begin(self) -> Dataset:
        """The data set that the workflow begins with."""
        if self.plan.collect is not None:
            return self.collect()
        if self.plan.importing is not None:
            return self.read_foreign()
        url = str(self.plan.data)
        return self.do("open", url, lambda key: (open_dataset(url), True))

    def collect(self) -> Dataset:
        """The data set that a policy has recorded."""
        stage = self.plan.collect
        if stage is None:
            raise TypeError("this workflow collects nothing")
        behaviours = self.behaviours()
        plan = collecting_plan(self.given)
        inputs = {"env": msgspec.to_builtins(plan.env), "collect": msgspec.to_builtins(stage)}
        inputs["weights"] = [weights_hash(each.run) for each in behaviours]
        by_steps = stage.steps is not None
        show = self.progress("collect", "steps" if by_steps else "episodes")

        def work(url: str) -> None:
            def told(episodes: int, steps: int) -> None:
                show(steps if by_steps else episodes, (stage.steps if by_steps else stage.episodes) or 0)

            amount = {"episodes": stage.episodes, "steps": stage.steps, "cut": stage.cut}
            collect(plan, url, behaviours, **amount, show=told, warn=self.console.note)  # type: ignore[arg-type]

        return self.do("collect", [FORMAT, inputs], lambda key: self.made(f"collected-{key}", work))

    def behaviours(self) -> list[Behaviour]:
        """Whose episodes are collected."""
        stage = self.plan.collect
        return [] if stage is None else parse_mixture(stage.policies, None, find_run)

    def read_foreign(self) -> Dataset:
        """The data set that was imported."""
        stage = self.plan.importing
        if stage is None:
            raise TypeError("this workflow imports nothing")
        inputs = {"files": files_hash(local_path(stage.source)), "import": msgspec.to_builtins(stage)}
        progress = StageProgress("import", self.console.say)

        def work(url: str) -> None:
            importer = self.importer()
            import_dataset(importer, url, lambda episodes, steps: progress.show(episodes, None, "episodes"))
            for note in importer.notes():
                self.console.note(note)

        inputs["env"] = self.plan.env
        return self.do("import", [FORMAT, inputs], lambda key: self.made(f"imported-{key}", work))

    def importer(self) -> Importer:
        """What reads the files that are imported."""
        stage = self.plan.importing
        if stage is None:
            raise TypeError("this workflow imports nothing")
        columns = [f"{role}={name}" for role, name in stage.columns.items()]
        names_env = stage.format == "minari" or (stage.format is None and minari_folder(local_path(stage.source)))
        env = "" if names_env else self.plan.env
        return make_importer(stage.source, stage.format, columns, tuple(stage.actions), env)

    def validate(self, dataset: Dataset) -> None:
        """Refuse a data set that breaks a rule; it is checked every time."""

        def work(key: str) -> tuple[None, bool]:
            if problems := validate_dataset(dataset, self.progress("validate", "files")):
                raise StorageError(
                    f"{dataset.place.url} breaks {len(problems)} rules of the format",
                    f"The first: {problems[0].place}: {problems[0].text}.",
                    "Remove the folder if a stage of this workflow made it, else copy it again; then start again.",
                )
            return None, False

        self.do("validate", dataset.version, work)

    def prepare(self, dataset: Dataset) -> Dataset:
        """The data set with its splits; one that has them is used as it is, unless a table says how to split it."""
        if self.plan.prepare is None and dataset.files("train"):
            return dataset
        stage = self.plan.prepare or PrepareStage()
        options = PrepareOptions(**msgspec.structs.asdict(stage))
        keys = "" if stage.keys is None else files_hash(local_path(stage.keys))
        inputs = {"data": dataset.version, "prepare": without_engine(stage), "keys": keys}
        show = self.progress("prepare", "files")

        def work(url: str) -> None:
            prepare_dataset(dataset, url, options.plan(options.capacities()), options.make_engine(), show)

        return self.do("prepare", [FORMAT, inputs], lambda key: self.made(f"prepared-{key}", work))

    def made(self, name: str, work: Callable[[str], None]) -> tuple[Dataset, bool]:
        """The data set of this name, made if it is not there; was it there?"""
        url = f"{self.store}/{name}"
        there = open_place(url).exists(MANIFEST)
        if not there:
            work(url)
        return open_dataset(url), there

    def learn(self, dataset: Dataset) -> Run:
        """The run that learns from the data set; one that was stopped goes on."""
        plan = learning_plan(self.given, dataset.place.url)
        inputs = {"data": dataset.version, "plan": plan_hash(learning_plan(self.given, LATER))}
        inputs["qfleet"] = version("qfleet")

        def work(key: str) -> tuple[Run, bool]:
            return learn(plan, self.folder, f"learned-{key}", self.console.make_watcher(), self.command)

        run = self.do("learn", inputs, work)
        found = first_parameters(run)
        if found:
            learners = f"{found['learners']} learners" if found["learners"] > 1 else "the learner"
            self.console.say(f"          {learners} began with parameters {found['sha256']}")
        return run

    def evaluate(self, run: Run, dataset: Dataset) -> dict[str, Any] | None:
        """What recorded test episodes say about the policy; None without a test split."""
        if not dataset.files("test"):
            return None
        stage = self.plan.judging
        settings = OnDataSettings("test", stage.epsilon, stage.seed, stage.episodes, stage.updates)
        inputs = {"data": dataset.version, "run": run.path.name, "judge": msgspec.to_builtins(stage)}
        inputs["qfleet"] = version("qfleet")

        def work(key: str) -> tuple[dict[str, Any], bool]:
            name = f"judged-{key}.json"
            if is_file(self.folder, name):
                return read_json(self.folder / name), True
            plan, policy = load_for_data(run.path, dataset)
            found = evaluate_on_data(plan, policy, dataset, settings)
            replace_inside(self.folder, name, msgspec.json.encode(found))
            return found, False

        return self.do("judge", inputs, work)


def without_engine(stage: PrepareStage) -> dict[str, Any]:
    """What the result depends on: who does the work changes nothing."""
    fields = msgspec.to_builtins(stage)
    return {name: value for name, value in fields.items() if name not in ("engine", "jobs")}


def require_preparable(stage: PrepareStage) -> None:
    """Refuse mistakes in the table of the stage, and an engine that is not installed."""
    options = PrepareOptions(**msgspec.structs.asdict(stage))
    options.plan(() if options.is_measured else options.capacities())
    options.make_engine()


def require_possible(workflow: Workflow) -> Plan:
    """Refuse mistakes in the tables of all stages before the first one begins; returns the plan of the run."""
    stage = workflow.plan.collect
    if stage is not None:
        require_amount(stage.episodes, stage.steps, stage.cut)
        workflow.behaviours()
        collecting_plan(workflow.given)
    require_preparable(workflow.plan.prepare or PrepareStage())
    plan = learning_plan(workflow.given, LATER)
    is_on_ray(plan)  # an error if Ray is not installed
    return plan


def run_workflow(
    given: GivenWorkflow,
    folder: Path,
    console: Console | None = None,
    *,
    store: str | None = None,
    command: list[str] | None = None,
) -> dict[str, Any]:
    """Do every stage that is not done, and write the report; returns it."""
    folder = folder.absolute()
    workflow = Workflow(given, folder, console or Console(), store or str(folder), command or [])
    require_possible(workflow)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_run(folder, LOCKED):
        first = workflow.begin()
        workflow.validate(first)
        dataset = workflow.prepare(first)
        run = workflow.learn(dataset)
        done = run.status.get("state") == "done"  # a run that was stopped has no final policy yet
        judged = workflow.evaluate(run, dataset) if done else None
        report = make_report(given, workflow.stages, dataset, run, judged)
        write_report(folder, report)
    return report
