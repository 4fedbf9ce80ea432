"""Copying stored frames by C's memcpy, in compiled loops. Shapes: D integers of a stored observation."""

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from qfleet.data import Array


@intrinsic
def copy_memory(typing: Any, out: Any, place: Any, source: Any, at: Any, num: Any) -> Any:
    """Copy `num` numbers, from `at` on in a contiguous array, to `place` and what follows it in another.

    This is C's memcpy, which is faster than a compiled loop for whole frames.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to_array, to_place, from_array, from_place, count = arguments
        to_data = context.make_array(out)(context, builder, to_array).data
        from_data = context.make_array(source)(context, builder, from_array).data
        size = context.get_abi_sizeof(context.get_data_type(out.dtype))
        ends = (builder.gep(to_data, [to_place]), builder.gep(from_data, [from_place]))
        cgutils.raw_memcpy(builder, *ends, count, size)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(out, types.int64, source, types.int64, types.int64), generate


@njit(cache=True)
def copy_frames(frames: Array, frame: int, num: int, out: Array, place: int) -> None:
    """Copy `num` frames that lie one after the other, to `place` and the places after it."""
    size = frames.shape[1]
    # numba passes `typing` itself
    copy_memory(out, place * size, frames, frame * size, num * size)  # type: ignore[call-arg]
