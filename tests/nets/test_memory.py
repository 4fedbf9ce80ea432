"""Memory: rows unrolled are rows stepped, and an episode's end is forgotten. T rows, N lanes, S state size."""

from typing import Literal

import numpy as np
import pytest
import torch

from qfleet.act import Policy
from qfleet.act.policy_inputs import add_reward
from qfleet.data import Spec
from qfleet.nets import QNet, make_net
from qfleet.nets.memory import Memory, squash
from qfleet.plan.schema import GruMemory, LstmMemory, MlpTorso, Net
from qfleet.qlearn import Scalar

SPEC = Spec((2,), "float32", (3,))
ROWS, LANES = 7, 4
both = pytest.mark.parametrize("kind", ["lstm", "gru"])
Kind = Literal["lstm", "gru"]


def make(kind: Kind) -> QNet:
    memory = LstmMemory(size=5) if kind == "lstm" else GruMemory(size=5)
    return make_net(Net(torso=MlpTorso(sizes=(6, 6)), memory=memory), SPEC, normalize="off", seed=1)


def require(net: QNet) -> Memory:
    assert net.memory is not None
    return net.memory


@both
def test_the_state_holds_the_cell_the_previous_action_and_the_previous_reward(kind: Kind) -> None:
    memory = require(make(kind))
    assert memory.cell_state_size == (10 if kind == "lstm" else 5)
    assert memory.state_size == memory.cell_state_size + 3 + 1
    assert torch.equal(memory.initial_state(2), torch.zeros(2, memory.state_size))
    reference = torch.nn.LSTMCell(6 + 3 + 1, 5) if kind == "lstm" else torch.nn.GRUCell(6 + 3 + 1, 5)
    reference.load_state_dict(memory.cell.state_dict())
    torch.manual_seed(0)  # outputs close to zero would need an absolute tolerance
    features, state = torch.randn(2, 6), torch.randn(2, memory.state_size)
    previous, reward = state[:, memory.cell_state_size : -1], state[:, -1:]
    inputs = torch.cat([features, previous, torch.sign(reward) * torch.log(1 + reward.abs())], 1)
    with torch.no_grad():
        hidden, cell_state = memory.step(features, state)
        if kind == "lstm":
            expected, cell = reference(inputs, (state[:, :5], state[:, 5:10]))
            assert torch.allclose(cell_state, torch.cat([expected, cell], 1))
        else:
            expected = reference(inputs, state[:, :5])
            assert torch.allclose(cell_state, expected)
        assert torch.allclose(hidden, expected)


@both
def test_unrolling_equals_stepping_with_an_actors_state(kind: Kind) -> None:
    """The policy's own `act` and `add_reward` make the state that `unroll` makes, ends of episodes included."""
    net, rng = make(kind), np.random.default_rng(0)
    policy, state = Policy(net, Scalar(), SPEC.actions), np.zeros((LANES, require(net).state_size), np.float32)
    state[:] = rng.normal(size=state.shape)
    start = torch.from_numpy(state.copy())
    obs = rng.normal(size=(ROWS, LANES, 2)).astype(np.float32)
    gain = rng.normal(size=(ROWS, LANES)).astype(np.float32)
    last = rng.random((ROWS, LANES)) < 0.3
    assert last[:-1].any()
    actions, values = [], []
    for row in range(ROWS):
        action, after, expected = policy.act(obs[row], state, epsilon=0.5, rng=rng)
        carried = add_reward(after, gain[row], last[row])
        assert carried is not None
        state = carried
        actions.append(action)
        values.append(expected)
    with torch.no_grad():
        seen, done, gained, ended = (torch.from_numpy(each) for each in (obs, np.stack(actions), gain, last))
        outs, end = net.unroll(seen, done, gained, ended, start)
    assert outs.numpy() == pytest.approx(np.stack(values), abs=1e-5)
    assert end.numpy() == pytest.approx(state, abs=1e-5)


@both
def test_the_state_is_reset_at_an_episodes_end(kind: Kind) -> None:
    net, generator = make(kind), torch.Generator().manual_seed(1)
    memory = require(net)
    obs = torch.randn(ROWS, 1, 2, generator=generator)
    action, gain = torch.zeros(ROWS, 1, dtype=torch.int64), torch.ones(ROWS, 1)
    last = torch.zeros(ROWS, 1, dtype=torch.bool)
    last[3] = True
    with torch.no_grad():
        first, _ = net.unroll(obs, action, gain, last, memory.initial_state(1))
        changed = obs.clone()
        changed[:4] += 1.0
        second, _ = net.unroll(changed, action + 1, gain * 9, last, memory.initial_state(1) + 3.0)
        alone, _ = net.unroll(obs[4:], action[4:], gain[4:], last[4:], memory.initial_state(1))
    assert not torch.allclose(first[:4], second[:4])
    assert torch.allclose(first[4], second[4])  # the row after the end: actions and rewards differ only from here on
    assert torch.allclose(first[4:], alone)


@both
def test_previous_action_and_reward_are_inputs(kind: Kind) -> None:
    net = make(kind)
    memory = require(net)
    obs, last = torch.zeros(2, 1, 2), torch.zeros(2, 1, dtype=torch.bool)
    outs = []
    with torch.no_grad():
        for action, gain in ((0, 0.0), (1, 0.0), (0, 5.0)):
            row = torch.full((2, 1), action)
            outs.append(net.unroll(obs, row, torch.full((2, 1), gain), last, memory.initial_state(1))[0])
    assert all(torch.equal(out[0], outs[0][0]) for out in outs)  # not yet in the first row
    assert not torch.allclose(outs[0][1], outs[1][1])
    assert not torch.allclose(outs[0][1], outs[2][1])


@both
def test_gradients_flow_through_rows_and_stop_at_an_episodes_end(kind: Kind) -> None:
    net = make(kind)
    obs = torch.randn(ROWS, 1, 2, requires_grad=True)
    last = torch.zeros(ROWS, 1, dtype=torch.bool)
    last[2] = True
    zeros = torch.zeros(ROWS, 1)
    outs, _ = net.unroll(obs, zeros.long(), zeros, last, require(net).initial_state(1))
    outs[-1].sum().backward()  # type: ignore[no-untyped-call]
    assert obs.grad is not None
    assert obs.grad.flatten(1).any(1).tolist() == [False, False, False, True, True, True, True]


def test_require_memory_refuses_a_network_without_one() -> None:
    net = make_net(Net(torso=MlpTorso(sizes=(6,))), SPEC, normalize="off", seed=1)
    with pytest.raises(ValueError, match="memory"):
        net.step(torch.zeros(1, 2), torch.zeros(1, 4))


def test_rewards_are_squashed() -> None:
    assert squash(torch.tensor([-1000.0, 0.0, 1.0])).tolist() == pytest.approx([-6.908755, 0.0, 0.693147], abs=1e-5)
