"""Where the time of a run went: shares by stage, the bottleneck, the possible speed-up, and advice."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from qfleet.plan.schema import BufferReplay, FreshReplay, InlineRuntime, Plan, PrioritizedSampler
from qfleet.plan.validate.placement import num_senders
from qfleet.system.timers import STAGES

# The stages of each possible bottleneck. `actor`: the learner waits for them.
CAUSES = {
    "learner": ("update", "sync"),
    "replay": ("insert", "sample"),
    "world": ("env",),
    "policy": ("infer",),
    "actor": ("idle",),
    "save": ("save",),
    "eval": ("eval",),
    "compile": ("compile",),
    "overhead": ("other",),
}
LEARNING = ("insert", "sample", "update", "sync")
BUSY = ("env", "infer", "sync")  # an actor's stages, but for `wait`
WORK = tuple(stage for stage in STAGES if stage != "idle")  # the learner's; `other` may include waiting
NANO = 1e9

Times = Mapping[str, int]  # nanoseconds by stage, and `wall`
Shares = Mapping[str, float]


class Diagnosis(NamedTuple):
    """The cause that takes the largest share of the time, and the most that removing it would gain.

    `ceiling`: the largest speed-up, if only that cause were left (learner), or if it cost nothing (all others).
    """

    bottleneck: str
    share: float
    ceiling: float
    advice: str

    @property
    def text(self) -> str:
        """One sentence."""
        return f"{self.bottleneck}-bound: {self.advice}"


def times_between(now: Times, before: Times) -> dict[str, int]:
    """Times added between two readings."""
    return {stage: spent - before.get(stage, 0) for stage, spent in now.items()}


def with_other(times: Times) -> dict[str, int]:
    """Times of every stage, and `other`: the time that no stage covers."""
    laps = {stage: times[stage] for stage in STAGES}
    return {**laps, "other": max(0, times["wall"] - sum(laps.values()))}


def shares_of(times: Times) -> dict[str, float]:
    """Each stage's share of the total."""
    whole = sum(times.values())
    return {stage: spent / whole if whole else 0.0 for stage, spent in times.items()}


def diagnose(shares: Shares, plan: Plan, actors: Shares, cores: int = 2) -> Diagnosis:
    """Find the bottleneck from the shares of the learner's process and of the actors' processes, if there are any."""
    causes = {cause: sum(shares.get(stage, 0.0) for stage in stages) for cause, stages in CAUSES.items()}
    cause = max(causes, key=lambda name: causes[name])
    share = causes[cause]
    ceiling = 1 / max(share, 1e-9) if cause == "learner" else 1 / max(1 - share, 1e-9)
    advice = ADVICE[cause](plan, actors, cores).format(share=f"{share:.0%}", ceiling=times_as_fast(ceiling))
    return Diagnosis(cause, share, ceiling, advice)


def times_as_fast(factor: float) -> str:
    """1.15x, 2.5x or 14x."""
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x" if factor >= 2 else f"{factor:.2f}x"


# The advice for each cause; {share} and {ceiling} are filled in.


def _learner(plan: Plan, actors: Shares, cores: int) -> str:
    knobs = {FreshReplay: "replay.epochs, replay.minibatches, ", BufferReplay: "replay.samples_per_insert, "}
    waits = f" (the present ones waited {actors['wait']:.0%} of the time)" if actors else ""
    return (
        "updates take {share} of the time; at most {ceiling} as fast if everything else were free; more actors will "
        f"not help{waits}; fewer or smaller updates would: {knobs.get(type(plan.replay), '')}algo.batch_size, net.*"
    )


def _replay(plan: Plan, actors: Shares, cores: int) -> str:
    sampler = plan.replay.sampler if isinstance(plan.replay, BufferReplay) else None
    cheaper = "replay.sampler.type=uniform, " if isinstance(sampler, PrioritizedSampler) else ""
    return (
        "inserting and drawing experience takes {share} of the time; at most {ceiling} as fast without it: try "
        f"{cheaper}a smaller algo.batch_size, or fewer updates"
    )


def _world(plan: Plan, actors: Shares, cores: int) -> str:
    found = "stepping the environments takes {share} of the time; at most {ceiling} as fast without it"
    envs = plan.env.num
    tries = []  # settings that would step environments in parallel
    # Native code steps all copies, in threads of its own on the cores that updates leave.
    native = plan.env.id.startswith(("ALE/", "CartPole-v")) or "NoFrameskip" in plan.env.id
    if envs > 1 and not native and plan.env.workers < min(cores, envs):
        tries.append(f"env.workers={min(cores, envs)}")
    num_actors = next((num for num in range(min(cores, envs), 1, -1) if envs % num == 0), 1)
    if isinstance(plan.runtime, InlineRuntime) and num_actors > 1:
        tries.append(f"runtime.type=processes actors.num={num_actors}")
    if tries:
        return f"{found}: try {' or '.join(tries)}"
    alone = f": there is one environment, and a second could run beside it (env.num={cores})"
    return found + (alone if envs == 1 < cores else "")


def _policy(plan: Plan, actors: Shares, cores: int) -> str:
    return (
        "choosing actions takes {share} of the time; at most {ceiling} as fast without it: environments side by side "
        f"share one forward pass, so try env.num={2 * plan.env.num}"
    )


def _actor(plan: Plan, actors: Shares, cores: int) -> str:
    busy = max(BUSY, key=lambda stage: actors.get(stage, 0.0))
    where = f" (which spend {actors[busy]:.0%} of theirs on {busy})" if actors.get(busy) else ""
    num = plan.actors.num
    more = "more actors help, up to about {ceiling}" if num < cores else f"there are {num} on {cores} cores already"
    return "the learner waited {share} of the time for the actors" + f"{where}: {more}"


def _save(plan: Plan, actors: Shares, cores: int) -> str:
    seldom = f"save.every_steps={10 * plan.save.every_steps}"
    return "saving takes {share} of the time; at most {ceiling} as fast without it: try " + seldom


def _eval(plan: Plan, actors: Shares, cores: int) -> str:
    seldom = f"eval.every_steps={2 * plan.eval.every_steps}, or fewer eval.episodes and eval.test_episodes"
    return "evaluation takes {share} of the time; at most {ceiling} as fast without it: try " + seldom


def _compile(plan: Plan, actors: Shares, cores: int) -> str:
    return "compiling for this machine took {share} of the time: the result is cached for later runs"


def _overhead(plan: Plan, actors: Shares, cores: int) -> str:
    return "starting, writing rows and drawing the screen take {share} of the time: in a longer run they take less"


ADVICE: dict[str, Callable[[Plan, Shares, int], str]] = {
    "learner": _learner,
    "replay": _replay,
    "world": _world,
    "policy": _policy,
    "actor": _actor,
    "save": _save,
    "eval": _eval,
    "compile": _compile,
    "overhead": _overhead,
}


# The profile of a run, as in status.json and profile.json


def profile_of(
    times: Times,
    actors: Times,
    plan: Plan,
    *,
    env_steps: int,
    updates: int,
    cores: int,
    joules: float | None = None,
    savings: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Seconds and shares by stage, and the diagnosis. `env_steps` and `updates` were made in that time."""
    spent = with_other(times)
    shares = shares_of(spent)
    actor_shares = shares_of(actors)
    found = diagnose(shares, plan, actor_shares, cores)
    profile: dict[str, Any] = {
        "wall_seconds": round(times["wall"] / NANO, 3),
        "env_steps": env_steps,
        "updates": updates,
        "seconds": {stage: round(value / NANO, 3) for stage, value in spent.items()},
        "shares": rounded(shares),
        "learner_busy": round(sum(shares[stage] for stage in LEARNING), 4),
        "bottleneck": found.bottleneck,
        "share": round(found.share, 4),
        "ceiling": round(found.ceiling, 3),
        "advice": found.advice,
    }
    if actors:
        profile |= {"actors": num_senders(plan), "actor_shares": rounded(actor_shares)}
        profile |= {"actors_busy": round(sum(actor_shares[stage] for stage in BUSY), 4)}
        profile |= parallel_speed(times, actors, 1 + num_senders(plan))
    if joules is not None:
        profile |= {"joules": round(joules, 1), "joules_per_million_steps": round(joules / max(1, env_steps) * 1e6, 1)}
    return {**profile, "compression": savings} if savings else profile


def parallel_speed(times: Times, actors: Times, processes: int) -> dict[str, float]:
    """Seconds of work in all processes, the speed-up over one process, and the efficiency per process."""
    work = sum(times[stage] for stage in WORK) + sum(actors[stage] for stage in BUSY)
    speed_up = work / max(1, times["wall"])
    return {
        "processes": processes,
        "work_seconds": round(work / NANO, 3),
        "speed_up": round(speed_up, 4),
        "parallel_efficiency": round(speed_up / processes, 4),
    }


def rounded(shares: Shares) -> dict[str, float]:
    """Shares rounded to three digits."""
    return {stage: round(share, 3) for stage, share in shares.items()}
