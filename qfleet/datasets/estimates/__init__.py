"""What recorded episodes say about a policy that did not play them. Pure functions; every number has its interval."""

from qfleet.datasets.estimates.agreement import agreement
from qfleet.datasets.estimates.calibration import calibration
from qfleet.datasets.estimates.estimate import MIN_EPISODES, DataEstimate
from qfleet.datasets.estimates.fitted_q import FittedQSettings, fitted_q_estimate, is_fitted
from qfleet.datasets.estimates.importance import importance_estimate
from qfleet.datasets.estimates.intervals import ratio_estimate, resample_counts
from qfleet.datasets.estimates.td_errors import td_errors
from qfleet.datasets.estimates.valued_episode import ValuedEpisode, epsilon_greedy_probabilities

__all__ = [
    "MIN_EPISODES",
    "DataEstimate",
    "FittedQSettings",
    "ValuedEpisode",
    "agreement",
    "calibration",
    "epsilon_greedy_probabilities",
    "fitted_q_estimate",
    "importance_estimate",
    "is_fitted",
    "ratio_estimate",
    "resample_counts",
    "td_errors",
]
