"""What a command does with an agent that has no running daemon.

Called by `hpkfs status`, `sync` and `history` when an address is named and nothing is mounted.
The state directory is opened under its lock for as long as the command runs. On a machine that
never had the agent `status` and `history` read the store alone and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from hpkfs import places
from hpkfs.agent import Agent, AgentOptions
from hpkfs.connection import open_beside, open_store
from hpkfs.core.documents import Reference, parse_head, parse_snapshot
from hpkfs.core.limits import MAX_HEAD, MAX_SNAPSHOT
from hpkfs.core.uris import FileStore
from hpkfs.errors import (
    AuthorisationError,
    HpkfsError,
    IntegrityError,
    MissingObjectError,
    SavedLocallyError,
    TransientError,
    UsageError,
)
from hpkfs.history import History, listed
from hpkfs.objects import ObjectStore
from hpkfs.options import CACHE_SIZE_BYTES_DEFAULT
from hpkfs.refresher import visible_files
from hpkfs.transport.base import HEAD_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hpkfs.core.documents import Head, Snapshot
    from hpkfs.core.uris import StoreUri
    from hpkfs.transport.base import Transport

RETRY_S: Final = 2.0
JOURNAL: Final = os.path.join(places.OUR_FOLDER, "journal.sqlite3")


def status(uri: str, state_dir: str | None) -> dict[str, object]:
    """Tell how an agent is, as `status --json` does; nothing is sealed, sent or installed.

    Args:
        uri: the store.
        state_dir: the state directory that the user named, or None for the usual one.

    Raises:
        BusyError: another process has the state directory; the message names it.
        UsageError: there is no agent in the store, and nothing of one here.
    """
    return trio.run(_status, _find(uri, state_dir))


def sync(uri: str, state_dir: str | None, *, wait: bool) -> dict[str, object]:
    """Seal what a daemon left unsealed, publish, and take over a newer checkpoint.

    Args:
        uri: the store.
        state_dir: the state directory that the user named, or None for the usual one.
        wait: try again until the store has everything.

    Raises:
        BusyError: another process has the state directory; the message names it.
        ConflictError: the store's head was made elsewhere; nothing was overwritten.
        TransientError: the store did not answer; the work is sealed on this machine.
        UsageError: there is no agent in the store.
    """
    return trio.run(_sync, _find(uri, state_dir), wait)


def history(uri: str, state_dir: str | None, *, limit: int | None) -> dict[str, object]:
    """List the checkpoints, newest first; what is sealed here and not yet sent comes first.

    Args:
        uri: the store.
        state_dir: the state directory that the user named, or None for the usual one.
        limit: how many at the most.

    Raises:
        BusyError: another process has the state directory; the message names it.
        UsageError: there is no agent in the store, and nothing of one here.
    """
    return trio.run(_history, _find(uri, state_dir), limit)


# -- opening -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """An agent's store, and where its state is on this machine, or would be."""

    store: StoreUri
    state_dir: str

    @property
    def uri(self) -> str:
        return str(self.store)

    @property
    def is_known_here(self) -> bool:
        return os.path.exists(os.path.join(self.state_dir, JOURNAL))

    @property
    def is_missing(self) -> bool:
        return isinstance(self.store, FileStore) and not os.path.isdir(self.store.path)


def _find(uri: str, state_dir: str | None) -> _Place:
    store, at = places.resolve_uri(uri)
    if at is not None:
        raise UsageError(
            f"The address names one checkpoint, {at}; this is about the agent as a whole.",
            next_step="Leave out the `@` and what follows it.",
        )
    return _Place(store, places.state_dir(store, state_dir))


@contextlib.asynccontextmanager
async def _opened(place: _Place) -> AsyncIterator[Agent]:
    """The agent, under the lock of its state directory."""
    with places.RunLock(place.state_dir):
        options = AgentOptions(
            uri=place.uri,
            state_dir=place.state_dir,
            device_id=places.device_id(place.state_dir),
        )
        agent = Agent(options, open_store(place.store, state_dir=place.state_dir))
        try:
            places.note_store(place.state_dir, place.uri)
            base = agent.installer.base()
            owner_id = agent.owner_id or (base[0].owner_id if base else None)
            if owner_id is not None:
                agent.set_owner(owner_id)
            yield agent
        finally:
            await agent.close()


@contextlib.asynccontextmanager
async def _store_alone(place: _Place) -> AsyncIterator[tuple[Transport, Head, Snapshot]]:
    """The store with its head and newest checkpoint, read without any folder of ours."""
    if place.is_missing:
        raise _no_agent(place.uri)
    transport = open_beside(place.store, state_dir=place.state_dir)
    try:
        head, snapshot = await _read_newest(transport, place.uri)
        yield transport, head, snapshot
    finally:
        await transport.aclose()


async def _read_newest(transport: Transport, uri: str) -> tuple[Head, Snapshot]:
    try:
        head = parse_head(await transport.get(HEAD_NAME, limit=MAX_HEAD))
    except MissingObjectError as error:
        raise _no_agent(uri) from error
    data = await transport.get(f"snapshots/{head.snapshot_id}.json", limit=MAX_SNAPSHOT)
    reference = Reference(head.snapshot_id, head.sha256)
    return head, parse_snapshot(data, owner_id=head.owner_id, kind=head.kind, reference=reference)


def _no_agent(uri: str) -> UsageError:
    return UsageError(
        f"There is no agent in {uri}.",
        kept="Nothing was changed.",
        next_step=f"Make one with `hpkfs init {uri}`, or bring its disk back.",
    )


# -- status --------------------------------------------------------------------------------


async def _status(place: _Place) -> dict[str, object]:
    if not place.is_known_here:
        async with _store_alone(place) as (_, _, snapshot):
            return _status_of_store(place, snapshot)
    async with _opened(place) as agent:
        head = None
        try:
            head = await _look_at_store(agent)
        except HpkfsError as error:
            if isinstance(error, IntegrityError) and agent.installer.base() is None:
                raise
            agent.note_error(error)
        told = agent.status()
        if (head, told["base"], told["state"]) == (None, None, "clean"):
            raise _no_agent(place.uri)  # of an `init` that was killed before it kept anything
        return {**told, "head": head or told["head"], "pid": None}


async def _look_at_store(agent: Agent) -> dict[str, object] | None:
    """The store's head as it is now; a conflict with what is pending is noted."""
    found = await agent.objects.get_head(agent.owner_id)
    base = agent.installer.base()
    if found is None:
        return None
    head = found[0]
    pending = agent.journal.checkpoints(state="pending")
    if pending and agent.publisher is not None:
        ours = {row.parent_id for row in pending} | {row.snapshot_id for row in pending}
        if head.snapshot_id not in ours:
            agent.note_error(agent.publisher.conflict(head.snapshot_id, pending[-1]))
    reference = Reference(head.snapshot_id, head.sha256)
    if base is not None and base[0].snapshot_id == head.snapshot_id:
        return _point(base[0])
    snapshot, _ = await agent.objects.get_snapshot(reference, owner_id=head.owner_id)
    return _point(snapshot)


def _point(snapshot: Snapshot) -> dict[str, object]:
    return {"snapshot_id": snapshot.snapshot_id, "created_at": snapshot.created_at}


def _status_of_store(place: _Place, snapshot: Snapshot) -> dict[str, object]:
    """The same fields for an agent that this machine never had."""
    records = [record for _, record in visible_files(snapshot).values()]
    return {
        "uri": place.uri,
        "mountpoint": None,
        "state_dir": place.state_dir,
        "pid": None,
        "read_only": False,
        "state": "clean",
        "detail": "Nothing of it is on this machine yet.",
        "exit_code": 0,
        "head": _point(snapshot),
        "base": None,
        "pending": {"checkpoints": 0, "objects": 0, "bytes": 0, "oldest": None},
        "dirty": [],
        "files": {"total": len(records), "hydrated": 0, "absent": len(records)},
        "bytes": {"total": sum(record.size for record in records), "hydrated": 0},
        "kept_local": [],
        "last_published": None,
        "last_error": None,
    }


# -- sync ----------------------------------------------------------------------------------


async def _sync(place: _Place, wait: bool) -> dict[str, object]:
    is_new = not place.is_known_here
    if is_new:
        async with _store_alone(place):
            pass  # nothing is left behind for an address that leads nowhere
    async with _opened(place) as agent:
        if is_new:
            await agent.prepare()
        while True:
            try:
                return await agent.sync()
            except SavedLocallyError:
                if not wait:
                    raise
                await trio.sleep(RETRY_S)


# -- history -------------------------------------------------------------------------------


async def _history(place: _Place, limit: int | None) -> dict[str, object]:
    if not place.is_known_here:
        async with _store_alone(place) as (transport, head, _):
            return await _history_of_store(transport, head, limit)
    async with _opened(place) as agent:
        newest = await _newest(agent)
        if newest is None:
            return {"checkpoints": [], "unread": 0}
        return listed(await agent.history.chain(newest, limit=limit))


async def _newest(agent: Agent) -> Reference | None:
    """Our newest checkpoint while it waits here, else the store's head if it can be had."""
    base = agent.journal.base_reference()
    if base is not None and agent.journal.checkpoints(state="pending"):
        return base
    try:
        found = await agent.objects.get_head(agent.owner_id)
    except (TransientError, AuthorisationError):
        if base is None:
            raise
        return base
    return base if found is None else Reference(found[0].snapshot_id, found[0].sha256)


async def _history_of_store(
    transport: Transport, head: Head, limit: int | None
) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="hpkfs-history-") as scratch:
        objects = ObjectStore(
            transport,
            cache_dir=scratch,
            pending_dir=os.path.join(scratch, "pending"),
            cache_bytes=CACHE_SIZE_BYTES_DEFAULT,
        )
        newest = Reference(head.snapshot_id, head.sha256)
        return listed(await History(objects, None).chain(newest, limit=limit))
