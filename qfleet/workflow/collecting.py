"""Collecting a data set: policies play in an environment, and their episodes are written."""

from collections.abc import Callable, Sequence
from contextlib import closing

from qfleet.build.threads import torch_threads
from qfleet.datasets.format import (
    BlockWriter,
    Description,
    Setting,
    WrittenFiles,
    publish,
    require_free,
)
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import UsageError
from qfleet.plan.schema import InlineRuntime, Plan, RayRuntime
from qfleet.workflow.behaviours import Behaviour, load_policies, parse_behaviour, parse_mixture
from qfleet.workflow.playing import Amount, Show, describe_world, make_playing_world, make_recording, record_into

__all__ = ["Behaviour", "collect", "parse_behaviour", "parse_mixture"]


def collect(
    plan: Plan,
    url: str,
    behaviour: Behaviour | Sequence[Behaviour],
    *,
    episodes: int | None = None,
    steps: int | None = None,
    cut: bool = False,
    trust_env: bool = False,
    show: Show = lambda episodes, steps: None,
    warn: Callable[[str], object] = lambda text: None,
) -> str:
    """Record whole episodes up to a number of episodes or of steps; returns the version.

    Of a mixture, `behaviour` has several policies; their shares are those of episodes, or with `steps` of steps. `cut`:
    end at exactly that number of steps, with the last episodes cut off. With a runtime of processes every actor records
    in a process of its own.
    """
    require_amount(episodes, steps, cut)
    behaviours = [behaviour] if isinstance(behaviour, Behaviour) else list(behaviour)
    amount = Amount(episodes, steps, cut)
    if isinstance(plan.runtime, RayRuntime):
        raise UsageError(
            "runtime.type=ray does not go with collecting",
            "Every recording process writes data files by itself, and those of a cluster may not reach one folder.",
            "Use runtime.type=processes on one machine, or train on Ray with save.dataset.",
        )
    place = open_place(url)
    require_free(place)
    if isinstance(plan.runtime, InlineRuntime):
        description, written, faults = collect_here(plan, place, behaviours, amount, trust_env, show)
    else:
        from qfleet.workflow.collect_processes import collect_in_processes

        description, written, faults = collect_in_processes(plan, place, behaviours, amount, trust_env, show)
    if faults:
        warn(f"{faults} environments failed and were replaced; their episodes end there")
    settings: dict[str, Setting] = {"made_by": "collect", "behaviour": behaviour_text(behaviours), "seed": plan.seed}
    settings |= {"num_envs": plan.env.num, "episodes": episodes, "steps": steps}
    settings |= ({"cut": True} if cut else {}) | ({"env_faults": faults} if faults else {})
    return publish(place, description, written, settings)


def behaviour_text(behaviours: Sequence[Behaviour]) -> str:
    """The policies in one line."""
    if len(behaviours) == 1:
        return behaviours[0].name
    return " + ".join(f"{each.name}:{each.share:g}" for each in behaviours)


def collect_here(
    plan: Plan, place: Place, behaviours: Sequence[Behaviour], amount: Amount, trust_env: bool, show: Show
) -> tuple[Description, WrittenFiles, int]:
    """Record in this process; returns what was written, and how many environments failed."""
    with torch_threads(1), closing(make_playing_world(plan)) as world:
        description = describe_world(plan, world)
        writer = BlockWriter(place, description, plan.seed)
        parts = load_policies(behaviours, plan.env.id, world.spec, trust_env)
        recording = make_recording(plan, world, parts, amount, show)
        return description, record_into(writer, recording), recording.faults


def require_amount(episodes: int | None, steps: int | None, cut: bool = False) -> None:
    """Refuse a collection without an end."""
    if (episodes is None) == (steps is None):
        raise UsageError(
            "either --episodes or --steps must be given",
            "They say when the data set is complete.",
            "Example: qfleet data collect CartPole-v1 data/random --episodes 200",
        )
    if cut and steps is None:
        raise UsageError(
            "--cut does not go with --episodes",
            "It cuts the last episodes off to end at exactly as many steps as were asked for.",
            "Use it with --steps, or leave it out.",
        )
