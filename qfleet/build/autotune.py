"""Choices that a short measurement makes: threads, precision, and whether the update is compiled.

Measurements are cached for the user, by machine, torch and the shape of the update, so that a later run starts at once
and chooses the same. Short runs are not measured: they take the usual choice. A run whose choices were measured is
marked as not exact: another load or an empty cache may lead to other choices, and these to numbers that differ in their
last digits. `run.toml` holds what was chosen.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from qfleet.build.isolated_call import call_isolated
from qfleet.build.resolve import is_long, with_runtime
from qfleet.build.threads import operation_threads, torch_threads
from qfleet.data import Array, Batch, Spec
from qfleet.errors import StorageError
from qfleet.learn import Learner, make_learner
from qfleet.learn.compiled_update import cache_folder, why_not_compilable
from qfleet.nets import make_net
from qfleet.plan import total_updates
from qfleet.plan.schema import MinatarTorso, MlpTorso, NoMemory, OwnTorso, Plan, StepsView
from qfleet.watch import write_file
from qfleet.watch.provenance import processor

Precision = Literal["float32", "bfloat16"]
Clock = Callable[[], float]
Show = Callable[[str], object]
# The time that measuring may take: a share of the run's expected time, and in all.
LIMIT_SHARE = 0.02
LIMIT_SECONDS = 30.0
LIMIT_PARTS = 4  # step-by-step updates are measured for at most this part of the limit
MIN_COMPILE_SECONDS = 20.0  # with less time a compiler is not started
ROUNDS = 9  # of which the fastest counts: other programs may be running
WARM_UPDATES = 3
BFLOAT16_SPEEDUP = 1.1  # that bfloat16 must reach, because it costs digits
NEVER = 1e12  # seconds to compile where there is no compiler
# Before anything was compiled on this machine.
GUESSED_SAVING = 0.4
GUESSED_COMPILE_SECONDS = 60.0


@dataclass(frozen=True)
class Choices:
    """The settings that the plan left open, and notes about them."""

    threads: int
    precision: Precision
    compile: bool
    notes: tuple[str, ...] = ()
    timed: tuple[str, ...] = ()  # the settings that a measurement decided, now or before


class MeasurementCache:
    """Measured numbers by name, in a JSON file that may be missing, damaged or not writable."""

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
        """The cached number, or else what is measured now."""
        known = self.read().get(name)
        if known is None:
            self.put(name, known := measure())
        return known

    def put(self, name: str, value: float) -> None:
        """Write a number."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps({**self.read(), name: value}, indent=1, sort_keys=True).encode())
        except (OSError, StorageError):
            return  # it is measured again next time


@dataclass(eq=False)
class Trial:
    """The measurements of one run: cache, clock, limit, and the settings that they decided."""

    cache: MeasurementCache
    updates: int
    clock: Clock
    show: Show
    timed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    announced: bool = False

    def limit_seconds(self, update_seconds: float) -> float:
        """How long measuring may take, given the time of an update."""
        return min(LIMIT_SECONDS, LIMIT_SHARE * self.updates * update_seconds)

    def announce(self) -> None:
        """Show once that something is measured."""
        if not self.announced:
            self.show(f"measuring how long an update takes, to choose runtime.* (at most {LIMIT_SECONDS:.0f} s)")
        self.announced = True


def measured_choices(
    plan: Plan,
    spec: Spec,
    usual_threads: int,
    cache: MeasurementCache | None = None,
    clock: Clock = time.monotonic,
    show: Show = lambda text: None,
) -> Choices:
    """The plan's own choices, or measured ones. `plan` names its torso and device; `usual_threads` is the rule's."""
    trial = Trial(cache or MeasurementCache(), total_updates(plan), clock, show)
    threads = choose_threads(plan, spec, usual_threads, trial)
    plan = with_runtime(plan, threads=threads)
    with torch_threads(operation_threads(plan)):
        # Compiling goes first: it costs no digits, and what is computed in bfloat16 cannot be compiled any more.
        compiled, notes = choose_compile(plan, spec, trial)
        precision, precision_notes = choose_precision(with_runtime(plan, compile=compiled), spec, trial)
    return Choices(threads, precision, compiled, (*precision_notes, *notes, *trial.notes), tuple(trial.timed))


def measured_settings(
    plan: Plan, given_threads: int | None, spec: Spec, show: Show = lambda text: None
) -> tuple[Plan, list[str], list[str]]:
    """The plan with the open runtime settings chosen, notes about them, and why the run is not exact, if so.

    `plan` has the usual threads so far.
    """
    given = plan.runtime
    choices = measured_choices(with_runtime(plan, threads=given_threads), spec, given.threads or 1, show=show)
    chosen = {"threads": choices.threads, "precision": choices.precision, "compile": choices.compile}
    notes = list(choices.notes)
    if choices.compile and not given.compile:
        notes.append("update: compiled, as it saves more time than it costs")
    if choices.compile:
        notes.append("update: compiled before the first one, which can take a minute when it is new on this machine")
    if choices.precision == "bfloat16" and given.precision is None:
        notes.append("update: in bfloat16, which this processor multiplies faster")
    return with_runtime(plan, **chosen), notes, timed_reason(choices.timed, chosen)


def timed_reason(names: Iterable[str], chosen: Mapping[str, object]) -> list[str]:
    """Why the same command may give other numbers: a measurement chose settings that numbers depend on."""
    found = [f"runtime.{name}={msgspec.json.encode(chosen[name]).decode()}" for name in names]
    if not found:
        return []
    reason = f"a measurement of this machine chose {', '.join(found)}".replace('"', "")
    return [f"{reason}; to repeat this run, train with --plan and its run.toml"]


def is_measurable(plan: Plan) -> bool:
    """Can an update be tried with random data: a built-in network that learns from single steps?"""
    built_in = plan.net.torso is not None and not isinstance(plan.net.torso, OwnTorso) and plan.custom.head is None
    return built_in and isinstance(plan.net.memory, NoMemory) and isinstance(plan.algo.view, StepsView)


def choose_threads(plan: Plan, spec: Spec, usual: int, trial: Trial) -> int:
    """One thread or every core, whichever is faster; small networks never gain by more.

    Several learners share the cores.
    """
    cores = len(os.sched_getaffinity(0))
    if plan.runtime.threads is not None:
        return plan.runtime.threads
    if plan.learners.num > 1:
        return max(1, cores // plan.learners.num)  # the others compute at the same time
    if cores == 1 or isinstance(plan.net.torso, MlpTorso) or not (is_long(plan) and is_measurable(plan)):
        return usual
    if plan.runtime.parallel != "tasks":  # numbers depend on how an operation is divided
        trial.timed.append("threads")
    seconds = {num: update_seconds(plan, spec, num, trial) for num in (1, cores)}
    return min(seconds, key=lambda num: seconds[num])


def choose_precision(plan: Plan, spec: Spec, trial: Trial) -> tuple[Precision, tuple[str, ...]]:
    """bfloat16 where the machine multiplies it natively and a step-by-step update is clearly faster; else float32."""
    given = plan.runtime.precision
    single_steps = isinstance(plan.algo.view, StepsView)
    if given is not None:
        useless = given == "bfloat16" and not single_steps
        notes = ("runtime.precision=bfloat16 has no effect: sequences are computed in float32",) if useless else ()
        return "float32" if useless else given, notes
    worthwhile = is_long(plan) and is_measurable(plan) and not isinstance(plan.net.torso, MlpTorso)
    if plan.runtime.compile or not worthwhile or not has_bfloat16(torch.device(plan.runtime.device or "cpu")):
        return "float32", ()
    trial.timed.append("precision")
    threads = plan.runtime.threads or 1
    full = update_seconds(plan, spec, threads, trial)
    half = update_seconds(with_runtime(plan, precision="bfloat16"), spec, threads, trial)
    return "bfloat16" if half * BFLOAT16_SPEEDUP < full else "float32", ()


def has_bfloat16(device: torch.device) -> bool:
    """Does the hardware multiply bfloat16 itself? Where it does not, it is many times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


def choose_compile(plan: Plan, spec: Spec, trial: Trial) -> tuple[bool, tuple[str, ...]]:
    """Compile if the plan says so and it is possible; if left open, when it saves more time than it costs."""
    given = plan.runtime.compile
    reason = why_not_compilable(plan)
    if reason is not None:
        return False, (f"runtime.compile=true has no effect: {reason}",) if given else ()
    if given is not None:
        return given, ()
    small = isinstance(plan.net.torso, MlpTorso | MinatarTorso)  # convolutions are faster as they are
    if not small or not is_long(plan) or torch.device(plan.runtime.device or "cpu").type != "cpu":
        return False, ()
    trial.timed.append("compile")
    return saves_time(plan, spec, trial), ()


def saves_time(plan: Plan, spec: Spec, trial: Trial) -> bool:
    """Does compiling save more time over the run than it takes?"""
    threads = plan.runtime.threads or 1
    updates = total_updates(plan)
    name = shape_name(plan, spec)
    cache = trial.cache
    plain = update_seconds(plan, spec, threads, trial)
    if f"{name} compile" not in cache.read():
        limit = trial.limit_seconds(plain)
        if updates * plain * GUESSED_SAVING < GUESSED_COMPILE_SECONDS or limit < MIN_COMPILE_SECONDS:
            return False
        measure_compiled(plan, spec, trial, limit)
    known = cache.read()
    cost = known.get(f"{name} compile")
    compiled = known.get(f"{name} compiled")
    return cost is not None and compiled is not None and updates * (plain - compiled) > cost


def measure_compiled(plan: Plan, spec: Spec, trial: Trial, limit_seconds: float) -> None:
    """Compile the update once in a process of its own and time it there; that there is no compiler is cached.

    There it can be ended by its limit and by Ctrl-C, which a compiler in this process would take for its own error.
    """
    trial.show(f"compiling the update, to measure what that saves (at most {limit_seconds:.0f} s)")
    name = shape_name(plan, spec)
    found = call_isolated(compile_seconds, (plan, spec), limit_seconds)
    if found is None:  # not cached: the machine may have been busy
        trial.notes.append(f"update: not compiled, the compiler was not done within {limit_seconds:.0f} s")
        return
    if not found:
        trial.cache.put(f"{name} compile", NEVER)
        return
    trial.cache.put(f"{name} compile", found[0])
    trial.cache.put(f"{name} compiled", found[1])


def compile_seconds(plan: Plan, spec: Spec) -> list[float]:
    """Seconds to compile, and seconds of a compiled update; empty where there is no compiler."""
    clock = time.monotonic
    with torch_threads(plan.runtime.threads or 1):
        learner = trial_learner(with_runtime(plan, compile=True), spec)
        batch = random_batch(plan, spec)
        begin = clock()
        learner.update(batch)
        spent = clock() - begin
        if learner.compiled_update is None:
            return []
        return [spent, fastest_update_seconds(learner, batch, clock, float("inf"))]


def update_seconds(plan: Plan, spec: Spec, threads: int, trial: Trial) -> float:
    """Seconds of one step-by-step update on `threads` threads."""
    plan = with_runtime(plan, threads=threads, compile=False)

    def measure() -> float:
        trial.announce()
        with torch_threads(operation_threads(plan)):
            learner = trial_learner(plan, spec)
            batch = random_batch(plan, spec)
            begin = trial.clock()
            for _ in range(WARM_UPDATES):
                learner.update(batch)
            limit = trial.limit_seconds((trial.clock() - begin) / WARM_UPDATES) / LIMIT_PARTS
            return fastest_update_seconds(learner, batch, trial.clock, limit)

    return trial.cache.get(f"{shape_name(plan, spec)} {plan.runtime.precision or 'float32'}", measure)


def fastest_update_seconds(learner: Learner, batch: Batch, clock: Clock, limit_seconds: float) -> float:
    """Seconds of an update in the fastest of a few rounds of at least 50 ms; fewer rounds near the limit."""
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


def trial_learner(plan: Plan, spec: Spec) -> Learner:
    """A learner of this plan, for measurements only."""
    net = make_net(plan.net, spec, normalize=plan.env.normalize, seed=0)
    reset_off = msgspec.structs.replace(plan, algo=msgspec.structs.replace(plan.algo, reset=type(plan.algo)().reset))
    return make_learner(reset_off, spec, net, torch.device(plan.runtime.device or "cpu"))


def random_batch(plan: Plan, spec: Spec) -> Batch:
    """A random batch in the plan's shape."""
    num = plan.algo.batch_size
    rng = np.random.default_rng(0)

    def random_obs() -> Array:
        values = rng.integers(0, 256, (num, *spec.input_shape)) if spec.dtype == "uint8" else None
        return (rng.random((num, *spec.input_shape)) if values is None else values).astype(spec.dtype)

    masks = [np.ones((num, spec.num_actions), np.bool_) for _ in range(2)] if spec.masked else [None, None]
    ones = np.ones(num, np.float32)
    obs = random_obs()
    action = rng.integers(0, spec.num_actions, num)
    return Batch(obs, action, ones, ones * 0.9, random_obs(), ones, np.arange(num), *masks)


def shape_name(plan: Plan, spec: Spec) -> str:
    """A name for this update on this machine."""
    cores = len(os.sched_getaffinity(0))
    machine = (processor(), cores, str(torch.__version__), plan.runtime.device)
    threads = (plan.runtime.threads, plan.runtime.parallel)
    algo = (plan.algo.batch_size, plan.algo.rule, plan.algo.loss, plan.algo.rescale, type(plan.algo.target).__name__)
    parts = msgspec.json.encode((machine, threads, algo, plan.net, plan.optim, plan.env.normalize, repr(spec)))
    return hashlib.sha256(parts).hexdigest()[:16]
