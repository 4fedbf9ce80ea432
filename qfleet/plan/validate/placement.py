"""Rules about who acts where: actors, their shares of the environments, and the runtime they live in."""

import re

from msgspec.structs import replace

from qfleet.plan.presets.pieces import ATARI, CARTPOLE
from qfleet.plan.schema import BufferReplay, FreshReplay, InlineRuntime, Plan, RayRuntime
from qfleet.plan.validate.case import Case, Problem, Rule

ELSEWHERE = ("processes", "ray")  # runtimes whose actors live elsewhere
ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}")


def is_central(plan: Plan) -> bool:
    """Does one actor choose everybody's actions?"""
    return not isinstance(plan.runtime, InlineRuntime) and getattr(plan.runtime, "inference", None) == "central"


def num_senders(plan: Plan) -> int:
    """How many actors send rollouts: one, if it acts for all the others."""
    return 1 if is_central(plan) else plan.actors.num


def has_bundles(plan: Plan) -> bool:
    """Does every learner act and remember by itself?"""
    return plan.learners.bundles and plan.learners.num > 1


def has_replay_process(plan: Plan) -> bool:
    """Has the replay a process of its own?"""
    return not isinstance(plan.runtime, InlineRuntime) and plan.runtime.replay_process


def one_bundle(plan: Plan) -> Plan:
    """The plan of one bundle: its part of the environments, the replay, the steps before learning and the batch."""
    if not has_bundles(plan) or not isinstance(plan.replay, BufferReplay):
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


def _bundles_are_equal(case: Case) -> Problem:
    plan = case.plan
    num = case.plan.learners.num
    for path, total in (("env.num", plan.env.num), ("algo.batch_size", plan.algo.batch_size)):
        if has_bundles(plan) and total % num:
            what = f"{case.named(path)} is not a multiple of {case.named('learners.num')}"
            return what, f"Set {path}={-(-total // num) * num}, or leave learners.bundles off."
    return None


def _someone_else_acts(case: Case) -> Problem:
    if case.plan.actors.num == 1 or not isinstance(case.plan.runtime, InlineRuntime):
        return None
    what = f"{case.named('actors.num')} does not go with {case.named('runtime.type')}"
    return what, f"Set runtime.type={' or '.join(ELSEWHERE)}, or leave actors.num at 1."


def _shares_are_equal(case: Case) -> Problem:
    envs = case.plan.env.num
    actors = case.plan.actors.num
    if envs % actors == 0:
        return None
    what = f"{case.named('env.num')} is not a multiple of {case.named('actors.num')}"
    return what, f"Set env.num={-(-envs // actors) * actors}, or another actors.num."


def _shares_add_up(case: Case) -> Problem:
    envs = case.plan.env.num
    actors = case.plan.actors
    if actors.envs is None or actors.envs * actors.num == envs:
        return None
    total = actors.envs * actors.num
    what = f"{case.named('actors.num')} times {case.named('actors.envs')} is not {case.named('env.num')}"
    return what, f"Set env.num={total}, or leave actors.envs out."


def _members_share(case: Case) -> Problem:
    members = case.plan.population.num
    share = case.plan.env.num // case.plan.actors.num
    if share % members == 0:
        return None
    what = f"{share} environments per actor are not a multiple of {case.named('population.num')}"
    return what, f"Set env.num={members * case.plan.actors.num * max(1, share // members)}, or fewer actors."


def _workers_have_work(case: Case) -> Problem:
    share = one_bundle(case.plan).env.num // case.plan.actors.num
    if case.plan.env.workers <= share:
        return None
    what = f"{case.named('env.workers')} is more than the {share} environments they would step"
    return what, f"Set env.workers={share} or less."


def _address_is_one(case: Case) -> Problem:
    runtime = case.plan.runtime
    if not isinstance(runtime, RayRuntime) or runtime.address is None or ADDRESS.fullmatch(runtime.address):
        return None
    return f"{case.named('runtime.address')} is not host:port", "Give it as `ray start` prints it: 10.0.0.1:6379."


def _steps_end_first(case: Case) -> Problem:
    runtime = case.plan.runtime
    env = case.plan.env
    # Central inference gives environments processes of their own too, but for those that are stepped in native code.
    native = ATARI.search(env.id) or CARTPOLE.search(env.id)
    timed = env.workers or (is_central(case.plan) and not native)
    if isinstance(runtime, InlineRuntime) or not timed or env.step_timeout_seconds < runtime.hung_seconds:
        return None
    what = f"{case.named('env.step_timeout_seconds')} is not below {case.named('runtime.hung_seconds')}"
    return what, f"Set runtime.hung_seconds={2 * env.step_timeout_seconds:g}, or a shorter env.step_timeout_seconds."


def _chunks_fit(case: Case) -> Problem:
    runtime = case.plan.runtime
    replay = case.plan.replay
    if isinstance(runtime, InlineRuntime) or not isinstance(replay, FreshReplay) or runtime.chunk_rows <= replay.rows:
        return None
    what = f"{case.named('runtime.chunk_rows')} is more than {case.named('replay.rows')}"
    return what, f"Set runtime.chunk_rows={replay.rows} or less."


PLACES: tuple[tuple[Rule, str], ...] = (
    (_someone_else_acts, "One thread turns one actor; more of them need processes of their own."),
    (_bundles_are_equal, "Each bundle has as many environments, and as large a part of the batch, as every other."),
    (_shares_are_equal, "Each actor acts in as many environments as every other."),
    (_shares_add_up, "env.num counts the environments of all actors together."),
    (_members_share, "Each member of a population acts in as many environments of an actor as every other."),
    (_workers_have_work, "Each worker steps at least one environment."),
    (_steps_end_first, "An actor that waits for its environments would be taken for one that hangs."),
    (_chunks_fit, "Of two blocks of fresh experience that come at once, one would be lost."),
    (_address_is_one, "The run joins the Ray cluster of this machine as a driver; ray:// would be one of its clients."),
)
