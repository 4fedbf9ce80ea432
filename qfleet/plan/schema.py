"""The whole run as frozen data. Every room reads it, no room changes it.

Variants are tagged unions: `type` chooses the variant, the other keys are its settings. `None` means "chosen
for you": by the environment's spaces or by the machine; what was chosen is written into the run's `run.toml`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, Meta(gt=0.0)]
NotNegative = Annotated[float, Meta(ge=0.0)]
Scalar = bool | int | float | str


class Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of a plan: immutable, and strict about its keys."""


class Env(Part):
    """The world: which one, how many copies, and how it is adapted."""

    id: str
    num: Positive = 8
    bins: Annotated[int, Meta(ge=2)] | None = None
    frame_size: Annotated[int, Meta(ge=16)] | None = None
    sticky: Fraction | None = None
    clip_reward: bool = False
    normalize: Literal["off", "obs", "reward", "both"] = "off"
    options: dict[str, Scalar] = {}


class MaxRule(Part, tag="max"):
    """Bootstrap from the target network's best action (Mnih et al. 2015)."""


class DoubleRule(Part, tag="double"):
    """The online network chooses the action, the target network values it (van Hasselt et al. 2016)."""


class LinearEpsilon(Part, tag="linear"):
    """Epsilon falls in a straight line from `start` to `end` over `steps` environment steps."""

    start: Fraction = 1.0
    end: Fraction = 0.05
    steps: Positive = 10_000


class ExponentialEpsilon(Part, tag="exponential"):
    """Epsilon decays from `start` towards `end`, halving the distance every `half_life_steps`."""

    start: Fraction = 1.0
    end: Fraction = 0.01
    half_life_steps: Positive = 5_000


class ConstantEpsilon(Part, tag="constant"):
    """One epsilon for the whole run."""

    epsilon: Fraction = 0.1


class CopyTarget(Part, tag="copy"):
    """The target network becomes a copy of the online network every so many updates."""

    every_updates: Positive = 250


class AverageTarget(Part, tag="average"):
    """The target network follows the online one: target += tau * (online - target) after each update."""

    tau: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01


class Algo(Part):
    """The learning rule: targets, exploration, batch and loss."""

    rule: MaxRule | DoubleRule = DoubleRule()
    n_step: Annotated[int, Meta(ge=1, le=100)] = 1
    discount: Fraction = 0.99
    explore: LinearEpsilon | ExponentialEpsilon | ConstantEpsilon = LinearEpsilon()
    target: CopyTarget | AverageTarget = CopyTarget()
    learn_start_steps: Count = 1_000
    batch_size: Positive = 64
    loss: Literal["huber", "mse"] = "huber"


class Adam(Part, tag="adam"):
    """Adam; a weight decay above zero is decoupled (AdamW)."""

    learning_rate: Rate = 1e-3
    eps: Rate = 1e-8
    clip_norm: Rate | None = 10.0
    weight_decay: NotNegative = 0.0


class Rmsprop(Part, tag="rmsprop"):
    """RMSProp, centred as in the Nature paper unless told otherwise."""

    learning_rate: Rate = 2.5e-4
    eps: Rate = 1e-5
    decay: Fraction = 0.95
    centered: bool = True
    clip_norm: Rate | None = 10.0
    weight_decay: NotNegative = 0.0


class Sgd(Part, tag="sgd"):
    """Plain stochastic gradient descent with optional momentum."""

    learning_rate: Rate = 1e-2
    momentum: Fraction = 0.0
    clip_norm: Rate | None = 10.0
    weight_decay: NotNegative = 0.0


class MlpTorso(Part, tag="mlp"):
    """Fully connected layers with ReLU; any observation is flattened first."""

    sizes: tuple[Positive, ...] = (128, 128)


class NatureTorso(Part, tag="nature"):
    """The three convolutions of Mnih et al. 2015 and one fully connected layer of `width`."""

    width: Positive = 512


class OwnTorso(Part, tag="own"):
    """The user's own `nn.Module`, passed to `train(plan, torso=...)` from Python."""


class ScalarHead(Part, tag="scalar"):
    """One expected value per action."""


class Net(Part):
    """The network: a torso that makes features, a head that makes values."""

    torso: MlpTorso | NatureTorso | OwnTorso | None = None
    head: ScalarHead = ScalarHead()
    dueling: bool = False


class UniformSampler(Part, tag="uniform"):
    """Every stored step is equally likely."""


class PrioritizedSampler(Part, tag="prioritized"):
    """Proportional prioritised replay (Schaul et al. 2016); beta rises linearly over `beta_updates` updates."""

    alpha: Fraction = 0.6
    beta_start: Fraction = 0.4
    beta_end: Fraction = 1.0
    beta_updates: Positive = 100_000
    eps: Rate = 1e-6


class Replay(Part):
    """What is remembered and how often it is learned from."""

    capacity: Positive = 100_000
    sampler: UniformSampler | PrioritizedSampler = UniformSampler()
    samples_per_insert: Rate = 16.0


class Inline(Part, tag="inline"):
    """Everything in one thread, turned by hand: deterministic and easy to debug."""

    device: str | None = None
    threads: Positive | None = None


class Save(Part):
    """When checkpoints are written and how many are kept."""

    every_seconds: NotNegative = 60.0
    every_steps: Positive = 10_000
    max_share: Fraction = 0.05
    replay: Literal["full", "none"] = "full"
    keep: Annotated[int, Meta(ge=2)] = 2


class Eval(Part):
    """How the greedy policy is judged: validation episodes steer, test episodes report; 0 episodes: not at all."""

    every_steps: Positive = 5_000
    episodes: Count = 20
    test_episodes: Count = 100


class Until(Part):
    """When the run is done: after so many steps, so many seconds, or a validated score."""

    steps: Positive = 100_000
    seconds: Rate | None = None
    score: float | None = None


class Log(Part):
    """How often a progress row is written, in environment steps (so that rows are repeatable), and where else to."""

    every_steps: Positive = 1_000
    tensorboard: bool = False


class Plan(Part):
    """A complete run as data."""

    env: Env
    algo: Algo = Algo()
    optim: Adam | Rmsprop | Sgd = Adam()
    net: Net = Net()
    replay: Replay = Replay()
    runtime: Inline = Inline()
    save: Save = Save()
    eval: Eval = Eval()
    until: Until = Until()
    log: Log = Log()
    seed: Count = 0

    @classmethod
    def of(cls, env_id: str, preset: str | None = None, overrides: Mapping[str, Any] | None = None) -> "Plan":
        """A checked plan with the environment's defaults: `Plan.of("CartPole-v1", overrides={"algo.n_step": 3})`."""
        from qfleet.plan.layers import make_plan

        return make_plan(env_id, preset, overrides)
