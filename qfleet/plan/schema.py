"""The whole run as frozen data, which every package reads and none changes.

Variants are tagged unions: `type` chooses the variant, the other keys are its settings. `None` means "chosen
automatically": by the environment's spaces or by the machine; the choice is written into the run's `run.toml`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from qfleet.plan.part import (
    Count,
    Environments,
    Fraction,
    NotNegative,
    Positive,
    Rate,
    Scalar,
    Section,
    Threads,
    Width,
    Workers,
)
from qfleet.plan.sync_schema import AllreduceSync, Learners, Sync


class Env(Section):
    """The environment: its id, how many copies run in parallel, and how it is adapted.

    With `workers` > 0 the copies are stepped in that many processes, for environments that are slow or unsafe: one that
    raises, dies or exceeds `step_timeout_seconds` is rebuilt, `rebuilds` times in ten minutes, and a process that holds
    more than `worker_memory_gib` is replaced. Without workers a command ends when one call of the environment takes
    four times `step_timeout_seconds`. An observation outside the bounds of its own space is an error, unless
    `check_bounds` is false.

    `options` are keyword arguments of its constructor. So are `secrets`, but a plan holds only the names of environment
    variables: with `env.secrets.key=MY_KEY` the constructor gets `key` with the value of MY_KEY.

    `wrappers` are put around every copy, the first one innermost: `module:Class` or `file.py:Class`, with settings as
    in `gymnasium.wrappers:TimeLimit(max_episode_steps=200)`.
    """

    id: str
    num: Environments = 8
    workers: Annotated[int, Meta(ge=0, le=10_000)] = 0
    step_timeout_seconds: Rate = 30.0
    rebuilds: Count = 5
    worker_memory_gib: Rate | None = None
    check_bounds: bool = True
    bins: Annotated[int, Meta(ge=2, le=10_000)] | None = None
    frame_size: Annotated[int, Meta(ge=16, le=10_000)] | None = None
    sticky: Fraction | None = None
    clip_reward: bool = False
    normalize: Literal["off", "obs", "reward", "both"] = "off"
    options: dict[str, Scalar] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    wrappers: Annotated[tuple[str, ...], Meta(max_length=20)] = ()


class MaxRule(Section, tag="max"):
    """Bootstrap from the target network's best action (Mnih et al. 2015)."""


class DoubleRule(Section, tag="double"):
    """The online network chooses the action, the target network values it (van Hasselt et al. 2016)."""


class MunchausenRule(Section, tag="munchausen"):
    """Soft values, and the scaled log-probability of the action taken added to its reward (Vieillard et al. 2020)."""

    alpha: Fraction = 0.9
    temperature: Rate = 0.03
    floor: Annotated[float, Meta(le=0.0)] = -1.0


class StepsView(Section, tag="steps"):
    """Each step is learned from by itself."""


class SequencesView(Section, tag="sequences"):
    """Stretches of experience with the memory they began with (Kapturowski et al. 2019).

    The first `burn_in` rows only warm the memory up, `length` rows are learned from, a stretch begins every `stride`
    rows; a stretch's priority is `eta` times its largest error plus the rest times its mean error.
    """

    burn_in: Count = 20
    length: Positive = 40
    stride: Positive = 20
    eta: Fraction = 0.9


class LinearEpsilon(Section, tag="linear"):
    """Epsilon falls in a straight line from `start` to `end` over `steps` environment steps."""

    start: Fraction = 1.0
    end: Fraction = 0.05
    steps: Positive = 10_000


class ExponentialEpsilon(Section, tag="exponential"):
    """Epsilon decays from `start` towards `end`, halving the distance every `half_life_steps`."""

    start: Fraction = 1.0
    end: Fraction = 0.01
    half_life_steps: Positive = 5_000


class ConstantEpsilon(Section, tag="constant"):
    """One epsilon for the whole run."""

    epsilon: Fraction = 0.1


class LadderEpsilon(Section, tag="ladder"):
    """A constant epsilon for each environment, base^(1 + i * power / (env.num - 1)) for number i (Horgan et al. 2018).

    The first `warm_steps` are taken at random everywhere.
    """

    base: Fraction = 0.4
    power: NotNegative = 7.0
    warm_steps: Count = 0


class SoftmaxExplore(Section, tag="softmax"):
    """Actions are drawn with probability ~ exp(value / temperature), which falls to `end` over `steps` steps."""

    temperature: Rate = 1.0
    end: Rate | None = None
    steps: Positive = 10_000


class OwnExplore(Section, tag="own"):
    """The user's own function, passed to `train(plan, explore=...)` from Python."""


class NoBonus(Section, tag="off"):
    """Only the environment's own rewards."""


class CountBonus(Section, tag="count"):
    """scale / sqrt(visits) is added to the reward of a step, so that rare observations are sought (Tang et al. 2017).

    Observations are standardised by the first `settle_steps`, in which nothing is counted. Visits are counted by a hash
    of `bits` random hyperplanes or, for observations of few numbers, by cells of `grid` standard deviations.
    """

    scale: Rate = 0.1
    bits: Annotated[int, Meta(ge=1, le=62)] = 32
    grid: Rate | None = None
    settle_steps: Positive = 1_000


class CopyTarget(Section, tag="copy"):
    """The target network becomes a copy of the online network every `every_updates` updates."""

    every_updates: Positive = 250


class AverageTarget(Section, tag="average"):
    """The target network follows the online one: target += tau * (online - target) after each update."""

    tau: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01


class NoReset(Section, tag="off"):
    """The network is trained without a break."""


class PeriodicReset(Section, tag="periodic"):
    """Every `every_updates` the head is reset and the torso moves towards fresh weights (Schwarzer et al. 2023).

    The torso keeps the share `keep` of its weights (shrink and perturb): 1 leaves it alone, 0 resets it as well.
    """

    every_updates: Positive = 40_000
    keep: Fraction = 0.5


class NoAnneal(Section, tag="off"):
    """`n_step` and `discount` are the same from the first update to the last."""


class ExponentialAnneal(Section, tag="exponential"):
    """From these `n_step` and `discount` to `algo`'s own over `updates`, again after each reset (BBF, 2023)."""

    n_step: Annotated[int, Meta(ge=1, le=100)] = 10
    discount: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.97
    updates: Positive = 10_000


class NoOfflineLoss(Section, tag="off"):
    """The TD loss alone."""


class ConservativeOfflineLoss(Section, tag="cql"):
    """`alpha` times log sum exp of all values minus the recorded action's value is added (Kumar et al. 2020, CQL(H)).

    Values of actions that were not recorded stay low.
    """

    alpha: Rate = 1.0


class CloningOfflineLoss(Section, tag="bc"):
    """Behaviour cloning in place of the TD loss: the greedy action is the one recorded most often (a baseline)."""


class Algo(Section):
    """The learning rule: targets, exploration, batch and loss; a batch is computed in `accumulate` parts."""

    rule: MaxRule | DoubleRule | MunchausenRule = DoubleRule()
    view: StepsView | SequencesView = StepsView()
    n_step: Annotated[int, Meta(ge=1, le=100)] = 1
    discount: Fraction = 0.99
    explore: LinearEpsilon | ExponentialEpsilon | ConstantEpsilon | LadderEpsilon | SoftmaxExplore | OwnExplore = (
        LinearEpsilon()
    )
    bonus: NoBonus | CountBonus = NoBonus()
    target: CopyTarget | AverageTarget = CopyTarget()
    learn_start_steps: Count = 1_000
    batch_size: Positive = 64
    accumulate: Positive = 1
    loss: Literal["huber", "mse"] = "huber"
    rescale: bool = False
    offline: NoOfflineLoss | ConservativeOfflineLoss | CloningOfflineLoss = NoOfflineLoss()
    reset: NoReset | PeriodicReset = NoReset()
    anneal: NoAnneal | ExponentialAnneal = NoAnneal()


class Optimizer(Section):
    """Settings of every optimiser.

    The learning rate rises in a straight line over the first `warm_updates`, and falls to zero over `decay_updates`.
    With a `base_batch` it is meant for batches of that size: for others it grows with their size (`scaling=linear`,
    Goyal et al. 2017) or its root (`sqrt`, for optimisers that divide by a gradient's size).
    """

    clip_norm: Rate | None = 10.0
    weight_decay: NotNegative = 0.0
    decay_updates: Positive | None = None
    warm_updates: Count = 0
    base_batch: Positive | None = None
    scaling: Literal["linear", "sqrt"] = "sqrt"


class Adam(Optimizer, tag="adam"):
    """Adam; a weight decay above zero is decoupled (AdamW)."""

    learning_rate: Rate = 1e-3
    eps: Rate = 1e-8


class Radam(Optimizer, tag="radam"):
    """Rectified Adam, which needs no warm-up (Liu et al. 2020); a weight decay above zero is decoupled."""

    learning_rate: Rate = 2.5e-4
    eps: Rate = 1e-8


class Rmsprop(Optimizer, tag="rmsprop"):
    """RMSProp, by default centred as in the Nature paper."""

    learning_rate: Rate = 2.5e-4
    eps: Rate = 1e-5
    decay: Fraction = 0.95
    centered: bool = True


class Sgd(Optimizer, tag="sgd"):
    """Plain stochastic gradient descent with optional momentum."""

    learning_rate: Rate = 1e-2
    momentum: Fraction = 0.0


class MlpTorso(Section, tag="mlp"):
    """Fully connected layers with ReLU; any observation is flattened first."""

    sizes: Annotated[tuple[Width, ...], Meta(max_length=100)] = (128, 128)


class NatureTorso(Section, tag="nature"):
    """The three convolutions of Mnih et al. 2015 and one fully connected layer of `width`."""

    width: Width = 512


class ConvTorso(Section, tag="conv"):
    """Convolutions, one number of each list per layer, and a fully connected layer of `width`.

    The defaults fit pictures of 42x42.
    """

    channels: Annotated[tuple[Width, ...], Meta(max_length=100)] = (16, 32, 32)
    kernels: tuple[Positive, ...] = (4, 4, 3)
    strides: tuple[Positive, ...] = (2, 2, 2)
    width: Width = 256


class ImpalaTorso(Section, tag="impala"):
    """Three sections of residual convolutions, `factor` times the published 16, 32, 32 channels (Espeholt et al. 2018).

    The last maps are max-pooled to `pool` x `pool` whatever their size; `width` units follow.
    """

    factor: Annotated[int, Meta(ge=1, le=1_000)] = 1
    pool: Positive = 6
    width: Width = 256


class MinatarTorso(Section, tag="minatar"):
    """One 3x3 convolution and one fully connected layer, for small grids (Young and Tian 2019)."""

    channels: Width = 16
    width: Width = 128


class OwnTorso(Section, tag="own"):
    """The user's own `nn.Module`, passed to `train(plan, torso=...)` from Python."""


class ScalarHead(Section, tag="scalar"):
    """One expected value per action."""


class CategoricalHead(Section, tag="categorical"):
    """Probabilities of `atoms` fixed returns from `low` to `high` per action (C51, Bellemare et al. 2017)."""

    atoms: Annotated[int, Meta(ge=2, le=10_000)] = 51
    low: float = -10.0
    high: float = 10.0


class QuantileHead(Section, tag="quantile"):
    """As many quantiles of the return per action (QR-DQN, Dabney et al. 2018)."""

    quantiles: Annotated[int, Meta(ge=1, le=10_000)] = 200


class ImplicitHead(Section, tag="implicit"):
    """The return's quantile function at fractions drawn anew each time (IQN, Dabney et al. 2018).

    `fractions` of the online network, `target_fractions` of the target network, `act_fractions` evenly spaced when
    acting; `cosines` embed a fraction.
    """

    fractions: Annotated[int, Meta(ge=1, le=10_000)] = 64
    target_fractions: Annotated[int, Meta(ge=1, le=10_000)] = 64
    act_fractions: Annotated[int, Meta(ge=1, le=10_000)] = 32
    cosines: Annotated[int, Meta(ge=1, le=10_000)] = 64


class NoMemory(Section, tag="off"):
    """The network sees one observation at a time."""


class LstmMemory(Section, tag="lstm"):
    """A long short-term memory after the torso; it also sees the previous action and reward."""

    size: Width = 128


class GruMemory(Section, tag="gru"):
    """A gated recurrent unit after the torso; it also sees the previous action and reward."""

    size: Width = 128


class Net(Section):
    """The network: a torso that makes features, perhaps a memory, a head that makes values."""

    torso: MlpTorso | NatureTorso | ConvTorso | ImpalaTorso | MinatarTorso | OwnTorso | None = None
    memory: NoMemory | LstmMemory | GruMemory = NoMemory()
    head: ScalarHead | CategoricalHead | QuantileHead | ImplicitHead = ScalarHead()
    dueling: bool = False
    noisy: bool = False
    noisy_sigma: Rate = 0.5
    layer_norm: bool = False
    spectral_norm: bool = False
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    decoupled: bool = False


class UniformSampler(Section, tag="uniform"):
    """Every stored step is equally likely."""


class PrioritizedSampler(Section, tag="prioritized"):
    """Proportional prioritised replay (Schaul et al. 2016); beta rises linearly over `beta_updates` updates.

    A new item gets the largest priority seen so far, or (`initial=actor`) the error its actor expected (Ape-X).
    """

    alpha: Fraction = 0.6
    beta_start: Fraction = 0.4
    beta_end: Fraction = 1.0
    beta_updates: Positive = 100_000
    eps: Rate = 1e-6
    initial: Literal["largest", "actor"] = "largest"


class NoFilter(Section, tag="off"):
    """Every step can be drawn."""


class DuplicatesFilter(Section, tag="duplicates"):
    """At most `copies` equal steps can be drawn at a time: same observation, action, reward, discount and outcome.

    `still` also keeps out steps that changed nothing: the same observation again, without reward or end.
    """

    copies: Positive = 1
    still: bool = False


class BufferReplay(Section, tag="buffer"):
    """A replay buffer and how often its steps are sampled; `compress` keeps frames in lossless blocks (lz4).

    `on_device` keeps a copy of all observations on the learner's device, and batches are stacked there.

    With `prefill`, training begins with the recorded steps of a data set. A `prefill_share` of every batch is drawn
    from them, the rest from the run's own steps (Ball et al. 2023, RLPD); without a share they are the replay's first
    steps, which go when it is full. `prefill_version` pins the data set.
    """

    capacity: Positive = 100_000
    sampler: UniformSampler | PrioritizedSampler = UniformSampler()
    filter: NoFilter | DuplicatesFilter = NoFilter()
    samples_per_insert: Rate = 16.0
    compress: bool = False
    on_device: bool = False
    prefill: Annotated[str, Meta(max_length=4_096)] = ""
    prefill_share: Annotated[float, Meta(gt=0.0, lt=1.0)] | None = None
    prefill_version: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] | None = None


class FreshReplay(Section, tag="fresh"):
    """No replay: `rows` steps of every environment are learned from `epochs` times and forgotten (PQN).

    Targets are Q(lambda) returns with lambda = `trace` (Gallici et al. 2024); each epoch makes `minibatches` updates.
    """

    rows: Positive = 32
    epochs: Positive = 2
    minibatches: Positive = 32
    trace: Fraction = 0.65


class EpochsOrder(Section, tag="epochs"):
    """Every step (with `algo.view.type=sequences`: every window) is used once per epoch."""


class UniformOrder(Section, tag="uniform"):
    """Batches are drawn at random from the whole data set, which is in memory."""


class PrioritizedOrder(Section, tag="prioritized"):
    """Batches are drawn by priority (Schaul et al. 2016) from the whole data set, which is in memory."""

    alpha: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.6
    beta_start: Fraction = 0.4
    beta_end: Fraction = 1.0
    beta_updates: Positive = 100_000
    eps: Rate = 1e-6


class DatasetReplay(Section, tag="dataset"):
    """No environment: a data set at `path` is learned from in epochs, in which every step is used once.

    Settings in steps, and `env_steps` in rows, count the recorded steps that were learned from. `version` pins the data
    set; left out, it is that of the day the run begins. Steps of `open_shards` files are mixed; left out, that is the
    smallest multiple of `learners.num` from 4 on. Every learner has at most `cache_bytes` of decoded files open. A
    larger split is decoded once, into files on this machine's disk, of which there are at most `disk_bytes`. With
    another `order` than epochs, learner 0 has the whole split in memory.
    """

    path: Annotated[str, Meta(max_length=4_096)] = ""
    split: Literal["train", "validation", "test", "all"] = "train"
    version: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] | None = None
    order: EpochsOrder | UniformOrder | PrioritizedOrder = EpochsOrder()
    open_shards: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    cache_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    disk_bytes: Annotated[int, Meta(ge=0)] = 8 << 30


class Actors(Section):
    """The actors: `num` of them, each with `envs` of the environments (`env.num` in all)."""

    num: Workers = 1
    envs: Environments | None = None


class InlineRuntime(Section, tag="inline"):
    """Everything in one thread: deterministic and easy to debug.

    An update uses `threads`: whole operations side by side (`parallel=tasks`; its numbers do not depend on the number
    of threads), or every operation divided among all of them (`operations`). `compile` compiles the whole update,
    `precision` is the dtype of matrix products in updates; left out, they are chosen to fit the machine.
    """

    device: str | None = None
    threads: Threads | None = None
    parallel: Literal["tasks", "operations"] | None = None
    compile: bool | None = None
    precision: Literal["float32", "bfloat16"] | None = None


class ProcessesRuntime(Section, tag="processes"):
    """Actors in processes of their own, connected by shared memory; learning goes on while they act.

    A rollout has `chunk_rows` steps of every environment of one actor, and `slots` of them may wait. An actor without
    progress for `hung_seconds` is replaced, `restarts` times in ten minutes. With `compress` observations are sent in
    lossless lz4. With `replay_process` the replay has a process of its own too, and batches are sampled there while the
    learner updates. Actions are chosen in every actor (`inference=local`) or in one for all (`central`: `actors.num`
    processes then only step environments), on `inference_device`.
    """

    device: str | None = None
    threads: Threads | None = None
    parallel: Literal["tasks", "operations"] | None = None
    compile: bool | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    chunk_rows: Positive = 2
    slots: Annotated[int, Meta(ge=2, le=1_000)] = 2
    hung_seconds: Rate = 60.0
    restarts: Count = 5
    compress: bool = False
    replay_process: bool = False
    inference: Literal["local", "central"] | None = None
    inference_device: str | None = None


class RayRuntime(Section, tag="ray"):
    """Actors, the learner, and if `replay_process` the replay, as processes of a Ray cluster.

    Without an `address` a private Ray is started for the run, on this machine only and with `store_bytes` for objects.
    The cluster at an `address` (host:port) needs a token, unless `allow_no_token`. The learner runs on the node of the
    calling process, actors and the replay process on any. Rollouts, compression and restarts are as with `processes`.
    """

    address: str | None = None
    allow_no_token: bool = False
    device: str | None = None
    threads: Threads | None = None
    parallel: Literal["tasks", "operations"] | None = None
    compile: bool | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    chunk_rows: Positive = 8
    slots: Annotated[int, Meta(ge=2, le=1_000)] = 2
    hung_seconds: Rate = 60.0
    restarts: Count = 5
    compress: bool = False
    replay_process: bool = False
    actor_cpus: NotNegative = 1.0
    learner_cpus: NotNegative = 1.0
    replay_cpus: NotNegative = 1.0
    store_bytes: Annotated[int, Meta(ge=80 << 20)] = 200 << 20


class Save(Section):
    """When checkpoints are written and how many are kept; and where every episode of the actors is recorded."""

    every_seconds: NotNegative = 60.0
    every_steps: Positive = 10_000
    max_share: Fraction = 0.05
    replay: Literal["full", "none"] = "full"
    keep: Annotated[int, Meta(ge=2)] = 2
    dataset: Annotated[str, Meta(min_length=1, max_length=4_096)] | None = None


class Eval(Section):
    """How the greedy policy is evaluated: validation episodes steer the run, test episodes are reported; 0: none.

    It plays them (`on=world`), or is compared with recorded ones (`on=data`): the score is minus the mean TD error.
    """

    on: Literal["world", "data"] | None = None
    every_steps: Positive = 5_000
    episodes: Count = 20
    test_episodes: Count = 100
    # A longer episode is cut and counted: with a policy that never dies an evaluation would not end.
    max_steps: Positive = 27_000


class SteadyRate(Section, tag="off"):
    """The learning rate is the plan's own."""


class PlateauRate(Section, tag="plateau"):
    """`patience` evaluations without a better score: times `factor`, but not below `floor`.

    A linear decay (`optim.decay_updates`) goes on from the lower rate.
    """

    patience: Positive = 3
    factor: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5
    floor: Rate = 1e-5


class SteadyBatch(Section, tag="off"):
    """The batch size is the plan's own."""


class GrowingBatch(Section, tag="grow"):
    """`patience` evaluations without a better score: times `factor`, up to `largest`; updates per step stay."""

    patience: Positive = 3
    factor: Annotated[int, Meta(ge=2)] = 2
    largest: Positive = 1_024


class Steer(Section):
    """Settings that validation scores change; the run ends after `stop_patience` evaluations without a better one."""

    learning_rate: SteadyRate | PlateauRate = SteadyRate()
    batch: SteadyBatch | GrowingBatch = SteadyBatch()
    stop_patience: Positive | None = None


class Population(Section):
    """Several members learn side by side: one replay, weights of their own; the best of them is the run's policy.

    Every `every_steps` the worst takes the weights of the best (Jaderberg et al. 2017); their learning rates are
    `optim.learning_rate` in the middle and differ by the factor `spread` from one to the next.
    """

    num: Annotated[int, Meta(ge=1, le=1_000)] = 1
    every_steps: Positive = 10_000
    spread: Annotated[float, Meta(ge=1.0)] = 1.0


class Until(Section):
    """When the run ends: after a number of steps, of seconds, or at a validation score.

    With a data set `epochs` may be given instead of steps.
    """

    steps: Positive = 100_000
    epochs: Positive | None = None
    seconds: Rate | None = None
    score: float | None = None


InfoName = Annotated[str, Meta(min_length=1, max_length=80, pattern=r"\A[^\x00-\x1f\x7f]+\Z")]


class Log(Section):
    """How often a progress row is written, in environment steps (so that rows are deterministic), and where else to.

    `info` names numbers in the `info` of an episode's last step: their means are shown in rows as `info.NAME`. A dot
    leads into a dict: `episode.r`. `history` also records every operation of a run with several actors, so that its
    guarantees can be audited.
    """

    every_steps: Positive = 1_000
    info: Annotated[tuple[InfoName, ...], Meta(max_length=32)] = ()
    tensorboard: bool = False
    history: bool = False


class Custom(Section):
    """The parts of a run that were given to `qfleet.train` as Python objects, written there by the run itself.

    A text names the object's class or function, the settings of a dataclass, and the hash of its source. The part
    replaces the plan's own: `custom.rule` replaces `algo.rule`.
    """

    env: str | None = None
    eval_env: str | None = None
    torso: str | None = None
    head: str | None = None
    rule: str | None = None
    loss: str | None = None
    sampler: str | None = None
    optimizer: str | None = None
    explore: str | None = None


class Plan(Section):
    """A complete run as data."""

    env: Env
    algo: Algo = Algo()
    optim: Adam | Radam | Rmsprop | Sgd = Adam()
    net: Net = Net()
    replay: BufferReplay | FreshReplay | DatasetReplay = BufferReplay()
    actors: Actors = Actors()
    learners: Learners = Learners()
    sync: Sync = AllreduceSync()
    runtime: InlineRuntime | ProcessesRuntime | RayRuntime = InlineRuntime()
    save: Save = Save()
    eval: Eval = Eval()
    steer: Steer = Steer()
    population: Population = Population()
    until: Until = Until()
    log: Log = Log()
    custom: Custom = Custom()
    seed: Count = 0

    @classmethod
    def of(cls, env_id: str, preset: str | None = None, overrides: Mapping[str, Any] | None = None) -> "Plan":
        """A checked plan with the environment's defaults: `Plan.of("CartPole-v1", overrides={"algo.n_step": 3})`.

        Args:
            env_id: the id of an environment, or "file.py:Class".
            preset: the name of a preset; `qfleet presets` lists them.
            overrides: settings by their paths, such as {"algo.n_step": 3, "net.dueling": True}.

        Returns:
            The plan, checked.
        """
        from qfleet.plan.compose import make_plan

        return make_plan(env_id, preset, overrides)

    def __repr__(self) -> str:
        """The call that makes this plan."""
        from qfleet.plan.display.plan_text import plan_repr

        return plan_repr(self)

    def __str__(self) -> str:
        """What is trained, and what differs from the environment's defaults, a setting per line."""
        from qfleet.plan.display.plan_text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        """The same as a table in a notebook, with all settings below it."""
        from qfleet.plan.display.plan_text import plan_html

        return plan_html(self)
