"""Requests to a run that is under way, as a file in its folder, and the plan's own schedule of sync switches.

The command line writes such requests, so this module does not import torch.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from qfleet.errors import StorageError
from qfleet.files import is_file, remove_file, rename_inside
from qfleet.plan import SyncSwitch
from qfleet.plan.part import Positive
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Sync
from qfleet.watch.read_files import read_json
from qfleet.watch.run_files import write_json

if TYPE_CHECKING:
    from qfleet.build.components import Components
    from qfleet.learn.peers import Peers
    from qfleet.training.log.run_log import RunLog

WANTED = "wanted.json"
TAKEN = "wanted.taken.json"
POLL_SECONDS = 1.0


class SyncRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """How the learners of a run shall be synchronised, and how many there shall be."""

    sync: Sync
    learners: Positive


def write_request(folder: Path, request: SyncRequest) -> None:
    """Ask a run for a change; it is made at the run's next safe point."""
    write_json(folder / WANTED, msgspec.to_builtins(request))


def is_pending(folder: Path) -> bool:
    """Is there a request that the run has not finished?"""
    return is_file(folder, WANTED) or is_file(folder, TAKEN)


def take_request(folder: Path) -> SyncRequest | None:
    """Take the request, if there is one; ValueError if it cannot be read. `finish_request` must follow."""
    if not is_file(folder, WANTED):
        return None
    rename_inside(folder, WANTED, TAKEN)  # so that another request may come meanwhile, and is not lost
    return parse_request(read_json(folder / TAKEN))


def finish_request(folder: Path) -> None:
    """The request that was taken is finished."""
    remove_file(folder, TAKEN)


def parse_request(value: Any) -> SyncRequest:
    """A request from plain data; ValueError if it is none."""
    try:
        return msgspec.convert(value, SyncRequest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{WANTED}: {error}") from error


def current_plan(folder: Path, plan: Plan) -> Plan:
    """The plan with the sync and the number of learners that the run's status shows."""
    together = read_json(folder / "status.json").get("together")
    if together is None:
        return plan
    found = parse_request(together)
    learners = plan.learners
    return replace(plan, sync=found.sync, learners=replace(learners, num=found.learners))


@dataclass
class SyncControl:
    """Switches how learners are synchronised: by the plan's schedule, or by a request from outside."""

    components: "Components"
    run_log: "RunLog"
    switches: list[SyncSwitch]
    seen_updates: int  # up to which the schedule was followed
    polled_at: float = 0.0

    def restart(self) -> None:
        """The run was loaded from a checkpoint: follow the schedule from there."""
        self.seen_updates = self.components.learner.updates

    def follow_schedule(self) -> None:
        """Make the switch that the plan schedules for the updates made since the last call, if any."""
        before = self.seen_updates
        self.seen_updates = self.components.learner.updates
        due = [switch for switch in self.switches if before < switch.updates <= self.seen_updates]
        peers = self.components.peers
        if due and peers is not None:
            self.switch(peers, due[-1].sync)
            self.run_log.mark_inexact(peers.nondeterminism_reasons())

    def poll(self, save: Callable[[], object]) -> None:
        """Apply a request from outside and `save` the run, looking for one at most once a second."""
        peers = self.components.peers
        now = self.run_log.clock()
        if peers is None or now - self.polled_at < POLL_SECONDS:
            return
        self.polled_at = now
        folder = self.run_log.folder
        try:
            request = take_request(folder)
        except (ValueError, OSError) as cause:
            self.run_log.warn(f"the request to this run cannot be read: {cause}")
        else:
            if request is not None:
                self.apply(peers, request)
                save()  # a resumed run synchronises as its checkpoint says
        finish_request(folder)

    def apply(self, peers: "Peers", request: SyncRequest) -> None:
        """Change the number of learners and how they are synchronised."""
        peers.resize(request.learners)
        self.switch(peers, request.sync)
        self.run_log.mark_inexact(["learners were told to agree in another way, at a moment that no seed decides"])

    def switch(self, peers: "Peers", after: Sync) -> None:
        """Synchronise in this way from the next update on."""
        before = peers.sync_plan
        if after != before:
            peers.set_sync_plan(after)
        old, new = (str(sync.__struct_config__.tag) for sync in (before, after))
        text = f"{peers.num_learners} learners agree by {new} from now on"
        self.run_log.log_change("sync", text, before=old, after=new, learners=peers.num_learners)
        with suppress(StorageError):
            self.run_log.write_status()
