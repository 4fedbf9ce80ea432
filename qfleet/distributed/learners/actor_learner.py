"""An actor-learner: a learner worker with environments and a replay of its own (Gorila, Nair et al. 2015).

Its rate limiter is made for its part of all steps: between requests it acts until the limiter allows the next update,
so that a request to learn finds a batch ready. The driver reads its state for a checkpoint, and writes it back when a
run resumes, file by file.
"""

import secrets
import time
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from qfleet.act import Actor
from qfleet.build.components import Components, LearnerSide
from qfleet.build.custom_parts import NO_CUSTOM_PARTS, CustomParts
from qfleet.build.make import join_components, make_actor
from qfleet.build.seeds import ACTOR_LEARNERS, stream
from qfleet.data import Batch, Episode, Sequences, Spec, State
from qfleet.data.state_reader import saved_count, saved_value
from qfleet.distributed.learners.messages import EnvReport, LearnOwn, ReplayTotals
from qfleet.distributed.learners.shares import BatchTotals, share_of_replay
from qfleet.envs import TRAIN, make_world
from qfleet.learn import Learner, ReplaySource
from qfleet.plan.schema import Plan
from qfleet.plan.validate.placement import actor_learner_plan
from qfleet.replay import Prioritized, Replay, make_replay
from qfleet.save import pack_state, unpack_state
from qfleet.sync.comm import CommLost
from qfleet.training.checkpoints.replay_segments import pack_rows, restore_rows, segments_of

# in one report
MAX_EPISODES = 1000
MAX_FAULTS = 20
# random streams of an actor-learner
WORLD_STREAM = 1
ACTION_STREAM = 2
SAMPLING_STREAM = 3
RESAMPLING_STREAM = 4
STATE_FILES = ("state.json", "state.safetensors")
FILE_LIST = ""  # the name of the list of names


class ActorLearner:
    """The components of one actor, one replay and one learner, which updates when the driver asks for it."""

    def __init__(
        self, components: Components, number: int, learners: int, timeout_seconds: float, *, late: bool
    ) -> None:
        actor = components.actor
        batch_source = components.batch_source
        learner = components.learner
        if not (isinstance(actor, Actor) and isinstance(batch_source, ReplaySource) and isinstance(learner, Learner)):
            raise TypeError("an actor-learner is one actor, one replay and one learner")
        self.components = components
        self.actor = actor
        self.batch_source = batch_source
        self.learner = learner
        self.number = number
        self.learners = learners
        self.timeout_seconds = timeout_seconds
        self.instance_id = secrets.token_hex(4)  # names its files: after a restart their content is another
        self.late = late  # it was started after the others, and has not caught up with them
        self.total_steps = 0  # of all actor-learners, by rank 0's last request
        self.last_totals: ReplayTotals | None = None  # at the last draw, by which batches count until the next report
        self.policy_version: int | None = None  # the update whose weights the policy has
        self.paused = True  # it does not act before it has joined a group and has weights to act with
        self.finished: list[Episode] = []
        self.faults: list[Any] = []
        self.written: dict[str, bytes] = {}
        self.reading = False  # its state is being read, and must not change meanwhile
        actor.exploration_step = self.exploration_step
        actor.start()

    def exploration_step(self) -> int:
        """Steps of all actor-learners, by which exploration is scheduled."""
        return max(self.total_steps, self.actor.steps * self.learners)

    # Acting and learning

    def act_when_idle(self) -> bool:
        """With no request to handle, step every lane if the next update needs it; False if it does not."""
        if self.paused or self.reading or not self.needs_steps:
            return False
        self.act()
        return True

    @property
    def needs_steps(self) -> bool:
        """Are more steps needed before the next update?"""
        return not self.batch_source.limiter.can_update(self.batch_source.steps) or not len(self.batch_source.replay)

    def act(self) -> None:
        """One step in every lane."""
        if self.policy_version != self.learner.updates:
            self.actor.policy.load_weights(self.learner.updates, self.learner.weights())
            self.policy_version = self.learner.updates
        self.actor.send()
        rollout, finished = self.actor.receive()
        self.batch_source.insert(rollout)
        self.finished += finished

    def act_until_ready(self) -> bool:
        """Act until the next update is allowed; False if that took too long and the replay has some items."""
        until = time.monotonic() + self.timeout_seconds
        while self.needs_steps and (time.monotonic() < until or not len(self.batch_source.replay)):
            if time.monotonic() > until + self.timeout_seconds:
                raise CommLost("nothing to learn from in time")
            self.act()
        return not self.needs_steps

    def on_joined(self, updates: int, steps: int) -> None:
        """The learner has joined a group and has rank 0's weights, after these updates and steps."""
        self.policy_version = None
        self.paused = False
        self.reading = False
        # Not late, yet without updates: the run resumed from a checkpoint without this actor-learner.
        if self.late or (updates and not self.batch_source.limiter.updates):
            self.late = False
            self.catch_up(updates, steps)

    def catch_up(self, updates: int, steps: int) -> None:
        """Set all schedules to where the others are, and start learning without waiting for a full replay."""
        limiter = self.batch_source.limiter
        sampler = self.batch_source.replay.sampler
        limiter.start_steps = 0
        limiter.updates = updates
        limiter.forgiven = -updates
        if isinstance(sampler, Prioritized):
            sampler.draws = updates
        self.batch_source.update_n_step()
        self.total_steps = steps

    def draw_batch(self, request: LearnOwn) -> tuple[Batch | Sequences, float]:
        """A batch from the own replay, and the weight of its gradient among those of all actor-learners."""
        self.paused = self.reading = False
        kept_pace = self.act_until_ready()
        self.total_steps = request.steps  # only now, for the same exploration whenever the request came
        if (batch := self.batch_source.replay.sample(self.batch_source.batch_size)) is None:
            raise CommLost("nothing to learn from")
        own = self.batch_source.replay.totals()
        self.last_totals = ReplayTotals(
            own.items, own.mass, own.beta, own.top, steps=self.batch_source.steps, behind=not kept_pace
        )
        totals = BatchTotals(request.learners, request.items, request.mass, request.top)
        return batch, share_of_replay(totals, own)

    def reseed(self, number: int) -> None:
        """Sample other batches from here on."""
        self.batch_source.replay.reseed(own_generator(self.components.plan, self.number, number, RESAMPLING_STREAM))

    # Reports

    def report(self) -> EnvReport:
        """Totals of the replay at the last draw, episodes and faults; the same again until `discard_reported`."""
        self.faults += [{**asdict(fault), "actor": self.number} for fault in self.actor.take_faults()]
        finished = self.finished[:MAX_EPISODES]
        info = [episode[2:] for episode in finished] if self.num_info else []
        episodes = [episode[:2] for episode in finished]
        return EnvReport(self.instance_id, episodes, self.faults[:MAX_FAULTS], self.last_totals, info)

    def take_report(self) -> EnvReport:
        """The report, whose episodes and faults are not reported again."""
        report = self.report()
        self.discard_reported()
        return report

    def discard_reported(self) -> None:
        """Drop the episodes and faults of the report that was sent."""
        del self.finished[:MAX_EPISODES]
        del self.faults[:MAX_FAULTS]

    # State, as files

    def read_file(self, name: str) -> bytes:
        """A whole file; between the first and the last one the state does not change."""
        self.reading = name != STATE_FILES[-1]
        replay = self.batch_source.replay
        segments = {segment.name: segment for segment in segments_of(replay)}
        if name == FILE_LIST:
            return msgspec.json.encode([self.instance_id, *segments, *STATE_FILES])
        if name in STATE_FILES:
            return pack_state(self.state_dict())[name]
        return pack_rows(replay, segments[name])

    def state_dict(self) -> State:
        """Everything but the replay's rows."""
        return {
            "line": self.components.state_dict(),
            "start_steps": self.batch_source.limiter.start_steps,
            "finished": [list(episode[:2]) for episode in self.finished],
            **({"info": np.array([episode[2:] for episode in self.finished])} if self.num_info else {}),
            "all_steps": self.total_steps,
            "held": {} if self.last_totals is None else msgspec.structs.asdict(self.last_totals),
            "late": self.late,
        }

    def write_file(self, name: str, content: bytes) -> None:
        """Keep a saved file; the list of files comes first, and clears what was written before."""
        if name == FILE_LIST:
            self.written.clear()
        else:
            self.written[name] = content

    def load_written(self) -> int:
        """Restore the state that was written, and pause until a group forms; the number of lanes not re-driven."""
        files = self.written
        self.written = {}
        state = unpack_state({name: files.pop(name) for name in STATE_FILES})
        replay = state["line"]["feed"]["replay"]
        restore_rows(self.batch_source.replay.store, files, lambda name, most_bytes: files[name], replay)
        lost = self.components.load_state_dict(state["line"])
        self.batch_source.limiter.start_steps = saved_count(state, "start_steps")
        self.total_steps = saved_count(state, "all_steps")
        self.late = bool(saved_value(state, "late"))
        held = saved_value(state, "held")
        self.last_totals = msgspec.convert(held, ReplayTotals) if held else None
        self.finished = self.saved_episodes(state)
        self.paused = True
        return int(lost.sum())

    @property
    def num_info(self) -> int:
        """Numbers of `log.info` for each episode."""
        return len(self.components.plan.log.info)

    def saved_episodes(self, state: State) -> list[Episode]:
        """Episodes that were not reported yet; `log.info` may have changed since."""
        pairs = [(float(value), int(length)) for value, length in saved_value(state, "finished")]
        info = np.asarray(state.get("info", ()), np.float64)
        if info.shape != (len(pairs), self.num_info):
            info = np.full((len(pairs), self.num_info), np.nan)
        return [(*pair, *numbers) for pair, numbers in zip(pairs, info.tolist(), strict=True)]

    def close(self) -> None:
        """Close the environments."""
        self.components.close()


def own_generator(plan: Plan, number: int, incarnation: int, use: int) -> np.random.Generator:
    """The random generator of one incarnation of an actor-learner, for one use."""
    return stream(plan.seed, ACTOR_LEARNERS, number, incarnation, use)


def make_actor_learner(
    plan: Plan, env_spec: Spec, number: int, incarnation: int, custom_parts: CustomParts = NO_CUSTOM_PARTS
) -> ActorLearner:
    """The actor-learner of learner `number`; each incarnation has its own seeds, and all but the first start late."""
    own = actor_learner_plan(plan)
    seed = int(own_generator(plan, number, incarnation, WORLD_STREAM).integers(2**31))
    threads = plan.runtime.threads or 1
    world = make_world(
        own.env,
        seed=seed,
        stream=TRAIN,
        num=own.env.num,
        make=custom_parts.env,
        threads=threads,
        info=plan.log.info,
    )

    def make_own_actor(learning: LearnerSide) -> Actor:
        # A learner added beyond the plan's number explores like one of the first.
        actor = make_actor(plan, world, learning.policy, custom_parts.explore, worker=number % plan.learners.num)
        actor.rng = own_generator(plan, number, incarnation, ACTION_STREAM)
        actor.source = (0, 0)  # the only actor of its replay
        return actor

    def make_own_replay(part: Plan, spec: Spec) -> Replay:
        rng = own_generator(plan, number, incarnation, SAMPLING_STREAM)
        return make_replay(part, spec, part.env.num, rng, custom_parts.sampler)

    components = join_components(plan, env_spec, make_own_actor, custom_parts, make_own_replay)
    return ActorLearner(components, number, plan.learners.num, plan.learners.timeout_seconds / 2, late=incarnation > 0)
