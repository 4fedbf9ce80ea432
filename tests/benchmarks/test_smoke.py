"""The benchmarks' own arithmetic: tables, medians, verdicts and the evaluator; nothing is trained here."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import cartpole, command, grid, learn, report, resume
from benchmarks.judge import Judge, play
from qfleet.plan import compose


class Counting:
    """Lane i pays 1 per step and ends after lengths[i] steps, then goes on paying as a new episode."""

    def __init__(self, lengths, paid=1.0):
        self.lengths, self.paid = np.array(lengths), paid
        self.num_envs, self.seeds = len(lengths), []

    def reset(self, *, seed=None):
        self.seeds.append(seed)
        self.time = 0
        return np.zeros((self.num_envs, 1)), {}

    def step(self, actions):
        assert actions.shape == (self.num_envs,)
        self.time += 1
        ended = self.time == self.lengths
        return np.zeros((self.num_envs, 1)), np.full(self.num_envs, self.paid), ended, np.zeros_like(ended), {}


def idle(obs):
    return np.zeros(len(obs), dtype=np.int64)


def test_play_counts_the_first_whole_episode_of_every_lane():
    assert play(Counting([3, 1, 7]), idle, seed=0).tolist() == [3.0, 1.0, 7.0]


def test_play_does_not_wait_for_ever():
    with pytest.raises(RuntimeError, match="1 of 2 episodes"):
        play(Counting([3, 100]), idle, seed=0, max_steps=10)


def test_play_takes_truncation_as_an_end_too():
    lanes = Counting([2, 4])
    honest = lanes.step
    lanes.step = lambda actions: (lambda o, r, t, u, i: (o, r, u, t, i))(*honest(actions))
    assert play(lanes, idle, seed=0).tolist() == [2.0, 4.0]


def test_judge_confirms_only_what_passed_the_screen():
    screen, confirm = Counting([5, 5]), Counting([9, 9, 9])
    assert Judge(screen, confirm, target=6, seed=1)(idle) == {"screen": 5.0, "mean": None, "verified": False}
    assert confirm.seeds == []
    assert Judge(screen, confirm, target=5, seed=1)(idle) == {"screen": 5.0, "mean": 9.0, "verified": True}


def test_judge_is_not_convinced_by_a_lucky_screen():
    assert Judge(Counting([9]), Counting([5, 5]), target=6, seed=1)(idle)["verified"] is False


def test_judge_uses_fresh_seeds_every_time():
    screen, confirm = Counting([2]), Counting([2])
    judge = Judge(screen, confirm, target=1, seed=3)
    for _ in range(3):
        judge(idle)
    assert len({*screen.seeds, *confirm.seeds}) == 6


def test_table_is_markdown():
    text = report.table(("a", "b"), [(1.25, None), ("x|y", 1234.56)])
    assert text == "| a | b |\n| --- | --- |\n| 1.25 | - |\n| x\\|y | 1,234.6 |\n"


def test_capped_median_counts_a_miss_as_the_limit():
    assert report.capped_median([3.0, None, 1.0], 240.0) == (3.0, False)
    assert report.capped_median([3.0, None, None], 240.0) == (240.0, True)


def test_interval_holds_the_mean_and_narrows():
    low, high = report.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1.0 < low < 3.0 < high < 5.0
    assert report.interval([2.0, 2.0]) == (2.0, 2.0)


def test_ratio_refuses_nonsense():
    assert report.ratio(2.0, 8.0) == 0.25
    with pytest.raises(ValueError, match="positive"):
        report.ratio(1.0, 0.0)


def test_save_writes_json_and_a_table_beside_it(tmp_path):
    path = report.save("some", {"runs": [1]}, "| a |\n", folder=tmp_path)
    record = json.loads(path.read_text())
    assert record["runs"] == [1]
    assert record["machine"]["cores"] >= 1
    assert "numpy" in record["machine"]["versions"]
    assert (tmp_path / "some.md").read_text().endswith("| a |\n")


def test_replace_section_touches_nothing_else(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# R\n\n<!-- bench:x -->\nold\n<!-- /bench:x -->\n\ntail\n")
    report.replace_section(page, "x", "new")
    report.replace_section(page, "y", "more")
    assert page.read_text() == (
        "# R\n\n<!-- bench:x -->\nnew\n<!-- /bench:x -->\n\ntail\n\n<!-- bench:y -->\nmore\n<!-- /bench:y -->\n"
    )


def test_run_stamps_rows_and_keeps_the_exit_code():
    code = (
        "import sys; print('{\"kind\": \"end\", \"n\": 1}'); print('words'); print('oh', file=sys.stderr); sys.exit(3)"
    )
    done = command.run([sys.executable, "-c", code], limit_seconds=60)
    assert [row for _, row in done.rows] == [{"kind": "end", "n": 1}]
    assert done.exit_code == 3
    assert done.errors == "oh\n"
    assert 0 < done.last("end")[0] <= done.seconds


def test_errors_do_not_tell_where_the_clone_lives():
    code = f"import sys; sys.stderr.write('in {report.ROOT}/qfleet')"
    assert command.run([sys.executable, "-c", code], limit_seconds=60).errors == "in ./qfleet"


def test_run_stops_at_the_limit():
    done = command.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_seconds=0.3)
    assert done.exit_code is None
    assert done.seconds < 20


def finished(mean=480.0, episodes=100, split="test"):
    row = {"kind": "eval", "split": split, "episodes": episodes, "mean": mean, "env_steps": 9}
    rows = [(1.0, {"kind": "progress"}), (2.5, row), (2.9, {"kind": "end", "env_steps": 9})]
    return command.Finished([], rows, seconds=3.0, exit_code=0)


@pytest.mark.parametrize(
    ("done", "seconds"),
    [
        (finished(), 2.5),
        (finished(mean=474.9), None),
        (finished(mean=500.0, episodes=20), None),
        (finished(split="validation"), None),
        (command.Finished([]), None),
    ],
)
def test_only_a_hundred_test_episodes_at_the_target_count(done, seconds):
    assert cartpole.verdict("q", 1, done).seconds == seconds


def test_learn_reads_the_test_row():
    run = learn.read("X", 3, finished(mean=210.5))
    assert (run.mean, run.episodes, run.env_steps) == (210.5, 100, 9)
    assert learn.read("X", 3, finished(split="validation")).mean is None


def races(**times):
    names = {"ours": cartpole.OURS, "first": cartpole.FIRST, "sb3": "Stable-Baselines3"}
    return [
        cartpole.Run(names[name], seed, value, 480.0, 1, 1, 0, "")
        for name, values in times.items()
        for seed, value in enumerate(values)
    ]


def test_summary_compares_medians_with_the_bars():
    rows = cartpole.summary(races(ours=[4, 5, 6], first=[12, 12, 12], sb3=[30, 90, 36]), 240.0)
    assert rows[0]["met"] is True
    assert rows[2]["ratios"] == {cartpole.OURS: 5 / 36, cartpole.FIRST: 12 / 36}
    assert rows[2]["met"] is True
    assert "<= 5 s" in cartpole.markdown(rows, 240.0)
    assert "<= 0.15, without cache <= 0.33" in cartpole.markdown(rows, 240.0)


@pytest.mark.parametrize(
    ("ours", "first", "own", "beside"),
    [(5.1, 9, False, True), (7, 9, False, False), (4, 13, True, False)],
)
def test_every_bar_of_the_race_counts(ours, first, own, beside):
    rows = cartpole.summary(races(ours=[ours] * 3, first=[first] * 3, sb3=[36] * 3), 240.0)
    assert (rows[0]["met"], rows[2]["met"]) == (own, beside)


def test_not_arriving_never_meets_the_bar():
    rows = cartpole.summary(races(ours=[1], first=[None], sb3=[None]), 0.1)
    assert rows[2]["met"] is False
    assert ">0.1" in cartpole.markdown(rows, 0.1)


def test_learn_needs_its_seeds():
    task = learn.Task("X", bar=200.0, may_miss=1, steps=100)
    runs = [learn.Run("X", seed, mean, 0, 0, 100, 100, 1.0, 0, "") for seed, mean in enumerate((210.0, 220.0, 100.0))]
    assert learn.judge(task, runs)["met"] is True
    assert learn.judge(learn.Task("X", bar=200.0, steps=100), runs)["met"] is False
    assert learn.judge(learn.Task("X", bar=200.0, may_miss=1, steps=99), runs)["met"] is False
    assert "2 of 3" in learn.markdown([learn.judge(task, runs)])


def make_run(folder, rows, files):
    checkpoint = folder / "checkpoints" / "step_000000000010"
    for name, data in {**files, "manifest.json": b"{}"}.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(data)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_equal_runs_differ_only_in_their_clocks(tmp_path):
    files = {"model.safetensors": b"m", "replay/0": b"r", "state.json": b'{"a": {"seconds": 1, "b": 2}}'}
    one = make_run(tmp_path / "one", [{"kind": "progress", "seconds": 1.0, "loss": 2.0}], files)
    again = {**files, "state.json": b'{"a": {"seconds": 9, "b": 2}}'}
    other = make_run(tmp_path / "other", [{"kind": "progress", "seconds": 7.0, "loss": 2.0}], again)
    assert resume.differences(one, other) == []


@pytest.mark.parametrize(
    ("rows", "changed"),
    [
        ([{"kind": "progress", "loss": 2.5}], {}),
        ([{"kind": "progress", "loss": 2.0}] * 2, {}),
        (None, {"model.safetensors": b"n"}),
        (None, {"replay/0": b"s"}),
        (None, {"replay/1": b"s"}),
        (None, {"state.json": b'{"b": 3}'}),
    ],
)
def test_every_other_difference_is_found(tmp_path, rows, changed):
    files = {"model.safetensors": b"m", "replay/0": b"r", "state.json": b'{"b": 2}'}
    usual = [{"kind": "progress", "loss": 2.0}]
    one = make_run(tmp_path / "one", usual, files)
    other = make_run(tmp_path / "other", rows or usual, {**files, **changed})
    assert len(resume.differences(one, other)) == 1


def test_where_a_kill_fell_is_read_from_what_it_left(tmp_path):
    assert resume.place(None, 5) == "before the run folder"
    assert resume.place(tmp_path, 5) == "while starting"
    status = tmp_path / "status.json"
    status.write_text('{"state": "running", "pid": 5}')
    assert resume.place(tmp_path, 5) == "before the first checkpoint"
    run = make_run(tmp_path, [], {"model.safetensors": b"m"})
    assert resume.place(run, 5) == "training"
    (run / "checkpoints" / ".tmp-1").mkdir()
    assert resume.place(run, 5) == "inside a save"
    assert resume.place(run, 6) == "while starting"


class Sleeping:
    """A process that ends by itself after so many looks."""

    def __init__(self, looks):
        self.looks, self.returncode = looks, None

    def poll(self):
        self.looks -= 1
        self.returncode = 0 if self.looks < 0 else None
        return self.returncode

    def wait(self, seconds):
        raise subprocess.TimeoutExpired("sleeping", seconds)


def test_a_kill_waits_for_its_step_and_gives_up_with_the_process(tmp_path):
    run = make_run(tmp_path / "run", [{"env_steps": 50}, {"env_steps": 100}], {})
    (run / "run.toml").touch()
    now, later = (resume.Moment(signal.SIGKILL, steps, 0.0) for steps in (100, 101))
    assert resume.wait_for(now, Sleeping(looks=5), tmp_path) is True
    assert resume.wait_for(later, Sleeping(looks=5), tmp_path) is False


# --- grids of tasks, presets and seeds ---


def test_a_grid_is_made_in_pieces(tmp_path, monkeypatch):
    made = []

    def train(cell, seed, extra, limit_seconds):
        made.append((cell.preset, seed))
        row = {"mean": 10.0 * seed, "low": 0.0, "high": 0.0, "env_steps": 100, "updates": 5}
        settings, curve = (*cell.settings, *extra), [(50, 1.0), (100, 10.0 * seed)]
        return grid.Run(cell.env, cell.preset, settings, seed, **row, seconds=1.0, exit_code=0, curve=curve)

    monkeypatch.setattr(grid, "train", train)
    cells = (grid.Cell("A-v0", "dqn", 15.0), grid.Cell("A-v0", "dqn", None, ("x=1",), title="A with x"))
    shown = grid.Grid("try", "A try", cells, seeds=2)
    for arguments in (["--seeds", "1"], [], []):
        monkeypatch.setattr(sys, "argv", ["try", "--jobs", "1", "--out", str(tmp_path), *arguments])
        grid.main(shown, None)
    assert made == [("dqn", 1), ("dqn", 1), ("dqn", 2), ("dqn", 2)]
    record = json.loads((tmp_path / "try.json").read_text())
    assert [line["seeds"] for line in record["summary"]] == [[10.0, 20.0], [10.0, 20.0]]
    assert [line["met"] for line in record["summary"]] == [True, None]
    assert [line["passed"] for line in record["summary"]] == [1, None]
    assert (tmp_path / "try.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["minatar", "presets", "recurrent", "control", "exploration", "pong", "precision"])
def test_every_grid_is_a_sound_plan(name):
    from importlib import import_module

    shown = import_module(f"benchmarks.{name}").GRID
    assert shown.name == name
    for cell in shown.cells:
        compose(cell.env, cell.preset, overrides=[(*each.split("=", 1), "command line") for each in cell.settings])


def test_a_grid_trains_by_the_command_line_and_goes_on_with_what_was_cut_short(tmp_path, monkeypatch):
    """The real thing, as small as it gets: MinAtar's DQN for a few hundred steps."""
    from benchmarks import minatar

    monkeypatch.setattr(grid, "UNFINISHED", tmp_path)
    cell, small = minatar.GRID.cells[0], ["algo.learn_start_steps=100", "eval.test_episodes=1"]
    small += ["eval.episodes=1", "eval.every_steps=100"]
    asked = [*cell.settings, "until.steps=200", *small]
    folder = grid.unfinished(cell, 1, asked)
    assert command.run(grid.train_or_resume(cell, 1, asked, folder), 120.0).exit_code == 0
    run = grid.train(cell, 1, ["until.steps=300", *small], 120.0)
    assert run.exit_code == 0, run.errors
    assert run.mean is not None
    assert run.updates > 0
    assert [steps // 100 for steps, _ in run.curve] == [1, 2, 3]  # those of the first piece too
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_is_looked_at_while_a_run_goes_on():
    from benchmarks import flat

    found = flat.measure(10.0, every_seconds=0.5)
    assert found["exit_code"] == 0
    assert len(found["curve"]) >= 10
    assert 1e8 < found["late_bytes"] < 1e10
