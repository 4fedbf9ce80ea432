"""card.md: a summary of a run on one page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfleet.escape import escaped
from qfleet.watch.run_files import write_file
from qfleet.watch.run_listing import flatten_tables, show_run
from qfleet.watch.text import number, time_line

HIGHLIGHTS = (
    "env.id",
    "seed",
    "algo.rule.type",
    "algo.n_step",
    "algo.discount",
    "algo.batch_size",
    "net.torso.type",
    "net.head.type",
    "net.dueling",
    "optim.type",
    "optim.learning_rate",
    "replay.capacity",
    "replay.sampler.type",
    "replay.samples_per_insert",
)

LENGTH = "length_mean"
MOST_COLUMNS = 9


def write_card(run_dir: Path | str) -> Path:
    """Write card.md into the run directory: score, plan, versions, commands."""
    path = Path(run_dir)
    run = show_run(path)
    plan = flatten_tables(run["plan"])
    sections = [
        f"# {_cell(run['name'])}\n\n{_cell(run['env'])}, {_cell(run['state'])} after {number(run['steps'])} steps.",
        "## Score\n\n" + _scores(run),
        *_not_exact(run),
        "## Plan\n\n" + _table(("setting", "value"), [(f"`{key}`", plan[key]) for key in HIGHLIGHTS if key in plan]),
        *_time(run),
        "## Made with\n\n" + _table(("package", "version"), list(_versions(run).items())),
        f"## Commands\n\n```\nqfleet eval {path.name}\nqfleet plot {path.name}\nqfleet resume {path.name}\n```",
    ]
    write_file(path / "card.md", ("\n\n".join(sections) + "\n").encode(errors="backslashreplace"))
    return path / "card.md"


def _scores(run: Mapping[str, Any]) -> str:
    rows = (("test", run["status"].get("score")), ("best", run["best_row"]), ("last evaluation", run["last_eval"]))
    found = [(name, row) for name, row in rows if isinstance(row, Mapping) and isinstance(row.get("mean"), int | float)]
    if not found:
        return "Not evaluated yet."
    more = _more_columns([row for _, row in found])
    keys = ("mean", "low", "high", "median", "iqm", "episodes", *more)
    table = [(name, *(_number(row.get(key)) for key in keys)) for name, row in found]
    return _table(("", "mean", "low", "high", "median", "IQM", "episodes", *more.values()), table) + (
        "\n\nGreedy policy, whole episodes, raw rewards; low and high are the 95 % bootstrap interval of the mean."
        + _chosen(run)
    )


def _more_columns(rows: list[Mapping[str, Any]]) -> dict[str, str]:
    """The length of episodes, if the run recorded it, and numbers of log.info; their titles by name."""
    names = dict.fromkeys(name for row in rows for name in row if name == LENGTH or name.startswith("info."))
    return {name: "length" if name == LENGTH else name for name in list(names)[:MOST_COLUMNS]}


def _number(value: object) -> str:
    return number(value) if value is None or isinstance(value, int | float) else number(None)


def _chosen(run: Mapping[str, Any]) -> str:
    """How many validations the best was chosen from: the more, the larger the selection bias."""
    count = run["status"].get("best_of")
    known = isinstance(count, int) and count > 0 and run["best_row"]
    return f" Best of {number(count)} validations; the best one is tested." if known else ""


def _not_exact(run: Mapping[str, Any]) -> list[str]:
    """The section of reasons why plan and seed do not reproduce this run, if any."""
    reasons = run["status"].get("not_exact")
    if not isinstance(reasons, list) or not reasons:
        return []
    return ["## Not exact\n\n" + "\n".join(f"- {_cell(reason)}" for reason in reasons)]


def _time(run: Mapping[str, Any]) -> list[str]:
    profile = run["status"].get("profile")
    return [f"## Time\n\n{_cell(time_line(profile))}"] if isinstance(profile, Mapping) else []


def _versions(run: Mapping[str, Any]) -> dict[str, Any]:
    versions = run["provenance"].get("versions")
    return dict(versions) if isinstance(versions, Mapping) else {}


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return escaped(str(value).replace("\n", " ")).replace("|", "\\|")
