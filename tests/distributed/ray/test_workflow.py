"""A workflow on Ray: the same file, the same first parameters and the same numbers as in one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.workflow.workflows import PLAN, run

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]


def rows(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = report[name] if isinstance(report[name], list) else [report[name]]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def test_two_learners_on_ray_make_the_numbers_of_two_in_processes_here(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    here = run(tmp_path, PLAN, learn__learners__num="2")
    processes = run(tmp_path, PLAN, learn__learners__num="2", learn__runtime__type="processes")
    ray = run(tmp_path, PLAN, learn__learners__num="2", learn__runtime__type="ray", learn__runtime__learner_cpus="0.5")
    assert [report["learning"]["runtime"] for report in (here, processes, ray)] == ["inline", "processes", "ray"]
    for report in (processes, ray):
        assert report["first_parameters"] == here["first_parameters"]
        assert report["first_parameters"]["learners"] == 2
        for name in ("validation", "test"):
            assert rows(report, name) == rows(here, name)
    assert [stage["skipped"] for stage in ray["stages"]] == [True, False, True, False, False]
