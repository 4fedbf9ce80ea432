"""Addresses of data sets: which kinds there are, and how a refused one is shown."""

import re

SUPPORTED = "a folder on this machine, s3://bucket/folder or hdfs://namenode:port/folder"
# A scheme, or a chain of file systems such as simplecache::s3://bucket/set. Path turns s3://a into s3:/a.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(::|:/)")


def scheme_of(text: str) -> str:
    """The scheme of an address in lower case, with `::` if others are chained to it; empty for a path."""
    found = _SCHEME.match(text)
    if found is None:
        return ""
    return found[1].lower() + ("::" if "::" in text else "")


def without_secrets(url: str) -> str:
    """An address as it may be shown: without user, password and query."""
    scheme, separator, rest = url.partition("//")
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]
