from collections.abc import Iterator
from pathlib import Path

from qfleet.datasets.convert import import_dataset
from qfleet.datasets.format import Description, RecordedEpisode, Setting, open_dataset, spec_columns
from tests.support.recorded import SPEC, make_episode


class ThreeEpisodes:
    """A data set in a format of its own."""

    def description(self) -> Description:
        return Description("Logs-v0", SPEC, spec_columns(SPEC))

    def settings(self) -> dict[str, Setting]:
        return {"made_by": "import", "format": "three"}

    def episodes(self) -> Iterator[RecordedEpisode]:
        return map(make_episode, range(3))


def test_an_importer_makes_a_data_set(tmp_path: Path) -> None:
    version = import_dataset(ThreeEpisodes(), str(tmp_path / "a"))
    dataset = open_dataset(str(tmp_path / "a"), version)
    assert dataset.manifest.num_episodes == 3
    assert dataset.manifest.settings == {"made_by": "import", "format": "three"}
