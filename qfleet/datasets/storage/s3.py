"""`s3://bucket/folder`, through s3fs (the extra `s3`)."""

import os
import re
from contextlib import suppress
from typing import Any

from qfleet.datasets.storage.addresses import without_secrets
from qfleet.datasets.storage.remote_folder import RemoteFolder
from qfleet.errors import UsageError, register_secret
from qfleet.install import install_command

SCHEME = "s3://"
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([^\x00-\x1f\x7f?#\\]+?)/*")
CONNECT_SECONDS = 10
READ_SECONDS = 20
CREDENTIALS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
LEAST_SECRET = 8  # characters; shorter values, as tests have, are parts of other words


def open_s3(url: str) -> RemoteFolder:
    """The folder that a URL names."""
    found = _URL.fullmatch(url)
    parts = found[2].split("/") if found else []
    if found is None or not all(parts) or {".", ".."} & set(parts):
        raise UsageError(
            "this is no address of a folder in S3: " + without_secrets(url),
            "It has a bucket and a folder, and no user, password or query.",
            "Example: s3://bucket/data/cartpole; credentials come from AWS_PROFILE, ~/.aws or the machine's role.",
        )
    return RemoteFolder(f"{SCHEME}{found[1]}/{found[2]}", f"{found[1]}/{found[2]}", lambda: connect())


def connect() -> Any:
    """A connection; credentials and the endpoint are found by botocore in its own places."""
    try:
        from s3fs import S3FileSystem
    except ImportError as error:
        raise UsageError(
            "addresses s3://... need the package s3fs",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('s3')}",
        ) from error
    hide_credentials()
    config = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 1}}
    store = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True, max_concurrency=1)
    store.retries = 1  # RemoteFolder repeats, and has the limits
    return store


def hide_credentials() -> None:
    """Hide the credentials of the environment and of the profile in errors: a store may repeat what it was sent."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    known: dict[str, Any] = {}
    with suppress(BotoCoreError):
        known = Session().get_scoped_config()
    for name in CREDENTIALS:
        for value in (os.environ.get(name.upper()), known.get(name)):
            if value and len(value) >= LEAST_SECRET:
                register_secret(value)
