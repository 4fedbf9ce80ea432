"""The Protocol of a group of learners, as the training loop uses it (see `distributed/learners`)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from qfleet.data import Batch, Report, Sequences, State
from qfleet.plan.sync_schema import Sync as SyncPlan


class Peers(Protocol):
    """All learners of a run, the driver's own included; `update` is that of one learner."""

    @property
    def sync_plan(self) -> SyncPlan:
        """The strategy from the next update on."""

    @property
    def num_learners(self) -> int:
        """The number of learners, the driver's included."""

    @property
    def env_steps(self) -> int:
        """Steps of the other learners in environments of their own."""

    def update(self, batch: Batch | Sequences) -> Report:
        """One update by all learners."""

    def set_sync_plan(self, sync_plan: SyncPlan) -> None:
        """Use this strategy from the next update on."""

    def resize(self, num: int) -> None:
        """Set the number of learners, the driver's included; stop surplus ones at once."""

    def quiesce(self) -> None:
        """Wait until no learner computes and the driver's learner holds the newest state."""

    def discard_state(self) -> None:
        """The driver's weights are about to be replaced: discard the other learners' state and reports."""

    def publish_weights(self) -> None:
        """The run begins or continues: give these weights to learners that act by themselves."""

    def reseed(self, number: int) -> None:
        """Let learners with a replay of their own sample other batches from here on."""

    def state_dict(self) -> State:
        """Strategy and number of learners."""

    def load_state_dict(self, state: State) -> None:
        """Restore them."""

    def state_files(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """Names of files with the other learners' state, and their content; None once a learner is lost."""

    def load_state_files(self, names: Sequence[str], read: Callable[[str], bytes]) -> None:
        """Restore the other learners' state from these files."""

    def take_sent_bytes(self) -> float | None:
        """Mean bytes that the driver's learner sent per update since the last call."""

    def take_events(self) -> list[dict[str, Any]]:
        """Events since the last call."""

    def use_run_folder(self, folder: Path) -> None:
        """Keep records in the run's folder from now on."""

    def inexact_resume_reasons(self) -> list[str]:
        """Why a resumed run is not the one that its seed determines."""

    def nondeterminism_reasons(self) -> list[str]:
        """Why no seed determines this run, even if it is never interrupted."""

    def close(self) -> None:
        """Stop all other learners."""
