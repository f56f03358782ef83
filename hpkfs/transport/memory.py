"""A store in memory, for tests: it keeps the contract and fails on request.

`Faults` are switches that a test turns while the store runs: a slow store, one that refuses,
hangs, answers with a status, or dies after some requests. The contract suite runs against this
store as against the real ones, so that the fake stays honest. Nothing here survives the process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import trio

from hpkfs.errors import (
    AuthorisationError,
    ConflictError,
    HpkfsError,
    IntegrityError,
    MissingObjectError,
    QuotaError,
    TransientError,
)
from hpkfs.transport.base import HEAD_NAME, Capabilities, check_name, check_put_name

TIMEOUT_S: Final = 60.0
REQUESTS_KEPT_MAX: Final = 10_000

_SAFE: Final = "Your work is safe on this machine."


@dataclass(slots=True)
class Faults:
    """What goes wrong. All of it can be switched while requests run.

    Attributes:
        slow_s: each request takes so long.
        refuse: nothing is reached; requests fail at once.
        hang: requests are taken and never answered, until the transport gives up.
        status: every request is answered so: 401 and 403 refuse, 507 is a full store (writes
            only), 500 and others are passing failures; 0 is none.
        cut_after: after so many more requests the store is gone (as with `refuse`); None: never.
        lose_answers: so many writes are carried out and their answers lost.
    """

    slow_s: float = 0.0
    refuse: bool = False
    hang: bool = False
    status: int = 0
    cut_after: int | None = None
    lose_answers: int = 0


class MemoryTransport:
    """The store of one agent in a dict; several transports may share one `files`.

    Attributes:
        files: name to bytes, as they lie on the store; a test may damage them.
        faults: the switches.
        requests: the latest requests as "verb name", oldest first.
    """

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files: dict[str, bytes] = {} if files is None else files
        self.faults = Faults()
        self.requests: deque[str] = deque(maxlen=REQUESTS_KEPT_MAX)

    @property
    def capabilities(self) -> Capabilities:
        """One process, so a swap excludes all others."""
        return Capabilities(writable=True, locks=True, watch=False)

    async def get(self, name: str, *, limit: int) -> bytes:
        """See `Transport`."""
        await self._request("get", check_name(name))
        data = self.files.get(name)
        if data is None:
            raise MissingObjectError(
                f"{name} is not in the store.",
                kept="Nothing was changed.",
                next_step="Run `hpkfs fsck` on the store.",
            )
        if len(data) > limit:
            raise IntegrityError(
                f"{name} is longer than the {limit:,} bytes that it may have.",
                kept="Nothing was changed.",
                next_step="Run `hpkfs fsck` on the store.",
            )
        return data

    async def exists(self, name: str) -> bool:
        """See `Transport`."""
        await self._request("exists", check_name(name))
        return name in self.files

    async def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        await self._request("put", check_put_name(name), writes=True)
        self.files[name] = bytes(data)
        self._answer()

    async def list_snapshots(self) -> list[str]:
        """See `Transport`."""
        await self._request("list", "snapshots")
        prefix, suffix = "snapshots/", ".json"
        names = (name for name in self.files if name.startswith(prefix))
        return sorted(name.removeprefix(prefix).removesuffix(suffix) for name in names)

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """See `Transport`."""
        await self._request("swap", HEAD_NAME, writes=True)
        if self.files.get(HEAD_NAME) != expected:
            raise ConflictError(
                "The head of the store was moved by someone else.",
                kept=f"It was not changed. {_SAFE}",
                next_step="Run `hpkfs sync` to see where both versions are.",
            )
        self.files[HEAD_NAME] = bytes(new)
        self._answer()

    async def aclose(self) -> None:
        """Nothing is held open."""

    def reconnect(self) -> None:
        """There are no connections."""

    async def _request(self, verb: str, name: str, *, writes: bool = False) -> None:
        """Carry a request to the store, as far as the faults let it."""
        self.requests.append(f"{verb} {name}")
        faults = self.faults
        await trio.sleep(faults.slow_s)
        if faults.cut_after is not None:
            faults.cut_after -= 1
            if faults.cut_after < 0:
                faults.cut_after, faults.refuse = None, True
        if faults.refuse:
            raise _unreached("The store could not be reached.")
        if faults.hang:
            await trio.sleep(TIMEOUT_S)
            raise _unreached(f"The store did not answer for {TIMEOUT_S:.0f} s.")
        if (error := _refusal(faults.status, writes=writes)) is not None:
            raise error

    def _answer(self) -> None:
        """A write was carried out."""
        if self.faults.lose_answers > 0:
            self.faults.lose_answers -= 1
            raise _unreached("The connection to the store broke before it answered.")


def _refusal(status: int, *, writes: bool) -> HpkfsError | None:
    match status:
        case 0:
            return None
        case 401 | 403:
            return AuthorisationError(
                f"The store refuses this machine ({status}).",
                kept=_SAFE,
                next_step="Log in again, then run `hpkfs sync`.",
            )
        case 507:
            if not writes:
                return None
            return QuotaError(
                "The store is full.",
                kept=_SAFE,
                next_step="Free space there, then run `hpkfs sync`.",
            )
        case _:
            return _unreached(f"The store failed ({status}).")


def _unreached(happened: str) -> TransientError:
    return TransientError(happened, kept=_SAFE, next_step="It is tried again by itself.")
