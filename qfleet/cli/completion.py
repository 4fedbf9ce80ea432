"""`qfleet completion`: Tab completes verbs, options and presets."""

from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App, Parameter

from qfleet.cli.arguments import ABOUT, COMMANDS
from qfleet.cli.output import echo
from qfleet.errors import StorageError, UsageError

Shell = Literal["bash", "zsh", "fish"]
ShellName = Annotated[str | None, Parameter(name="--shell", help="bash, zsh or fish; found out otherwise.")]

app = App(
    name="completion",
    help="Completion with the Tab key, for bash, zsh and fish.",
    group=ABOUT,
    group_commands=COMMANDS,
    help_epilogue="Example:\n  qfleet completion install",
)


def install(
    *,
    shell: ShellName = None,
    file: Annotated[str | None, Parameter(help="Write the script here and touch nothing else.")] = None,
) -> int:
    """Install completion for your shell."""
    from qfleet.cli.app import app as root

    chosen = _shell(shell)
    target = Path(file) if file is not None else None
    try:
        path = root.install_completion(shell=chosen, output=target, add_to_startup=target is None)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename}", f"The system says: {error.strerror}.", "Choose a place with --file."
        ) from error
    echo(f"Completion for {chosen} is in {path}. Open a new shell to use it.")
    return 0


def show(*, shell: ShellName = None) -> int:
    """Print the completion script."""
    from qfleet.cli.app import app as root

    print(root.generate_completion(shell=_shell(shell)))
    return 0


def _shell(name: str | None) -> Shell:
    from cyclopts.completion import ShellDetectionError, detect_shell

    try:
        found = detect_shell() if name is None else name
    except ShellDetectionError as error:
        raise UsageError(
            "your shell was not recognised", "No sign of it was found in this environment.", "Name it: --shell bash"
        ) from error
    known: dict[str, Shell] = {each: each for each in get_args(Shell)}
    if found not in known:
        raise UsageError(
            f"--shell {found} is not valid", f"--shell must be one of {', '.join(known)}.", "Write --shell bash"
        )
    return known[found]


app.command(install, help_epilogue="Example:\n  qfleet completion install --shell zsh")
app.command(show, help_epilogue="Example:\n  qfleet completion show --shell fish")
