"""Names and texts that move the cursor, colour the screen, or imitate lines of qfleet."""

import json
from functools import partial

from tests.hostile.place import COMMAND, FORGED, Case, Place

ANSI = "\x1b[31m\x1b[2J\x1b[1;1H"
OSC = "\x1b]0;title\x07\x1b]8;;http://evil.example\x07click\x1b]8;;\x07\x1b]52;c;ZXZpbA==\x07"
LINE = f"\n{FORGED} error: all is well\n{FORGED}"
OTHERS = "\r\x08\x7f\x9b31m\u202e\u2028\u2066"
TEXTS = {"escapes": ANSI + OSC + OTHERS, "line": LINE}
NAMES = {
    "ansi": "a\x1b[31mb",
    "line": f"a\n{FORGED} b",
    "osc": "a\x1b]0;t\x07b",
    "bytes": "a\udcff\udcfeb",
    "dash": "--yes",
}
# What commands print of a run, and where it is written.
FIELDS = {
    "status.json": ("state", "reason", "resume"),
    "best.json": ("split",),
    "provenance.json": ("created", "platform"),
}


def field(name: str, key: str, text: str, place: Place) -> None:
    """Hostile text in one field."""
    place.change(name, **{key: "x" + text + "x"})


def resume_command(place: Place) -> None:
    """A command to type next that is none of ours."""
    place.change("status.json", resume=COMMAND, state="interrupted")


def events(text: str, place: Place) -> None:
    """Hostile text in warnings and notes."""
    kinds = ("warning", "actor_lost", "checkpoint_corrupt", "resumed", text)
    rows = [{"kind": kind, "time": text, "text": text, "reason": text, "problems": [text]} for kind in kinds]
    rows += [{"kind": "progress", "env_steps": 10, "warnings": [text], "note": text, text: 1}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("events.jsonl", "metrics.jsonl"):
        with (place.run / name).open("a") as file:
            file.write(lines)


def warning_of_plot(text: str, place: Place) -> None:
    """Text that a plot shows and that no font has."""
    place.replace("run.toml", 'id = "CartPole-v1"', "id = " + json.dumps("CartPole" + text + "\u4e00"))


def env_id(text: str, place: Place) -> None:
    """Hostile text as the environment's name."""
    place.replace("run.toml", 'id = "CartPole-v1"', "id = " + json.dumps("x" + text))


def plan_key(text: str, place: Place) -> None:
    """Hostile text as the name of a setting."""
    with (place.run / "run.toml").open("a") as file:
        file.write(f"\n[{json.dumps('x' + text)}]\n{json.dumps('y' + text)} = 1\n")


def option(text: str, place: Place) -> None:
    """Hostile text as an option of the environment."""
    place.replace("run.toml", "[env.options]", f"[env.options]\n{json.dumps('x' + text)} = {json.dumps('y' + text)}")


def file_name(folder: str, text: str, place: Place) -> None:
    """A file with a hostile name where files are listed or reported."""
    (place.run / folder).mkdir(exist_ok=True)
    (place.run / folder / ("x" + text.replace("/", "_"))).write_text("x")


def in_checkpoint(text: str, place: Place) -> None:
    """A file with a hostile name in a checkpoint, which is damaged by that."""
    (place.newest / ("x" + text.replace("/", "_"))).write_text("x")


def checkpoint_name(text: str, place: Place) -> None:
    """A folder with a hostile name among the checkpoints."""
    (place.run / "checkpoints" / ("step_000000000400" + text.replace("/", "_"))).mkdir()


def manifest_name(text: str, place: Place) -> None:
    """A hostile file name in a sealed manifest."""
    from qfleet.save.manifest import FileEntry

    place.seal(files={"x" + text: FileEntry(1, "0" * 64), "../../../victim/keep.txt": FileEntry(9, "0" * 64)})


def damage_text(text: str, place: Place) -> None:
    """Hostile text in the metadata of a tensor file."""
    header = json.dumps({"x" + text: {"dtype": text, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (place.newest / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    place.seal()


def untouched(place: Place) -> None:
    """The name of the folder is enough."""


def group_of(text: str, place: Place) -> None:
    """A run that says it is a group, with hostile names of members."""
    members = [{"name": "x" + text, "seed": text, "state": text, "reason": text}]
    place.write("group.json", json.dumps({"format": 1, "members": members, "state": text, "resume": COMMAND}))


CASES = [
    *(
        Case(f"text-{name}-{key}-{w}", partial(field, name, key, text))
        for name, keys in FIELDS.items()
        for key in keys
        for w, text in TEXTS.items()
    ),
    *(Case(f"text-events-{w}", partial(events, text)) for w, text in TEXTS.items()),
    *(Case(f"text-env-id-{w}", partial(env_id, text)) for w, text in TEXTS.items()),
    *(Case(f"text-env-id-plot-{w}", partial(warning_of_plot, text)) for w, text in TEXTS.items()),
    *(Case(f"text-plan-key-{w}", partial(plan_key, text)) for w, text in TEXTS.items()),
    *(Case(f"text-option-{w}", partial(option, text)) for w, text in TEXTS.items()),
    *(Case(f"text-in-checkpoint-{w}", partial(in_checkpoint, text)) for w, text in TEXTS.items()),
    *(Case(f"text-checkpoint-name-{w}", partial(checkpoint_name, text)) for w, text in TEXTS.items()),
    *(Case(f"text-manifest-name-{w}", partial(manifest_name, text)) for w, text in TEXTS.items()),
    *(Case(f"text-tensor-name-{w}", partial(damage_text, text)) for w, text in TEXTS.items()),
    *(Case(f"text-logs-name-{w}", partial(file_name, "logs", text)) for w, text in TEXTS.items()),
    *(Case(f"text-group-{w}", partial(group_of, text)) for w, text in TEXTS.items()),
    *(Case(f"name-{w}", untouched, folder=text) for w, text in NAMES.items()),
    Case("text-resume-command", resume_command),
]
