"""What kind of machine this is: figures of different kinds are kept apart, and some have bars of their own."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

# What decides how fast matrices are multiplied; Linux's names.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
# The first flag that is there names the kind.
KINDS = {"amx_bf16": "amx-bf16", "avx512_bf16": "avx512-bf16", "avx512f": "avx512", "avx2": "avx2"}


def flags(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those of `FLAGS` that this processor has; none where the system does not say."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in FLAGS if name in found]


def kind(known: Sequence[str] | None = None) -> str:
    """The kind of a machine with these flags, by default this one's."""
    there = flags() if known is None else known
    return next((name for flag, name in KINDS.items() if flag in there), platform.machine())


def has_bfloat16(kind: str) -> bool:
    """Does this kind multiply bfloat16 itself?"""
    return kind.endswith("-bf16")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """How many processes wanted a core over the last minute, where the system says so."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
