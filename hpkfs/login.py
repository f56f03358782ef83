"""`hpkfs login` and `hpkfs logout`: the grant that this machine has for an agent on a homeserver.

The owner's signer app approves exactly one capability, the agent's own folder. What it answers is
checked before anything is kept: another owner, or another capability, is given back at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Final

import trio

from hpkfs import connection, grants, places, settings
from hpkfs.arguments import parse_seconds
from hpkfs.client import ControlClient, find_daemon, find_mount
from hpkfs.core.uris import PubkyAgent, PubkyTemplate
from hpkfs.errors import AuthorisationError, HpkfsError, TransientError, UsageError
from hpkfs.terminal import print_result, say, warn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from hpkfs_native import Login, NativeError, Session

CLIENT_ID: Final = "hermes.pubky.app"
REQUEST_TIMEOUT_S: Final = 60.0  # the relay answers a question for its message after 25 s

DAEMON_TIMEOUT_S: Final = 60.0
REVOKE_TIMEOUT_S: Final = 10.0
QR_BORDER: Final = 2
NOTHING_CHANGED: Final = "Nothing was changed."


def login(args: argparse.Namespace) -> int:
    """Ask for a grant, and keep it."""
    store, state_dir = _meant(args)
    connection.pubky(store, grant=None)  # says what is missing before anyone is asked
    relay = settings.relay(args.relay)
    grants.prepare(state_dir)
    old = grants.read(state_dir)
    request = _Request(store, relay, parse_seconds(args.timeout), as_json=args.json)
    grant = trio.run(request.run)
    grants.keep(state_dir, grant)
    places.note_store(state_dir, str(store))
    state = None
    record = find_daemon(state_dir)
    if record is not None:
        client = ControlClient(record.socket_path)
        state = client.request("login", timeout_s=DAEMON_TIMEOUT_S)["state"]
    if old is not None and old != grant:
        trio.run(_revoke_old, store, old)
    print_result(
        {
            "uri": str(store),
            "owner": store.owner,
            "fingerprint": grants.fingerprint(grant),
            "file": grants.path(state_dir),
            "state": state,
        },
        [
            f"This machine is logged in to {store} (grant {grants.fingerprint(grant)}).",
            f"The grant is in {grants.path(state_dir)}, for you alone.",
            *([f"The mount on {record.mountpoint} goes on with it: {state}."] if record else []),
        ],
        as_json=args.json,
    )
    return 0


def logout(args: argparse.Namespace) -> int:
    """Revoke the grant, and drop it here."""
    store, state_dir = _meant(args)
    record = find_daemon(state_dir)
    if record is not None:
        client = ControlClient(record.socket_path)
        result = client.request("logout", timeout_s=DAEMON_TIMEOUT_S)
    elif not os.path.isdir(state_dir):
        result = {"revoked": False, "fingerprint": grants.fingerprint(None)}
    else:
        with places.RunLock(state_dir):
            result = trio.run(_log_out, store, state_dir)
    named = result["fingerprint"]
    if result["revoked"]:
        line = f"The grant {named} was revoked; this machine is logged out of {store}."
    elif named == grants.fingerprint(None):
        line = f"This machine was not logged in to {store}."
    else:
        line = f"The grant {named} was not valid any more; it was dropped here."
    kept = "What is on this machine stays; `hpkfs login` lets it be sent again."
    told = {"uri": str(store), "revoked": result["revoked"], "fingerprint": named}
    print_result(told, [line, kept], as_json=args.json)
    return 0


def _meant(args: argparse.Namespace) -> tuple[PubkyAgent, str]:
    """The agent that is named by its address or by a mount of it, and its state directory."""
    record = None if places.has_scheme(args.uri) else find_mount(args.uri)
    store, at = places.resolve_uri(args.uri if record is None else record.uri)
    if isinstance(store, PubkyTemplate):
        raise UsageError(f"{store} is public; it is read without a login.", kept=NOTHING_CHANGED)
    if not isinstance(store, PubkyAgent):
        raise UsageError(f"{store} is a folder; it needs no login.", kept=NOTHING_CHANGED)
    if at is not None:
        raise UsageError("A login is for the agent as a whole.", next_step="Leave out the @ part.")
    named = args.state_dir or (None if record is None else record.state_dir)
    return store, places.state_dir(store, named)


async def _log_out(store: PubkyAgent, state_dir: str) -> dict[str, object]:
    transport = connection.open_store(store, state_dir=state_dir)
    try:
        return await connection.revoke(transport, state_dir)
    finally:
        await transport.aclose()


async def _revoke_old(store: PubkyAgent, grant: str) -> None:
    """Do not leave a grant behind that nobody has any more."""
    transport = connection.pubky(store, grant=lambda: grant)
    with trio.move_on_after(REVOKE_TIMEOUT_S), contextlib.suppress(HpkfsError):
        await transport.sign_out()
    await transport.aclose()


class _Request:
    """One request for a grant: shown, waited for, checked."""

    def __init__(
        self, store: PubkyAgent, relay: str | None, timeout_s: float, *, as_json: bool
    ) -> None:
        self._store = store
        self._relay = relay
        self._timeout_s = timeout_s
        self._tell: Callable[[str], None] = warn if as_json else say
        self._stream = sys.stderr if as_json else sys.stdout

    async def run(self) -> str:
        """Ask, and return the exported grant.

        Raises:
            AuthorisationError: it was refused, nobody answered, or it is not what was asked for.
            TransientError: the relay or the homeserver did not answer.
        """
        from hpkfs_native import Client, NativeError

        from hpkfs.transport.awaiting import finished

        client = Client(
            network="testnet" if places.network() == "testnet" else "mainnet",
            request_timeout_s=REQUEST_TIMEOUT_S,
            read_timeout_s=REQUEST_TIMEOUT_S,
        )
        try:
            asked = await finished(
                client.start_login(self._store.capability, client_id=CLIENT_ID, relay=self._relay)
            )
            session = await self._approved(asked)
        except NativeError as error:
            raise self._failed(error) from error
        problem = self._problem(session)
        if problem is not None:
            with contextlib.suppress(NativeError), trio.move_on_after(REVOKE_TIMEOUT_S):
                await finished(session.sign_out())
            raise AuthorisationError(
                f"{problem} It was given back.",
                kept=NOTHING_CHANGED,
                next_step="Run `hpkfs login` again, and approve what it asks for as it is.",
            )
        return session.export_grant()

    async def _approved(self, asked: Login) -> Session:
        from hpkfs_native import NativeError

        from hpkfs.transport.awaiting import finished

        self._show(asked.url)
        session: Session | None = None
        failure: NativeError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._count_down)
            with trio.move_on_after(self._timeout_s):
                try:
                    session = await finished(asked.approval())
                except NativeError as error:  # not in a group of the nursery's
                    failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if session is not None:
            return session
        raise AuthorisationError(
            f"Nobody approved the request within {_minutes(self._timeout_s)}.",
            kept=NOTHING_CHANGED,
            next_step="Run `hpkfs login` again; the old request cannot be approved any more.",
        )

    def _show(self, url: str) -> None:
        self._tell("Open this address with the app that has your Pubky key, and approve it:")
        self._tell("")
        self._tell(url)
        self._tell("")
        if self._stream.isatty():
            import segno

            segno.make(url, micro=False).terminal(self._stream, border=QR_BORDER, compact=True)
        self._tell(f"It asks for {self._store.capability} and nothing else.")

    async def _count_down(self) -> None:
        if not self._stream.isatty():
            self._tell(f"Waiting {_minutes(self._timeout_s)} for the approval.")
            self._stream.flush()
            return
        end = trio.current_time() + self._timeout_s
        try:
            while (left := end - trio.current_time()) > 0:
                self._stream.write(f"\rWaiting for the approval: {_minutes(left)} \x1b[K")
                self._stream.flush()
                await trio.sleep(1)
        finally:
            self._stream.write("\r\x1b[K")

    def _problem(self, session: Session) -> str | None:
        if session.owner != self._store.owner:
            return f"The request was approved by {session.owner}, who is not the agent's owner."
        if sorted(session.capabilities) != [self._store.capability]:
            given = ", ".join(session.capabilities) or "nothing"
            return f"The grant is for {given} instead of {self._store.capability}."
        return None

    def _failed(self, error: NativeError) -> HpkfsError:
        if error.kind == "auth":
            return AuthorisationError(
                "The request was refused, or its answer is not valid.",
                kept=NOTHING_CHANGED,
                next_step="Run `hpkfs login` again.",
            )
        if error.kind == "invalid":
            return UsageError(f"The request cannot be made: {error}.", kept=NOTHING_CHANGED)
        relay = self._relay or "the usual relay"
        return TransientError(
            f"The login did not come through ({error}).",
            kept=NOTHING_CHANGED,
            next_step=f"Are the network and {relay} there? Then run `hpkfs login` again.",
        )


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
