"""Plans with open settings, and tables with made-up times."""

from collections.abc import Mapping
from typing import Any

import msgspec

from qfleet.build.machine.choices import Choices, choose_settings
from qfleet.build.machine.table import MachineKind, MachineTable
from qfleet.build.resolve import with_runtime
from qfleet.build.threads import choose_parallel, choose_threads
from qfleet.data import Spec
from qfleet.plan.schema import (
    Algo,
    BufferReplay,
    Env,
    InlineRuntime,
    MinatarTorso,
    MlpTorso,
    NatureTorso,
    Net,
    Plan,
    Until,
)

VECTOR = Spec((4,), "float32", (2,))
GRID = Spec((4, 10, 10), "uint8", (3,))
PICTURE = Spec((84, 84), "uint8", (3,), stack=4)
LONG, SHORT = Until(steps=1_000_000), Until(steps=10_000)  # 250,000 updates, and 2,500
NATURE, MINATAR, MLP = Net(torso=NatureTorso()), Net(torso=MinatarTorso()), Net(torso=MlpTorso(sizes=(8, 8)))
KIND = MachineKind("a processor", ("avx512_bf16",), 2, "2.13.0")
# A quiet machine with two cores that multiplies bfloat16.
PICTURE_TIMES = {
    "float32 1 thread": 20e-3,
    "float32 tasks": 15e-3,
    "float32 operations": 14e-3,
    "bfloat16 1 thread": 12e-3,
    "bfloat16 tasks": 9e-3,
    "bfloat16 operations": 8.5e-3,
}
GRID_TIMES = {"float32 1 thread": 1.1e-3, "float32 tasks": 1.3e-3}
VECTOR_TIMES = {"float32 1 thread": 1e-3}


def table_of(kind: MachineKind = KIND, **examples: Mapping[str, float]) -> MachineTable:
    table = MachineTable(kind)
    for name, seconds in examples.items():
        table = table.with_example(name, seconds, "2026-11-19T00:00:00+00:00")
    return table


def plan_of(net: Net = MLP, until: Until = SHORT, **runtime: Any) -> Plan:
    algo, replay = Algo(batch_size=8), BufferReplay(samples_per_insert=2.0)  # an update every four steps
    return Plan(env=Env(id="none"), net=net, algo=algo, replay=replay, until=until, runtime=InlineRuntime(**runtime))


def resolved(plan: Plan) -> Plan:
    """As `resolve` fills it in."""
    plan = with_runtime(plan, device=plan.runtime.device or "cpu", parallel=choose_parallel(plan))
    return with_runtime(plan, threads=choose_threads(plan))


def choose(plan: Plan, spec: Spec, **examples: Mapping[str, float]) -> Choices:
    return choose_settings(resolved(plan), plan.runtime, spec, table_of(**examples))


def replaced(plan: Plan, **changes: Any) -> Plan:
    return msgspec.structs.replace(plan, **changes)
