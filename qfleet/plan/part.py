"""What every piece of a plan is made of."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
# Of what is made at once, before anything else could refuse it: a plan may come from a stranger.
Threads = Annotated[int, Meta(ge=1, le=1_024)]
Workers = Annotated[int, Meta(ge=1, le=10_000)]
Environments = Annotated[int, Meta(ge=1, le=100_000)]
Width = Annotated[int, Meta(ge=1, le=1_000_000)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Rate = Annotated[float, Meta(gt=0.0)]
NotNegative = Annotated[float, Meta(ge=0.0)]
Scalar = bool | int | float | str


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of a plan: immutable, and strict about its keys."""
