"""A partner as the driver sees it: every order is owed one word, and no wait is without a limit."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from qfleet.data import Array
from qfleet.data.wire_format import Arrays, Facts, Parts
from qfleet.sync.comm import CommLost

START_SECONDS = 120.0
LISTEN_SECONDS = 0.2


class LearnerLost(CommLost):
    """This partner is gone, or does not answer."""


class Transport(Protocol):
    """The driver's end of what connects it with a partner; whoever is gone is a `CommLost`."""

    def say(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Hand a parcel over."""
        ...

    def hear(self, limit_seconds: float) -> Parts | None:
        """What was said, within the limit; None if nothing was."""
        ...

    def waits(self, limit_seconds: float) -> bool:
        """Has something been said that was not heard yet, or is somebody gone?"""
        ...


class ProcessControl(Protocol):
    """A partner's process."""

    def is_alive(self) -> bool:
        """Is it there?"""
        ...

    def end(self) -> None:
        """It is not needed, or not to be relied upon."""
        ...


class LearnerHandle:
    """One partner."""

    def __init__(
        self, number: int, talk: Transport, life: ProcessControl, now: float, start_seconds: float = START_SECONDS
    ) -> None:
        self.number = number
        self.talk = talk
        self.life = life
        self.since = now
        self.start_seconds = start_seconds
        self.ready = False
        self.owed = 0  # words that are due for orders given
        self.dealt: deque[Array] = deque()  # ids of the items it has not answered for yet

    def listen(self, now: float) -> None:
        """Is it ready by now? One that is gone, or takes too long to start, is lost."""
        if not self.ready and (parts := self.heard(0.0)) is not None:
            self.ready = True
            require_well(parts)
        if not self.life.is_alive():
            raise LearnerLost(self.last_words())
        if not self.ready and now - self.since > self.start_seconds:
            raise LearnerLost("it did not start")

    def last_words(self) -> str:
        """Why it is gone: one that fails between orders says so unasked."""
        with suppress(CommLost):
            while (parts := self.talk.hear(0.0)) is not None:
                if parts[0].get("kind") == "failed":
                    return str(parts[0].get("what"))
        return self.how_ended() or "its process is gone"

    def how_ended(self) -> str:
        """How its process ended, where it has and that can be known."""
        how: Callable[[], str] = getattr(self.life, "how_ended", str)
        return "" if self.life.is_alive() else how()

    def cause(self, seen: str) -> str:
        """Why it is lost: what was seen of that, and how its process ended."""
        how = self.how_ended()
        return f"{seen}; {how}" if how and how not in seen else seen

    def order(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Tell it to do something."""
        self.talk.say(facts, arrays)
        self.owed += 1

    def answer(self, kind: str, limit_seconds: float) -> Parts:
        """The word that is due next, which must be of this kind."""
        parts = self.word(limit_seconds)
        if parts[0].get("kind") != kind:
            raise CommLost(str(parts[0].get("what", "it said something else")))
        return parts

    def word(self, limit_seconds: float) -> Parts:
        """Whatever it says next, within the limit."""
        until = time.monotonic() + limit_seconds
        while True:
            if (parts := self.heard(LISTEN_SECONDS)) is not None:
                self.owed -= 1
                require_well(parts)
                return parts
            if not self.life.is_alive():
                raise LearnerLost(self.last_words())
            if time.monotonic() > until:
                raise LearnerLost("it does not answer")

    def heard(self, limit_seconds: float) -> Parts | None:
        """What it has said within the limit, if anything."""
        try:
            return self.talk.hear(limit_seconds)
        except CommLost as cause:
            raise LearnerLost(str(cause)) from cause

    def settle(self, limit_seconds: float) -> Iterator[Parts]:
        """Hear every word that is due, whatever it is: afterwards orders and words are in step again."""
        until = time.monotonic() + limit_seconds
        while self.owed:
            yield self.word(max(0.0, until - time.monotonic()))
        self.dealt.clear()


def require_well(parts: Parts) -> None:
    """A partner whose word is that it failed is as good as gone."""
    if parts[0].get("kind") == "failed":
        raise LearnerLost(str(parts[0].get("what")))
