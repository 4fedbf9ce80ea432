"""Transfer of batches to the device, and reuse of their arrays afterwards."""

import numpy as np
import pytest
import torch

from qfleet.data import Batch, Spec
from qfleet.learn.transfer import PinnedPages, make_transfer, to_floats
from qfleet.plan.schema import Algo, DoubleRule, MaxRule
from tests.learn.parts import IMAGE, VECTOR, batch, make, same


def test_on_a_cpu_nothing_is_copied() -> None:
    values = np.arange(3.0)
    sent = make_transfer(torch.device("cpu"))([("obs", values), ("mask", None)])
    assert sent["mask"] is None
    assert sent["obs"] is not None
    values[0] = 7.0
    assert sent["obs"].tolist() == [7.0, 1.0, 2.0]


def test_other_devices_get_copies() -> None:
    sent = make_transfer(torch.device("meta"))([("obs", np.arange(3.0)), ("mask", None)])
    assert sent["mask"] is None
    assert sent["obs"] is not None
    assert sent["obs"].device.type == "meta"


def test_scalars_are_floats_in_order() -> None:
    assert to_floats(torch.tensor(1.5), torch.tensor(2.5)) == [1.5, 2.5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs an accelerator")
def test_a_slot_reuses_its_pages() -> None:
    slot = PinnedPages()
    page = slot.page("obs", torch.zeros(3))
    assert slot.page("obs", torch.ones(3)) is page
    assert slot.page("obs", torch.ones(4)) is not page


def spoil(items: Batch) -> None:
    """Overwrite every array, as the next-but-one draw into the same buffers does."""
    for name in items.__slots__:
        if (values := getattr(items, name)) is not None:
            values[...] = 1 if values.dtype.kind in "iub" else np.nan


@pytest.mark.parametrize("rule", [MaxRule(), DoubleRule()], ids=["max", "double"])
@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=["vector", "picture"])
def test_arrays_may_be_reused_after_the_update(spec: Spec, rule: MaxRule | DoubleRule) -> None:
    reused, kept = make(spec, algo=Algo(rule=rule)), make(spec, algo=Algo(rule=rule))
    reports = []
    for seed in range(4):
        items = batch(spec, seed=seed)
        reports.append(reused.update(items))
        spoil(items)
    expected = [kept.update(batch(spec, seed=seed)) for seed in range(4)]
    assert same(reused.model_arrays(), kept.model_arrays())
    assert [report.loss for report in reports] == [report.loss for report in expected]
    for one, other in zip(reports, expected, strict=True):
        assert one.priority.tolist() == other.priority.tolist()
