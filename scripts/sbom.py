"""What is installed beside qfleet, as a CycloneDX 1.6 document: names, versions, licences, who needs whom."""

import json
import re
import sys
import uuid
from importlib import metadata
from typing import Any

OURS = "qfleet"


def plain(name: str) -> str:
    """A package's name as indexes know it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def reference(package: metadata.Distribution) -> str:
    """A package's address: pkg:pypi/name@version."""
    return f"pkg:pypi/{plain(package.metadata['Name'])}@{package.version}"


def component(package: metadata.Distribution) -> dict[str, Any]:
    """One package."""
    found = {"type": "library", "name": package.metadata["Name"], "version": package.version}
    found |= {"purl": reference(package), "bom-ref": reference(package)}
    expression = package.metadata.get("License-Expression")
    text = package.metadata.get("License") or ""
    if expression:
        found["licenses"] = [{"expression": expression}]
    elif text and "\n" not in text:
        found["licenses"] = [{"license": {"name": text}}]
    return found


def needs(package: metadata.Distribution, known: dict[str, str]) -> dict[str, Any]:
    """Which of the packages here one asks for; what it asks for only with an extra counts if it is here."""
    names = {plain(re.split(r"[\s\[(<>=!~;]", line, maxsplit=1)[0]) for line in package.requires or []}
    return {"ref": reference(package), "dependsOn": sorted(known[name] for name in names if name in known)}


def document(packages: list[metadata.Distribution]) -> dict[str, Any]:
    """All packages, in the order of their names; equal packages make equal documents."""
    by_name = {plain(package.metadata["Name"]): package for package in packages}
    ordered = [by_name[name] for name in sorted(by_name)]
    known = {name: reference(package) for name, package in by_name.items()}
    parts = [component(package) for package in ordered if plain(package.metadata["Name"]) != OURS]
    body = {
        "metadata": {"component": {**component(by_name[OURS]), "type": "application"}},
        "components": parts,
        "dependencies": [needs(package, known) for package in ordered],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{number}", "version": 1}
    return {**head, **body}


if __name__ == "__main__":
    json.dump(document([each for each in metadata.distributions() if each.metadata["Name"]]), sys.stdout, indent=2)
    print()
