"""What is installed, and what is known about it: the bill of materials and the audit."""

import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """One of scripts/*.py as a module."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    command = [sys.executable, "-P", str(ROOT / "scripts/sbom.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_bill_of_materials_names_what_is_installed(bill: dict[str, Any]) -> None:
    import numpy as np

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "qfleet"
    parts = {each["name"].lower(): each for each in bill["components"]}
    assert parts["numpy"]["version"] == np.__version__
    assert parts["numpy"]["purl"] == f"pkg:pypi/numpy@{np.__version__}"
    assert {"torch", "gymnasium", "msgspec", "safetensors", "cyclopts"} <= parts.keys()
    assert "qfleet" not in parts


def test_the_bill_of_materials_says_who_needs_whom(bill: dict[str, Any]) -> None:
    known = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert set(needs) == known
    assert {ref for refs in needs.values() for ref in refs} <= known
    ours = needs[bill["metadata"]["component"]["bom-ref"]]
    assert any(ref.startswith("pkg:pypi/torch@") for ref in ours)


SOUND = {"name": "a", "version": "1", "vulns": []}
UNSOUND = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"], "aliases": []}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([SOUND], 0, "audit: 1 packages looked up, 0 known holes"),
        ([SOUND, UNKNOWN], 0, "audit: 1 packages looked up, 1 not known there, 0 known holes"),
        ([SOUND, UNSOUND], 1, "audit: b 2: PYSEC-1, mended in 2.1"),
        ([UNKNOWN, UNKNOWN], 0, "audit: skipped: no database of vulnerabilities can be reached"),
        ([], 0, "audit: skipped: no database of vulnerabilities can be reached"),
    ],
)
def test_a_report_is_understood(packages: list[dict[str, Any]], code: int, said: str, tmp_path: Path) -> None:
    audit = script("audit")
    (tmp_path / "report.json").write_text(json.dumps({"dependencies": packages, "fixes": []}))
    found, lines = audit.verdict(audit.read(tmp_path / "report.json"))
    assert found == code
    assert lines[0] == said


@pytest.mark.parametrize("text", [None, "", "[]", "Traceback ..."])
def test_a_report_that_was_not_written_is_no_verdict(text: str | None, tmp_path: Path) -> None:
    audit = script("audit")
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    assert audit.verdict(audit.read(tmp_path / "report.json"))[1][0].startswith("audit: skipped")


def test_the_check_asks_for_an_audit() -> None:
    assert 'check audit "$root/scripts/audit"' in (ROOT / "scripts/check").read_text()


# --- hashes ---

HASHED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def pinned(file: Path) -> dict[str, str]:
    """Names, as indexes know them, and versions."""
    found = re.findall(r"^([\w.-]+)==([^;\s]+)", file.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("name", ["all", "docs", "dev", "audit"])
def test_every_locked_package_has_hashes(name: str) -> None:
    text = (ROOT / f"scripts/locked/{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) > 20
    form = re.compile(r'[\w.-]+==[\w.]+(; python_version < "3.14")? ( *--hash=sha256:[0-9a-f]{64} *)+')
    assert [line for line in lines if not form.fullmatch(line)] == []


@pytest.mark.parametrize("name", ["all", "docs", "dev"])
def test_hashes_are_of_the_pinned_versions(name: str) -> None:
    locked, pins = pinned(ROOT / f"scripts/locked/{name}.txt"), pinned(ROOT / "constraints.txt")
    assert locked.items() <= pins.items()
    # torch has builds of several indexes; what is not locked besides is asked for by other sets only.
    if name == "dev":
        assert pins.keys() - locked.keys() == {"torch"}


def wheel(folder: Path) -> str:
    """A package in a file; its SHA-256."""
    file = folder / "tiny_qfleet_test-1.0-py3-none-any.whl"
    about = "tiny_qfleet_test-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-qfleet-test\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.skipif(not HASHED, reason="there are hashes for Linux on x86_64 and aarch64")
@pytest.mark.parametrize("right", [True, False])
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path, right: bool) -> None:
    value = wheel(tmp_path) if right else hashlib.sha256(wheel(tmp_path).encode()).hexdigest()
    (tmp_path / "scripts/locked").mkdir(parents=True)
    (tmp_path / "scripts/locked/all.txt").write_text(f"tiny-qfleet-test==1.0 --hash=sha256:{value}\n")
    code = f'. "{ROOT}/scripts/setup"; root="{tmp_path}"; python="{sys.executable}"; fill_locked all'
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_DRY_RUN": "1", "PIP_CONFIG_FILE": os.devnull}
    env = {**os.environ, **offline, "QFLEET_HASHES": "1"}
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) is right, said
    assert ("Would install tiny-qfleet-test-1.0" in said) is right
    assert ("DO NOT MATCH THE HASHES" in said) is not right
