"""Splits: which episodes are for training, for validation and for the test, by a salted hash of their ids.

An episode stays in its split when others are added to the data set.
"""

import hashlib
import re
from dataclasses import dataclass

from qfleet.datasets.format import Split
from qfleet.errors import UsageError

BUCKETS = 10_000
_SHARES = re.compile(r"(\d{1,3})/(\d{1,3})/(\d{1,3})")


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The percentages of the three splits, and the salt of the hash."""

    train: int = 80
    validation: int = 10
    test: int = 10
    salt: str = "qfleet"

    def split_of(self, key: str) -> Split:
        """The split of the episode with this id."""
        digest = hashlib.sha256(f"{self.salt}\n{key}".encode()).digest()
        return self.split_at(int.from_bytes(digest[:8]) % BUCKETS * 100 // BUCKETS)

    def split_at(self, percent: int) -> Split:
        """The split of a place from 0 to 99, if the splits take their shares one after the other."""
        if percent < self.train:
            return "train"
        return "validation" if percent < self.train + self.validation else "test"

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.train}/{self.validation}/{self.test}"


def parse_split(text: str, salt: str = "qfleet") -> SplitRule:
    """The rule of a text such as 80/10/10."""
    found = _SHARES.fullmatch(text)
    shares = [int(part) for part in found.groups()] if found else []
    if len(shares) != 3 or sum(shares) != 100 or shares[0] == 0:
        raise UsageError(
            f"--split {text} is no split",
            "It has the percentages of train, validation and test, which make 100 together; train is above 0.",
            "Example: --split 80/10/10",
        )
    return SplitRule(shares[0], shares[1], shares[2], salt)
