from pathlib import Path

import numpy as np

from qfleet.datasets.format import Description, RecordedEpisode, open_dataset, spec_columns, write_dataset
from qfleet.datasets.inspect import coverage_summary
from qfleet.datasets.storage import open_place
from tests.support.recorded import SPEC


def test_coverage_counts_different_pairs_of_observation_and_action(tmp_path: Path) -> None:
    obs = np.zeros((5, 3), np.float32)
    obs[2:, 0] = 1
    episodes = [
        RecordedEpisode(id, {"obs": obs}, np.array([0, 1, 0, 0]), np.zeros(4), True, False) for id in ("a", "b")
    ]
    write_dataset(open_place(tmp_path / "a"), Description("X-v0", SPEC, spec_columns(SPEC)), episodes, {})
    assert coverage_summary(open_dataset(str(tmp_path / "a"))) == {"pairs": 3, "share": 3 / 8}
