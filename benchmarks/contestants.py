"""Who takes part in a contest of `benchmarks.speed`: command lines, how their rows are read, quiet and busy."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks import command, peers, processor
from benchmarks.pace import EPSILON, bare_updates_per_second, steps_per_second

Read = Callable[[command.Finished], float | None]
OURS, CEILING = "qfleet", "ceiling"
QUIET, BUSY = "quiet", "busy"
LOADS = (QUIET, BUSY)
FEW_ROUNDS = 3  # where no peer takes part
BUSY_ROUNDS = 2  # where nothing is asked for
ALONE = "qfleet with 1 thread, quiet"


@dataclass(frozen=True)
class Contestant:
    """Somebody's command; {seconds} in it is how long to measure. `times` brings the figure to the contest's unit.

    `precision` and `threads` are what it was told; None if its rows or its run.toml say so.
    """

    name: str
    words: tuple[str, ...]
    read: Read
    times: float = 1.0
    precision: str | None = None
    threads: int | None = None
    runs: str = ""  # folder of its runs, if its rows do not tell its settings
    always_quiet: bool = False
    start_seconds: float = 5.0  # from the command to the first moment that counts, more or less

    @property
    def family(self) -> str:
        """Its name without the number of threads or environments."""
        return self.name.partition(",")[0]

    def command(self, seconds: float) -> list[str]:
        """The command line."""
        return [word.format(seconds=seconds) for word in self.words]


@dataclass(frozen=True)
class Contest:
    """One line of the table. Ours over a peer's and over the ceiling's figure has to reach the bars.

    With `less` ours has to stay below them. Without a ceiling `limit` is the bar for our own figure.
    """

    name: str
    what: str
    unit: str
    ours: Contestant
    peers: tuple[Contestant, ...] = ()
    ceiling: Contestant | None = None
    ceiling_is: str = ""
    peer_bar: float | None = None
    ceiling_bar: float | None = None
    limit: float | None = None
    less: bool = False
    rounds: int | None = None
    # A first turn on a quiet machine, which does not count: choices are measured and code is compiled then.
    warm: Contestant | None = None
    timed: bool = True  # measured for as many seconds as were asked for; others take their own time
    load: str = QUIET
    # While another process takes a core: the bar beside peers, and beside ourselves with one thread on a quiet machine.
    busy_peer_bar: float | None = None
    alone_bar: float | None = None
    can_be_busy: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same contest."""
        return self.name, self.load

    def num_rounds(self, asked: int) -> int:
        """How many rounds it has: as many as were asked for, or fewer of its own."""
        return min(asked, self.rounds or asked)

    def field(self, with_peers: bool) -> list[Contestant]:
        """Who takes part."""
        rest = [*(self.peers if with_peers else ()), *([self.ceiling] if self.ceiling else [])]
        return [self.ours, *rest]


def busy(contest: Contest) -> Contest:
    """The same contest while another process takes a core.

    In place of the ceiling stands qfleet with one thread on a quiet machine, if there is a bar for that. A ceiling
    stays where nobody else is there to be compared with, without a bar.
    """
    rounds = contest.rounds if contest.busy_peer_bar else BUSY_ROUNDS
    loaded = replace(contest, load=BUSY, peer_bar=contest.busy_peer_bar, ceiling_bar=None, limit=None, rounds=rounds)
    if contest.alone_bar is None:
        return replace(loaded, ceiling=None) if contest.peers else loaded
    words = (*contest.ours.words, "runtime.threads=1")
    alone = replace(contest.ours, name=CEILING, words=words, always_quiet=True)
    return replace(loaded, ceiling=alone, ceiling_is=ALONE, ceiling_bar=contest.alone_bar)


def ours(
    env: str, *words: str, preset: str = "dqn", read: Read = steps_per_second, start_seconds: float = 5.0
) -> Contestant:
    """Real training by a plan, with as much exploration as everybody has."""
    explore = ("algo.explore.type=constant", f"algo.explore.epsilon={EPSILON}")
    flags = ("--preset", preset, "--seconds", "{seconds}")
    return Contestant(OURS, command.here("timed", env, *flags, *explore, *words), read, start_seconds=start_seconds)


def peer(
    name: str,
    module: str,
    contest: str,
    threads: int | None = None,
    read: Read = steps_per_second,
    start_seconds: float = 4.0,
) -> Contestant:
    """A peer's training, by the peers' Python; None leaves the number of threads to it."""
    told = () if threads is None else ("--threads", str(threads))
    words = peers.command(f"benchmarks.{module}", contest, "--seconds", "{seconds}", *told)
    return Contestant(name, tuple(words), read, precision="float32", threads=threads, start_seconds=start_seconds)


def threaded(
    name: str, module: str, contest: str, read: Read = steps_per_second, start_seconds: float = 4.0
) -> tuple[Contestant, ...]:
    """A peer on one, on two and on as many torch threads as there are cores: which is faster depends on the machine."""
    cores = processor.cores()
    return tuple(
        peer(f"{name}, {num} thread{'s' * (num > 1)}", module, contest, num, read, start_seconds)
        for num in sorted({1, min(2, cores), cores})
    )


def bare(case: str, times: float = 1.0, threads: int | None = None) -> Contestant:
    """Updates and nothing else, on as many threads as `benchmarks.ceiling` takes: every core if None."""
    words = command.here("ceiling", case, "--seconds", "{seconds}")
    num = threads or processor.cores()
    return Contestant(CEILING, words, bare_updates_per_second, times, "float32", num, start_seconds=3.0)
