"""A partner's process, as the driver sees it: every order is owed one word, and no wait is without a limit."""

import time
from collections import deque
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle

from qfleet.data import Array
from qfleet.data.wire import Arrays, Facts, Parts
from qfleet.run.partner import PartnerPost, Talk
from qfleet.sync.comm import CommLost

START_SECONDS, END_SECONDS, LISTEN_SECONDS = 120.0, 0.5, 0.2


class Mate:
    """One partner."""

    def __init__(self, process: BaseProcess, post: PartnerPost, talk: Talk, now: float) -> None:
        self.process, self.post, self.talk, self.since = process, post, talk, now
        self.ready = False
        self.owed = 0  # words that are due for orders given
        self.dealt: deque[Array] = deque()  # ids of the items it has not answered for yet

    def listen(self, now: float) -> None:
        """Is it ready by now? One that is gone, or takes too long to start, is lost."""
        if not self.process.is_alive():
            raise CommLost("its process is gone")
        if not self.ready:
            self.ready = self.talk.hear(0.0) is not None
            if not self.ready and now - self.since > START_SECONDS:
                raise CommLost("it did not start")

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
            if (parts := self.talk.hear(LISTEN_SECONDS)) is not None:
                self.owed -= 1
                if parts[0].get("kind") == "failed":
                    raise CommLost(str(parts[0].get("what")))
                return parts
            if not self.process.is_alive():
                raise CommLost("its process is gone")
            if time.monotonic() > until:
                raise CommLost("it does not answer")

    def settle(self, limit_seconds: float) -> None:
        """Hear every word that is due, whatever it is: afterwards orders and words are in step again."""
        until = time.monotonic() + limit_seconds
        while self.owed:
            self.word(max(0.0, until - time.monotonic()))
        self.dealt.clear()

    def hand(self, *handles: int) -> None:
        """Hand descriptors over."""
        try:
            for handle in handles:
                send_handle(self.talk.bell, handle, self.process.pid)
        except OSError as error:
            raise CommLost(str(error)) from error

    def end(self) -> None:
        """It is not needed, or not to be relied upon."""
        self.process.kill()
        self.process.join(END_SECONDS)
        self.talk.bell.close()
        self.post.orders.close()
        self.post.answers.close()
