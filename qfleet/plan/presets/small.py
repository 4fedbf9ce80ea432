"""The same algorithms for a laptop and small environments: fewer atoms and fractions, the environment's own rates."""

from qfleet.plan.presets.algorithms import double, dqn, dueling, nstep, per, pqn
from qfleet.plan.presets.pieces import (
    CARTPOLE,
    Settings,
    batches_of_64,
    epsilon_ladder,
    epsilon_until,
    no_epsilon,
    only_atari,
    with_atoms,
    with_priorities,
)


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
    return {**nstep(""), "algo.rule.type": "max", **with_atoms(env_id, 51)}


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
        **batches_of_64(),
    }


def noisy_small(env_id: str) -> Settings:
    """`noisy` with three-step returns, less noise, and epsilon for the first 5,000 steps only.

    Source: as `noisy`, with the smaller noise that some published code uses.
    Advice: where more noise is needed set net.noisy_sigma=0.5.
    """
    return {**nstep(""), "net.noisy": True, "net.noisy_sigma": 0.1, **epsilon_until(5_000)}


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
    combined = {**dueling(""), **with_priorities(0.5, 0.4, 1.0), **with_atoms(env_id, 51), "algo.n_step": 3}
    return {**combined, "net.noisy": True, **no_epsilon()}


def apex_small(env_id: str) -> Settings:
    """`apex` with 8 environments, 2,000 random steps first, and the environment's own pace.

    Source: as `apex`.
    Advice: raise env.num where steps are cheap.
    """
    prioritized = {**with_priorities(0.6, 0.4, 0.4), "replay.sampler.initial": "actor"}
    return {
        **dueling(""),
        "algo.n_step": 3,
        **prioritized,
        **epsilon_ladder(),
        "algo.explore.warm_steps": 2_000,
        "env.num": 8,
    }


def r2d2_small(env_id: str) -> Settings:
    """`r2d2` with a memory of 64 and stretches of 10 + 20 steps.

    Source: as `r2d2`.
    Advice: raise algo.view.burn_in and algo.view.length when more must be remembered.
    """
    view = {"algo.view.type": "sequences", "algo.view.burn_in": 10, "algo.view.length": 20, "algo.view.stride": 10}
    learn = {"algo.n_step": 5, "algo.rescale": True, "algo.loss": "mse", "algo.batch_size": 32}
    memory = {"net.memory.type": "lstm", "net.memory.size": 64, "env.num": 16}
    prioritized = {**with_priorities(0.6, 0.4, 0.4), "replay.sampler.initial": "actor"}
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
    Advice: leave parts out (net.noisy=false, net.spectral_norm=false) to see the effect of each.
    """
    net = {"net.dueling": True, "net.noisy": True, "net.spectral_norm": True, "net.head.type": "implicit"}
    head = {"net.head.fractions": 8, "net.head.target_fractions": 8, "net.head.act_fractions": 16}
    learn = {"algo.rule.type": "munchausen", "algo.n_step": 3, "algo.rescale": True, **batches_of_64()}
    torso = {"net.torso.type": "impala", "net.torso.factor": 1}
    noise = {"net.noisy_sigma": 0.1}
    return {**net, **head, **learn, **noise, **with_priorities(0.2, 0.4, 1.0), **only_atari(env_id, torso)}


def decqn_small(env_id: str) -> Settings:
    """`decqn` with 256 units and the environment's own learning rate.

    Source: as `decqn`.
    Advice: env.bins=5 for one or two dimensions, 3 for more.
    """
    learn = {"algo.rule.type": "double", "algo.n_step": 3}
    return {**learn, "net.decoupled": True, "net.torso.type": "mlp", "net.torso.sizes": (256, 256)}


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
