"""What a plan needs is what it takes; a replay that was not saved fills up again; bad batches are counted on."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from qfleet import resume, train
from qfleet.api import rehearse
from qfleet.build import memory_check
from qfleet.build.components import Components
from qfleet.build.make import make_components
from qfleet.build.memory_check import COPY_BYTES, estimate, replay_bytes
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_train_world
from qfleet.errors import UsageError
from qfleet.learn import ReplaySource
from qfleet.replay import Prioritized
from qfleet.training.log import run_status
from qfleet.training.log.run_status import device_inexact_reasons
from qfleet.training.session import run_torch_rng
from tests.support.run_fixtures import Reference
from tests.support.runs import Settings, checkpoints, events, same, small, trained, until
from tests.support.variants import ACTOR, FRESH, GRU, LSTM, R2D2
from tests.training.test_faults import bad_updates


def components_of(changes: Settings, env_id: str = "CartPole-v1") -> Components:
    """A line that is ready to run."""
    plan = small(changes, env_id)
    world = make_train_world(plan)
    return make_components(resolve(plan, world.spec), world)


# Memory


@pytest.mark.parametrize("env_id", ["CartPole-v1", "toys/Masked-v0"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GRU,
        R2D2,
        {**LSTM, "algo.bonus.type": "count"},
        FRESH,
        {**ACTOR, "algo.n_step": 3},
        {"replay.filter.type": "duplicates"},
    ],
)
def test_the_estimate_is_what_the_replay_takes(changes: Settings, env_id: str) -> None:
    components = components_of(changes, env_id)
    replay = components.batch_source.replay
    took = sum(column.nbytes for column in replay.store.columns().values()) + replay.items.nbytes
    took += replay.serials.nbytes
    if isinstance(replay.sampler, Prioritized):
        took += replay.sampler.tree.nbytes
    took += COPY_BYTES * replay.capacity if replay.filter is not None else 0
    assert replay_bytes(components.plan, components.actor.world.spec) == took
    assert (
        estimate(components.plan, components.actor.world.spec)["replay_bytes"]
        == rehearse(components.plan)["replay_bytes"]
        == took
    )
    components.close()


def test_estimating_memory_draws_no_random_numbers() -> None:
    components, before = components_of(LSTM), torch.get_rng_state()
    replay_bytes(components.plan, components.actor.world.spec)
    assert torch.equal(torch.get_rng_state(), before)


def test_fresh_experience_that_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 100_000)
    with pytest.raises(UsageError, match=r"replay\.rows=1000 does not fit into memory") as caught:
        train(small({**FRESH, "replay.rows": 1_000}), out=tmp_path)
    offered = int(caught.value.fix.split("=")[1].split()[0])
    assert rehearse(small({**FRESH, "replay.rows": offered}))["replay_bytes"] < 100_000


def test_a_rehearsal_makes_nothing_and_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    assert rehearse(small(), out=tmp_path, name="first")["replay_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    run = trained(until(small(), 60), tmp_path, name="first")
    with pytest.raises(UsageError, match="already a run called 'first'"):
        rehearse(small(), out=tmp_path, name="first")
    with pytest.raises(UsageError, match="do not fit this plan's network") as caught:
        rehearse(small({"net.torso.sizes": (8,), "net.dueling": True}), out=tmp_path, weights_from=run.path)
    assert caught.value.fix == "Give this run the same network: net.torso.sizes=16 net.dueling=false"
    assert rehearse(small(), out=tmp_path, name="second", weights_from="first")["replay_bytes"] > 0


# A replay that was not saved


def feed_of(changes: Settings) -> ReplaySource:
    """A feed whose replay was not saved after 400 steps."""
    components = components_of(changes)
    batch_source = components.batch_source
    assert isinstance(batch_source, ReplaySource)
    batch_source.load_state_dict({**batch_source.state_dict(), "steps": 400}, with_replay=False)
    components.close()
    return batch_source


def test_a_replay_of_sequences_is_refilled_in_sequences() -> None:
    large: Settings = {"replay.capacity": 10_000, "algo.learn_start_steps": 40}
    assert feed_of(large).refill == 40
    assert feed_of({**LSTM, **large}).refill == 10  # one every 4 steps
    assert feed_of({**large, "replay.capacity": 64}).refill == 32


def test_a_refill_goes_on_where_it_was_cut() -> None:
    batch_source = feed_of({"algo.learn_start_steps": 40})
    state = batch_source.state_dict()
    other = feed_of({"algo.learn_start_steps": 40})
    other.refill = 0
    other.load_state_dict(state)
    assert other.refill == batch_source.refill == 40


@pytest.mark.parametrize("cut", [104, 128])
def test_a_cut_while_the_replay_refills_changes_nothing(cut: int, tmp_path: Path) -> None:
    plan = small({**LSTM, "save.replay": "none", "algo.learn_start_steps": 60})
    ends = []
    for name, stops in {"whole": [], "cut": [cut]}.items():
        run = trained(until(plan, 100), tmp_path / name)
        file = run.path / "run.toml"  # from now on the replay is kept
        file.write_text(file.read_text().replace('replay = "none"', 'replay = "full"'))
        for steps in [*stops, 300]:
            run = resume(run.path, steps=steps)
        ends.append(run)
    assert same(ends[1].path, ends[0].path)


# Batches that cannot be learned from


@pytest.mark.usefixtures("every_save")
def test_bad_batches_in_a_row_are_counted_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The last three of the first block's 8 minibatches and the first two of the second's: five in a row.
    with monkeypatch.context() as patch:
        bad_updates(patch, lambda call: 6 <= call <= 8)
        run = trained(until(small(FRESH), 56), tmp_path).path
    book = json.loads((checkpoints(run)[-1] / "state.json").read_text())["book"]
    assert (book["skipped"], book["skipped_in_a_row"]) == (3, 3)
    bad_updates(monkeypatch, lambda call: call <= 2)
    resume(run, steps=100)
    assert len(events(run, "rollback")) == 1
    book = json.loads((checkpoints(run)[-1] / "state.json").read_text())["book"]
    assert book["skipped_in_a_row"] == 0


# Accelerators


def test_only_a_cpu_or_deterministic_kernels_promise_to_repeat() -> None:
    assert device_inexact_reasons("cpu") == device_inexact_reasons(None) == []
    assert (
        device_inexact_reasons("cuda:1")
        == device_inexact_reasons("mps")
        == ["determinism on accelerators is not promised"]
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert device_inexact_reasons("cuda") == []
    finally:
        torch.use_deterministic_algorithms(False)


class Cuda:
    """Stands for CUDA's one generator, whose state is a number that seeding sets and drawing moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = 7
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([self.state]))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)
        monkeypatch.setattr(torch.cuda, "manual_seed", self.seed)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def set(self, state: torch.Tensor, device: str) -> None:
        self.state = int(state[0])

    def seed(self, seed: int) -> None:
        self.state = seed


def on_cuda(components: Components) -> Components:
    """The line with a plan that says cuda; its networks stay where they are."""
    plan = components.plan
    return replace(
        components, plan=msgspec.structs.replace(plan, runtime=msgspec.structs.replace(plan.runtime, device="cuda"))
    )


def test_the_generator_of_an_accelerator_is_saved_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, components = Cuda(monkeypatch), on_cuda(components_of({}))
    components.actor.start()
    with run_torch_rng(components.plan):
        seeded = cuda.state
        assert seeded != 7
        saved = components.state_dict()
        cuda.state = 8
        components.load_state_dict(saved)
        assert cuda.state == seeded
        components.load_state_dict({name: value for name, value in saved.items() if name != "accelerator"})
        assert cuda.state == seeded  # a checkpoint of another device has none
    assert cuda.state == 7
    components.close()


def test_a_cpu_run_leaves_other_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    with run_torch_rng(small()):
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []


def test_a_run_on_an_accelerator_says_that_it_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_status, "device_inexact_reasons", lambda device: ["determinism on accelerators is not promised"]
    )
    run = trained(until(small(), 60), tmp_path)
    assert run.status["exact"] is False
    (warning,) = events(run.path, "warning")
    assert warning["text"] == "not exact: determinism on accelerators is not promised"


# Sequences that leave rows out


@pytest.mark.parametrize("cut", [61, 101, 237])
def test_a_stride_longer_than_a_window_is_exact_too(cut: int, tmp_path: Path, reference: Reference) -> None:
    changes = {**LSTM, "algo.view.stride": 25, "replay.capacity": 200}  # a window has 13 rows
    run = trained(until(small(changes), cut), tmp_path)
    assert reference(changes).status["updates"] > 20
    assert same(resume(run.path, steps=300).path, reference(changes).path)
