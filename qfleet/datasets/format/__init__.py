"""The format of data sets: docs/datasets.md is its specification."""

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.columns import Column, join_observation, space_columns, spec_columns, split_observation
from qfleet.datasets.format.episode import RecordedEpisode, episode_problems
from qfleet.datasets.format.index import IndexRow
from qfleet.datasets.format.manifest import DataFile, DatasetManifest, Description, Setting, Split, describe
from qfleet.datasets.format.reader import Dataset, damaged, open_dataset
from qfleet.datasets.format.statistics import Moments, Statistics, merge_statistics, statistics_of_columns
from qfleet.datasets.format.tables import Layout, StepRows, read_rows
from qfleet.datasets.format.writer import (
    FILE_BYTES,
    GROUP_BYTES,
    EpisodeWriter,
    WrittenFiles,
    open_parquet,
    publish,
    put_file,
    require_free,
    write_dataset,
)

__all__ = [
    "FILE_BYTES",
    "GROUP_BYTES",
    "Column",
    "DataFile",
    "Dataset",
    "DatasetManifest",
    "Description",
    "EpisodeWriter",
    "IndexRow",
    "Layout",
    "Moments",
    "RecordedEpisode",
    "Setting",
    "Split",
    "Statistics",
    "StepRows",
    "WrittenFiles",
    "damaged",
    "describe",
    "episode_problems",
    "join_observation",
    "merge_statistics",
    "open_dataset",
    "open_parquet",
    "publish",
    "put_file",
    "read_rows",
    "require_arrow",
    "require_free",
    "space_columns",
    "spec_columns",
    "split_observation",
    "statistics_of_columns",
    "write_dataset",
]
