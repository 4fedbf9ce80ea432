"""The benchmark of data sets: its table, and a small round of batches."""

from pathlib import Path

import pytest

from benchmarks import data, data_batches


def row(name: str, ours: float, **more: object) -> dict[str, object]:
    return {"row": name, "unit": "batches/s", "ours": ours, "limit": 10.0, "bar": 0.8, **more}


def test_medians_of_the_ratios_decide() -> None:
    rounds = [[row("a", 9.0), row("b", 1.0, most=True)], [row("a", 2.0), row("b", 9.0, most=True)], [row("a", 8.5)]]
    first, second = data.medians(rounds)
    assert (first["ratio"], first["met"]) == (0.85, True)
    assert second["ratio"] == pytest.approx(0.5)
    assert second["met"]
    assert not data.median([row("a", 7.9)])["met"]
    assert "| a | batches/s | 8.50 | 10.0 | 0.85 | 0.90, 0.20, 0.85 | at least 0.8 | yes |" in data.markdown([first])


@pytest.mark.parametrize("spec", [data_batches.VECTORS, data_batches.PICTURES])
def test_ours_and_the_limit_read_the_same_rows(tmp_path: Path, spec: data_batches.Spec) -> None:
    case = data_batches.Case("small", spec, 6, 40, 16, 1 << 20)
    data_batches.write(case, tmp_path / "set")
    source = data_batches.open_source(case, tmp_path / "set")
    arrays = data_batches.MappedArrays(source, tmp_path, spec.stack)
    batch = source.next_batch(0)
    gathered = arrays.gather(arrays.rows_of(source, batch.ids))
    newest = (slice(None), -1) if spec.stack > 1 else (slice(None),)
    assert (gathered[0][newest] == batch.obs[newest]).all()
    assert (gathered[1] == batch.action).all()
    assert (gathered[2] == batch.reward).all()
    assert (gathered[4][newest] == batch.next_obs[newest]).all()
    source.close()
