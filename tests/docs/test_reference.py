"""The references are complete: every public name and parameter, every setting, every command."""

import inspect
from types import ModuleType
from typing import Protocol

import pytest

import qfleet
from qfleet.plan.paths import index
from qfleet.plan.presets.catalog import algorithm_presets, environment_presets
from scripts.pages import api_reference, command_reference, settings_reference
from scripts.pages.__main__ import gaps


def test_nothing_public_is_unexplained() -> None:
    assert gaps() == []


@pytest.fixture(scope="module")
def page() -> str:
    return api_reference.pages()["reference/qfleet.md"]


def test_every_public_name_is_in_the_reference(page: str) -> None:
    assert [name for name in qfleet.__all__ if f"\n## {name}\n" not in page] == []


def test_every_parameter_is_in_the_reference_with_its_meaning(page: str) -> None:
    part = page.partition("\n## train\n")[2].partition("\n## ")[0]
    for name in inspect.signature(qfleet.train).parameters:
        row = next(line for line in part.splitlines() if line.startswith(f"| `{name}` |"))
        assert len(row.split(" | ")[-1]) > 10
    assert "torso: nn.Module | None = None," in part


def test_methods_and_properties_are_in_the_reference(page: str) -> None:
    for name in ("Plan.of", "Run.evaluate", "Run.record", "Run.metrics", "Group.compare"):
        assert f"\n### {name}\n" in page
    assert "| `weights` | `SavedWeights \\| None` |" in page


def module(**names: object) -> ModuleType:
    made = ModuleType("example")
    vars(made).update(names)
    vars(made)["__all__"] = list(names)
    return made


def silent(x: int) -> int:
    return x


def half(x: int, *rest: int, y: int = 2, **others: int) -> int:
    """Explains one of four.

    Args:
        x: a number.
    """
    return x


class Silent:
    """A class.

    Args:
        size: how large.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def work(self, hours: int) -> None:
        """Do something."""

    @property
    def done(self) -> bool:
        return True


class Seam(Protocol):
    """What a part of one's own must have."""

    def work(self, hours: int) -> int:
        """Work for some hours."""


def test_a_protocol_has_no_constructor_and_no_empty_table() -> None:
    text = api_reference.entry("Seam", Seam, 2)
    assert "Seam(" not in text
    assert "Seam.work(hours: int) -> int" in text
    assert "|" not in text


def test_what_is_not_explained_is_found() -> None:
    found = list(api_reference.undocumented(module(silent=silent, half=half, Silent=Silent)))
    assert found == [
        "example.silent",
        "example.silent(x=)",
        "example.half(rest=)",
        "example.half(y=)",
        "example.half(others=)",
        "example.Silent.work(hours=)",
        "example.Silent.done",
    ]
    assert list(api_reference.undocumented(module(silent=silent, half=half), with_parameters=False)) == [
        "example.silent"
    ]


def test_signatures_are_those_of_the_source() -> None:
    assert api_reference.signature("half", half) == "half(x: int, *rest: int, y: int = 2, **others: int) -> int"
    assert api_reference.signature("f", qfleet.load).startswith(
        "f(\n    path: AnyPath,\n    *,\n    which: str = 'best',\n"
    )


def test_every_setting_is_in_the_reference() -> None:
    text = settings_reference.settings_page()
    assert [path for path in index().leaves if f"| `{path}` |" not in text] == []
    choices = [f"{section}.type={name}" for section, choice in index().choices.items() for name in choice.names]
    assert [choice for choice in choices if f"`{choice}`" not in text] == []
    assert "| `algo.discount` | a number from 0 to 1 | `0.99` | The discount gamma. |" in text


def test_a_setting_without_a_meaning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known = settings_reference.meanings()
    monkeypatch.setattr(settings_reference, "meanings", lambda: {"algo.gone": "?", **known})
    assert settings_reference.missing_meanings() == ["algo.gone"]
    monkeypatch.setattr(settings_reference, "meanings", lambda: {k: v for k, v in known.items() if k != "seed"})
    assert settings_reference.missing_meanings() == ["seed"]


def test_every_preset_is_in_the_reference() -> None:
    text = settings_reference.presets_page()
    assert [name for name in (*algorithm_presets(), *environment_presets()) if f"\n### {name}\n" not in text] == []


def test_every_command_is_in_the_reference() -> None:
    text = command_reference.page()
    commands = [" ".join(words) for words in command_reference.commands()]
    assert {"train", "runs show", "plan schema", "env check", "completion install"} <= set(commands)
    assert [name for name in commands if f"# qfleet {name}\n" not in text] == []
    assert "Usage: qfleet train ENV [OPTIONS] [path=value ...]" in text
    assert "\x1b" not in text
