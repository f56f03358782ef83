"""An earlier checkpoint becomes the newest again, whole or by path, as a new checkpoint.

What is in the tree is sealed first, so a restore can be undone by another restore. Called by
`mount.py`. The objects are on the store already; that they are is checked before anything moves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from hpkfs.core import attributes as sidecar
from hpkfs.core.chunks import build_record
from hpkfs.core.documents import Reference, Snapshot, encode_snapshot, parse_snapshot
from hpkfs.core.ids import Digest, format_timestamp, make_id
from hpkfs.core.paths import DATABASE, PORTABLE, SIDECAR, to_logical
from hpkfs.errors import BusyError, MissingObjectError, UsageError
from hpkfs.refresher import DATABASE as DATABASE_NAME
from hpkfs.refresher import load_documents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpkfs.agent import Agent
    from hpkfs.core.documents import FileRecord
    from hpkfs.journal import Checkpoint
    from hpkfs.refresher import Loaded

log = logging.getLogger(__name__)

CHECKS_AT_ONCE_MAX = 16


async def restore(agent: Agent, row: Checkpoint, paths: list[str]) -> dict[str, object]:
    """Make a new checkpoint that holds what `row` held, for everything or for `paths`.

    Returns:
        `sealed`: the new id, None when nothing differs; `restored`, `removed`: files.

    Raises:
        BusyError: a process holds the conversation database open that would be replaced.
        MissingObjectError: the store lacks bytes of that checkpoint; nothing was changed.
    """
    await agent.sync(pull=False, publish=False)
    if agent.volume.changed_since is not None:
        raise UsageError(
            "What is in the mount cannot be sealed right now, so a restore could not be undone.",
            kept="Nothing was changed.",
            next_step="See `hpkfs status`, then try again.",
        )
    found = agent.installer.base()
    assert found is not None, "a mounted agent has a base"
    base, document = found
    old = await agent.history.load(row)
    files, attributes = _mix(base, agent.installer.base_attributes(), old, paths)
    if files.get(DATABASE) != base.files.get(DATABASE):
        _refuse_open_database(agent)
    await _check_objects(agent, files, base.files)
    staging = os.path.join(agent.pending_folder, ".new")
    snapshot = _compose(agent, base, document, old, whole=not paths)
    _store_sidecar(files, attributes, staging)
    if files == base.files:
        return {"sealed": None, "restored": 0, "removed": 0, "recovery": None}
    snapshot = replace(snapshot, files=files)
    encoded = encode_snapshot(snapshot)
    parse_snapshot(encoded)
    await trio.to_thread.run_sync(agent.sealer.keep, staging, snapshot.snapshot_id, encoded)
    await agent.install_pending(await load_documents(agent.objects, snapshot, encoded))
    changed = {path for path, record in files.items() if base.files.get(path) != record}
    removed = base.files.keys() - files.keys()
    log.info("restored checkpoint %s as %s", row.snapshot_id, snapshot.snapshot_id)
    return {
        "sealed": snapshot.snapshot_id,
        "restored": len(changed - {SIDECAR}),
        "removed": len(removed - {SIDECAR}),
        "recovery": None,
    }


def _mix(
    base: Snapshot, current: sidecar.Attributes, old: Loaded, paths: list[str]
) -> tuple[dict[str, FileRecord], sidecar.Attributes]:
    """The files and attributes of the new checkpoint."""
    if not paths:
        files = {path: record for path, record in old.snapshot.files.items() if path != SIDECAR}
        return files, old.attributes
    wanted = [_logical(path) for path in paths]

    def chosen(logical: str) -> bool:
        return any(logical == one or logical.startswith(one + "/") for one in wanted)

    files = {path: record for path, record in base.files.items() if not chosen(path)}
    files.pop(SIDECAR, None)
    picked = {path: record for path, record in old.snapshot.files.items() if chosen(path)}
    old_links = {path: target for path, target in old.attributes.links.items() if chosen(path)}
    if not picked and not old_links:
        raise UsageError(
            f"That checkpoint has nothing at {', '.join(paths)}.",
            kept="Nothing was changed.",
            next_step="Look below `.hpkfs/history/` in the mount.",
        )
    files.update(picked)
    entries = {p: e for p, e in current.files.items() if not chosen(p)}
    entries.update({p: e for p, e in old.attributes.files.items() if chosen(p)})
    links = {p: t for p, t in current.links.items() if not chosen(p)} | old_links
    folders = {p: f for p, f in current.folders.items() if not chosen(p)}
    folders.update({p: f for p, f in old.attributes.folders.items() if chosen(p)})
    return files, sidecar.Attributes(entries, links, folders)


def _logical(path: str) -> str:
    path = path.strip("/")
    logical = to_logical(path) or (to_logical(path + "/x") or "")[:-2]
    if not logical:
        raise UsageError(
            f"{path} does not travel, so no checkpoint holds it.",
            kept="Nothing was changed.",
        )
    return PORTABLE if logical == PORTABLE else logical


def _refuse_open_database(agent: Agent) -> None:
    for name in (DATABASE_NAME, DATABASE_NAME + "-wal", DATABASE_NAME + "-shm"):
        try:
            inode = agent.volume.resolve(name)
        except FileNotFoundError:
            continue
        if agent.volume.is_open(inode.ino):
            raise BusyError(
                "The conversation database is open" + agent.who_holds(name) + ".",
                kept="Nothing was changed.",
                next_step="End the agent on this mount, then restore again.",
            )


async def _check_objects(
    agent: Agent, files: Mapping[str, FileRecord], known: Mapping[str, FileRecord]
) -> None:
    """Every object that the base does not name must be on the store."""
    held = {piece.object for record in known.values() for piece in record.pieces}
    needed = {p.object for r in files.values() for p in r.pieces} - held
    limiter = trio.CapacityLimiter(CHECKS_AT_ONCE_MAX)
    missing: list[str] = []

    async def check(name: str) -> None:
        async with limiter:
            if not await agent.objects.has(name):
                missing.append(name)

    async with trio.open_nursery() as nursery:
        for name in sorted(needed):
            nursery.start_soon(check, name)
    if missing:
        raise MissingObjectError(
            f"The store lacks {len(missing)} objects of that checkpoint, {missing[0]} first.",
            kept="Nothing was changed.",
            next_step="Restore single paths that are still whole, or another checkpoint.",
        )


def _compose(
    agent: Agent, base: Snapshot, document: bytes, old: Loaded, *, whole: bool
) -> Snapshot:
    digest = Digest(hashlib.sha256(document).hexdigest())
    source = old.snapshot if whole else base
    return replace(
        source,
        snapshot_id=make_id(os.urandom(16)),  # type: ignore[arg-type]  # 32 hex digits
        parent=Reference(base.snapshot_id, digest),
        created_at=format_timestamp(int(time.time())),
        device_id=agent.options.device_id,
    )


def _store_sidecar(
    files: dict[str, FileRecord], attributes: sidecar.Attributes, staging: str
) -> None:
    objects = os.path.join(staging, "objects")
    os.makedirs(objects, mode=0o700, exist_ok=True)
    if not (attributes.files or attributes.links or attributes.folders):
        return
    data = sidecar.encode_attributes(attributes)
    record, pieces = build_record(SIDECAR, data, executable=False)
    files[SIDECAR] = record
    for name, piece in pieces.items():
        with open(os.path.join(staging, name), "wb") as out:
            out.write(piece)
