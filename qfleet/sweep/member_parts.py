"""The user's own parts and callbacks on their way to the processes of members."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qfleet.build.custom_parts import CustomParts
from qfleet.errors import UsageError
from qfleet.system.sent_objects import pack_object, unpack_object


@dataclass(frozen=True)
class MemberParts:
    """What every member of a group is given besides its plan."""

    custom_parts: CustomParts
    callbacks: tuple[Any, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """As arguments of `train` and `resume`."""
        return {**dict(self.custom_parts.given()), "callbacks": self.callbacks}


def pack_member_parts(custom_parts: CustomParts, callbacks: Iterable[Any]) -> bytes:
    """The parts as bytes; what a script or a notebook defines is sent whole. Empty if there are none."""
    parts = MemberParts(custom_parts, tuple(callbacks))
    given = [*custom_parts.given(), *(("callbacks", each) for each in parts.callbacks)]
    if not given:
        return b""
    for name, value in given:
        try:
            pack_object(value)
        except Exception as error:
            raise UsageError(
                f"{name}={value!r} cannot be given to the members of a group",
                f"Each member is a process of its own, and Python said: {error}.",
                "Let it hold no open files, locks or generators, or train the seeds one after another with train().",
            ) from error
    return pack_object(parts)


def unpack_member_parts(packed: bytes) -> MemberParts:
    """The parts that the group's process has sent."""
    if not packed:
        return MemberParts(CustomParts())
    parts: MemberParts = unpack_object(packed)
    return parts
