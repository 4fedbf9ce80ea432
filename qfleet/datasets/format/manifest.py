"""`manifest.json`: what a data set is, with the hash of every file. It is written last; its own hash is the version.

The text may come from a stranger: every field has a type and a limit, and names of files cannot leave the folder.
"""

import hashlib
import math
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from qfleet.data import Spec
from qfleet.data.joint_actions import MAX_JOINT_ACTIONS
from qfleet.data.space_format import (
    MAX_BYTES,
    MAX_VALUES,
    EnvSpaces,
    NumberType,
    Shape,
    SpacesNotKept,
    read_spaces,
    write_spaces,
)
from qfleet.datasets.format.bounded import MAX_DECODED_BYTES
from qfleet.datasets.format.columns import Column, Columns, discrete_ranges, space_columns, spec_columns
from qfleet.datasets.format.tables import Layout, Ranges

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = "episodes.parquet"
STATISTICS = "statistics.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_STATISTICS_BYTES = 32 << 20
MAX_FILES = 1_000_000
MAX_EPISODES = 4_000_000  # of one data set: every reader has the index in memory

Split: TypeAlias = Literal["all", "train", "validation", "test"]
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
FileName: TypeAlias = Annotated[
    str, Meta(max_length=120, pattern=r"\A(?:data/)?[a-z0-9][a-z0-9-]*\.(?:parquet|json)\Z")
]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Setting: TypeAlias = str | int | float | bool | None
SettingName: TypeAlias = Annotated[str, Meta(max_length=200)]
SavedSetting: TypeAlias = Annotated[str, Meta(max_length=10_000)] | int | float | bool | None


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file with its size and hash; data files also have rows, whole episodes, steps, and the split they belong to."""

    name: FileName
    bytes: Number
    sha256: Sha256
    rows: Number = 0
    episodes: Number = 0
    steps: Number = 0
    split: Split = "all"


class SavedSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The spec of the environment, as policies see it."""

    obs: Shape
    dtype: NumberType
    actions: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**53)], ...], Meta(min_length=1, max_length=1_024)]
    stack: Annotated[int, Meta(ge=1, le=64)] = 1
    masked: bool = False

    def spec(self) -> Spec:
        """The spec."""
        return Spec(self.obs, self.dtype, self.actions, self.stack, self.masked)


class DatasetManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a reader needs before it opens a data file."""

    format: int
    env_id: Annotated[str, Meta(max_length=1_000)]
    spec: SavedSpec
    observations: Columns
    spaces: Annotated[str, Meta(max_length=MAX_BYTES)]  # the environment's own, as JSON; empty if they are not known
    files: Annotated[tuple[DataFile, ...], Meta(max_length=MAX_FILES)]
    index: DataFile
    statistics: DataFile
    num_episodes: Number
    num_steps: Number
    settings: Annotated[dict[SettingName, SavedSetting], Meta(max_length=1_000)]  # of the command that made it
    source: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")] = (
        ""  # the version of the data set that it was made from
    )

    @property
    def layout(self) -> Layout:
        """The columns of its data files."""
        spec = self.spec.spec()
        return Layout(self.observations, spec.num_actions, spec.masked)

    @property
    def all_files(self) -> tuple[DataFile, ...]:
        """Every file but the manifest."""
        return (*self.files, self.index, self.statistics)

    def env_spaces(self) -> EnvSpaces | None:
        """The environment's own spaces, if they are known."""
        try:
            return read_spaces(self.spaces.encode()) if self.spaces else None
        except SpacesNotKept:
            return None


class Description(msgspec.Struct, frozen=True):
    """What the data of a data set are, before there are files."""

    env_id: str
    spec: Spec
    observations: tuple[Column, ...]
    spaces: EnvSpaces | None = None

    @property
    def layout(self) -> Layout:
        """The columns of its data files."""
        return Layout(self.observations, self.spec.num_actions, self.spec.masked)

    def saved_spec(self) -> SavedSpec:
        """The spec as the manifest has it; a policy's memory is no part of the data."""
        spec = self.spec
        return SavedSpec(spec.obs, spec.dtype, spec.actions, spec.stack, spec.masked)  # type: ignore[arg-type]

    def saved_spaces(self) -> str:
        """The spaces as the manifest has them."""
        if self.spaces is None:
            return ""
        try:
            return write_spaces(self.spaces).decode()
        except SpacesNotKept:
            return ""


def describe(manifest: DatasetManifest) -> Description:
    """The description of the data that a manifest lists."""
    return Description(manifest.env_id, manifest.spec.spec(), manifest.observations, manifest.env_spaces())


def column_ranges(description: Description) -> Ranges:
    """The lowest and highest numbers of the columns that hold choices; none of observations as policies see them."""
    whole = description.observations == spec_columns(description.spec)
    return {} if description.spaces is None or whole else discrete_ranges(description.spaces.observation)


def write_manifest(manifest: DatasetManifest) -> bytes:
    """The bytes of a manifest: the same manifest always has the same."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


def read_manifest(data: bytes) -> DatasetManifest:
    """The manifest; ValueError, in a sentence, if it is none that this version can read."""
    try:
        known = msgspec.json.decode(data, type=_FormatOnly).format
        if known != FORMAT:
            raise ValueError(f"its format is {known}, and this version of qfleet reads format {FORMAT}")
        manifest = msgspec.json.decode(data, type=DatasetManifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    _require_consistent(manifest)
    return manifest


class _FormatOnly(msgspec.Struct):
    format: int


def _require_consistent(manifest: DatasetManifest) -> None:
    names = [file.name for file in manifest.all_files]
    if len(set(names)) < len(names):
        raise ValueError("it names a file twice")
    if (manifest.index.name, manifest.statistics.name) != (INDEX, STATISTICS):
        raise ValueError(f"its index is not {INDEX}, or its statistics are not {STATISTICS}")
    _require_spec(manifest)
    columns = [column.name for column in manifest.observations]
    if len(set(columns)) < len(columns):
        raise ValueError("it names a column twice")
    for column in manifest.observations:
        column.require_fit()
    for name in ("episodes", "steps"):
        if sum(getattr(file, name) for file in manifest.files) != getattr(manifest, f"num_{name}"):
            raise ValueError(f"its files do not have num_{name} {name} together")
    if manifest.num_episodes > MAX_EPISODES:
        raise ValueError(f"it has {manifest.num_episodes:,} episodes, and {MAX_EPISODES:,} are the most")
    if any(file.rows != file.steps + file.episodes for file in manifest.files):
        raise ValueError("a file's rows are not its steps and one row more per episode")
    for file in manifest.files:
        num_bytes = file.rows * manifest.layout.row_bytes
        if num_bytes > MAX_DECODED_BYTES:
            raise ValueError(
                f"the {file.rows:,} rows of {file.name} take more than {MAX_DECODED_BYTES:,} bytes of memory"
            )


def _require_spec(manifest: DatasetManifest) -> None:
    spec = manifest.spec.spec()
    num_values = math.prod(spec.input_shape)
    if not 0 < num_values <= MAX_VALUES:
        raise ValueError(f"its spec has {num_values:,} values per observation, 1 to {MAX_VALUES:,} are allowed")
    if spec.num_actions > MAX_JOINT_ACTIONS:
        raise ValueError(f"its spec has {spec.num_actions:,} joint actions, and {MAX_JOINT_ACTIONS:,} are the most")
    if manifest.observations == spec_columns(spec) or not manifest.spaces:
        return
    known = read_spaces(manifest.spaces.encode())
    if manifest.observations != space_columns(known.observation):
        raise ValueError("its columns of observations are neither those of its spec nor those of its spaces")


def version_of(data: bytes) -> str:
    """The version of the data set: the hash of its manifest."""
    return hashlib.sha256(data).hexdigest()
