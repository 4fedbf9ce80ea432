"""Plans from elsewhere: code they name, places they name, and counts that no machine has."""

import json
from functools import partial

from tests.hostile.place import Case, Place, plant_modules

REFUSED = dict.fromkeys(("resume", "eval", "eval-latest", "eval-elsewhere", "play", "record"), (2,))
WRAPPERS = {
    "module": "evil:W",
    "file": "evil.py:W",
    "inside": "runs/hostile/evil.py:W(a=1)",
    "text": "evil",
    "call": "a:b(c())",
}
CODE = {"module": "evil:Evil", "file": "evil.py:Evil", "inside": "runs/hostile/evil.py:Evil", "gym": "evil:Evil-v0"}
# Settings, each with a value that is far too large, or that none can be.
COUNTS = {
    "threads": ("runtime", "threads", "1000000"),
    "threads-more": ("runtime", "threads", str(2**62)),
    "envs": ("env", "num", "1000000000"),
    "envs-million": ("env", "num", "1000000"),
    "workers": ("env", "workers", "1000000"),
    "bins": ("env", "bins", "1000000000"),
    "capacity": ("replay", "capacity", str(10**15)),
    "capacity-some": ("replay", "capacity", str(10**10)),
    "batch": ("algo", "batch_size", str(10**12)),
    "accumulate": ("algo", "accumulate", str(10**12)),
    "learners": ("learners", "num", "1000000"),
    "learners-some": ("learners", "num", "1000"),
    "actors": ("actors", "num", "1000000"),
    "population": ("population", "num", "1000000"),
    "keep": ("save", "keep", str(10**18)),
    "bucket": ("sync", "bucket_bytes", str(10**18)),
    "seed": ("", "seed", str(2**200)),
    "seed-negative": ("", "seed", "-1"),
    "steps": ("until", "steps", str(10**18)),
    "log-every": ("log", "every_steps", str(10**18)),
    "nan": ("algo", "discount", "nan"),
    "infinite": ("optim", "learning_rate", "inf"),
    "device": ("runtime", "device", '"cuda:99"'),
    "device-odd": ("runtime", "device", '"\\u001b[31m; rm -rf /"'),
    "text-for-number": ("env", "num", '"8"'),
}
# Other settings than those of the checkpoint, or that no machine has: going on is refused.
MUST = {
    name: {"resume": (2,)}
    for name in COUNTS
    if name not in ("keep", "bucket", "steps", "log-every", "seed-negative", "accumulate")
}
TEXTS = {
    "not-toml": "this is = = not",
    "deep": "a = " + "[" * 20_000,
    "deep-tables": "[" + ".".join("a" * 20_000) + "]",
    "unknown": "[unknown]\nsetting = 1\n",
    "surrogate": 'seed = "\\ud800"',
    "long-number": "seed = " + "9" * 5000,
    "date": "seed = 1979-05-27T07:32:00Z",
    "list": "env = [1, 2, 3]",
    "no-env": "seed = 3",
    "binary": "\x00\x01\x02",
}


def evil_code(env_id: str, place: Place) -> None:
    """An environment id that names code, which lies wherever it might be looked for."""
    for folder in (place.root, place.run, place.root / "runs"):
        (folder / "evil.py").write_text(place.code)
    place.replace("run.toml", 'id = "CartPole-v1"', f"id = {json.dumps(env_id)}")


def evil_wrapper(text: str, place: Place) -> None:
    """A wrapper that names code, which lies wherever it might be looked for."""
    for folder in (place.root, place.run, place.root / "runs"):
        (folder / "evil.py").write_text(place.code)
    place.replace("run.toml", "wrappers = []", f"wrappers = [{json.dumps(text)}]")


def forged_trust(place: Place) -> None:
    """The same, with another user's proof of trust."""
    evil_code("evil.py:Evil", place)
    place.write("trust.json", json.dumps({"env": "evil.py:Evil", "proof": "0" * 64}))


def modules(place: Place) -> None:
    """Files named like modules, in the current folder and in the run."""
    plant_modules(place.root, place)
    plant_modules(place.run, place)


def setting(table: str, key: str, value: str, place: Place) -> None:
    """One setting of the plan, and of the plan of a group, with another value."""
    lines = (place.run / "run.toml").read_text().splitlines()
    now = ""
    for number, line in enumerate(lines):
        now = line.strip("[]") if line.startswith("[") else now
        if now == table and line.split(" = ")[0] == key:
            lines[number] = f"{key} = {value}"
            place.write("run.toml", "\n".join(lines) + "\n")
            return
    raise AssertionError(f"the plan has no {table}.{key}")


def torso(sizes: str, place: Place) -> None:
    """A network that no memory holds."""
    text = (place.run / "run.toml").read_text()
    before, _, after = text.partition("sizes = [")
    place.write("run.toml", before + "sizes = " + sizes + after.partition("]")[2])


def runtime(lines: str, place: Place) -> None:
    """Another runtime, which names a place and waives a token."""
    text = (place.run / "run.toml").read_text()
    before, _, after = text.partition("[runtime]\n")
    place.write("run.toml", before + "[runtime]\n" + lines + "\n[" + after.partition("\n[")[2])


def whole_text(text: str, place: Place) -> None:
    """Another file in the plan's place."""
    place.write("run.toml", text)


def own_env(place: Place) -> None:
    """A run that says its environment was an object."""
    place.change("provenance.json", own_env=True)


def git_settings(place: Place) -> None:
    """A repository around the run whose settings name programs."""
    git = place.root / ".git"
    script = place.root / "monitor"
    script.write_text(f"#!/bin/sh\ntouch {place.canary}/git\n")
    script.chmod(0o755)
    for folder in ("objects", "refs/heads", "info"):
        (git / folder).mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text(
        f'[core]\n\trepositoryformatversion = 0\n\tfsmonitor = {script}\n[filter "x"]\n\tclean = {script}\n'
        f"\tsmudge = {script}\n\tprocess = {script}\n\trequired = true\n[alias]\n\tstatus = !{script}\n"
    )
    (git / "info" / "attributes").write_text("* filter=x\n")


ADDRESS = 'type = "ray"\naddress = "127.0.0.1:9"\nallow_no_token = true\ndevice = "cpu"\n'
CASES = [
    *(Case(f"plan-code-{w}", partial(evil_code, text), codes=REFUSED) for w, text in CODE.items()),
    *(Case(f"plan-wrapper-{w}", partial(evil_wrapper, text), codes=REFUSED) for w, text in WRAPPERS.items()),
    *(Case(f"plan-count-{w}", partial(setting, *where), codes=MUST.get(w, {})) for w, where in COUNTS.items()),
    *(Case(f"plan-text-{w}", partial(whole_text, text), codes=REFUSED) for w, text in TEXTS.items()),
    Case("plan-code-with-forged-trust", forged_trust, codes=REFUSED),
    Case("plan-own-env", own_env, codes=REFUSED),
    Case("plan-torso-wide", partial(torso, "[1000000000, 1000000000]")),
    Case("plan-torso-deep", partial(torso, "[" + "8, " * 100_000 + "8]")),
    Case("plan-address", partial(runtime, ADDRESS), codes={"resume": (2,)}),
    Case("plan-address-of-ray-client", partial(runtime, ADDRESS.replace("127", "ray://127")), codes={"resume": (2,)}),
    Case("plan-git-settings", git_settings),
    Case("modules-beside-run", modules),
    Case("modules-beside-processes", modules, base="processes"),
]
