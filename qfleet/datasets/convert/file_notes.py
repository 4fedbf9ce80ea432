"""What `data export` adds to the metadata of a Parquet file, so that an import gets everything back."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from qfleet.data.space_format import MAX_BYTES, SpacesNotKept, read_spaces
from qfleet.datasets.format import Dataset, Description, RecordedEpisode
from qfleet.datasets.format.columns import Columns
from qfleet.datasets.format.manifest import SavedSpec

NOTES = b"qfleet"
Text = Annotated[str, Meta(max_length=1_000)]


class EpisodeNotes(msgspec.Struct, frozen=True):
    """What a row of transitions does not say about its episode."""

    seed: int | None
    behaviour: Text
    env_id: Text


class FileNotes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What columns of transitions do not say about their data set."""

    env_id: Text
    spec: SavedSpec
    observations: Columns
    spaces: Annotated[str, Meta(max_length=MAX_BYTES)]
    episodes: dict[str, EpisodeNotes]

    def text(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    def description(self) -> Description:
        """What the data are."""
        try:
            found = read_spaces(self.spaces.encode()) if self.spaces else None
        except SpacesNotKept:
            found = None
        return Description(self.env_id, self.spec.spec(), self.observations, found)


def read_notes(texts: Sequence[bytes | None]) -> FileNotes | None:
    """The notes of all files of a source; None if not every file has the same. ValueError if one is damaged."""
    found = [msgspec.json.decode(text, type=FileNotes) for text in texts if text is not None]
    if not found or len(found) < len(texts):
        return None
    bare = {msgspec.structs.replace(each, episodes={}).text() for each in found}
    if len(bare) > 1:
        return None
    for column in found[0].observations:
        column.require_fit()
    return msgspec.structs.replace(
        found[0], episodes={id: note for each in found for id, note in each.episodes.items()}
    )


def notes_of(dataset: Dataset, episodes: Sequence[RecordedEpisode]) -> FileNotes:
    """The notes of a file with these episodes."""
    manifest = dataset.manifest
    known = {each.id: EpisodeNotes(each.seed, each.behaviour, each.env_id) for each in episodes}
    return FileNotes(manifest.env_id, manifest.spec, manifest.observations, manifest.spaces, known)
