"""The format of data sets: docs/datasets.md is its specification."""

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.block import EpisodeBlock, block_statistics, join_blocks, rows_block
from qfleet.datasets.format.block_writer import BlockWriter, index_file
from qfleet.datasets.format.columns import Column, join_observation, space_columns, spec_columns, split_observation
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.index import IndexRow
from qfleet.datasets.format.manifest import DataFile, DatasetManifest, Description, Setting, Split, describe
from qfleet.datasets.format.reader import Dataset, damaged, index_difference, open_dataset
from qfleet.datasets.format.sketch import Sketch
from qfleet.datasets.format.statistics import (
    Moments,
    Statistics,
    merge_moments,
    merge_statistics,
    moments_of,
    statistics_of,
    statistics_of_episodes,
)
from qfleet.datasets.format.tables import Layout, RowProblem, StepRows, read_rows
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
    "BlockWriter",
    "Column",
    "DataFile",
    "Dataset",
    "DatasetManifest",
    "Description",
    "EpisodeBlock",
    "EpisodeWriter",
    "IndexRow",
    "Layout",
    "Moments",
    "RecordedEpisode",
    "RowProblem",
    "Setting",
    "Sketch",
    "Split",
    "Statistics",
    "StepRows",
    "WrittenFiles",
    "block_statistics",
    "damaged",
    "describe",
    "index_difference",
    "index_file",
    "join_blocks",
    "join_observation",
    "merge_moments",
    "merge_statistics",
    "moments_of",
    "open_dataset",
    "open_parquet",
    "publish",
    "put_file",
    "read_rows",
    "require_arrow",
    "require_free",
    "rows_block",
    "space_columns",
    "spec_columns",
    "split_observation",
    "statistics_of",
    "statistics_of_episodes",
    "write_dataset",
]
