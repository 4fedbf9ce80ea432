"""What travels between rooms."""

from qfleet.data.actions import join_actions, split_actions
from qfleet.data.types import (
    Array,
    Batch,
    Board,
    Channel,
    Report,
    Rollout,
    Sequences,
    Spec,
    State,
    Step,
    Tick,
    World,
)

__all__ = [
    "Array",
    "Batch",
    "Board",
    "Channel",
    "Report",
    "Rollout",
    "Sequences",
    "Spec",
    "State",
    "Step",
    "Tick",
    "World",
    "join_actions",
    "split_actions",
]
