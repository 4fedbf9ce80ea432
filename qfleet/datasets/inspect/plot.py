"""A picture of a data set: returns, lengths, actions, and what its observations cover; a colour for each split.

Needs the extra `plot`. No window, no global state.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qfleet.data import Array
from qfleet.datasets.format import Dataset
from qfleet.datasets.inspect.sample import as_picture, picture_columns, sample_observations, two_axes, vectors
from qfleet.errors import StorageError, UsageError
from qfleet.escape import escaped
from qfleet.files import replace_inside
from qfleet.install import install_command
from qfleet.plan.local_paths import local_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with any colour vision and in print.
COLOURS = {"all": "#0072B2", "train": "#0072B2", "validation": "#D55E00", "test": "#009E73"}
FORMATS = (".png", ".svg", ".pdf")
NUM_BINS = 40
NUM_POINTS = 2_000  # of a split
NUM_FRAMES = 8  # of a split
MOST_ACTIONS = 24
INK = "#333333"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "qfleet",
}


def plot_dataset(dataset: Dataset, file: str) -> Path:
    """Draw a data set into a file; returns its path."""
    target = picture_path(file)
    mpl = _require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    splits = [split for split in COLOURS if split in dataset.statistics]
    samples = {split: sample_observations(dataset, split, NUM_POINTS) for split in splits}
    with mpl.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12)
        figure = Figure(figsize=(12, 4.5 + _lower_height(samples)), dpi=100, layout=layout)
        _draw(figure, dataset, samples)
        picture = io.BytesIO()
        figure.savefig(picture, format=target.suffix[1:].lower())
    try:
        replace_inside(target.parent, target.name, picture.getvalue())
    except OSError as error:
        raise StorageError(f"{target} cannot be written", f"{error}.", "Choose another folder.") from error
    return target


def _lower_height(samples: dict[str, dict[str, Array]]) -> float:
    """Inches of the lower half: of frames, by their rows."""
    sample = next(iter(samples.values()), {})
    return 1.7 * _frame_rows(len(samples)) if picture_columns(sample) else 5.0


def _frame_rows(num_splits: int) -> int:
    return 2 if num_splits == 1 else num_splits


def picture_path(file: str) -> Path:
    """The path of a picture that can be written; UsageError if it cannot."""
    path = local_path(file)
    if path.suffix.lower() in FORMATS and path.parent.is_dir():
        return path
    raise UsageError(
        f"cannot draw into {file}",
        "Its folder does not exist." if path.suffix.lower() in FORMATS else "The end of a name chooses the format.",
        "Give a name like data.png (or .svg, .pdf) in a folder that exists.",
    )


def _require_matplotlib() -> Any:
    try:
        import matplotlib as mpl
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(
            "plots need the package matplotlib",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('plot')}",
        ) from error
    return mpl


def _draw(figure: "Figure", dataset: Dataset, samples: dict[str, dict[str, Array]]) -> None:
    manifest = dataset.manifest
    columns = picture_columns(next(iter(samples.values()), {}))
    halves: Any = figure.subfigures(2, 1, height_ratios=(4.0, _lower_height(samples)))
    upper, lower = halves
    returns, lengths, actions = upper.subplots(1, 3)
    _draw_histogram(returns, dataset, list(samples), "undiscounted_return", "return of an episode")
    _draw_histogram(lengths, dataset, list(samples), "length", "length of an episode (steps)")
    _draw_actions(actions, dataset, list(samples))
    if columns:
        _draw_frames(lower, {split: sample[columns[0]] for split, sample in samples.items()})
    else:
        _draw_coverage(lower.subplots(), samples)
    counts = f"{manifest.num_episodes:,} episodes, {manifest.num_steps:,} steps"
    figure.suptitle(f"{_text(manifest.env_id)} · {counts} · version {dataset.version[:12]}", fontweight="bold")


def _text(text: str) -> str:
    """A name as matplotlib shall draw it, with $ escaped, which would begin mathematics."""
    return escaped(text)[:100].replace("$", r"\$")


def _draw_histogram(axes: "Axes", dataset: Dataset, splits: list[str], field: str, label: str) -> None:
    values = {split: _of_split(dataset, split, field) for split in splits}
    edges = _edges(values)
    for split, found in values.items():
        weights = np.full(len(found), 1 / max(1, len(found)))
        style: dict[str, Any] = {"color": COLOURS[split], "weights": weights}
        if len(values) == 1:
            axes.hist(found, edges, histtype="stepfilled", alpha=0.2, **style)
        text = f"{split} {np.median(found) if len(found) else 0.0:.4g}"
        axes.hist(found, edges, histtype="step", linewidth=1.8, label=text, **style)
        axes.axvline(float(np.median(found)), color=COLOURS[split], linewidth=1.2, linestyle=":")
    axes.set_xlabel(label)
    axes.set_ylabel("share of episodes")
    _percent(axes)
    _legend(axes, "medians (dotted):")


def _of_split(dataset: Dataset, split: str, field: str) -> Array:
    return np.array([getattr(row, field) for row in dataset.index if row.split == split], np.float64)


def _edges(values: dict[str, Array]) -> list[float]:
    """Edges of bins: around each number if there are few whole ones, otherwise few bins for few episodes."""
    found = np.concatenate([*values.values(), np.zeros(0)])
    low, high = (float(found.min()), float(found.max())) if len(found) else (0.0, 1.0)
    if high - low <= 12 and (found == np.round(found)).all():
        return list(np.arange(low - 0.5, high + 1.0))
    fewest = min(map(len, values.values()))
    return list(np.linspace(low, high, int(np.clip(2 * np.sqrt(fewest), 8, NUM_BINS)) + 1))


def _draw_actions(axes: "Axes", dataset: Dataset, splits: list[str]) -> None:
    """How often each action was chosen; of many actions, the most frequent ones."""
    found = {split: dataset.statistics[split].actions for split in splits}
    counts = {split: np.array(actions, np.float64) for split, actions in found.items() if actions}
    if not counts:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "too many actions\nto count", ha="center", va="center")
        return
    total = np.sum(list(counts.values()), axis=0)
    shown = np.sort(np.argsort(-total, kind="stable")[:MOST_ACTIONS])
    width = 0.8 / len(counts)
    for at, (split, each) in enumerate(counts.items()):
        places = np.arange(len(shown)) + (at - (len(counts) - 1) / 2) * width
        axes.bar(places, each[shown] / max(1.0, each.sum()), width, color=COLOURS[split], alpha=0.75, label=split)
    axes.set_xticks(
        range(len(shown)), [str(number) for number in shown.tolist()], fontsize=11 if len(shown) < 13 else 8
    )
    axes.grid(visible=False, axis="x")
    more = f", the {len(shown)} most frequent of {len(total):,}" if len(total) > len(shown) else ""
    axes.set_xlabel(f"number of the action{more}")
    axes.set_ylabel("share of steps")
    _percent(axes)
    _legend(axes, "splits:")


def _draw_coverage(axes: "Axes", samples: dict[str, dict[str, Array]]) -> None:
    parts = {split: vectors(sample) for split, sample in samples.items()}
    names = next((names for _, names in parts.values()), [])
    if not names:
        axes.set_axis_off()
        return
    places, labels = two_axes(np.concatenate([values for values, _ in parts.values()]), names)
    begin = 0
    for split, (values, _) in parts.items():
        here = places[begin : begin + len(values)]
        begin += len(values)
        text = f"{len(values):,} of {split}"
        if here.shape[1] == 1:
            axes.hist(here[:, 0], NUM_BINS, color=COLOURS[split], alpha=0.4, label=text)
        else:
            axes.scatter(here[:, 0], here[:, 1], s=9, color=COLOURS[split], alpha=0.35, linewidths=0, label=text)
    axes.set_xlabel(_text(labels[0]))
    axes.set_ylabel(_text(labels[1]) if len(labels) > 1 else "observations")
    _legend(axes, "observations, evenly from each split:")


def _draw_frames(figure: Any, frames: dict[str, Array]) -> None:
    """A row of frames for each split; of one split, two."""
    grid = figure.subplots(_frame_rows(len(frames)), NUM_FRAMES, squeeze=False)
    rows = len(grid) // len(frames)
    for at, (split, found) in enumerate(frames.items()):
        places = grid[at * rows : (at + 1) * rows].ravel()
        chosen = found[np.linspace(0, len(found) - 1, len(places)).astype(np.int64)]
        for axes, frame in zip(places, chosen, strict=True):
            axes.imshow(as_picture(frame), cmap="gray" if frame.ndim == 2 else "viridis", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
        places[0].set_ylabel(split, color=COLOURS[split], fontweight="bold")
    figure.suptitle("observations, evenly from each split", x=0.01, ha="left", fontsize=11)


def _percent(axes: "Axes") -> None:
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share * 100 % 1 < 1e-9 else f"{share:.1%}")


def _legend(axes: "Axes", title: str) -> None:
    """Above the axes, so that it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    style: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.1, "ncols": 4}
    style |= {"handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 0.9, "fontsize": 9, "title_fontsize": 9}
    legend = axes.legend(handles, labels, title=title, alignment="left", **style)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
