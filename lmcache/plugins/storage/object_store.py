"""Object stores as tiers: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage, a folder.

A blob is one object, written by one request: a reader finds the old one, the new one, or none, whenever either side
dies. Object stores keep what they have acknowledged; a folder keeps what its file system does, for a blob is written
beside its place and renamed, but not synced (`disk://` does that, and bounds what it takes).

Nothing is remembered of what a store holds: an object that somebody else deleted is absent at once. A store is not
bounded here; let its own lifecycle rules delete what is old.
"""

import abc
import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import KEY_DIGITS, Buffer, StorageTier, TierLocation
from lmcache.core.tier_url import SECRETS_STAY_OUT
from lmcache.errors import ConfigError, with_extra
from lmcache.plugins.storage.object_store_tier import OPTIONS, ObjectStoreTier, in_short

CONNECT_S = 2
"""Seconds that connecting may take before it is tried again."""
REQUEST_S = 600
"""Seconds that one request may take; the deadline of a call is shorter, as a rule."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two tries of a request; jitter is added."""
LEFT_BEHIND_S = 3600
"""A half-written file of this age has no writer any more."""

_LEAVING = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}#\d+")
_REMOTE_OPTIONS = {
    **OPTIONS,
    "allow_http": "on: the endpoint may be one without TLS; off unless said otherwise",
    "ca_file": "certificates, in PEM form, that the server's may be signed by, beside the system's",
    "endpoint": "address of the service, such as https://minio.example:9000; the provider's own unless said otherwise",
    "retries": "times that a request is tried again after a failure of the server; 3 unless said otherwise",
}


class RemoteTier(ObjectStoreTier):
    """What the tiers on object stores behind HTTP have in common."""

    options: ClassVar[Mapping[str, str]] = _REMOTE_OPTIONS
    bucket_option: ClassVar[str]
    """What obstore calls the bucket."""

    def make_store(self) -> Any:
        location = self.location
        if not location.host:
            raise ConfigError(
                f"--l2 {location} names no bucket", remedy=f"write {location.scheme}://BUCKET, then /PREFIX if you like"
            )
        endpoint = location.options.get("endpoint", "")
        if "@" in endpoint.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                f"--l2 {location} has a user or a password in its endpoint",
                remedy=SECRETS_STAY_OUT,
            )
        if endpoint.startswith("http://") and not self.is_on("allow_http"):
            raise ConfigError(
                f"--l2 {location} has the endpoint {endpoint}, which does not encrypt",
                remedy="use https://, or add allow_http=on if everybody on the way may read and change the blobs",
            )
        retries = self.whole_number("retries", 3, least=0)
        try:
            return _store_classes(location)[location.scheme](
                config={self.bucket_option: location.host, **self._settings()},
                client_options=self._client_options(),
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=REQUEST_S),
                    "backoff": {
                        "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
                        "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
                        "base": 2,
                    },
                },
            )
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"--l2 {location} cannot be opened: {in_short(error)}") from error

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What obstore is told of the service and the credentials."""

    def _client_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "allow_http": self.is_on("allow_http"),
            "connect_timeout": f"{CONNECT_S}s",
            "timeout": f"{REQUEST_S}s",
        }
        file = self.location.options.get("ca_file")
        if file is not None:
            try:
                options["root_certificate"] = Path(file).read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"--l2 {self.location} has ca_file={file}, which cannot be read: {error}", remedy="correct it"
                ) from error
        return options

    def _given(self, **names: str) -> dict[str, Any]:
        """Options and secrets that the user gave: obstore's name for each of ours."""
        values = {**self.location.options, **self.location.secrets}
        return {theirs: values[ours] for ours, theirs in names.items() if ours in values}


class S3Tier(RemoteTier):
    """Blobs in a bucket of S3, or of what speaks its protocol: `s3://BUCKET/PREFIX`."""

    scheme = "s3"
    bucket_option = "bucket"
    options: ClassVar[Mapping[str, str]] = {
        **_REMOTE_OPTIONS,
        "region": "the bucket's region; AWS_REGION unless said otherwise, else us-east-1",
        "virtual_host": "on: the bucket is part of the endpoint's host name; off unless said otherwise",
    }
    secrets: ClassVar[Mapping[str, str]] = {
        "access_key": "the access key's id; AWS_ACCESS_KEY_ID or the machine's role unless said otherwise",
        "secret_key": "the secret access key; AWS_SECRET_ACCESS_KEY or the machine's role unless said otherwise",
        "session_token": "for temporary keys; AWS_SESSION_TOKEN unless said otherwise",
    }

    def _settings(self) -> dict[str, Any]:
        given = self._given(
            endpoint="endpoint",
            region="region",
            access_key="access_key_id",
            secret_key="secret_access_key",  # noqa: S106 - a name
            session_token="session_token",  # noqa: S106 - a name
        )
        # several at once is not what every store can do, and deleting is rare
        return {**given, "virtual_hosted_style_request": self.is_on("virtual_host"), "disable_bulk_delete": True}


class GoogleTier(RemoteTier):
    """Blobs in a bucket of Google Cloud Storage: `gs://BUCKET/PREFIX`."""

    scheme = "gs"
    bucket_option = "bucket"
    secrets: ClassVar[Mapping[str, str]] = {
        "service_account": "the service account's key, the JSON file's content; GOOGLE_SERVICE_ACCOUNT, "
        "GOOGLE_APPLICATION_CREDENTIALS or the machine's role unless said otherwise",
    }

    def _settings(self) -> dict[str, Any]:
        return self._given(endpoint="base_url", service_account="service_account_key")


class AzureTier(RemoteTier):
    """Blobs in a container of Azure Blob Storage: `az://CONTAINER/PREFIX?account=NAME`."""

    scheme = "az"
    bucket_option = "container_name"
    options: ClassVar[Mapping[str, str]] = {
        **_REMOTE_OPTIONS,
        "account": "the storage account; AZURE_STORAGE_ACCOUNT_NAME unless said otherwise",
    }
    secrets: ClassVar[Mapping[str, str]] = {
        "access_key": "the account's key; AZURE_STORAGE_ACCOUNT_KEY or the machine's identity unless said otherwise",
        "sas_token": "a shared access signature instead of the key; AZURE_STORAGE_SAS_TOKEN unless said otherwise",
    }

    def _settings(self) -> dict[str, Any]:
        return self._given(
            account="account_name",
            endpoint="endpoint",
            access_key="account_key",
            sas_token="sas_key",  # noqa: S106
        )


class FolderTier(ObjectStoreTier):
    """Blobs in a folder that several servers may share, such as one on NFS: `file:///PATH`."""

    scheme = "file"
    options: ClassVar[Mapping[str, str]] = OPTIONS

    def __init__(self, location: TierLocation) -> None:
        """Look for the folder."""
        self._swept: set[str] = set()
        super().__init__(location)

    def path_in_store(self) -> str:
        """The store begins at the folder."""
        return ""

    def make_store(self) -> Any:
        path = Path(self.location.path)
        if self.location.host or not self.location.path:
            raise ConfigError(f"--l2 {self.location} names no folder", remedy="write file:///PATH, with three slashes")
        if not path.is_dir():
            raise ConfigError(f"--l2 {self.location}: there is no folder {path}", remedy="create it, or correct it")
        return _store_classes(self.location)["file"](path)

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Write a file beside the blob's place, rename it. The first time in a folder, older leavings are removed."""
        self._sweep(key[:2])
        super().store(key, parts, deadline)

    def _sweep(self, folder: str) -> None:
        """Remove what writers that died left in this folder."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        with contextlib.suppress(OSError):  # no such folder yet, or somebody else sweeps
            for entry in os.scandir(Path(self.location.path) / folder):
                if _LEAVING.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - LEFT_BEHIND_S:
                    Path(entry.path).unlink()


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    """The built-in tiers on object stores."""
    return [S3Tier, GoogleTier, AzureTier, FolderTier]


def _store_classes(location: TierLocation) -> dict[str, Any]:
    try:
        from obstore import store
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--l2 {location} needs obstore, which is not installed",
            remedy=with_extra("s3"),
        ) from error
    return {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore, "file": store.LocalStore}
