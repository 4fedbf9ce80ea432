"""Rules across several settings: one table of small functions, each with its reason.

A rule returns None, or the problem and its fix. Some rules apply only to settings that the user set for this run:
a period that never comes due in a shortened run is only an error if it was given on the command line.
"""

import math
import re

from qfleet.plan import paths
from qfleet.plan.derived import item_steps, item_stride, largest_n_step, total_updates
from qfleet.plan.draft import DEFAULT
from qfleet.plan.presets.pieces import ATARI
from qfleet.plan.schema import (
    CategoricalHead,
    ConvTorso,
    CopyTarget,
    ExponentialAnneal,
    ExponentialEpsilon,
    FreshReplay,
    GrowingBatch,
    LinearEpsilon,
    MlpTorso,
    PeriodicReset,
    PlateauRate,
    PrioritizedSampler,
    SequencesView,
    SoftmaxExplore,
)
from qfleet.plan.sync_schema import ServerSync, WindowSync
from qfleet.plan.validate.case import SCHEDULE, Case, Problem, Rule
from qfleet.plan.validate.placement import PLACEMENT_RULES

DEVICES = ["cpu", "cuda", "mps", "xpu"]
PRIORITIZED = "replay.sampler.type=prioritized"
PATIENCE = ("steer.stop_patience", "steer.learning_rate.patience", "steer.batch.patience")


def _env_is_named(case: Case) -> Problem:
    name = case.plan.env.id.rpartition(".py:")[2]  # the path of a file may hold spaces
    if name and len(case.plan.env.id) <= 500 and case.plan.env.id.isprintable() and not re.search(r"\s", name):
        return None
    return f"{case.named('env.id')} is not an environment id", "Give an id such as CartPole-v1 or ALE/Pong-v5."


def _options_are_names(case: Case) -> Problem:
    wrong = next((name for name in case.plan.env.options if not name.isidentifier()), None)
    if wrong is None:
        return None
    return f"env.options has a key {wrong!r} ({case.origins.get('env.options', DEFAULT)})", "Rename or remove it."


def _secrets_are_names(case: Case) -> Problem:
    for name, variable in case.plan.env.secrets.items():
        if not name.isidentifier() or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            # The value is not shown: it may be the secret itself.
            return f"env.secrets.{name} is not the name of an environment variable", f"Write env.secrets.{name}=MY_KEY"
        if name in case.plan.env.options:
            return f"env.secrets.{name} and env.options.{name} are both given", "Remove one of them."
    return None


def _batch_fits(case: Case) -> Problem:
    batch = case.plan.algo.batch_size
    if case.buffer is None or batch <= case.buffer.capacity // item_stride(case.plan):
        return None
    message = f"{case.named('algo.batch_size')} is more than {_capacity_text(case)}"
    return message, f"Set replay.capacity to {batch * item_stride(case.plan)} or more, or lower algo.batch_size."


def _capacity_text(case: Case) -> str:
    """The capacity of the replay as text: steps, or sequences that begin a stride apart."""
    if case.buffer is None or not isinstance(case.plan.algo.view, SequencesView):
        return case.named("replay.capacity")
    count = case.buffer.capacity // item_stride(case.plan)
    view = case.named("algo.view.stride")
    return f"the {count} sequences of {case.named('replay.capacity')} with {view}"


def _returns_fit(case: Case) -> Problem:
    most = largest_n_step(case.plan.algo)
    need = case.plan.env.num * (most + 1)
    if case.buffer is None or isinstance(case.plan.algo.view, SequencesView) or case.buffer.capacity >= need:
        return None
    path = "algo.n_step" if most == case.plan.algo.n_step else "algo.anneal.n_step"
    message = f"{case.named('replay.capacity')} cannot hold {case.named(path)} for {case.named('env.num')}"
    return message, f"Set replay.capacity to {need} or more."


def _sequences_fit(case: Case) -> Problem:
    view = case.plan.algo.view
    if case.buffer is None or not isinstance(view, SequencesView):
        return None
    need = case.plan.env.num * (view.burn_in + view.length + largest_n_step(case.plan.algo))
    if case.buffer.capacity >= need:
        return None
    shape = f"{case.named('algo.view.burn_in')} and {case.named('algo.view.length')}"
    message = f"{case.named('replay.capacity')} cannot hold {shape} for {case.named('env.num')}"
    return message, f"Set replay.capacity to {need} or more, or shorten the sequences."


def _learning_starts(case: Case) -> Problem:
    start = case.plan.algo.learn_start_steps
    end = case.plan.until.steps
    if start < end or case.buffer is None or not case.set_by_user("algo.learn_start_steps"):
        return None
    message = f"{case.named('algo.learn_start_steps')} is not before the end, {case.named('until.steps')}"
    return message, f"Raise until.steps above {start}, or add algo.learn_start_steps={end // 10}."


def _some_updates(case: Case) -> Problem:
    if total_updates(case.plan) > 0 or not case.set_by_user("replay.samples_per_insert"):
        return None
    message = f"{case.named('replay.samples_per_insert')} makes 0 updates in {case.named('until.steps')}"
    one = case.plan.algo.batch_size * item_steps(case.plan)
    shape = "this batch size" if item_steps(case.plan) == 1 else "batches of this size and length"
    return message, f"Raise it: {one} is one update per step with {shape}."


def _epsilon_falls(case: Case) -> Problem:
    explore = case.plan.algo.explore
    if not isinstance(explore, LinearEpsilon | ExponentialEpsilon) or explore.start >= explore.end:
        return None
    message = f"{case.named('algo.explore.start')} is below {case.named('algo.explore.end')}"
    return message, "Swap them, or set algo.explore.type=constant and algo.explore.epsilon."


def _epsilon_moves(case: Case) -> Problem:
    explore = case.plan.algo.explore
    if not isinstance(explore, LinearEpsilon | ExponentialEpsilon) or explore.start != explore.end:
        return None
    path = "algo.explore.steps" if isinstance(explore, LinearEpsilon) else "algo.explore.half_life_steps"
    if not case.set_by_user(path):
        return None
    return f"{case.named(path)} has no effect", "Leave it out, or let algo.explore.start and algo.explore.end differ."


def _temperature_falls(case: Case) -> Problem:
    explore = case.plan.algo.explore
    if not isinstance(explore, SoftmaxExplore) or explore.end is None or explore.end <= explore.temperature:
        return None
    message = f"{case.named('algo.explore.end')} is above {case.named('algo.explore.temperature')}"
    return message, "Swap them, or leave algo.explore.end out for a constant temperature."


def _beta_rises(case: Case) -> Problem:
    sampler = case.buffer.sampler if case.buffer is not None else None
    if not isinstance(sampler, PrioritizedSampler) or sampler.beta_start <= sampler.beta_end:
        return None
    message = f"{case.named('replay.sampler.beta_start')} is above {case.named('replay.sampler.beta_end')}"
    return message, "Swap them; 0.4 to 1.0 is usual."


def _priorities_matter(case: Case) -> Problem:
    sampler = case.buffer.sampler if case.buffer is not None else None
    if not isinstance(sampler, PrioritizedSampler) or sampler.alpha > 0:
        return None
    message = f"replay.sampler.type=prioritized has no effect with {case.named('replay.sampler.alpha')}"
    return message, "Set replay.sampler.type=uniform, or an alpha such as 0.6."


def _steps_matter(case: Case) -> Problem:
    if case.plan.algo.discount > 0 or case.plan.algo.n_step == 1:
        return None
    return f"{case.named('algo.n_step')} has no effect with {case.named('algo.discount')}", "Set algo.n_step=1."


def _score_is_seen(case: Case) -> Problem:
    if case.plan.until.score is None or case.plan.eval.every_steps <= case.plan.until.steps:
        return None
    if not case.set_by_user("until.score"):
        return None
    message = (
        f"{case.named('until.score')} has no effect: {case.named('eval.every_steps')}, {case.named('until.steps')}"
    )
    return message, f"Set eval.every_steps to {case.plan.until.steps} or less."


def _score_is_measured(case: Case) -> Problem:
    if case.plan.until.score is None or case.plan.eval.episodes > 0 or not case.set_by_user("until.score"):
        return None
    message = f"{case.named('until.score')} has no effect with {case.named('eval.episodes')}"
    return message, "Set eval.episodes to 20 or so, or leave until.score out."


def _target_moves(case: Case) -> Problem:
    path = "algo.target.every_updates"
    target = case.plan.algo.target
    if not isinstance(target, CopyTarget) or not case.set_by_user(path) or case.buffer is None:
        return None
    if target.every_updates <= total_updates(case.plan):
        return None
    message = f"{case.named(path)} has no effect: the run makes {total_updates(case.plan)} updates"
    return message, f"Set {path} to {max(1, total_updates(case.plan) // 10)} or so, or raise until.steps."


def _only_atari(path: str) -> Rule:
    def rule(case: Case) -> Problem:
        if paths.flatten(case.plan)[path] is None or ATARI.search(case.plan.env.id):
            return None
        return f"{case.named(path)} has no effect on {case.plan.env.id}", f"Leave {path} out."

    return rule


def _device_is_known(case: Case) -> Problem:
    for path in ("runtime.device", "runtime.inference_device"):
        device = paths.flatten(case.plan).get(path)
        if device is None or re.fullmatch(rf"({'|'.join(DEVICES)})(:\d{{1,3}})?", device):
            continue
        near = "cuda" if device == "gpu" else paths.nearest(device, DEVICES)
        fix = f"Did you mean {path}={near}?" if near else "Leave it out to have the device chosen for you."
        return f"{case.named(path)} is not a device", fix
    return None


def _reset_comes(case: Case) -> Problem:
    path = "algo.reset.every_updates"
    reset = case.plan.algo.reset
    if not isinstance(reset, PeriodicReset) or reset.every_updates < total_updates(case.plan):
        return None
    if not (case.set_by_user(path) or case.set_by_user("algo.reset.type")):
        return None
    message = f"{case.named(path)} has no effect: the run makes {total_updates(case.plan)} updates"
    return message, f"Set {path} to {max(1, total_updates(case.plan) // 4)} or so, or raise until.steps."


def _switches_come(case: Case) -> Problem:
    total = total_updates(case.plan)
    numbers = [(text.split() or [""])[0].replace("_", "") for text in case.plan.learners.schedule]
    late = [number for number in numbers if number.isdecimal() and int(number) >= total]
    if not late or not case.set_by_user(SCHEDULE):
        return None
    message = f"{SCHEDULE} has an entry {late[0]} that never comes: the run makes {total} updates"
    return message, "Leave that entry out, or raise until.steps."


def _anneal_moves(case: Case) -> Problem:
    algo = case.plan.algo
    anneal = case.plan.algo.anneal
    if not isinstance(anneal, ExponentialAnneal) or (anneal.n_step, anneal.discount) != (algo.n_step, algo.discount):
        return None
    message = f"{case.named('algo.anneal.type')} has no effect: it starts at algo.n_step and algo.discount"
    return message, "Leave it out, or set algo.anneal.n_step or algo.anneal.discount to where it shall start."


def _anneal_ends(case: Case) -> Problem:
    reset = case.plan.algo.reset
    anneal = case.plan.algo.anneal
    if not isinstance(reset, PeriodicReset) or not isinstance(anneal, ExponentialAnneal):
        return None
    if anneal.updates < reset.every_updates:
        return None
    message = f"{case.named('algo.anneal.updates')} is not less than {case.named('algo.reset.every_updates')}"
    return message, f"Set algo.anneal.updates to {max(1, reset.every_updates // 2)} or so."


def _rate_can_fall(case: Case) -> Problem:
    rate = case.plan.steer.learning_rate
    if not isinstance(rate, PlateauRate) or rate.floor < case.plan.optim.learning_rate:
        return None
    message = f"{case.named('steer.learning_rate.floor')} is not below {case.named('optim.learning_rate')}"
    return message, f"Set steer.learning_rate.floor to {case.plan.optim.learning_rate / 100:g} or so."


def _batch_can_grow(case: Case) -> Problem:
    batch = case.plan.steer.batch
    if not isinstance(batch, GrowingBatch) or batch.largest > case.plan.algo.batch_size:
        return None
    message = f"{case.named('steer.batch.largest')} is not above {case.named('algo.batch_size')}"
    return message, f"Set steer.batch.largest to {case.plan.algo.batch_size * 4} or so."


def _grown_batch_fits(case: Case) -> Problem:
    batch = case.plan.steer.batch
    stride = item_stride(case.plan)
    if not isinstance(batch, GrowingBatch) or case.buffer is None or batch.largest <= case.buffer.capacity // stride:
        return None
    message = f"{case.named('steer.batch.largest')} is more than {_capacity_text(case)}"
    return message, f"Set steer.batch.largest to {case.buffer.capacity // stride} or less."


def _patience_runs_out(case: Case) -> Problem:
    count = case.plan.until.steps // case.plan.eval.every_steps
    values = paths.flatten(case.plan)
    for path in PATIENCE:
        explicit = case.set_by_user(path) or case.set_by_user(f"{path.removesuffix('.patience')}.type")
        if explicit and (patience := values.get(path)) is not None and patience >= count:
            message = f"{case.named(path)} never runs out: the run makes {count} evaluations"
            return message, f"Lower {path} or eval.every_steps={case.plan.eval.every_steps}, or raise until.steps."
    return None


def _lanes_divide(case: Case) -> Problem:
    lanes = case.plan.env.num
    members = case.plan.population.num
    if lanes % members == 0:
        return None
    message = f"{case.named('env.num')} is not a multiple of {case.named('population.num')}"
    return message, f"Set env.num={math.ceil(lanes / members) * members}, or another multiple."


def _weights_are_taken(case: Case) -> Problem:
    path = "population.every_steps"
    every = case.plan.population.every_steps
    if every < case.plan.until.steps or not case.set_by_user(path):
        return None
    message = f"{case.named(path)} has no effect: {case.named('until.steps')}"
    return message, f"Set {path} to {max(1, case.plan.until.steps // 5)} or so, or raise until.steps."


def _rates_are_sane(case: Case) -> Problem:
    population = case.plan.population
    rate = case.plan.optim.learning_rate
    if population.num == 1 or population.spread == 1.0:
        return None
    # As logarithms: the power itself may overflow.
    reach = (population.num - 1) / 2 * math.log(population.spread)
    if math.log(rate) + reach <= 0.0:
        return None
    message = f"{case.named('population.spread')} takes {case.named('optim.learning_rate')} above 1"
    if rate >= 1.0:
        return message, "Lower optim.learning_rate: 0.001 is usual."
    most = (1.0 / rate) ** (2 / (population.num - 1))
    return message, f"Set population.spread to 2 or so; with {population.num} members it must be below {most:.4g}."


def _each_learner_has_items(case: Case) -> Problem:
    num = case.plan.learners.num
    batch = case.plan.algo.batch_size
    if batch >= num:
        return None
    message = f"{case.named('algo.batch_size')} is less than {case.named('learners.num')}"
    return message, f"Set algo.batch_size to {32 * num} or so, or fewer learners."


def _parts_have_items(case: Case) -> Problem:
    parts = case.plan.algo.accumulate
    share = case.plan.algo.batch_size // case.plan.learners.num
    if parts <= share:
        return None
    of = "" if case.plan.learners.num == 1 else f" for each of {case.named('learners.num')}"
    message = f"{case.named('algo.accumulate')} is more than {case.named('algo.batch_size')}{of}"
    return message, f"Set algo.accumulate to {share} or less."


def _spare_is_below_learners(case: Case) -> Problem:
    sync = case.plan.sync
    num = case.plan.learners.num
    if not isinstance(sync, ServerSync) or sync.spare < num:
        return None
    return (
        f"{case.named('sync.spare')} is not below {case.named('learners.num')}",
        f"Set sync.spare to {num - 1} or less.",
    )


def _windows_close(case: Case) -> Problem:
    sync = case.plan.sync
    if not isinstance(sync, WindowSync) or (sync.num_gradients, sync.window_seconds) != (None, None):
        return None
    both = f"{case.named('sync.num_gradients')} and {case.named('sync.window_seconds')}"
    return f"{both} make no window", "Set one of them, such as sync.num_gradients=4 or sync.window_seconds=0.01."


def _block_divides(case: Case) -> Problem:
    replay = case.plan.replay
    if not isinstance(replay, FreshReplay) or replay.minibatches <= replay.rows * case.plan.env.num:
        return None
    block = f"the steps of {case.named('replay.rows')} and {case.named('env.num')}"
    message = f"{case.named('replay.minibatches')} is more than {block}"
    return message, f"Set replay.minibatches to {max(1, replay.rows * case.plan.env.num // 8)} or so."


def _spectral_has_layers(case: Case) -> Problem:
    torso = case.plan.net.torso
    path = "net.spectral_norm"
    if not (case.plan.net.spectral_norm and isinstance(torso, MlpTorso) and case.set_by_user(path)):
        return None
    if len(torso.sizes) > 1:
        return None
    message = f"{case.named(path)} has no effect with {case.named('net.torso.sizes')}"
    return message, f"Give net.torso.sizes two numbers or more, such as [64, 64], or leave {path} out."


def _eta_matters(case: Case) -> Problem:
    path = "algo.view.eta"
    sampler = case.buffer.sampler if case.buffer is not None else None
    if not case.set_by_user(path) or isinstance(sampler, PrioritizedSampler):
        return None
    return f"{case.named(path)} has no effect with uniform sampling", f"Leave {path} out, or set {PRIORITIZED}."


def _layers_are_whole(case: Case) -> Problem:
    torso = case.plan.net.torso
    if not isinstance(torso, ConvTorso):
        return None
    counts = {len(torso.channels), len(torso.kernels), len(torso.strides)}
    if len(counts) == 1 and torso.channels:
        return None
    lists = ", ".join(case.named(f"net.torso.{name}") for name in ("channels", "kernels", "strides"))
    return f"{lists} do not make layers", "Give each of the three as many numbers, one per layer."


def _support_is_wide(case: Case) -> Problem:
    head = case.plan.net.head
    if not isinstance(head, CategoricalHead) or head.low < head.high:
        return None
    message = f"{case.named('net.head.low')} is not below {case.named('net.head.high')}"
    return message, "Give the smallest and the largest discounted return to expect, such as 0 and 100."


RULES: tuple[tuple[Rule, str], ...] = (
    (_env_is_named, "An environment id has no spaces; only the path of a file.py:ClassName may have them."),
    (_options_are_names, "Options are passed to the environment as keyword arguments, so they must be names."),
    (_secrets_are_names, "A secret's value is taken from a variable when the environment is made, and never written."),
    (_device_is_known, f"The devices are {', '.join(DEVICES)}, with a number if there are several (cuda:1)."),
    (_batch_fits, "A batch is drawn from the replay, which would never hold that many."),
    (_returns_fit, "Every environment needs room for the steps that one n-step return spans."),
    (_sequences_fit, "Every environment needs room for one sequence and the n-step return at its end."),
    (_learning_starts, "Learning would start after the run has ended, so nothing would be learned."),
    (
        _some_updates,
        "Updates per step are replay.samples_per_insert / algo.batch_size (of sequences also / algo.view.length), "
        "rounded down over the run.",
    ),
    (_epsilon_falls, "Exploration is meant to fall; a rising epsilon would undo learning."),
    (_epsilon_moves, "Epsilon starts where it ends, so it does not change over time."),
    (_temperature_falls, "Exploration is meant to fall; a hotter choice is a more random one."),
    (_beta_rises, "The correction for prioritised sampling must grow towards its end value."),
    (_priorities_matter, "With alpha 0 every step is equally likely, which is uniform sampling at a higher price."),
    (_steps_matter, "With discount 0 only the first reward counts, so further steps change nothing."),
    (_score_is_seen, "The score is measured by evaluations, and none happens before the last step."),
    (_score_is_measured, "The score is measured by evaluations, and there are none with 0 episodes."),
    (_layers_are_whole, "Each convolution has a number of channels, a kernel size and a stride."),
    (_support_is_wide, "The atoms of a categorical head stand for returns from low to high."),
    (_target_moves, "The target network would keep its first, random weights for the whole run."),
    (_reset_comes, "The first reset would come after the last update."),
    (_switches_come, "It would come after the last update."),
    (_anneal_moves, "It would anneal from these values to the same values."),
    (_anneal_ends, "Annealing begins again after each reset, so algo.n_step and algo.discount would never be reached."),
    (_rate_can_fall, "The learning rate is lowered towards the floor, so it must start above it."),
    (_batch_can_grow, "The batch grows up to the largest, so it must start below it."),
    (_grown_batch_fits, "A batch is drawn from the replay, which would never hold that many."),
    (_patience_runs_out, "The first score is the one that others are compared with, so it takes one evaluation more."),
    (_lanes_divide, "All members have the same number of environments."),
    (_rates_are_sane, "The members' learning rates differ by that factor from one to the next; large ones diverge."),
    (_each_learner_has_items, "Every learner gets a share of each batch."),
    (_parts_have_items, "Every part of a batch must have items."),
    (_spare_is_below_learners, "A step uses the gradients of all but the spare learners, so at least one must remain."),
    (_windows_close, "A window closes after a number of gradients or of seconds."),
    (_block_divides, "The steps of all environments are divided among the minibatches; some would be empty."),
    (_spectral_has_layers, "The last size is the head's own layer; only the layers of a torso are normalised."),
    (_eta_matters, "It mixes the errors of a sequence into its priority."),
    (_weights_are_taken, "The worst member would take the weights of the best at the end of the run, or never."),
    (
        _only_atari("env.sticky"),
        "Sticky actions are a feature of the Atari emulator (ids ALE/... and ...NoFrameskip-v4).",
    ),
    (_only_atari("env.frame_size"), "Only Atari pictures are resized (ids ALE/... and ...NoFrameskip-v4)."),
    *PLACEMENT_RULES,
)
