"""The processor of this machine: its name, and which of the instructions that updates use it has."""

import platform
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Instructions that decide how fast networks are computed, as Linux names them on x86 and on ARM.
X86 = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_fp16", "amx_tile")
ARM = ("asimd", "asimdhp", "bf16", "sve", "svebf16", "sve2")
INSTRUCTIONS = frozenset((*X86, *ARM))


def processor(file: Path = CPUINFO) -> str:
    """The name of the processor, where the system has it."""
    return first_field(file, "model name") or platform.processor() or platform.machine()


def instructions(file: Path = CPUINFO) -> tuple[str, ...]:
    """The instructions that matter, in order; nothing where the system does not list them."""
    listed = first_field(file, "flags") or first_field(file, "Features")
    return tuple(sorted(INSTRUCTIONS.intersection(listed.split())))


def first_field(file: Path, name: str) -> str:
    """The first field of this name; empty if there is none."""
    return next((value for key, value in fields(file) if key == name), "")


@cache
def fields(file: Path) -> tuple[tuple[str, str], ...]:
    """The fields of the first processor that the system lists."""
    try:
        lines = file.read_text(errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return ()
    parts = (line.partition(":") for line in lines)
    return tuple((key.strip(), value.strip()) for key, _, value in parts)
