"""From an environment or a data set to a policy and its report: the stages of the offline workflow."""

from qfleet.workflow.collecting import Behaviour, collect, parse_behaviour

__all__ = ["Behaviour", "collect", "parse_behaviour"]
