"""Windows seen by a network with memory: burn-in, bootstrap rows, final observations, and priorities by eta.

Shapes: W rows of a window, L rows learned from, N windows, A actions.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.data import Spec
from qfleet.nets import QNet, make_net
from qfleet.plan.schema import GruMemory, LstmMemory, MlpTorso, Net
from qfleet.qlearn import Scalar, Tensors, td_loss
from qfleet.qlearn.rules import Double, Max, NextValues
from qfleet.qlearn.views import SequenceView
from tests.qlearn import plain

BURN_IN, LENGTH, N_STEP, WINDOWS, ACTIONS = 3, 4, 2, 5, 3
ROWS = BURN_IN + LENGTH + N_STEP
SPEC = Spec((2,), "float32", (ACTIONS,))
VIEW = SequenceView(BURN_IN, LENGTH, 0.9)


def make(kind: Literal["lstm", "gru"] = "lstm", seed: int = 1) -> QNet:
    memory = LstmMemory(size=6) if kind == "lstm" else GruMemory(size=6)
    return make_net(Net(torso=MlpTorso(sizes=(5, 5)), memory=memory), SPEC, normalize="off", seed=seed)


def windows(net: QNet, seed: int = 0, end: float = 0.2) -> Tensors:
    """Random windows; each row learned from bootstraps n rows on, or from the final observation before that."""
    rng = np.random.default_rng(seed)
    last = rng.random((ROWS, WINDOWS)) < end
    ahead = np.empty((LENGTH, WINDOWS), np.int64)
    for row in range(LENGTH):
        for window in range(WINDOWS):
            after = range(BURN_IN + row + 1, BURN_IN + row + N_STEP + 1)
            ahead[row, window] = next((at for at in after if last[at, window]), after[-1])
    assert net.memory is not None
    return Tensors(
        obs=torch.from_numpy(rng.normal(size=(ROWS, WINDOWS, 2)).astype(np.float32)),
        action=torch.from_numpy(rng.integers(0, ACTIONS, (ROWS, WINDOWS))),
        reward=torch.from_numpy(rng.normal(size=(LENGTH, WINDOWS)).astype(np.float32)),
        discount=torch.from_numpy(rng.choice([0.0, 0.9, 0.81], (LENGTH, WINDOWS)).astype(np.float32)),
        weight=torch.from_numpy(rng.random(WINDOWS).astype(np.float32)),
        gain=torch.from_numpy(rng.normal(size=(ROWS, WINDOWS)).astype(np.float32)),
        last=torch.from_numpy(last),
        state=torch.from_numpy(rng.normal(size=(WINDOWS, net.memory.state_size)).astype(np.float32)),
        ahead=torch.from_numpy(ahead),
    )


def step_by_step(net: QNet, batch: Tensors) -> Tensor:
    """Outputs of every row [W, N, A], one observation at a time, the memory carried along by hand."""
    memory, state, outs = net.memory, batch.state, []
    assert memory is not None
    assert state is not None
    assert batch.gain is not None
    assert batch.last is not None
    for row in range(ROWS):
        out, cell_state = net.step(batch.obs[row], state)
        outs.append(out)
        state = torch.zeros_like(state)
        for window in range(WINDOWS):
            if not batch.last[row, window]:
                state[window, : memory.cell_state_size] = cell_state[window]
                state[window, memory.cell_state_size + batch.action[row, window]] = 1.0
                state[window, -1] = batch.gain[row, window]
    return torch.stack(outs)


def test_the_head_is_not_run_on_the_burn_in() -> None:
    net, asked = make(), []
    net.head.register_forward_hook(lambda module, inputs, out: asked.append(len(out)))
    now, after = VIEW.forward(net, windows(net), current=True, bootstrap=True)
    assert now is not None
    assert after is not None
    assert asked == [(LENGTH + N_STEP) * WINDOWS]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_loss_equals_that_of_single_steps(kind: Literal["lstm", "gru"]) -> None:
    online, target = make(kind), make(kind, seed=2)
    for seed in range(3):
        batch = windows(online, seed)
        with torch.no_grad():
            ours, theirs = step_by_step(online, batch), step_by_step(target, batch)
        assert batch.last is not None
        assert batch.ahead is not None
        losses, priorities = [], []
        for window in range(WINDOWS):
            errors = []
            for row in range(LENGTH):
                at, ahead = BURN_IN + row, int(batch.ahead[row, window])
                if batch.last[at, window]:
                    continue
                best = int(ours[ahead, window].argmax())  # the double rule
                reward, discount = float(batch.reward[row, window]), float(batch.discount[row, window])
                goal = reward + discount * float(theirs[ahead, window, best])
                errors.append(goal - float(ours[at, window, batch.action[at, window]]))
            losses.append(sum(map(plain.huber, errors)) / max(1, len(errors)))
            sizes = [abs(error) for error in errors] or [0.0]
            priorities.append(0.9 * max(sizes) + 0.1 * sum(sizes) / len(sizes))
        loss, priority, _ = td_loss(Scalar(), Double(), VIEW, online, target, batch)
        expected = sum(w * each for w, each in zip(batch.weight.tolist(), losses, strict=True)) / WINDOWS
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        assert priority.tolist() == pytest.approx(priorities, abs=1e-5)


def test_the_burn_in_updates_the_memory_without_gradient() -> None:
    net = make()
    batch = windows(net, end=0.0)
    batch.obs.requires_grad_()
    assert batch.state is not None
    batch.state.requires_grad_()
    present, after = VIEW.forward(net, batch, current=True, bootstrap=True)
    assert present is not None
    assert after is not None
    assert not after.requires_grad
    present.sum().backward()  # type: ignore[no-untyped-call]
    assert batch.obs.grad is not None
    assert not batch.obs.grad[:BURN_IN].any()
    assert not batch.obs.grad[BURN_IN + LENGTH :].any()  # rows that are only bootstrapped from
    assert batch.obs.grad[BURN_IN : BURN_IN + LENGTH].any(2).all()
    assert batch.state.grad is None
    with torch.no_grad():
        batch.obs[0] += 1.0  # but what was seen then still counts
        changed, _ = VIEW.forward(net, batch, current=True, bootstrap=False)
    assert not torch.allclose(present, changed)  # type: ignore[arg-type]


def test_without_burn_in_the_stored_state_is_the_initial_state() -> None:
    net, view = make(), SequenceView(0, LENGTH)
    batch = windows(net, end=0.0)
    batch.ahead, start = torch.ones_like(batch.ahead), batch.state  # type: ignore[arg-type]
    assert start is not None
    before, _ = view.forward(net, batch, current=True, bootstrap=False)
    other, _ = view.forward(net, replace(batch, state=torch.ones_like(start)), current=True, bootstrap=False)
    assert before is not None
    assert before.shape == (LENGTH * WINDOWS, ACTIONS)
    assert not torch.allclose(before, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("eta", [0.0, 0.5, 0.9, 1.0])
def test_priorities_mix_the_largest_and_the_mean_error(eta: float) -> None:
    batch = windows(make(), end=0.0)
    assert batch.last is not None
    batch.last[BURN_IN + 1, 0] = True  # window 0 has three rows that count
    batch.last[BURN_IN : BURN_IN + LENGTH, 1] = True  # window 1 none
    errors = torch.arange(1.0, LENGTH * WINDOWS + 1).view(LENGTH, WINDOWS)
    loss, priority = SequenceView(BURN_IN, LENGTH, eta).reduce(errors.flatten() ** 2, errors.flatten(), batch)
    columns = [[float(e) for e in errors[:, window]] for window in range(WINDOWS)]
    columns[0].pop(1)
    columns[1] = []
    mixed = [eta * max(c, default=0.0) + (1 - eta) * sum(c) / max(1, len(c)) for c in columns]
    assert priority.tolist() == pytest.approx(mixed)
    means = [sum(e**2 for e in c) / max(1, len(c)) for c in columns]
    weighted = [w * mean for w, mean in zip(batch.weight.tolist(), means, strict=True)]
    assert loss.item() == pytest.approx(sum(weighted) / WINDOWS, rel=1e-6)


def test_final_rows_are_not_learned_from() -> None:
    net = make()
    batch = windows(net, seed=3, end=0.4)
    assert batch.last is not None
    used = ~batch.last[BURN_IN : BURN_IN + LENGTH]
    assert not used.all()
    wild = replace(batch, reward=torch.where(used, batch.reward, torch.tensor(1e6)))
    first, second = (td_loss(Scalar(), Max(), VIEW, net, net, shown) for shown in (batch, wild))
    assert first[0].item() == second[0].item()
    assert torch.equal(first[1], second[1])


def test_masks_are_those_of_the_rows_acted_in_and_of_the_rows_bootstrapped_from() -> None:
    batch = windows(make(), end=0.3)
    mask = torch.rand(ROWS, WINDOWS, ACTIONS, generator=torch.Generator().manual_seed(1)) < 0.5
    seen = VIEW.add_masks(NextValues(torch.zeros(1)), replace(batch, mask=mask))
    assert seen.mask is not None
    assert seen.next_mask is not None
    assert batch.ahead is not None
    for row in range(LENGTH):
        for window in range(WINDOWS):
            at = row * WINDOWS + window
            assert torch.equal(seen.mask[at], mask[BURN_IN + row, window])
            assert torch.equal(seen.next_mask[at], mask[batch.ahead[row, window], window])
