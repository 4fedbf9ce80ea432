"""`qfleet eval --variants FILE`: a table of worlds; one that fails, or ends its process, does not lose the others."""

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from qfleet.cli.entry import run_env_code
from qfleet.cli.output import INTERRUPTED, echo, echo_error, echo_json, echo_table, echo_warnings
from qfleet.errors import QfleetError
from qfleet.plan import read_toml

if TYPE_CHECKING:
    from qfleet.run_object import Run
    from qfleet.training.evaluation.variants import Variant

Row = dict[str, Any]
READY = {"ready": True}  # the first line of a process: the run was loaded
ENV_FAILED = 4


def evaluate_file(
    load: "Callable[[], Run]",
    file: str,
    base: "Variant",
    episodes: int,
    seed: int | None,
    *,
    trusted: bool,
    json: bool,
) -> int:
    """Evaluate the policy in every variant of a file, print one table, and return the exit code.

    `base` is what --env and settings say: variants differ from it.
    """
    variants = _read_file(file, base, trusted)
    rows, code = _evaluate_all(variants, partial(_work, load, episodes, seed))
    if code is not None:
        return code
    from qfleet.training.evaluation.variants import with_differences

    rows = with_differences(rows)
    if json:
        echo_json(rows)
    else:
        _print_table(rows)
    failed = [row for row in rows if "error" in row]
    for row in failed:
        echo_error(QfleetError(f"{row['name']}: {row['error']}", row["why"], row["fix"]))
    return max((row["exit_code"] for row in failed), default=0)


def _read_file(file: str, base: "Variant", trusted: bool) -> "list[Variant]":
    from qfleet.training.evaluation.variants import OWN_WORLD, on_top_of, read_variants, refuse_named_code

    variants = read_variants(read_toml(file, "variants"), file)
    if not trusted:
        refuse_named_code(variants, file)
    return [OWN_WORLD, *(on_top_of(base, variant) for variant in variants)]


def _evaluate_all(
    variants: "Sequence[Variant]", work: "Callable[[Sequence[Variant], IO[bytes]], int]"
) -> tuple[list[Row], int | None]:
    """A row for each variant; a process that ends early is replaced by another for the rest.

    The second value is an exit code if the run itself cannot be evaluated, or if the user has ended it.
    """
    rows: list[Row] = []
    while len(rows) < len(variants):
        with tempfile.TemporaryFile() as file:
            code = run_env_code(partial(work, variants[len(rows) :], file))
            file.seek(0)
            lines = [json.loads(line) for line in file if line.endswith(b"\n")]
        if lines[:1] != [READY] or code >= INTERRUPTED:
            return rows, code
        rows += lines[1:]
        if len(rows) < len(variants):
            rows.append(_lost_row(variants[len(rows)].name, code))
    return rows, None


def _lost_row(name: str, code: int) -> Row:
    why = "What the environment did is printed above."
    parts = {"error": "it ended the process that evaluated it", "why": why, "fix": "Mend the environment."}
    return {"kind": "eval", "name": name, **parts, "exit_code": code or ENV_FAILED}


def _work(load: "Callable[[], Run]", episodes: int, seed: int | None, variants: Any, file: IO[bytes]) -> int:
    """What a process does: load the run, and write a row for each variant."""

    def add(row: Row) -> None:
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()

    with echo_warnings():
        trained = load().trained()
        add(READY)
        trained.evaluate_each(variants, episodes, seed, add)
    return 0


def _print_table(rows: Sequence[Row]) -> None:
    from qfleet.cli.policies.evaluate import where_text

    header = ("variant", "mean", "95 % interval", "episodes", "difference", "environment")
    echo_table([(row["name"], *_cells(row), where_text(row) if "env" in row else "-") for row in rows], header)
    cut = sum(row.get("cut_episodes", 0) for row in rows)
    if cut:
        echo(f"cut: {cut} episodes had not ended after eval.max_steps steps")


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return ("failed", "-", "-", "-")
    interval = f"{row['low']:.2f} to {row['high']:.2f}"
    difference = f"{row['difference']:+.2f}" if "difference" in row else "-"
    if row.get("difference_low") is not None:
        difference += f" [{row['difference_low']:+.2f}, {row['difference_high']:+.2f}]"
    return (f"{row['mean']:.2f}", interval, str(row["episodes"]), difference)
