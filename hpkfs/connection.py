"""From an address to its store: which transport, with which grant, and who owns the session.

A grant has one live session: a second process that opens it signs the first one out. So the
daemon of an agent owns the session. Whoever else wants to read the same store asks that daemon
(`Borrowed`), and opens a session of its own only while there is none.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from hpkfs import grants, places
from hpkfs.client import ControlClient, NoDaemonError
from hpkfs.core.uris import FileStore, PubkyAgent, PubkyTemplate
from hpkfs.errors import AuthorisationError, UsageError
from hpkfs.transport.base import Capabilities
from hpkfs.transport.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from hpkfs.core.uris import StoreUri
    from hpkfs.transport.base import Transport
    from hpkfs.transport.pubky import PubkyTransport

SESSION_LOCK: Final = "session.lock"
ANSWER_TIMEOUT_S: Final = 360.0  # longer than the daemon's own wait for the homeserver
ASKED_AT_ONCE_MAX: Final = 8  # a daemon talks to 64 at a time
IDLE_S: Final = 1.0  # opening a session takes two round trips
LOCK_POLL_S: Final = 0.1
PIECE_BYTES: Final = 1 << 20
_T = TypeVar("_T")


def open_store(store: StoreUri, *, state_dir: str, create: bool = False) -> Transport:
    """The transport of a store, for the process that has the lock of the state directory.

    Args:
        store: the store.
        state_dir: where this machine's grant is.
        create: make the directory of a new store.

    Raises:
        UsageError: the program was installed without what a homeserver needs.
    """
    match store:
        case FileStore(path):
            return LocalTransport(path, create=create)
        case PubkyAgent():
            return pubky(store, grant=partial(grants.read, state_dir))
        case PubkyTemplate():
            return pubky(store, grant=None)


def open_beside(store: StoreUri, *, state_dir: str) -> Transport:
    """The transport of a store that is only read, beside the daemon that may own the session.

    Raises:
        UsageError: the program was installed without what a homeserver needs.
    """
    own = open_store(store, state_dir=state_dir)
    return Borrowed(own, state_dir) if isinstance(store, PubkyAgent) else own


def pubky(
    store: PubkyAgent | PubkyTemplate, *, grant: Callable[[], str | None] | None
) -> PubkyTransport:
    """The transport to a homeserver, which is imported only where it is needed.

    Raises:
        UsageError: the program was installed without it.
    """
    try:
        from hpkfs.transport.pubky import PubkyTransport
    except ModuleNotFoundError as error:
        if error.name != "hpkfs_native":
            raise
        raise UsageError(
            f"{store} is on a homeserver, and hpkfs was installed without what that needs.",
            kept="Nothing was changed.",
            next_step="Install it with `pip install hpkfs[pubky]`, or use a folder.",
        ) from error
    return PubkyTransport(store, network=places.network(), grant=grant)


async def revoke(transport: Transport, state_dir: str) -> dict[str, object]:
    """End this machine's grant at the homeserver, then drop it here.

    Returns:
        `revoked`: whether it was still valid; `fingerprint`: which it was.

    Raises:
        UsageError: the store needs no grant.
        TransientError: the homeserver did not answer; the grant is kept, so that it can be revoked.
    """
    from hpkfs.transport.pubky import PubkyTransport

    if not isinstance(transport, PubkyTransport):
        raise UsageError("This store needs no login.", kept="Nothing was changed.")
    grant = grants.read(state_dir)
    told: dict[str, object] = {"revoked": False, "fingerprint": grants.fingerprint(grant)}
    if grant is not None:
        with contextlib.suppress(AuthorisationError):  # it was not valid any more
            await transport.sign_out()
            told["revoked"] = True
        await trio.to_thread.run_sync(grants.forget, state_dir)
    return told


class Borrowed:
    """Reads a store through the daemon that has its session; directly while there is none.

    Args:
        own: the transport to use while no daemon runs.
        state_dir: the state directory that a daemon would serve.
    """

    def __init__(self, own: Transport, state_dir: str) -> None:
        self._own = own
        self._state_dir = state_dir
        self._places = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)
        self._session = _SessionLock(os.path.join(state_dir, places.OUR_FOLDER, SESSION_LOCK))
        self._using = self._uses = 0
        self._opening = trio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """It only reads."""
        return Capabilities(writable=False, locks=False, watch=False)

    async def get(self, name: str, *, limit: int) -> bytes:
        """See `Transport`."""
        pieces: list[bytes] = []

        def keep(told: dict[str, Any]) -> None:
            pieces.append(base64.b64decode(told["data"]))

        async def ask() -> bytes:
            pieces.clear()
            await self._ask("store-get", on_progress=keep, name=name, limit=limit)
            return b"".join(pieces)

        return await self._through(ask, partial(self._own.get, name, limit=limit))

    async def exists(self, name: str) -> bool:
        """See `Transport`."""

        async def ask() -> bool:
            return bool((await self._ask("store-exists", name=name))["exists"])

        return await self._through(ask, partial(self._own.exists, name))

    async def list_snapshots(self) -> list[str]:
        """See `Transport`."""

        async def ask() -> list[str]:
            return [str(name) for name in (await self._ask("store-list"))["snapshots"]]

        return await self._through(ask, self._own.list_snapshots)

    async def put(self, name: str, data: bytes) -> None:
        """Refused: only the owner of the session writes."""
        raise AssertionError(f"a reader puts {name}")

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """Refused: only the owner of the session writes."""
        raise AssertionError("a reader swaps the head")

    async def aclose(self) -> None:
        """See `Transport`."""
        await self._own.aclose()
        self._session.release()

    def reconnect(self) -> None:
        """See `Transport`."""
        self._own.reconnect()

    async def _ask(
        self,
        op: str,
        *,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        **args: object,
    ) -> dict[str, Any]:
        client = ControlClient(places.socket_path(self._state_dir))
        ask = partial(
            client.request, op, timeout_s=ANSWER_TIMEOUT_S, on_progress=on_progress, **args
        )
        return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)

    async def _through(
        self, ask: Callable[[], Awaitable[_T]], alone: Callable[[], Awaitable[_T]]
    ) -> _T:
        async with self._places:
            try:
                return await ask()
            except NoDaemonError:
                async with self._own_session():
                    return await alone()

    @contextlib.asynccontextmanager
    async def _own_session(self) -> AsyncIterator[None]:
        """Hold the session lock, and let go of it and of the session a moment after the last use.

        Two readers without a daemon would sign each other out.
        """
        async with self._opening:
            self._using += 1
            try:
                while not self._session.acquire():  # noqa: ASYNC110 - another process has it
                    await trio.sleep(LOCK_POLL_S)
            except BaseException:
                self._using -= 1
                raise
        try:
            yield
        finally:
            self._using -= 1
            self._uses += 1
            trio.lowlevel.spawn_system_task(self._let_go, self._uses)

    async def _let_go(self, uses: int) -> None:
        await trio.sleep(IDLE_S)
        if not self._using and uses == self._uses:
            await self.aclose()


class _SessionLock:
    """Who has the session while there is no daemon; a kill frees it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        if self._fd is not None or not os.path.isdir(os.path.dirname(os.path.dirname(self._path))):
            return True  # without a state directory there is no grant, either
        places.make_private(os.path.dirname(self._path))
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


async def lend(
    transport: Transport,
    op: str,
    args: dict[str, Any],
    progress: Callable[[dict[str, object]], Awaitable[None]],
) -> dict[str, object]:
    """Answer a `Borrowed` of another process; the daemon's side.

    Raises:
        HpkfsError: as the transport's method.
    """
    match op:
        case "store-get":
            data = await transport.get(str(args["name"]), limit=int(args["limit"]))
            for start in range(0, len(data), PIECE_BYTES):
                piece = base64.b64encode(data[start : start + PIECE_BYTES])
                await progress({"data": piece.decode("ascii")})
            return {}
        case "store-exists":
            return {"exists": await transport.exists(str(args["name"]))}
        case "store-list":
            return {"snapshots": await transport.list_snapshots()}
        case _:
            raise UsageError(f"This daemon does not know {op!r}.")
