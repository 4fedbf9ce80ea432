"""Rules across several settings: one table of small functions, each with its reason.

A rule yields every problem with its fix. Some rules apply only to settings that the user set for this run:
a period that never comes due in a shortened run is only an error if it was given on the command line.
"""

import math
import re

from qfleet.plan import paths, schema
from qfleet.plan.derived import item_steps, item_stride, known_updates, largest_n_step, total_updates
from qfleet.plan.draft import DEFAULT
from qfleet.plan.presets.pieces import ATARI
from qfleet.plan.setting_text import nearest
from qfleet.plan.sync_schema import ServerSync, WindowSync
from qfleet.plan.validate.case import SCHEDULE, Case, Problems, Rule
from qfleet.plan.validate.placement import PLACEMENT_RULES
from qfleet.plan.validate.wrapper_text import REASON as WRAPPER_REASON
from qfleet.plan.validate.wrapper_text import wrappers_are_named

DEVICES = ["cpu", "cuda", "mps", "xpu"]
PRIORITIZED = "replay.sampler.type=prioritized"
PATIENCE = ("steer.stop_patience", "steer.learning_rate.patience", "steer.batch.patience")


def _env_is_named(case: Case) -> Problems:
    env_id = case.plan.env.id
    name = env_id.rpartition(".py:")[2]  # the path of a file may hold spaces
    if not name or len(env_id) > 500 or not env_id.isprintable() or re.search(r"\s", name):
        yield f"{case.named('env.id')} is not an environment id", "Give an id such as CartPole-v1 or ALE/Pong-v5."


def _options_are_names(case: Case) -> Problems:
    for name in case.plan.env.options:
        if not name.isidentifier():
            origin = case.origins.get("env.options", DEFAULT)
            yield f"env.options has a key {name!r} ({origin})", "Rename or remove it."


def _secrets_are_names(case: Case) -> Problems:
    for name, variable in case.plan.env.secrets.items():
        if not name.isidentifier() or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            # The value is not shown: it may be the secret itself.
            yield f"env.secrets.{name} is not the name of an environment variable", f"Write env.secrets.{name}=MY_KEY"
        if name in case.plan.env.options:
            yield f"env.secrets.{name} and env.options.{name} are both given", "Remove one of them."


def _batch_fits(case: Case) -> Problems:
    batch = case.plan.algo.batch_size
    stride = item_stride(case.plan)
    if case.buffer is not None and batch > case.buffer.capacity // stride:
        message = f"{case.named('algo.batch_size')} is more than {_capacity_text(case)}"
        yield message, f"Set replay.capacity to {batch * stride} or more, or lower algo.batch_size."


def _capacity_text(case: Case) -> str:
    """The capacity of the replay as text: steps, or sequences that begin a stride apart."""
    if case.buffer is None or not isinstance(case.plan.algo.view, schema.SequencesView):
        return case.named("replay.capacity")
    count = case.buffer.capacity // item_stride(case.plan)
    return f"the {count} sequences of {case.named('replay.capacity')} with {case.named('algo.view.stride')}"


def _returns_fit(case: Case) -> Problems:
    algo = case.plan.algo
    most = largest_n_step(algo)
    need = case.plan.env.num * (most + 1)
    if case.buffer is not None and not isinstance(algo.view, schema.SequencesView) and case.buffer.capacity < need:
        path = "algo.n_step" if most == algo.n_step else "algo.anneal.n_step"
        message = f"{case.named('replay.capacity')} cannot hold {case.named(path)} for {case.named('env.num')}"
        yield message, f"Set replay.capacity to {need} or more."


def _sequences_fit(case: Case) -> Problems:
    view = case.plan.algo.view
    if case.buffer is None or not isinstance(view, schema.SequencesView):
        return
    need = case.plan.env.num * (view.burn_in + view.length + largest_n_step(case.plan.algo))
    if case.buffer.capacity < need:
        shape = f"{case.named('algo.view.burn_in')} and {case.named('algo.view.length')}"
        message = f"{case.named('replay.capacity')} cannot hold {shape} for {case.named('env.num')}"
        yield message, f"Set replay.capacity to {need} or more, or shorten the sequences."


def _learning_starts(case: Case) -> Problems:
    start = case.plan.algo.learn_start_steps
    end = case.plan.until.steps
    if start >= end and case.buffer is not None and case.set_by_user("algo.learn_start_steps"):
        message = f"{case.named('algo.learn_start_steps')} is not before the end, {case.named('until.steps')}"
        yield message, f"Raise until.steps above {start}, or add algo.learn_start_steps={end // 10}."


def _some_updates(case: Case) -> Problems:
    if total_updates(case.plan) <= 0 and case.set_by_user("replay.samples_per_insert"):
        message = f"{case.named('replay.samples_per_insert')} makes 0 updates in {case.named('until.steps')}"
        one = case.plan.algo.batch_size * item_steps(case.plan)
        shape = "this batch size" if item_steps(case.plan) == 1 else "batches of this size and length"
        yield message, f"Raise it: {one} is one update per step with {shape}."


def _epsilon_falls(case: Case) -> Problems:
    explore = case.plan.algo.explore
    if isinstance(explore, schema.LinearEpsilon | schema.ExponentialEpsilon) and explore.start < explore.end:
        message = f"{case.named('algo.explore.start')} is below {case.named('algo.explore.end')}"
        yield message, "Swap them, or set algo.explore.type=constant and algo.explore.epsilon."


def _epsilon_moves(case: Case) -> Problems:
    explore = case.plan.algo.explore
    if isinstance(explore, schema.LinearEpsilon | schema.ExponentialEpsilon) and explore.start == explore.end:
        path = "algo.explore.steps" if isinstance(explore, schema.LinearEpsilon) else "algo.explore.half_life_steps"
        if case.set_by_user(path):
            fix = "Leave it out, or let algo.explore.start and algo.explore.end differ."
            yield f"{case.named(path)} has no effect", fix


def _temperature_falls(case: Case) -> Problems:
    explore = case.plan.algo.explore
    if isinstance(explore, schema.SoftmaxExplore) and explore.end is not None and explore.end > explore.temperature:
        message = f"{case.named('algo.explore.end')} is above {case.named('algo.explore.temperature')}"
        yield message, "Swap them, or leave algo.explore.end out for a constant temperature."


def _beta_rises(case: Case) -> Problems:
    sampler = case.buffer.sampler if case.buffer is not None else None
    if isinstance(sampler, schema.PrioritizedSampler) and sampler.beta_start > sampler.beta_end:
        message = f"{case.named('replay.sampler.beta_start')} is above {case.named('replay.sampler.beta_end')}"
        yield message, "Swap them; 0.4 to 1.0 is usual."


def _priorities_matter(case: Case) -> Problems:
    sampler = case.buffer.sampler if case.buffer is not None else None
    if isinstance(sampler, schema.PrioritizedSampler) and sampler.alpha <= 0:
        message = f"{PRIORITIZED} has no effect with {case.named('replay.sampler.alpha')}"
        yield message, "Set replay.sampler.type=uniform, or an alpha such as 0.6."


def _steps_matter(case: Case) -> Problems:
    if case.plan.algo.discount <= 0 and case.plan.algo.n_step != 1:
        yield f"{case.named('algo.n_step')} has no effect with {case.named('algo.discount')}", "Set algo.n_step=1."


def _score_is_seen(case: Case) -> Problems:
    until = case.plan.until
    seen = until.epochs is not None or case.plan.eval.every_steps <= until.steps
    if until.score is not None and not seen and case.set_by_user("until.score"):
        never = f"{case.named('eval.every_steps')}, {case.named('until.steps')}"
        yield f"{case.named('until.score')} has no effect: {never}", f"Set eval.every_steps to {until.steps} or less."


def _score_is_measured(case: Case) -> Problems:
    if case.plan.until.score is not None and case.plan.eval.episodes <= 0 and case.set_by_user("until.score"):
        message = f"{case.named('until.score')} has no effect with {case.named('eval.episodes')}"
        yield message, "Set eval.episodes to 20 or so, or leave until.score out."


def _target_moves(case: Case) -> Problems:
    path = "algo.target.every_updates"
    target = case.plan.algo.target
    total = total_updates(case.plan)
    copied = isinstance(target, schema.CopyTarget) and target.every_updates > total
    if copied and case.set_by_user(path) and case.buffer is not None:
        message = f"{case.named(path)} has no effect: the run makes {total} updates"
        yield message, f"Set {path} to {max(1, total // 10)} or so, or raise until.steps."


def _only_atari(path: str) -> Rule:
    def rule(case: Case) -> Problems:
        if paths.flatten(case.plan)[path] is not None and not ATARI.search(case.plan.env.id):
            yield f"{case.named(path)} has no effect on {case.plan.env.id}", f"Leave {path} out."

    return rule


def _device_is_known(case: Case) -> Problems:
    for path in ("runtime.device", "runtime.inference_device"):
        device = paths.flatten(case.plan).get(path)
        if device is not None and not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d{{1,3}})?", device):
            near = "cuda" if device == "gpu" else nearest(device, DEVICES)
            fix = f"Did you mean {path}={near}?" if near else "Leave it out to have the device chosen for you."
            yield f"{case.named(path)} is not a device", fix


def _reset_comes(case: Case) -> Problems:
    path = "algo.reset.every_updates"
    reset = case.plan.algo.reset
    total = known_updates(case.plan)
    late = isinstance(reset, schema.PeriodicReset) and reset.every_updates >= total
    if late and (case.set_by_user(path) or case.set_by_user("algo.reset.type")):
        message = f"{case.named(path)} has no effect: the run makes {total} updates"
        yield message, f"Set {path} to {max(1, int(total) // 4)} or so, or raise until.steps."


def _switches_come(case: Case) -> Problems:
    total = known_updates(case.plan)
    numbers = [(text.split() or [""])[0].replace("_", "") for text in case.plan.learners.schedule]
    late = [number for number in numbers if number.isdecimal() and int(number) >= total]
    if late and case.set_by_user(SCHEDULE):
        message = f"{SCHEDULE} has an entry {late[0]} that never comes: the run makes {total} updates"
        yield message, "Leave that entry out, or raise until.steps."


def _anneal_moves(case: Case) -> Problems:
    algo = case.plan.algo
    anneal = algo.anneal
    if not isinstance(anneal, schema.ExponentialAnneal):
        return
    if (anneal.n_step, anneal.discount) == (algo.n_step, algo.discount):
        message = f"{case.named('algo.anneal.type')} has no effect: it starts at algo.n_step and algo.discount"
        yield message, "Leave it out, or set algo.anneal.n_step or algo.anneal.discount to where it shall start."


def _anneal_ends(case: Case) -> Problems:
    reset = case.plan.algo.reset
    anneal = case.plan.algo.anneal
    if not isinstance(reset, schema.PeriodicReset) or not isinstance(anneal, schema.ExponentialAnneal):
        return
    if anneal.updates >= reset.every_updates:
        message = f"{case.named('algo.anneal.updates')} is not less than {case.named('algo.reset.every_updates')}"
        yield message, f"Set algo.anneal.updates to {max(1, reset.every_updates // 2)} or so."


def _rate_can_fall(case: Case) -> Problems:
    rate = case.plan.steer.learning_rate
    if isinstance(rate, schema.PlateauRate) and rate.floor >= case.plan.optim.learning_rate:
        message = f"{case.named('steer.learning_rate.floor')} is not below {case.named('optim.learning_rate')}"
        yield message, f"Set steer.learning_rate.floor to {case.plan.optim.learning_rate / 100:g} or so."


def _batch_can_grow(case: Case) -> Problems:
    batch = case.plan.steer.batch
    if isinstance(batch, schema.GrowingBatch) and batch.largest <= case.plan.algo.batch_size:
        message = f"{case.named('steer.batch.largest')} is not above {case.named('algo.batch_size')}"
        yield message, f"Set steer.batch.largest to {case.plan.algo.batch_size * 4} or so."


def _grown_batch_fits(case: Case) -> Problems:
    batch = case.plan.steer.batch
    items = math.inf if case.buffer is None else case.buffer.capacity // item_stride(case.plan)
    if isinstance(batch, schema.GrowingBatch) and batch.largest > items:
        message = f"{case.named('steer.batch.largest')} is more than {_capacity_text(case)}"
        yield message, f"Set steer.batch.largest to {items} or less."


def _patience_runs_out(case: Case) -> Problems:
    if case.plan.until.epochs is not None:
        return  # their steps are not counted yet
    count = case.plan.until.steps // case.plan.eval.every_steps
    values = paths.flatten(case.plan)
    for path in PATIENCE:
        explicit = case.set_by_user(path) or case.set_by_user(f"{path.removesuffix('.patience')}.type")
        if explicit and (patience := values.get(path)) is not None and patience >= count:
            message = f"{case.named(path)} never runs out: the run makes {count} evaluations"
            yield message, f"Lower {path} or eval.every_steps={case.plan.eval.every_steps}, or raise until.steps."


def _lanes_divide(case: Case) -> Problems:
    lanes = case.plan.env.num
    members = case.plan.population.num
    if lanes % members:
        message = f"{case.named('env.num')} is not a multiple of {case.named('population.num')}"
        yield message, f"Set env.num={math.ceil(lanes / members) * members}, or another multiple."


def _weights_are_taken(case: Case) -> Problems:
    path = "population.every_steps"
    steps = case.plan.until.steps
    if case.plan.population.every_steps >= steps and case.set_by_user(path):
        message = f"{case.named(path)} has no effect: {case.named('until.steps')}"
        yield message, f"Set {path} to {max(1, steps // 5)} or so, or raise until.steps."


def _rates_are_sane(case: Case) -> Problems:
    population = case.plan.population
    rate = case.plan.optim.learning_rate
    # As logarithms: the power itself may overflow.
    reach = (population.num - 1) / 2 * math.log(population.spread)
    if reach == 0.0 or math.log(rate) + reach <= 0.0:
        return
    fix = "Lower optim.learning_rate: 0.001 is usual."
    if rate < 1.0:
        most = (1.0 / rate) ** (2 / (population.num - 1))
        fix = f"Set population.spread to 2 or so; with {population.num} members it must be below {most:.4g}."
    yield f"{case.named('population.spread')} takes {case.named('optim.learning_rate')} above 1", fix


def _each_learner_has_items(case: Case) -> Problems:
    num = case.plan.learners.num
    if case.plan.algo.batch_size < num:
        message = f"{case.named('algo.batch_size')} is less than {case.named('learners.num')}"
        yield message, f"Set algo.batch_size to {32 * num} or so, or fewer learners."


def _parts_have_items(case: Case) -> Problems:
    share = case.plan.algo.batch_size // case.plan.learners.num
    if case.plan.algo.accumulate > share:
        of = "" if case.plan.learners.num == 1 else f" for each of {case.named('learners.num')}"
        message = f"{case.named('algo.accumulate')} is more than {case.named('algo.batch_size')}{of}"
        yield message, f"Set algo.accumulate to {share} or less."


def _spare_is_below_learners(case: Case) -> Problems:
    num = case.plan.learners.num
    if isinstance(case.plan.sync, ServerSync) and case.plan.sync.spare >= num:
        message = f"{case.named('sync.spare')} is not below {case.named('learners.num')}"
        yield message, f"Set sync.spare to {num - 1} or less."


def _windows_close(case: Case) -> Problems:
    sync = case.plan.sync
    if isinstance(sync, WindowSync) and (sync.num_gradients, sync.window_seconds) == (None, None):
        both = f"{case.named('sync.num_gradients')} and {case.named('sync.window_seconds')}"
        yield f"{both} make no window", "Set one of them, such as sync.num_gradients=4 or sync.window_seconds=0.01."


def _block_divides(case: Case) -> Problems:
    replay = case.plan.replay
    if isinstance(replay, schema.FreshReplay) and replay.minibatches > replay.rows * case.plan.env.num:
        block = f"the steps of {case.named('replay.rows')} and {case.named('env.num')}"
        message = f"{case.named('replay.minibatches')} is more than {block}"
        yield message, f"Set replay.minibatches to {max(1, replay.rows * case.plan.env.num // 8)} or so."


def _dataset_has_path(case: Case) -> Problems:
    replay = case.plan.replay
    by_preset = case.origins.get("replay.type", "").startswith("preset ")  # it can be shown without a data set
    if isinstance(replay, schema.DatasetReplay) and not replay.path and not by_preset:
        yield f"{case.named('replay.type')} needs replay.path", "Name the data set: replay.path=data/prepared"


def _spectral_has_layers(case: Case) -> Problems:
    path = "net.spectral_norm"
    torso = case.plan.net.torso
    has_none = isinstance(torso, schema.MlpTorso) and len(torso.sizes) <= 1
    if case.plan.net.spectral_norm and has_none and case.set_by_user(path):
        message = f"{case.named(path)} has no effect with {case.named('net.torso.sizes')}"
        yield message, f"Give net.torso.sizes two numbers or more, such as [64, 64], or leave {path} out."


def _eta_matters(case: Case) -> Problems:
    path = "algo.view.eta"
    sampler = case.buffer.sampler if case.buffer is not None else None
    order = case.plan.replay.order if isinstance(case.plan.replay, schema.DatasetReplay) else None
    prioritized = isinstance(sampler, schema.PrioritizedSampler) or isinstance(order, schema.PrioritizedOrder)
    if case.set_by_user(path) and not prioritized:
        yield f"{case.named(path)} has no effect with uniform sampling", f"Leave {path} out, or set {PRIORITIZED}."


def _layers_are_whole(case: Case) -> Problems:
    torso = case.plan.net.torso
    if not isinstance(torso, schema.ConvTorso):
        return
    counts = {len(torso.channels), len(torso.kernels), len(torso.strides)}
    if len(counts) > 1 or not torso.channels:
        lists = ", ".join(case.named(f"net.torso.{name}") for name in ("channels", "kernels", "strides"))
        yield f"{lists} do not make layers", "Give each of the three as many numbers, one per layer."


def _support_is_wide(case: Case) -> Problems:
    head = case.plan.net.head
    if isinstance(head, schema.CategoricalHead) and head.low >= head.high:
        message = f"{case.named('net.head.low')} is not below {case.named('net.head.high')}"
        yield message, "Give the smallest and the largest discounted return to expect, such as 0 and 100."


RULES: tuple[tuple[Rule, str], ...] = (
    (_env_is_named, "An environment id has no spaces; only the path of a file.py:ClassName may have them."),
    (_options_are_names, "Options are passed to the environment as keyword arguments, so they must be names."),
    (_secrets_are_names, "A secret's value is taken from a variable when the environment is made, and never written."),
    (wrappers_are_named, WRAPPER_REASON),
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
    (_dataset_has_path, "It is the folder that `qfleet data prepare` has made."),
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
