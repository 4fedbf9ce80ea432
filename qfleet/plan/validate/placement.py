"""Rules about actors: their number, their shares of the environments, and the runtime they run in."""

import re

from msgspec.structs import replace

from qfleet.plan.presets.pieces import ATARI, CARTPOLE
from qfleet.plan.schema import BufferReplay, FreshReplay, InlineRuntime, Plan, RayRuntime
from qfleet.plan.validate.case import Case, Problems, Rule

DISTRIBUTED_RUNTIMES = ("processes", "ray")  # runtimes whose actors have their own processes
ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}")


def has_central_inference(plan: Plan) -> bool:
    """Does one actor choose the actions of all environments?"""
    return not isinstance(plan.runtime, InlineRuntime) and getattr(plan.runtime, "inference", None) == "central"


def num_senders(plan: Plan) -> int:
    """How many actors send rollouts: one with central inference."""
    return 1 if has_central_inference(plan) else plan.actors.num


def has_actor_learners(plan: Plan) -> bool:
    """Is every learner an actor-learner, with its own environments and replay?"""
    return plan.learners.bundles and plan.learners.num > 1


def has_replay_process(plan: Plan) -> bool:
    """Does the replay have a process of its own?"""
    return not isinstance(plan.runtime, InlineRuntime) and plan.runtime.replay_process


def actor_learner_plan(plan: Plan) -> Plan:
    """The plan of one actor-learner: its share of environments, replay, steps before learning and batch."""
    if not has_actor_learners(plan) or not isinstance(plan.replay, BufferReplay):
        return plan
    num = plan.learners.num
    algo = plan.algo
    start = -(-algo.learn_start_steps // num)
    return replace(
        plan,
        env=replace(plan.env, num=plan.env.num // num),
        algo=replace(algo, batch_size=algo.batch_size // num, learn_start_steps=start),
        replay=replace(plan.replay, capacity=plan.replay.capacity // num),
    )


def _actor_learners_are_equal(case: Case) -> Problems:
    plan = case.plan
    num = plan.learners.num
    for path, total in (("env.num", plan.env.num), ("algo.batch_size", plan.algo.batch_size)):
        if has_actor_learners(plan) and total % num:
            message = f"{case.named(path)} is not a multiple of {case.named('learners.num')}"
            yield message, f"Set {path}={-(-total // num) * num}, or leave learners.bundles off."


def _inline_has_one_actor(case: Case) -> Problems:
    if case.plan.actors.num > 1 and isinstance(case.plan.runtime, InlineRuntime):
        message = f"{case.named('actors.num')} does not go with {case.named('runtime.type')}"
        yield message, f"Set runtime.type={' or '.join(DISTRIBUTED_RUNTIMES)}, or leave actors.num at 1."


def _shares_are_equal(case: Case) -> Problems:
    envs = case.plan.env.num
    actors = case.plan.actors.num
    if envs % actors:
        message = f"{case.named('env.num')} is not a multiple of {case.named('actors.num')}"
        yield message, f"Set env.num={-(-envs // actors) * actors}, or another actors.num."


def _shares_add_up(case: Case) -> Problems:
    actors = case.plan.actors
    if actors.envs is not None and actors.envs * actors.num != case.plan.env.num:
        message = f"{case.named('actors.num')} times {case.named('actors.envs')} is not {case.named('env.num')}"
        yield message, f"Set env.num={actors.envs * actors.num}, or leave actors.envs out."


def _members_share(case: Case) -> Problems:
    members = case.plan.population.num
    share = case.plan.env.num // case.plan.actors.num
    if share % members:
        message = f"{share} environments per actor are not a multiple of {case.named('population.num')}"
        yield message, f"Set env.num={members * case.plan.actors.num * max(1, share // members)}, or fewer actors."


def _workers_have_work(case: Case) -> Problems:
    share = actor_learner_plan(case.plan).env.num // case.plan.actors.num
    if case.plan.env.workers > share:
        message = f"{case.named('env.workers')} is more than the {share} environments they would step"
        yield message, f"Set env.workers={share} or less."


def _address_is_one(case: Case) -> Problems:
    address = case.plan.runtime.address if isinstance(case.plan.runtime, RayRuntime) else None
    if address is not None and not ADDRESS.fullmatch(address):
        yield f"{case.named('runtime.address')} is not host:port", "Give it as `ray start` prints it: 10.0.0.1:6379."


def _steps_end_first(case: Case) -> Problems:
    runtime = case.plan.runtime
    env = case.plan.env
    # Central inference also gives environments their own processes, except those stepped by native code.
    native = ATARI.search(env.id) or CARTPOLE.search(env.id)
    timed = env.workers or (has_central_inference(case.plan) and not native)
    if not isinstance(runtime, InlineRuntime) and timed and env.step_timeout_seconds >= runtime.hung_seconds:
        longer = f"Set runtime.hung_seconds={2 * env.step_timeout_seconds:g}, or a shorter env.step_timeout_seconds."
        yield f"{case.named('env.step_timeout_seconds')} is not below {case.named('runtime.hung_seconds')}", longer


def _chunks_fit(case: Case) -> Problems:
    runtime = case.plan.runtime
    rows = case.plan.replay.rows if isinstance(case.plan.replay, FreshReplay) else None
    if rows is not None and not isinstance(runtime, InlineRuntime) and runtime.chunk_rows > rows:
        message = f"{case.named('runtime.chunk_rows')} is more than {case.named('replay.rows')}"
        yield message, f"Set runtime.chunk_rows={rows} or less."


PLACEMENT_RULES: tuple[tuple[Rule, str], ...] = (
    (_inline_has_one_actor, "A single thread runs one actor; more of them need processes of their own."),
    (_actor_learners_are_equal, "All actor-learners have equal shares of the environments and of the batch."),
    (_shares_are_equal, "All actors have the same number of environments."),
    (_shares_add_up, "env.num counts the environments of all actors together."),
    (_members_share, "All members of a population have the same number of environments in each actor."),
    (_workers_have_work, "Each worker steps at least one environment."),
    (_steps_end_first, "An actor waiting for its environments would be mistaken for a hung one."),
    (_chunks_fit, "One rollout would fill two blocks of fresh experience, and one of them would be lost."),
    (_address_is_one, "The run joins this machine's Ray cluster as a driver; ray:// addresses are for clients."),
)
