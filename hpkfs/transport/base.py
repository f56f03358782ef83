"""The contract of a store: three kinds of names, whole objects, one head that is swapped.

`tests/contract/test_transport.py` is run against every transport. Names are `head.json`,
`snapshots/<id>.json` and `objects/<digest>.<extension>`; anything else is refused here, at the
edge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from hpkfs.errors import UsageError

HEAD_NAME = "head.json"
_NAME = re.compile(
    r"head\.json|snapshots/[0-9a-f]{32}\.json|objects/[0-9a-f]{64}\.(?:md|json|bin|chunk)"
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond get and put.

    Attributes:
        writable: objects and the head can be written.
        locks: the swap of the head excludes other writers, not only detects them.
        watch: the store tells when the head changes.
    """

    writable: bool
    locks: bool
    watch: bool


class Transport(Protocol):
    """A store. Every method may raise `TransientError` and `AuthorisationError`.

    A method that raised changed the store wholly or not at all. After a `TransientError` only a
    read tells which; so every write may be repeated as it is.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        ...

    async def get(self, name: str, *, limit: int) -> bytes:
        """The bytes of a name.

        Raises:
            MissingObjectError: there is no such name.
            IntegrityError: it is longer than `limit` bytes, or no file.
        """
        ...

    async def exists(self, name: str) -> bool:
        """Whether a name is there."""
        ...

    async def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name; durable on return. The same bytes again change nothing.

        The head is not put, but swapped.

        Raises:
            QuotaError: the store is full; nothing was stored.
            UsageError: it is no name of a snapshot or an object.
        """
        ...

    async def list_snapshots(self) -> list[str]:
        """Ids of all snapshots, on the chain or not."""
        ...

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """Replace the head if its bytes are `expected` (None: there is none). Durable on return.

        What was put before is durable then as well, whichever process put it. A head found by
        reading may not be durable yet, if its writer was killed: swap it for itself before
        anything is thrown away because of it.

        Raises:
            ConflictError: the head is another one; it was not changed.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the store."""
        ...

    def reconnect(self) -> None:
        """Let go of connections that may be dead, and of a login that is over.

        Requests that wait for an answer are sent again.
        """
        ...


def check_put_name(name: str) -> str:
    """Return the name, if it is one that may be put.

    Raises:
        UsageError: it is not; nothing was asked of the store.
    """
    if name == HEAD_NAME:
        raise UsageError(
            "The head of a store is swapped, never put.",
            kept="Nothing was changed.",
            next_step="This is a mistake in the program; please report it.",
        )
    return check_name(name)


def check_name(name: str) -> str:
    """Return the name, if it is one of a store.

    Raises:
        UsageError: it is not; nothing was asked of the store.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"The name {name[:100]!r} is none that a store has.",
            kept="Nothing was asked of the store.",
            next_step="This is a mistake in the program; please report it.",
        )
    return name
