"""Who plays when a data set is collected: random actions, policies of runs, and mixtures of them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qfleet.act import Policy
from qfleet.act.mixture import MAX_POLICIES, PlayedPolicy
from qfleet.api import load
from qfleet.build.make import policy_spec
from qfleet.data import Spec
from qfleet.errors import UsageError

RANDOM = "random"
GREEDY = "greedy"
_EPSILON = re.compile(r"epsilon=(0(?:\.\d+)?|1(?:\.0+)?)")
_SHARE = re.compile(r"(?P<policy>.+):(?P<share>\d+(?:\.\d+)?)")
FindRun = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Who chooses the actions: the greedy policy of a run, or with probability `epsilon` chance."""

    name: str
    epsilon: float
    run: Path | None = None
    share: float = 1.0  # in a mixture, in relation to the others


def parse_behaviour(text: str | None, run: Path | None, find: FindRun) -> Behaviour:
    """`random`, `greedy` or `epsilon=0.1` of the run that was named first, `RUN` or `RUN,epsilon=0.1` of another."""
    text = text or (RANDOM if run is None else GREEDY)
    if text == RANDOM:
        return Behaviour(RANDOM, 1.0)
    named, _, kind = text.rpartition(",")
    number = _EPSILON.fullmatch(kind)
    if not named and run is None and (text == GREEDY or number):
        raise UsageError(
            f"--policy {text} needs the policy of a run",
            "An environment was named, which has no policy of its own.",
            f"Name a run first, or here: --policy RUN,{text}. Or use --policy random.",
        )
    if not named and not number and text != GREEDY:
        named = text
        kind = GREEDY
    elif kind != GREEDY and not number:
        raise UsageError(
            f"--policy {text} is not valid",
            f"`{kind}` is neither {GREEDY} nor epsilon= with a number from 0 to 1.",
            f"Write for example --policy {named or 'RUN'},epsilon=0.1",
        )
    chosen = find(named) if named else run
    return Behaviour(f"{chosen.name if chosen else ''}, {kind}", float(number[1]) if number else 0.0, chosen)


def parse_mixture(texts: Sequence[str], run: Path | None, find: FindRun) -> list[Behaviour]:
    """Several policies, each with its share after a colon: `random:0.5`, `RUN,epsilon=0.1:0.5`."""
    if len(texts) <= 1:
        return [parse_behaviour(next(iter(texts), None), run, find)]
    found = [_SHARE.fullmatch(text) for text in texts]
    without = next((text for text, each in zip(texts, found, strict=True) if each is None), None)
    if without is not None or len(texts) > MAX_POLICIES:
        raise UsageError(
            f"--policy {without} has no share" if without is not None else f"{len(texts)} policies are too many",
            f"Of several policies each has a share, in relation to the others; {MAX_POLICIES} are the most.",
            "Write for example --policy random:0.5 --policy RUN,epsilon=0.1:0.5",
        )
    shares = [(each["policy"], float(each["share"])) for each in found if each is not None]
    if any(share <= 0 for _, share in shares):
        raise UsageError("a share of --policy is 0", "A policy without a share plays no episode.", "Leave it out.")
    return [replace(parse_behaviour(text, run, find), share=share) for text, share in shares]


def load_policies(behaviours: Sequence[Behaviour], env_id: str, spec: Spec, trust_env: bool) -> list[PlayedPolicy]:
    """The policies, ready to play; refused if one does not fit the environment, or has a memory among others."""
    loaded: dict[Path, Policy] = {}
    for behaviour in behaviours:
        if behaviour.run is not None and behaviour.run not in loaded:
            loaded[behaviour.run] = load_policy(behaviour.run, env_id, spec, trust_env)
            if len(behaviours) > 1 and loaded[behaviour.run].net.memory is not None:
                raise UsageError(
                    f"the policy of {behaviour.run.name} has a memory, and plays alone only",
                    "In a mixture the lanes of a policy change, and its memory belongs to a lane.",
                    "Record it by itself into a data set of its own.",
                )
    return [
        PlayedPolicy(each.name, each.epsilon, None if each.run is None else loaded[each.run], each.share)
        for each in behaviours
    ]


def load_policy(run: Path, env_id: str, spec: Spec, trust_env: bool) -> Policy:
    """The best policy of a run, which must fit the environment."""
    policy = load(run, trust_env=trust_env).policy
    if policy.spec is None or policy_spec(spec, policy) != policy_spec(policy.spec, policy):
        raise UsageError(
            f"the policy of {run.name} does not fit {env_id}",
            "It was trained on other observations or actions.",
            "Name a run that was trained in this environment.",
        )
    return policy
