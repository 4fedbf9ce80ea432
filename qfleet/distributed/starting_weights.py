"""Starting a run with the weights of another run."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qfleet.build.components import Components
from qfleet.errors import UsageError
from qfleet.nets import match_names
from qfleet.plan import diff, read_plan
from qfleet.plan.schema import Plan
from qfleet.plan.setting_text import format_value
from qfleet.training.checkpoints.checkpointer import MALFORMED, malformed
from qfleet.training.checkpoints.migrations import max_file_bytes
from qfleet.training.checkpoints.saved_weights import read_weights


def load_weights_from(components: Components, source: Path, warn: Callable[[str], object]) -> None:
    """Start from another run's weights, target network included."""
    own = components.learner.model_arrays()
    found = read_weights(source, max_file_bytes(own.values()), warn=warn)
    weights = found.arrays
    with suppress(KeyError):
        weights = match_names(own.keys(), weights)
    shapes = [{name: value.shape for name, value in values.items()} for values in (weights, own)]
    different = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if different:
        settings = net_settings(source, components.plan)
        raise UsageError(
            f"--from {source.name}: its weights do not fit this plan's network",
            f"They differ in {', '.join(different[:4])}{', ...' if len(different) > 4 else ''}.",
            f"Give this run the same network: {settings}"
            if settings
            else f"Its net.* settings are the same; are the environment's spaces, too? See {source / 'run.toml'}.",
        )
    try:
        components.learner.load_initial_weights(weights)
    except MALFORMED as error:
        raise malformed(found.checkpoint, error) from error
    components.notes.append(f"begins with the {found.text(components.plan)}, of {source.name}")


def net_settings(source: Path, plan: Plan) -> str:
    """The settings of another run's network that this plan does not have, as they are typed."""
    try:
        found = diff(read_plan(source / "run.toml"), plan)
    except UsageError:
        return f"see net.* in {source / 'run.toml'}"
    paths = [(path, value) for path, value, _ in found if path.startswith("net.") or path == "env.normalize"]
    return " ".join(f"{path}={format_value(value).strip('[]').replace(' ', '')}" for path, value in paths)
