"""Single environments in processes of their own, for worlds that are slow or unsafe. B lanes, A actions.

Workers only hold environments and obey; episodes, seeds and actions are kept here, as `Lanes` keeps them, so that the
same plan shows the same rows with workers and without. What fails is made again: that lane's step never happened
(`Step.lost`), its episode is dropped, and until there is something new to show it says that it is truncated.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from qfleet.data import Array, State, Step
from qfleet.data.state_reader import FLAGS, saved_array
from qfleet.envs.episodes import EpisodeRecorder, episode_seed
from qfleet.envs.single_env import blank
from qfleet.envs.workers.main import EnvWorkerTask
from qfleet.envs.workers.memory import IDLE, RESET, STEP
from qfleet.envs.workers.pool import EnvFault, EnvWorkerPool
from qfleet.envs.workers.process import EnvWorkerFailed, scouted
from qfleet.errors import EnvError
from qfleet.system.restart_budget import RestartBudget

_WINDOW_SECONDS = 600.0
_WELL_STEPS = 100  # so long an episode, and the environment is not in a row of faults any more
_KEPT_FAULTS = 1_000
_PAUSE_SECONDS = 0.25
_SHOWN_LINES = 12
_FIXES = {
    "hung": "Mend the environment, or raise env.step_timeout_seconds if a step may take so long.",
    "leaked": "Mend the environment's leak, or raise env.worker_memory_gib.",
}


class ProcessVectorEnv:
    """A world whose lanes live in `workers` processes; each lane may fail `rebuilds` times in ten minutes."""

    def __init__(
        self,
        task: EnvWorkerTask,
        num: int,
        *,
        seed: int,
        stream: int,
        workers: int,
        step_seconds: float = 30.0,
        rebuilds: int = 5,
        memory_bytes: float | None = None,
        logs: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num = num
        self._name = task.env.id
        self._clock = clock
        self.spec, self.notes = scouted(task, episode_seed(seed, stream, 0, 0), os.devnull)
        limits = {"step_seconds": step_seconds, "memory_bytes": memory_bytes}
        self._staff = EnvWorkerPool(task, self.spec, num, min(workers, num), logs=logs, clock=clock, **limits)  # type: ignore[arg-type]
        self._episodes = EpisodeRecorder(num, seed, stream)
        self._budgets = [RestartBudget(rebuilds, _WINDOW_SECONDS) for _ in range(num)]
        self._shaky = np.zeros(num, bool)  # lanes with a fault not long ago
        self._gone = np.ones(num, bool)  # lanes that have no environment to step
        self._faults: deque[EnvFault] = deque(maxlen=_KEPT_FAULTS)
        self._last_fault: EnvFault | None = None  # kept when the others are taken: it may end the run later
        self._last = blank(self.spec, num)
        self._sent: Array | None = None  # actions
        self._command = np.zeros(num, np.int8)
        self._hire()

    def reset(self) -> Step:
        """Begin the first episode in every lane."""
        self._settle()
        self._episodes.rewind()
        self._last = blank(self.spec, self.num)
        self._gone = np.ones(self.num, bool)
        self._await_staff()
        self._begin()
        self._finish()
        self._last.lost = self._gone.copy()  # nothing was there before that could be lost
        return self._shown()

    def send(self, action: Array) -> None:
        """Tell the workers, which begin at once."""
        self._sent = np.array(action, np.int64)
        self._begin(self._sent)

    def receive(self) -> Step:
        """Wait for the workers, but for none longer than its time."""
        if self._sent is None:
            raise RuntimeError("receive() without send()")
        action = self._sent
        self._sent = None
        done = self._finish()
        self._episodes.record(action, done & (self._command == STEP))
        return self._shown()

    def abandon(self, lanes: Array) -> None:
        """Give these lanes' episodes up (bool [B]): their next step begins a new one, as after a truncation."""
        self._require_idle()
        self._last = replace(self._last, truncated=self._last.truncated | lanes)

    def take_faults(self) -> list[EnvFault]:
        """What failed since this was last asked, the newest of them if they were too many."""
        taken = list(self._faults)
        self._faults.clear()
        return taken

    @property
    def quarantined(self) -> Array:
        """Lanes [B] that failed too often and are not tried again."""
        return np.array([budget.spent for budget in self._budgets])

    def state_dict(self) -> State:
        """Each lane's episode, seed and actions; `ended` lanes reset on their next step, `gone` ones had a fault."""
        self._require_idle()
        state = {**self._episodes.state_dict(), "ended": self._last.terminated | self._last.truncated}
        gone = self._gone & state["ended"]
        return {**state, "gone": gone, "shown": self._last.obs[gone].copy()} if gone.any() else state

    def load_state_dict(self, state: State) -> Step:
        """Drive every lane again from its episode's seed, all side by side."""
        self._settle()
        self._episodes.load_state_dict(state, self.spec.num_actions)
        ended = saved_array(state, "ended", FLAGS, (self.num,))
        gone = np.zeros(self.num, bool)
        self._last = blank(self.spec, self.num)
        if "gone" in state:
            gone = saved_array(state, "gone", FLAGS, (self.num,))
            shape = (int(gone.sum()), *self.spec.obs)
            self._last.obs[gone] = saved_array(state, "shown", self._last.obs.dtype.kind, shape)
        self._await_staff()
        self._gone = gone.copy()
        self._redrive(~gone)
        # An episode that was given up did not end by itself, and does not when it is driven again.
        self._last.truncated |= (ended & ~self._last.terminated) | self._gone
        return self._last

    def close(self) -> None:
        """End the workers."""
        self._staff.close()

    def _begin(self, action: Array | None = None) -> None:
        """Have every lane step or, where its episode is over, reset if it can."""
        self._hire()
        can = self._staff.ready()
        over = self._gone | self._last.terminated | self._last.truncated
        resets = can & over & self._due()
        steps = can & ~over if action is not None else np.zeros(self.num, bool)
        argument = np.zeros(self.num, np.int64) if action is None else action.copy()
        if resets.any():
            argument[resets] = self._episodes.begin(resets)
        self._order(np.where(resets, RESET, np.where(steps, STEP, IDLE)), argument)

    def _order(self, command: Array, argument: Array) -> None:
        self._command = command.astype(np.int8)
        self._staff.give(self._command, argument)

    def _finish(self) -> Array:
        """Wait for what was begun; when no lane has anything to show, until one has. Lanes [B] that did it."""
        done = self._gather()
        while not done.any():
            self._raise_if_hopeless()
            self._staff.listen(_PAUSE_SECONDS if self._staff.starting() else self._until_due())
            self._begin()
            done = self._gather()
        return done

    def _gather(self) -> Array:
        """The next `_last`: answers where there are any, and elsewhere what was shown before."""
        was = self._last
        step = Step(np.empty_like(was.obs), np.zeros(self.num, np.float32), *np.zeros((2, self.num), bool))
        step.mask = None if was.mask is None else was.mask.copy()
        done = self._staff.collect(step)
        if not done.all():
            step.obs[~done] = was.obs[~done]
        step.lost = ~done | self._gone
        step.truncated |= ~done
        self._gone = ~done
        self._last = step
        self._book(done)
        return done

    def _shown(self) -> Step:
        if self._last.lost is not None and not self._last.lost.any():
            self._last.lost = None
        return self._last

    def _book(self, done: Array) -> None:
        """Charge what failed to whom it is due, and forgive those that are well again."""
        now = self._clock()
        ended = self._last.terminated | self._last.truncated
        for fault in self._staff.take_faults():
            if fault.kind == "leaked":  # its last step was a good one
                self._gone[list(fault.lanes)] |= ~ended[list(fault.lanes)]
            self._charge(fault, now)
        well = self._shaky & done & (ended | (self._episodes.length >= _WELL_STEPS))
        for lane in np.flatnonzero(well):
            self._budgets[lane].settle()
        self._shaky &= ~well

    def _charge(self, fault: EnvFault, now: float) -> None:
        before = self.quarantined
        for lane in fault.guilty:
            if not before[lane]:
                self._budgets[lane].charge(now)
                self._shaky[lane] = True
        given_up = tuple(int(lane) for lane in np.flatnonzero(self.quarantined & ~before))
        lanes = tuple(lane for lane in fault.lanes if not before[lane])
        self._last_fault = replace(fault, lanes=lanes, quarantined=given_up, what=f"{self._name}, {fault.what}")
        self._faults.append(self._last_fault)

    def _due(self) -> Array:
        now = self._clock()
        return np.array([not budget.spent and budget.ready_at <= now for budget in self._budgets])

    def _until_due(self) -> float:
        times = [budget.ready_at for budget in self._budgets if not budget.spent]
        return min(max(min(times) - self._clock(), 0.0), _PAUSE_SECONDS)

    def _hire(self) -> None:
        """Start the workers that are away, if one of their lanes may be tried."""
        if None in self._staff.children:
            due = self._due()
            for worker, lanes in enumerate(self._staff.lanes):
                if self._staff.children[worker] is None and due[lanes.start : lanes.stop].any():
                    self._staff.hire(worker)

    def _await_staff(self) -> None:
        self._hire()
        while self._staff.starting():
            self._staff.listen(_PAUSE_SECONDS)
            self._staff.expire()

    def _redrive(self, lanes: Array) -> None:
        """Reset these lanes [B] and take the actions recorded of each; the others wait."""
        self._step_again(np.where(lanes, RESET, IDLE), self._episodes.seed)
        for number in range(int(self._episodes.length[lanes].max(initial=0))):
            # An environment that is not repeatable may end early: the caller sees it and gives the episode up.
            over = self._gone | self._last.terminated | self._last.truncated
            moves = lanes & ~over & (self._episodes.length > number)
            action = [self._episodes.actions(lane)[number] if moves[lane] else 0 for lane in range(self.num)]
            self._step_again(np.where(moves, STEP, IDLE), np.array(action, np.int64))

    def _step_again(self, command: Array, argument: Array) -> None:
        was = self._last
        gone = self._gone
        self._order(command, argument)
        done = self._gather()
        # Who was not told anything stays as it was, unless its worker is gone.
        still = (command == IDLE) & self._staff.present()
        for field in ("reward", "terminated", "truncated"):
            getattr(self._last, field)[still] = getattr(was, field)[still]
        self._gone = np.where(still, gone, ~done)
        self._last.lost = None

    def _settle(self) -> None:
        """Let go of a step that is under way."""
        if self._sent is not None:
            self._sent = None
            self._gather()

    def _require_idle(self) -> None:
        if self._sent is not None:
            raise RuntimeError("a step is under way: call receive() first")

    def _raise_if_hopeless(self) -> None:
        fault = self._last_fault
        if fault is None or not self.quarantined.all():
            return
        # Python's own traceback says most at its end, that of a crash at its beginning.
        lines = fault.cause.strip().splitlines()
        shown = "\n".join(lines[-_SHOWN_LINES:] if fault.kind == "raised" else lines[:_SHOWN_LINES])
        raise EnvError(
            f"{self._name}: all {self.num} environments failed more than {self._budgets[0].limit} times"
            f" (env.rebuilds) in {_WINDOW_SECONDS:.0f} s and were given up. The last fault: {fault.what}",
            f"It said:\n{shown}" if shown else "It said nothing more.",
            _FIXES.get(fault.kind, "Mend the environment."),
        ) from EnvWorkerFailed(fault.cause)
