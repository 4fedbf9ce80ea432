"""The components of a run, and what they are for the training loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from qfleet.act import Explorer, Policy, PopulationPolicy
from qfleet.audit.history import HistoryLog
from qfleet.build.seeds import device_rng, set_device_rng
from qfleet.data import Array, Batch, Report, Rollout, Sequences, Spec, State
from qfleet.data.state_reader import saved_count
from qfleet.learn import BatchSource, Learner, PopulationLearner, ReplaySource, SizedSource, dormant_units
from qfleet.learn.peers import Peers
from qfleet.nets import set_noise
from qfleet.plan.schema import Plan, SteadyBatch, SteadyRate
from qfleet.system.restart_budget import RestartBudget

if TYPE_CHECKING:
    from qfleet.datasets.format import Dataset


class ReplayProcess(Protocol):
    """A replay in another process."""

    budget: RestartBudget  # how often it may be started again

    def use_run_folder(self, folder: Path) -> None:
        """Set the folder of the run."""

    def start(self) -> None:
        """Start the process, with an empty replay."""

    def flush(self) -> None:
        """Return when all requests are done."""


class DatasetRecorder(Protocol):
    """Records what the actors do into a data set."""

    def state_dict(self) -> State:
        """What must survive a restart."""

    def load_state_dict(self, state: State | None) -> None:
        """Go on from there; None: the run began without a recording."""

    def require_open(self) -> None:
        """Refuse to record on after the data set is complete."""

    def publish(self, env_steps: int) -> "Dataset":
        """The run is done: complete the data set."""

    def close(self) -> None:
        """Release what it holds."""


class ActorSide(Protocol):
    """What acts for a run: one actor in this process, or many in other processes."""

    is_remote: bool  # do they live in other processes?
    policy: Policy | PopulationPolicy
    explorer: Explorer

    def start(self) -> None:
        """Begin the first episodes."""

    def state_dict(self) -> State:
        """What must survive a restart."""

    def load_state_dict(self, state: State) -> Array:
        """Load it; returns the lanes [B] whose environment could not be restored."""

    def stop(self) -> None:
        """Stop acting until the run goes on, if it does."""

    def close(self) -> None:
        """Close worlds and processes."""


class RemoteActors(ActorSide, Protocol):
    """Actors that live in other processes, as the training loop uses them."""

    history: HistoryLog
    keeps_history: bool
    until_steps: int  # where the run ends: no rollout is taken beyond it
    version: int  # of the weights that were published last
    workers: int

    def use_run_folder(self, folder: Path, tell: Callable[..., object]) -> None:
        """Set the folder of the run; `tell` is called with what happens to actors."""

    def poll(self) -> None:
        """Replace actors that failed."""

    def publish(self, version: int, weights: Any) -> None:
        """Publish the newest weights to all actors."""

    def collect(self) -> Rollout | None:
        """The next rollout, if one has arrived."""

    def insert(self, rollout: Rollout) -> None:
        """Put a rollout into the replay."""

    def drain_stats(self) -> dict[str, Any]:
        """What happened to actors since the last call."""

    def counts(self) -> dict[str, int]:
        """Nanoseconds by stage and bytes sent, of all actors so far."""

    def num_working(self) -> int:
        """Actors that are at work."""

    def num_given_up(self) -> int:
        """Actors that failed too often and are not started again."""


@dataclass
class Components:
    """All parts of one run."""

    plan: Plan
    spec: Spec
    actor: ActorSide
    batch_source: BatchSource
    learner: Learner | PopulationLearner
    peers: Peers | None = None  # the group of several learners, which has `learner` as its rank 0
    recorder: DatasetRecorder | None = None  # of a data set
    remote_replay: ReplayProcess | None = None  # the process of the replay, if it has one
    notes: list[str] = field(default_factory=list)  # what was measured and chosen, shown at the start
    inexact_reasons: list[str] = field(default_factory=list)  # why the plan and its seed alone do not decide this run
    changed_settings: set[str] = field(default_factory=set)  # paths of settings that callbacks have changed

    @property
    def remote_actors(self) -> RemoteActors | None:
        """The actors, if they are in other processes."""
        return cast("RemoteActors", self.actor) if self.actor.is_remote else None

    @property
    def steps(self) -> int:
        """Environment steps that arrived, those of other learners' own environments too."""
        return self.batch_source.steps + (0 if self.peers is None else self.peers.env_steps)

    @property
    def forgiven(self) -> int:
        """Updates that will never be made."""
        return self.batch_source.limiter.forgiven if isinstance(self.batch_source, ReplaySource) else 0

    @property
    def policy(self) -> Policy:
        """The policy that the run is making: of a population, the leader's."""
        return self.policies[self.learner.leader_index if isinstance(self.learner, PopulationLearner) else 0]

    @property
    def policies(self) -> list[Policy]:
        """Every policy that acts."""
        acting = self.actor.policy
        return acting.policies if isinstance(acting, PopulationPolicy) else [acting]

    def update(self, batch: Batch | Sequences) -> Report:
        """One update, by all learners if there are several."""
        return self.learner.update(batch) if self.peers is None else self.peers.update(batch)

    def state_dict(self) -> State:
        """Everything but weights, moments and replay rows, which have files of their own."""
        drawn = device_rng(self.plan.runtime.device)
        return {
            "actor": self.actor.state_dict(),
            "feed": self.batch_source.state_dict(),
            "updates": self.learner.updates,
            "learning_rate": self.learner.learning_rate,
            "torch": torch.get_rng_state().numpy().copy(),  # a torso's dropout draws from it
            **({} if drawn is None else {"accelerator": drawn}),
            **({"changed": sorted(self.changed_settings)} if self.changed_settings else {}),
            **({} if self.peers is None else {"together": self.peers.state_dict()}),
            **({} if self.recorder is None else {"dataset": self.recorder.state_dict()}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> Array:
        """Load it; returns the lanes [B] whose environment could not be restored."""
        self.batch_source.load_state_dict(state["feed"], with_replay=with_replay)
        self.learner.updates = saved_count(state, "updates")
        # Before a rate could be steered it was the plan's own, which the learner has.
        self.learner.learning_rate = float(state.get("learning_rate", self.learner.learning_rate))
        self.changed_settings = {str(path) for path in state.get("changed", ())}
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        set_device_rng(self.plan.runtime.device, state.get("accelerator"))
        if self.peers is not None and "together" in state:
            self.peers.load_state_dict(state["together"])
        if self.recorder is not None:  # before the actors, which may seal their lanes
            self.recorder.load_state_dict(state.get("dataset"))
        return self.actor.load_state_dict(state["actor"])

    def dormant(self) -> float | None:
        """The share of units that hardly ever fire, by the policy's network: without its noise it draws nothing."""
        self.policy.noisy = False
        set_noise(self.policy.net, active=False)
        self.policy.refresh_weights()
        return dormant_units(self.policy.net, self.batch_source.replay)

    def current_settings(self) -> State:
        """The present values of settings that the plan lets change."""
        plan = self.plan
        learner = self.learner
        batch_source = self.batch_source
        now: State = {}
        scheduled = plan.optim.decay_updates is not None or plan.optim.warm_updates > 0
        changed = self.changed_settings
        if scheduled or plan.steer.learning_rate != SteadyRate() or "optim.learning_rate" in changed:
            now["learning_rate"] = learner.current_rate()
        varies = plan.steer.batch != SteadyBatch() or "algo.batch_size" in changed
        if isinstance(batch_source, SizedSource) and varies:
            now["batch_size"] = batch_source.batch_size
        if isinstance(batch_source, ReplaySource) and batch_source.anneal is not None:
            now |= {"n_step": batch_source.replay.n_step.n, "discount": batch_source.replay.n_step.gamma}
        if learner.reset is not None:
            now["resets"] = learner.reset.number(learner.updates)
        return now

    def wait_until_idle(self) -> None:
        """Return when every learner is idle, and their common weights are in `learner`."""
        if self.peers is not None:
            self.peers.quiesce()

    def close(self) -> None:
        """Close actors, other learners and the replay."""
        self.actor.close()
        if self.peers is not None:
            self.peers.close()
        self.batch_source.close()
        if self.recorder is not None:
            self.recorder.close()


@dataclass
class LearnerSide:
    """The components that learn, as the actors see them."""

    batch_source: BatchSource
    learner: Learner | PopulationLearner
    policy: Policy | PopulationPolicy  # that is evaluated and saved
