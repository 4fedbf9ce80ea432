"""A world whose single environments run in worker processes, for slow or unsafe environments. B lanes, A actions.

Workers only hold environments and execute commands. Episodes, seeds and actions are kept here, as in `SyncVectorEnv`,
so that a plan gives the same rows with and without workers. An environment that fails is made again: the failed step
does not count (`Step.lost`), the episode is dropped, and the lane shows a truncated step until its new episode starts.
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
from qfleet.envs.single_env import blank_step
from qfleet.envs.step_values import require_idle
from qfleet.envs.workers.main import EnvWorkerTask
from qfleet.envs.workers.memory import IDLE, RESET, STEP
from qfleet.envs.workers.pool import EnvFault, EnvWorkerPool
from qfleet.envs.workers.process import EnvWorkerFailed, probe_env
from qfleet.errors import EnvError
from qfleet.system.restart_budget import RestartBudget

_WINDOW_SECONDS = 600.0
_HEALTHY_STEPS = 100  # steps of an episode after which the next fault counts as the first again
_MAX_FAULTS_KEPT = 1_000
_POLL_SECONDS = 0.25
_SHOWN_LINES = 12
_FIXES = {
    "hung": "Mend the environment, or raise env.step_timeout_seconds if a step may take so long.",
    "leaked": "Mend the environment's leak, or raise env.worker_memory_gib.",
}


class ProcessVectorEnv:
    """A world whose lanes run in `workers` processes; each lane may fail `rebuilds` times in ten minutes."""

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
        self._num_info = len(task.info)
        self._clock = clock
        self.spec, self.notes, self.spaces = probe_env(task, episode_seed(seed, stream, 0, 0), os.devnull)
        self._pool = EnvWorkerPool(
            task,
            self.spec,
            num,
            min(workers, num),
            step_seconds=step_seconds,
            memory_bytes=memory_bytes,
            logs=logs,
            clock=clock,
        )
        self._episodes = EpisodeRecorder(num, seed, stream)
        self._budgets = [RestartBudget(rebuilds, _WINDOW_SECONDS) for _ in range(num)]
        self._recently_failed = np.zeros(num, bool)
        self._lost = np.ones(num, bool)  # lanes without an environment that can be stepped
        self._faults: deque[EnvFault] = deque(maxlen=_MAX_FAULTS_KEPT)
        self._last_fault: EnvFault | None = None  # for the error message when no lane is left
        self._last = blank_step(self.spec, num, self._num_info)
        self._sent: Array | None = None  # actions
        self._command = np.zeros(num, np.int8)
        self._start_workers()

    def reset(self) -> Step:
        """Begin the first episode in every lane."""
        self._drain()
        self._episodes.rewind()
        self._last = blank_step(self.spec, self.num, self._num_info)
        self._lost = np.ones(self.num, bool)
        self._await_workers()
        self._send_next()
        self._receive_any()
        self._last.lost = self._lost.copy()  # lanes that were reset lost no step
        return self._shown()

    def send(self, action: Array) -> None:
        """Send the actions to the workers, which start at once."""
        self._sent = np.array(action, np.int64)
        self._send_next(self._sent)

    def receive(self) -> Step:
        """Wait for the workers, for each at most until its timeout."""
        if self._sent is None:
            raise RuntimeError("receive() without send()")
        action = self._sent
        self._sent = None
        done = self._receive_any()
        self._episodes.record(action, done & (self._command == STEP))
        return self._shown()

    def abandon(self, lanes: Array) -> None:
        """Give up the episodes of these lanes (bool [B]): their next step begins a new one, as after a truncation."""
        require_idle(self._sent)
        self._last = replace(self._last, truncated=self._last.truncated | lanes)

    def take_faults(self) -> list[EnvFault]:
        """The faults since the last call, or the newest 1,000 of them."""
        taken = list(self._faults)
        self._faults.clear()
        return taken

    @property
    def quarantined(self) -> Array:
        """Lanes [B] that failed too often and are not restarted."""
        return np.array([budget.exhausted for budget in self._budgets])

    def state_dict(self) -> State:
        """Each lane's episode, seed and actions; `ended` lanes reset on their next step, `gone` ones had a fault."""
        require_idle(self._sent)
        state = {**self._episodes.state_dict(), "ended": self._last.terminated | self._last.truncated}
        lost = self._lost & state["ended"]
        return {**state, "gone": lost, "shown": self._last.obs[lost].copy()} if lost.any() else state

    def load_state_dict(self, state: State) -> Step:
        """Restore every lane by repeating its recorded actions from its seed, all lanes in parallel."""
        self._drain()
        self._episodes.load_state_dict(state, self.spec.num_actions)
        ended = saved_array(state, "ended", FLAGS, (self.num,))
        lost = np.zeros(self.num, bool)
        self._last = blank_step(self.spec, self.num, self._num_info)
        if "gone" in state:
            lost = saved_array(state, "gone", FLAGS, (self.num,))
            shape = (int(lost.sum()), *self.spec.obs)
            self._last.obs[lost] = saved_array(state, "shown", self._last.obs.dtype.kind, shape)
        self._await_workers()
        self._lost = lost.copy()
        self._redrive(~lost)
        # An abandoned episode had not ended by itself, and does not end when it is repeated.
        self._last.truncated |= (ended & ~self._last.terminated) | self._lost
        return self._last

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()

    def _send_next(self, action: Array | None = None) -> None:
        """Have every lane step or, where its episode is over, reset if its budget allows it."""
        self._start_workers()
        idle = self._pool.idle_lanes()
        over = self._lost | self._last.terminated | self._last.truncated
        resets = idle & over & self._may_restart()
        steps = idle & ~over if action is not None else np.zeros(self.num, bool)
        argument = np.zeros(self.num, np.int64) if action is None else action.copy()
        if resets.any():
            argument[resets] = self._episodes.begin(resets)
        self._send_commands(np.where(resets, RESET, np.where(steps, STEP, IDLE)), argument)

    def _send_commands(self, command: Array, argument: Array) -> None:
        self._command = command.astype(np.int8)
        self._pool.send_commands(self._command, argument)

    def _receive_any(self) -> Array:
        """Receive results, and restart lanes until at least one has a result; lanes [B] that have one."""
        done = self._receive_results()
        while not done.any():
            self._raise_if_all_quarantined()
            self._pool.poll(_POLL_SECONDS if self._pool.starting() else self._seconds_until_restart())
            self._send_next()
            done = self._receive_results()
        return done

    def _receive_results(self) -> Array:
        """Set `_last` to the workers' results, and to the previous observation in lanes without one."""
        previous = self._last
        step = Step(np.empty_like(previous.obs), np.zeros(self.num, np.float32), *np.zeros((2, self.num), bool))
        step.mask = None if previous.mask is None else previous.mask.copy()
        step.info = np.full((self.num, self._num_info), np.nan) if self._num_info else None
        done = self._pool.receive(step)
        if not done.all():
            step.obs[~done] = previous.obs[~done]
        step.lost = ~done | self._lost
        step.truncated |= ~done
        self._lost = ~done
        self._last = step
        self._update_budgets(done)
        return done

    def _shown(self) -> Step:
        if self._last.lost is not None and not self._last.lost.any():
            self._last.lost = None
        return self._last

    def _update_budgets(self, done: Array) -> None:
        """Charge new faults to the guilty lanes, and reset the delays of lanes that work again."""
        now = self._clock()
        ended = self._last.terminated | self._last.truncated
        for fault in self._pool.take_faults():
            if fault.kind == "leaked":  # the last step of its lanes is valid
                self._lost[list(fault.lanes)] |= ~ended[list(fault.lanes)]
            self._charge(fault, now)
        healthy = self._recently_failed & done & (ended | (self._episodes.length >= _HEALTHY_STEPS))
        for lane in np.flatnonzero(healthy):
            self._budgets[lane].reset_backoff()
        self._recently_failed &= ~healthy

    def _charge(self, fault: EnvFault, now: float) -> None:
        before = self.quarantined
        for lane in fault.guilty:
            if not before[lane]:
                self._budgets[lane].charge(now)
                self._recently_failed[lane] = True
        given_up = tuple(int(lane) for lane in np.flatnonzero(self.quarantined & ~before))
        lanes = tuple(lane for lane in fault.lanes if not before[lane])
        self._last_fault = replace(fault, lanes=lanes, quarantined=given_up, what=f"{self._name}, {fault.what}")
        self._faults.append(self._last_fault)

    def _may_restart(self) -> Array:
        now = self._clock()
        return np.array([not budget.exhausted and budget.retry_at <= now for budget in self._budgets])

    def _seconds_until_restart(self) -> float:
        times = [budget.retry_at for budget in self._budgets if not budget.exhausted]
        return min(max(min(times) - self._clock(), 0.0), _POLL_SECONDS)

    def _start_workers(self) -> None:
        """Start the missing workers that have a lane which may be restarted."""
        if None in self._pool.workers:
            may_restart = self._may_restart()
            for index, lanes in enumerate(self._pool.lanes):
                if self._pool.workers[index] is None and may_restart[lanes.start : lanes.stop].any():
                    self._pool.start(index)

    def _await_workers(self) -> None:
        self._start_workers()
        while self._pool.starting():
            self._pool.poll(_POLL_SECONDS)
            self._pool.stop_overdue()

    def _redrive(self, lanes: Array) -> None:
        """Reset these lanes [B] and repeat the recorded actions of each; the others wait."""
        self._redrive_step(np.where(lanes, RESET, IDLE), self._episodes.seed)
        for number in range(int(self._episodes.length[lanes].max(initial=0))):
            # A non-deterministic environment may end early: the caller notices and abandons the episode.
            over = self._lost | self._last.terminated | self._last.truncated
            steps = lanes & ~over & (self._episodes.length > number)
            action = [self._episodes.actions(lane)[number] if steps[lane] else 0 for lane in range(self.num)]
            self._redrive_step(np.where(steps, STEP, IDLE), np.array(action, np.int64))

    def _redrive_step(self, command: Array, argument: Array) -> None:
        previous = self._last
        lost = self._lost
        self._send_commands(command, argument)
        done = self._receive_results()
        # Lanes without a command keep their values, unless their worker is lost.
        unchanged = (command == IDLE) & self._pool.present_lanes()
        for field in ("reward", "terminated", "truncated"):
            getattr(self._last, field)[unchanged] = getattr(previous, field)[unchanged]
        self._lost = np.where(unchanged, lost, ~done)
        self._last.lost = None

    def _drain(self) -> None:
        """Receive and discard the results of a step that was sent."""
        if self._sent is not None:
            self._sent = None
            self._receive_results()

    def _raise_if_all_quarantined(self) -> None:
        fault = self._last_fault
        if fault is None or not self.quarantined.all():
            return
        # An exception's traceback is most specific at its end, that of a crash at its beginning.
        lines = fault.cause.strip().splitlines()
        shown = "\n".join(lines[-_SHOWN_LINES:] if fault.kind == "raised" else lines[:_SHOWN_LINES])
        raise EnvError(
            f"{self._name}: all {self.num} environments failed more than {self._budgets[0].limit} times"
            f" (env.rebuilds) in {_WINDOW_SECONDS:.0f} s and were given up. The last fault: {fault.what}",
            f"Its traceback:\n{shown}" if shown else "There is no traceback.",
            _FIXES.get(fault.kind, "Mend the environment."),
        ) from EnvWorkerFailed(fault.cause)
