"""The format of data sets: docs/datasets.md is its specification."""

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.block import EpisodeBlock, join_blocks
from qfleet.datasets.format.block_writer import BlockWriter, index_file
from qfleet.datasets.format.columns import Column, join_observation, space_columns, spec_columns, split_observation
from qfleet.datasets.format.episode import RecordedEpisode, episode_problems
from qfleet.datasets.format.index import IndexRow
from qfleet.datasets.format.manifest import DataFile, DatasetManifest, Description, Setting, Split, describe
from qfleet.datasets.format.reader import Dataset, damaged, open_dataset
from qfleet.datasets.format.statistics import Moments, Statistics, merge_statistics
from qfleet.datasets.format.tables import StepRows
from qfleet.datasets.format.writer import (
    FILE_BYTES,
    EpisodeWriter,
    WrittenFiles,
    publish,
    require_free,
    write_dataset,
)

__all__ = [
    "FILE_BYTES",
    "BlockWriter",
    "Column",
    "DataFile",
    "Dataset",
    "DatasetManifest",
    "Description",
    "EpisodeBlock",
    "EpisodeWriter",
    "IndexRow",
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
    "index_file",
    "join_blocks",
    "join_observation",
    "merge_statistics",
    "open_dataset",
    "publish",
    "require_arrow",
    "require_free",
    "space_columns",
    "spec_columns",
    "split_observation",
    "write_dataset",
]
