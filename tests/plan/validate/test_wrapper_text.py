"""Wrappers as a plan names them: their text, their settings, and what a file may name."""

from pathlib import Path

import pytest

from qfleet.errors import UsageError
from qfleet.plan import compose, make_plan, read_plan, write_plan
from qfleet.plan.validate.wrapper_text import WrapperText, split_wrapper


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.b:Wrap", ("a.b", "Wrap", "")),
        ("dir/my file.py:Wrap", ("dir/my file.py", "Wrap", "")),
        ("/x:y/z.py:Wrap(a=1)", ("/x:y/z.py", "Wrap", "(a=1)")),
        ("/x (1)/z.py:Wrap", ("/x (1)/z.py", "Wrap", "")),
        ("m:Wrap(path='a:b(c)')", ("m", "Wrap", "(path='a:b(c)')")),
    ],
)
def test_a_text_has_a_place_a_name_and_settings(text: str, parts: tuple[str, str, str]) -> None:
    assert split_wrapper(text) == WrapperText(*parts)


@pytest.mark.parametrize(
    "text", ["Wrap", "m:", ":Wrap", "m:1x", "m:Wrap(", "m:Wrap)", "m:a-b", "m:A\n", "m:" + "A" * 500]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not name a class"):
        split_wrapper(text)


def test_settings_are_read_as_values_and_never_run() -> None:
    text = "m:W(a=1, b=-2.5, c='x, y', d=true, e=False, f=none, g=(84, 84), h=[1, 'z'])"
    values = {"a": 1, "b": -2.5, "c": "x, y", "d": True, "e": False, "f": None, "g": (84, 84), "h": [1, "z"]}
    assert split_wrapper(text).settings == values


@pytest.mark.parametrize(
    "settings",
    ["(1)", "(*x)", "(**x)", "(a=b)", "(a=f())", "(a=1)(b=2)", "(a=__import__('os'))", "(" + "(" * 300 + ")"],
)
def test_settings_that_are_no_values_are_refused(settings: str) -> None:
    with pytest.raises(ValueError, match="settings"):
        WrapperText("m", "W", settings).settings  # noqa: B018


def test_files_are_made_absolute_and_modules_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_wrapper("w.py:W(a=1)").absolute == f"{tmp_path.resolve()}/w.py:W(a=1)"
    assert split_wrapper("a.b:W").absolute == "a.b:W"


@pytest.mark.parametrize(
    "typed",
    ["m:A,n:B(x=1, y=2)", "[m:A, n:B(x=1, y=2)]", '["m:A", "n:B(x=1, y=2)"]', "['m:A','n:B(x=1, y=2)',]"],
)
def test_a_list_is_typed_with_or_without_quotes(typed: str) -> None:
    assert make_plan("CartPole-v1", overrides={"env.wrappers": typed}).env.wrappers == ("m:A", "n:B(x=1, y=2)")


def test_a_text_that_is_no_wrapper_is_an_error_of_the_plan() -> None:
    with pytest.raises(UsageError, match=r"env\.wrappers has an entry TimeLimit") as caught:
        make_plan("CartPole-v1", overrides={"env.wrappers": "TimeLimit"})
    assert "gymnasium.wrappers:TimeLimit(max_episode_steps=200)" in caught.value.fix


def test_a_plan_keeps_its_wrappers_on_disk(tmp_path: Path) -> None:
    plan = make_plan("CartPole-v1", overrides={"env.wrappers": "m:A(x='y'), n:B"})
    write_plan(plan, tmp_path / "run.toml")
    assert read_plan(tmp_path / "run.toml") == plan


def test_a_plan_file_may_not_name_wrappers_but_the_command_line_may(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[env]\nwrappers = ["evil:W"]\n')
    with pytest.raises(UsageError, match=r"env\.wrappers=\[evil:W\] names code to run") as caught:
        compose("CartPole-v1", None, file)
    assert "'env.wrappers=[evil:W]'" in caught.value.fix
    typed = compose("CartPole-v1", None, file, [("env.wrappers", "mine:W", "command line")])
    assert typed.plan.env.wrappers == ("mine:W",)
    file.write_text("[env]\nwrappers = []\n")
    assert compose("CartPole-v1", None, file).plan.env.wrappers == ()
