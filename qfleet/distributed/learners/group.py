"""All learners of a run: the driver's learner as rank 0, and learner workers elsewhere (`launcher`).

Every update scatters a batch, agrees on gradients (or weights) by the plan's strategy, and joins the priorities. Rank 0
holds the weights that count. When a learner is lost, the others leave the process group, form a new one with rank 0's
weights and learn from the same batch again, unless rank 0 had made its step by then; the lost learner is restarted in
the background and joins when it is ready.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from qfleet.audit.history import History
from qfleet.data import Batch, Report, Sequences, State
from qfleet.distributed.learners.actor_learner_state import ActorLearnerStates
from qfleet.distributed.learners.env_reports import EnvReports
from qfleet.distributed.learners.epoch_scatter import PositionSource
from qfleet.distributed.learners.launcher import LearnerLauncher
from qfleet.distributed.learners.messages import Hashes, ReadHashes
from qfleet.distributed.learners.process_group import ProcessGroup, is_synchronous, type_name
from qfleet.distributed.learners.traffic import Traffic
from qfleet.distributed.learners.update import GroupUpdater
from qfleet.distributed.learners.worker import state_hash
from qfleet.errors import UsageError
from qfleet.learn import BatchSource, Learner
from qfleet.nets import draws_random_numbers
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import AllreduceSync, Codec, NoCodec, sends_steps
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.system.worker_errors import WorkerLost


class LearnerGroup:
    """The driver's learner and its peers; `update` is that of one learner."""

    def __init__(
        self,
        plan: Plan,
        learner: Learner,
        launcher: LearnerLauncher,
        batch_source: BatchSource | None = None,
        positions: PositionSource | None = None,
    ) -> None:
        require_backend_for_device(plan, learner)
        self.plan = plan
        self.learner = learner
        self.env_reports = EnvReports(batch_source)
        self.process_group = ProcessGroup(plan, learner, launcher, self.env_reports, positions)
        self.pool = self.process_group.pool
        self.updater = GroupUpdater(self.process_group)
        self.actor_learners = None if batch_source is None else ActorLearnerStates(self.pool)
        self.traffic = Traffic()
        try:
            self.pool.resize(plan.learners.num)
            self.pool.await_ready()
        except BaseException:
            self.close()  # the caller has no group to close
            raise
        self.pool.started = True

    def update(self, batch: Batch | Sequences) -> Report:
        """One update; it may take several tries, with fewer learners each time."""
        group = self.process_group
        while True:
            try:
                group.ensure()
                self.traffic.begin(group.connections())
                report = self.updater.update(batch)
            except WorkerLost as cause:
                group.fail(cause)
                continue
            self.traffic.end()
            group.synced_updates = self.learner.updates
            if "reset" in report.stats and not isinstance(group.next_sync_plan, AllreduceSync):
                group.discard()  # shards, centres and duals were not reset: all start from rank 0's state
            return report

    def quiesce(self) -> None:
        """Wait until no learner computes and rank 0's learner holds the newest state."""
        self.updater.quiesce()

    def discard_state(self) -> None:
        """The run rolls back: discard the other learners' state and what they reported since."""
        self.process_group.discard()
        self.env_reports.discard()

    def states_equal(self, part: str = "all") -> bool:
        """Do all members have equal weights, target networks too ("targets"), and moments too ("all")?"""
        self.quiesce()
        members = self.process_group.members
        for handle in members:
            handle.ask(ReadHashes())
        own = state_hash(self.learner, part)
        replies = [handle.reply(Hashes, self.pool.reply_timeout_seconds)[0] for handle in members]
        return all(getattr(reply, part) == own for reply in replies)

    # Requests

    @property
    def sync_plan(self) -> SyncPlan:
        """The strategy from the next update on."""
        return self.process_group.next_sync_plan

    def set_sync_plan(self, sync_plan: SyncPlan) -> None:
        """Use this strategy from the next update on, without any codec that was rejected."""
        self.process_group.set_sync_plan(sync_plan)

    @property
    def num_learners(self) -> int:
        """The number of learners asked for, rank 0's included."""
        return self.pool.num_learners

    def resize(self, num: int) -> None:
        """Set the number of learners; stop surplus ones at once."""
        self.pool.resize(num)

    def take_sent_bytes(self) -> float | None:
        """Mean bytes that rank 0 sent per update since the last call."""
        return self.traffic.take()

    def take_events(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        events = self.pool.events
        self.pool.events = []
        return events

    def use_run_folder(self, folder: Path) -> None:
        """Keep the history of operations in the run's folder, if the plan asks for one."""
        if self.plan.log.history:
            self.process_group.history = History(folder / "history" / "team.jsonl")
            self.process_group.history.note("team", "began", group=0)

    # State

    @property
    def env_steps(self) -> int:
        """Environment steps of the other learners."""
        return self.env_reports.steps

    def state_dict(self) -> State:
        """Strategy, rejected codecs, number of learners and their environment steps."""
        rejected = sorted(self.process_group.rejected_codecs, key=str)
        return {
            "sync": msgspec.json.encode(self.sync_plan).decode(),
            "mistrusted": msgspec.json.encode(rejected).decode(),
            "learners": self.num_learners,
            "steps": self.env_steps,
        }

    def load_state_dict(self, state: State) -> None:
        """Restore them; codecs rejected since stay rejected. Older checkpoints have no codecs, or no steps."""
        rejected = msgspec.json.decode(state.get("mistrusted", "[]"), type=set[Codec])
        self.process_group.rejected_codecs |= rejected
        self.set_sync_plan(msgspec.json.decode(state["sync"], type=SyncPlan))
        self.resize(int(state["learners"]))
        self.env_reports.steps = int(state.get("steps", 0))

    def publish_weights(self) -> None:
        """Form the group now, so that actor-learners act with rank 0's weights from the first step on."""
        if self.actor_learners is not None:
            try:
                self.process_group.ensure()
            except WorkerLost as cause:
                self.process_group.fail(cause)

    def state_files(self) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
        """Names and contents of the files with each actor-learner's state; None once that learner is lost."""
        if self.actor_learners is not None:
            yield from self.actor_learners.files()

    def load_state_files(self, names: Sequence[str], read: Callable[[str], bytes]) -> None:
        """Restore actor-learners from these files; one without a complete set keeps its state."""
        if self.actor_learners is not None:
            self.actor_learners.load(names, read)

    def reseed(self, number: int) -> None:
        """Let actor-learners sample other batches from here on."""
        if self.actor_learners is not None:
            self.actor_learners.reseed(number)

    # Reproducibility

    def inexact_resume_reasons(self) -> list[str]:
        """Why a resumed run is not the one that its seed determines."""
        plan = self.sync_plan
        exact = isinstance(plan, AllreduceSync) and isinstance(plan.codec, NoCodec) and not sends_steps(plan)
        reasons = [] if exact else [f"learners that agree by {type_name(plan)} begin anew from the saved weights"]
        # An actor-learner's generator is in its files.
        reseeded = self.actor_learners is None and draws_random_numbers(self.plan.net)
        if reseeded or self.plan.learners.balance:
            reasons.append("other learners draw new random numbers, or shares depend on the clock")
        return reasons

    def nondeterminism_reasons(self) -> list[str]:
        """Why no seed determines this run, even if it is never interrupted."""
        waits = is_synchronous(self.sync_plan)
        reasons = [] if waits else [f"learners that agree by {type_name(self.sync_plan)} do not wait for each other"]
        if self.plan.learners.balance:
            reasons.append("learners share by the clock")
        return reasons

    def close(self) -> None:
        """Stop all learners and shards."""
        self.process_group.disband(pull=False)
        self.process_group.history.close()
        self.pool.close()


def require_backend_for_device(plan: Plan, learner: Learner) -> None:
    """Only NCCL connects accelerators; codecs and shards compute on a CPU."""
    if learner.device.type != "cpu" and plan.learners.backend != "nccl":
        raise UsageError(
            f"learners.num does not go with runtime.device={learner.device.type}",
            "Learners with accelerators agree by NCCL.",
            "Add learners.backend=nccl, or set runtime.device=cpu.",
        )
