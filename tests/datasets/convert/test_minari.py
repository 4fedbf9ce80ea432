import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from qfleet.datasets.convert import import_dataset
from qfleet.datasets.convert.minari_export import export_minari
from qfleet.datasets.convert.minari_import import MinariImporter
from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from tests.datasets.convert.cases import ACTIONS, OBSERVATIONS, made_dataset, require_same


@settings(max_examples=25, deadline=None)
@example("dict", "several", [1, 4], 0, True)
@example("picture", "discrete", [1], 1, False)
@given(
    observation=st.sampled_from(sorted(OBSERVATIONS)),
    action=st.sampled_from(sorted(ACTIONS)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    masked=st.booleans(),
)
def test_a_data_set_comes_back_from_minari_bit_for_bit(
    observation: str, action: str, lengths: list[int], seed: int, masked: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        made = made_dataset(place / "a", OBSERVATIONS[observation], ACTIONS[action], lengths, seed, masked)
        export_minari(made, str(place / "minari"))
        import_dataset(MinariImporter(str(place / "minari")), str(place / "b"))
        back = open_dataset(str(place / "b"))
        assert validate_dataset(back) == []
        require_same(made, back)
