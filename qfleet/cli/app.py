"""The command-line app with all verbs. Importing it imports neither torch nor numpy: verbs import what they need."""

from importlib.metadata import PackageNotFoundError, version

from cyclopts import App, Parameter

from qfleet.cli import compare, completion, doctor, env, plan, results, runs, sync, training
from qfleet.cli.arguments import ABOUT, LOOK, PREPARE, TRAIN
from qfleet.cli.offline import data, workflow
from qfleet.cli.policies import evaluate, play


def installed_version() -> str:
    """The version of the installed package."""
    try:
        return version("qfleet")
    except PackageNotFoundError:
        return "unknown (not installed)"


app = App(
    name="qfleet",
    help="Deep Q-learning, exact and resumable.",
    help_epilogue=(
        "First steps:\n"
        "  qfleet train CartPole-v1\n"
        "  qfleet plot latest\n\n"
        "Exit codes: 0 done, 1 bug, 2 usage or plan, 3 diverged, 4 environment,\n"
        "5 storage, 6 no usable checkpoint, 75 stopped early but resumable,\n"
        "130/143 by signal after saving.\n"
        "--debug with any command shows the traceback of an error."
    ),
    version=installed_version,
    help_format="plaintext",
    default_parameter=Parameter(negative=""),
    group_commands=ABOUT,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)

app.command(
    training.train,
    group=TRAIN,
    usage="Usage: qfleet train ENV [OPTIONS] [path=value ...]",
    help_epilogue=(
        "Examples:\n"
        "  qfleet train CartPole-v1\n"
        "  qfleet train LunarLander-v3 --preset per --steps 200_000 algo.n_step=3\n"
        "  qfleet train my_env.py:MyEnv --plan my.toml --dry-run\n"
        "  qfleet train CartPole-v1 --seeds 5"
    ),
)
app.command(
    training.resume,
    group=TRAIN,
    help_epilogue="Examples:\n  qfleet resume latest\n  qfleet resume cartpole-dqn-0007 --steps 100_000",
)
app.command(
    sync.sync,
    group=TRAIN,
    usage="Usage: qfleet sync RUN path=value ... [OPTIONS]",
    help_epilogue="Example:\n  qfleet sync latest sync.type=server sync.max_staleness=4",
)
app.command(
    evaluate.evaluate,
    name="eval",
    group=LOOK,
    usage="Usage: qfleet eval RUN [OPTIONS] [env.PATH=value ...]",
    help_epilogue=(
        "Examples:\n"
        "  qfleet eval latest --episodes 200 --json\n"
        "  qfleet eval latest env.options.gravity=-12\n"
        "  qfleet eval latest --env CartPole-v0\n"
        "  qfleet eval latest --variants variants.toml"
    ),
)
app.command(
    play.play,
    group=LOOK,
    usage="Usage: qfleet play RUN [OPTIONS] [env.PATH=value ...]",
    help_epilogue="Examples:\n  qfleet play latest\n  qfleet play latest --episodes 5 --fps 15 --terminal",
)
app.command(results.record, group=LOOK, help_epilogue="Example:\n  qfleet record latest --episodes 3")
app.command(results.plot, group=LOOK, help_epilogue="Example:\n  qfleet plot latest cartpole-dqn-0001 --file both.png")
app.command(
    compare.compare,
    group=LOOK,
    usage="Usage: qfleet compare SIDE [SIDE ...] [OPTIONS]",
    help_epilogue=(
        "Examples:\n  qfleet compare latest\n  qfleet compare cartpole-dqn-0001 cartpole-dqn-0002 --file both.png"
    ),
)
app.command(results.verify, group=LOOK, help_epilogue="Example:\n  qfleet verify latest")
app.command(runs.app)
app.command(plan.app)
app.command(plan.presets, group=PREPARE, help_epilogue="Example:\n  qfleet presets per")
app.command(env.app)
app.command(data.app)
app.command(workflow.workflow, group=TRAIN, help_epilogue="Example:\n  qfleet workflow examples/workflow_cartpole.toml")
app.command(doctor.doctor, group=PREPARE, help_epilogue="Example:\n  qfleet doctor")
app.command(completion.app)
app.command(completion.install, name="--install-completion", group=ABOUT)
