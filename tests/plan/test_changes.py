"""Plans changed by the user or by their own schedule; messages for invalid changes."""

import re
from typing import Any

import pytest

from qfleet.errors import UsageError
from qfleet.plan import SyncSwitch, make_plan, sync_switches, with_settings
from qfleet.plan.sync_schema import AllreduceSync, GossipSync, Int8Codec, LocalSync, ServerSync, WindowSync

TWO = {"learners.num": 2}


def scheduled(*entries: str, **more: Any) -> list[SyncSwitch]:
    return sync_switches(make_plan("CartPole-v1", overrides={**TWO, **more, "learners.schedule": entries}))


def test_replacing_a_strategy_drops_its_settings() -> None:
    plan = make_plan("CartPole-v1", overrides={"learners.num": 2, "sync.type": "server", "sync.shards": 3})
    found = with_settings(plan, "run.toml", [("sync.type", "local", "command line")])
    assert found.sync == LocalSync()


def test_each_schedule_entry_changes_the_plan_of_the_entry_before() -> None:
    found = scheduled(
        "1_000 sync.type=server sync.max_staleness=4",
        "2000 sync.shards=2",
        "3000 sync.type=window sync.num_gradients=3",
        "4000 sync.type=allreduce sync.codec.type=int8",
    )
    assert found == [
        SyncSwitch(1_000, ServerSync(max_staleness=4)),
        SyncSwitch(2_000, ServerSync(max_staleness=4, shards=2)),
        SyncSwitch(3_000, WindowSync(num_gradients=3)),
        SyncSwitch(4_000, AllreduceSync(codec=Int8Codec())),
    ]
    assert scheduled() == []


@pytest.mark.parametrize(
    ("entries", "what", "why"),
    [
        (["9 sync.type=local", "9 sync.type=gossip"], "learners.schedule is not in order", "more updates than the one"),
        (["sync.type=local"], "learners.schedule has an entry 'sync.type=local'", "Each entry is a number of updates"),
        (["0 sync.type=local"], "learners.schedule has an entry '0 sync.type=local'", "Each entry is a number"),
        (["5__ sync.type=telepathy"], r"sync.type=telepathy .*learners.schedule", ""),
        (["500"], "learners.schedule has an entry '500'", "then settings of sync"),
        ([""], "learners.schedule has an entry ''", "then settings of sync"),
        (["5 learners.num=3"], "learners.schedule would change learners.num", r"only sync\.\* can be in it"),
        (["5 sync.type=telepathy"], r"sync.type=telepathy .*learners.schedule", ""),
        (["5 sync.type=local sync.shards=2"], r"sync.shards=2 has no effect \(learners.schedule\)", ""),
        (
            ["5 sync.type=server sync.slow_down=true"],
            r"slow_down=true \(learners.schedule\) has no effect",
            "staleness",
        ),
        (
            ["9_000_000 sync.type=local"],
            "learners.schedule has an entry 9000000 that never comes",
            "after the last update",
        ),
        (["5 sync.type=solo"], r"sync.type=solo \(learners.schedule\)", "have to synchronise"),
    ],
)
def test_invalid_schedule_entries_are_refused(entries: list[str], what: str, why: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        scheduled(*entries)
    assert re.search(why, caught.value.why)


def test_a_window_that_never_closes_is_refused() -> None:
    endless = {**TWO, "sync.type": "window", "sync.num_gradients": None}
    with pytest.raises(UsageError, match=r"sync.num_gradients=none .* make no window"):
        make_plan("CartPole-v1", overrides=endless)
    assert make_plan("CartPole-v1", overrides={**endless, "sync.window_seconds": 0.01}).sync == WindowSync(
        num_gradients=None, window_seconds=0.01
    )


def test_a_sync_request_is_checked_without_the_schedule() -> None:
    plan = make_plan("CartPole-v1", overrides={**TWO, "learners.schedule": ("300 sync.codec.type=int8",)})
    assert with_settings(plan, "run.toml", [("sync.type", "gossip", "command line")]).sync == GossipSync()
