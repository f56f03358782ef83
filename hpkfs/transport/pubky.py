"""A store on a Pubky homeserver: one session, a bounded number of requests in flight.

The session is opened from the grant at the first request and again when the homeserver does not
know it any more: a grant has one live session, and the Pubky SDK does not recover from a 401. A
request whose connection broke is repeated at once, a few times; every write here may be repeated.
What lasts longer is the caller's to repeat.

The head is swapped under a lock of the homeserver, which makes it a compare-and-swap. A homeserver
without locks (before 0.13) only lets another writer be detected: by reading back, and by the
ancestry of later heads (`Publisher.builds_on`).
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Final, TypeVar

import trio
from hpkfs_native import Client, NativeError, Session

from hpkfs.errors import (
    AuthorisationError,
    ConflictError,
    HpkfsError,
    IntegrityError,
    MissingObjectError,
    QuotaError,
    TransientError,
    UsageError,
)
from hpkfs.transport.awaiting import finished
from hpkfs.transport.base import HEAD_NAME, Capabilities, check_name, check_put_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs_native import Call, Entry, Lock, Reader

    from hpkfs.core.uris import PubkyAgent, PubkyTemplate

REQUESTS_MAX: Final = 16
REQUEST_TIMEOUT_S: Final = 300.0  # sixteen chunks at once leave through 0.5 Mbit/s
READ_TIMEOUT_S: Final = 30.0
PAGE: Final = 1_000
HEAD_BYTES_MAX: Final = 64 * 1024
# A connection that the homeserver closed while it was idle fails the next request, once for each.
REPEATS_MAX: Final = 3
REPEAT_S: Final = (0.05, 0.3)
BROKEN: Final = frozenset({"connection", "body", "other"})
# The homeserver asks for slower requests; a pause doubles each time.
THROTTLED: Final = frozenset({429, 503})
THROTTLED_S: Final = 0.5
LOCK_S: Final = 15  # a writer that was killed keeps others out for so long
LOCK_TIMEOUT_S: Final = 40.0
LOCK_POLL_S: Final = (0.05, 0.3)
UNLOCK_TIMEOUT_S: Final = 3.0

_SAFE: Final = "Your work is safe on this machine."
_AGAIN: Final = "It is tried again by itself."
_T = TypeVar("_T")


class PubkyTransport:
    """The store of an agent or a template.

    Args:
        store: its address.
        network: `mainnet` or `testnet`.
        grant: gives the exported grant each time that a session is opened, None where there is
            none. Without it only what is public can be read.
    """

    def __init__(
        self,
        store: PubkyAgent | PubkyTemplate,
        *,
        network: str,
        grant: Callable[[], str | None] | None = None,
    ) -> None:
        self._store = store
        self._network = network
        self._grant = grant
        self._client: Client | None = None
        self._session: Session | None = None
        self._opening = trio.Lock()
        self._places = trio.CapacityLimiter(REQUESTS_MAX)
        self._attempts: set[trio.CancelScope] = set()
        self._knows_locks = False

    @property
    def capabilities(self) -> Capabilities:
        """An agent is read and written, a template only read."""
        return Capabilities(writable=self._grant is not None, locks=True, watch=False)

    # -- the contract ---------------------------------------------------------------------

    async def get(self, name: str, *, limit: int) -> bytes:
        """See `Transport`."""
        path = self._path(check_name(name))
        return await self._ask(name, lambda reader: reader.get(path, limit=limit), limit=limit)

    async def exists(self, name: str) -> bool:
        """See `Transport`."""
        path = self._path(check_name(name))
        try:
            await self._ask(name, lambda reader: reader.stats(path))
        except MissingObjectError:
            return False
        return True

    async def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        path = self._path(check_put_name(name))
        await self._write(name, lambda session: session.put(path, data))

    async def list_snapshots(self) -> list[str]:
        """See `Transport`."""
        folder, found, cursor = self._path("snapshots/"), list[str](), None
        while True:
            try:
                page = await self._page(folder, cursor)
            except MissingObjectError:  # no snapshot was ever put
                page = []
            found += [entry.path.removeprefix(folder) for entry in page]
            if len(page) < PAGE:
                break
            cursor = page[-1].cursor
        return sorted(name.removesuffix(".json") for name in found if _is_snapshot(name))

    async def _page(self, folder: str, cursor: str | None) -> list[Entry]:
        return await self._ask(
            "snapshots", lambda reader: reader.list(folder, limit=PAGE, cursor=cursor)
        )

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """See `Transport`. The wait for another writer can be given up."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if await self._check_head(expected, new):
            return
        lock = await self._lock_head()
        if lock is None:
            await self._swap_unlocked(new)
            return
        try:
            # Between our look and our lock another writer may have been here.
            if not await self._check_head(expected, new):
                await self._put_head(lambda session: session.put_locked(lock, new), new)
        finally:
            # A lock that is not let go runs out by itself.
            with (
                trio.CancelScope(shield=True),
                trio.move_on_after(UNLOCK_TIMEOUT_S),
                contextlib.suppress(HpkfsError),
            ):
                await self._write(HEAD_NAME, lambda session: session.unlock(lock))

    async def aclose(self) -> None:
        """See `Transport`. The grant stays valid."""
        self._client = self._session = None

    def reconnect(self) -> None:
        """See `Transport`."""
        self._client = self._session = None
        for attempt in self._attempts:
            attempt.cancel()

    async def sign_out(self) -> None:
        """Revoke the grant at the homeserver.

        Raises:
            AuthorisationError: the homeserver does not know it.
            TransientError: the homeserver did not answer; the grant may still be valid.
        """
        await self._write("the session", lambda session: session.sign_out())
        self._client = self._session = None

    # -- the head -------------------------------------------------------------------------

    async def _head(self) -> bytes | None:
        try:
            return await self.get(HEAD_NAME, limit=HEAD_BYTES_MAX)
        except MissingObjectError:
            return None

    async def _check_head(self, expected: bytes | None, new: bytes) -> bool:
        """Whether the head is as wanted already.

        Raises:
            ConflictError: it is neither that nor the expected one.
        """
        found = await self._head()
        if found != expected:
            raise self._moved()
        return found == new

    def _moved(self) -> ConflictError:
        return ConflictError(
            f"The head of {self._store} was moved by someone else.",
            kept="It was not changed, and your work is safe on this machine.",
            next_step="Run `hpkfs sync` to see where both versions are.",
        )

    async def _lock_head(self) -> Lock | None:
        """Lock the head; None on a homeserver that has no locks."""
        path = self._path(HEAD_NAME)
        deadline = trio.current_time() + LOCK_TIMEOUT_S
        while True:
            try:
                lock = await self._request(lambda session: session.lock(path, seconds=LOCK_S))
            except NativeError as error:
                if error.status == 405 and not self._knows_locks:
                    return None
                if error.status != 423 or trio.current_time() >= deadline:
                    raise self._translate(error, HEAD_NAME) from error
            else:
                self._knows_locks = True
                return lock
            await trio.sleep(random.uniform(*LOCK_POLL_S))

    async def _put_head(self, put: Callable[[Session], Call[None]], new: bytes) -> None:
        """Write the head; a lost answer is looked up."""
        try:
            await self._write(HEAD_NAME, put)
        except TransientError:
            if await self._head() != new:
                raise

    async def _swap_unlocked(self, new: bytes) -> None:
        """Write, and see whether it stayed: all that can be had without locks."""
        path = self._path(HEAD_NAME)
        await self._put_head(lambda session: session.put(path, new), new)
        if await self._head() != new:
            raise ConflictError(
                f"The head of {self._store} was overwritten by someone else at the same moment.",
                kept="Both checkpoints are on the store, and your work is safe on this machine.",
                next_step="Run `hpkfs sync` to see where both versions are.",
            )

    # -- requests -------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return self._store.folder + name

    async def _ask(self, name: str, ask: Callable[[Reader], Call[_T]], *, limit: int = 0) -> _T:
        """Read something.

        Raises:
            HpkfsError: as `Transport.get` says.
        """
        try:
            return await self._request(ask)
        except NativeError as error:
            raise self._translate(error, name, limit=limit) from error

    async def _write(self, name: str, write: Callable[[Session], Call[None]]) -> None:
        try:
            await self._request(write)
        except NativeError as error:
            raise self._translate(error, name) from error

    async def _request(self, ask: Callable[[Session], Call[_T]]) -> _T:
        """Send a request, and again where that helps at once.

        Raises:
            NativeError: how the last attempt failed.
            AuthorisationError, TransientError: there is no session to be had.
        """
        renewed = False
        failures = 0
        async with self._places:
            while True:
                with trio.CancelScope() as attempt:
                    self._attempts.add(attempt)
                    session: Session | None = None
                    try:
                        session = await self._opened()
                        return await finished(ask(session))
                    except NativeError as error:
                        if error.status == 401 and not renewed and self._grant is not None:
                            renewed = True
                            if self._session is session:
                                self._session = None
                            continue
                        failures += 1
                        if failures > REPEATS_MAX or not _is_passing(error):
                            raise
                        pause_s = random.uniform(*REPEAT_S)
                        if error.status in THROTTLED:
                            pause_s = THROTTLED_S * 2**failures * random.uniform(0.5, 1.0)
                    finally:
                        self._attempts.discard(attempt)
                    await trio.sleep(pause_s)
                # Cancelled by `reconnect`, or to be repeated.

    async def _opened(self) -> Session:
        """The session, or the public reader in its place, opened if need be."""
        async with self._opening:
            if self._client is None:
                self._client = Client(
                    network="testnet" if self._network == "testnet" else "mainnet",
                    request_timeout_s=REQUEST_TIMEOUT_S,
                    read_timeout_s=READ_TIMEOUT_S,
                    idle_connections_max=REQUESTS_MAX,
                )
            if self._grant is None:
                # What cannot be done without a session is never asked of a template.
                return self._client.public(self._store.owner)  # type: ignore[return-value]
            if self._session is None:
                self._session = await self._restored(self._client, self._grant())
            return self._session

    async def _restored(self, client: Client, grant: str | None) -> Session:
        if grant is None:
            raise AuthorisationError(
                f"This machine is not logged in to {self._store}.",
                kept=_SAFE,
                next_step=self._log_in(),
            )
        try:
            session = await finished(client.restore(grant))
        except NativeError as error:
            if error.kind == "auth" or error.status in {401, 403, 404}:
                raise self._refused("does not accept this machine's grant any more") from error
            raise self._translate(error, "the session") from error
        if session.owner != self._store.owner:
            raise AuthorisationError(
                f"The grant on this machine is of another owner than {self._store}.",
                kept=_SAFE,
                next_step=self._log_in(),
            )
        return session

    def _log_in(self) -> str:
        return f"Run `hpkfs login {self._store}`."

    def _refused(self, how: str) -> AuthorisationError:
        return AuthorisationError(
            f"The homeserver {how}.",
            kept=_SAFE,
            next_step=f"{self._log_in()} If that does not help, look at this machine's clock.",
        )

    def _translate(self, error: NativeError, name: str, *, limit: int = 0) -> HpkfsError:
        """The error that a person gets; nothing of the homeserver's words is in it."""
        if error.status is not None:
            return self._answered(error.status, name)
        match error.kind:
            case "too-long":
                return IntegrityError(
                    f"{name} is longer than the {limit:,} bytes that it may have.",
                    kept="Nothing was changed.",
                    next_step="Run `hpkfs fsck` on the store.",
                )
            case "timeout":
                return self._unreached(f"The homeserver did not answer in time for {name}")
            case "resolve":
                return self._unreached(f"The homeserver of {self._store.owner} was not found")
            case "decode":
                return self._unreached(f"What answered for {name} is no homeserver")
            case "refresh" | "auth":
                return self._refused("could not renew this machine's session")
            case "scope" | "invalid":
                return AuthorisationError(
                    f"{name} is outside of what this machine's grant allows.",
                    kept="Nothing was asked of the homeserver.",
                    next_step=self._log_in(),
                )
            case _:
                return self._unreached(f"The homeserver could not be reached ({error})")

    def _answered(self, status: int, name: str) -> HpkfsError:
        match status:
            case 401:
                return self._refused("does not accept this machine's grant any more (401)")
            case 403:
                return self._refused(f"does not let this machine have {name} (403)")
            case 404:
                return MissingObjectError(
                    f"{name} is not in the store.",
                    kept="Nothing was changed.",
                    next_step="Run `hpkfs fsck` on the store.",
                )
            case 413 | 507:
                return QuotaError(
                    f"The homeserver has no space left for {name} ({status}).",
                    kept=f"It was not stored. {_SAFE}",
                    next_step="Free space there or have the quota raised, then run `hpkfs sync`.",
                )
            case 412 | 423:
                return self._unreached(f"Another writer holds {name} on the homeserver")
            case _:
                return self._unreached(f"The homeserver failed at {name} ({status})")

    def _unreached(self, happened: str) -> TransientError:
        return TransientError(f"{happened}.", kept=_SAFE, next_step=_AGAIN)


def _is_passing(error: NativeError) -> bool:
    """Whether the same request may succeed at once, or after a pause."""
    return error.kind in BROKEN or error.status in THROTTLED


def _is_snapshot(name: str) -> bool:
    try:
        check_name(f"snapshots/{name}")
    except UsageError:
        return False
    return True
