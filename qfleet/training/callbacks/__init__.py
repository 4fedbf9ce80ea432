"""Callbacks: what users pass to `train` and `resume` to see a run while it trains. This file imports nothing slow."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.training.callbacks.run_view import RunView

RowCallback: TypeAlias = Callable[[dict[str, Any]], object]  # called with every row; True stops the run


class Callback:
    """A callback of your own: derive from it and write the methods that you want; the others cost nothing.

    It is a class and not a Protocol, so that an object is told apart from a plain function of a row, and so that a
    run can see which methods you wrote. If you also write `state_dict()` (plain JSON values) and
    `load_state_dict(state)`, the state is saved in every checkpoint and restored when the run is resumed.
    """

    def on_start(self, run: "RunView") -> None:
        """Training begins or goes on: at the start, after a resume, and after going back to a checkpoint.

        Args:
            run: the run as it is now.
        """

    def on_step(self, run: "RunView") -> None:
        """A turn of the training loop has made `run.new_steps` environment steps and the updates that go with them.

        Args:
            run: the run as it is now.
        """

    def on_update(self, run: "RunView") -> None:
        """One update was made; `run.learner` has its loss and gradient norm. It may come in the middle of a turn.

        Args:
            run: the run as it is now.
        """

    def on_evaluation(self, run: "RunView") -> None:
        """The policy was evaluated on validation episodes; the row is `run.last_evaluation`.

        Args:
            run: the run as it is now.
        """

    def on_save(self, run: "RunView") -> None:
        """A checkpoint was committed; its folder is `run.checkpoint`.

        Args:
            run: the run as it is now.
        """

    def on_end(self, run: "RunView") -> None:
        """The run has ended without an error; `run.ending` says how, `run.score` is the score on test episodes.

        Args:
            run: the run as it is now.
        """

    def close(self) -> None:
        """The last call, also after an error: close what you have opened."""


AnyCallback: TypeAlias = Callback | RowCallback


def checked_callbacks(callbacks: Iterable[AnyCallback]) -> list[AnyCallback]:
    """All callbacks as a list; what cannot be one is refused before the run begins."""
    if isinstance(callbacks, Callback) or callable(callbacks):
        raise UsageError(
            f"callbacks= was given one {type(callbacks).__name__}", "It takes a list.", "Write callbacks=[...]."
        )
    found = list(callbacks)
    objects, _ = split_callbacks(found)
    for each in objects:
        require_known_methods(each)
    return found


def require_known_methods(callback: Callback) -> None:
    """Refuse a method that is named like one of a callback, but would never be called."""
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in known and callable(getattr(callback, name)):
            raise UsageError(
                f"the callback {type(callback).__name__} has a method {name}, which a run never calls",
                f"It calls {', '.join(known)}.",
                "Correct the name, or let it begin in another way.",
            )


def split_callbacks(callbacks: Iterable[AnyCallback]) -> tuple[list[Callback], list[RowCallback]]:
    """The callback objects, and the plain functions of a row; anything else is refused."""
    objects: list[Callback] = []
    functions: list[RowCallback] = []
    for each in callbacks:
        if isinstance(each, Callback):
            objects.append(each)
        elif callable(each) and not (isinstance(each, type) and issubclass(each, Callback)):
            functions.append(each)
        else:
            raise refusal(each)
    return objects, functions


def refusal(given: object) -> UsageError:
    """Why this cannot be a callback."""
    if isinstance(given, type):
        return UsageError(
            f"callbacks= was given the class {given.__name__}",
            "A run calls the methods of an object.",
            f"Write callbacks=[{given.__name__}()].",
        )
    return UsageError(
        f"callbacks= was given a {type(given).__name__}",
        "A callback is an object of a class that derives from qfleet.Callback, or a function of a row.",
        "Derive its class from qfleet.Callback, or pass a function: callbacks=[lambda row: print(row)].",
    )
