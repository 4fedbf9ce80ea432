"""A run's policy without its environment: spaces.json beside the plan, and the weights of a checkpoint."""

from pathlib import Path

import msgspec
import torch
from torch import nn

from qfleet.act import Policy
from qfleet.act.predict import make_predictor
from qfleet.build.custom_parts import CustomParts, require_parts, with_parts
from qfleet.build.make import make_policy
from qfleet.build.memory_check import network_bytes, require_network
from qfleet.build.resolve import check_actions, check_normalize, require_device, usable_device
from qfleet.data import Spec
from qfleet.data.space_format import MAX_BYTES, EnvSpaces, SpacesNotKept, read_spaces, write_reason, write_spaces
from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.files import is_file, make_folder, read_inside
from qfleet.nets import state_arrays
from qfleet.plan import read_plan
from qfleet.plan.local_paths import local_path
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import typed_secrets
from qfleet.plan.toml import write_plan
from qfleet.qlearn import CustomHead
from qfleet.save import Checkpoints, pack_tensors
from qfleet.training.checkpoints.checkpointer import decisive_settings, malformed, require_same_plan
from qfleet.training.checkpoints.migrations import SPARE_BYTES, max_file_bytes
from qfleet.training.checkpoints.saved_weights import SavedWeights, load_into_policy, read_weights
from qfleet.watch import collect_provenance, find_run, write_file
from qfleet.watch.run_files import unwritable_error

SPACES_FILE = "spaces.json"
LOSS_LAYERS = "loss_layers."  # of a user's own loss, which are in the file but not in the policy
MAX_LOSS_LAYERS_BYTES = 256 << 20


def keep_spaces(folder: Path, spaces: EnvSpaces | None) -> str | None:
    """Write spaces.json into a run's folder; returns a note if the spaces cannot be kept."""
    try:
        if spaces is None:
            raise SpacesNotKept("the process of the environment could not write them as text")
        text = write_spaces(spaces)
        note = None
    except SpacesNotKept as error:
        text = write_reason(str(error))
        note = f"the spaces of the environment are not kept, so Policy.load does not work: {error}"
    write_file(folder / SPACES_FILE, text)
    return note


def kept_spaces(folder: Path) -> EnvSpaces:
    """The spaces of a run's environment."""
    instead = f"Use load({str(folder)!r}).policy, which makes the environment to see its spaces."
    if not is_file(folder, SPACES_FILE):
        raise UsageError(
            f"{escaped(folder.name)} has no {SPACES_FILE}",
            "It holds the spaces of the environment, and runs of older versions do not have it.",
            f"Resume the run once, which writes it. {instead}",
        )
    try:
        return read_spaces(read_inside(folder, SPACES_FILE, MAX_BYTES))
    except SpacesNotKept as error:
        raise UsageError(
            f"the spaces of {escaped(folder.name)} were not kept", f"{escaped(error)}.", escaped(instead)
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{SPACES_FILE} of {escaped(folder.name)} cannot be used",
            f"{escaped(error)[:500]}.",
            escaped(f"Restore the file from a copy of the run. {instead}"),
        ) from error


def load_policy(
    path: str | Path,
    *,
    which: str = "best",
    out: str | Path = "runs",
    torso: nn.Module | None = None,
    head: CustomHead | None = None,
    device: str | None = None,
) -> Policy:
    """The policy of a run, without its environment: nothing but qfleet has to be installed, and no code is trusted.

    Args:
        path: the run directory, its name in `out`, or "latest".
        which: "best", "latest", or "any": the best, or if it cannot be read the latest.
        out: the folder in which a run is looked for by its name.
        torso: the torso, if the run was trained with one of your own.
        head: the head, if the run was trained with one of your own.
        device: where it computes; by default that of the plan if this machine has it, otherwise the CPU.
    """
    folder = find_run(path, out)
    plan = read_plan(folder / "run.toml")
    parts = CustomParts(torso=torso, head=head)
    require_parts(with_parts(plan, ("torso", "head")), parts, folder.name)
    if device is not None:
        require_device("device", device)
    predictor = make_predictor(plan, kept_spaces(folder))
    spec = predictor.spaces.spec
    check_actions(plan, spec)
    check_normalize(plan, spec)
    where = torch.device(device or usable_device(plan))
    policy, _ = restore_policy(folder, plan, spec, parts, which, where)
    policy.predictor = predictor
    return policy


def restore_policy(
    folder: Path,
    plan: Plan,
    spec: Spec,
    parts: CustomParts,
    which: str,
    device: torch.device,
) -> tuple[Policy, SavedWeights]:
    """A policy with a run's saved weights, which are refused before a network is made if it would be larger."""
    spare = 0 if plan.custom.loss is None else MAX_LOSS_LAYERS_BYTES
    if parts.torso is not None or parts.head is not None:  # only your own code knows the size
        policy = make_policy(plan, spec, device, parts)
        limit = max_file_bytes(state_arrays(policy.net).values()) + spare
        weights = read_weights(folder, limit, which).without(LOSS_LAYERS)
    else:
        require_network(plan, spec)
        size = network_bytes(plan, spec)
        weights = read_weights(folder, 2 * size + SPARE_BYTES + spare, which).without(LOSS_LAYERS)
        if parts.env is None:  # otherwise the user's own environment may be another one, which is said below
            require_size(weights, size, plan)
        policy = make_policy(plan, spec, device, parts)
    load_into_policy(policy, weights, plan, own_env=parts.env is not None)
    return policy, weights


def require_size(weights: SavedWeights, size: int, plan: Plan) -> None:
    """Refuse weights that are fewer than the network's."""
    held = sum(array.nbytes for array in weights.arrays.values())
    if held < size:
        require_same_plan(weights.checkpoint.meta.get("plan", {}), plan)
        raise malformed(weights.checkpoint, ValueError(f"{held:,} bytes of weights for a network of {size:,}"))


def save_policy(policy: Policy, path: str | Path) -> Path:
    """Write the policy into a new folder, for `Policy.load`: plan, spaces and weights, without replay and history.

    Options of the environment that look like secrets are left out.

    Args:
        policy: the policy.
        path: a new folder.
    """
    predictor = policy.require_predictor()
    folder = local_path(path)
    if not folder.parent.is_dir() or folder.exists():
        raise UsageError(
            f"a policy cannot be saved as {folder}",
            "There is something of that name, or the folder that it would be in is missing.",
            "Name a new folder inside one that is there.",
        )
    try:
        spaces = write_spaces(predictor.spaces.kept)
    except SpacesNotKept as error:
        raise UsageError("the policy cannot be saved", f"{escaped(error)}.", "Keep the whole run instead.") from error
    try:
        make_folder(folder.parent, folder.name)
    except OSError as error:
        raise unwritable_error(folder, error) from error
    write_plan(without_secrets(predictor.plan), folder / "run.toml")
    write_file(folder / SPACES_FILE, spaces)
    meta = {"versions": collect_provenance(None)["versions"], "plan": decisive_settings(predictor.plan)}
    arrays = {name: array for name, array in state_arrays(policy.net).items() if not name.startswith(LOSS_LAYERS)}
    Checkpoints(folder / "checkpoints").commit(0, [("model.safetensors", pack_tensors(arrays))], meta)
    return folder


def without_secrets(plan: Plan) -> Plan:
    """The plan without options that look like secrets: the policy does not need them."""
    secret = typed_secrets(plan)
    options = {name: value for name, value in plan.env.options.items() if name not in secret}
    return msgspec.structs.replace(plan, env=msgspec.structs.replace(plan.env, options=options))


Policy.load = staticmethod(load_policy)  # act, where Policy is, knows no run directories
Policy.save = save_policy
