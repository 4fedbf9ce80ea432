"""Numbers, rows and snapshots as text; shared by the plain watcher, the live screen and the card."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

RAMP = "▁▂▃▄▅▆▇█"
ASCII_RAMP = "_.-=+*#@"
SHOWN_SHARE = 0.03  # stages that take less of the time are in `--profile`'s table only
MOST_INFO_SHOWN = 4  # numbers of log.info in one line
LEAVING = "saving... (Ctrl-C once more leaves at once)"


def number(value: Any, missing: str = "–") -> str:
    """Three or four significant digits, thousands apart, or a dash."""
    if value is None or not math.isfinite(value):
        return missing
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.{1 if size >= 10 else 2}f}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """42 s, 3:07, 2:05:00, or 4 d 3 h."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def interval(row: Mapping[str, Any]) -> str:
    """The mean of an evaluation with its 95 % interval: 498.1 [491.0, 500.0]."""
    return f"{number(row.get('mean'))} [{number(row.get('low'))}, {number(row.get('high'))}]"


def seconds_left(snapshot: Mapping[str, Any]) -> float | None:
    """Seconds until the planned number of steps at the current speed."""
    until = snapshot.get("until_steps")
    speed = snapshot.get("steps_per_second")
    if not until or not speed or not math.isfinite(speed):
        return None
    return max(0.0, float(until - (snapshot.get("env_steps") or 0)) / float(speed))


def share(part: Any, whole: Any) -> float:
    """part / whole between 0 and 1; 0 when unknown."""
    return min(1.0, max(0.0, part / whole)) if part and whole else 0.0


def sparkline(values: Sequence[float], width: int, ramp: str = RAMP) -> str:
    """`values` as a curve of at most `width` characters, each the mean of its share of them."""
    num = len(values)
    columns = min(num, width)
    if columns < 1:
        return ""
    edges = [index * num // columns for index in range(columns + 1)]
    heights = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(heights)
    high = max(heights)
    if high <= low:
        return ramp[len(ramp) // 2] * columns
    return "".join(ramp[min(len(ramp) - 1, int((x - low) / (high - low) * len(ramp)))] for x in heights)


def device_text(info: Mapping[str, Any]) -> str:
    """The device and its threads: cpu, 2 threads."""
    threads = info.get("threads")
    return str(info.get("device") or "cpu") + (f", {threads} thread{'s' * (threads != 1)}" if threads else "")


def evaluation_line(row: Mapping[str, Any]) -> str:
    """One evaluation in one line."""
    kind = "test" if row.get("split") == "test" else "evaluation"
    return (
        f"{kind} at {number(row.get('env_steps'))} steps: {interval(row)}"
        f" · {number(row.get('episodes'))} episodes · iqm {number(row.get('iqm'))}"
        f"{cut_episodes_text(row)}{info_text(row)}"
    )


def info_text(row: Mapping[str, Any]) -> str:
    """The means of the numbers of log.info, if any."""
    names = [name for name, value in row.items() if name.startswith("info.") and isinstance(value, int | float)]
    return "".join(f" · {name.removeprefix('info.')} {number(row[name])}" for name in names[:MOST_INFO_SHOWN])


def cut_episodes_text(row: Mapping[str, Any]) -> str:
    """How many episodes of an evaluation were cut at eval.max_steps, if any."""
    return f" · {number(row['cut_episodes'])} of them cut at eval.max_steps" if row.get("cut_episodes") else ""


def remark_line(row: Mapping[str, Any]) -> str:
    """A row's text, such as a change of settings, in one line."""
    return f"at {number(row.get('env_steps'))} steps: {row.get('text')}"


def progress_line(snapshot: Mapping[str, Any]) -> str:
    """The state of training in one line."""
    parts = [
        f"{number(snapshot.get('env_steps'))} / {number(snapshot.get('until_steps'))} steps",
        f"return {number(snapshot.get('return_mean'))}",
        f"loss {number(snapshot.get('loss'))}",
        f"epsilon {number(snapshot.get('epsilon'))}",
        f"{number(snapshot.get('steps_per_second'))} steps/s",
        f"{number(snapshot.get('updates_per_second'))} updates/s",
        f"{duration(seconds_left(snapshot))} left",
        *learner_parts(snapshot),
    ]
    return " · ".join(parts)


def learner_parts(snapshot: Mapping[str, Any]) -> list[str]:
    """What the learner is doing, the age of the acting policy, and the age of sampled steps."""
    lag = snapshot.get("policy_lag")
    age = snapshot.get("replay_age")
    return [
        *([str(snapshot["gate"])] if snapshot.get("gate") else []),
        *([f"lag {number(lag)}"] if lag is not None else []),
        *([f"age {number(round(age))}"] if age is not None else []),
    ]


def compression_lines(profile: Mapping[str, Any]) -> list[str]:
    """The bytes that compression saved and the seconds it took, if any."""
    return [
        f"{name} {found['raw_bytes'] / max(1, found['packed_bytes']):.1f}x smaller "
        f"({megabytes(found['packed_bytes'])} for {megabytes(found['raw_bytes'])}) for {found['seconds']:.1f} s"
        for name, found in profile.get("compression", {}).items()
    ]


def megabytes(count: float) -> str:
    """A number of bytes in MB or GB."""
    return f"{count / 1e6:,.0f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"


def time_line(profile: Mapping[str, Any]) -> str:
    """Where the time went, in one line: seconds by stage, busy shares, the bottleneck and advice."""
    spent = sorted(profile["seconds"].items(), key=lambda item: -item[1])
    shown = [f"{stage} {seconds:.1f} s" for stage, seconds in spent if seconds >= SHOWN_SHARE * profile["wall_seconds"]]
    busy = f"learner busy {profile['learner_busy']:.0%}"
    if "actors_busy" in profile:
        lost = profile.get("actors_lost", 0)
        num = f"{profile['actors'] - lost} of {profile['actors']}" if lost else f"{profile['actors']}"
        busy += f", {num} actors {profile['actors_busy']:.0%}"
    if "speed_up" in profile:  # runs of earlier versions have none
        busy += f" · speed-up {profile['speed_up']:.2f}x, parallel efficiency {profile['parallel_efficiency']:.0%}"
    energy = profile.get("joules_per_million_steps")
    joules = [] if energy is None else [f"{number(energy)} J per million steps"]
    advice = f"{profile['bottleneck']}-bound: {profile['advice']}"
    return " · ".join([", ".join(shown), busy, *joules, *compression_lines(profile), advice])


def chosen_lines(score: Mapping[str, Any], best: Any) -> list[str]:
    """Context of a score: how many validations its policy was chosen from, and the last of them."""
    last = score.get("last_eval")
    if not isinstance(last, Mapping):
        return []
    if score.get("which") == "latest":
        return ["       of the last weights: the best checkpoint could not be used"] if best else []
    count = number(score.get("best_of"), missing="all its")
    same = last.get("env_steps") == score.get("checkpoint")
    return [
        f"       of the best of {count} validations, at {number(score.get('checkpoint'))} steps; "
        + ("which was the last one" if same else f"the last, at {number(last.get('env_steps'))}: {interval(last)}")
    ]


def end_lines(status: Mapping[str, Any]) -> list[str]:
    """How the run ended: state and reason, the reported score, and the resume command if it stopped early."""
    reason = f": {status['reason']}" if status.get("reason") else ""
    counts = f"{number(status.get('env_steps'))} steps, {number(status.get('updates'))} updates"
    lines = [f"{status.get('state', 'ended')}{reason} ({counts})"]
    lines += [f"lost: {worker}" for worker in status.get("lost") or ()]
    score = status.get("score")
    if score:
        lines.append(
            f"score {interval(score)} · mean and 95 % interval of {number(score.get('episodes'))} test episodes"
            f"{cut_episodes_text(score)}"
        )
        lines += chosen_lines(score, status.get("best"))
    if status.get("filtered") is not None:
        lines.append(f"filtered {status['filtered']:.1%} of the steps out of the replay")
    if status.get("resume") and status.get("exit_code"):
        lines.append(f"to go on: {status['resume']}")
    return lines
