"""Settings that do not go with a data set, or only with one: every entry refuses a plan, from the command line."""

import pytest

from qfleet.errors import UsageError
from qfleet.plan import compose, paths
from qfleet.plan.schema import ConservativeOfflineLoss, Plan
from qfleet.plan.validate.case import COMMAND_LINE
from qfleet.plan.validate.offline import OFFLINE_PAIRS

DATA = "replay.type=dataset replay.path=a"
REFUSED = {
    f"{DATA} runtime.type=processes actors.num=2": "A data set is learned from without acting",
    f"{DATA} runtime.type=processes runtime.replay_process=true": "Every learner reads the data set itself",
    f"{DATA} runtime.type=ray runtime.chunk_rows=4": "there are no other actors",
    f"{DATA} learners.num=2 learners.bundles=true": "An actor-learner acts",
    f"{DATA} population.num=2": "Members of a population",
    f"{DATA} algo.view.type=sequences net.memory.type=gru": "Only single steps are read",
    f"{DATA} algo.bonus.type=count": "A bonus makes an actor explore",
    f"{DATA} algo.anneal.type=exponential": "All epochs of a data set",
    f"{DATA} env.normalize=obs": "Running statistics",
    f"{DATA} steer.batch.type=grow": "The batch size of a data set",
    "until.epochs=2": "Epochs are passes through a data set",
    "eval.on=data": "Without a data set there are no recorded episodes",
    "algo.offline.type=cql": "Who acts tries the actions",
    "algo.offline.type=bc": "Who acts tries the actions",
    f"{DATA} algo.offline.type=bc net.head.type=quantile": "not of returns",
    f"{DATA} algo.offline.type=bc algo.rescale=true": "no values to rescale",
}


def plan_of(settings: str) -> Plan:
    overrides = [(path, value, COMMAND_LINE) for path, _, value in (each.partition("=") for each in settings.split())]
    return compose("Logs-v0", overrides=overrides).plan


@pytest.mark.parametrize(("settings", "why"), REFUSED.items())
def test_a_pair_is_refused_with_its_reason(settings: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan_of(settings)
    assert why in raised.value.why


def test_the_pairs_name_existing_settings() -> None:
    assert {path for pair in OFFLINE_PAIRS for path in (pair.first, pair.second)} <= set(paths.index().paths())


@pytest.mark.parametrize("head", ["scalar", "categorical", "quantile", "implicit"])
def test_cql_goes_with_every_head(head: str) -> None:
    plan = plan_of(f"{DATA} algo.offline.type=cql algo.offline.alpha=4 net.head.type={head}")
    assert plan.algo.offline == ConservativeOfflineLoss(4.0)
