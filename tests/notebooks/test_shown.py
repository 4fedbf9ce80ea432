"""Plans, runs, groups and comparisons as text, HTML, frames and figures."""

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from qfleet import Group, Plan, Run, compare
from qfleet.errors import UsageError
from qfleet.install import install_command
from qfleet.plan.presets.catalog import algorithm_presets
from qfleet.plan.schema import Env
from qfleet.watch.notebook import curve as curves
from qfleet.watch.notebook import frame
from qfleet.watch.notebook.curve import run_curve, svg, thinned
from tests.support.runs import JUDGED, small, trained
from tests.watch.test_pictures import make_run, without

EVIL = "<img src=x onerror=alert(1)>\x1b[2J\"'&"


class Tags(html.parser.HTMLParser):
    """The tags and attributes of a page, and whether all are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def safe(page: str) -> bool:
    """Is a page closed, without scripts, links and handlers?"""
    tags = Tags(page)
    known = {"div", "b", "table", "tr", "td", "th", "details", "summary", "svg", "polyline", "polygon"}
    allowed = {"style", "width", "height", "viewbox", "role", "aria-label"}
    return not tags.open and tags.found <= known and tags.attributes <= allowed and "\x1b" not in page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(small(JUDGED), tmp_path_factory.mktemp("runs"), progress=False)


def fake_group(folder: Path, heights: tuple[float, ...] = (100.0, 200.0)) -> Group:
    """A group on disk whose members have rows and scores."""
    folder.mkdir(parents=True)
    for seed, height in enumerate(heights):
        member = make_run(folder / f"seed-{seed}", height=height)
        (member / "run.toml").write_text(f'seed = {seed}\n[env]\nid = "CartPole-v1"\n')
        score = {"mean": height, "low": height - 1, "high": height + 1, "episodes": 9}
        (member / "status.json").write_text(json.dumps({"state": "done", "score": score, "env_steps": 20_000}))
    members = [{"name": f"seed-{seed}", "seed": seed, "state": "done"} for seed in range(len(heights))]
    (folder / "group.json").write_text(json.dumps({"state": "done", "reason": "all", "env": "E", "members": members}))
    return Group(folder)


# Plans


def test_a_plan_prints_as_the_call_that_makes_it() -> None:
    plan = Plan.of("CartPole-v1", overrides={"algo.n_step": 3, "net.torso.sizes": (8, 8)})
    assert repr(plan) == "Plan.of('CartPole-v1', overrides={'algo.n_step': 3, 'net.torso.sizes': (8, 8)})"
    assert repr(Plan.of("CartPole-v1")) == "Plan.of('CartPole-v1')"
    lines = str(plan).splitlines()
    assert lines[0].startswith("CartPole-v1: Double DQN, 3-step returns")
    assert lines[1:] == ["  algo.n_step=3", "  net.torso.sizes=[8, 8]"]


@pytest.mark.parametrize("preset", [name for name in algorithm_presets() if name != "r2d2"])  # too long for CartPole
def test_what_a_plan_prints_makes_it_again(preset: str) -> None:
    plan = Plan.of("CartPole-v1", preset, {"replay.path": "data"} if preset in ("cql", "bc") else {})
    assert eval(repr(plan), {"Plan": Plan}) == plan  # noqa: S307  our own text


def test_a_plan_in_a_notebook() -> None:
    page = Plan.of("CartPole-v1", overrides={"until.steps": 999})._repr_html_()
    assert safe(page)
    differs, _, every = page.partition("<details>")
    assert "until.steps" in differs
    assert "999" in differs
    assert "50000" in differs  # the default
    assert "algo.n_step" not in differs
    assert "algo.n_step" in every


def test_a_plan_hides_secrets_and_escapes_what_it_shows() -> None:
    plan = Plan(env=Env(id=EVIL, options={"api_key": "HUSH", "name": EVIL}))  # as from a stranger's run.toml
    page = plan._repr_html_()
    assert safe(page)
    assert "HUSH" not in page + repr(plan) + str(plan)
    assert "\x1b" not in repr(plan) + str(plan)


# Runs


def test_a_run_in_a_notebook(run: Run) -> None:
    page = run._repr_html_()
    assert safe(page)
    for part in ("done: reached until.steps=300", "on test episodes", "300, ", "yes: the plan", "<svg", "CartPole-v1"):
        assert part in page, part
    assert repr(run).startswith(f"Run({str(run.path)!r}: done, score ")


def test_a_run_of_a_stranger_is_escaped(tmp_path: Path, run: Run) -> None:
    folder = make_run(tmp_path / "run")
    status: dict[str, Any] = dict.fromkeys(("state", "reason", "resume"), EVIL)
    status |= {"not_exact": [EVIL], "exit_code": 1, "score": {"mean": EVIL}}
    (folder / "status.json").write_text(json.dumps(status))
    foreign = Run(folder, Plan(env=Env(id=EVIL)), run.policy)
    assert safe(foreign._repr_html_())
    assert "\x1b" not in repr(foreign)


def test_a_run_whose_files_are_gone_or_odd_is_shown(tmp_path: Path, run: Run) -> None:
    for name, text in (("gone", None), ("odd", '{"score": [], "best": 3, "env_steps": "x", "seconds": {}}')):
        folder = tmp_path / name
        if text is not None:
            folder.mkdir()
            (folder / "status.json").write_text(text)
        shown = Run(folder, run.plan, run.policy)
        assert safe(shown._repr_html_())
        assert str(folder) in repr(shown)


def test_the_curve_shows_evaluations_with_their_interval(tmp_path: Path) -> None:
    page = run_curve(make_run(tmp_path / "a"))
    assert page.count("<polyline") == 1
    assert page.count("<polygon") == 1
    assert "evaluation: 20.0 to 105.0 over 20,000 steps" in page
    training = run_curve(make_run(tmp_path / "b", evaluations=False))
    assert "return of training episodes" in training
    assert "<polygon" not in training


def test_a_curve_is_short_and_reads_no_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, values = thinned(([float(step) for step in range(10_001)], [0.0] * 10_001))
    assert len(steps) == len(values) <= 200
    assert steps[-1] == 10_000.0
    assert svg([([1.0], [1.0])], "one point") == ""
    folder = make_run(tmp_path / "a")
    monkeypatch.setattr(curves, "MOST_BYTES", 100)
    assert run_curve(folder) == ""


# Groups and comparisons


def test_a_group_in_a_notebook(tmp_path: Path) -> None:
    group = fake_group(tmp_path / "g")
    page = group._repr_html_()
    assert safe(page)
    assert page.count("<polyline") == 2
    assert "100.0 [99.0, 101.0]" in page
    assert repr(group) == f"Group({str(group.path)!r}: done, all)"


def test_a_group_of_a_stranger_is_escaped_and_leads_nowhere(tmp_path: Path) -> None:
    group = fake_group(tmp_path / "g")
    make_run(tmp_path / "secret")
    (tmp_path / "secret/status.json").write_text('{"score": {"mean": 4242.0}}')
    entries = [{"name": name, "state": EVIL, "reason": EVIL} for name in (EVIL, "../secret", "seed-0")]
    (group.path / "group.json").write_text(json.dumps({"state": EVIL, "env": EVIL, "members": [*entries, 3, None]}))
    page = group._repr_html_()
    assert safe(page)
    assert "4,242" not in page
    assert "\x1b" not in repr(group)


def test_a_comparison_in_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fake_group(tmp_path / "a")
    fake_group(tmp_path / "b", (1.0, 2.0))
    found = compare("a", "b", out=tmp_path)
    page = found._repr_html_()
    assert safe(page)
    assert "P(a &gt; b)" in page
    assert "150.0 [100.0, 200.0]" in page
    assert len(found.plot(tmp_path / "both.png").axes) == 1
    assert (tmp_path / "both.png").stat().st_size > 1_000


# Frames


def test_a_frame_has_every_row_and_flat_columns(run: Run) -> None:
    pytest.importorskip("pandas")
    whole = run.frame()
    assert len(whole) == len(run.metrics)
    evaluations = run.frame("eval")
    assert evaluations["mean"].tolist() == [row["mean"] for row in run.metrics if row["kind"] == "eval"]
    assert "last_eval.mean" in evaluations.columns
    assert set(run.frame("progress")["kind"]) == {"progress"}


def test_a_frame_of_a_group_names_its_members(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    rows = fake_group(tmp_path / "g").frame("eval")
    assert rows.columns[:2].tolist() == ["member", "seed"]
    assert rows.groupby("seed")["mean"].max().to_dict() == {0: 100.0, 1: 200.0}


def test_a_kind_that_does_not_exist_is_refused(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(UsageError, match="no rows of kind 'evals'") as caught:
        run.frame("evals")
    assert "end, eval, progress" in caught.value.why
    assert len(Run(tmp_path, run.plan, run.policy).frame("eval")) == 0  # it may come


def test_a_frame_without_pandas(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pandas")
    with pytest.raises(UsageError, match="pandas") as caught:
        run.frame()
    assert caught.value.fix == install_command("pandas")


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("pandas")
    rows = (json.dumps({"kind": "x", **{f"{row}-{index}": 1 for index in range(20)}}) for row in range(200))
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    with pytest.raises(UsageError, match="too large for a DataFrame"):
        Run(tmp_path, run.plan, run.policy).frame()
    assert frame.MOST_COLUMNS < 200 * 20


# Figures


def test_a_figure_shows_itself_in_a_notebook(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure: Any = run.plot()
    assert figure._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list(tmp_path.iterdir())
    run.plot(tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
    with pytest.raises(UsageError, match="cannot draw into"):
        run.plot(tmp_path / "x.exe")


def test_a_group_is_drawn_as_one_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = fake_group(tmp_path / "g").plot().axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["g (IQM of 2 runs, 95 % interval)"]
