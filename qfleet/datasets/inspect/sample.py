"""A few observations of every split, evenly from some of its files: always the same ones."""

from collections.abc import Iterator

import numpy as np

from qfleet.data import Array
from qfleet.datasets.format import Dataset

MAX_FILES = 4  # of a split that are read


def sample_observations(dataset: Dataset, split: str, num: int) -> dict[str, Array]:  # each [at most num, *shape]
    """Observations of a split by column, at even distances in the rows of at most four of its files."""
    files = [file for file in dataset.files() if file.split == split]
    files = [files[at] for at in _even(len(files), MAX_FILES)]
    wanted = _even(sum(file.rows for file in files), num)
    found: dict[str, list[Array]] = {}
    begin = 0
    for file in files:
        for rows in dataset.rows(file):
            here = wanted[(wanted >= begin) & (wanted < begin + len(rows.t))] - begin
            for name, array in rows.observations.items():
                found.setdefault(name, []).append(array[here])
            begin += len(rows.t)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _even(num: int, most: int) -> Array:
    """Numbers below `num` at even distances, at most the wanted count."""
    return np.unique(np.linspace(0, num - 1, min(num, most)).astype(np.int64)) if num else np.zeros(0, np.int64)


def picture_columns(observations: dict[str, Array]) -> list[str]:
    """The columns that hold pictures: two axes of eight pixels or more, and perhaps colours or layers."""
    return [name for name, array in observations.items() if _is_picture(array.shape[1:])]


def _is_picture(shape: tuple[int, ...]) -> bool:
    return len(shape) in (2, 3) and sorted(shape)[-2] >= 8 and (len(shape) == 2 or min(shape) <= 32)


def as_picture(array: Array) -> Array:  # [H, W] or [H, W, 3]
    """One observation as matplotlib draws it; of layers, the number of the last one that is set in each place."""
    if array.ndim == 2:
        return array
    layers = np.moveaxis(array, int(np.argmin(array.shape)), -1)
    if layers.shape[-1] == 1:
        return np.asarray(layers[..., 0])
    if layers.shape[-1] == 3 and array.dtype == np.uint8:
        return layers
    numbers = np.arange(1, layers.shape[-1] + 1)
    return np.asarray((numbers * (layers != 0)).max(axis=-1))


def vectors(observations: dict[str, Array]) -> tuple[Array, list[str]]:  # [N, E], names of the elements
    """All columns but pictures as one vector per row."""
    pictures = set(picture_columns(observations))
    kept = {name: array.reshape(len(array), -1) for name, array in observations.items() if name not in pictures}
    names = [text for name, array in kept.items() for text in _element_names(name, array.shape[1])]
    if not kept:
        return np.zeros((0, 0)), []
    return np.concatenate([array.astype(np.float64) for array in kept.values()], axis=1), names


def _element_names(name: str, num: int) -> Iterator[str]:
    return (f"{name}[{at}]" if num > 1 else name for at in range(num))


def two_axes(values: Array, names: list[str]) -> tuple[Array, list[str]]:  # [N, E] -> [N, 2]
    """The values themselves if there are two, otherwise the first two principal components of scaled values."""
    if values.shape[1] <= 2:
        return values, names
    deviation = values.std(axis=0)
    scaled = (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    variance, axes = np.linalg.eigh(scaled.T @ scaled)
    variance = np.maximum(variance[::-1], 0.0)
    shares = variance[:2] / max(float(variance.sum()), 1e-12)
    labels = [
        f"{nth} component ({share:.0%} of the variance)" for nth, share in zip(("first", "second"), shares, strict=True)
    ]
    return scaled @ axes[:, ::-1][:, :2], labels
