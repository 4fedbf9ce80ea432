"""Calls the callback objects of a run, carries out what they ask for, and keeps their state in checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from qfleet.data import State
from qfleet.errors import UsageError
from qfleet.training.callbacks import Callback
from qfleet.training.callbacks.requests import RunRequests
from qfleet.training.callbacks.run_view import RunMoment, RunView
from qfleet.training.callbacks.settings import ChangeableSettings
from qfleet.training.log.run_log import RunLog
from qfleet.training.log.run_status import Ending, Row

HOOKS = ("on_start", "on_step", "on_update", "on_evaluation", "on_save", "on_end")
Hook = Callable[[RunView], object]


class RunCallbacks:
    """The callback objects of one run."""

    def __init__(self, callbacks: Sequence[Callback], run_log: RunLog) -> None:
        self.callbacks = list(callbacks)
        self.run_log = run_log
        self.requests = RunRequests()
        self.settings = ChangeableSettings(run_log.components, run_log)
        self.moment = RunMoment()
        self.view = RunView(run_log, self.settings, self.requests, self.moment)
        self.hooks = {name: written_hooks(self.callbacks, name) for name in HOOKS}
        self.wants_updates = bool(self.hooks["on_update"])
        self.seen_steps = run_log.steps
        self.started = False
        run_log.more_metrics = self.requests.take_metrics

    def call(self, name: str) -> None:
        """Call one method of every callback that has written it; what it raises ends the run."""
        for hook in self.hooks[name]:
            hook(self.view)

    # Moments of a run

    def start(self) -> None:
        """Training begins, or goes on after a resume or a recovery."""
        self.seen_steps = self.run_log.steps
        self.started = True
        self.call("on_start")
        self.apply_changes()

    def after_turn(self) -> None:
        """A turn of the loop is over: a safe point."""
        steps = self.run_log.steps
        if steps != self.seen_steps:
            self.moment.new_steps = steps - self.seen_steps
            self.seen_steps = steps
            self.call("on_step")
        self.apply_changes()

    def after_evaluation(self) -> None:
        """The policy was evaluated; changes come before the commit of the best policy, so that it holds them."""
        self.call("on_evaluation")
        self.apply_changes()

    def after_save(self, checkpoint: Path) -> None:
        """A checkpoint was committed."""
        self.moment.checkpoint = checkpoint
        if self.started:  # the first checkpoint comes before the first step
            self.call("on_save")

    def end(self, ending: Ending, score: Row | None) -> None:
        """The run is over."""
        self.moment.ending = ending
        self.moment.score = score
        self.call("on_end")

    def apply_changes(self) -> None:
        """Make the changes of settings that callbacks asked for."""
        if self.requests.changes:
            self.settings.apply(self.requests.take_changes())

    def close(self) -> None:
        """Close all callbacks."""
        for callback in self.callbacks:
            callback.close()

    # Checkpoints

    def state_dict(self) -> State:
        """Of a train state: the states of callbacks that have one, by class, and metrics that no row has shown yet."""
        states = [[class_name(each), plain_state(each)] for each in self.callbacks if hasattr(each, "state_dict")]
        metrics = self.requests.state_dict()
        return {**({"callbacks": states} if states else {}), **({"callback_metrics": metrics} if metrics else {})}

    def load_state_dict(self, state: State, checkpoint: Path) -> None:
        """Restore them from a checkpoint; each state goes to the next callback of the same class."""
        self.moment.checkpoint = checkpoint
        self.requests.load_state_dict(state.get("callback_metrics", {}))
        saved = saved_states(state)
        for callback in self.callbacks:
            if not hasattr(callback, "load_state_dict"):
                continue
            found = next((pair for pair in saved if pair[0] == class_name(callback)), None)
            if found is not None:
                saved.remove(found)
                callback.load_state_dict(found[1])
        warn_of_unused(self.run_log, saved)


def saved_states(state: State) -> list[tuple[str, Any]]:
    """The states of callbacks in a saved train state, by class."""
    return [(str(name), value) for name, value in state.get("callbacks", [])]


def warn_of_unused(run_log: RunLog, saved: list[tuple[str, Any]]) -> None:
    """Warn of states whose callbacks were not passed again; the next checkpoint does not hold them."""
    for name, _ in saved:
        run_log.warn(f"the checkpoint holds the state of a callback that was not passed again: {name}")


def written_hooks(callbacks: Sequence[Callback], name: str) -> list[Hook]:
    """The methods of this name that users have written."""
    empty = getattr(Callback, name)
    found = [getattr(callback, name) for callback in callbacks]
    return [hook for hook in found if getattr(hook, "__func__", hook) is not empty]


def class_name(callback: Callback) -> str:
    """`module:Class`."""
    kind = type(callback)
    return f"{kind.__module__}:{kind.__qualname__}"


def plain_state(callback: Callback) -> Any:
    """The state of a callback as plain JSON values; anything else is refused."""
    state = callback.state_dict()  # type: ignore[attr-defined]
    try:
        plain = msgspec.json.decode(msgspec.json.encode(state))
        if plain != state:
            raise TypeError("read again it is not the same")
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the state of the callback {class_name(callback)} cannot be saved",
            f"A state is made of numbers, texts, lists and dicts with texts as keys: {error}.",
            "Return such values from its state_dict().",
        ) from error
    return plain
