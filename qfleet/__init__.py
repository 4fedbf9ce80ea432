"""qfleet: deep Q-networks from a laptop to a cluster, from one plan."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qfleet.act import Policy
    from qfleet.api import load, resume, train
    from qfleet.plan import Plan, make_plan
    from qfleet.run_object import Run
    from qfleet.sweep.sweep import Group, resume_group, train_group
    from qfleet.training.callbacks import Callback
    from qfleet.training.callbacks.run_view import RunView
    from qfleet.watch.compare import compare

__all__ = [
    "Callback",
    "Group",
    "Plan",
    "Policy",
    "Run",
    "RunView",
    "compare",
    "load",
    "make_plan",
    "resume",
    "resume_group",
    "train",
    "train_group",
]

_HOMES = {
    "Callback": "qfleet.training.callbacks",
    "Group": "qfleet.sweep.sweep",
    "Plan": "qfleet.plan",
    "Policy": "qfleet.training.checkpoints.saved_policy",
    "Run": "qfleet.run_object",
    "compare": "qfleet.watch.compare",
    "RunView": "qfleet.training.callbacks.run_view",
    "make_plan": "qfleet.plan",
    "resume_group": "qfleet.sweep.sweep",
    "train_group": "qfleet.sweep.sweep",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for, so that `qfleet --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'qfleet' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "qfleet.api")), name)
