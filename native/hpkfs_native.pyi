"""The Pubky SDK for hpkfs: requests, sessions, locks, events. No policy, no retry, no format.

Everything that waits for the network is a `Call`: it runs on the module's own runtime (one for
the process, started by the first call, so a process may fork before that) and tells its end by a
callback. No Python thread waits for it. All of it may be used from any thread.

Paths are absolute paths of the owner's storage, `/priv/…` or `/pub/…`, not percent-encoded.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar, final

_T = TypeVar("_T")

Kind = Literal[
    "http",  # the homeserver answered with an error; `status` has it
    "timeout",  # no answer in time; a write may have been carried out
    "connection",  # not reached, or the connection broke; a write may have been carried out
    "resolve",  # the owner's homeserver could not be found
    "body",  # the answer broke off
    "decode",  # the answer is not what the protocol says
    "invalid",  # refused here: arguments that no homeserver would take
    "refresh",  # the session could not be renewed; `status` has the homeserver's answer, if any
    "auth",  # an approval, a grant or a session is not valid
    "too-long",  # the answer is longer than its limit; reading it was stopped
    "scope",  # refused here: outside the session's capabilities
    "cancelled",  # by `cancel`
    "closed",  # the stream was closed, or has ended
    "other",  # anything else; a write may have been carried out
]

__version__: str

class NativeError(Exception):
    """A call failed. Its text never holds a grant, a bearer or an authorisation URL."""

    kind: Kind
    status: int | None

@final
class Call(Generic[_T]):
    """One running request. Dropping the last reference does not cancel it."""

    def on_done(self, callback: Callable[[], object]) -> None:
        """Have a function called once when the call ends; at once if it has ended.

        It runs on a thread of the runtime and must return quickly, without waiting for anything.
        What it raises is reported as unraisable and otherwise ignored.
        """

    def cancel(self) -> None:
        """Abort the request; ends the call with `cancelled`, unless it has ended already."""

    @property
    def done(self) -> bool:
        """Whether the call has ended."""

    def result(self) -> _T:
        """What the call returned; raises `NativeError`, and `RuntimeError` while it runs."""

    def wait(self, timeout_s: float | None = None) -> _T:
        """Wait for the end, other Python threads running on; `TimeoutError` leaves it running."""

@final
class Client:
    """One pool of connections to homeservers and relays.

    Args:
        network: where public keys are looked up.
        request_timeout_s: bound of a whole request with its body; streams are not bound by it.
        read_timeout_s: bound of the silence before and between two reads of an answer; writes are
            bound by `request_timeout_s` alone, event streams by nothing.
        testnet_host: the host of a test network, the local one without it.
        idle_connections_max: connections that are kept for later, per homeserver.
    """

    def __init__(
        self,
        *,
        network: Literal["mainnet", "testnet"],
        request_timeout_s: float,
        read_timeout_s: float,
        testnet_host: str | None = None,
        idle_connections_max: int = 16,
    ) -> None: ...
    def start_login(
        self, capabilities: str, *, client_id: str, relay: str | None = None
    ) -> Call[Login]:
        """Begin to ask for a grant; `relay` is an HTTP relay's inbox, the SDK's own without it."""

    def restore(self, grant: str) -> Call[Session]:
        """A session of an exported grant. The session that the grant had elsewhere ends."""

    def public(self, owner: str) -> Reader:
        """What anyone may read of an owner; nothing is asked of the network yet."""

@final
class Login:
    """A request for a grant that waits for its approval. Dropping it ends it."""

    @property
    def url(self) -> str:
        """What the signer is given. Whoever has it can answer it, so it is shown, never kept."""

    def approval(self) -> Call[Session]:
        """The session, once it was approved; `auth` if it was refused. Has no time limit."""

class Reader:
    """Reads of one owner's storage."""

    @property
    def owner(self) -> str:
        """The public key, z-base-32, without a prefix."""

    def get(self, path: str, *, limit: int) -> Call[bytes]:
        """The whole object; `too-long` beyond `limit` bytes."""

    def open(self, path: str) -> Call[Download]:
        """Begin to read an object; bound by the read timeout only."""

    def stats(self, path: str) -> Call[Stats]:
        """What a HEAD request tells; `http` with 404 if there is no such object."""

    def list(
        self,
        folder: str,
        *,
        limit: int = 1000,
        cursor: str | None = None,
        reverse: bool = False,
        shallow: bool = False,
    ) -> Call[list[Entry]]:
        """One page of a folder's objects, with those of its subfolders, by name.

        Args:
            folder: with a final slash; a missing one is `http` with 404.
            limit: 1 to 1000.
            cursor: `Entry.cursor` of the last entry of the page before.
            reverse: last name first.
            shallow: subfolders as entries with a final slash.
        """

@final
class Session(Reader):
    """Reads and writes of one owner's storage within the grant's capabilities.

    A path outside them is refused here, with `scope`; nothing is sent.
    """

    @property
    def capabilities(self) -> list[str]:
        """What was approved, as `/path/:rw`."""

    def export_grant(self) -> str:
        """The grant as text, for `Client.restore`. Whoever has it can do what it allows."""

    def refresh(self) -> Call[None]:
        """Renew the session now; `refresh` if the grant is revoked or has expired."""

    def revalidate(self) -> Call[bool]:
        """Ask the homeserver whether it still knows the session."""

    def sign_out(self) -> Call[None]:
        """Revoke the grant; the session cannot be used afterwards."""

    def put(self, path: str, data: bytes) -> Call[None]:
        """Store an object; readers see the old one until it is stored as a whole."""

    def upload(self, path: str) -> Upload:
        """Begin to store an object piece by piece."""

    def delete(self, path: str) -> Call[None]:
        """Remove an object; `http` with 404 if there is none."""

    def lock(self, path: str, *, seconds: int = 30) -> Call[Lock]:
        """Lock one path against all other writers.

        `http` with 423 while someone else has it, with 405 if the homeserver has no locks.
        """

    def put_locked(self, lock: Lock, data: bytes) -> Call[None]:
        """Store at the locked path; `http` with 412 if the lock was lost, nothing being stored."""

    def delete_locked(self, lock: Lock) -> Call[None]:
        """Remove at the locked path; `http` with 412 if the lock was lost."""

    def refresh_lock(self, lock: Lock, *, seconds: int = 30) -> Call[None]:
        """Keep a lock for so long from now."""

    def unlock(self, lock: Lock) -> Call[None]:
        """Let go of a lock; `http` with 409 if it was lost."""

    def events(
        self,
        paths: Sequence[str],
        *,
        cursor: str | None = None,
        live: bool = True,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Call[Events]:
        """Changes below the paths.

        Args:
            paths: a file's path, or a folder's with a final slash.
            cursor: the last event seen; None replays the whole history.
            live: go on with changes as they happen; else end after the last one.
            limit: how many events at most.
            reverse: newest first; not with `live`.
        """

@final
class Lock:
    """A lock that was granted. It holds no connection; it runs out by itself."""

    @property
    def path(self) -> str: ...
    @property
    def seconds(self) -> int:
        """For how long it was granted."""

@final
class Stats:
    """What a HEAD request told.

    Attributes:
        size: bytes, if told.
        content_type: the type, if told.
        modified_at: seconds since 1970, if told.
        etag: base64 of the content's BLAKE3 digest on homeservers that have one, unquoted.
    """

    size: int | None
    content_type: str | None
    modified_at: int | None
    etag: str | None

@final
class Entry:
    """One line of a listing.

    Attributes:
        path: the path, percent-decoded.
        cursor: what `list` takes to go on behind it.
    """

    path: str
    cursor: str

@final
class Download:
    """An object being read."""

    @property
    def size(self) -> int | None:
        """Bytes, as the homeserver announced them; it may lie."""

    def read(self) -> Call[bytes]:
        """The next bytes, as they arrive; empty at the end."""

    def close(self) -> None:
        """Stop reading and let go of the connection."""

@final
class Upload:
    """An object being stored. Dropping it aborts it."""

    def write(self, data: bytes) -> Call[None]:
        """Send more; ends when there is room for the next piece."""

    def finish(self) -> Call[None]:
        """End the object; on return it is stored."""

    def abort(self) -> None:
        """Give up; what was there before stays."""

@final
class Events:
    """A stream of changes."""

    def next(self) -> Call[Event | None]:
        """The next change; None at the end of the stream."""

    def close(self) -> None:
        """Let go of the connection."""

@final
class Event:
    """One change.

    Attributes:
        type: what happened.
        path: the path.
        cursor: what `events` takes to go on behind it.
        content_hash: base64 of the new content's BLAKE3 digest, if told.
    """

    type: Literal["put", "delete"]
    path: str
    cursor: str
    content_hash: str | None
