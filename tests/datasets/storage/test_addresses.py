"""Addresses of data sets: what is opened, what is refused, and what a refusal says."""

from pathlib import Path

import pytest

from qfleet.datasets.storage import LocalFolder, RemoteFolder, open_place
from qfleet.errors import UsageError


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://bucket/deep/set/", "s3://bucket/deep/set"),
        ("hdfs://namenode:8020/data/set", "hdfs://namenode:8020/data/set"),
        ("hdfs://nameservice1/data/set//", "hdfs://nameservice1/data/set"),
    ],
)
def test_supported_addresses(address: str, shown: str) -> None:
    place = open_place(address)  # nothing is connected to yet
    assert isinstance(place, RemoteFolder)
    assert place.url == shown


@pytest.mark.parametrize("path", ["data/set", "/data/set", "C:/set", "a:b", "../set"])
def test_paths_are_folders_on_this_machine(path: str) -> None:
    assert isinstance(open_place(path), LocalFolder)
    assert isinstance(open_place(Path(path)), LocalFolder)


@pytest.mark.parametrize(
    "address",
    [
        "gs://bucket/set",
        "gs:/bucket/set",
        "http://host/set",
        "https://me:CANARY@host/set?token=CANARY",
        "webhdfs://namenode:50070/set",
        "file:///data/set",
        "simplecache::s3://bucket/set",
        "simplecache::s3://key:CANARY@bucket/set",
        "filecache::hdfs://namenode:8020/set",
        "zip://a.parquet::s3://bucket/set.zip",
        "s3://bucket/set::file:///etc",
        "memory::set",
        "reference::http://host/set",
        "github://me:CA/NARY@repo/set",
    ],
)
def test_other_schemes_are_refused_and_what_is_supported_is_named(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_place(address)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    if not address.startswith("s3://"):
        assert "a folder on this machine, s3://bucket/folder or hdfs://namenode:port/folder" in text
    assert "CANARY" not in text
    assert "NARY" not in text


def test_an_address_of_a_local_file_is_answered_with_its_path() -> None:
    with pytest.raises(UsageError, match="Leave file:// out: /data/set"):
        open_place("file:///data/set")


@pytest.mark.parametrize(
    "address",
    [
        "hdfs://",
        "hdfs:///data/set",
        "hdfs://namenode:8020",
        "hdfs://namenode:8020/",
        "hdfs://namenode:0/set",
        "hdfs://namenode:99999/set",
        "hdfs://me:CANARY@namenode:8020/set",
        "hdfs://namenode:8020/a/../b",
        "hdfs://namenode:8020/a//b",
        "hdfs://namenode:8020/a?user.name=hdfs",
        "hdfs://namenode:8020/a#b",
        "hdfs://namenode:8020/a\nb",
        "HDFS://namenode:8020/a:b",
    ],
)
def test_addresses_that_hdfs_might_take_for_others_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="no address of a folder in HDFS") as caught:
        open_place(address)
    assert "CANARY" not in str(caught.value)
