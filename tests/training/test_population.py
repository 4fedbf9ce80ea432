"""A population: members act in lanes of their own, share a replay, and the worst takes the weights of the best."""

import io
import signal
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet import load, train
from qfleet.act import Policy, PopulationPolicy
from qfleet.act.policy_inputs import add_reward
from qfleet.build.components import Components
from qfleet.build.make import make_components
from qfleet.build.worlds import make_train_world
from qfleet.data import Array, Batch, Sequences
from qfleet.errors import UsageError
from qfleet.learn import Learner, NonFiniteUpdate, PopulationLearner, ReplaySource, rate_factors
from qfleet.learn.batch_split import strided_part
from qfleet.nets import QNet
from qfleet.plan import make_plan
from qfleet.save import unpack_tensors
from qfleet.training.evaluator import Evaluator
from qfleet.training.inline import InlineLoop
from qfleet.watch import make_watcher, read_json, read_rows
from tests.support.command_server import CommandServer
from tests.support.run_fixtures import Reference
from tests.support.runs import (
    ACTOR,
    LSTM,
    RANDOM,
    Settings,
    checkpoints,
    events,
    resumed,
    rows,
    same,
    small,
    status,
    train_arguments,
    trained,
    until,
)

# The learning rate is high, so that the members' scores soon differ.
FOUR: Settings = {
    "population.num": 4,
    "population.every_steps": 100,
    "optim.learning_rate": 0.01,
    "eval.every_steps": 50,
    "eval.episodes": 3,
    "eval.test_episodes": 2,
    "seed": 1,
}
TWO: Settings = {**FOUR, "population.num": 2}
STEER: Settings = {
    "steer.learning_rate.type": "plateau",
    "steer.learning_rate.patience": 1,
    "steer.batch.type": "grow",
    "steer.batch.patience": 1,
    "steer.batch.largest": 50,
}
RESET: Settings = {"algo.reset.type": "periodic", "algo.reset.every_updates": 30}


def told(run: Path, kind: str) -> list[Settings]:
    """The rows of one kind."""
    return [row for row in rows(run) if row["kind"] == kind]


def make_components_with(changes: Settings | None = None) -> Components:
    """The parts of a small run."""
    plan = small({**FOUR, "runtime.device": "cpu", **(changes or {})})
    return make_components(plan, make_train_world(plan))


def members(components: Components) -> PopulationLearner:
    """The learners, seen to be several."""
    assert isinstance(components.learner, PopulationLearner)
    return components.learner


def turned(components: Components, turns: int) -> None:
    """Act and learn."""
    components.actor.start()
    runtime = InlineLoop(components)
    for _ in range(turns):
        list(runtime.turn())


@pytest.fixture
def components() -> Iterator[Components]:
    """Members that have learned a little."""
    made = make_components_with({"population.spread": 2})
    turned(made, 30)
    assert made.learner.updates > 10
    yield made
    made.close()


def one_batch(components: Components) -> Batch | Sequences:
    """As much as every member's batch together."""
    batch = components.batch_source.replay.sample(16 * 4)
    assert batch is not None
    return batch


def everything(learner: Learner) -> dict[str, Array]:
    """A learner's weights, target and moments."""
    return {f"net.{name}": value for name, value in learner.model_arrays().items()} | learner.optim_arrays()


def equal(mine: dict[str, Array], yours: dict[str, Array]) -> bool:
    return mine.keys() == yours.keys() and all(np.array_equal(mine[name], yours[name]) for name in mine)


def outputs(net: QNet) -> Array:
    """A network's weights in one row."""
    found: Array = torch.cat([value.detach().flatten() for value in net.parameters()]).numpy()
    return found


# One alone


def test_one_member_is_no_population(tmp_path: Path) -> None:
    components = make_components_with({"population.num": 1, "population.every_steps": None})
    try:
        assert type(components.learner) is Learner
        assert type(components.actor.policy) is Policy
        assert components.policies == [components.policy]
    finally:
        components.close()
    run = trained(small({**FOUR, "population.num": 1, "population.every_steps": None}), tmp_path).path
    assert told(run, "exploit") == []
    assert not any("members" in row or "leader" in row for row in told(run, "eval"))
    assert not [name for name in saved(run, "optim.safetensors") if "member" in name]


# Acting


def test_members_begin_with_weights_of_their_own() -> None:
    components = make_components_with()
    try:
        weights = [outputs(learner.net) for learner in members(components).learners]
        assert len({tuple(row) for row in weights}) == 4
        for learner, policy in zip(members(components).learners, components.policies, strict=True):
            assert np.array_equal(outputs(learner.net), outputs(policy.net))
            assert np.array_equal(outputs(learner.net), outputs(learner.target))
    finally:
        components.close()


@pytest.mark.parametrize("changes", [{}, LSTM], ids=["steps", "memory"])
def test_a_lane_is_acted_in_by_its_member(changes: Settings) -> None:
    components = make_components_with({**changes, "env.num": 8})
    try:
        crowd, now = components.actor.policy, components.actor.world.reset()
        assert isinstance(crowd, PopulationPolicy)
        state = crowd.initial_state(8)
        assert (state is None) == (not changes)
        for _ in range(2):  # the second time with something to remember
            kept = None if state is None else state.copy()
            action, after, values = crowd.select_actions(now.obs, kept, lambda values: values.argmax(1), noisy=False)
            for lane in range(8):
                own = None if kept is None else kept[lane : lane + 1]
                chosen, then, looked = components.policies[lane % 4].act(now.obs[lane : lane + 1], own)
                assert chosen[0] == action[lane]
                np.testing.assert_allclose(looked[0], values[lane], rtol=1e-5, atol=1e-7)
                if then is not None and after is not None:
                    np.testing.assert_allclose(then[0], after[lane], rtol=1e-5, atol=1e-7)
            state = add_reward(after, np.ones(8, np.float32), np.zeros(8, np.bool_))
        # Members do differ, so that a lane of somebody else's would have been seen.
        assert not np.allclose(components.policies[0].forward(now.obs, kept)[0], values, rtol=1e-3)
    finally:
        components.close()


def test_policies_have_the_newest_weights(components: Components) -> None:
    for learner, policy in zip(members(components).learners, components.policies, strict=True):
        assert np.array_equal(outputs(learner.net), outputs(policy.net))


def test_noise_is_for_exploring_only() -> None:
    components = make_components_with({"net.noisy": True})
    try:
        obs, crowd = components.actor.world.reset().obs, components.actor.policy
        quiet = [crowd.select_actions(obs, None, lambda values: values.argmax(1), noisy=False)[2] for _ in range(2)]
        loud = [crowd.select_actions(obs, None, lambda values: values.argmax(1), noisy=True)[2] for _ in range(2)]
        assert np.array_equal(quiet[0], quiet[1])
        assert (loud[0] != loud[1]).all()
    finally:
        components.close()


# Learning


@pytest.mark.parametrize("changes", [{}, LSTM], ids=["steps", "sequences"])
def test_every_item_of_a_batch_goes_to_one_member(changes: Settings) -> None:
    components = make_components_with(changes)
    try:
        turned(components, 30)
        batch = one_batch(components)
        parts = [strided_part(batch, at, 4) for at in range(4)]
        assert isinstance(batch, Sequences) == bool(changes)
        for name in batch.__slots__:
            whole = getattr(batch, name)
            axis = int(bool(changes) and name not in ("state", "weight", "ids"))
            for at, own in enumerate(parts):
                got = getattr(own, name)
                if whole is None:
                    assert got is None
                    continue
                assert got.shape[axis] == 16
                assert got.flags.c_contiguous
                assert np.array_equal(got, whole.take(range(at, 64, 4), axis))
    finally:
        components.close()


def test_each_member_learns_from_its_part_as_if_alone(components: Components) -> None:
    batch, before = one_batch(components), [everything(learner) for learner in members(components).learners]
    members(components).choose_leader([0.0, 0.0, 1.0, 0.0])
    report = members(components).update(batch)
    together = [everything(learner) for learner in members(components).learners]
    for at, learner in enumerate(members(components).learners):
        learner.load_model_arrays({name[4:]: value for name, value in before[at].items() if name.startswith("net.")})
        learner.load_optim_arrays(before[at])
        learner.updates -= 1
        alone = learner.update(strided_part(batch, at, 4))
        assert equal(everything(learner), together[at])
        assert not equal(together[at], before[at])
        assert np.array_equal(report.priority[at::4], alone.priority)
        assert ((report.loss, report.stats) == (alone.loss, alone.stats)) == (at == 2)


def test_no_member_updates_if_one_update_is_not_finite(components: Components) -> None:
    learners, batch = members(components).learners, one_batch(components)
    batch.reward[3] = np.nan
    before, count = [everything(learner) for learner in learners], components.learner.updates
    with pytest.raises(NonFiniteUpdate):
        components.learner.update(batch)
    assert [learner.updates for learner in learners] == [count] * 4
    assert all(equal(everything(learner), kept) for learner, kept in zip(learners, before, strict=True))


def test_updates_per_step_are_those_of_one_learner(tmp_path: Path) -> None:
    run = trained(small(FOUR), tmp_path)
    assert run.status["updates"] == int(Fraction(5, 16) * (run.status["env_steps"] - 40)) > 50


def test_every_member_gets_a_batch_of_the_plans_size(components: Components) -> None:
    assert isinstance(components.batch_source, ReplaySource)
    components.batch_source.batch_size = 5
    components.batch_source.limiter.updates = 0
    batch = components.batch_source.next_batch(0)
    assert batch is not None
    assert len(batch.ids) == 20


def test_learning_rates_are_spread_around_the_plans(components: Components) -> None:
    assert rate_factors(3, 2.0) == [0.5, 1.0, 2.0]
    assert np.prod(rate_factors(4, 3.0)) == pytest.approx(1.0)
    rates = [learner.current_rate() for learner in members(components).learners]
    assert rates == pytest.approx([0.01 * 2**power for power in (-1.5, -0.5, 0.5, 1.5)])
    assert [learner.optimizer.learning_rate for learner in members(components).learners] == rates
    components.learner.learning_rate = 0.001
    assert [learner.current_rate() for learner in members(components).learners] == pytest.approx(
        [rate / 10 for rate in rates]
    )


def test_what_is_normalised_is_normalised_alike() -> None:
    components = make_components_with({"env.normalize": "both"})
    try:
        turned(components, 20)
        nets = [net for at in members(components).learners for net in (at.net, at.target)]
        for net in (*nets, *(policy.net for policy in components.policies)):
            assert net.normalize is not None
            assert net.rewards is not None
            assert float(net.normalize.count) > 70
            assert net.normalize.mean.data_ptr() == nets[0].normalize.mean.data_ptr()  # type: ignore[union-attr]
            assert float(net.rewards.count) > 60
    finally:
        components.close()


def test_resets_give_each_member_different_weights() -> None:
    components = make_components_with({**RESET, "algo.reset.keep": 0})
    try:
        fresh = [learner.reset.fresh(1) for learner in members(components).learners if learner.reset is not None]
        begun = [learner.net for learner in members(components).learners]
        assert len({tuple(outputs(net)) for net in (*fresh, *begun)}) == 8  # type: ignore[arg-type]
    finally:
        components.close()


# Leading, and taking over


def test_of_equals_the_old_leader_leads(components: Components) -> None:
    leaders = []
    for scores in ([1, 1, 1, 1], [1, 2, 3, 3], [1, 3, 3, 3], [1, 2, 2, 9], [8, 8, 1, 1]):
        members(components).choose_leader(scores)
        leaders.append(members(components).leader_index)
    assert leaders == [0, 2, 2, 3, 0]


def test_the_worst_becomes_the_best_but_for_its_rate(components: Components) -> None:
    population, scores = members(components), [3.0, 9.0, 1.0, 2.0]
    before = [everything(learner) for learner in population.learners]
    rates = [learner.current_rate() for learner in population.learners]
    population.choose_leader(scores)
    assert population.exploit(scores) == 2
    after = [everything(learner) for learner in population.learners]
    assert equal(after[2], before[1])
    assert all(equal(after[at], before[at]) for at in (0, 1, 3))
    assert [learner.current_rate() for learner in population.learners] == rates
    # A copy, not the same thing twice.
    population.update(one_batch(components))
    assert not equal(everything(population.learners[2]), everything(population.learners[1]))


def test_no_exploit_among_equals_or_before_the_first_update(components: Components) -> None:
    assert members(components).exploit([2.0, 2.0, 2.0, 2.0]) is None
    members(components).updates = 0
    assert members(components).exploit([2.0, 1.0, 2.0, 2.0]) is None


def scripted(monkeypatch: pytest.MonkeyPatch, *scores: list[float]) -> list[Policy]:
    """Validations that give these scores, evaluation by evaluation; who was judged."""
    left, judged = [score for each in scores for score in each], []
    plain: Any = Evaluator.validate

    def validate(self: Evaluator, policy: Policy, stop: Any = lambda: False) -> Settings | None:
        judged.append(policy)
        found: Settings | None = plain(self, policy, stop=stop)
        return None if found is None else {**found, "mean": left.pop(0)}

    monkeypatch.setattr(Evaluator, "validate", validate)
    return judged


SCORES = [[1.0, 5.0, 3.0, 2.0], [4.0, 3.0, 7.0, 6.0], [7.0, 1.0, 7.0, 6.0], [1.0, 1.0, 2.0, 9.0]]


def test_a_population_run_reports_leader_and_exploits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    scripted(monkeypatch, *SCORES)
    plan = until(small(FOUR), 200)
    run = trained(plan, tmp_path, watcher=make_watcher("plain", screen)).path
    judged = [row for row in told(run, "eval") if row["split"] == "validation"]
    assert [row["members"] for row in judged] == SCORES
    assert [(row["leader"], row["mean"]) for row in judged] == [(1, 5.0), (2, 7.0), (2, 7.0), (3, 9.0)]
    acts = told(run, "exploit")
    assert [(row["member"], row["leader"]) for row in acts] == [(1, 2), (0, 3)]
    assert [row["env_steps"] for row in acts] == [judged[1]["env_steps"], judged[3]["env_steps"]]
    assert [event["text"] for event in events(run, "exploit")] == [row["text"] for row in acts]
    assert f"at {acts[0]['env_steps']} steps: member 1 (3) takes the weights of member 2 (7)" in screen.getvalue()
    assert read_json(run / "best.json")["leader"] == 3


def test_an_end_between_evaluations_evaluates_the_leader_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = scripted(monkeypatch, *SCORES, [99.0])
    run = trained(until(small(FOUR), 230), tmp_path)
    last = [row for row in told(run.path, "eval") if row["split"] == "validation"][-1]
    assert (last["mean"], "members" in last) == (99.0, False)
    assert len(judged) == 17
    assert judged[-1] is judged[3]
    # What was judged is what is kept under the plain names.
    assert status(run.path)["score"]["checkpoint"] == read_json(run.path / "best.json")["step"] == last["env_steps"]
    assert f"member.{SCORES[-1].index(9.0)}." not in str(list(saved(run.path, "optim.safetensors")))


def saved(run: Path, name: str, checkpoint: int = -1) -> dict[str, Array]:
    """The arrays of one file of a checkpoint."""
    return unpack_tensors((checkpoints(run)[checkpoint] / name).read_bytes())


# What is left on the disk


@pytest.mark.usefixtures("every_save")
def test_the_leaders_weights_have_the_plain_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, *SCORES[:1], [4.0, 3.0, 7.0, 6.0])
    line_seen: list[PopulationLearner] = []
    plain = PopulationLearner.choose_leader

    def lead(self: PopulationLearner, scores: list[float]) -> None:
        line_seen.append(self)
        plain(self, scores)

    monkeypatch.setattr(PopulationLearner, "choose_leader", lead)
    run = trained(until(small({**FOUR, "eval.test_episodes": 0}), 100), tmp_path)
    model, optim = saved(run.path, "model.safetensors"), saved(run.path, "optim.safetensors")
    learners = line_seen[0].learners
    assert equal(model, learners[2].model_arrays())
    assert {name.split(".")[1] for name in optim if name.startswith("member.")} == {"0", "1", "3"}
    assert equal({name: value for name, value in optim.items() if "member." not in name}, learners[2].optim_arrays())
    own = {name.removeprefix("member.3."): value for name, value in optim.items() if name.startswith("member.3.")}
    assert equal(own, everything(learners[3]))
    found = load(run.path).policy
    assert type(found) is Policy
    assert np.array_equal(outputs(found.net), outputs(learners[2].net))


def test_the_best_checkpoint_scores_what_its_row_says(tmp_path: Path) -> None:
    run = trained(small(FOUR), tmp_path)
    best = max(row["mean"] for row in told(run.path, "eval") if row["split"] == "validation")
    assert run.status["best"]["mean"] == best == max(run.status["best"]["members"])
    for policy in (load(run.path).policy, run.policy):
        again = Evaluator(run.plan).validate(policy)
        assert again is not None
        assert again["mean"] == best
    assert load(run.path).evaluate(2)["mean"] == run.status["score"]["mean"]


def test_arrays_come_back_to_their_members(components: Components) -> None:
    population = members(components)
    population.choose_leader([0.0, 0.0, 1.0, 0.0])
    kept = population.model_arrays(), population.optim_arrays()
    before = [everything(learner) for learner in population.learners]
    population.choose_leader([9.0, 0.0, 1.0, 0.0])
    population.update(one_batch(components))
    population.load_model_arrays(kept[0])
    population.load_optim_arrays(kept[1])
    assert population.leader_index == 2
    assert all(equal(everything(at), was) for at, was in zip(population.learners, before, strict=True))
    short = {name: value for name, value in kept[1].items() if not name.startswith("member.1.")}
    with pytest.raises(KeyError, match="1 members are missing"):
        population.load_optim_arrays(short)


def test_all_members_begin_with_the_weights_of_another_run(tmp_path: Path) -> None:
    first = trained(until(small(FOUR), 100), tmp_path).path
    weights = load(first).policy.net.state_dict()
    run = trained(until(small(TWO), 4), tmp_path, weights_from=first).path
    model, optim = saved(run, "model.safetensors", 0), saved(run, "optim.safetensors", 0)
    for prefix, found in (("", model), ("target.", optim), ("member.1.net.", optim), ("member.1.target.", optim)):
        assert equal(
            {name: found[prefix + name] for name in weights}, {name: at.numpy() for name, at in weights.items()}
        )
    alone = trained(until(small({"seed": 3}), 4), tmp_path, weights_from=first)
    assert np.array_equal(outputs(alone.policy.net), outputs(load(first).policy.net))


# Cut in two

CELLS: dict[str, Settings] = {
    "plain": FOUR,
    "spread": {**TWO, "population.spread": 3, "env.normalize": "both"},
    "prioritized": {**FOUR, **ACTOR, "net.spectral_norm": True, "net.torso.sizes": (16, 16)},
    "random": {**TWO, **RANDOM},
    "memory": {**TWO, **LSTM, **ACTOR},
    "steered": {**FOUR, **STEER, **RESET},
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_stop_at_an_adjustment_changes_nothing(cell: str, tmp_path: Path, reference: Reference) -> None:
    whole = reference(CELLS[cell]).path
    acted = [row["env_steps"] for row in told(whole, "exploit")]
    assert acted
    for steps in {acted[0], acted[0] - 4, 171}:
        run = trained(until(small(CELLS[cell]), steps), tmp_path / str(steps))
        assert same(resumed(run, steps=300).path, whole)


class Killed(BaseException):
    """Stands for a process that is gone at once."""


def test_a_kill_right_after_an_adjustment_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    whole = reference(FOUR).path
    assert len(told(whole, "exploit")) >= 2
    for number in range(2):
        left = [number]

        def die(row: Settings, left: list[int] = left) -> None:
            left[0] -= row["kind"] == "exploit"
            if left[0] < 0:
                raise Killed

        out = tmp_path / str(number)
        with pytest.raises(Killed):
            train(small(FOUR), out=out, callbacks=[die])
        assert same(resumed(next(out.iterdir())).path, whole)


@pytest.mark.chaos
@pytest.mark.slow
def test_sigkill_right_after_an_adjustment(tmp_path: Path, command_server: CommandServer, reference: Reference) -> None:
    changes = {**FOUR, **ACTOR, "until.steps": 1_500, "eval.every_steps": 100}
    whole = reference(changes).path
    child, limit = command_server.start(*train_arguments(tmp_path, changes)), time.monotonic() + 60
    while time.monotonic() < limit and child.code is None:
        if any(row["kind"] == "exploit" for file in tmp_path.glob("*/metrics.jsonl") for row in read_rows(file)):
            break
        time.sleep(0.001)
    child.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.output()
    assert same(resumed(next(tmp_path.iterdir())).path, whole)


# Settings that are refused, word for word


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"population.num": 3},
            "env.num=8 (default) is not a multiple of population.num=3 (Python)\n"
            "All members have the same number of environments.\n"
            "Set env.num=9, or another multiple.",
        ),
        (
            {"population.num": 2, "replay.type": "fresh", "algo.rule.type": "max"},
            "population.num=2 (Python) does not go with replay.type=fresh (Python)\n"
            "Members share a replay; fresh experience is only of use to the member whose policy made it.\n"
            "Use replay.type=buffer, or start several runs with --seeds.",
        ),
        (
            {"population.num": 2, "eval.episodes": 0},
            "population.num=2 (Python) does not go with eval.episodes=0 (Python)\n"
            "Validation scores decide which member leads, and there are none with 0 episodes.\n"
            "Set eval.episodes to 20 or so, or leave population.num at 1.",
        ),
        (
            {"population.num": 2, "population.every_steps": 100_000},
            "population.every_steps=100000 (Python) has no effect: until.steps=100000 (default)\n"
            "The worst member would take the weights of the best at the end of the run, or never.\n"
            "Set population.every_steps to 20000 or so, or raise until.steps.",
        ),
        (
            {"population.every_steps": 5_000},
            "population.every_steps=5000 (Python) has no effect\n"
            "With population.num=1 there is no other member to take weights from.\n"
            "Leave population.every_steps out.",
        ),
        (
            {"population.spread": 2},
            "population.spread=2.0 (Python) has no effect\n"
            "With population.num=1 there is one learning rate, optim.learning_rate.\n"
            "Leave population.spread out.",
        ),
        (
            {"population.num": 2, "population.spread": 0.5},
            "population.spread=0.5 is not valid (Python)\n"
            "population.spread must be a number of at least 1.\n"
            "Write for example population.spread=1.0",
        ),
    ],
)
def test_what_is_refused(settings: Settings, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan("X-v0", overrides=settings)
    assert str(caught.value) == message
