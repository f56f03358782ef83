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
    """A store. Every method may raise `TransientError` and `AuthorisationError`."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        ...

    async def get(self, name: str, *, limit: int) -> bytes:
        """The bytes of a name.

        Raises:
            MissingObjectError: there is no such name.
            IntegrityError: it is longer than `limit` bytes.
        """
        ...

    async def exists(self, name: str) -> bool:
        """Whether a name is there."""
        ...

    async def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name; durable on return. The same bytes again change nothing.

        Raises:
            QuotaError: the store is full; nothing was stored.
        """
        ...

    async def list_snapshots(self) -> list[str]:
        """Ids of all snapshots, on the chain or not."""
        ...

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """Replace the head if its bytes are `expected` (None: there is none). Durable on return.

        Raises:
            ConflictError: the head is another one; it was not changed.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the store."""
        ...


def check_name(name: str) -> str:
    """Return the name, if it is one of a store.

    Raises:
        UsageError: it is not; nothing was asked of the store.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no name in a store.")
    return name
