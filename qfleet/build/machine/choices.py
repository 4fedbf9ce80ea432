"""Settings of updates that the plan leaves open: threads, precision, and whether the update is compiled.

What is known of the processor decides, and what was measured on this machine (`table`). Nothing is measured for
short runs. A run in which a measurement has changed numbers says so: on a machine without it, or with another one, the
same command would give numbers that differ in their last digits. `run.toml` holds what was chosen, and a run that goes
on does not choose again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from qfleet.build.machine.table import (
    COMPILED,
    COMPILING,
    GRIDS,
    ONE_THREAD,
    OPERATIONS,
    PICTURES,
    TASKS,
    VECTORS,
    MachineTable,
    Seconds,
    read_table,
)
from qfleet.build.resolve import is_picture, with_runtime
from qfleet.build.threads import choose_threads, most_threads, num_other_processes
from qfleet.data import Spec
from qfleet.learn.compiled_update import why_not_compilable
from qfleet.plan import total_updates
from qfleet.plan.schema import (
    ConvTorso,
    ImpalaTorso,
    InlineRuntime,
    MinatarTorso,
    MlpTorso,
    NatureTorso,
    NoMemory,
    Plan,
    ProcessesRuntime,
    RayRuntime,
    StepsView,
)
from qfleet.system.cores import machine_cores, usable_cores

Precision = Literal["float32", "bfloat16"]
Runtime = InlineRuntime | ProcessesRuntime | RayRuntime
Show = Callable[[str], object]

# Torsos whose updates are computed in bfloat16 where the processor multiplies it; with () no update is.
BFLOAT16_TORSOS = (NatureTorso, ConvTorso, ImpalaTorso)
MIN_PICTURE_PIXELS = 36  # high and wide; with smaller pictures the arithmetic is not what takes the time
MAX_SMALL_WIDTH = 512  # of a fully connected layer, and of a batch: a larger update gains nothing from a compiler
MIN_UPDATES = 50_000  # a run with fewer is not worth a measurement or a compiler
BFLOAT16_SPEEDUP = 1.1  # that bfloat16 must reach where it was measured, because it costs digits
# What divided operations must reach: their numbers depend on the number of threads, and other programs disturb them.
OPERATIONS_SPEEDUP = 1.25


@dataclass
class Choices:
    """The chosen settings of `runtime`, notes about them, and which of them a measurement decided."""

    settings: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)


def choose_machine_settings(
    plan: Plan, given: Runtime, spec: Spec, show: Show = lambda text: None
) -> tuple[Plan, list[str], list[str]]:
    """The plan with the open runtime settings chosen, notes about them, and why the run is not exact, if so.

    `plan` is resolved; `given` is what its author has set.
    """
    table = read_table()
    if is_worth_measuring(plan, given, spec, table):
        from qfleet.build.machine.measurement import measure_for_run  # most runs measure nothing

        table = measure_for_run(table, example_of(plan, spec) or "", total_updates(plan), show)
    choices = choose_settings(plan, given, spec, table)
    return with_runtime(plan, **choices.settings), choices.notes, measured_reason(choices)


def choose_settings(plan: Plan, given: Runtime, spec: Spec, table: MachineTable) -> Choices:
    """What the author of the plan has set, and for the rest what fits this machine."""
    choices = Choices()
    plan = with_runtime(plan, compile=given.compile, precision=given.precision)
    rows = table.seconds(example_of(plan, spec))
    # Compiling goes first: it costs no digits, and what is computed in bfloat16 is not compiled.
    choose_compile(plan, rows, choices)
    choose_precision(with_runtime(plan, **choices.settings), spec, rows, choices)
    choose_division(with_runtime(plan, **choices.settings), given, rows, choices)
    return choices


def measured_reason(choices: Choices) -> list[str]:
    """Why the same command may give other numbers elsewhere: a measurement chose what numbers depend on."""
    if not choices.measured:
        return []
    found = settings_text({name: choices.settings[name] for name in choices.measured})
    return [f"a measurement of this machine chose {found}; to repeat this run, train with --plan and its run.toml"]


def settings_text(settings: Mapping[str, object]) -> str:
    """Settings of `runtime` as on a command line."""
    values = {name: msgspec.json.encode(value).decode().strip('"') for name, value in settings.items()}
    return ", ".join(f"runtime.{name}={value}" for name, value in values.items())


def example_of(plan: Plan, spec: Spec) -> str | None:
    """The example of the table that an update of this plan is like, if any."""
    torso = plan.net.torso
    plain = isinstance(plan.net.memory, NoMemory) and isinstance(plan.algo.view, StepsView) and plan.custom.head is None
    if not plain or torch.device(plan.runtime.device or "cpu").type != "cpu":
        return None
    if isinstance(torso, NatureTorso | ConvTorso | ImpalaTorso):
        return PICTURES if is_picture(spec, MIN_PICTURE_PIXELS) else None
    if isinstance(torso, MinatarTorso):
        return GRIDS
    small = isinstance(torso, MlpTorso) and max((*torso.sizes, plan.algo.batch_size)) <= MAX_SMALL_WIDTH
    return VECTORS if small else None


def is_worth_measuring(plan: Plan, given: Runtime, spec: Spec, table: MachineTable) -> bool:
    """Is the run long, does it leave open what a measurement would decide, and does the table not hold it yet?

    A member of a sweep does not measure: the others would disturb it.
    """
    example = example_of(plan, spec)
    if example is None or not is_long(plan) or usable_cores() < machine_cores():
        return False
    rows = table.seconds(example)
    if example == PICTURES:
        return not rows and None in (given.threads, given.precision)
    if may_compile(plan, given.compile) and COMPILING not in rows:
        return True
    return example == GRIDS and given.threads is None and not rows


def is_long(plan: Plan) -> bool:
    """Does the run have enough updates for a measurement to pay off?"""
    return total_updates(plan) >= MIN_UPDATES


def may_compile(plan: Plan, given: bool | None) -> bool:
    """Is it open whether the update is compiled? Larger convolutions are faster as they are.

    A run that ends at a score may be over before it has saved the seconds that compiling takes.
    """
    if plan.until.score is not None:
        return False
    small = isinstance(plan.net.torso, MlpTorso | MinatarTorso)
    on_cpu = torch.device(plan.runtime.device or "cpu").type == "cpu"
    return given is None and small and on_cpu and is_long(plan) and why_not_compilable(plan) is None


def choose_compile(plan: Plan, rows: Seconds, choices: Choices) -> None:
    """Compile if the plan says so and it is possible; if left open, when it saves more time than it costs."""
    given = plan.runtime.compile
    reason = why_not_compilable(plan)
    chosen = given is True and reason is None
    if given and reason is not None:
        choices.notes.append(f"runtime.compile=true has no effect: {reason}")
    if may_compile(plan, given):
        chosen = saves_time(rows, total_updates(plan))
        choices.measured.append("compile")
    if chosen and not given:
        choices.notes.append("update: compiled, as it saves more time than it costs")
    if chosen:
        choices.notes.append(
            "update: compiled before the first one, which can take a minute when it is new on this machine"
        )
    choices.settings["compile"] = chosen


def saves_time(rows: Seconds, updates: int) -> bool:
    """Does compiling save more time over the run than it takes?

    It saves the time between operations, which is alike in all small networks.
    """
    plain, compiled, compiling = (rows.get(way) for way in (f"float32 {ONE_THREAD}", COMPILED, COMPILING))
    if plain is None or compiled is None or compiling is None:
        return False
    return updates * (plain - compiled) > compiling


def choose_precision(plan: Plan, spec: Spec, rows: Seconds, choices: Choices) -> None:
    """bfloat16 for pictures where the processor multiplies it, unless it was measured to be no faster; else float32."""
    given = plan.runtime.precision
    if given is not None:
        useless = given == "bfloat16" and not isinstance(plan.algo.view, StepsView)
        if useless:
            choices.notes.append("runtime.precision=bfloat16 has no effect: sequences are computed in float32")
        choices.settings["precision"] = "float32" if useless else given
        return
    fits = isinstance(plan.net.torso, BFLOAT16_TORSOS) and example_of(plan, spec) == PICTURES
    if not fits or plan.runtime.compile or not multiplies_bfloat16():
        choices.settings["precision"] = "float32"
    elif is_no_faster(rows):
        choices.settings["precision"] = "float32"
        choices.measured.append("precision")
    else:
        choices.settings["precision"] = "bfloat16"
        choices.notes.append("update: in bfloat16, which this processor multiplies")


def is_no_faster(rows: Seconds) -> bool:
    """Was bfloat16 measured, and not clearly faster than float32, each made in its fastest way?"""
    full, half = (
        [seconds for way, seconds in rows.items() if way.startswith(name)] for name in ("float32", "bfloat16")
    )
    return bool(full and half) and min(half) * BFLOAT16_SPEEDUP > min(full)


def multiplies_bfloat16() -> bool:
    """Does the processor multiply bfloat16 itself? Where it does not, it is many times slower."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


def choose_division(plan: Plan, given: Runtime, rows: Seconds, choices: Choices) -> None:
    """How many threads an update has, and how they divide it."""
    precision = plan.runtime.precision or "float32"
    one, tasks, operations = (rows.get(f"{precision} {way}") for way in (ONE_THREAD, TASKS, OPERATIONS))
    parallel = plan.runtime.parallel
    threads = choose_threads(with_runtime(plan, threads=given.threads))
    if given.threads is None and parallel == "tasks" and one is not None and tasks is not None:
        threads = most_threads(plan) if tasks < one else 1
        quick = operations is not None and operations * OPERATIONS_SPEEDUP < min(one, tasks)
        if quick and given.parallel is None and has_the_machine(plan):
            parallel = "operations"
            threads = machine_cores()
            choices.measured += ["parallel", "threads"]
    choices.settings |= {"parallel": parallel, "threads": threads}


def has_the_machine(plan: Plan) -> bool:
    """Does one learner alone compute, on every core, as it did while it was measured?"""
    return usable_cores() == machine_cores() and plan.learners.num == 1 and num_other_processes(plan) == 0


def chosen_text(choices: Choices, names: Iterable[str] = ("precision", "parallel", "threads", "compile")) -> str:
    """The chosen settings in a line."""
    return settings_text({name: choices.settings[name] for name in names})
