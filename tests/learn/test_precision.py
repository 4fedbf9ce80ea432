"""bfloat16: outputs and state stay float32, steps are nearly the same, and learning works."""

import msgspec
import numpy as np
import pytest
import torch

from qfleet.data import Spec
from qfleet.learn import Learner, make_learner
from qfleet.nets import Chain, Reduced, make_net
from qfleet.plan.schema import Adam, Env, InlineRuntime, MlpTorso, NatureTorso, Net, Plan
from tests.learn.parts import IMAGE, VECTOR, batch


def learner_of(spec: Spec, *, reduced: bool, dueling: bool = False) -> Learner:
    torso = NatureTorso(width=16) if spec is IMAGE else MlpTorso(sizes=(16, 16))
    plan = Plan(env=Env(id="none"), net=Net(torso=torso, dueling=dueling), optim=Adam(learning_rate=1e-2))
    plan = msgspec.structs.replace(plan, runtime=InlineRuntime(precision="bfloat16" if reduced else "float32"))
    return make_learner(plan, spec, make_net(plan.net, spec, normalize="off", seed=1), torch.device("cpu"))


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "duelling"])
@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=["vector", "picture"])
def test_a_step_is_nearly_the_same_and_all_state_is_float32(spec: Spec, dueling: bool) -> None:
    reduced, full = (learner_of(spec, reduced=how, dueling=dueling) for how in (True, False))
    # Convolutions are a chain, of which a duelling head is the tail; a small network with such a head is none.
    assert isinstance(reduced.gradients.online_forward, Reduced if dueling and spec is VECTOR else Chain)
    assert reduced.gradients.online_forward(torch.from_numpy(batch(spec).obs)).dtype == torch.float32
    one, other = reduced.update(batch(spec)), full.update(batch(spec))
    assert one.loss == pytest.approx(other.loss, rel=0.05)
    assert one.loss != other.loss
    assert one.stats["gradient_norm"] == pytest.approx(other.stats["gradient_norm"], rel=0.1)
    assert one.priority.dtype == np.float32
    assert {value.dtype for value in (reduced.model_arrays() | reduced.optim_arrays()).values()} == {
        np.dtype("float32")
    }


def test_repeated_updates_fit_a_batch() -> None:
    learner, items = learner_of(VECTOR, reduced=True), batch()
    items.discount[:] = 0.0
    first = learner.update(items).loss
    for _ in range(300):
        last = learner.update(items).loss
    assert last < first / 50
