"""Parts of the user's own: they decide what is learned, are named in run.toml, and a resumed run is exact."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet import Callback, Plan, load, make_plan, resume, train
from qfleet.build.custom_parts import part_name
from qfleet.custom import ActionChoice, LossInputs, NextValues, greedy_probs
from qfleet.errors import UsageError
from qfleet.nets import state_arrays
from qfleet.plan import read_plan
from tests.custom import parts
from tests.support.runs import LSTM, checkpoints, hashes, resumed, rows, same, small, status, trained, until

DOUBLE = {"algo.rule.type": "double"}
LEARNERS = {"learners.num": 2, "algo.batch_size": 16}


# The same algorithm, written as a part


def test_a_rule_like_the_built_in_one_gives_the_same_numbers(tmp_path: Path) -> None:
    built_in = trained(small(DOUBLE), tmp_path / "1")
    own = trained(small(), tmp_path / "2", rule=parts.SameAsDouble())
    assert rows(own.path) == rows(built_in.path)
    assert hashes(checkpoints(own.path)[-1]) == hashes(checkpoints(built_in.path)[-1])


def test_a_loss_that_is_the_heads_gives_the_same_numbers(tmp_path: Path) -> None:
    built_in = trained(small(), tmp_path / "1")
    own = trained(small(), tmp_path / "2", loss=parts.SameAsHead())
    assert [row.get("loss") for row in rows(own.path)] == [row.get("loss") for row in rows(built_in.path)]


def test_torchs_adam_gives_the_same_numbers_as_the_plans(tmp_path: Path) -> None:
    plan = small()
    built_in = trained(plan, tmp_path / "1")

    def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=plan.optim.learning_rate, eps=plan.optim.eps, fused=True)

    own = trained(plan, tmp_path / "2", optimizer=adam)
    one, other = (state_arrays(run.policy.net) for run in (built_in, own))
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", parts.ALL)
def test_every_part_has_an_effect(name: str, tmp_path: Path) -> None:
    without = trained(small(), tmp_path / "1")
    own = trained(small(), tmp_path / "2", **{name: parts.ALL[name]()})
    assert rows(own.path) != rows(without.path)


# Exact resume


@pytest.mark.parametrize("name", [*parts.ALL, "all"])
def test_a_resumed_run_is_exact(name: str, tmp_path: Path) -> None:
    def given() -> dict[str, Any]:
        return parts.all_parts() if name == "all" else {name: parts.ALL[name]()}

    whole = trained(small(), tmp_path / "whole", **given())
    half = trained(until(small(), 150), tmp_path / "half", **given())
    again = resumed(half, steps=300, **given())
    assert same(again.path, whole.path)
    assert status(again.path)["exact"] is True
    assert "keep no other state" in status(again.path)["exact_assumes"]


def test_an_optimisers_plain_numbers_are_saved(tmp_path: Path) -> None:
    whole = trained(small(), tmp_path / "whole", optimizer=parts.LastSteps)
    half = trained(until(small(), 150), tmp_path / "half", optimizer=parts.LastSteps)
    assert same(resumed(half, steps=300, optimizer=parts.LastSteps).path, whole.path)


def test_a_custom_loss_goes_with_memory_and_sequences(tmp_path: Path) -> None:
    class OnHidden:
        def make_layers(self, features: int, actions: int) -> nn.Module:
            assert features == LSTM["net.memory.size"]
            return nn.Linear(features, 1)

        def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
            loss, priority = inputs.td_loss()
            assert inputs.features.shape == (len(loss), LSTM["net.memory.size"])
            # The head applied to these features gives exactly the outputs learned from.
            assert torch.allclose(inputs.net.head(inputs.features), inputs.out)
            return loss + inputs.layers(inputs.features).squeeze(1).square(), priority

    whole = trained(small(LSTM), tmp_path / "whole", loss=OnHidden())
    half = trained(until(small(LSTM), 150), tmp_path / "half", loss=OnHidden())
    assert same(resumed(half, steps=300, loss=OnHidden()).path, whole.path)


@pytest.mark.parametrize("settings", [DOUBLE, LSTM], ids=["steps", "sequences"])
def test_features_are_those_that_the_outputs_come_from(settings: dict[str, Any], tmp_path: Path) -> None:
    checked = list[bool]()

    class OnFeatures:
        def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
            same_outputs = torch.allclose(inputs.net.head(inputs.features), inputs.out, atol=1e-6)
            (gradient,) = torch.autograd.grad(
                inputs.features.sum(), [next(inputs.net.torso.parameters())], retain_graph=True
            )
            checked.append(same_outputs and bool(gradient.abs().sum() > 0))
            return inputs.td_loss()

    layers = {"net.torso.sizes": (16, 16)}
    trained(small({**settings, **layers}), tmp_path, loss=OnFeatures())
    assert checked
    assert all(checked)


def test_two_learners_learn_alike_and_resume_exactly(tmp_path: Path) -> None:
    whole = trained(small(LEARNERS), tmp_path / "whole", **parts.all_parts())
    half = trained(until(small(LEARNERS), 150), tmp_path / "half", **parts.all_parts())
    again = resumed(half, steps=300, **parts.all_parts())
    assert same(again.path, whole.path)
    assert status(whole.path)["exact"] is True


@pytest.mark.parametrize("replay_process", [False, True])
def test_custom_parts_work_with_actors_in_processes(replay_process: bool, tmp_path: Path) -> None:
    plan = small({"runtime.type": "processes", "runtime.replay_process": replay_process})
    run = trained(plan, tmp_path, **parts.all_parts())
    assert run.status["state"] == "done"
    assert run.status["updates"] > 0
    again = resumed(run, steps=400, **parts.all_parts())
    assert again.status["env_steps"] >= 400


# What run.toml says, and what a resumed run asks for


def test_run_toml_names_the_parts(tmp_path: Path) -> None:
    run = trained(until(small(DOUBLE), 60), tmp_path, rule=parts.Blend(0.25), loss=parts.PredictReward())
    plan = read_plan(run.path / "run.toml")
    assert plan == run.plan
    assert plan.custom.rule == part_name(parts.Blend(0.25))
    assert plan.custom.rule is not None
    assert plan.custom.rule.startswith("tests.custom.parts:Blend(share=0.25) sha256:")
    assert plan.custom.sampler is None
    assert plan.algo.rule == Plan(env=plan.env).algo.rule  # the replaced setting says nothing false
    assert run.path.name.startswith("cartpole-n5-custom")


def test_a_resumed_run_asks_for_the_parts(tmp_path: Path) -> None:
    run = trained(until(small(), 60), tmp_path, rule=parts.Blend(), sampler=parts.Counting())
    with pytest.raises(
        UsageError, match=r"rule tests.custom.parts:Blend.*\n.*\nPass them again.*rule=\.\.\., sampler="
    ):
        resume(run.path)
    with pytest.raises(UsageError, match=r"sampler tests.custom.parts:Counting"):
        resume(run.path, rule=parts.Blend())


def test_a_resumed_run_refuses_new_parts(tmp_path: Path) -> None:
    run = trained(until(small(), 60), tmp_path)
    with pytest.raises(UsageError, match="began without a loss of your own"):
        resume(run.path, steps=90, loss=parts.SameAsHead())


def test_a_changed_part_makes_the_run_inexact_and_says_so(tmp_path: Path) -> None:
    run = trained(until(small(), 150), tmp_path, rule=parts.Blend(0.5))
    again = resumed(run, steps=200, rule=parts.Blend(0.75))
    assert again.status["exact"] is False
    (reason,) = again.status["not_exact"]
    assert "custom.rule has changed" in reason
    assert "share=0.5" in reason
    assert "share=0.75" in reason
    assert "exact_assumes" not in again.status
    assert read_plan(run.path / "run.toml").custom.rule == part_name(parts.Blend(0.75))


def test_the_layers_of_a_torso_and_the_arguments_of_a_partial_function_decide_the_name() -> None:
    one, same_again, other = (nn.Sequential(nn.Linear(4, width)) for width in (8, 8, 9))
    assert part_name(one) == part_name(same_again)
    assert part_name(one) != part_name(other)
    assert "make('CartPole-v1', ('max_episode_steps', 3))" in part_name(
        partial(gym.make, "CartPole-v1", max_episode_steps=3)
    )


def test_a_custom_loss_goes_with_bfloat16(tmp_path: Path) -> None:
    run = trained(small({"runtime.precision": "bfloat16"}), tmp_path, loss=parts.PredictReward())
    assert run.status["updates"] > 0


class Plain:
    """A rule with a setting in a plain attribute."""

    needs_online = False
    needs_current = False

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, values: NextValues) -> ActionChoice:
        return ActionChoice(greedy_probs(values.target_next, values.next_mask))


def sgd(rate: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """An optimiser whose rate is captured."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def test_plain_attributes_and_captured_variables_are_named() -> None:
    assert ":Plain(share=0.5) sha256:" in part_name(Plain(0.5))
    assert "(rate=0.25) sha256:" in part_name(sgd(0.25))
    assert part_name(Plain(0.5)) != part_name(Plain(0.75))
    assert part_name(sgd(0.25)) != part_name(sgd(0.5))


def test_the_source_of_own_base_classes_decides_the_hash() -> None:
    def made(number: int) -> type:
        space: dict[str, Any] = {"__name__": "nowhere"}
        exec(f"class Base:\n  def f(self): return {number}\nclass Rule(Base): pass", space)  # noqa: S102
        return space["Rule"]  # type: ignore[no-any-return]

    assert part_name(made(1)()) == part_name(made(1)())
    assert part_name(made(1)()) != part_name(made(2)())


def test_a_replaced_setting_is_noted_and_says_nothing_false(tmp_path: Path) -> None:
    plan = small({"optim.type": "rmsprop", "optim.learning_rate": 0.77, "optim.clip_norm": 5.0})
    shown = list[str]()

    class Screen:
        def start(self, info: Any) -> None:
            shown.extend(info["notes"])

        def row(self, row: Any) -> None: ...
        def live(self, snapshot: Any) -> None: ...
        def stop(self, status: Any) -> None: ...

    run = trained(until(plan, 60), tmp_path, optimizer=parts.nadam, watcher=Screen())
    assert "optim.learning_rate=0.77 is replaced by a part of your own" in shown
    assert (type(run.plan.optim).__name__, run.plan.optim.clip_norm) == ("Adam", 5.0)


def test_a_run_with_parts_says_how_to_go_on_from_python(tmp_path: Path) -> None:
    run = trained(until(small(), 60), tmp_path, rule=parts.Blend())
    assert run.status["resume"] == f"qfleet.resume({str(run.path)!r}, rule=...)"


def test_the_source_decides_the_hash() -> None:
    def one() -> int:
        return 1

    def two() -> int:
        return 2

    named = part_name(one), part_name(two)
    assert part_name(one) == named[0]
    assert named[0].split("sha256:")[1] != named[1].split("sha256:")[1]


def test_a_class_without_a_source_file_is_told_from_another() -> None:
    def made(text: str) -> type:
        space: dict[str, Any] = {"__name__": "nowhere"}
        exec(text, space)  # noqa: S102 - a class without a file
        return space["Rule"]  # type: ignore[no-any-return]

    one, same_again, other = (made(f"class Rule:\n  def f(self): return {number}") for number in (1, 1, 2))
    assert part_name(one()) == part_name(same_again())
    assert part_name(one()) != part_name(other())


def test_a_policy_is_loaded_without_rule_loss_sampler_and_optimizer(tmp_path: Path) -> None:
    given = {name: part for name, part in parts.all_parts().items() if name != "head"}
    run = trained(small(), tmp_path, **given)
    loaded = load(run.path, which="latest")
    obs = np.ones((2, 4), np.float32)
    assert np.array_equal(loaded.policy.act(obs)[2], run.policy.act(obs)[2])


def test_a_custom_head_is_asked_for_when_a_policy_is_loaded(tmp_path: Path) -> None:
    run = trained(small(), tmp_path, head=parts.TanhHead())
    with pytest.raises(UsageError, match=r"head tests.custom.parts:TanhHead"):
        load(run.path)
    obs = np.ones((2, 4), np.float32)
    loaded = load(run.path, which="latest", head=parts.TanhHead())
    assert np.array_equal(loaded.policy.act(obs)[2], run.policy.act(obs)[2])


def test_a_plan_that_names_parts_needs_them(tmp_path: Path) -> None:
    run = trained(until(small(), 60), tmp_path, rule=parts.Blend())
    with pytest.raises(UsageError, match="no rule was given"):
        train(run.plan, out=tmp_path)
    assert trained(run.plan, tmp_path, rule=parts.Blend()).status["state"] == "done"


# Bad parts


def loss_of(compute: Callable[[LossInputs], Any]) -> Any:
    """A loss from a function."""
    return compute


@dataclass
class Answering:
    """A rule from a function."""

    answer: Callable[[NextValues], Any]
    needs_online = False
    needs_current = False

    def __call__(self, values: NextValues) -> Any:
        return self.answer(values)


def with_wrong_bonus(values: NextValues) -> ActionChoice:
    """A bonus per action instead of one per item."""
    return ActionChoice(greedy_probs(values.target_next, None), bonus=values.target_next)


class Misspelt(Callback):
    """Has a method that no run calls."""

    def on_stp(self, run: Any) -> None: ...


class Narrow(parts.TanhHead):
    """A head with one output for all actions."""

    def make_layers(self, features: int, hidden: int, actions: int) -> nn.Module:
        return nn.Linear(features, 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loss": loss_of(lambda inputs: (inputs.td_loss()[0].mean(), inputs.td_loss()[1]))}, r"losses of shape \(\)"),
        ({"loss": loss_of(lambda inputs: (inputs.td_loss()[0], 1.0))}, "priorities of shape a float"),
        ({"loss": loss_of(lambda inputs: (inputs.target, inputs.target))}, "does not depend on the network"),
        ({"optimizer": lambda parameters: None}, "made None"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters[:1], lr=1.0)}, "every parameter once"),
        ({"rule": parts.Blend}, r"the class Blend[\s\S]*Write rule=Blend\(\)"),
        ({"rule": parts.SameAsHead()}, "has no needs_online, needs_current"),
        ({"sampler": parts.SameAsHead()}, "has no set_live, draw, update"),
        ({"rule": Answering(lambda values: values.target_next)}, "the rule returned a Tensor"),
        ({"rule": Answering(lambda values: ActionChoice(values.target_next[:, :1]))}, r"the rule returned \(16, 1\)"),
        ({"rule": Answering(lambda values: ActionChoice(values.target_next))}, "are no probabilities"),
        ({"loss": loss_of(lambda inputs: inputs.td_loss()[0])}, "the loss returned a Tensor"),
        ({"callbacks": lambda row: None}, r"Write callbacks=\[\.\.\.\]"),
        ({"callbacks": [Misspelt()]}, "a method on_stp, which a run never calls"),
        ({"rule": Answering(with_wrong_bonus)}, r"a bonus of shape \(16, 2\)"),
        ({"head": Narrow()}, r"values have shape \(2, 1\)"),
        ({"env": "CartPole-v1"}, "is the id of an environment"),
        ({"env": 3}, "a int object"),
    ],
)
def test_a_bad_part_gets_one_clear_message(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        train(small(), out=tmp_path, **given)


class Wild(parts.Counting):
    """Draws what `answer` says."""

    answer: Any = None

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Any, Any]:
        drawn = super().draw(num, rng)
        return type(self).answer(self, *drawn)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda self, serials, weight: (serials[:-1], weight), "asked for 16 items"),
        (lambda self, serials, weight: (serials + 0.5, weight), "float64"),
        (lambda self, serials, weight: (serials * 0 + self.head, weight), "Only items"),
        (lambda self, serials, weight: (serials * 0 - 1, weight), "drew item -1"),
        (lambda self, serials, weight: (serials, weight * np.nan), "not finite"),
        (lambda self, serials, weight: (serials, -weight), "negative"),
    ],
)
def test_a_bad_draw_gets_one_clear_message(answer: Any, text: str, tmp_path: Path) -> None:
    sampler = type("Wilder", (Wild,), {"answer": answer})()
    with pytest.raises(UsageError, match=text):
        train(small(), out=tmp_path, sampler=sampler)


@pytest.mark.parametrize(
    ("settings", "given", "text"),
    [
        ({"replay.type": "fresh"}, {"rule": parts.Blend()}, "rule= has no effect with replay.type=fresh"),
        ({"replay.type": "fresh"}, {"sampler": parts.Counting()}, "sampler= has no effect"),
        ({**LEARNERS, "sync.type": "server"}, {"optimizer": parts.nadam}, "does not go with sync.type=server"),
    ],
)
def test_a_part_without_effect_is_refused(settings: Any, given: Any, text: str, tmp_path: Path) -> None:
    plan = make_plan("CartPole-v1", overrides={"until.steps": 300, **settings})
    with pytest.raises(UsageError, match=text):
        train(plan, out=tmp_path, **given)


def test_a_part_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    class Holding(parts.SameAsHead):
        def __init__(self) -> None:
            self.lock = (number for number in range(3))

    with pytest.raises(UsageError, match=r"loss=.* cannot be given to another process"):
        train(small({"runtime.type": "processes"}), out=tmp_path, loss=Holding())


def test_train_takes_an_environment_id_or_a_plan(tmp_path: Path) -> None:
    run = train("CartPole-v1", preset="dqn-small", overrides={"until.steps": 50, "eval.test_episodes": 0}, out=tmp_path)
    assert run.plan.env.id == "CartPole-v1"
    with pytest.raises(UsageError, match="do not go with a plan"):
        train(run.plan, preset="dqn", out=tmp_path)
    with pytest.raises(UsageError, match="train was given a int"):
        train(3, out=tmp_path)  # type: ignore[arg-type]


def test_the_command_line_refuses_a_plan_with_custom_parts(tmp_path: Path) -> None:
    from qfleet.cli.arguments import compose_arguments

    run = trained(until(small(), 60), tmp_path, rule=parts.Blend())
    with pytest.raises(UsageError, match=r"custom.rule needs Python"):
        compose_arguments([], None, str(run.path / "run.toml"))


def test_evaluations_use_eval_env(tmp_path: Path) -> None:
    made = list[str]()

    def short() -> gym.Env[Any, Any]:
        made.append("eval")
        return gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 3)

    plan = small({"eval.every_steps": 100, "eval.episodes": 2, "eval.test_episodes": 2})
    run = trained(plan, tmp_path, eval_env=short)
    assert made
    result = run.result()
    assert result is not None
    assert result["mean"] == 3.0
    assert run.evaluate(2)["mean"] == 3.0
    assert max(row["return_mean"] or 0.0 for row in rows(run.path) if row["kind"] == "progress") > 3.0


def test_an_eval_env_with_other_spaces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"eval_env has other spaces[\s\S]*\(2,\) float32"):
        train(small(), out=tmp_path, eval_env=lambda: gym.make("MountainCar-v0"))


def test_msgspec_keeps_custom_names_as_text() -> None:
    assert msgspec.convert({"rule": "a:B sha256:1"}, type=type(small().custom)).rule == "a:B sha256:1"
