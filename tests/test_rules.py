"""The house's own rules, those that no linter knows. Each rule is also shown to catch what it forbids."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "qfleet").rglob("*.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = sorted(path.parent.name for path in (ROOT / "qfleet").glob("*/__init__.py"))

# Each can run code found in a file, or loads a file format that can.
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "yaml"}
RAY_FILES = [path for path in SOURCES if path.parent.name == "ray"]
UNSAFE_CALLS = {"eval", "exec", "os.system", "torch.load", "torch.save"}
CLOCKS = {"time.time", "time.time_ns"}  # datetime.now may stamp a record
WAITS = {"acquire", "communicate", "join", "wait"}
COMMANDS = {"subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.run"}
VAGUE = re.compile(r"(Manager|Handler|Helper|Utils?|Base|Mixin|Factory|Impl|V2)$")
VAGUE_FILES = {"base", "common", "helpers", "misc", "util", "utils"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
MAX_FUNCTION_LINES = 50
MAX_METHODS = 25
MAX_MODULES = 16  # in one folder
# Words that meant something in this code alone. The right ones are in docs/house.md.
RETIRED = re.compile(
    r"(^|_)(diary|judge|keeper|fleet|mate|mates|quarters|seat|seats|shelf|belt|heed|heeded|tend|hire|hired|crew|crowd"
    r"|dealt|dealing|cargo|freight|parcel|parcels|slab|wish|wishes|partner|partners|last_words)(_|$)"
)
FILE_CALLS = {"open", "logging.FileHandler", "os.open", "os.replace", "os.rename", "os.unlink", "os.remove", "os.mkdir"}
FILE_CALLS |= {"os.makedirs", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree", "shutil.copy"}
FILE_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "rmdir", "touch", "rmtree"}
# Files that are not in a run folder, or whose folder is made here: each with the reason.
OTHER_FILES = {
    "qfleet/files.py": "the one place",
    "qfleet/install.py": "what pip recorded about this installation",
    "qfleet/training/process/supervised_process.py": "/proc",
    "qfleet/system/descendants.py": "/proc",
    "qfleet/heartbeat.py": "descriptors of this process",
    "qfleet/save/files.py": "its steps are relative to descriptors that qfleet/files.py opened",
    "qfleet/watch/new_run_dir.py": "makes the folder of a new run",
    "qfleet/datasets/storage/content_cache.py": "makes the folder of the cache, and reads the ages of its files",
    "qfleet/datasets/storage/array_cache.py": "makes the folder of the cache",
    "qfleet/datasets/storage/local_folder.py": "makes the folder of a data set",
    "qfleet/workflow/stages.py": "makes the folder of a workflow",
    "qfleet/watch/run_listing.py": "removes the folder of an empty group",
    "qfleet/sweep/sweep.py": "removes the empty folder of a member",
    "qfleet/system/cores.py": "reads a control group's limit",
    "qfleet/training/env_trust.py": "the user's own key",
    "qfleet/build/machine/table.py": "the user's own cache",
    "qfleet/build/machine/measurement.py": "/proc",
    "qfleet/system/processor.py": "/proc",
    "qfleet/system/oom.py": "/proc and a control group's counters",
    "qfleet/build/memory_check.py": "/proc and a control group's limits",
    "qfleet/training/video.py": "a film in a private temporary folder",
    "qfleet/distributed/ray/reaper.py": "/proc, and the folder of a Ray of our own",
    "qfleet/distributed/ray/nodes.py": "the source of qfleet and of an installed environment, for its hash",
    "qfleet/distributed/ray/session.py": "the token and folder of a Ray of our own",
    "qfleet/envs/workers/process.py": "/proc",
    "qfleet/training/log/energy.py": "/sys",
    "qfleet/watch/provenance.py": "/proc, and a private copy of git's index; the repository is not in a run folder",
}

Rule = Callable[[ast.Module], Iterator[str]]


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Modules that are imported, also inside functions, and in which line; those of this package by their own way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno
    for name, call in calls(tree):
        if name.rpartition(".")[2] in {"import_module", "__import__"} and call.args:
            yield str(getattr(call.args[0], "value", "")), call.lineno


def unsafe_imports(tree: ast.Module) -> Iterator[str]:
    """Nothing that unpickles, or that loads objects named by a file."""
    yield from (f"{line}: imports {name}" for name, line in imports(tree) if name.split(".")[0] in UNSAFE_MODULES)


def ray_imports(tree: ast.Module) -> Iterator[str]:
    """Ray is imported by qfleet/distributed/ray alone: every other file works where there is none."""
    yield from (f"{line}: imports {name}" for name, line in imports(tree) if name.split(".")[0] == "ray")


def unsafe_calls(tree: ast.Module) -> Iterator[str]:
    """No eval, no exec, no torch.load, no NumPy objects."""
    for name, call in calls(tree):
        allowed = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name in UNSAFE_CALLS or allowed.get("allow_pickle", "False") != "False":
            yield f"{call.lineno}: calls {name}"


def wall_clocks(tree: ast.Module) -> Iterator[str]:
    """Durations and limits come from time.monotonic: the wall clock jumps."""
    yield from (f"{call.lineno}: calls {name}" for name, call in calls(tree) if name in CLOCKS)


def endless_waits(tree: ast.Module) -> Iterator[str]:
    """Every wait has a limit."""
    for name, call in calls(tree):
        limited = any(word.arg in {"timeout", "blocking", None} for word in call.keywords)
        waits = name.rpartition(".")[2] in WAITS and "." in name and not call.args
        if (waits or name in COMMANDS) and not limited:
            yield f"{call.lineno}: {name} waits without a limit"


def direct_file_calls(tree: ast.Module) -> Iterator[str]:
    """A file inside a run folder is opened, made or removed by qfleet/files.py alone, which follows no link."""
    for name, call in calls(tree):
        method = "." in name and name.rpartition(".")[2] in FILE_METHODS
        given = ast.unparse(call.args[0]) if call.args else ""
        opened = name == "open" and re.match(r"(open_inside|open_log)\(|number|descriptor|file$", given)
        if (name in FILE_CALLS or method) and not opened and given != "os.devnull":
            yield f"{call.lineno}: calls {name}"


def unsafe_starts(tree: ast.Module) -> Iterator[str]:
    """Another Python is started with -P or -I: otherwise it imports files of the current folder."""
    for node in ast.walk(tree):
        words = [ast.unparse(word) for word in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
        if words[:1] == ["sys.executable"] and words[1:2] not in (["'-P'"], ["'-I'"]):
            yield f"{node.lineno}: starts Python with the current folder in its path"


def multiprocessing_starts(tree: ast.Module) -> Iterator[str]:
    """Processes of multiprocessing are started inside `hidden_main`: the current folder is not in their path.

    A file that makes none itself starts workers' processes, which do so.
    """
    if not any(name.rpartition(".")[2] == "Process" for name, _ in calls(tree)):
        return
    guarded = {
        id(call)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and any("hidden_main(" in ast.unparse(item) for item in node.items)
        for call in ast.walk(node)
    }
    for name, call in calls(tree):
        if name.endswith("process.start") and id(call) not in guarded:
            yield f"{call.lineno}: {name} outside hidden_main"


def vague_names(tree: ast.Module) -> Iterator[str]:
    """Plain nouns: a name that could be on any class says nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and VAGUE.search(node.name):
            yield f"{node.lineno}: class {node.name}"


def long_functions(tree: ast.Module) -> Iterator[str]:
    """A function can be seen at once. What a docstring says of parameters after its first line does not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            lines -= (ast.get_docstring(node) or "").count("\n")
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def packed_assignments(tree: ast.Module) -> Iterator[str]:
    """One assignment per line: `a, b = x, y` is for swaps and for tuples that a function returns."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        targets = [ast.unparse(target) for target in node.targets]
        swap = {name.strip("()") for name in targets[0].split(", ")} & {ast.unparse(value) for value in node.value.elts}
        if isinstance(node.targets[0], ast.Tuple) and not swap:
            yield f"{node.lineno}: {targets[0]} = ..."


def large_classes(tree: ast.Module) -> Iterator[str]:
    """A class with more methods is several."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            if methods > MAX_METHODS:
                yield f"{node.lineno}: {node.name} has {methods} methods"


def retired_names(tree: ast.Module) -> Iterator[str]:
    """Names are the field's own."""
    for node in ast.walk(tree):
        fields = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
        yield from (
            f"{getattr(node, 'lineno', 0)}: {name}"
            for name in fields
            if isinstance(name, str) and RETIRED.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
        )


RULES: list[Rule] = [
    packed_assignments,
    large_classes,
    retired_names,
    unsafe_imports,
    ray_imports,
    unsafe_calls,
    wall_clocks,
    endless_waits,
    unsafe_starts,
    multiprocessing_starts,
    direct_file_calls,
    vague_names,
    long_functions,
]
EXEMPT: dict[Rule, list[Path]] = {
    ray_imports: RAY_FILES,
    direct_file_calls: [ROOT / name for name in OTHER_FILES],
    unsafe_imports: [ROOT / "qfleet/system/sent_objects.py"],  # its first lines say why
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: Rule) -> None:
    paths = [path for path in SOURCES if path not in EXEMPT.get(rule, ())]
    found = [f"{path.relative_to(ROOT)}:{what}" for path in paths for what in rule(ast.parse(path.read_text("utf-8")))]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (unsafe_imports, "import pickle"),
        (unsafe_imports, "from yaml import load"),
        (unsafe_imports, "def f():\n    import cloudpickle.pickle"),
        (unsafe_imports, "importlib.import_module('pickle')"),
        (ray_imports, "import ray"),
        (ray_imports, "import os, ray.util as util"),
        (ray_imports, "def f():\n    from ray.exceptions import RayError"),
        (ray_imports, "if TYPE_CHECKING:\n    import ray"),
        (ray_imports, "importlib.import_module('ray')"),
        (unsafe_calls, "eval('1')"),
        (unsafe_calls, "torch.load('x', weights_only=True)"),
        (unsafe_calls, "np.load('x', allow_pickle=True)"),
        (wall_clocks, "time.time()"),
        (endless_waits, "thread.join()"),
        (endless_waits, "lock.acquire()"),
        (endless_waits, "subprocess.run(['ls'])"),
        (unsafe_starts, "subprocess.Popen([sys.executable, '-m', 'qfleet'])"),
        (unsafe_starts, "command = (sys.executable, '-c', code)"),
        (unsafe_starts, "command = [sys.executable]"),
        (multiprocessing_starts, "self.process = context.Process(target=f)\nself.process.start()"),
        (multiprocessing_starts, "process = Process(target=f)\nwith other():\n    process.start()"),
        (vague_names, "class RunManager: ..."),
        (vague_names, "class EnvBase: ..."),
        (direct_file_calls, "open('x')"),
        (direct_file_calls, "open(folder / 'status.json', 'w')"),
        (direct_file_calls, "logging.FileHandler(folder / 'logs' / 'run-0.log')"),
        (direct_file_calls, "(folder / 'best.json').unlink()"),
        (direct_file_calls, "os.open(path, os.O_RDONLY)"),
        (direct_file_calls, "shutil.rmtree(path)"),
        (long_functions, "def f():\n" + "    x = 1\n" * 60),
        (long_functions, 'def f():\n    """One line."""\n' + "    x = 1\n" * 60),
        (packed_assignments, "a, b = 1, 2"),
        (packed_assignments, "self.a, self.b = a, b"),
        (large_classes, "class Wide:\n" + "".join(f"    def f{each}(self): ...\n" for each in range(26))),
        (retired_names, "def last_words(): ..."),
        (retired_names, "self.feed_keeper = keeper"),
        (retired_names, "class CrowdPolicy: ..."),
    ],
)
def test_the_rule_catches(rule: Rule, code: str) -> None:
    assert list(rule(ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (ray_imports, "from qfleet.distributed.ray.driver import train_on_ray\nfrom .ray import x\nimport rays"),
        (unsafe_calls, "model.eval()"),
        (unsafe_calls, "np.load('x', allow_pickle=False)"),
        (wall_clocks, "time.monotonic()"),
        (endless_waits, "', '.join(words)"),
        (endless_waits, "thread.join(timeout=5)"),
        (endless_waits, "lock.acquire(blocking=False)"),
        (endless_waits, "subprocess.run(['ls'], timeout=5)"),
        (unsafe_starts, "subprocess.Popen([sys.executable, '-P', '-c', code])"),
        (unsafe_starts, "command = [sys.executable, '-I', '-S', file]"),
        (multiprocessing_starts, "with hidden_main(not main), theirs:\n    process.start()"),
        (multiprocessing_starts, "thread.start()"),
        (multiprocessing_starts, "process = WorkerProcess(context, name, f, setup, options)\nprocess.start()"),
        (vague_names, "class Learner: ..."),
        (packed_assignments, "a, b = b, a"),
        (packed_assignments, "a, b = f()"),
        (long_functions, 'def f():\n    """F.\n\n    Args:\n' + "        x: a number.\n" * 60 + '    """\n'),
        (retired_names, "def judgement(extend, order): ..."),
        (direct_file_calls, "open(open_inside(folder, 'x'), 'rb')"),
        (direct_file_calls, "os.open(os.devnull, os.O_WRONLY)"),
    ],
)
def test_the_rule_lets_pass(rule: Rule, code: str) -> None:
    assert not list(rule(ast.parse(code)))


def test_nothing_is_left_for_later() -> None:
    found = [str(path.relative_to(ROOT)) for path in SOURCES if UNFINISHED.search(path.read_text("utf-8"))]
    assert not found


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_folders_can_be_seen_at_once() -> None:
    folders = {path.parent for path in SOURCES}
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert not {name: size for name, size in sizes.items() if size > MAX_MODULES}


def test_file_names_say_something() -> None:
    assert not [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in VAGUE_FILES]


@pytest.mark.parametrize("module", ["qfleet", "qfleet.plan", "qfleet.cli"])
def test_plans_and_help_start_without_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'gymnasium', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_house_plan_and_the_layers_name_every_room() -> None:
    page = (ROOT / "docs/house.md").read_text("utf-8")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = re.findall(r"qfleet\.(\w+)", " ".join(contracts[0]["layers"]))
    single_files = [
        "api",
        "custom",
        "errors",
        "escape",
        "files",
        "frames",
        "given_plan",
        "heartbeat",
        "install",
        "run_object",
    ]
    assert sorted(layers) == sorted([*ROOMS, *single_files])
    assert sorted(re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE)) == ROOMS


def broken_links(page: Path) -> Iterator[str]:
    """Relative links that lead nowhere; code blocks do not count."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:") and not (page.parent / path).exists():
            yield f"{page.name}: {target}"


def test_links_between_pages_lead_somewhere() -> None:
    assert not [link for page in PAGES for link in broken_links(page)]


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#top) [b](gone.md) [c](https://example.org)\n```\n[d](code.md)\n```\n")
    assert list(broken_links(page)) == ["page.md: gone.md"]


def test_slow_suites_are_picked_by_path() -> None:
    def picked(changed: str) -> list[str]:
        command = [sys.executable, str(ROOT / "scripts/suites.py")]
        done = subprocess.run(command, input=changed, capture_output=True, text=True, timeout=30, check=True)
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert picked("LICENSE\n.gitignore\n") == []
    assert picked("README.md\ndocs/tour.md\n") == ["site"]
    assert picked("qfleet/watch/screen.py\n") == ["slow"]
    assert picked("qfleet/api.py\n") == ["slow", "site"]
    assert picked("qfleet/qlearn/td.py\n") == ["slow", "learning"]
    assert picked("qfleet/replay/store.py\n") == ["slow", "atari", "learning", "ray"]
    assert picked("tests/worlds/play.py\n")[-1] == "worlds"


def test_slow_suites_name_paths_that_exist_and_fit_in_ci() -> None:
    suites = tomllib.loads((ROOT / "scripts/suites.toml").read_text("utf-8"))["suite"]
    assert not [path for suite in suites for path in [*suite["paths"], *suite["tests"]] if not (ROOT / path).exists()]
    minutes = {suite["name"]: suite["minutes"] for suite in suites}
    # Of .ci/run's 40. Few changes call for these; where one does not fit beside the others, CI says so.
    few = {"hostile", "site", "spark", "stores", "worlds"}
    assert sum(limit for name, limit in minutes.items() if name not in few) <= 30
    assert all(minutes["slow"] + minutes[name] <= 30 for name in few)


def test_constraints_pin_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    files = (ROOT / "constraints.txt", ROOT / "tests/distributed/spark/constraints.txt")
    text = "".join(file.read_text("utf-8") for file in files)
    pins = re.findall(r"^([\w.-]+)==[\w.]+(?:;.*)?$", text, re.MULTILINE)
    names = {re.split(r"[\[>;= ]", line)[0] for line in asked} - {"qfleet"}

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    assert {plain(name) for name in names} <= {plain(pin) for pin in pins}


def threats() -> list[tuple[str, list[str]]]:
    """The rows of SECURITY.md's table: the threat, and the tests named beside it."""
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [(row[0], re.findall(r"`(tests/[^`]+)`", row[-1])) for row in rows if row[0] not in ("threat", "---")]


def test_every_threat_has_tests_that_exist() -> None:
    assert len(threats()) >= 12
    for threat, named in threats():
        assert named, f"no test beside: {threat}"
        for each in named:
            file, _, name = each.partition("::")
            assert (ROOT / file).is_file(), f"{threat}: {each}"
            assert not name or f"def {name}(" in (ROOT / file).read_text("utf-8"), f"{threat}: {each}"
