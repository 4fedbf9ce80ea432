import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qfleet.datasets.convert import import_dataset
from qfleet.datasets.convert.rllib_export import export_rllib
from qfleet.datasets.convert.transitions_import import TableOptions, TransitionsImporter
from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.errors import QfleetError, StorageError, UsageError
from tests.datasets.convert.cases import ACTIONS, OBSERVATIONS, episodes_of, made_dataset, require_same

ROWS = """episode,t,x,y,action,r,terminated,truncated
a,1,3,4,1,0.5,0,0
a,0,1,2,0,1.5,0,0
b,0,5,6,2,1,0,0
b,1,7,8,0,1,1,0
c,0,9,9,0,1,0,1
"""
COLUMNS = {"obs": "x,y", "reward": "r", "step": "t"}


@settings(max_examples=25, deadline=None)
@example("dict", "several", [1, 4], 0, True)
@given(
    observation=st.sampled_from(sorted(OBSERVATIONS)),
    action=st.sampled_from(sorted(ACTIONS)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    masked=st.booleans(),
)
def test_a_data_set_comes_back_from_rllib_bit_for_bit(
    observation: str, action: str, lengths: list[int], seed: int, masked: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        made = made_dataset(place / "a", OBSERVATIONS[observation], ACTIONS[action], lengths, seed, masked)
        export_rllib(made, str(place / "rllib"))
        import_dataset(TransitionsImporter(str(place / "rllib"), TableOptions({}, rllib=True)), str(place / "b"))
        back = open_dataset(str(place / "b"))
        assert validate_dataset(back) == []
        require_same(made, back)


def test_a_table_without_next_observations(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROWS)
    importer = TransitionsImporter(str(tmp_path / "a.csv"), TableOptions(COLUMNS, "Logs-v0"))
    import_dataset(importer, str(tmp_path / "b"))
    first, second = episodes_of(open_dataset(str(tmp_path / "b")))
    assert (first.id, second.id) == ("a", "b")
    np.testing.assert_array_equal(first.observations["obs"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(second.observations["obs"], [[5, 6], [7, 8], [7, 8]])
    assert (first.action.tolist(), first.reward.tolist(), first.terminated) == ([0], [1.5], False)
    assert (second.action.tolist(), second.terminated) == ([2, 0], True)
    assert open_dataset(str(tmp_path / "b")).manifest.spec.actions == (3,)
    assert importer.notes() == [
        "the numbers of actions were counted in the data: [3]; see --actions",
        "1 episodes lost their last step, and 1 were left out: the observation after it is not in the table",
    ]


def test_a_table_without_ids_is_cut_at_ends(tmp_path: Path) -> None:
    lines = ["obs,next_obs,action,reward,terminated", "1,2,0,1,0", "2,3,1,1,1", "8,9,0,1,0"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    import_dataset(TransitionsImporter(str(tmp_path / "a.csv"), TableOptions({}, actions=(4,))), str(tmp_path / "b"))
    first, second = episodes_of(open_dataset(str(tmp_path / "b")))
    np.testing.assert_array_equal(first.observations["obs"].ravel(), [1, 2, 3])
    np.testing.assert_array_equal(second.observations["obs"].ravel(), [8, 9])
    assert (second.terminated, second.truncated) == (False, False)
    assert open_dataset(str(tmp_path / "b")).manifest.spec.actions == (4,)


@pytest.mark.parametrize(
    ("text", "problem", "kind"),
    [
        ("obs,action,reward\n1,0,1\n", "the column of `terminated` is not known", UsageError),
        ("obs,action,reward,terminated\n1,0.5,1,1\n", "its actions are not whole numbers", StorageError),
        ("obs,action,reward,terminated\nx,0,1,1\n", "invalid value .x.", StorageError),
        ("obs,action,reward,terminated\n1,0,1,2\n", "something else than true and false", StorageError),
        ("obs,action,reward,terminated\n1,0,,1\n2,0,1,1\n", "rows without a value", StorageError),
        ("obs,action,reward,terminated,episode\n1,0,1,1,a\n2,0,1,1,a\n", "it goes on after its end", StorageError),
        ("obs,next_obs,action,reward,terminated\n1,2,0,1,0\n3,4,0,1,1\n", "its rows are not in order", StorageError),
        ("obs,action,reward,terminated\n1,0\n", "CSV parse error", StorageError),
        ("", "Empty CSV file", StorageError),
    ],
)
def test_a_table_that_is_wrong_has_one_clear_message(
    text: str, problem: str, kind: type[QfleetError], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(kind, match=problem.replace("`", ".")):
        import_dataset(TransitionsImporter(str(tmp_path / "a.csv"), TableOptions({})), str(tmp_path / "b"))
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROWS)
    (tmp_path / "link.csv").symlink_to(tmp_path / "a.csv")
    with pytest.raises(StorageError, match=r"link\.csv cannot be imported"):
        TransitionsImporter(str(tmp_path / "link.csv"), TableOptions(COLUMNS))
