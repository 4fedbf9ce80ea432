import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.errors import StorageError, UsageError
from qfleet.plan import (
    compose,
    diff,
    json_schema,
    make_plan,
    plan_hash,
    read_plan,
    read_tables_in,
    read_toml,
    to_toml,
    write_plan,
)
from qfleet.plan.schema import (
    Adam,
    Algo,
    AverageTarget,
    BufferReplay,
    ConstantEpsilon,
    CopyTarget,
    Env,
    ExponentialEpsilon,
    MlpTorso,
    NatureTorso,
    Net,
    Plan,
    PrioritizedSampler,
    Rmsprop,
    Until,
)

FRACTION = st.floats(0, 1)
RATE = st.floats(1e-300, 1e300)
COUNT = st.integers(1, 2**63 - 1)
SCALAR = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLANS = st.builds(
    Plan,
    env=st.builds(
        Env,
        id=st.just("X-v0"),
        bins=st.none() | st.integers(2, 99),
        options=st.dictionaries(TEXT, SCALAR | TEXT, max_size=3),
    ),
    algo=st.builds(
        Algo,
        target=st.builds(CopyTarget, every_updates=COUNT) | st.builds(AverageTarget, tau=st.floats(1e-9, 1)),
        explore=st.builds(ConstantEpsilon, epsilon=FRACTION) | st.builds(ExponentialEpsilon, end=FRACTION),
    ),
    optim=st.builds(Adam, learning_rate=RATE, clip_norm=st.none() | RATE) | st.builds(Rmsprop, eps=RATE),
    net=st.builds(
        Net,
        torso=st.none()
        | st.builds(MlpTorso, sizes=st.lists(st.integers(1, 1_000_000), max_size=3).map(tuple))
        | st.builds(NatureTorso),
        dueling=st.booleans(),
    ),
    replay=st.builds(BufferReplay, sampler=st.builds(PrioritizedSampler, alpha=FRACTION), samples_per_insert=RATE),
    until=st.builds(
        Until, seconds=st.none() | RATE, score=st.none() | st.floats(allow_nan=False, allow_infinity=False)
    ),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 400 + "b = 1",
        "[" + "a." * 400 + "b]\nc = 1",
        "a = " + "[" * 2_000,
        "a = " + "{b = " * 200 + "1" + "}" * 200,
    ],
)
def test_a_file_of_tables_within_tables_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    for read in (lambda: read_toml(tmp_path / "run.toml"), lambda: read_tables_in(tmp_path, "run.toml")):
        with pytest.raises(UsageError, match=r"is not (a plan|TOML)"):
            read()


@settings(max_examples=60)
@given(PLANS)
def test_a_written_plan_reads_back_equal(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        write_plan(plan, file)
        again = read_plan(file)
        assert again == plan
        assert plan_hash(again) == plan_hash(plan)
        assert [path.name for path in Path(folder).iterdir()] == ["run.toml"]


@pytest.mark.parametrize("preset", [None, "dqn", "per"])
def test_a_run_can_be_started_again_from_its_plan(preset: str | None, tmp_path: Path) -> None:
    plan = make_plan("CartPole-v1", preset, {"until.steps": 2_000, "optim.clip_norm": None, "net.torso.type": "none"})
    write_plan(plan, tmp_path / "run.toml")
    assert compose(file=tmp_path / "run.toml").plan == plan


def test_different_plans_have_different_hashes() -> None:
    plan = make_plan("CartPole-v1")
    assert plan_hash(plan) == plan_hash(make_plan("CartPole-v1", overrides={"seed": 0}))
    assert plan_hash(plan) != plan_hash(make_plan("CartPole-v1", overrides={"seed": 1}))
    options = [make_plan("X-v0", overrides={"env.options": made}) for made in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert plan_hash(options[0]) == plan_hash(options[1])


def test_diff_names_each_difference() -> None:
    a = make_plan("CartPole-v1", overrides={"algo.target.type": "copy"})
    b = make_plan("CartPole-v1", overrides={"algo.target.type": "average", "algo.target.tau": 0.5, "seed": 2})
    assert diff(a, a) == []
    assert diff(a, b) == [
        ("algo.target.type", "copy", "average"),
        ("algo.target.every_updates", 250, None),
        ("seed", 0, 2),
        ("algo.target.tau", None, 0.5),
    ]


def test_a_plan_without_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 1\n")
    with pytest.raises(UsageError, match="names no environment"):
        read_plan(tmp_path / "run.toml")


def test_a_broken_disk_is_a_storage_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        write_plan(make_plan("CartPole-v1"), tmp_path / "nowhere" / "run.toml")
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        write_plan(make_plan("CartPole-v1"), tmp_path / "run.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_reading_never_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.toml")
    with pytest.raises(UsageError, match="there is no plan file"):
        read_toml(tmp_path / "plan.toml")


def test_schema_describes_what_files_hold() -> None:
    made = json_schema()
    json.dumps(made)
    net = made["$defs"]["Net"]["properties"]["torso"]
    assert {"const": "none"} in net["anyOf"]
    assert net["default"] == "none"
    assert "required" not in made["$defs"]["Plan"]
    assert made["$defs"]["Algo"]["additionalProperties"] is False
    assert '"type": "null"' not in json.dumps(made)


def test_unset_values_are_none_in_toml() -> None:
    text = to_toml(make_plan("CartPole-v1", overrides={"optim.clip_norm": None, "net.torso": None}))
    assert 'clip_norm = "none"' in text
    assert 'torso = "none"' in text
