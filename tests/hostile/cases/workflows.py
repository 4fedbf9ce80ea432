"""Hostile workflow files: what is in them, and what the one error must say."""

from dataclasses import dataclass

TABLES = 'env = "CartPole-v1"\n[collect]\nepisodes = 3\n'
CODE = "names code to run"


@dataclass(frozen=True)
class WorkflowCase:
    """A file, a part of the message, and the exit code."""

    name: str
    text: str
    says: str
    code: int = 2


CASES = (
    WorkflowCase("unknown-key", f"store = '/tmp'\n{TABLES}", "unknown field `store`"),
    WorkflowCase("unknown-table", f"{TABLES}[publish]\nurl = 's3://x/y'\n", "unknown field `publish`"),
    WorkflowCase("unknown-stage-key", f"{TABLES}out = '/tmp/x'\n", "unknown field `out`"),
    WorkflowCase("unknown-setting", f"{TABLES}[learn]\nalgo.nothing = 1\n", "algo.nothing"),
    WorkflowCase("code-env", TABLES.replace("CartPole-v1", "evil.py:Evil"), CODE),
    WorkflowCase("code-module", TABLES.replace("CartPole-v1", "evil:Evil-v0"), CODE),
    WorkflowCase("code-wrapper", f"{TABLES}[learn]\nenv.wrappers = ['evil:W']\n", CODE),
    WorkflowCase("code-wrapper-dotted", f"{TABLES}[learn]\n'env.wrappers' = ['evil:W']\n", CODE),
    WorkflowCase("code-wrapper-collect", f"{TABLES}env.wrappers = ['evil:W']\n", CODE),
    WorkflowCase(
        "address",
        f"{TABLES}[learn]\nruntime = {{ type = 'ray', address = '10.0.0.1:6379' }}\n",
        "a place to connect to",
    ),
    WorkflowCase("own-env", f"{TABLES}[learn]\nenv.id = 'evil:Evil'\n", "sets learn.env.id"),
    WorkflowCase("own-replay", f"{TABLES}[learn]\nreplay.path = '/etc'\n", "sets learn.replay.path"),
    WorkflowCase("leaves-data", "env = 'CartPole-v1'\ndata = '../../../etc'\n", "there is no data set", 5),
    WorkflowCase("leaves-policy", f"{TABLES}policy = '../../../etc'\n", "../../../etc"),
    WorkflowCase("leaves-import", "env = 'L-v0'\n[import]\nsource = '../../../../etc/passwd'\n", "passwd"),
    WorkflowCase("device", "env = 'L-v0'\n[import]\nsource = '/dev/zero'\n", "/dev/zero"),
    WorkflowCase("proc", "env = 'L-v0'\n[import]\nsource = '/proc/self/mem'\n", "/proc/self/mem"),
    WorkflowCase("sparse", "env = 'L-v0'\n[import]\nsource = 'sparse.csv'\n", "sparse.csv"),
    WorkflowCase("pipe", "env = 'L-v0'\n[import]\nsource = 'pipe'\n", "pipe"),
    WorkflowCase("scheme", "env = 'L-v0'\ndata = 'gopher://x/y'\n", "gopher"),
    WorkflowCase("huge-episodes", TABLES.replace("= 3", f"= {10**15}"), "episodes"),
    WorkflowCase("huge-number", TABLES.replace("= 3", "= " + "9" * 5_000), "workflow.toml is not TOML"),
    WorkflowCase("huge-int", TABLES.replace("= 3", f"= {2**200}"), "workflow.toml"),
    WorkflowCase("huge-seed", f"{TABLES}seed = {2**70}\n", "workflow.toml"),
    WorkflowCase("huge-steps", f"{TABLES}[learn]\nuntil.epochs = {10**30}\n", "epochs"),
    WorkflowCase("huge-shards", f"{TABLES}[prepare]\nshards = 1000000000\n", "shards"),
    WorkflowCase("huge-updates", f"{TABLES}[judge]\nupdates = {10**18}\n", "updates"),
    WorkflowCase("huge-learners", f"{TABLES}[learn]\nlearners.num = 1000000\n", "learners.num"),
    WorkflowCase("nan", f"{TABLES}[judge]\nepsilon = nan\n", "epsilon"),
    WorkflowCase("infinite", f"{TABLES}[learn]\noptim.learning_rate = inf\n", "learning_rate"),
    WorkflowCase("negative", TABLES.replace("= 3", "= -3"), "episodes"),
    WorkflowCase("number-for-table", "env = 'CartPole-v1'\ncollect = 3\n", "collect"),
    WorkflowCase("number-for-section", f"{TABLES}[learn]\nreplay = 3\n", "learn.replay"),
    WorkflowCase("list-for-learn", f"learn = [1]\n{TABLES}", "learn"),
    WorkflowCase("preset", f"{TABLES}[learn]\npreset = ['a']\n", "preset"),
    WorkflowCase("no-preset", f"{TABLES}[learn]\npreset = '../../x'\n", "../../x"),
    WorkflowCase("no-env", "[collect]\nepisodes = 3\n", "env"),
    WorkflowCase("empty-env", TABLES.replace("CartPole-v1", ""), "env"),
    WorkflowCase("two-sources", f"data = 'x'\n{TABLES}", "has `data` and a table [collect]"),
    WorkflowCase("no-source", "env = 'CartPole-v1'\n", "has neither"),
    WorkflowCase("no-end", "env = 'CartPole-v1'\n[collect]\nseed = 1\n", "--episodes or --steps"),
    WorkflowCase("deep", TABLES + "[learn." + ".".join("a" * 15_000) + "]\n", "workflow.toml"),
    WorkflowCase("deep-list", f"{TABLES}[learn]\nx = " + "[" * 20_000, "workflow.toml"),
    WorkflowCase("not-toml", "this is = = not", "is not TOML"),
    WorkflowCase("not-text", "\udcff\udcfe", "is not text"),
    WorkflowCase("large", "# " + "x" * 2_000_000, "is larger than 1 MB"),
    WorkflowCase("long-name", f"data = '{'x' * 100_000}'\nenv = 'CartPole-v1'\n", "data"),
    WorkflowCase("escapes", TABLES.replace("CartPole-v1", "\\u001b]0;x\\u0007\\u001b[31m"), "is not an environment id"),
    WorkflowCase("split", f"{TABLES}[prepare]\nsplit = '0/50/50'\n", "is no split"),
    WorkflowCase("capacity", f"{TABLES}[prepare]\nshards = 2\ncapacity = '1,-1'\n", "capacity"),
    WorkflowCase(
        "column", "env = 'L-v0'\n[import]\nsource = 'logs.csv'\ncolumns = { nothing = 'x' }\n", "nothing=x is not valid"
    ),
    WorkflowCase(
        "column-missing",
        "env = 'L-v0'\n[import]\nsource = 'logs.csv'\ncolumns = { obs = 'x' }\n",
        "has no column 'x'",
        5,
    ),
)
SAMPLE = ("code-wrapper-dotted", "address", "device", "pipe", "escapes", "deep", "not-text", "leaves-data")
