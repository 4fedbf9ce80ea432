"""What other packages read of an export, and write for an import: slow, and only where they are installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.datasets.convert import import_dataset
from qfleet.datasets.convert.minari_export import export_minari
from qfleet.datasets.convert.minari_import import MinariImporter
from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from tests.datasets.convert.cases import ACTIONS, OBSERVATIONS, episodes_of, made_dataset, require_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MINARI = "minari[create,hdf5,arrow]==0.5.4"
PILLOW = "pillow>=11.0"  # which its Arrow storage imports, and none of these extras brings
READ = """
import json
import sys
import numpy as np
import minari

found = minari.MinariDataset(sys.argv[1])


def plain(value):
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return np.asarray(value).tolist()


episodes = [
    [plain(part) for part in (each.observations, each.actions, each.rewards, each.terminations, each.truncations)]
    for each in found.iterate_episodes()
]
print(json.dumps({"spaces": [str(found.observation_space), str(found.action_space)], "episodes": episodes}))
"""


@pytest.fixture(scope="session")
def minari_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with Minari: that of QFLEET_MINARI_PYTHON, or a new environment."""
    if given := os.environ.get("QFLEET_MINARI_PYTHON"):
        return given
    place = tmp_path_factory.mktemp("minari")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=120)
    python = str(place / "bin/python")
    done = subprocess.run(
        [python, "-m", "pip", "-q", "install", MINARI, PILLOW], capture_output=True, text=True, timeout=400
    )
    if done.returncode:
        pytest.skip(f"{MINARI} cannot be installed: {done.stderr[-300:]}")
    return python


@pytest.mark.parametrize("name", ["dict", "vector", "picture", "number"])
def test_minari_reads_an_export(tmp_path: Path, minari_python: str, name: str) -> None:
    made = made_dataset(tmp_path / "a", OBSERVATIONS[name], ACTIONS["several"], [1, 4, 2], 3, False)
    export_minari(made, str(tmp_path / "there"))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [minari_python, "-c", READ, str(tmp_path / "there" / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spaces"][1] == str(ACTIONS["several"])
    assert sorted(found["spaces"][0]) == sorted(str(OBSERVATIONS[name]))  # Minari sorts the parts of a Dict
    episodes = episodes_of(made)
    assert len(found["episodes"]) == len(episodes)
    for theirs, mine in zip(found["episodes"], episodes, strict=True):
        assert theirs[2] == mine.reward.tolist()
        assert theirs[3][-1] == mine.terminated
        assert theirs[4][-1] == mine.truncated
        if "obs" in mine.observations:
            assert theirs[0] == mine.observations["obs"].tolist()
        else:
            assert theirs[0]["place"] == mine.observations["obs/place"].tolist()
            assert theirs[0]["pair"][1] == mine.observations["obs/pair/1"].tolist()


WRITE = """
import os
import sys
import gymnasium as gym
import minari
from gymnasium import spaces
import numpy as np

storage = sys.argv[1]


class Small(gym.Env):
    observation_space = spaces.Dict({"place": spaces.Box(-9, 9, (2,), np.float32), "kind": spaces.Discrete(4)})
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def see(self):
        return {"place": self.np_random.uniform(-9, 9, 2).astype(np.float32), "kind": int(self.np_random.integers(4))}

    def step(self, action):
        self.t += 1
        return self.see(), float(self.np_random.normal()), self.t == 3, self.t == 2 and bool(action[0]), {}


env = minari.DataCollector(Small(), data_format=storage)
env.action_space.seed(0)
for number in range(6):
    env.reset(seed=number)
    ended = False
    while not ended:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        ended = terminated or truncated
made = env.create_dataset(dataset_id=f"small/{storage}-v0", algorithm_name="x")
print([float(each.rewards.sum()) for each in made.iterate_episodes()])
"""


@pytest.mark.parametrize("storage", ["hdf5", "arrow", "parquet"])
def test_each_storage_that_minari_writes_is_imported(tmp_path: Path, minari_python: str, storage: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["MINARI_DATASETS_PATH"] = str(tmp_path / "sets")
    done = subprocess.run(
        [minari_python, "-c", WRITE, storage], capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    returns = json.loads(done.stdout.splitlines()[-1])
    import_dataset(MinariImporter(str(tmp_path / f"sets/small/{storage}-v0")), str(tmp_path / "a"))
    made = open_dataset(str(tmp_path / "a"))
    assert validate_dataset(made) == []
    assert [episode.undiscounted_return for episode in episodes_of(made)] == pytest.approx(returns, abs=1e-12)
    assert made.manifest.spec.actions == (2, 3)
    export_minari(made, str(tmp_path / "b"))
    import_dataset(MinariImporter(str(tmp_path / "b")), str(tmp_path / "c"))
    require_same(made, open_dataset(str(tmp_path / "c")))
