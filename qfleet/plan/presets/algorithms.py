"""Presets of published algorithms: the changes of each paper, as settings over the environment's defaults.

They have the published numbers (for Atari, which most papers used); sizes of replay, budget and schedules stay those
of the environment's defaults unless the environment is an Atari game. `small.py` has variants for small machines.
"""

from qfleet.plan.presets.pieces import (
    Settings,
    atari_beta,
    distributional,
    epsilon_ladder,
    epsilon_until,
    no_epsilon,
    only_atari,
    only_minatar,
    recorded,
    with_adam,
    with_atoms,
    with_priorities,
)


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
        **only_atari(env_id, {"replay.capacity": 1_000_000, "algo.loss": "mse"}),
    }


def double(env_id: str) -> Settings:
    """DQN whose online network chooses the next action and whose target network evaluates it.

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
    return {**double(env_id), **with_priorities(0.6, 0.4, 1.0), **atari_beta(env_id, 495_000)}


def nstep(env_id: str) -> Settings:
    """Double DQN with three-step returns.

    Source: Sutton 1988; Hessel et al. 2018.
    Advice: 3 to 5 steps speed up sparse rewards; much more adds noise.
    """
    return {**double(env_id), "algo.n_step": 3}


def c51(env_id: str) -> Settings:
    """DQN that learns the whole distribution of returns over 51 fixed atoms.

    Source: Bellemare et al. 2017.
    Advice: net.head.low and net.head.high must cover the discounted return; for unknown environments they are guesses.
    """
    atari = {"algo.target.every_updates": 2_500, "algo.explore.end": 0.01}
    plain = distributional(dqn(env_id))
    optim = with_adam(env_id, 2.5e-4, 3.125e-4)
    return {**plain, **with_atoms(env_id, 51), **optim, **only_atari(env_id, atari)}


def qrdqn(env_id: str) -> Settings:
    """DQN that learns 200 quantiles of the return.

    Source: Dabney et al. 2018 (QR-DQN).
    Advice: needs no guess about the returns; net.head.quantiles=50 is four times cheaper and rarely worse.
    """
    head = {"net.head.type": "quantile", "net.head.quantiles": 200}
    return {**distributional(dqn(env_id)), **head, **with_adam(env_id, 5e-5, 3.125e-4)}


def iqn(env_id: str) -> Settings:
    """DQN that learns the return's quantile function at random fractions.

    Source: Dabney et al. 2018 (IQN).
    Advice: the head runs once per fraction; on a CPU net.head.fractions=8 net.head.target_fractions=8 learns as well.
    """
    sizes = {"net.head.fractions": 64, "net.head.target_fractions": 64, "net.head.act_fractions": 32}
    plain = distributional(dqn(env_id))
    optim = with_adam(env_id, 5e-5, 3.125e-4)
    return {**plain, "net.head.type": "implicit", **sizes, **optim}


def noisy(env_id: str) -> Settings:
    """Double DQN that explores through noise on its weights instead of random actions.

    Source: Fortunato et al. 2018.
    Advice: no epsilon to tune; net.noisy_sigma=0.1 explores less.
    """
    return {**double(env_id), "net.noisy": True, **no_epsilon()}


def munchausen(env_id: str) -> Settings:
    """DQN with soft values and the scaled log-probability of the action as a bonus.

    Source: Vieillard et al. 2020.
    Advice: algo.rule.temperature is in units of the value; raise it where returns are in the hundreds.
    """
    rule = {"algo.rule.type": "munchausen", "algo.rule.temperature": 0.03}
    return {**dqn(env_id), **rule, **with_adam(env_id, 5e-5, 3.125e-4)}


def rainbow(env_id: str) -> Settings:
    """Double, duelling, prioritised, three-step, C51 and noisy nets in one agent.

    Source: Hessel et al. 2018; on MinAtar the target moves as in Obando-Ceron and Castro 2021, the rest was measured.
    Advice: strong and slow; `iqn` or `nstep` with `per` are cheaper.
    """
    atari = only_atari(env_id, {"algo.target.every_updates": 2_000})
    priorities = {**with_priorities(0.5, 0.4, 1.0), **atari_beta(env_id, 495_000)}
    combined = {**distributional(dueling(env_id)), **priorities, **with_atoms(env_id, 51), "algo.n_step": 3}
    # A categorical loss has small gradients: with MinAtar's usual eps Adam would take tiny steps. Noise alone finds
    # the first reward of Freeway too late.
    minatar = only_minatar(env_id, {"algo.target.every_updates": 250, "optim.eps": 1e-6})
    explore = only_minatar(env_id, epsilon_until(100_000)) or no_epsilon()
    return {**combined, "net.noisy": True, **explore, **with_adam(env_id, 6.25e-5, 1.5e-4), **atari, **minatar}


def apex(env_id: str) -> Settings:
    """Ape-X on one machine: an epsilon per environment, and initial priorities computed by the actors.

    Source: Horgan et al. 2018; 32 environments stand in for 360 actors, and each step is drawn 6.24 times, not 0.78.
    Advice: env.num sets how many epsilons there are; fewer than eight leave hardly any that explore.
    """
    atari = {"algo.target.every_updates": 2_500, "replay.capacity": 2_000_000, "algo.learn_start_steps": 50_000}
    optim = {"optim.type": "rmsprop", "optim.learning_rate": 6.25e-5, "optim.eps": 1.5e-7, "optim.clip_norm": 40.0}
    # Published: actors make 1.3 steps per sampled step, over billions. Runs of millions need eight times the updates.
    pace = {"env.num": 32, "algo.batch_size": 512, "replay.samples_per_insert": 6.24}
    prioritized = {**with_priorities(0.6, 0.4, 0.4), "replay.sampler.initial": "actor"}
    return {
        **dueling(env_id),
        "algo.n_step": 3,
        **prioritized,
        **epsilon_ladder(),
        **optim,
        **pace,
        **only_atari(env_id, atari),
    }


def gorila(env_id: str) -> Settings:
    """Gorila on one machine: actor-learners with their own replay around an asynchronous parameter server.

    Source: Nair et al. 2015, in its bundled mode; 2 actor-learners and 2 shards stand in for 100 and 31.
    Advice: learners.num sets how many actor-learners share env.num, replay.capacity and algo.batch_size.
    """
    learners = {"learners.num": 2, "learners.bundles": True, "env.num": 8}
    server = {"sync.type": "server", "sync.shards": 2, "sync.max_staleness": None}
    # A batch of 32 for each actor-learner, after four of its own steps.
    return {**dqn(env_id), **learners, **server, **only_atari(env_id, {"algo.batch_size": 64})}


def r2d2(env_id: str) -> Settings:
    """A recurrent network that learns from sequences with stored recurrent state and burn-in.

    Source: Kapturowski et al. 2019.
    Advice: an update per 6,400 steps suits billions: the first target copy is after 16 million. Else `r2d2-small`.
    """
    view = {"algo.view.type": "sequences", "algo.view.burn_in": 40, "algo.view.length": 80, "algo.view.stride": 40}
    learn = {"algo.n_step": 5, "algo.discount": 0.997, "algo.rescale": True, "algo.loss": "mse", "algo.batch_size": 64}
    prioritized = {**with_priorities(0.9, 0.6, 0.6), "replay.sampler.initial": "actor"}
    memory = {"net.memory.type": "lstm", "net.memory.size": 512, "env.clip_reward": False, "env.num": 32}
    pace = {"replay.samples_per_insert": 0.8, "algo.target.type": "copy", "algo.target.every_updates": 2_500}
    return {
        **dueling(env_id),
        **view,
        **learn,
        **prioritized,
        **memory,
        **epsilon_ladder(),
        **with_adam(env_id, 1e-4, 1e-3, 40.0),
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
        **only_atari(env_id, {"algo.explore.end": 0.001}),
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
    per_ = {**with_priorities(0.2, 0.4, 1.0), **atari_beta(env_id, 28_125)}
    return {
        **net,
        **head,
        **learn,
        **pace,
        **target,
        **per_,
        **with_adam(env_id, 1e-4, 1.95e-5),
        **only_atari(env_id, atari),
    }


def decqn(env_id: str) -> Settings:
    """Continuous or many-dimensional actions: each dimension has its own bins, a joint action is worth their mean.

    Source: Seyde et al. 2023.
    Advice: env.bins=2 (bang-bang) or 3 is enough for most robots; for Pendulum take 5 or more.
    """
    learn = {"algo.rule.type": "double", "algo.n_step": 3, "algo.batch_size": 256, "algo.learn_start_steps": 1_000}
    net = {"net.decoupled": True, "net.torso.type": "mlp", "net.torso.sizes": (512, 512)}
    pace = {"replay.samples_per_insert": 32.0, "algo.target.type": "copy", "algo.target.every_updates": 100}
    explore = {"algo.explore.type": "constant", "algo.explore.epsilon": 0.1}
    replay = {"replay.capacity": 1_000_000, **with_priorities(0.6, 0.2, 0.2)}
    return {**learn, **net, **pace, **explore, **replay, **with_adam(env_id, 1e-4, 1e-8, 40.0)}


def cql(env_id: str) -> Settings:
    """Double DQN on a data set, with values kept low for actions that were not recorded.

    Source: Kumar et al. 2020, CQL(H); alpha 1 and the Double rule as in d3rlpy (Seno and Imai 2022).
    Advice: name the data with replay.path; as in Tianshou it is net.head.type=quantile algo.offline.alpha=10.
    """
    return {**recorded(env_id, double(env_id)), "algo.offline.type": "cql", "algo.offline.alpha": 1.0}


def bc(env_id: str) -> Settings:
    """Behaviour cloning on a data set: the baseline that any offline algorithm should beat.

    Source: Pomerleau 1991.
    Advice: name the data with replay.path; on data of a good policy it is hard to beat, on mixed data easy.
    """
    layers = {"net.dueling": False, "net.noisy": False, "net.head.type": "scalar"}
    return {**recorded(env_id, layers), "algo.offline.type": "bc", "algo.rescale": False}


ALGORITHMS = (dqn, double, dueling, per, nstep, c51, qrdqn, iqn, noisy, munchausen)
COMBINATIONS = (rainbow, apex, gorila, r2d2, pqn, btr, decqn)
OFFLINE = (cql, bc)
