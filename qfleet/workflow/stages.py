"""The stages of a workflow. Each is named by the hash of its inputs, so one that is done is never done again.

Data sets and runs are in folders whose names end with that hash. A stage that was killed leaves a data set without a
manifest, which is written again, or a run that is resumed.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from qfleet.api import load, resume, train
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.datasets.inspect import summarize_dataset, validate_dataset
from qfleet.datasets.prepare import PreparePlan, parse_split, prepare_dataset
from qfleet.errors import StorageError
from qfleet.files import is_file, replace_inside
from qfleet.nets import state_arrays
from qfleet.plan.compose import compose
from qfleet.plan.schema import Plan
from qfleet.run_object import Run
from qfleet.training.checkpoints.saved_policy import load_policy
from qfleet.training.evaluation.on_data import OnDataSettings, evaluate_on_data, load_for_data
from qfleet.watch import find_run, read_json
from qfleet.workflow.collecting import collect, parse_behaviour
from qfleet.workflow.plan import WorkflowPlan
from qfleet.workflow.report import write_report

HASH_CHARS = 12
WORKFLOW = "workflow"  # how messages name the file
Say = Callable[[str], object]
Result = TypeVar("Result")


@dataclass(eq=False)
class Workflow:
    """A workflow in its folder."""

    plan: WorkflowPlan
    folder: Path
    say: Say
    stages: list[dict[str, Any]] = field(default_factory=list)

    def do(self, name: str, inputs: Any, work: Callable[[str], tuple[Result, bool]]) -> Result:
        """Do a stage; `work` gets the hash of its inputs, and returns its result and whether it was there already."""
        key = hash_of({"stage": name, "inputs": inputs, "qfleet": version("qfleet")})
        began = time.monotonic()
        result, skipped = work(key)
        seconds = round(time.monotonic() - began, 3)
        self.stages.append({"stage": name, "inputs": key, "skipped": skipped, "seconds": seconds})
        self.say(f"{name:<9} {'done before' if skipped else f'{seconds:.1f} s'}")
        return result

    def collect(self) -> Dataset:
        """The data set that the workflow begins with."""
        stage = self.plan.collect
        if stage is None:
            return self.do("open", self.plan.data, lambda key: (open_dataset(str(self.plan.data)), True))
        behaviour = parse_behaviour(stage.policy, None, find_run)
        inputs = {"env": self.plan.env, "collect": msgspec.to_builtins(stage), "weights": weights_hash(behaviour.run)}
        plan = compose(file=WORKFLOW, tables={"env": {"id": self.plan.env}, "seed": stage.seed}).plan

        def work(url: str) -> None:
            collect(plan, url, behaviour, episodes=stage.episodes, steps=stage.steps)

        return self.do("collect", inputs, lambda key: self.made(f"collected-{key}", work))

    def validate(self, dataset: Dataset) -> None:
        """Refuse a data set that breaks a rule; it is checked every time."""

        def work(key: str) -> tuple[None, bool]:
            if problems := validate_dataset(dataset):
                raise StorageError(
                    f"{dataset.place.url} breaks {len(problems)} rules of the format",
                    f"The first: {problems[0].place}: {problems[0].text}.",
                    "See `qfleet data validate`.",
                )
            return None, False

        self.do("validate", dataset.version, work)

    def prepare(self, dataset: Dataset) -> Dataset:
        """The data set with its splits."""
        stage = self.plan.prepare
        rule = parse_split(stage.split, stage.salt)
        inputs = {"data": dataset.version, "prepare": msgspec.to_builtins(stage)}

        def work(url: str) -> None:
            prepare_dataset(dataset, url, PreparePlan(rule))

        return self.do("prepare", inputs, lambda key: self.made(f"prepared-{key}", work))

    def made(self, name: str, work: Callable[[str], None]) -> tuple[Dataset, bool]:
        """The data set of this name in the folder, made if it is not there; was it there?"""
        there = is_file(self.folder, f"{name}/manifest.json")
        if not there:
            work(str(self.folder / name))
        return open_dataset(str(self.folder / name)), there

    def learn(self, dataset: Dataset) -> Run:
        """The run that learns from the data set; one that was stopped goes on."""
        plan = self.learning_plan(dataset)
        inputs = {"data": dataset.version, "learn": self.plan.learn, "env": self.plan.env}
        return self.do("learn", inputs, lambda key: self.trained(plan, f"learned-{key}"))

    def trained(self, plan: Plan, name: str) -> tuple[Run, bool]:
        """The run of this name, trained to its end; was it at its end already?"""
        status = read_json(self.folder / name / "status.json") if is_file(self.folder, f"{name}/status.json") else {}
        if status.get("state") == "done":
            return load(self.folder / name), True
        if status:
            return resume(self.folder / name), False
        return train(plan, out=self.folder, name=name), False

    def evaluate(self, run: Run, dataset: Dataset) -> dict[str, Any] | None:
        """What recorded test episodes say about the policy; None without a test split."""
        if not dataset.files("test"):
            return None
        stage = self.plan.judging
        settings = OnDataSettings("test", stage.epsilon, stage.seed, stage.episodes, stage.updates)
        inputs = {"data": dataset.version, "run": run.path.name, "judge": msgspec.to_builtins(stage)}

        def work(key: str) -> tuple[dict[str, Any], bool]:
            name = f"judged-{key}.json"
            if is_file(self.folder, name):
                return read_json(self.folder / name), True
            plan, policy = load_for_data(run.path, dataset)
            found = evaluate_on_data(plan, policy, dataset, settings)
            replace_inside(self.folder, name, msgspec.json.encode(found))
            return found, False

        return self.do("judge", inputs, work)

    def learning_plan(self, dataset: Dataset) -> Plan:
        """The plan of the run."""
        tables = dict(self.plan.learn)
        tables["env"] = {**tables.get("env", {}), "id": self.plan.env}
        tables["replay"] = {**tables.get("replay", {}), "type": "dataset", "path": dataset.place.url}
        return compose(file=WORKFLOW, tables=tables).plan


def run_workflow(plan: WorkflowPlan, folder: Path, say: Say = lambda text: None) -> dict[str, Any]:
    """Do every stage that is not done, and write the report; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    workflow = Workflow(plan, folder.absolute(), say)
    collected = workflow.collect()
    workflow.validate(collected)
    prepared = workflow.prepare(collected)
    run = workflow.learn(prepared)
    done = run.status.get("state") == "done"  # a run that was stopped has no final policy yet
    judged = workflow.evaluate(run, prepared) if done else None
    report = {
        "plan": msgspec.to_builtins(plan),
        "stages": workflow.stages,
        "data": summarize_dataset(prepared),
        "run": run.path.name,
        "state": run.status.get("state"),
        "exit_code": run.exit_code,
        "validation": [row for row in run.metrics if row.get("kind") == "eval" and row.get("split") == "validation"],
        "progress": [row for row in run.metrics if row.get("kind") == "progress"],
        "test": run.result(),
        "on_data": judged,
    }
    write_report(folder, report)
    return report


def weights_hash(run: Path | None) -> str:
    """SHA-256 of the best weights of a run: one that learned more has others. Empty without a run."""
    if run is None:
        return ""
    digest = hashlib.sha256()
    for name, array in sorted(state_arrays(load_policy(run).net).items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def hash_of(value: Any) -> str:
    """The first characters of the hash of plain data."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:HASH_CHARS]
