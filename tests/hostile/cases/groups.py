"""Groups of runs: their own files, and members that are not where or what they should be."""

import json
import os
from functools import partial
from typing import Any

from tests.hostile.cases.plans import modules
from tests.hostile.cases.texts import ANSI, LINE, OSC
from tests.hostile.place import COMMAND, Case, Place

FILES = (
    "group.json",
    "plan.toml",
    "plot.png",
    "run.lock",
    "logs/seed-0.log",
    "seed-0/run.toml",
    "seed-0/metrics.jsonl",
)
NAMES = {
    "up": "../../victim/run",
    "absolute": "/etc",
    "dots": "..",
    "empty": "",
    "line": "seed-0\nFORGED",
    "ansi": "seed-0" + ANSI,
    "number": 7,
    "list": [],
    "long": "x" * 5000,
    "hidden": ".seed",
}
DOCUMENTS = {
    "list": "[]",
    "deep": '{"members": ' + "[" * 100_000,
    "members-text": '{"format": 1, "members": "seed-0"}',
    "members-numbers": '{"format": 1, "members": [1, null, []]}',
    "long-number": '{"format": 1, "exit_code": %s, "members": []}' % ("9" * 4000),
    "newer": '{"format": 99, "members": []}',
    "empty": "{}",
}


def dangling(name: str, place: Place) -> None:
    """A link to a file that a writer would make."""
    place.link(name, place.victim / "folder" / "new.pth")


def same(name: str, place: Place) -> None:
    """A link to a file of the user with other content."""
    place.link(name, place.victim / "keep.txt")


def logs_folder(place: Place) -> None:
    """The folder of logs leads to a folder of the user."""
    place.link("logs", place.victim / "folder")


def member_link(place: Place) -> None:
    """A member leads to a run of the user."""
    place.link("seed-0", place.victim / "run")


def fifo(name: str, place: Place) -> None:
    """A pipe."""
    os.mkfifo(place.clear(name))


def member_name(name: Any, place: Place) -> None:
    """A member of a hostile name."""
    document = place.read("group.json")
    document["members"][0]["name"] = name
    place.write("group.json", json.dumps(document))


def texts(text: str, place: Place) -> None:
    """Hostile text in all fields."""
    document = place.read("group.json")
    for member in document["members"]:
        member |= {"state": text, "reason": text, "exit_code": text}
    place.write("group.json", json.dumps({**document, "state": text, "reason": text, "env": text, "resume": COMMAND}))


def document(text: str, place: Place) -> None:
    """Another group.json."""
    place.write("group.json", text)


def weights_from(place: Place) -> None:
    """Weights that come from elsewhere."""
    place.change("group.json", weights_from="/etc", state="interrupted", exit_code=75)


def many_members(place: Place) -> None:
    """Members that are not there, many of them."""
    entry = place.read("group.json")["members"][0]
    place.change(
        "group.json", members=[{**entry, "name": f"seed-{number}", "seed": number} for number in range(20_000)]
    )


def finished(cases: list[Case]) -> list[Case]:
    """Resuming a group starts a process for each member: only the cases that are about that do so."""
    rest = ("runs", "show", "show-json", "diff", "verify", "compare", "plot", "eval", "rm")
    return [Case(case.name, case.make, "group", case.codes, case.absent, only=rest) for case in cases]


CASES = [
    *(Case(f"group-dangling-{name.replace('/', '-')}", partial(dangling, name), "group") for name in FILES),
    *finished([Case(f"group-same-{name.replace('/', '-')}", partial(same, name)) for name in FILES]),
    *finished([Case(f"group-fifo-{name.replace('/', '-')}", partial(fifo, name)) for name in FILES]),
    *finished([Case(f"group-member-{w}", partial(member_name, name)) for w, name in NAMES.items()]),
    *finished([Case(f"group-is-{w}", partial(document, text)) for w, text in DOCUMENTS.items()]),
    *finished([Case(f"group-text-{w}", partial(texts, t)) for w, t in (("ansi", ANSI), ("line", LINE), ("osc", OSC))]),
    *finished([Case("group-many-members", many_members)]),
    Case("group-logs-folder", logs_folder, "group"),
    Case("group-log-fifo", partial(fifo, "logs/seed-0.log"), "group"),
    Case("group-member-link", member_link, "group"),
    Case("group-weights-from", weights_from, "group"),
    Case("group-modules", modules, "group"),
]
