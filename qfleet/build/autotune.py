"""Choices that a short measurement makes: threads, precision, and whether the update is compiled.

What was measured is kept in the user's cache, by machine, torch and the shape of the update, so that a run starts at
once and chooses again as it did before. Short runs are not measured for: they take the usual choice. A run whose
choices come from a clock says so from its beginning: another load or an empty cache may lead to other choices, and
these to numbers that differ in their last digits. `run.toml` holds what was chosen.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from qfleet.build.isolated_call import answer_of
from qfleet.data import Array, Batch, Spec
from qfleet.errors import StorageError
from qfleet.learn import Learner, make_learner
from qfleet.learn.compiled_update import cache_folder, why_not_compilable
from qfleet.nets import make_net
from qfleet.plan import total_updates
from qfleet.plan.schema import MinatarTorso, MlpTorso, NoMemory, OwnTorso, Plan, StepsView
from qfleet.watch import write_file

Precision = Literal["float32", "bfloat16"]
Clock = Callable[[], float]
Tell = Callable[[str], object]
LONG_UPDATES = 50_000  # a run with fewer is not worth a measurement
# of the run's expected time, and in all: so long may measuring take
LIMIT_SHARE = 0.02
LIMIT_SECONDS = 30.0
PARTS = 4  # a measurement of step-by-step updates takes at most such a part of the limit
LEAST_COMPILE_SECONDS = 20.0  # a compiler that has less time than this is not worth starting
ROUNDS = 9  # of which the quickest counts: others may be using the machine
WARM_UPDATES = 3
WORTH = 1.1  # times faster that bfloat16 must be, for it costs digits
NEVER = 1e12  # seconds to compile where there is no compiler
# before anything was compiled here: stay on the safe side
GUESSED_SAVING = 0.4
GUESSED_COMPILE_SECONDS = 60.0


@dataclass(frozen=True)
class Choices:
    """What the plan left to the machine, and what is worth telling about it."""

    threads: int
    precision: Precision
    compile: bool
    notes: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()  # the settings that a measurement decided, now or before


class Measured:
    """Numbers by name in a JSON file that may be missing, damaged or not writable: then it is measured again."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "measured.json"

    def read(self) -> dict[str, float]:
        """All of them."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {name: float(value) for name, value in pairs if isinstance(value, int | float) and value > 0.0}

    def get(self, name: str, measure: Callable[[], float]) -> float:
        """What is known, or else what is measured now."""
        known = self.read().get(name)
        if known is None:
            self.put(name, known := measure())
        return known

    def put(self, name: str, value: float) -> None:
        """Remember a number."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps({**self.read(), name: value}, indent=1, sort_keys=True).encode())
        except (OSError, StorageError):
            return  # a cache is a convenience


class Trial:
    """What one run measures: the numbers that are known, its clock, its limit, and which settings it decided."""

    def __init__(self, kept: Measured, updates: int, clock: Clock, tell: Tell) -> None:
        self.kept = kept
        self.updates = updates
        self.clock = clock
        self.tell = tell
        self.timed: list[str] = []
        self.notes: list[str] = []
        self.begun = False

    def limit_seconds(self, update_seconds: float) -> float:
        """How long measuring may take, where an update takes so long."""
        return min(LIMIT_SECONDS, LIMIT_SHARE * self.updates * update_seconds)

    def announce(self) -> None:
        """Say once that something is measured."""
        if not self.begun:
            self.tell(f"measuring how long an update takes, to choose runtime.* (at most {LIMIT_SECONDS:.0f} s)")
        self.begun = True


def measured_choices(
    plan: Plan,
    spec: Spec,
    usual_threads: int,
    kept: Measured | None = None,
    clock: Clock = time.monotonic,
    tell: Tell = lambda text: None,
) -> Choices:
    """The plan's own choices, or measured ones. `plan` names its torso and device; `usual_threads` is the rule's."""
    trial = Trial(kept or Measured(), total_updates(plan), clock, tell)
    threads = choose_threads(plan, spec, usual_threads, trial)
    plan = with_runtime(plan, threads=threads)
    with so_many_threads(threads):
        # Compiling goes first: it costs no digits, and what is computed in bfloat16 cannot be compiled any more.
        whole, notes = choose_compile(plan, spec, trial)
        precision, doubts = choose_precision(with_runtime(plan, compile=whole), spec, trial)
    return Choices(threads, precision, whole, (*doubts, *notes, *trial.notes), tuple(trial.timed))


def settled_machine(
    plan: Plan, asked_threads: int | None, spec: Spec, tell: Tell = lambda text: None
) -> tuple[Plan, list[str], list[str]]:
    """The plan with its machine's choices made, what to tell about them, and why no seed decides them, if so.

    Its threads are the rule's so far.
    """
    asked = plan.runtime
    choices = measured_choices(with_runtime(plan, threads=asked_threads), spec, asked.threads or 1, tell=tell)
    chosen = {"threads": choices.threads, "precision": choices.precision, "compile": choices.compile}
    told = list(choices.notes)
    if choices.compile and not asked.compile:
        told.append("update: compiled, as it saves more time than it costs")
    if choices.compile:
        told.append("update: compiled before the first one, which can take a minute when it is new on this machine")
    if choices.precision == "bfloat16" and asked.precision is None:
        told.append("update: in bfloat16, which this processor multiplies faster")
    return with_runtime(plan, **chosen), told, timed_reason(choices.timed, chosen)


def timed_reason(names: Iterable[str], chosen: Mapping[str, object]) -> list[str]:
    """Why the same command may give other numbers, if a clock chose something that numbers depend on."""
    found = [f"runtime.{name}={msgspec.json.encode(chosen[name]).decode()}" for name in names]
    if not found:
        return []
    what = f"a measurement of this machine chose {', '.join(found)}".replace('"', "")
    return [f"{what}; to repeat this run, train with --plan and its run.toml"]


def is_long(plan: Plan) -> bool:
    """Are there updates enough for a measurement to pay?"""
    return total_updates(plan) >= LONG_UPDATES


def is_measurable(plan: Plan) -> bool:
    """Can an update be tried out: a network of ours that learns from single steps?"""
    ours = plan.net.torso is not None and not isinstance(plan.net.torso, OwnTorso)
    return ours and isinstance(plan.net.memory, NoMemory) and isinstance(plan.algo.view, StepsView)


def choose_threads(plan: Plan, spec: Spec, usual: int, trial: Trial) -> int:
    """One thread or every core, whichever makes an update sooner; small networks never gain by more.

    Several learners share the cores.
    """
    cores = len(os.sched_getaffinity(0))
    if plan.runtime.threads is not None:
        return plan.runtime.threads
    if plan.learners.num > 1:
        return max(1, cores // plan.learners.num)  # the others compute at the same time
    if cores == 1 or isinstance(plan.net.torso, MlpTorso) or not (is_long(plan) and is_measurable(plan)):
        return usual
    trial.timed.append("threads")
    seconds = {num: update_seconds(plan, spec, num, trial) for num in (1, cores)}
    return min(seconds, key=lambda num: seconds[num])


def choose_precision(plan: Plan, spec: Spec, trial: Trial) -> tuple[Precision, tuple[str, ...]]:
    """bfloat16 where the machine multiplies it natively and a step-by-step update is clearly faster; else float32."""
    asked = plan.runtime.precision
    alone = isinstance(plan.algo.view, StepsView)
    if asked is not None:
        useless = asked == "bfloat16" and not alone
        notes = ("runtime.precision=bfloat16 has no effect: sequences are computed in float32",) if useless else ()
        return "float32" if useless else asked, notes
    worthwhile = is_long(plan) and is_measurable(plan) and not isinstance(plan.net.torso, MlpTorso)
    if plan.runtime.compile or not worthwhile or not has_bfloat16(torch.device(plan.runtime.device or "cpu")):
        return "float32", ()
    trial.timed.append("precision")
    threads = torch.get_num_threads()
    full = update_seconds(plan, spec, threads, trial)
    half = update_seconds(with_runtime(plan, precision="bfloat16"), spec, threads, trial)
    return "bfloat16" if half * WORTH < full else "float32", ()


def has_bfloat16(device: torch.device) -> bool:
    """Does the hardware multiply bfloat16 itself? Where it does not, it is many times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


def choose_compile(plan: Plan, spec: Spec, trial: Trial) -> tuple[bool, tuple[str, ...]]:
    """Compile if the plan says so and it can be done; left open, if it saves more seconds than it costs."""
    asked = plan.runtime.compile
    reason = why_not_compilable(plan)
    if reason is not None:
        return False, (f"runtime.compile=true has no effect: {reason}",) if asked else ()
    if asked is not None:
        return asked, ()
    small = isinstance(plan.net.torso, MlpTorso | MinatarTorso)  # convolutions are faster as they are
    if not small or not is_long(plan) or torch.device(plan.runtime.device or "cpu").type != "cpu":
        return False, ()
    trial.timed.append("compile")
    return saves(plan, spec, trial), ()


def saves(plan: Plan, spec: Spec, trial: Trial) -> bool:
    """Is the time saved over the run longer than the compiler's?"""
    threads = torch.get_num_threads()
    updates = total_updates(plan)
    name = shape_name(plan, spec)
    kept = trial.kept
    plain = update_seconds(plan, spec, threads, trial)
    if f"{name} compile" not in kept.read():
        limit = trial.limit_seconds(plain)
        if updates * plain * GUESSED_SAVING < GUESSED_COMPILE_SECONDS or limit < LEAST_COMPILE_SECONDS:
            return False
        measure_compiled(plan, spec, trial, limit)
    known = kept.read()
    cost = known.get(f"{name} compile")
    whole = known.get(f"{name} compiled")
    return cost is not None and whole is not None and updates * (plain - whole) > cost


def measure_compiled(plan: Plan, spec: Spec, trial: Trial, limit_seconds: float) -> None:
    """Compile the update once in a process of its own and time it there; that it cannot be done is remembered.

    There it can be ended: by its limit, and by Ctrl-C, which a compiler in this process would take for its own error.
    """
    trial.tell(f"compiling the update, to measure what that saves (at most {limit_seconds:.0f} s)")
    name = shape_name(plan, spec)
    found = answer_of(compile_seconds, (plan, spec), limit_seconds)
    if found is None:  # not remembered: the machine may have been busy
        trial.notes.append(f"update: not compiled, the compiler was not done within {limit_seconds:.0f} s")
        return
    if not found:
        trial.kept.put(f"{name} compile", NEVER)
        return
    trial.kept.put(f"{name} compile", found[0])
    trial.kept.put(f"{name} compiled", found[1])


def compile_seconds(plan: Plan, spec: Spec) -> list[float]:
    """Seconds that compiling takes, and those of a compiled update; nothing where there is no compiler."""
    clock = time.monotonic
    with so_many_threads(plan.runtime.threads or 1):
        learner = rehearsal(with_runtime(plan, compile=True), spec)
        batch = made_up(plan, spec)
        begin = clock()
        learner.update(batch)
        spent = clock() - begin
        return [] if learner.compiled_update is None else [spent, quickest(learner, batch, clock, float("inf"))]


def update_seconds(plan: Plan, spec: Spec, threads: int, trial: Trial) -> float:
    """Seconds of one step-by-step update on so many threads."""
    plan = with_runtime(plan, threads=threads, compile=False)

    def measure() -> float:
        trial.announce()
        with so_many_threads(threads):
            learner = rehearsal(plan, spec)
            batch = made_up(plan, spec)
            begin = trial.clock()
            for _ in range(WARM_UPDATES):
                learner.update(batch)
            limit = trial.limit_seconds((trial.clock() - begin) / WARM_UPDATES) / PARTS
            return quickest(learner, batch, trial.clock, limit)

    return trial.kept.get(f"{shape_name(plan, spec)} {plan.runtime.precision or 'float32'}", measure)


def quickest(learner: Learner, batch: Batch, clock: Clock, limit_seconds: float) -> float:
    """Seconds of an update, in the quickest of a few rounds of at least 50 ms; fewer rounds when the limit is near."""
    best = float("inf")
    first = clock()
    for _ in range(ROUNDS):
        begin = clock()
        num = 0
        while (spent := clock() - begin) < 0.05 and num < 1_000:
            learner.update(batch)
            num += 1
        best = min(best, spent / max(1, num))
        if clock() - first >= limit_seconds:
            break
    return best


def with_runtime(plan: Plan, **changes: Any) -> Plan:
    """The plan with another machine."""
    return msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, **changes))


def rehearsal(plan: Plan, spec: Spec) -> Learner:
    """A learner of this plan that nobody needs afterwards."""
    net = make_net(plan.net, spec, normalize=plan.env.normalize, seed=0)
    reset_off = msgspec.structs.replace(plan, algo=msgspec.structs.replace(plan.algo, reset=type(plan.algo)().reset))
    return make_learner(reset_off, spec, net, torch.device(plan.runtime.device or "cpu"))


def made_up(plan: Plan, spec: Spec) -> Batch:
    """A batch of noise in the plan's shape."""
    num = plan.algo.batch_size
    rng = np.random.default_rng(0)

    def look() -> Array:
        values = rng.integers(0, 256, (num, *spec.input_shape)) if spec.dtype == "uint8" else None
        return (rng.random((num, *spec.input_shape)) if values is None else values).astype(spec.dtype)

    masks = [np.ones((num, spec.num_actions), np.bool_) for _ in range(2)] if spec.masked else [None, None]
    ones = np.ones(num, np.float32)
    return Batch(look(), rng.integers(0, spec.num_actions, num), ones, ones * 0.9, look(), ones, np.arange(num), *masks)


def shape_name(plan: Plan, spec: Spec) -> str:
    """A name for this update on this machine."""
    machine = (
        processor(),
        len(os.sched_getaffinity(0)),
        str(torch.__version__),
        plan.runtime.device,
        plan.runtime.threads,
    )
    algo = (plan.algo.batch_size, plan.algo.rule, plan.algo.loss, plan.algo.rescale, type(plan.algo.target).__name__)
    parts = msgspec.json.encode((machine, algo, plan.net, plan.optim, plan.env.normalize, repr(spec)))
    return hashlib.sha256(parts).hexdigest()[:16]


def processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def so_many_threads(num: int) -> Iterator[None]:
    """torch computes on so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
