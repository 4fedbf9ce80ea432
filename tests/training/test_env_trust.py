"""Which runs may name code: the key, and what it signs."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qfleet import load
from qfleet.cli import main
from qfleet.errors import StorageError, UsageError
from qfleet.plan import Plan, make_plan, to_toml, trusted_settings, write_plan
from qfleet.plan.schema import Env
from qfleet.plan.trusted import TRUSTED
from qfleet.testing import toys
from qfleet.training import env_trust
from qfleet.training.env_trust import require_places, require_trust, sign
from tests.support.runs import small, status, train_arguments, trained

MINE = Env(id="mine.py:Mine", options={"size": 3, "colour": "red"})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory in the folder the commands are given in."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    return folder


def trusted(run: Path, env: Env) -> bool:
    try:
        require_trust(run, env, False)
    except UsageError as error:
        return "--trust-env" not in error.fix
    return True


def key_file(home: Path) -> Path:
    return home / "qfleet" / "trust.key"


def test_what_this_user_signed_is_trusted_and_nothing_else(run: Path) -> None:
    assert not trusted(run, MINE)
    sign(run, MINE)
    assert trusted(run, MINE)
    require_trust(run, Env(id="other.py:Mine"), True)


def test_names_that_are_no_code_need_no_proof(run: Path) -> None:
    sign(run, Env(id="CartPole-v1"))
    assert os.listdir(run) == []
    assert trusted(run, Env(id="CartPole-v1", options={"max_episode_steps": 3, "map_name": "8x8"}))


@pytest.mark.parametrize("value", ["/etc/passwd", "module:Id", "a\\b", "https://host/x"])
def test_options_that_name_a_file_an_address_or_a_module_need_a_proof(run: Path, value: str) -> None:
    env = Env(id="Ant-v5", options={"xml_file": value})
    assert not trusted(run, env)
    sign(run, env)
    assert trusted(run, env)


@pytest.mark.parametrize(
    "other",
    [
        Env(id="mine.py:Other", options=MINE.options),
        Env(id="theirs.py:Mine", options=MINE.options),
        Env(id="mine:Mine", options=MINE.options),
        Env(id=MINE.id, options={**MINE.options, "size": 4}),
        Env(id=MINE.id, options={**MINE.options, "size": 3.0}),
        Env(id=MINE.id, options={"size": 3}),
        Env(id=MINE.id),
    ],
)
def test_another_id_or_other_options_are_not_trusted(run: Path, other: Env) -> None:
    sign(run, MINE)
    assert not trusted(run, other)


WRAPPED = Env(id="CartPole-v1", wrappers=("mine.py:W(a=1)", "gymnasium.wrappers:TimeLimit(max_episode_steps=3)"))


def test_wrappers_need_a_proof(run: Path) -> None:
    assert not trusted(run, WRAPPED)
    sign(run, WRAPPED)
    assert trusted(run, WRAPPED)
    with pytest.raises(UsageError, match=r"names code to run: env\.wrappers=\[other:W\]"):
        require_trust(run, Env(id="CartPole-v1", wrappers=("other:W",)), False)


@pytest.mark.parametrize(
    "wrappers",
    [
        WRAPPED.wrappers[:1],
        WRAPPED.wrappers[::-1],
        ("mine.py:W(a=2)", WRAPPED.wrappers[1]),
        ("theirs.py:W(a=1)", WRAPPED.wrappers[1]),
        ("mine.py:V(a=1)", WRAPPED.wrappers[1]),
    ],
)
def test_other_wrappers_are_not_trusted(run: Path, wrappers: tuple[str, ...]) -> None:
    sign(run, WRAPPED)
    assert not trusted(run, Env(id=WRAPPED.id, wrappers=wrappers))


def test_a_wrapper_is_signed_where_it_lies(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Env(id="CartPole-v1", wrappers=("wrappers_of_mine:W",))
    for folder in (tmp_path, tmp_path / "elsewhere"):
        folder.mkdir(exist_ok=True)
        (folder / "wrappers_of_mine.py").write_text("raise SystemExit('trust must not import what it asks about')\n")
    sign(run, named)
    sign_of_file = Env(id="CartPole-v1", wrappers=("../mine.py:W(a=1)", WRAPPED.wrappers[1]))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not trusted(run, named)
    monkeypatch.chdir(tmp_path)
    assert trusted(run, named)
    sign(run, WRAPPED)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert trusted(run, sign_of_file)
    assert not trusted(run, WRAPPED)  # another file of the same name


def test_an_environment_of_ones_own_does_not_make_a_foreign_runs_wrappers_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wraps.py").write_text("def W(env):\n    return env\n")
    plan = small({"until.steps": 120, "env.wrappers": f"{tmp_path}/wraps.py:W"}, "Constant")
    path = trained(plan, tmp_path / "runs", env=toys.Constant).path
    load(path, env=toys.Constant)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(UsageError, match="names code to run"):
        load(path, env=toys.Constant)
    load(path, env=toys.Constant, trust_env=True)


def test_settings_that_name_no_code_are_not_signed(run: Path) -> None:
    sign(run, MINE)
    assert trusted(run, Env(id=MINE.id, options=dict(reversed(MINE.options.items())), num=3))


def test_a_file_is_signed_where_it_lies(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign(run, MINE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not trusted(run, MINE)  # another file of the same name
    assert trusted(run, Env(id="../mine.py:Mine", options=MINE.options))
    assert trusted(run, Env(id=f"{tmp_path}/mine.py:Mine", options=MINE.options))


def test_a_module_is_signed_where_it_lies(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Env(id="walks_of_mine:Walk-v0")
    for folder in (tmp_path, tmp_path / "elsewhere"):
        folder.mkdir(exist_ok=True)
        (folder / "walks_of_mine.py").write_text("raise SystemExit('trust must not import what it asks about')\n")
    sign(run, named)
    assert trusted(run, named)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="names code to run") as caught:
        require_trust(run, named, False)
    assert str(tmp_path / "elsewhere" / "walks_of_mine.py") in caught.value.why
    assert "--trust-env" in caught.value.fix
    monkeypatch.chdir(tmp_path)
    assert trusted(run, named)


def test_a_module_of_the_same_name_that_comes_first_is_not_trusted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Env(id="walks_of_mine:Walk-v0")
    (tmp_path / "walks_of_mine.py").touch()
    sign(run, named)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "walks_of_mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "planted")
    assert not trusted(run, named)


OWN = """
from qfleet.testing.toys import Random

class Mine(Random):
    pass
"""


def test_an_own_environment_may_lie_in_a_folder_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my envs").mkdir()
    (tmp_path / "my envs" / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    command = train_arguments(tmp_path / "runs", {"until.steps": 90}, "my envs/mine.py:Mine")
    assert main([*command, "--name", "a"]) == 0
    assert main(["resume", "runs/a", "--steps", "100", "--quiet"]) == 0
    # As run.toml says: it is repeated by naming the code again.
    told = (tmp_path / "runs" / "a" / "run.toml").read_text().partition("\n\n")[0]
    assert "qfleet train my_env.py:MyEnv --plan run.toml" in told
    assert main(["train", "--plan", "runs/a/run.toml", "--quiet"]) == 2
    again = ["train", "my envs/mine.py:Mine", "--plan", "runs/a/run.toml", "--quiet", "--name", "b"]
    assert main(again) == 0
    a, b = ((tmp_path / "runs" / name / "run.toml").read_text() for name in "ab")
    assert a == b


@pytest.mark.parametrize("name", ["b", "elsewhere/a"])
def test_a_copy_of_a_run_is_not_trusted(run: Path, name: str) -> None:
    sign(run, MINE)
    copy = run.parent / name
    copy.mkdir(parents=True)
    (copy / env_trust.FILE).write_bytes((run / env_trust.FILE).read_bytes())
    assert not trusted(copy, MINE)


@pytest.mark.parametrize("proof", ["", "é" * 64, "\ud800", "0" * 64, 7, None, ["x"], {}])
def test_a_malformed_proof_is_refused(run: Path, proof: Any) -> None:
    sign(run, MINE)
    (run / env_trust.FILE).write_text(json.dumps({"proof": proof}))
    assert not trusted(run, MINE)


def test_the_key_is_private_complete_and_the_only_file(run: Path, own_home: Path) -> None:
    sign(run, MINE)
    assert os.listdir(own_home / "qfleet") == ["trust.key"]
    assert key_file(own_home).stat().st_mode & 0o777 == 0o600
    assert len(key_file(own_home).read_bytes()) == 32
    kept = env_trust.key()
    assert kept == env_trust.key() == key_file(own_home).read_bytes()


@pytest.mark.usefixtures("own_home")
def test_processes_that_make_the_key_at_once_get_the_same_one() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: env_trust.key(), range(64), timeout=30))) == 1


def test_a_key_gets_its_name_only_when_complete(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(key_file(own_home).exists()))
    env_trust.key()
    assert seen == [False, True]  # the bytes before it has its name, the name after


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_damaged_key_says_to_delete_it(run: Path, own_home: Path, size: int) -> None:
    sign(run, MINE)
    key_file(own_home).write_bytes(b"x" * size)
    with pytest.raises(StorageError, match="is damaged") as caught:
        sign(run, MINE)
    assert caught.value.fix.startswith("Delete it")
    with pytest.raises(StorageError, match="is damaged"):
        require_trust(run, MINE, False)
    key_file(own_home).unlink()
    assert not trusted(run, MINE)
    sign(run, MINE)
    assert trusted(run, MINE)


def test_a_key_that_is_a_link_or_cannot_be_made_is_a_storage_error(own_home: Path) -> None:
    (own_home / "qfleet").mkdir()
    (own_home / "known").write_bytes(b"x" * 32)
    key_file(own_home).symlink_to(own_home / "known")
    with pytest.raises(StorageError, match=r"trust\.key"):
        env_trust.key()
    key_file(own_home).unlink()
    (own_home / "qfleet").rmdir()
    (own_home / "qfleet").write_text("in the way")
    with pytest.raises(StorageError, match=r"trust\.key"):
        env_trust.key()


# --- places to connect to ---

AWAY = {"runtime.type": "ray", "actors.num": 2, "runtime.address": "10.0.0.1:6379", "runtime.allow_no_token": True}


def away(**changes: Any) -> Plan:
    return make_plan("CartPole-v1", overrides={**AWAY, **{f"runtime.{key}": value for key, value in changes.items()}})


def connects(run: Path, plan: Plan) -> bool:
    try:
        require_places(run, plan, False)
    except UsageError as error:
        return "--trust-run" not in error.fix
    return True


def test_places_are_named_by_settings_that_are_used() -> None:
    recording = make_plan("CartPole-v1", overrides={**AWAY, "save.dataset": "/data/recorded"})
    assert trusted_settings(recording) == {path: {**AWAY, "save.dataset": "/data/recorded"}[path] for path in TRUSTED}
    assert trusted_settings(away(allow_no_token=False)) == {"runtime.address": "10.0.0.1:6379"}
    assert trusted_settings(make_plan("CartPole-v1", overrides={"runtime.type": "ray", "actors.num": 2})) == {}
    assert trusted_settings(make_plan("CartPole-v1")) == {}


def test_places_that_this_user_signed_are_trusted(run: Path) -> None:
    assert not connects(run, away())
    require_places(run, away(), True)
    sign(run, away().env, trusted_settings(away()))
    assert connects(run, away())
    assert not connects(run, away(address="10.0.0.2:6379"))
    assert not connects(run, away(allow_no_token=False))
    copy = run.with_name("b")
    copy.mkdir()
    (copy / env_trust.FILE).write_bytes((run / env_trust.FILE).read_bytes())
    assert not connects(copy, away())


def test_a_proof_for_code_is_no_proof_for_places(run: Path) -> None:
    sign(run, MINE)  # as all versions before wrote it
    assert set(json.loads((run / env_trust.FILE).read_text())) == {"env", "proof"}
    assert not connects(run, away())
    sign(run, MINE, trusted_settings(away()))
    assert connects(run, away())
    assert trusted(run, MINE)
    kept = json.loads((run / env_trust.FILE).read_text())
    (run / env_trust.FILE).write_text(
        json.dumps({**kept, "proof": kept["settings_proof"], "settings_proof": kept["proof"]})
    )
    assert not connects(run, away())
    assert not trusted(run, MINE)


@pytest.mark.parametrize("file", ["run.toml", "mine.toml"])
def test_a_plan_file_cannot_say_where_to_connect(
    run: Path, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / file).write_text(to_toml(away()))
    command = ["train", "--plan", str(run / file), "--out", str(run.parent / "new")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "runtime.address=10.0.0.1:6379 runtime.allow_no_token=true" in said
    assert not (run.parent / "new").exists()
    monkeypatch.setattr("qfleet.api.train", stop)
    with pytest.raises(Stopped):  # named by the user: as far as the training itself
        main([*command, "runtime.address=10.0.0.1:6379", "runtime.allow_no_token=true"])


class Stopped(BaseException):
    """Stands in for what would connect."""


def stop(*args: Any, **more: Any) -> None:
    raise Stopped


def foreign(folder: Path, name: str = "a") -> Path:
    """A run of somebody else, whose plan was changed to lead away."""
    made = trained(small({"until.steps": 100}), folder / "runs", name=name)
    changed = make_plan("CartPole-v1", overrides={**AWAY, "until.steps": 100})
    write_plan(changed, made.path / "run.toml")
    return made.path


def test_no_command_joins_the_ray_that_a_foreign_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    run = foreign(tmp_path)
    monkeypatch.setattr("ray.init", stop)
    monkeypatch.setattr("socket.create_connection", stop)
    monkeypatch.setattr("qfleet.distributed.ray.driver.session", stop)
    before = status(run)
    for verb in (["resume", str(run)], ["resume", str(run), "--steps", "200", "--trust-env"]):
        assert main(verb) == 2
        said = capsys.readouterr().err
        assert "a says where to connect, or whom to trust: runtime.address=10.0.0.1:6379" in said
        assert "--trust-run" in said
    for verb in ("eval", "verify", "record", "plot", "runs show", "compare"):
        main([*verb.split(), str(run)])
    main(["runs", "list", "--out", str(run.parent)])
    main(["train", "--from", str(run), "CartPole-v1", "--dry-run"])
    assert status(run) == before
    with pytest.raises(Stopped):
        main(["resume", str(run), "--trust-run"])


def test_a_foreign_group_is_refused_before_its_members_begin(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qfleet.sweep.sweep._open", lambda folder: (away(), [], {}))
    monkeypatch.setattr("qfleet.sweep.runner.SweepRunner.run", stop)
    (run / "group.json").write_text("{}")
    assert main(["resume", str(run)]) == 2
    assert "--trust-run" in capsys.readouterr().err
    with pytest.raises(Stopped):
        main(["resume", str(run), "--trust-run"])
    sign(run, away().env, trusted_settings(away()))
    with pytest.raises(Stopped):
        main(["resume", str(run)])
