"""Wrong uses and their exact error messages: what happened, why, and what to do."""

# Messages stay on one line, as they are shown.
# ruff: noqa: E501

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from qfleet.cli import main
from qfleet.plan.presets import environments
from qfleet.plan.presets.pieces import Settings

SECTIONS = (
    "A plan has env, algo, optim, net, replay, actors, learners, sync, runtime, save, eval, steer, population, until, "
    "log, custom, seed."
)
BINARY = b"\xff\xfe\x00"
BIG = b"#" * 1_000_001
DEEP = b"a = " + b"[" * 5_000 + b"]" * 5_000


class Wrong(NamedTuple):
    """A command, the three sentences it earns, the plan.toml it finds, and its exit code."""

    command: str
    what: str
    why: str
    fix: str
    plan: str | bytes = b""
    code: int = 2


WRONG = [
    Wrong(
        "trian CartPole-v1",
        "unknown command trian",
        "qfleet has train, resume, sync, eval, play, record, plot, compare, verify, runs, plan, presets, env, data, workflow, doctor, completion.",
        "Did you mean qfleet train?",
    ),
    Wrong(
        "--vresion",
        "unknown option --vresion",
        "qfleet has --help, --version, --install-completion.",
        "Did you mean --version?",
    ),
    Wrong(
        "train",
        "no environment is given",
        "A run needs an environment, named on the command line or as env.id in the plan file.",
        "Name one: qfleet train CartPole-v1",
    ),
    Wrong(
        "train --stpes 5",
        "unknown option --stpes",
        "qfleet train has --preset, --steps, --seed, --seeds, --jobs, --plan, --out, --name, --from, --json, --quiet, --profile, --dry-run.",
        "Did you mean --steps?",
    ),
    Wrong(
        "train CartPole-v1 --frob",
        "unknown option --frob",
        "qfleet train has --preset, --steps, --seed, --seeds, --jobs, --plan, --out, --name, --from, --json, --quiet, --profile, --dry-run.",
        "Did you mean --from?",
    ),
    Wrong(
        "train CartPole-v1 --algo.n_step 3",
        "unknown option --algo.n_step",
        "qfleet train has --preset, --steps, --seed, --seeds, --jobs, --plan, --out, --name, --from, --json, --quiet, --profile, --dry-run.",
        "Settings of the plan have no dashes: algo.n_step=VALUE",
    ),
    Wrong(
        "train CartPole-v1 --steps",
        "--steps needs a value",
        "Nothing follows --steps.",
        "See qfleet train --help",
    ),
    Wrong(
        "train CartPole-v1 --steps 5 --steps 6",
        "--steps is given twice",
        "It can have one value only.",
        "Leave one of them out.",
    ),
    Wrong(
        "train CartPole-v1 --steps many",
        "until.steps=many is not valid (command line)",
        "until.steps must be an integer of at least 1.",
        "Write for example until.steps=50000",
    ),
    Wrong(
        "train CartPole-v1 --steps 0",
        "until.steps=0 is not valid (command line)",
        "until.steps must be an integer of at least 1.",
        "Write for example until.steps=50000",
    ),
    Wrong(
        "train CartPole-v1 --steps 2.5",
        "until.steps=2.5 is not valid (command line)",
        "until.steps must be an integer of at least 1.",
        "Write for example until.steps=50000",
    ),
    Wrong(
        "train CartPole-v1 --seed -1",
        "seed=-1 is not valid (command line)",
        "seed must be an integer of at least 0.",
        "Write for example seed=0",
    ),
    Wrong(
        "train CartPole-v1 --steps 5000 until.steps=6000",
        "until.steps is given twice: 6000 and 5000 (command line)",
        "Which of the two is meant cannot be known.",
        "Leave one of them out.",
    ),
    Wrong(
        "train CartPole-v1 --json --quiet",
        "--json and --quiet are given together",
        "One asks for every row, the other for none.",
        "Leave one of them out.",
    ),
    Wrong(
        "train CartPole-v1 --json=maybe",
        "--json=maybe is not valid",
        "--json is a switch: it takes no value.",
        "Write --json alone, or leave it out.",
    ),
    Wrong(
        "train CartPole-v1 extra",
        "unexpected argument 'extra' after CartPole-v1",
        "After the environment come settings, written path=value without spaces.",
        "Write for example algo.n_step=3",
    ),
    Wrong(
        "train CartPole-v1 n_step",
        "unexpected argument 'n_step' after CartPole-v1",
        "After the environment come settings, written path=value without spaces.",
        "Did you mean algo.n_step=VALUE?",
    ),
    Wrong(
        "train CartPole-v1 --preset rainbw",
        "unknown preset rainbw",
        "The presets are dqn, double, dueling, per, nstep, c51, qrdqn, iqn, noisy, munchausen, rainbow, apex, gorila, r2d2, pqn, btr, decqn, cql, bc, dqn-small, double-small, dueling-small, per-small, nstep-small, c51-small, qrdqn-small, iqn-small, noisy-small, munchausen-small, rainbow-small, apex-small, r2d2-small, pqn-small, btr-small, decqn-small, cartpole, acrobot, mountaincar, lunarlander, minatar, atari, general, pong.",
        "Did you mean rainbow?",
    ),
    Wrong(
        "train CartPole-v1 --preset dubble",
        "unknown preset dubble",
        "The presets are dqn, double, dueling, per, nstep, c51, qrdqn, iqn, noisy, munchausen, rainbow, apex, gorila, r2d2, pqn, btr, decqn, cql, bc, dqn-small, double-small, dueling-small, per-small, nstep-small, c51-small, qrdqn-small, iqn-small, noisy-small, munchausen-small, rainbow-small, apex-small, r2d2-small, pqn-small, btr-small, decqn-small, cartpole, acrobot, mountaincar, lunarlander, minatar, atari, general, pong.",
        "Did you mean double?",
    ),
    Wrong(
        "train CartPole-v1 algo.nstep=3",
        "algo.nstep=3 is not a setting of a plan (command line)",
        "algo has rule, view, n_step, discount, explore, bonus, target, learn_start_steps, batch_size, accumulate, loss, rescale, offline, reset, anneal.",
        "Did you mean algo.n_step?",
    ),
    Wrong(
        "train CartPole-v1 n_step=3",
        "n_step=3 is not a setting of a plan (command line)",
        SECTIONS,
        "Did you mean algo.n_step?",
    ),
    Wrong(
        "train CartPole-v1 lr=1e-3",
        "lr=1e-3 is not a setting of a plan (command line)",
        SECTIONS,
        "Did you mean optim.learning_rate?",
    ),
    Wrong(
        "train CartPole-v1 gamma=0.9",
        "gamma=0.9 is not a setting of a plan (command line)",
        SECTIONS,
        "Did you mean algo.discount?",
    ),
    Wrong(
        "train CartPole-v1 buffer_size=1000",
        "buffer_size=1000 is not a setting of a plan (command line)",
        SECTIONS,
        "Did you mean replay.capacity?",
    ),
    Wrong(
        "train CartPole-v1 foo=1",
        "foo=1 is not a setting of a plan (command line)",
        SECTIONS,
        "See every setting with: qfleet plan show CartPole-v1",
    ),
    Wrong(
        "train CartPole-v1 algo.n_step=0",
        "algo.n_step=0 is not valid (command line)",
        "algo.n_step must be an integer from 1 to 100.",
        "Write for example algo.n_step=5",
    ),
    Wrong(
        "train CartPole-v1 algo.n_step=three",
        "algo.n_step=three is not valid (command line)",
        "algo.n_step must be an integer from 1 to 100.",
        "Write for example algo.n_step=5",
    ),
    Wrong(
        "train CartPole-v1 algo.n_step=",
        "algo.n_step= is not valid (command line)",
        "algo.n_step must be an integer from 1 to 100.",
        "Write for example algo.n_step=5",
    ),
    Wrong(
        "train CartPole-v1 algo.loss=hubber",
        "algo.loss=hubber is not valid (command line)",
        "algo.loss must be one of huber, mse.",
        "Did you mean algo.loss=huber?",
    ),
    Wrong(
        "train CartPole-v1 algo.loss=l1",
        "algo.loss=l1 is not valid (command line)",
        "algo.loss must be one of huber, mse.",
        "Write for example algo.loss=huber",
    ),
    Wrong(
        "train CartPole-v1 algo.rule=double",
        "algo.rule=double is not a setting but a section (command line)",
        "The variant of algo.rule is chosen by algo.rule.type (max, double, munchausen).",
        "Write algo.rule.type=double",
    ),
    Wrong(
        "train CartPole-v1 algo.rule.type=dubble",
        "algo.rule.type=dubble is not valid (command line)",
        "algo.rule.type must be one of max, double, munchausen.",
        "Did you mean algo.rule.type=double?",
    ),
    Wrong(
        "train CartPole-v1 optim.type=adagrad",
        "optim.type=adagrad is not valid (command line)",
        "optim.type must be one of adam, radam, rmsprop, sgd.",
        "Write for example optim.type=adam",
    ),
    Wrong(
        "train CartPole-v1 algo=3",
        "algo=3 is not a setting but a section (command line)",
        "algo has rule, view, n_step, discount, explore, bonus, target, learn_start_steps, batch_size, accumulate, loss, rescale, offline, reset, anneal.",
        "Set what is inside it: algo.NAME=VALUE",
    ),
    Wrong(
        "train CartPole-v1 algo.discount=1.5",
        "algo.discount=1.5 is not valid (command line)",
        "algo.discount must be a number from 0 to 1.",
        "Write for example algo.discount=0.99",
    ),
    Wrong(
        "train CartPole-v1 algo.discount=nan",
        "algo.discount=nan is not valid (command line)",
        "algo.discount must be a number from 0 to 1, and finite.",
        "Write for example algo.discount=0.99",
    ),
    Wrong(
        "train CartPole-v1 optim.learning_rate=-1",
        "optim.learning_rate=-1 is not valid (command line)",
        "optim.learning_rate must be a number above 0.",
        "Write for example optim.learning_rate=0.002",
    ),
    Wrong(
        "train CartPole-v1 optim.learning_rate=inf",
        "optim.learning_rate=inf is not valid (command line)",
        "optim.learning_rate must be a number above 0, and finite.",
        "Write for example optim.learning_rate=0.002",
    ),
    Wrong(
        "train CartPole-v1 net.dueling=yes",
        "net.dueling=yes is not valid (command line)",
        "net.dueling must be true or false.",
        "Write for example net.dueling=false",
    ),
    Wrong(
        "train CartPole-v1 net.torso.sizes=128,x",
        "net.torso.sizes=128,x is not valid (command line)",
        "net.torso.sizes must be a list (an integer from 1 to 1000000 each), such as [128, 128].",
        "Write for example net.torso.sizes=[128, 128]",
    ),
    Wrong(
        "train CartPole-v1 until.steps=1e30",
        "until.steps=1e30 is not valid (command line)",
        "until.steps must be an integer of at least 1, and at most 2^63 - 1.",
        "Write for example until.steps=50000",
    ),
    Wrong(
        "train CartPole-v1 env.options=3",
        "env.options=3 is not valid (command line)",
        "env.options must be a table of numbers, texts, true or false.",
        "Write for example env.options.NAME=VALUE",
    ),
    Wrong(
        "train CartPole-v1 algo.target.every_updates=100",
        "algo.target.every_updates=100 has no effect (command line)",
        "algo.target.type is average (defaults for CartPole-v1); every_updates belongs to copy.",
        "Add algo.target.type=copy, or leave algo.target.every_updates out.",
    ),
    Wrong(
        "train CartPole-v1 optim.momentum=0.9",
        "optim.momentum=0.9 has no effect (command line)",
        "optim.type is adam (default); momentum belongs to sgd.",
        "Add optim.type=sgd, or leave optim.momentum out.",
    ),
    Wrong(
        "train CartPole-v1 replay.sampler.alpha=0.5",
        "replay.sampler.alpha=0.5 has no effect (command line)",
        "replay.sampler.type is uniform (default); alpha belongs to prioritized.",
        "Add replay.sampler.type=prioritized, or leave replay.sampler.alpha out.",
    ),
    Wrong(
        "train CartPole-v1 algo.n_step=3 algo.n_step=4",
        "algo.n_step is given twice: 3 and 4 (command line)",
        "Which of the two is meant cannot be known.",
        "Leave one of them out.",
    ),
    Wrong(
        "train CartPole-v1 replay.capacity=100",
        "algo.batch_size=256 (defaults for CartPole-v1) is more than replay.capacity=100 (command line)",
        "A batch is drawn from the replay, which would never hold that many.",
        "Set replay.capacity to 256 or more, or lower algo.batch_size.",
    ),
    Wrong(
        "train CartPole-v1 replay.capacity=300 env.num=128",
        "replay.capacity=300 (command line) cannot hold algo.n_step=5 (defaults for CartPole-v1) for env.num=128 (command line)",
        "Every environment needs room for the steps that one n-step return spans.",
        "Set replay.capacity to 768 or more.",
    ),
    Wrong(
        "train CartPole-v1 --steps 500 algo.learn_start_steps=1000",
        "algo.learn_start_steps=1000 (command line) is not before the end, until.steps=500 (command line)",
        "Learning would start after the run has ended, so nothing would be learned.",
        "Raise until.steps above 1000, or add algo.learn_start_steps=50.",
    ),
    Wrong(
        "train CartPole-v1 replay.samples_per_insert=0.000001",
        "replay.samples_per_insert=1e-06 (command line) makes 0 updates in until.steps=50000 (defaults for CartPole-v1)",
        "Updates per step are replay.samples_per_insert / algo.batch_size (of sequences also / algo.view.length), rounded down over the run.",
        "Raise it: 256 is one update per step with this batch size.",
    ),
    Wrong(
        "train CartPole-v1 algo.view.type=sequences net.memory.type=lstm replay.capacity=1000",
        "algo.batch_size=256 (defaults for CartPole-v1) is more than the 50 sequences of replay.capacity=1000 (command line) with algo.view.stride=20 (default)",
        "A batch is drawn from the replay, which would never hold that many.",
        "Set replay.capacity to 5120 or more, or lower algo.batch_size.",
    ),
    Wrong(
        "train CartPole-v1 algo.view.type=sequences net.memory.type=lstm replay.capacity=500 algo.batch_size=8 env.num=16 algo.n_step=5",
        "replay.capacity=500 (command line) cannot hold algo.view.burn_in=20 (default) and algo.view.length=40 (default) for env.num=16 (command line)",
        "Every environment needs room for one sequence and the n-step return at its end.",
        "Set replay.capacity to 1040 or more, or shorten the sequences.",
    ),
    Wrong(
        "train CartPole-v1 algo.view.type=sequences net.memory.type=lstm replay.samples_per_insert=0.1",
        "replay.samples_per_insert=0.1 (command line) makes 0 updates in until.steps=50000 (defaults for CartPole-v1)",
        "Updates per step are replay.samples_per_insert / algo.batch_size (of sequences also / algo.view.length), rounded down over the run.",
        "Raise it: 10240 is one update per step with batches of this size and length.",
    ),
    Wrong(
        "train CartPole-v1 algo.view.type=sequences net.memory.type=lstm algo.view.eta=0.5",
        "algo.view.eta=0.5 (command line) has no effect with uniform sampling",
        "It mixes the errors of a sequence into its priority.",
        "Leave algo.view.eta out, or set replay.sampler.type=prioritized.",
    ),
    Wrong(
        "train CartPole-v1 net.spectral_norm=true net.torso.type=mlp net.torso.sizes=[64]",
        "net.spectral_norm=true (command line) has no effect with net.torso.sizes=[64] (command line)",
        "The last size is the head's own layer; only the layers of a torso are normalised.",
        "Give net.torso.sizes two numbers or more, such as [64, 64], or leave net.spectral_norm out.",
    ),
    Wrong(
        "train CartPole-v1 population.num=4 env.num=8 population.spread=1e300",
        "population.spread=1e+300 (command line) takes optim.learning_rate=0.002 (defaults for CartPole-v1) above 1",
        "The members' learning rates differ by that factor from one to the next; large ones diverge.",
        "Set population.spread to 2 or so; with 4 members it must be below 63.",
    ),
    Wrong(
        "train CartPole-v1 replay.type=fresh replay.rows=2 replay.minibatches=32 env.num=8",
        "replay.minibatches=32 (command line) is more than the steps of replay.rows=2 (command line) and env.num=8 (command line)",
        "The steps of all environments are divided among the minibatches; some would be empty.",
        "Set replay.minibatches to 2 or so.",
    ),
    Wrong(
        "train CartPole-v1 --dry-run net.torso.type=nature",
        "net.torso.type=nature does not fit observations of shape (4,)",
        "It wants pictures [channels, height, width] of at least 36x36.",
        "Use net.torso.type=mlp, or leave net.torso out.",
    ),
    Wrong(
        "train CartPole-v1 --dry-run algo.explore.type=own",
        "algo.explore.type is `own`, but no function was given",
        "A function of your own is a Python object; a plan cannot hold it.",
        "Pass it from Python, train(plan, explore=...) or resume(path, explore=...), or choose another type.",
    ),
    Wrong(
        "train CartPole-v1 --dry-run --from nosuch",
        "there is no run 'nosuch'",
        "runs holds no runs",
        "list them with: qfleet runs, or give the path of a run directory",
    ),
    Wrong(
        "train CartPole-v1 --dry-run --name a/b",
        "'a/b' cannot be the name of a run",
        "a name has 1 to 100 of the characters A-Z a-z 0-9 . _ -, starts with a letter or digit or _, and is not 'latest'",
        "choose another --name, for example cartpole-first-try",
    ),
    Wrong(
        "train CartPole-v1 algo.explore.start=0.1 algo.explore.end=0.5",
        "algo.explore.start=0.1 (command line) is below algo.explore.end=0.5 (command line)",
        "Exploration is meant to fall; a rising epsilon would undo learning.",
        "Swap them, or set algo.explore.type=constant and algo.explore.epsilon.",
    ),
    Wrong(
        "train CartPole-v1 replay.sampler.type=prioritized replay.sampler.alpha=0",
        "replay.sampler.type=prioritized has no effect with replay.sampler.alpha=0.0 (command line)",
        "With alpha 0 every step is equally likely, which is uniform sampling at a higher price.",
        "Set replay.sampler.type=uniform, or an alpha such as 0.6.",
    ),
    Wrong(
        "train CartPole-v1 replay.sampler.type=prioritized replay.sampler.beta_start=1 replay.sampler.beta_end=0.5",
        "replay.sampler.beta_start=1.0 (command line) is above replay.sampler.beta_end=0.5 (command line)",
        "The correction for prioritised sampling must grow towards its end value.",
        "Swap them; 0.4 to 1.0 is usual.",
    ),
    Wrong(
        "train CartPole-v1 algo.discount=0",
        "algo.n_step=5 (defaults for CartPole-v1) has no effect with algo.discount=0.0 (command line)",
        "With discount 0 only the first reward counts, so further steps change nothing.",
        "Set algo.n_step=1.",
    ),
    Wrong(
        "train CartPole-v1 eval.every_steps=60000 until.score=475",
        "until.score=475.0 (command line) has no effect: eval.every_steps=60000 (command line), until.steps=50000 (defaults for CartPole-v1)",
        "The score is measured by evaluations, and none happens before the last step.",
        "Set eval.every_steps to 50000 or less.",
    ),
    Wrong(
        "train CartPole-v1 algo.target.type=copy algo.target.every_updates=1e6",
        "algo.target.every_updates=1000000 (command line) has no effect: the run makes 6125 updates",
        "The target network would keep its first, random weights for the whole run.",
        "Set algo.target.every_updates to 612 or so, or raise until.steps.",
    ),
    Wrong(
        "train CartPole-v1 env.sticky=0.25",
        "env.sticky=0.25 (command line) has no effect on CartPole-v1",
        "Sticky actions are a feature of the Atari emulator (ids ALE/... and ...NoFrameskip-v4).",
        "Leave env.sticky out.",
    ),
    Wrong(
        "train CartPole-v1 env.frame_size=42",
        "env.frame_size=42 (command line) has no effect on CartPole-v1",
        "Only Atari pictures are resized (ids ALE/... and ...NoFrameskip-v4).",
        "Leave env.frame_size out.",
    ),
    Wrong(
        "train CartPole-v1 runtime.device=gpu",
        "runtime.device=gpu (command line) is not a device",
        "The devices are cpu, cuda, mps, xpu, with a number if there are several (cuda:1).",
        "Did you mean runtime.device=cuda?",
    ),
    Wrong(
        "train CartPole-v1 runtime.device=cda",
        "runtime.device=cda (command line) is not a device",
        "The devices are cpu, cuda, mps, xpu, with a number if there are several (cuda:1).",
        "Did you mean runtime.device=cuda?",
    ),
    Wrong(
        "train CartPole-v1 net.torso.type=own",
        "net.torso.type=own needs Python (command line)",
        "A network of your own is an object, which a command line cannot name.",
        "Call qfleet.train(plan, torso=my_module) from Python, or set net.torso.type=mlp",
    ),
    Wrong(
        "train CartPole-v1 env.id=",
        "env.id= (command line) is not an environment id",
        "An environment id has no spaces; only the path of a file.py:ClassName may have them.",
        "Give an id such as CartPole-v1 or ALE/Pong-v5.",
    ),
    Wrong(
        "train --plan missing.toml",
        "there is no plan file missing.toml",
        "The path is missing or not a file.",
        "Check the path given.",
    ),
    Wrong(
        "train --plan .",
        "there is no plan file .",
        "The path is missing or not a file.",
        "Check the path given.",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "algo.n_stepp=3 is not a setting of a plan (plan.toml)",
        "algo has rule, view, n_step, discount, explore, bonus, target, learn_start_steps, batch_size, accumulate, loss, rescale, offline, reset, anneal.",
        "Did you mean algo.n_step?",
        plan="[algo]\nn_stepp = 3\n",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "plan.toml is not TOML",
        "Expected ']' at the end of a table declaration (at line 1, column 6).",
        'Write sections and settings like: [algo] and, below, loss = "huber"',
        plan="[algo\n",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        'algo.n_step="3" is not valid (plan.toml)',
        "algo.n_step must be an integer from 1 to 100.",
        "Write for example algo.n_step=5",
        plan='[algo]\nn_step = "3"\n',
    ),
    Wrong(
        "train --plan plan.toml",
        "no environment is given",
        "A run needs an environment, named on the command line or as env.id in the plan file.",
        "Name one: qfleet train CartPole-v1",
        plan="seed = 1\n",
    ),
    Wrong(
        "train --plan plan.toml",
        "env.id=evil:X-v0 names code to run (plan.toml)",
        "A plan file may come from anywhere, so it may not choose which code is imported.",
        "If you trust it, name it yourself: qfleet train evil:X-v0 --plan plan.toml",
        plan='[env]\nid = "evil:X-v0"\n',
    ),
    Wrong(
        "plan check plan.toml",
        "env.id=evil.py:Env names code to run (plan.toml)",
        "A plan file may come from anywhere, so it may not choose which code is imported.",
        "If you trust it, name it yourself: qfleet train evil.py:Env --plan plan.toml",
        plan='[env]\nid = "evil.py:Env"\n',
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml optim.type=adam",
        "optim.decay=0.9 has no effect (plan.toml)",
        "optim.type=adam (command line) replaces rmsprop and resets its settings.",
        "Leave optim.decay out of plan.toml, or keep optim.type=rmsprop.",
        plan='[optim]\ntype = "rmsprop"\ndecay = 0.9\n',
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "foo={} is not a setting of a plan (plan.toml)",
        SECTIONS,
        "See every setting with: qfleet plan show CartPole-v1",
        plan="[foo]\n",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "algo=3 is not a setting but a section (plan.toml)",
        "algo has rule, view, n_step, discount, explore, bonus, target, learn_start_steps, batch_size, accumulate, loss, rescale, offline, reset, anneal.",
        "Set what is inside it: algo.NAME=VALUE",
        plan="algo = 3\n",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "seed=true is not valid (plan.toml)",
        "seed must be an integer of at least 0.",
        "Write for example seed=0",
        plan="seed = true\n",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "until.score=nan is not valid (plan.toml)",
        "until.score must be a number or none, and finite.",
        "Write for example until.score=475.0",
        plan="[until]\nscore = nan\n",
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "env.options has a key 'a b' (plan.toml)",
        "Options are passed to the environment as keyword arguments, so they must be names.",
        "Rename or remove it.",
        plan='[env.options]\n"a b" = 1\n',
    ),
    Wrong(
        "train CartPole-v1 --plan plan.toml",
        "algo.n_step is given twice: 3 and 4 (plan.toml)",
        "Which of the two is meant cannot be known.",
        "Leave one of them out.",
        plan='"algo.n_step" = 3\n[algo]\nn_step = 4\n',
    ),
    Wrong(
        "plan check plan.toml",
        "plan.toml is not text",
        "Byte 0 is not UTF-8.",
        "Give a TOML file saved as UTF-8.",
        plan=BINARY,
    ),
    Wrong(
        "plan check plan.toml",
        "plan.toml is larger than 1 MB",
        "A plan has a few kilobytes; this is something else.",
        "Check the path given.",
        plan=BIG,
    ),
    Wrong(
        "plan check plan.toml",
        "plan.toml is not a plan",
        "Its values are nested hundreds of levels deep.",
        "Check the path given.",
        plan=DEEP,
    ),
    Wrong(
        "plan shwo CartPole-v1",
        "unknown command shwo",
        "qfleet plan has show, check, schema.",
        "Did you mean qfleet plan show?",
    ),
    Wrong(
        "plan show",
        "no environment is given",
        "A run needs an environment, named on the command line or as env.id in the plan file.",
        "Name one: qfleet train CartPole-v1",
    ),
    Wrong(
        "presets frob",
        "unknown preset frob",
        "The presets are dqn, double, dueling, per, nstep, c51, qrdqn, iqn, noisy, munchausen, rainbow, apex, gorila, r2d2, pqn, btr, decqn, cql, bc, dqn-small, double-small, dueling-small, per-small, nstep-small, c51-small, qrdqn-small, iqn-small, noisy-small, munchausen-small, rainbow-small, apex-small, r2d2-small, pqn-small, btr-small, decqn-small, cartpole, acrobot, mountaincar, lunarlander, minatar, atari, general, pong.",
        "See what each does with: qfleet presets",
    ),
    Wrong(
        "presets dqn double",
        "unexpected argument 'double'",
        "qfleet presets takes no more arguments.",
        "Leave it out; see qfleet presets --help",
    ),
    Wrong(
        "runs lst",
        "unknown command lst",
        "qfleet runs has list, ls, show, diff, rm.",
        "Did you mean qfleet runs list?",
    ),
    Wrong(
        "runs rm",
        "qfleet runs rm needs RUN",
        "The argument RUN is missing.",
        "See: qfleet runs",
    ),
    Wrong(
        "runs diff a",
        "qfleet runs diff needs OTHER",
        "The argument OTHER is missing.",
        "See qfleet runs diff --help",
    ),
    Wrong(
        "resume",
        "qfleet resume needs RUN",
        "The argument RUN is missing.",
        "See qfleet resume --help",
    ),
    Wrong(
        "resume latest",
        "there is no run in runs",
        "'latest' means the run in that folder that was active last",
        "start one: qfleet train CartPole-v1, or name its folder with --out",
    ),
    Wrong(
        "resume cartpole --steps few",
        "--steps few is not valid",
        "--steps must be an integer of at least 1.",
        "Write for example --steps 100",
    ),
    Wrong(
        "resume ../../etc",
        "there is no run '../../etc'",
        "runs holds no runs",
        "list them with: qfleet runs, or give the path of a run directory",
    ),
    Wrong(
        "eval",
        "qfleet eval needs RUN",
        "The argument RUN is missing.",
        "See qfleet eval --help",
    ),
    Wrong(
        "eval latest --episodes 0",
        "--episodes 0 is not valid",
        "--episodes must be an integer of at least 1.",
        "Write for example --episodes 100",
    ),
    Wrong(
        "eval latest --which worst",
        "--which worst is not valid",
        "--which must be one of best, latest, any.",
        "Write --which best, --which latest or --which any",
    ),
    Wrong(
        "record nothing --out .",
        "there is no run 'nothing'",
        ". holds no runs",
        "list them with: qfleet runs, or give the path of a run directory",
    ),
    Wrong(
        "plot",
        "qfleet plot needs RUN",
        "The argument RUN is missing.",
        "Try: qfleet plot latest",
    ),
    Wrong(
        "verify nowhere",
        "there is no run 'nowhere'",
        "runs holds no runs",
        "list them with: qfleet runs, or give the path of a run directory",
    ),
    Wrong(
        "env chekc CartPole-v1",
        "unknown command chekc",
        "qfleet env has list, check.",
        "Did you mean qfleet env check?",
    ),
    Wrong(
        "env check",
        "no environment is given",
        "A run needs an environment, named on the command line or as env.id in the plan file.",
        "Name one: qfleet train CartPole-v1",
    ),
    Wrong(
        "env check CartPoel-v1",
        "env.id='CartPoel-v1' is not a known environment.",
        "The nearest known ids are CartPole-v1, CartPole-v0, phys2d/CartPole-v1.",
        "Use a known id, module:Id for one that a module registers, or path/to/file.py:ClassName for your own.",
    ),
    Wrong(
        "train CartPole-v1 env.options.max_episode_steps=abc",
        "env.options.max_episode_steps=abc is not valid",
        "env.options.max_episode_steps must be an integer of at least 1 on CartPole-v1.",
        "Write for example env.options.max_episode_steps=500",
    ),
    Wrong(
        "train CartPole-v1 env.options.max_episode_steps=0",
        "env.options.max_episode_steps=0 is not valid",
        "env.options.max_episode_steps must be an integer of at least 1 on CartPole-v1.",
        "Write for example env.options.max_episode_steps=500",
    ),
    Wrong(
        "env check CartPole-v1 env.options.max_episode_steps=-1",
        "env.options.max_episode_steps=-1 is not valid",
        "env.options.max_episode_steps must be an integer of at least 1 on CartPole-v1.",
        "Write for example env.options.max_episode_steps=500",
    ),
    Wrong(
        "train CartPole-v1 env.options.sutton_barto_reward=maybe --dry-run",
        "env.options.sutton_barto_reward=maybe is not valid",
        "env.options.sutton_barto_reward must be true or false on CartPole-v1.",
        "Write for example env.options.sutton_barto_reward=false",
    ),
    Wrong(
        "train CartPole-v1 env.options.frob=1",
        "env.options={'frob': 1} was refused by 'CartPole-v1'.",
        "Making the environment raised: CartPoleEnv.__init__() got an unexpected keyword argument 'frob' was raised from the environment creator for CartPole-v1 with kwargs ({'frob': 1}).",
        "Options are keyword arguments of the environment's constructor: correct or remove them.",
    ),
    Wrong(
        "train Acrobot-v1 env.options.max_episode_steps=0",
        "env.options={'max_episode_steps': 0} was refused by 'Acrobot-v1'.",
        "Making the environment raised: Expect the `max_episode_steps` to be positive, actually: 0.",
        "Options are keyword arguments of the environment's constructor: correct or remove them.",
    ),
    Wrong(
        "train ALE/Pong-v5 env.options.noop_max=abc",
        "env.options.noop_max=abc is not valid",
        "env.options.noop_max must be an integer from 0 to 10000 on Atari.",
        "Write for example env.options.noop_max=30",
    ),
    Wrong(
        "train ALE/Pong-v5 env.options.frameskip=0",
        "env.options.frameskip=0 is not valid",
        "env.options.frameskip must be an integer from 1 to 1000 on Atari.",
        "Write for example env.options.frameskip=4",
    ),
    Wrong(
        "train ALE/Pong-v5 env.options.episodic_life=2",
        "env.options.episodic_life=2 is not valid",
        "env.options.episodic_life must be true or false on Atari.",
        "Write for example env.options.episodic_life=false",
    ),
    Wrong(
        "train ALE/Pong-v5 env.options.frob=1",
        "env.options.frob=1 has no effect on Atari.",
        "The native Atari environment takes episodic_life, frameskip, full_action_space, max_num_frames_per_episode, maxpool, noop_max, use_fire_reset.",
        "Remove env.options.frob; stickiness is env.sticky and the frame's side env.frame_size.",
    ),
    Wrong(
        "train MinAtar/Breakout-v1 env.options.sticky_action_prob=often",
        "env.options.sticky_action_prob=often is not valid",
        "env.options.sticky_action_prob must be a number from 0 to 1 on MinAtar.",
        "Write for example env.options.sticky_action_prob=0.1",
    ),
    Wrong(
        "completion install --shell tcsh",
        "--shell tcsh is not valid",
        "--shell must be one of bash, zsh, fish.",
        "Write --shell bash",
    ),
    Wrong(
        "doctor --fix",
        "unknown option --fix",
        "qfleet doctor has --out, --measure, --json.",
        "See qfleet doctor --help",
    ),
]


def cartpole() -> Settings:
    # Fixed here, so that tuning the real defaults leaves the messages alone.
    return {
        "algo.n_step": 5,
        "algo.batch_size": 256,
        "replay.samples_per_insert": 32.0,
        "replay.capacity": 50_000,
        "optim.learning_rate": 2e-3,
        "algo.target.type": "average",
        "net.torso.type": "mlp",
        "eval.every_steps": 2_500,
        "until.steps": 50_000,
        "until.score": 475.0,
    }


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.command)
def test_wrong_use(
    wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        environments, "ENVIRONMENTS", ((re.compile("^CartPole-"), cartpole), *environments.ENVIRONMENTS[1:])
    )
    if wrong.plan:
        Path("plan.toml").write_bytes(wrong.plan.encode() if isinstance(wrong.plan, str) else wrong.plan)

    code = main(wrong.command.split())

    assert capsys.readouterr().err == f"error: {wrong.what}\n  why: {wrong.why}\n   do: {wrong.fix}\n"
    assert code == wrong.code
    assert sorted(path.name for path in tmp_path.iterdir()) == (["plan.toml"] if wrong.plan else [])


def test_table_is_long_enough() -> None:
    assert len({wrong.command + str(wrong.plan) for wrong in WRONG}) == len(WRONG) >= 45
