"""Base struct and number types of the plan's sections."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
# Upper limits, because a plan may come from a stranger and these are allocated before any other check.
Threads = Annotated[int, Meta(ge=1, le=1_024)]
Workers = Annotated[int, Meta(ge=1, le=10_000)]
Environments = Annotated[int, Meta(ge=1, le=100_000)]
Width = Annotated[int, Meta(ge=1, le=1_000_000)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, Meta(gt=0.0)]
NotNegative = Annotated[float, Meta(ge=0.0)]
Scalar = bool | int | float | str


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of a plan: immutable; unknown keys are errors."""
