"""Which column of a table of transitions means what."""

from collections.abc import Sequence

from qfleet.errors import UsageError

ROLES = (
    "episode",
    "step",
    "obs",
    "next_obs",
    "action",
    "reward",
    "terminated",
    "truncated",
    "probability",
    "mask",
    "next_mask",
)
RLLIB = {
    "episode": "eps_id",
    "step": "t",
    "obs": "obs",
    "next_obs": "new_obs",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "probability": "action_prob",
    "mask": "action_mask",
    "next_mask": "new_action_mask",
}
NEEDED = ("obs", "action", "reward", "terminated")


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """`--column ROLE=NAME`, or several names that are the numbers of one observation: obs=x,y."""
    found: dict[str, str] = {}
    for text in texts:
        role, equals, name = text.partition("=")
        if role not in ROLES or not equals or not name or role in found:
            raise UsageError(
                f"--column {text} is not valid",
                f"It is ROLE=NAME with a role of: {', '.join(ROLES)}; each at most once.",
                "Example: --column reward=r --column obs=x,y,speed",
            )
        found[role] = name
    return found


def column_names(given: dict[str, str], there: Sequence[str], rllib: bool) -> dict[str, str]:
    """The column of each role: as given, or as the format names it if there is such a column."""
    usual = RLLIB if rllib else {role: role for role in ROLES}
    found = {role: name for role, name in usual.items() if name in there} | given
    lacking = [role for role in NEEDED if role not in found]
    if lacking:
        raise UsageError(
            f"the column of `{lacking[0]}` is not known",
            f"The table has the columns {', '.join(there)[:300]}.",
            f"Name it: --column {lacking[0]}=NAME",
        )
    return found
