"""All hostile run folders, and the few that the default tests try."""

from tests.hostile.cases import forged, groups, kinds, links, plans, sizes, spaces, texts
from tests.hostile.place import Case

CASES: dict[str, Case] = {
    case.name: case for module in (links, kinds, sizes, forged, texts, plans, groups, spaces) for case in module.CASES
}
# One of each kind, quick.
SAMPLE = (
    "link-dangling-logs-run-0.log",
    "link-same-folder-checkpoints",
    "link-part-of-any-process",
    "fifo-logs-run-0.log",
    "forged-best.json-is-huge-number",
    "forged-state-leaves-list",
    "text-events-escapes",
    "name-line",
    "text-resume-command",
    "plan-code-file",
    "plan-wrapper-file",
    "plan-count-threads",
    "group-member-up",
    "spaces-wide-box",
)
