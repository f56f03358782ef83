"""Which transport serves which address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpkfs.core.uris import FileStore, PubkyAgent, PubkyTemplate
from hpkfs.errors import UsageError
from hpkfs.transport.local import LocalTransport

if TYPE_CHECKING:
    from hpkfs.core.uris import StoreUri
    from hpkfs.transport.base import Transport


def make_transport(store: StoreUri, *, create: bool = False) -> Transport:
    """The transport of a store; `create` makes the directory of a new one.

    Raises:
        UsageError: this version has no transport for the address.
    """
    match store:
        case FileStore(path):
            return LocalTransport(path, create=create)
        case PubkyAgent() | PubkyTemplate():
            raise UsageError(
                f"{store}: stores on a homeserver are not supported by this version.",
                next_step="Use a file:// store.",
            )
