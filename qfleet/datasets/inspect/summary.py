"""What is in a data set, from its index and statistics alone."""

import math
from typing import Any

from qfleet.datasets.format import Dataset, Moments, Statistics, merge_statistics

QUARTILES = (0.25, 0.5, 0.75)


def summarize_dataset(dataset: Dataset) -> dict[str, Any]:
    """Counts, returns, lengths and the histogram of actions, of all episodes and by split."""
    manifest = dataset.manifest
    splits = dataset.statistics
    whole = merge_statistics(splits[name] for name in sorted(splits))
    return {
        "url": dataset.place.url,
        "version": dataset.version,
        "environment": manifest.env_id,
        "observations": [f"{each.name} {list(each.shape)} {each.dtype}" for each in manifest.observations],
        "num_actions": manifest.spec.spec().num_actions,
        "episodes": manifest.num_episodes,
        "steps": manifest.num_steps,
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.all_files),
        "behaviours": sorted({row.behaviour for row in dataset.index}),
        "settings": manifest.settings,
        "source": manifest.source,
        "all": None if whole is None else split_summary(whole),
        "splits": {name: split_summary(found) for name, found in splits.items()},
    }


def split_summary(statistics: Statistics) -> dict[str, Any]:
    """The numbers of one split."""
    total = sum(statistics.actions)
    return {
        "episodes": statistics.returns.count[0],
        "steps": statistics.reward.count[0],
        "return": moments_summary(statistics.returns),
        "length": moments_summary(statistics.lengths),
        "reward": moments_summary(statistics.reward),
        "action_shares": [count / max(1, total) for count in statistics.actions],
    }


def moments_summary(moments: Moments) -> dict[str, Any]:
    """Mean, standard deviation, range and quartiles of one number; quartiles are None in data sets without sketches."""
    deviation = math.sqrt(moments.m2[0] / max(1, moments.count[0]))
    found: dict[str, Any] = {"mean": moments.mean[0], "deviation": deviation}
    return found | {"min": moments.min[0], "max": moments.max[0], "quartiles": moments.quantiles(QUARTILES)}
