"""What a learner, and the run around it, asks of other learners (see `distributed/learners`)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from qfleet.data import Batch, Report, Sequences
from qfleet.plan.sync_schema import Codec
from qfleet.plan.sync_schema import Sync as SyncPlan


class Peers(Protocol):
    """Other learners, with whom every step is agreed on."""

    agreement: SyncPlan
    num: int  # of learners, our own included
    steps: int  # that they have made in environments of their own
    mistrusted: set[Codec]  # codecs that were given up

    def switch(self, agreement: SyncPlan) -> None:
        """Agree in another way from the next update on."""
        ...

    def resize(self, num: int) -> None:
        """Be so many learners from now on, our own included."""
        ...

    def update(self, batch: Batch | Sequences) -> Report:
        """One update that everybody has a part in."""
        ...

    def rest(self) -> None:
        """Return when nobody is learning, and our own learner has all that there is."""
        ...

    def forget(self) -> None:
        """Our own learner's weights are about to be replaced: nothing that others have is of use."""
        ...

    def meet(self) -> None:
        """The run begins, or begins again: whoever acts by itself acts by these weights."""
        ...

    def reseed(self, number: int) -> None:
        """Let those who draw batches of their own draw others from here on."""
        ...

    def archive(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """Names of files that hold what they remember, and their content; None when somebody is lost meanwhile."""
        ...

    def adopt(self, names: Sequence[str], read: Callable[[str], bytes]) -> None:
        """Let them go on with what these files hold."""
        ...

    def take_sent_bytes(self) -> float | None:
        """Bytes that an update had our own learner send to others, in the mean since this was last asked."""
        ...

    def take_events(self) -> list[dict[str, Any]]:
        """What happened among them since this was last asked."""
        ...

    def settle(self, folder: Path) -> None:
        """The run's folder is here."""
        ...

    def doubts(self) -> list[str]:
        """Why a run that goes on from a checkpoint is not the one that its seed decides."""
        ...

    def chances(self) -> list[str]:
        """Why no seed decides what this run becomes, even if it is never interrupted."""
        ...

    def close(self) -> None:
        """Let them go."""
        ...
