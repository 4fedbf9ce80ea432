"""Settings that do not go with a data set, or only with one: every entry refuses a plan, from the command line."""

import pytest

from qfleet.errors import UsageError
from qfleet.plan import compose, paths
from qfleet.plan.schema import ConservativeOfflineLoss, Plan
from qfleet.plan.validate.case import COMMAND_LINE
from qfleet.plan.validate.offline import OFFLINE_PAIRS, PREFILL_PAIRS

DATA = "replay.type=dataset replay.path=a"
REFUSED = {
    f"{DATA} runtime.type=processes actors.num=2": "A data set is learned from without acting",
    f"{DATA} runtime.type=processes runtime.replay_process=true": "Every learner reads the data set itself",
    f"{DATA} runtime.type=ray runtime.chunk_rows=4": "there are no other actors",
    f"{DATA} learners.num=2 learners.bundles=true": "An actor-learner acts",
    f"{DATA} population.num=2": "Members of a population",
    f"{DATA} algo.view.type=sequences net.memory.type=gru algo.view.stride=41": "some would not be",
    f"{DATA} algo.bonus.type=count": "A bonus makes an actor explore",
    f"{DATA} algo.anneal.type=exponential": "All epochs of a data set",
    "until.epochs=2": "Epochs are passes through a data set",
    "eval.on=data": "Without a data set there are no recorded episodes",
    "algo.offline.type=cql": "Who acts tries the actions",
    "algo.offline.type=bc": "Who acts tries the actions",
    f"{DATA} algo.offline.type=bc net.head.type=quantile": "not of returns",
    f"{DATA} algo.offline.type=bc algo.rescale=true": "no values to rescale",
}
PREFILL = "replay.prefill=a"
PER = "replay.sampler.type=prioritized"
PROCESS = "runtime.type=processes runtime.replay_process=true"
REFUSED |= {
    f"{PREFILL} algo.bonus.type=count": "Recorded steps have no bonus",
    f"{PREFILL} learners.num=2 learners.bundles=true": "Every actor-learner has a replay of its own",
    f"{PREFILL} {PER} replay.sampler.initial=actor": "values that an actor computed",
    f"{PREFILL} replay.on_device=true": "of the run's own steps",
    f"{PREFILL} {PROCESS}": "begins anew with an empty replay",
    f"{PREFILL} save.replay=none": "begin with an empty replay",
    f"{PREFILL} replay.prefill_share=0.5 replay.filter.type=duplicates": "compares steps of one replay",
    f"{PREFILL} replay.prefill_share=0.5 {PROCESS} {PER}": "only the replay's own process knows",
    f"{PREFILL} replay.prefill_share=0.5 custom.sampler=x": "samplers of one kind",
    f"{PREFILL} replay.prefill_share=0.5 algo.batch_size=1": "at least one recorded step",
}
ACCEPTED = (
    f"{DATA} algo.view.type=sequences net.memory.type=gru algo.view.stride=40",
    f"{DATA} algo.view.type=sequences net.memory.type=gru algo.view.stride=41 replay.order.type=uniform",
    f"{DATA} env.normalize=both learners.num=2",
    f"{DATA} steer.batch.type=grow steer.batch.largest=1024",
    f"{DATA} replay.order.type=prioritized replay.order.alpha=0.5",
    f"{DATA} until.epochs=2 steer.stop_patience=200 algo.reset.type=periodic algo.reset.every_updates=1000000",
    f"{PREFILL} {PER}",
    f"{PREFILL} replay.prefill_share=0.5 {PROCESS}",
    f"{PREFILL} replay.prefill_share=0.5 save.replay=none",
    f"{PREFILL} replay.prefill_share=0.5 {PER} learners.num=2",
)


def plan_of(settings: str) -> Plan:
    overrides = [(path, value, COMMAND_LINE) for path, _, value in (each.partition("=") for each in settings.split())]
    return compose("Logs-v0", overrides=overrides).plan


@pytest.mark.parametrize(("settings", "why"), REFUSED.items())
def test_a_pair_is_refused_with_its_reason(settings: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan_of(settings)
    assert why in raised.value.why


@pytest.mark.parametrize("settings", ACCEPTED)
def test_what_goes_together_is_accepted(settings: str) -> None:
    plan_of(settings)


def test_every_reason_about_recorded_steps_in_a_replay_is_tested_here() -> None:
    whys = list(REFUSED.values())
    for pair in PREFILL_PAIRS:
        assert any(why in pair.reason for why in whys), pair.reason


def test_the_pairs_name_existing_settings() -> None:
    assert {path for pair in (*OFFLINE_PAIRS, *PREFILL_PAIRS) for path in (pair.first, pair.second)} <= set(
        paths.index().paths()
    )


@pytest.mark.parametrize("head", ["scalar", "categorical", "quantile", "implicit"])
def test_cql_goes_with_every_head(head: str) -> None:
    plan = plan_of(f"{DATA} algo.offline.type=cql algo.offline.alpha=4 net.head.type={head}")
    assert plan.algo.offline == ConservativeOfflineLoss(4.0)
