"""The table of what was measured on this machine, and what follows from it, as text and as JSON."""

from typing import Any

from qfleet.build.machine.choices import MIN_UPDATES, Choices, choose_settings, settings_text
from qfleet.build.machine.examples import EXAMPLES, TEXTS, example_plan
from qfleet.build.machine.table import (
    CHANNELS_LAST,
    COMPILED,
    COMPILING,
    CONTIGUOUS,
    LAYOUT,
    NEVER_SECONDS,
    ONE_THREAD,
    MachineTable,
    table_file,
)
from qfleet.build.resolve import with_runtime
from qfleet.build.threads import choose_parallel, choose_threads

NOTICEABLE = 1.1  # times as fast


def as_json(table: MachineTable) -> dict[str, Any]:
    """The table, and what a run chooses that leaves everything open."""
    kind = table.kind
    return {
        "machine": {name: getattr(kind, name) for name in kind.__struct_fields__},
        "file": str(table_file(kind)),
        "measured": {
            name: {"what": TEXTS.get(name, name), "at": rows.at, "seconds": dict(rows.seconds)}
            for name, rows in table.examples.items()
        },
        "chosen": {name: choices_for(name, table).settings for name in EXAMPLES},
        "compiled_from_updates": {name: compiled_from_updates(name, table) for name in EXAMPLES},
    }


def machine_text(table: MachineTable) -> str:
    """The kind of machine in a line."""
    kind = table.kind
    plural = "s" * (kind.cores != 1)
    return f"{kind.processor} ({' '.join(kind.instructions)}), {kind.cores} core{plural}, torch {kind.torch}"


def measured_rows(table: MachineTable) -> list[tuple[str, str, str, str]]:
    """What was measured: example, way, time, date."""
    return [
        (TEXTS.get(name, name), way, seconds_text(seconds), rows.at)
        for name, rows in table.examples.items()
        for way, seconds in rows.seconds.items()
    ]


def seconds_text(seconds: float) -> str:
    """A time for people."""
    if seconds >= NEVER_SECONDS:
        return "no compiler"
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def chosen_rows(table: MachineTable) -> list[tuple[str, str]]:
    """What a run chooses that leaves everything open, for each example."""
    return [(TEXTS[name], chosen_text(name, table)) for name in EXAMPLES]


def chosen_text(name: str, table: MachineTable) -> str:
    """What a run like this example chooses."""
    settings = choices_for(name, table).settings
    text = settings_text({key: settings[key] for key in ("precision", "parallel", "threads")})
    updates = compiled_from_updates(name, table)
    return text if updates is None else f"{text}; compiled in runs of {updates:,} updates and more"


def choices_for(name: str, table: MachineTable) -> Choices:
    """What a short run like this example chooses."""
    example = EXAMPLES[name]
    plan = example_plan(example)
    given = plan.runtime
    plan = with_runtime(plan, parallel=choose_parallel(plan))
    plan = with_runtime(plan, threads=choose_threads(plan))
    return choose_settings(plan, given, example.spec, table)


def compiled_from_updates(name: str, table: MachineTable) -> int | None:
    """From how many updates on a run like this example is compiled; None if never."""
    rows = table.seconds(name)
    saved = rows.get(f"float32 {ONE_THREAD}", 0.0) - rows.get(COMPILED, NEVER_SECONDS)
    return max(MIN_UPDATES, int(rows[COMPILING] / saved) + 1) if saved > 0 else None


def remarks(table: MachineTable) -> list[str]:
    """What is unusual about this machine."""
    rows = table.seconds(LAYOUT)
    if rows.get(CONTIGUOUS, NEVER_SECONDS) * NOTICEABLE < rows.get(CHANNELS_LAST, 0.0):
        return ["contiguous pictures are faster here, but qfleet lays them out with channels last: please report it"]
    return []


def short_text(table: MachineTable) -> str:
    """One line for `qfleet doctor`."""
    dates = [rows.at for name, rows in table.examples.items() if name in EXAMPLES]
    if not dates:
        return "not yet; qfleet doctor --measure does, and shows a table"
    found = ", ".join(text for name in EXAMPLES for text in fastest_texts(name, table))
    return f"{min(dates)[:10]}: an update of {found}; table: qfleet doctor --measure"


def fastest_texts(name: str, table: MachineTable) -> list[str]:
    """The fastest way of an example in each precision."""
    rows = table.seconds(name)
    found = []
    for precision in ("bfloat16", "float32"):
        seconds = [value for way, value in rows.items() if way.startswith(precision)]
        found += [f"{EXAMPLES[name].short} in {precision} {seconds_text(min(seconds))}"] if seconds else []
    return found
