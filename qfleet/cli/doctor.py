"""`qfleet doctor`: check that this machine can train."""

import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from qfleet.cli.output import echo, echo_json, echo_table, size
from qfleet.cli.training import Out
from qfleet.install import install_command
from qfleet.system.cores import machine_cores

NEEDED = ("torch", "numpy", "gymnasium", "safetensors", "msgspec", "numba")
# Each extra's module and the package that provides it.
EXTRAS = {
    "atari": ("ale_py", "ale-py"),
    "box2d": ("Box2D", "box2d"),
    "mujoco": ("mujoco", "mujoco"),
    "minatar": ("minatar", "minatar"),
    "video": ("imageio", "imageio"),
    "plot": ("matplotlib", "matplotlib"),
    "pandas": ("pandas", "pandas"),
    "tb": ("tensorboardX", "tensorboardX"),
    "lz4": ("lz4", "lz4"),
    "data": ("pyarrow", "pyarrow"),
    "minari": ("h5py", "h5py"),
    "s3": ("s3fs", "s3fs"),
    "hdfs": ("hdfs_native", "hdfs-native"),
    "ray": ("ray", "ray"),
    "spark": ("pyspark", "pyspark"),
    "mpi": ("mpi4py", "mpi4py"),
}
LEAST_FREE_BYTES = 1_000_000_000


class DoctorFinding(NamedTuple):
    """One check; `code` is the exit code if it fails."""

    name: str
    ok: bool
    detail: str
    code: int = 1


def doctor(
    *,
    out: Out = "runs",
    measure: Annotated[
        bool, Parameter(help="Measure what this machine is good at, and show the table.", show_default=False)
    ] = False,
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """Check versions, devices, memory, disk and extras. Exit code 0 if every check passes."""
    if measure:
        return _measure(json)
    findings = [_python(), *map(_package, NEEDED), *_torch(), _cores(), _memory(), *_disk(Path(out))]
    findings += [DoctorFinding(extra, True, _installed(extra, *where)) for extra, where in EXTRAS.items()]
    if json:
        echo_json([finding._asdict() for finding in findings])
    else:
        echo_table((each.name, "ok" if each.ok else "PROBLEM", each.detail) for each in findings)
    bad = [each for each in findings if not each.ok]
    if bad and not json:
        echo("", f"{len(bad)} problem{'s' * (len(bad) != 1)}: {', '.join(each.name for each in bad)}")
    return max((each.code for each in bad), default=0)


def _measure(json: bool) -> int:
    """Measure this machine, and show the table and what follows from it."""
    from qfleet.build.machine import report
    from qfleet.build.machine.measurement import MACHINE_SECONDS, measure_machine
    from qfleet.build.machine.table import read_table, write_table

    def show(text: str) -> None:
        echo(text, to_stderr=json)

    show(f"measuring this machine: half a minute, at most {MACHINE_SECONDS:.0f} s; other programs disturb it")
    table = measure_machine(read_table(), show)
    kept = write_table(table)
    if json:
        echo_json({**report.as_json(table), "kept": kept})
        return 0
    echo("", report.machine_text(table), "")
    echo_table(report.measured_rows(table), ("update", "way", "time", "measured"))
    echo("", "A run that leaves these settings open uses:")
    echo_table(report.chosen_rows(table))
    unkept = [] if kept else ["the table could not be kept: the user's cache cannot be written"]
    for text in (*report.remarks(table), *unkept):
        echo("", text)
    return 0


def _python() -> DoctorFinding:
    return DoctorFinding("python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.system()}")


def _package(name: str) -> DoctorFinding:
    try:
        return DoctorFinding(name, True, version(name))
    except PackageNotFoundError:
        return DoctorFinding(name, False, f"missing: pip install {name}")


def _torch() -> list[DoctorFinding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [DoctorFinding("devices", False, f"torch cannot be imported: {error}")]
    names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    from qfleet.build.machine.report import short_text
    from qfleet.build.machine.table import read_table

    return [
        DoctorFinding("measured", True, short_text(read_table())),
        DoctorFinding("devices", True, ", ".join(["cpu", *names])),
        DoctorFinding("threads", True, f"torch uses {torch.get_num_threads()}; set runtime.threads to change it"),
    ]


def _cores() -> DoctorFinding:
    return DoctorFinding("cores", True, f"{machine_cores()} usable of {os.cpu_count()}")


def _memory() -> DoctorFinding:
    page = os.sysconf("SC_PAGE_SIZE")
    pages = os.sysconf("SC_PHYS_PAGES")
    return DoctorFinding("memory", True, size(page * pages))


def _disk(out: Path) -> list[DoctorFinding]:
    folder = next(each for each in (out, *out.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    return [DoctorFinding("disk", free >= LEAST_FREE_BYTES, f"{size(free)} free in {folder}", 5), _write_probe(folder)]


def _write_probe(folder: Path) -> DoctorFinding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".qfleet-probe-") as file:
            file.write(bytes(65_536))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return DoctorFinding("writing", False, f"cannot write in {folder}: {error.strerror}", 5)
    return DoctorFinding("writing", True, f"a file was written and synced in {folder}")


def _installed(extra: str, module: str, package: str) -> str:
    if find_spec(module) is None:
        return f"not installed: {install_command(extra)}"
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of unknown version"
    # mpi4py is not imported here: that would initialise MPI.
    missing = extra == "mpi" and shutil.which("mpirun") is None
    return f"{package} {found}" + (", but no mpirun: install an MPI of the system" if missing else "")
