"""What the speed benchmark measures: plans, rules, peers, bars and kinds of machines are what they claim to be."""

import json
import re
import time

import pytest

from benchmarks import command, contests, pace, peers, processor, report, slow_env, turns
from benchmarks.contestants import ALONE, BUSY, busy
from qfleet.plan import compose, updates_per_step

ALL = {contest.name: contest for contest in contests.contests("runs")}
LOADED = {contest.name: busy(contest) for contest in ALL.values() if contest.can_be_busy}


def composed(words):
    flags = words.index("--preset")
    settings = [(*word.split("=", 1), "command line") for word in words[flags + 4 :]]
    return compose(words[flags - 1], words[flags + 1], overrides=settings).plan


def plan_of(name):
    return composed(ALL[name].ours.words)


def test_everybody_has_the_same_rule():
    """The plain maximum, one-step returns and the Huber loss; the table says so."""
    for name in ("pong", "pong32", "cartpole", "minatar"):
        algo = plan_of(name).algo
        assert (algo.rule.__struct_config__.tag, algo.n_step, algo.loss) == ("max", 1, "huber"), name
    assert "plain maximum, one-step returns, Huber loss, batch 32, one update per 4 steps" in ALL["pong"].what
    told = {
        "peer_cleanrl": ("smooth_l1_loss(values_of", ".amax(1)"),
        "peer_tianshou": ('"is_double": False', '"n_step_return_horizon": 1', '"huber_loss_delta": 1.0'),
        "peer_torchrl": ('loss_function="smooth_l1"', "make_value_estimator(gamma=0.99)"),
        "peer_rllib": ('"double_q": False', '"n_step": 1', '"td_error_loss_fn": "huber"'),
        "peer_sb3": ("from stable_baselines3 import DQN",),  # it has nothing else
    }
    assert {peer.words[2].partition(".")[2] for peer in ALL["pong"].peers} == set(told)
    for module, words in told.items():
        source = (report.ROOT / "benchmarks" / f"{module}.py").read_text("utf-8")
        assert all(word in source for word in words), module


@pytest.mark.parametrize("name", ["pong", "prioritized", "cartpole", "minatar", "slow"])
def test_plans_make_one_update_per_four_steps(name):
    assert updates_per_step(plan_of(name)) == 0.25


def test_plans_have_the_settings_that_the_table_states():
    pong, prioritized, cartpole, pqn = (plan_of(name) for name in ("pong", "prioritized", "cartpole", "pqn"))
    assert (pong.algo.batch_size, pong.algo.n_step, pong.net.dueling) == (32, 1, False)
    assert (prioritized.algo.n_step, prioritized.net.dueling, prioritized.env.id) == (3, True, pong.env.id)
    assert (cartpole.algo.batch_size, cartpole.env.num, cartpole.net.torso.sizes) == (128, 8, (120, 84))
    assert (pqn.env.num, pqn.replay.rows, pqn.replay.epochs, pqn.replay.minibatches) == (8, 128, 4, 4)
    assert (plan_of("slow").env.num, plan_of("slow").env.workers) == (8, 2)


def test_every_plan_of_a_quiet_and_of_a_busy_machine_is_sound():
    for each in (*ALL.values(), *LOADED.values()):
        for contestant in each.field(with_peers=False):
            if "benchmarks.timed" in contestant.words:
                composed(contestant.words)


def test_every_peer_of_pong_and_pqn_takes_one_thread_and_two():
    for name in ("pong", "pqn"):
        told = {peer.family: set() for peer in ALL[name].peers}
        for peer in ALL[name].peers:
            told[peer.family].add(peer.threads)
            assert ("--threads" in peer.words) is (peer.threads is not None)
        rllib = told.pop("RLlib", {None})
        assert rllib == {None}
        assert all(each == {1, min(2, processor.cores()), processor.cores()} for each in told.values())


def test_every_peer_runs_a_contest_that_its_file_has():
    for each in ALL.values():
        for peer in each.peers:
            module, name = peer.words[2], peer.words[3]
            source = (report.ROOT / (module.replace(".", "/") + ".py")).read_text("utf-8")
            assert f'"{name}"' in source, peer.name


def test_constraints_pin_every_peer():
    pins = re.findall(r"^([\w.-]+)==", peers.CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    wanted = {name.split("==")[0].lower() for name in (*peers.NEEDED, *peers.LOOSE, *peers.PARTS)}
    assert wanted <= pinned


def test_the_slow_environment_is_slow(capsys):
    begin = time.monotonic()
    slow_env.alone(0.1)
    assert time.monotonic() - begin >= 0.1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert pace.steps_per_second(command.Finished([], [(0.0, row) for row in rows])) <= 1 / slow_env.STEP_SECONDS


def test_training_is_measured_in_a_process_of_its_own():
    """The real thing, as small as it gets: our CartPole contestant for a moment."""
    done = command.run(ALL["cartpole"].ours.command(0.2), limit_seconds=100)
    assert done.exit_code == 0, done.errors
    assert ALL["cartpole"].ours.read(done) > 0
    assert turns.settings(ALL["cartpole"].ours, done)["precision"] == "float32"


# --- bars ---


def test_a_busy_contest_has_its_own_bars():
    pong, pqn, start = LOADED["pong"], LOADED["pqn"], LOADED["start"]
    assert (pong.load, pong.peer_bar, pong.ceiling_bar, pong.ceiling_is) == (BUSY, 1.5, 0.95, ALONE)
    assert pong.ceiling.always_quiet
    assert pong.ceiling.words == (*pong.ours.words, "runtime.threads=1")
    assert (pqn.ceiling, pqn.peer_bar) == (None, ALL["pqn"].peer_bar)
    assert (start.peer_bar, start.ceiling_bar, start.limit) == (None, None, None)
    assert start.ceiling == ALL["start"].ceiling
    assert set(ALL) - set(LOADED) == {"memory"}


@pytest.mark.parametrize(
    ("kind", "pong", "pqn"), [("avx2", 1.6, 1.5), ("avx512", 1.6, 1.5), ("avx512-bf16", 2.0, 1.6), ("amx-bf16", 2, 1.6)]
)
def test_bars_depend_on_what_the_machine_multiplies(kind, pong, pqn):
    named = {contest.name: contest for contest in contests.contests("runs", machine=kind)}
    assert (named["pong"].peer_bar, named["pqn"].peer_bar, named["pqn"].busy_peer_bar) == (pong, pqn, pqn)
    assert {named[name].peer_bar for name in ("cartpole", "minatar")} == {3.0}
    assert {named[name].busy_peer_bar for name in ("cartpole", "minatar")} == {3.0}
    assert (named["start"].ceiling_bar, named["seeds"].ceiling_bar) == (1.35, 1.8)


# --- kinds of machines ---


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["avx2"], "avx2"),
        (["avx2", "avx512f", "avx512_vnni"], "avx512"),
        (["avx2", "avx512f", "avx512_vnni", "avx512_bf16"], "avx512-bf16"),
        (["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"], "amx-bf16"),
    ],
)
def test_the_flags_of_a_processor_name_its_kind(tmp_path, flags, kind):
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name\t: some\nflags\t\t: fpu {' '.join(flags)} sse\n\nflags\t: fpu\n")
    assert processor.flags(path) == flags
    assert processor.kind(flags) == kind
    assert processor.has_bfloat16(kind) is ("bf16" in kind)


def test_a_processor_without_known_flags_is_called_by_its_architecture(tmp_path):
    assert processor.flags(tmp_path / "missing") == []
    assert processor.kind([]) == processor.platform.machine()
