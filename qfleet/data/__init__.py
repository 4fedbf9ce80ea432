"""The data types that packages exchange, and their wire format."""

from qfleet.data.joint_actions import join_actions, split_actions
from qfleet.data.types import (
    Array,
    Batch,
    Channel,
    Episode,
    Report,
    Rollout,
    Sequences,
    Spec,
    State,
    Step,
    Tick,
    WeightsBoard,
    World,
    count_steps,
)

__all__ = [
    "Array",
    "Batch",
    "Channel",
    "Episode",
    "Report",
    "Rollout",
    "Sequences",
    "Spec",
    "State",
    "Step",
    "Tick",
    "WeightsBoard",
    "World",
    "count_steps",
    "join_actions",
    "split_actions",
]
