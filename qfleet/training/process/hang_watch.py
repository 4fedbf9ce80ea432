"""Does a call of an environment hang? The supervisor of a run looks at its heartbeat again and again."""

import signal
import time
from collections.abc import Callable

from qfleet.heartbeat import CALLS, IMPORT, MAKE
from qfleet.system.silence import SilenceTimer
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.training.process.supervised_process import ExitVerdict, SupervisedProcess, print_error

ENV_FAILED = 4  # exit code
# A call that takes longer than this hangs, unless the plan has another limit.
STEP_SECONDS = 30.0
MAKE_SECONDS = 60.0
END_FACTOR = 4  # times that, and the process is ended
GRACE_SECONDS = 5.0  # that a call may take after a stop signal, at least
GRACE_FACTOR = 2  # times the longest call of that kind so far, if that is longer
AT_ONCE_SECONDS = 0.7  # that the process may take after a second stop signal
POLL_SECONDS = 0.1


class HangWatch:
    """Decides when a process must be ended: a call of an environment hangs, or stop signals have no effect."""

    def __init__(
        self, child: SupervisedProcess, stop_signals: list[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.child = child
        self.stop_signals = stop_signals
        self.clock = clock
        self.stuck = SilenceTimer(clock())  # since the present call began
        self.call: tuple[int, int, int] | None = None
        self.stop_signal_times: list[float] = []
        self.longest: dict[int, float] = {}  # seconds of the longest call of each kind that has returned
        self.warned = False

    def poll(self) -> ExitVerdict | None:
        """Why the child must be ended, if it must."""
        now = self.clock()
        call = self.child.heartbeat.call()
        stuck_seconds = self.stuck.elapsed(now)
        self.stop_signal_times += [now] * (len(self.stop_signals) - len(self.stop_signal_times))
        if call != self.call:
            self.record_returned(stuck_seconds)
            self.call = call
            self.stuck.reset(now)
            self.warned = False
        if len(self.stop_signal_times) > 1 and now - self.stop_signal_times[1] > AT_ONCE_SECONDS:
            return self.stopped_by_signal("it was asked to leave at once")
        return None if call is None else self.check_call(self.stuck.seconds, now)

    def record_returned(self, seconds: float) -> None:
        """Record how long the call took that has returned."""
        if self.call is not None:
            kind = self.call[1]
            self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))

    def grace(self) -> float:
        """Seconds that the present call may take after a signal: a slow call is healthy if it was always slow."""
        longest = 0.0 if self.call is None else self.longest.get(self.call[1], 0.0)
        return max(GRACE_SECONDS, min(GRACE_FACTOR * longest, self.limit()))

    def check_call(self, stuck: float, now: float) -> ExitVerdict | None:
        """Warn of a call that has taken `stuck` seconds, or decide to end the process."""
        if self.stop_signal_times and min(stuck, now - self.stop_signal_times[0]) > (grace := self.grace()):
            return self.stopped_by_signal(f"{self.call_name()} did not return within {grace:.3g} s")
        if stuck <= self.limit():
            return None
        if stuck > END_FACTOR * self.limit():
            what = f"{self.call_name()} has not returned for {stuck:.0f} s"
            return ExitVerdict(ENV_FAILED, "failed", what, self.child.current_frames())
        if not self.warned:
            self.warned = True
            self.warn(stuck)
        return None

    def warn(self, stuck: float) -> None:
        """Print that a call seems to hang, and where."""
        frames = self.child.current_frames()
        until = f"the run ends after {END_FACTOR * self.limit():.0f} s (env.step_timeout_seconds)"
        stopped = " (it is stopped, not by Ctrl-Z here: does it use the terminal?)" if self.child.is_stopped() else ""
        print_error(f"warning: {self.call_name()} has not returned for {stuck:.0f} s{stopped}; {until}")
        for frame in frames:
            print_error(f"   at: {frame}")

    def limit(self) -> float:
        """Seconds after which the present call hangs."""
        step_seconds = float(self.child.heartbeat.run_info().get("step_seconds") or STEP_SECONDS)
        return step_seconds if self.call is None else call_limit(self.call[1], step_seconds)

    def call_name(self) -> str:
        """The present call, for a message."""
        env = self.child.heartbeat.run_info().get("env") or "the environment"
        if self.call is None:
            return str(env)
        _, kind, lane = self.call
        name = CALLS[kind]
        return f"{env}: {name}" if kind in (MAKE, IMPORT) else f"{env}, lane {lane}: {name}()"

    def stopped_by_signal(self, why: str) -> ExitVerdict:
        """The verdict on a process that is ended because of a stop signal."""
        name = signal.Signals(self.stop_signals[0]).name
        state, code = ENDINGS[name]
        return ExitVerdict(code, state, f"stopped by {name}; {why}", self.child.current_frames())


def call_limit(kind: int, step_seconds: float) -> float:
    """Seconds after which a call of this kind hangs: making an environment takes longer than a step."""
    return max(step_seconds, MAKE_SECONDS) if kind in (MAKE, IMPORT) else step_seconds
