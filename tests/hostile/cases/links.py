"""Links in the place of every file and folder of a run: to the user's files, to nothing yet, to devices, in circles."""

import os
from functools import partial
from pathlib import Path

from tests.hostile.place import Case, Make, Place

# Files that commands read or write, with their place in a run folder; CHECKPOINT stands for the newest one.
FILES = (
    "run.toml",
    "status.json",
    "best.json",
    "card.md",
    "events.jsonl",
    "metrics.jsonl",
    "provenance.json",
    "trust.json",
    "run.lock",
    "plot.png",
    "logs/run-0.log",
    "videos/best.mp4",
    "wanted.json",
    "wanted.taken.json",
    "CHECKPOINT/manifest.json",
    "CHECKPOINT/model.safetensors",
    "CHECKPOINT/optim.safetensors",
    "CHECKPOINT/state.json",
    "CHECKPOINT/state.safetensors",
)
FOLDERS = ("logs", "videos", "checkpoints", "CHECKPOINT", "CHECKPOINT/replay")
ZERO = ("run.toml", "status.json", "events.jsonl", "metrics.jsonl", "logs/run-0.log", *FILES[14:16])
# Names of drafts that a writer might use before it renames them.
DRAFTS = (
    ".status.json.tmp",
    ".best.json.tmp",
    ".card.md.tmp",
    ".run.toml.tmp",
    ".plot.png.tmp",
    ".plot.png.part",
    "videos/.best.mp4.tmp.mp4",
    "checkpoints/.tmp-00000000000000000000000000000000",
    "checkpoints/.old-step_000000000000",
    "checkpoints/.old-step_000000000999",
    "checkpoints/step_000000000999",
    "checkpoints/step_000000000320",
)


# What has something else in its place than a file or folder of its own: exit codes that are right then.
RIGHT: dict[str, dict[str, tuple[int, ...]]] = {
    "metrics.jsonl": {"resume": (5,)},
    "events.jsonl": {"resume": (5,)},
    "run.lock": {"resume": (5,)},
    "logs": {"resume": (5,)},
    "checkpoints": {"resume": (5, 6), "eval": (5, 6), "verify": (5, 6)},
    **{name: {"verify": (5, 6)} for name in FILES if name.startswith("CHECKPOINT/")},
}


def placed(place: Place, name: str) -> str:
    """A name with the newest checkpoint in the place of CHECKPOINT."""
    return name.replace("CHECKPOINT", str(place.newest.relative_to(place.run)))


def same(name: str, place: Place) -> None:
    """To the same file of another run of the user: a reader sees nothing wrong, a writer writes there."""
    target = place.victim / "run" / placed(place, name)
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("precious\n")
    place.link(placed(place, name), target)


def dangling(name: str, place: Place) -> None:
    """To a file that is not there: a writer makes it, and Python runs each line of a .pth file that imports."""
    place.link(placed(place, name), place.victim / "folder" / "new.pth")


def zero(name: str, place: Place) -> None:
    """To a device that never ends."""
    place.link(placed(place, name), "/dev/zero")


def loop(name: str, place: Place) -> None:
    """To itself."""
    place.link(placed(place, name), Path(placed(place, name)).name)


def folder(name: str, place: Place) -> None:
    """To a folder of the user."""
    place.link(placed(place, name), place.victim / "folder")


def parent(name: str, place: Place) -> None:
    """To the run's own folder or above, so that walking the tree does not end."""
    place.link(placed(place, name), "..")


def same_folder(name: str, place: Place) -> None:
    """To the same folder of another run of the user."""
    target = place.victim / "run" / placed(place, name)
    target.mkdir(parents=True, exist_ok=True)
    place.link(placed(place, name), target)


def hard(name: str, place: Place) -> None:
    """A second name for a file of the user."""
    os.link(place.victim / "keep.txt", place.clear(placed(place, name)))


def hops(place: Place) -> None:
    """Links to links, the last of which leads outside."""
    place.link("logs/run-0.log", "hop-1")
    place.link("logs/hop-1", "../hop-2")
    place.link("hop-2", place.victim / "folder" / "new.pth")


def part_of_any_process(place: Place) -> None:
    """The draft of run.toml, named after the process that writes it: every number that may come next."""
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    for number in range(last, last + 500):
        place.link(f".run.toml.{number}.part", place.victim / "keep.txt")


def run_is_link(place: Place) -> None:
    """The run folder itself."""
    place.clear(".").symlink_to(place.victim / "run")


def many(place: Place) -> None:
    """Everything at once."""
    for name in FILES[1:]:
        dangling(name, place)


def cases_of(kind: str, make: object, names: tuple[str, ...]) -> list[Case]:
    """One case for each name."""
    made: list[Case] = []
    for name in names:
        act: Make = partial(make, name)  # type: ignore[arg-type]
        codes = {} if kind == "hard" else RIGHT.get(name, {})
        made.append(Case(f"link-{kind}-{name.replace('/', '-')}", act, codes=codes))
    return made


CASES = [
    *cases_of("same", same, FILES),
    *cases_of("dangling", dangling, FILES),
    *cases_of("zero", zero, ZERO),
    *cases_of("loop", loop, ("run.toml", "status.json", "metrics.jsonl", "logs", "checkpoints", "CHECKPOINT")),
    *cases_of("folder", folder, ("status.json", "metrics.jsonl", "logs/run-0.log", *FOLDERS)),
    *cases_of("same-folder", same_folder, FOLDERS),
    *cases_of("parent", parent, ("logs", "videos", "checkpoints", "CHECKPOINT", "CHECKPOINT/replay", "extra")),
    *cases_of("draft", folder, DRAFTS[7:]),
    *cases_of("draft-file", dangling, DRAFTS[:9]),
    *cases_of("hard", hard, ("metrics.jsonl", "events.jsonl", "logs/run-0.log", "run.lock", "status.json", "plot.png")),
    Case("link-hops", hops),
    Case("link-is-the-run", run_is_link, codes={"rm": (2,)}, only=("runs", "show", "verify", "plan-show", "rm")),
    Case("link-part-of-any-process", part_of_any_process),
    Case("link-everything", many),
]
