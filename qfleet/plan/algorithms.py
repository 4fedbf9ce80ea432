"""Named algorithms: what each paper changed, as settings laid over the environment's defaults.

`name` has the published numbers (for Atari, which most papers used); sizes of replay, budget and schedules stay those
of the environment's defaults unless the environment is an Atari game. `name-small` is the same algorithm cut to a
laptop and a small world: fewer atoms and fractions, and the environment's own learning rate.
"""

import re
from typing import Any, TypeAlias

Settings: TypeAlias = dict[str, Any]

ATARI = re.compile(r"^ALE/|NoFrameskip-v4$")
CARTPOLE = re.compile(r"^CartPole-v\d+$")
MINATAR = re.compile(r"^MinAtar/")
# Discounted returns that a categorical head must cover.
SUPPORTS: tuple[tuple[re.Pattern[str], tuple[float, float]], ...] = (
    (ATARI, (-10.0, 10.0)),
    (CARTPOLE, (0.0, 100.0)),
    (re.compile(r"^(Acrobot|MountainCar)-v\d+$"), (-100.0, 0.0)),
    (MINATAR, (-10.0, 10.0)),
    (re.compile(r""), (-100.0, 100.0)),
)


def _atari(env_id: str, settings: Settings) -> Settings:
    """Numbers that only make sense at Atari's scale."""
    return settings if ATARI.search(env_id) else {}


def _minatar(env_id: str, settings: Settings) -> Settings:
    """Numbers for MinAtar's runs of a million steps, fifty times shorter than Atari's."""
    return settings if MINATAR.search(env_id) else {}


def _categorical(env_id: str, atoms: int) -> Settings:
    low, high = next(support for pattern, support in SUPPORTS if pattern.search(env_id))
    return {"net.head.type": "categorical", "net.head.atoms": atoms, "net.head.low": low, "net.head.high": high}


def _prioritized(alpha: float, beta_start: float, beta_end: float) -> Settings:
    return {
        "replay.sampler.type": "prioritized",
        "replay.sampler.alpha": alpha,
        "replay.sampler.beta_start": beta_start,
        "replay.sampler.beta_end": beta_end,
    }


def _atari_beta(env_id: str, updates: int) -> Settings:
    """On Atari beta reaches its end with the last update of the default run, as published."""
    return _atari(env_id, {"replay.sampler.beta_updates": updates})


def _distributional(settings: Settings) -> Settings:
    """Without the choice between Huber and squared error: a distribution has a loss of its own."""
    return {path: value for path, value in settings.items() if path != "algo.loss"}


def _adam(env_id: str, learning_rate: float, eps: float, clip_norm: float | None = 10.0) -> Settings:
    """Adam as published; for MinAtar all agents share one learning rate (Obando-Ceron and Castro 2021)."""
    if MINATAR.search(env_id):
        learning_rate, eps = 2.5e-4, 3.125e-4
    return {
        "optim.type": "adam",
        "optim.learning_rate": learning_rate,
        "optim.eps": eps,
        "optim.clip_norm": clip_norm,
    }


def _batches_of_64() -> Settings:
    """An update per four steps, as the tuned defaults make, but with heads this dear a smaller batch."""
    return {"algo.batch_size": 64, "replay.samples_per_insert": 16.0}


def _no_epsilon() -> Settings:
    return {"algo.explore.type": "constant", "algo.explore.epsilon": 0.0}


def _epsilon_until(steps: int) -> Settings:
    return {"algo.explore.type": "linear", "algo.explore.end": 0.0, "algo.explore.steps": steps}


def _ladder() -> Settings:
    return {"algo.explore.type": "ladder", "algo.explore.base": 0.4, "algo.explore.power": 7.0}


def dqn(env_id: str) -> Settings:
    """The deep Q-network as first published: no Double, no duelling, one-step, uniform replay.

    Source: Mnih et al. 2015; on Atari with Adam as in Dopamine (Castro et al. 2018), RMSProp's eps does not transfer.
    Advice: a baseline to compare with; `double` is better almost everywhere.
    """
    return {
        "algo.rule.type": "max",
        "algo.n_step": 1,
        "net.dueling": False,
        "net.noisy": False,
        "net.head.type": "scalar",
        "replay.sampler.type": "uniform",
        **_atari(env_id, {"replay.capacity": 1_000_000, "algo.loss": "mse"}),
    }


def double(env_id: str) -> Settings:
    """DQN whose target lets the online network choose and the target network judge.

    Source: van Hasselt et al. 2016.
    Advice: costs nothing; keep it on.
    """
    return {**dqn(env_id), "algo.rule.type": "double"}


def dueling(env_id: str) -> Settings:
    """Double DQN with separate streams for the state's value and the actions' advantages.

    Source: Wang et al. 2016.
    Advice: helps most where many actions are equally good.
    """
    return {**double(env_id), "net.dueling": True}


def per(env_id: str) -> Settings:
    """Double DQN that replays surprising steps more often.

    Source: Schaul et al. 2016 (proportional variant).
    Advice: lower optim.learning_rate to a quarter if the loss is restless.
    """
    return {**double(env_id), **_prioritized(0.6, 0.4, 1.0), **_atari_beta(env_id, 495_000)}


def nstep(env_id: str) -> Settings:
    """Double DQN with three-step returns.

    Source: Sutton 1988; Hessel et al. 2018.
    Advice: 3 to 5 steps speed up sparse rewards; much more adds noise.
    """
    return {**double(env_id), "algo.n_step": 3}


def c51(env_id: str) -> Settings:
    """DQN that learns the whole distribution of returns over 51 fixed atoms.

    Source: Bellemare et al. 2017.
    Advice: net.head.low and net.head.high must cover the discounted return; they are guessed for unknown worlds.
    """
    atari = {"algo.target.every_updates": 2_500, "algo.explore.end": 0.01}
    plain, optim = _distributional(dqn(env_id)), _adam(env_id, 2.5e-4, 3.125e-4)
    return {**plain, **_categorical(env_id, 51), **optim, **_atari(env_id, atari)}


def qrdqn(env_id: str) -> Settings:
    """DQN that learns 200 quantiles of the return.

    Source: Dabney et al. 2018 (QR-DQN).
    Advice: needs no guess about the returns; net.head.quantiles=50 is four times cheaper and rarely worse.
    """
    head = {"net.head.type": "quantile", "net.head.quantiles": 200}
    return {**_distributional(dqn(env_id)), **head, **_adam(env_id, 5e-5, 3.125e-4)}


def iqn(env_id: str) -> Settings:
    """DQN that learns the return's quantile function at random fractions.

    Source: Dabney et al. 2018 (IQN).
    Advice: the head runs once per fraction; on a CPU net.head.fractions=8 net.head.target_fractions=8 learns as well.
    """
    sizes = {"net.head.fractions": 64, "net.head.target_fractions": 64, "net.head.act_fractions": 32}
    plain, optim = _distributional(dqn(env_id)), _adam(env_id, 5e-5, 3.125e-4)
    return {**plain, "net.head.type": "implicit", **sizes, **optim}


def noisy(env_id: str) -> Settings:
    """Double DQN that explores through noise on its weights instead of random actions.

    Source: Fortunato et al. 2018.
    Advice: no epsilon to tune; net.noisy_sigma=0.1 explores less.
    """
    return {**double(env_id), "net.noisy": True, **_no_epsilon()}


def munchausen(env_id: str) -> Settings:
    """DQN with soft values and a bonus for actions the policy is sure of.

    Source: Vieillard et al. 2020.
    Advice: algo.rule.temperature is in units of the value; raise it where returns are in the hundreds.
    """
    rule = {"algo.rule.type": "munchausen", "algo.rule.temperature": 0.03}
    return {**dqn(env_id), **rule, **_adam(env_id, 5e-5, 3.125e-4)}


def rainbow(env_id: str) -> Settings:
    """Double, duelling, prioritised, three-step, C51 and noisy nets in one agent.

    Source: Hessel et al. 2018; on MinAtar the target moves as in Obando-Ceron and Castro 2021, the rest was measured.
    Advice: strong and slow; `iqn` or `nstep` with `per` are cheaper.
    """
    atari = _atari(env_id, {"algo.target.every_updates": 2_000})
    priorities = {**_prioritized(0.5, 0.4, 1.0), **_atari_beta(env_id, 495_000)}
    bundle = {**_distributional(dueling(env_id)), **priorities, **_categorical(env_id, 51), "algo.n_step": 3}
    # A categorical loss has small gradients: with MinAtar's usual eps Adam would take tiny steps. Noise alone finds
    # the first reward of Freeway too late.
    minatar = _minatar(env_id, {"algo.target.every_updates": 250, "optim.eps": 1e-6})
    explore = _minatar(env_id, _epsilon_until(100_000)) or _no_epsilon()
    return {**bundle, "net.noisy": True, **explore, **_adam(env_id, 6.25e-5, 1.5e-4), **atari, **minatar}


def apex(env_id: str) -> Settings:
    """Ape-X on one machine: an epsilon per environment, and priorities that actors know first.

    Source: Horgan et al. 2018; 32 environments stand in for 360 actors, and each step is drawn 6.24 times, not 0.78.
    Advice: env.num sets how many epsilons there are; fewer than eight leave hardly any that explore.
    """
    atari = {"algo.target.every_updates": 2_500, "replay.capacity": 2_000_000, "algo.learn_start_steps": 50_000}
    optim = {"optim.type": "rmsprop", "optim.learning_rate": 6.25e-5, "optim.eps": 1.5e-7, "optim.clip_norm": 40.0}
    # Published: actors make 1.3 steps for each one drawn, of billions. Runs of millions need eight times the updates.
    pace = {"env.num": 32, "algo.batch_size": 512, "replay.samples_per_insert": 6.24}
    prioritized = {**_prioritized(0.6, 0.4, 0.4), "replay.sampler.initial": "actor"}
    return {**dueling(env_id), "algo.n_step": 3, **prioritized, **_ladder(), **optim, **pace, **_atari(env_id, atari)}


def r2d2(env_id: str) -> Settings:
    """A recurrent network that learns from stretches of experience with the memory they began with.

    Source: Kapturowski et al. 2019.
    Advice: an update per 6,400 steps suits billions: the first target copy is after 16 million. Else `r2d2-small`.
    """
    view = {"algo.view.type": "sequences", "algo.view.burn_in": 40, "algo.view.length": 80, "algo.view.stride": 40}
    learn = {"algo.n_step": 5, "algo.discount": 0.997, "algo.rescale": True, "algo.loss": "mse", "algo.batch_size": 64}
    prioritized = {**_prioritized(0.9, 0.6, 0.6), "replay.sampler.initial": "actor"}
    memory = {"net.memory.type": "lstm", "net.memory.size": 512, "env.clip_reward": False, "env.num": 32}
    pace = {"replay.samples_per_insert": 0.8, "algo.target.type": "copy", "algo.target.every_updates": 2_500}
    return {
        **dueling(env_id),
        **view,
        **learn,
        **prioritized,
        **memory,
        **_ladder(),
        **_adam(env_id, 1e-4, 1e-3, 40.0),
        **pace,
    }


def pqn(env_id: str) -> Settings:
    """No replay and no target network: many environments, layer normalisation, Q(lambda) returns.

    Source: Gallici et al. 2024.
    Advice: needs many environments (env.num=128) and many steps, and makes them quickly.
    """
    return {
        "algo.rule.type": "max",
        "algo.loss": "mse",
        "env.num": 128,
        "replay.type": "fresh",
        "replay.rows": 32,
        "replay.epochs": 2,
        "replay.minibatches": 32,
        "replay.trace": 0.65,
        "net.layer_norm": True,
        "optim.type": "radam",
        "optim.learning_rate": 2.5e-4,
        "optim.clip_norm": 10.0,
        **_atari(env_id, {"algo.explore.end": 0.001}),
    }


def btr(env_id: str) -> Settings:
    """Beyond the Rainbow: a wide residual network, IQN, Munchausen, noisy nets, 64 environments.

    Source: Clark et al. 2024 and its code.
    Advice: for pictures and a GPU; on a CPU use `btr-small`.
    """
    net = {"net.dueling": True, "net.noisy": True, "net.spectral_norm": True, "net.head.type": "implicit"}
    head = {"net.head.fractions": 8, "net.head.target_fractions": 8, "net.head.act_fractions": 8}
    learn = {"algo.rule.type": "munchausen", "algo.n_step": 3, "algo.discount": 0.997, "algo.batch_size": 256}
    pace = {"env.num": 64, "replay.samples_per_insert": 4.0, "algo.target.type": "copy"}
    torso = {"net.torso.type": "impala", "net.torso.factor": 2, "net.torso.width": 512}
    atari = {
        **torso,
        "replay.capacity": 2**20,
        "algo.learn_start_steps": 200_000,
        "algo.explore.steps": 2_000_000,
        "algo.explore.end": 0.01,
    }
    target = {"algo.target.every_updates": 500}
    per_ = {**_prioritized(0.2, 0.4, 1.0), **_atari_beta(env_id, 28_125)}
    return {**net, **head, **learn, **pace, **target, **per_, **_adam(env_id, 1e-4, 1.95e-5), **_atari(env_id, atari)}


def decqn(env_id: str) -> Settings:
    """Continuous or many-dimensional actions: each dimension has its own bins, a joint action is worth their mean.

    Source: Seyde et al. 2023.
    Advice: env.bins=2 (bang-bang) or 3 is enough for most robots; for Pendulum take 5 or more.
    """
    learn = {"algo.rule.type": "double", "algo.n_step": 3, "algo.batch_size": 256, "algo.learn_start_steps": 1_000}
    net = {"net.decoupled": True, "net.torso.type": "mlp", "net.torso.sizes": (512, 512)}
    pace = {"replay.samples_per_insert": 32.0, "algo.target.type": "copy", "algo.target.every_updates": 100}
    explore = {"algo.explore.type": "constant", "algo.explore.epsilon": 0.1}
    replay = {"replay.capacity": 1_000_000, **_prioritized(0.6, 0.2, 0.2)}
    return {**learn, **net, **pace, **explore, **replay, **_adam(env_id, 1e-4, 1e-8, 40.0)}


def dqn_small(env_id: str) -> Settings:
    """`dqn` with the environment's own sizes; on CartPole half its learning rate.

    Source: as `dqn`; CartPole's own rate was chosen for five-step returns.
    Advice: one-step returns learn slowly; add algo.n_step=3 first.
    """
    return {**dqn(""), **({"optim.learning_rate": 1e-3} if CARTPOLE.search(env_id) else {})}


def double_small(env_id: str) -> Settings:
    """`double` with the environment's own learning rate.

    Source: as `double`.
    Advice: add algo.n_step=3 for speed.
    """
    return double("")


def dueling_small(env_id: str) -> Settings:
    """`dueling` with the environment's own learning rate.

    Source: as `dueling`.
    Advice: add algo.n_step=3 for speed.
    """
    return dueling("")


def per_small(env_id: str) -> Settings:
    """`per` with the environment's own learning rate.

    Source: as `per`.
    Advice: add algo.n_step=3 for speed.
    """
    return per("")


def nstep_small(env_id: str) -> Settings:
    """`nstep` with the environment's own learning rate.

    Source: as `nstep`.
    Advice: the fastest of the plain variants.
    """
    return nstep("")


def c51_small(env_id: str) -> Settings:
    """`c51` with three-step returns.

    Source: as `c51`.
    Advice: set net.head.low and net.head.high for worlds of your own.
    """
    return {**nstep(""), "algo.rule.type": "max", **_categorical(env_id, 51)}


def qrdqn_small(env_id: str) -> Settings:
    """`qrdqn` with 25 quantiles, three-step returns and rescaled values.

    Source: as `qrdqn`, with the rescaling of Pohlen et al. 2018 because CartPole's returns are large for a Huber loss.
    Advice: a good first distributional agent.
    """
    head = {"net.head.type": "quantile", "net.head.quantiles": 25}
    return {**nstep(""), "algo.rule.type": "max", "algo.rescale": True, **head}


def iqn_small(env_id: str) -> Settings:
    """`iqn` with 8 fractions, three-step returns, rescaled values and batches of 64.

    Source: as `iqn`.
    Advice: dearer than `qrdqn-small` and rarely better in small worlds.
    """
    sizes = {"net.head.fractions": 8, "net.head.target_fractions": 8, "net.head.act_fractions": 16}
    return {
        **nstep(""),
        "algo.rule.type": "max",
        "algo.rescale": True,
        "net.head.type": "implicit",
        **sizes,
        **_batches_of_64(),
    }


def noisy_small(env_id: str) -> Settings:
    """`noisy` with three-step returns, less noise, and epsilon for the first 5,000 steps only.

    Source: as `noisy`, with the smaller noise that some published code uses.
    Advice: where more noise is needed set net.noisy_sigma=0.5.
    """
    return {**nstep(""), "net.noisy": True, "net.noisy_sigma": 0.1, **_epsilon_until(5_000)}


def munchausen_small(env_id: str) -> Settings:
    """`munchausen` with three-step returns.

    Source: as `munchausen`.
    Advice: algo.rule.temperature is in units of the value.
    """
    return {**nstep(""), "algo.rule.type": "munchausen", "algo.rule.temperature": 0.03}


def rainbow_small(env_id: str) -> Settings:
    """`rainbow` with the environment's own learning rate.

    Source: as `rainbow`.
    Advice: two to three times the cost of `nstep-small` per update.
    """
    bundle = {**dueling(""), **_prioritized(0.5, 0.4, 1.0), **_categorical(env_id, 51), "algo.n_step": 3}
    return {**bundle, "net.noisy": True, **_no_epsilon()}


def apex_small(env_id: str) -> Settings:
    """`apex` with 8 environments, 2,000 random steps first, and the environment's own pace.

    Source: as `apex`.
    Advice: raise env.num where steps are cheap.
    """
    prioritized = {**_prioritized(0.6, 0.4, 0.4), "replay.sampler.initial": "actor"}
    return {**dueling(""), "algo.n_step": 3, **prioritized, **_ladder(), "algo.explore.warm_steps": 2_000, "env.num": 8}


def r2d2_small(env_id: str) -> Settings:
    """`r2d2` with a memory of 64 and stretches of 10 + 20 steps.

    Source: as `r2d2`.
    Advice: raise algo.view.burn_in and algo.view.length when more must be remembered.
    """
    view = {"algo.view.type": "sequences", "algo.view.burn_in": 10, "algo.view.length": 20, "algo.view.stride": 10}
    learn = {"algo.n_step": 5, "algo.rescale": True, "algo.loss": "mse", "algo.batch_size": 32}
    memory = {"net.memory.type": "lstm", "net.memory.size": 64, "env.num": 16}
    prioritized = {**_prioritized(0.6, 0.4, 0.4), "replay.sampler.initial": "actor"}
    return {**dueling(""), **view, **learn, **memory, **prioritized, "replay.samples_per_insert": 32.0}


def pqn_small(env_id: str) -> Settings:
    """`pqn` with 32 environments.

    Source: Gallici et al. 2024 (their classic-control settings).
    Advice: learns later than replay does, but each step costs little.
    """
    pace = {"env.num": 32, "replay.rows": 64, "replay.epochs": 4, "replay.minibatches": 16, "replay.trace": 0.95}
    return {**pqn(""), **pace, "optim.learning_rate": 5e-4}


def btr_small(env_id: str) -> Settings:
    """`btr` for a CPU: 8 environments, the environment's own pace, a narrow residual network for pictures.

    Source: as `btr`.
    Advice: leave parts out (net.noisy=false, net.spectral_norm=false) to see what each is worth.
    """
    net = {"net.dueling": True, "net.noisy": True, "net.spectral_norm": True, "net.head.type": "implicit"}
    head = {"net.head.fractions": 8, "net.head.target_fractions": 8, "net.head.act_fractions": 16}
    learn = {"algo.rule.type": "munchausen", "algo.n_step": 3, "algo.rescale": True, **_batches_of_64()}
    torso = {"net.torso.type": "impala", "net.torso.factor": 1}
    noise = {"net.noisy_sigma": 0.1}
    return {**net, **head, **learn, **noise, **_prioritized(0.2, 0.4, 1.0), **_atari(env_id, torso)}


def decqn_small(env_id: str) -> Settings:
    """`decqn` with 256 units and the environment's own learning rate.

    Source: as `decqn`.
    Advice: env.bins=5 for one or two dimensions, 3 for more.
    """
    learn = {"algo.rule.type": "double", "algo.n_step": 3}
    return {**learn, "net.decoupled": True, "net.torso.type": "mlp", "net.torso.sizes": (256, 256)}


ALGORITHMS = (dqn, double, dueling, per, nstep, c51, qrdqn, iqn, noisy, munchausen)
BUNDLES = (rainbow, apex, r2d2, pqn, btr, decqn)
SMALL = (
    dqn_small,
    double_small,
    dueling_small,
    per_small,
    nstep_small,
    c51_small,
    qrdqn_small,
    iqn_small,
    noisy_small,
    munchausen_small,
    rainbow_small,
    apex_small,
    r2d2_small,
    pqn_small,
    btr_small,
    decqn_small,
)
