"""The list of environments: newest versions, groups, spaces, and what is missing."""

import subprocess
import sys
from typing import Any

import gymnasium as gym
import pytest

from qfleet.envs.lookup import listing
from qfleet.envs.lookup.listing import EnvEntry, list_envs, matches, newest
from qfleet.errors import UsageError
from qfleet.install import install_command


def entry(name: str, **more: Any) -> EnvEntry:
    return next(each for each in list_envs(name, **more) if each.id == name)


def test_of_several_versions_the_newest_is_listed() -> None:
    assert newest(["A-v0", "B-v3", "A-v10", "A-v9", "ns/A-v1", "C"]) == ["A-v10", "B-v3", "ns/A-v1", "C"]
    assert [each.id for each in list_envs("cartpole-v")] == ["CartPole-v1", "phys2d/CartPole-v1"]
    assert "CartPole-v0" in [each.id for each in list_envs("CartPole", all_versions=True)]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [(None, True), ("lunar", True), ("L*-v3", True), ("Lunar*", True), ("lander", True), ("L?", False)],
)
def test_a_pattern_is_a_part_or_has_wildcards(pattern: str | None, found: bool) -> None:
    assert matches("LunarLander-v3", pattern) is found


def test_spaces_and_needs_of_quick_environments_are_shown() -> None:
    assert entry("CartPole-v1") == EnvEntry(
        "CartPole-v1", "Gymnasium classic_control", "Box(4,) float32", "Discrete(2)", "yes", ""
    )
    assert entry("Pendulum-v1").note == "env.bins"
    assert entry("Taxi-v4").observation == "Discrete(500)"


def test_groups_stay_together() -> None:
    sources = [each.source for each in list_envs()]
    changes = [a for a, b in zip(sources, [*sources[1:], ""], strict=True) if a != b]
    assert len(changes) == len(set(changes)) > 4


def test_atari_is_listed_without_the_ids_that_are_refused() -> None:
    pytest.importorskip("ale_py")
    assert {each.id for each in list_envs("pong")} == {"ALE/Pong-v5", "PongNoFrameskip-v4"}
    old = entry("Pong-v4", all_versions=True)
    assert (old.trains, old.note) == ("no", "without the standard preprocessing; use ALE/Pong-v5")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "is_installed", lambda package: False)
    for name, extra in (("LunarLander-v3", "box2d"), ("MinAtar/Breakout-v1", "minatar"), ("ALE/Pong-v5", "atari")):
        found = entry(name)
        assert found.trains == "no"
        assert install_command(extra) in found.note
    assert "jax" in entry("phys2d/CartPole-v1").note


def test_atari_is_named_though_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UsageError("no ale-py")

    monkeypatch.setattr(listing.atari, "register", missing)
    monkeypatch.setattr(listing, "is_installed", lambda package: package != "ale_py")
    monkeypatch.setattr(gym, "registry", {})
    assert install_command("atari") in entry("ALE/Pong-v5").note


def test_code_of_other_packages_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise AssertionError("it was made")

    gym.register("other_package/Loud-v0", entry_point="no_such_package.envs:Loud")
    gym.register("other_package/Quiet-v0", entry_point=explode)  # type: ignore[arg-type]
    try:
        found = {each.id: each for each in list_envs("other_package/")}
    finally:
        for name in ("other_package/Loud-v0", "other_package/Quiet-v0"):
            del gym.registry[name]
    assert found["other_package/Loud-v0"].source == "no_such_package"
    assert {each.trains for each in found.values()} == {"?"}


def test_large_packages_are_not_imported_for_the_list() -> None:
    code = "import sys; from qfleet.envs.lookup.listing import list_envs; list_envs(); print('mujoco' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_nothing_found_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no environment matches 'CartPoole-v1'") as caught:
        list_envs("CartPoole-v1")
    assert "CartPole-v1" in caught.value.why
