from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.errors import UsageError
from qfleet.plan import Plan, compose, defaults_for, flatten, make_plan, paths, setting_text
from qfleet.plan.draft import KEEPS_SETTINGS, MEASURED, Assignment, Draft
from qfleet.plan.schema import Adam, AverageTarget, CopyTarget, MlpTorso, RayRuntime, Rmsprop, Sgd

HERE = "command line"


def write(folder: Path, text: str) -> str:
    file = folder / "plan.toml"
    file.write_text(text)
    return str(file)


def test_later_layers_win_and_every_value_has_its_origin(tmp_path: Path) -> None:
    file = write(tmp_path, 'seed = 7\n[algo]\nn_step = 4\nloss = "mse"\n')
    made = compose("CartPole-v1", "nstep", file, [("algo.n_step", "2", HERE)])
    assert (made.plan.algo.n_step, made.plan.algo.loss, made.plan.seed) == (2, "mse", 7)
    assert made.origins["algo.n_step"] == HERE
    assert made.origins["algo.loss"] == file
    assert made.origins["algo.rule.type"] == "preset nstep"
    assert made.origins["algo.batch_size"] == "defaults for CartPole-v1"
    assert made.origins["algo.discount"] == "default"
    assert made.origins["env.id"] == HERE
    assert made.origins.keys() == flatten(made.plan).keys()


def test_a_single_layer_sets_its_values() -> None:
    name, settings = defaults_for("CartPole-v1")
    plan = flatten(compose("CartPole-v1").plan)
    assert name == "cartpole"
    assert {path: plan[path] for path in settings} == settings


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("until.steps", "200_000", 200_000),
        ("until.steps", "1e6", 1_000_000),
        ("optim.learning_rate", "1e-3", 1e-3),
        ("optim.learning_rate", "1", 1.0),
        ("optim.clip_norm", "none", None),
        ("optim.clip_norm", "None", None),
        ("net.dueling", "true", True),
        ("net.dueling", "False", False),
        ("net.torso.sizes", "[128,64]", (128, 64)),
        ("net.torso.sizes", "128, 64", (128, 64)),
        ("net.torso.sizes", "32", (32,)),
        ("net.torso.sizes", "[]", ()),
        ("until.score", "-90", -90.0),
        ("algo.loss", "mse", "mse"),
        ("runtime.device", "cuda:1", "cuda:1"),
        ("runtime.device", "none", None),
        ("env.options.difficulty", "2", {"difficulty": 2}),
        ("env.options.gravity", "-9.5", {"gravity": -9.5}),
        ("env.options.wind", "true", {"wind": True}),
        ("env.options.mode", "inf", {"mode": "inf"}),
    ],
)
def test_text_is_read_by_the_type_of_the_setting(path: str, text: str, value: object) -> None:
    place = path if not path.startswith("env.options") else "env.options"
    found = flatten(compose("CartPole-v1", overrides=[("net.torso.type", "mlp", HERE), (path, text, HERE)]).plan)[place]
    assert found == value
    assert type(found) is type(value)


def test_options_join_those_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[env.options]\na = 1\nb = 2\n")
    made = compose("X-v0", file=file, overrides=[("env.options.b", "3", HERE), ("env.options.c", "x", HERE)])
    assert made.plan.env.options == {"a": 1, "b": 3, "c": "x"}


def test_choosing_a_type_resets_its_section() -> None:
    assert compose("CartPole-v1").plan.optim != Adam()
    assert compose("CartPole-v1", overrides=[("optim.type", "sgd", HERE)]).plan.optim == Sgd()
    made = compose("CartPole-v1", overrides=[("algo.target.type", "copy", HERE)])
    assert made.plan.algo.target == CopyTarget()
    assert made.origins["algo.target.every_updates"] == "default"
    assert "algo.target.tau" not in made.origins


def test_naming_the_current_type_resets_nothing() -> None:
    plan = compose("CartPole-v1", overrides=[("algo.target.type", "average", HERE)]).plan
    assert plan.algo.target == compose("CartPole-v1").plan.algo.target != AverageTarget()


def test_order_within_a_layer_does_not_matter(tmp_path: Path) -> None:
    settings = [("optim.decay", "0.9", HERE), ("optim.type", "rmsprop", HERE)]
    assert compose("CartPole-v1", overrides=settings).plan.optim == Rmsprop(decay=0.9)


def test_an_explicit_setting_that_would_be_dropped_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, '[optim]\ntype = "rmsprop"\nlearning_rate = 0.5\n')
    with pytest.raises(UsageError) as caught:
        compose("CartPole-v1", file=file, overrides=[("optim.type", "sgd", HERE)])
    assert caught.value.what == f"optim.learning_rate=0.5 has no effect ({file})"


def test_dropping_an_explicit_default_is_no_error(tmp_path: Path) -> None:
    file = write(tmp_path, '[optim]\ntype = "rmsprop"\ndecay = 0.95\n')
    assert compose("CartPole-v1", file=file, overrides=[("optim.type", "sgd", HERE)]).plan.optim == Sgd()


RUNTIMES = ("inline", "processes", "ray")
MACHINE = 'device = "cpu"\nthreads = 1\n'


@pytest.mark.parametrize("below", ["", *RUNTIMES])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_plan_file_goes_with_every_runtime(runtime: str, below: str, tmp_path: Path) -> None:
    file = write(tmp_path, "[runtime]\n" + MACHINE + (f'type = "{below}"\n' if below else ""))
    made = compose("CartPole-v1", file=file, overrides=[("runtime.type", runtime, HERE)])
    assert paths.tag_of(type(made.plan.runtime)) == runtime
    assert (made.plan.runtime.device, made.plan.runtime.threads) == ("cpu", 1)
    assert (made.origins["runtime.device"], made.origins["runtime.threads"]) == (file, file)
    assert made.origins.keys() == flatten(made.plan).keys()


def test_changing_the_runtime_keeps_shared_settings_of_a_preset() -> None:
    draft = Draft()
    preset = {"runtime.type": "processes", "runtime.threads": 3, "runtime.inference": "local"}
    draft.apply_layer(Assignment(path, value, "preset some", explicit=False) for path, value in preset.items())
    draft.apply_layer(
        [Assignment("env.id", "X-v0", HERE), Assignment("runtime.type", "ray", HERE, text=True, explicit=True)]
    )
    assert draft.plan().runtime == RayRuntime(threads=3)
    assert draft.origins["runtime.threads"] == "preset some"


def test_defaults_of_one_runtime_do_not_apply_to_another(tmp_path: Path) -> None:
    file = write(tmp_path, '[runtime]\ntype = "processes"\nslots = 3\n')
    made = compose("CartPole-v1", file=file, overrides=[("runtime.type", "ray", HERE)])
    assert made.plan.runtime == RayRuntime(slots=3)
    assert (made.origins["runtime.slots"], made.origins["runtime.chunk_rows"]) == (file, "default")


def test_settings_that_the_new_runtime_lacks_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, '[runtime]\ntype = "processes"\nchunk_rows = 5\nslots = 3\n' + MACHINE)
    with pytest.raises(UsageError) as caught:
        compose("CartPole-v1", file=file, overrides=[("runtime.type", "inline", HERE)])
    assert caught.value.what == f"runtime.chunk_rows=5, runtime.slots=3 have no effect ({file})"
    assert caught.value.why == "runtime.type=inline (command line) replaces processes and has no chunk_rows, slots."
    assert caught.value.fix == f"Leave runtime.chunk_rows, runtime.slots out of {file}, or keep runtime.type=processes."


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_a_measured_local_inference_is_dropped_by_another_runtime(runtime: str, tmp_path: Path) -> None:
    measured = 'inference = "local"\ninference_device = "cpu"\n'
    file = write(tmp_path, '[runtime]\ntype = "processes"\n' + measured + MACHINE)
    made = compose("CartPole-v1", file=file, overrides=[("runtime.type", runtime, HERE)])
    assert paths.tag_of(type(made.plan.runtime)) == runtime
    assert not any(path in made.origins for path in MEASURED)


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_central_inference_is_not_dropped_silently(runtime: str, tmp_path: Path) -> None:
    file = write(tmp_path, '[runtime]\ntype = "processes"\ninference = "central"\ninference_device = "cpu"\n')
    with pytest.raises(UsageError, match=r"runtime\.inference=central, runtime\.inference_device=cpu have no effect"):
        compose("CartPole-v1", file=file, overrides=[("runtime.type", runtime, HERE)])


def test_several_actors_in_a_file_do_not_go_with_inline(tmp_path: Path) -> None:
    file = write(tmp_path, '[actors]\nnum = 2\n[runtime]\ntype = "processes"\n')
    with pytest.raises(UsageError) as caught:
        compose("CartPole-v1", file=file, overrides=[("runtime.type", "inline", HERE)])
    assert caught.value.what == f"actors.num=2 ({file}) does not go with runtime.type=inline (command line)"
    assert caught.value.fix == "Set runtime.type=processes or ray, or leave actors.num at 1."


@pytest.mark.parametrize("section", KEEPS_SETTINGS)
def test_kept_settings_are_valid_in_the_new_variant(section: str) -> None:
    for path, leaves in paths.index().leaves.items():
        if path.startswith(f"{section}."):
            assert all(leaf.hint == leaves[0].hint for leaf in leaves), path


def test_an_absent_torso_can_be_chosen_and_given_back() -> None:
    assert compose("X-v0").plan.net.torso is None
    plan = compose("X-v0", overrides=[("net.torso.type", "mlp", HERE), ("net.torso.sizes", "8", HERE)]).plan
    assert plan.net.torso == MlpTorso(sizes=(8,))
    for path in ("net.torso", "net.torso.type"):
        assert compose("CartPole-v1", overrides=[(path, "none", HERE)]).plan.net.torso is None


def test_the_environment_may_come_from_any_layer(tmp_path: Path) -> None:
    file = write(tmp_path, '[env]\nid = "Acrobot-v1"\n')
    assert compose(file=file).plan.env.id == "Acrobot-v1"
    assert compose(file=file).defaults == "acrobot"
    assert compose("CartPole-v1", file=file).defaults == "cartpole"
    made = compose("CartPole-v1", file=file, overrides=[("env.id", "MountainCar-v0", HERE)])
    assert (made.plan.env.id, made.defaults) == ("MountainCar-v0", "mountaincar")


@pytest.mark.parametrize("env_id", ["os:X-v0", "maze.py:Maze", "a.b.c:D-v1"])
def test_code_is_named_on_the_command_line_or_not_at_all(env_id: str, tmp_path: Path) -> None:
    file = write(tmp_path, f'[env]\nid = "{env_id}"\n')
    with pytest.raises(UsageError, match="names code to run"):
        compose(file=file)
    assert compose(env_id, file=file).plan.env.id == env_id
    assert compose(file=file, overrides=[("env.id", env_id, HERE)]).plan.env.id == env_id


def test_python_values_need_no_text() -> None:
    plan = make_plan("CartPole-v1", "per", {"algo.n_step": 3, "net.torso.sizes": [16], "optim.clip_norm": None})
    assert (plan.algo.n_step, plan.net.torso, plan.optim.clip_norm) == (3, MlpTorso(sizes=(16,)), None)
    assert Plan.of("CartPole-v1", "per", {"algo.n_step": 3}) == make_plan("CartPole-v1", "per", {"algo.n_step": 3})
    with pytest.raises(UsageError, match=r"algo.n_step=3.5 is not valid \(Python\)"):
        make_plan("CartPole-v1", overrides={"algo.n_step": 3.5})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("algo.n_steps", "algo.n_step"),
        ("algo.batchsize", "algo.batch_size"),
        ("capacity", "replay.capacity"),
        ("dueling", "net.dueling"),
        ("learning_rate", "optim.learning_rate"),
        ("optim.lr", "optim.learning_rate"),
        ("algo.gamma", "algo.discount"),
        ("total_timesteps", "until.steps"),
        ("sed", "seed"),
        ("zzzzzz", None),
    ],
)
def test_nearest_path(typed: str, meant: str | None) -> None:
    assert setting_text.nearest_path(typed) == meant


@given(st.sampled_from(paths.index().paths()), st.text(max_size=12))
def test_any_text_is_a_value_or_a_usage_error(path: str, text: str) -> None:
    try:
        plan = compose("CartPole-v1", overrides=[(path, text, HERE)]).plan
    except UsageError:
        return
    assert paths.unflatten(flatten(plan)) == plan
