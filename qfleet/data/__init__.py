"""What travels between rooms."""

from qfleet.data.types import (
    Array,
    Batch,
    Board,
    Channel,
    Report,
    Rollout,
    Spec,
    State,
    Step,
    Tick,
    World,
)

__all__ = ["Array", "Batch", "Board", "Channel", "Report", "Rollout", "Spec", "State", "Step", "Tick", "World"]
