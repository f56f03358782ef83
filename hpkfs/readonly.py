"""A read-only mount: one checkpoint as a tree, at the head or earlier.

It opens no journal and takes no lock, so it may stand beside a read-write mount of the same agent.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import trio

from hpkfs import places
from hpkfs.connection import open_beside
from hpkfs.core.documents import Reference
from hpkfs.core.ids import timestamp_ns
from hpkfs.daemon import Daemon, history_entry
from hpkfs.errors import UsageError
from hpkfs.fuse import Filesystem
from hpkfs.history import History, listed
from hpkfs.objects import ObjectStore
from hpkfs.refresher import load
from hpkfs.virtual import HistoryEntry, VirtualTree

if TYPE_CHECKING:
    from hpkfs.core.uris import StoreUri
    from hpkfs.options import MountOptions
    from hpkfs.transport.base import Transport


class ReadOnlyDaemon(Daemon):
    """The mount of one checkpoint: no journal, nothing is ever written but the object cache."""

    read_only = True

    def __init__(  # the parts of a read-only mount
        self,
        options: MountOptions,
        *,
        uri: str,
        state_dir: str,
        transport: Transport,
        objects: ObjectStore,
        reference: Reference,
    ) -> None:
        super().__init__(options, uri=uri, state_dir=state_dir)
        self._transport = transport
        self._objects = objects
        self._reference = reference
        self._history_of = History(objects, None)
        self.virtual = VirtualTree(
            objects=objects,
            state_folder=state_dir,
            uid=os.getuid(),
            gid=os.getgid(),
            started_ns=time.time_ns(),
            status=lambda: (json.dumps(self.status(), indent=2) + "\n").encode(),
            history=self._history_entries,
            byte_state=lambda _ino, _name: None,
            show_history=options.showhistory,
        )

    @classmethod
    async def open(
        cls, options: MountOptions, store: StoreUri, at: str | None, *, state_dir: str
    ) -> ReadOnlyDaemon:
        """Load the checkpoint; nothing is mounted yet."""
        folder = os.path.join(state_dir, "hpkfs")
        os.makedirs(os.path.join(folder, "objects"), mode=0o700, exist_ok=True)
        os.makedirs(os.path.join(folder, "pending"), mode=0o700, exist_ok=True)
        transport = open_beside(store, state_dir=state_dir)
        objects = ObjectStore(
            transport,
            cache_dir=os.path.join(folder, "objects"),
            pending_dir=os.path.join(folder, "pending"),
            cache_bytes=options.cache_size_bytes,
        )
        found = await objects.get_head(None)
        if found is None:
            raise UsageError(
                f"There is no agent in {store}.",
                next_step=f"Make one with `hpkfs init {store}`.",
            )
        head = found[0]
        reference = Reference(head.snapshot_id, head.sha256)
        if at is not None:
            before = timestamp_ns(at) if "T" in at else None
            row = await History(objects, None).find(reference, at, before_ns=before)
            reference = row.reference
        loaded = await load(objects, reference, owner_id=head.owner_id)
        daemon = cls(
            options,
            uri=str(store),
            state_dir=state_dir,
            transport=transport,
            objects=objects,
            reference=reference,
        )
        daemon.virtual.show_checkpoint(loaded)
        daemon._created_at = loaded.snapshot.created_at
        return daemon

    _created_at = ""

    def filesystem(self) -> Filesystem:
        """The handlers over the checkpoint's tree."""
        return Filesystem(
            None,
            self.virtual,
            xattr=self.options.xattr,
            owner=self.owner(),
            umask=self.options.umask or 0,
        )

    async def background(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Nothing runs besides the mount."""
        task_status.started()
        await trio.sleep_forever()

    async def finish(self) -> dict[str, object]:
        """Nothing was written."""
        return {"state": "clean", "exit_code": 0, "detail": "", "pending": 0}

    async def close(self) -> None:
        """Close the store."""
        await self._transport.aclose()

    def socket_path(self) -> str:
        """A socket of its own: the state directory may have a read-write mount as well."""
        return places.socket_path(self.state_dir, mountpoint=self.mountpoint)

    async def _history_entries(self) -> list[HistoryEntry]:
        chain = await self._history_of.chain(self._reference)
        return [history_entry(self._history_of, row) for row in chain.rows]

    def status(self) -> dict[str, object]:
        """The same fields as a read-write mount has."""
        point = {"snapshot_id": self._reference.snapshot_id, "created_at": self._created_at}
        files, size = self.virtual.totals()
        return {
            **self.record(),
            "state": "clean",
            "exit_code": 0,
            "detail": "read-only",
            "head": point,
            "base": point,
            "pending": {"checkpoints": 0, "objects": 0, "bytes": 0, "oldest": None},
            "dirty": [],
            "files": {"total": files, "hydrated": 0, "absent": files},
            "bytes": {"total": size, "hydrated": 0},
            "kept_local": [],
            "last_published": None,
            "last_error": None,
        }

    async def operate(self, op: str, args: dict[str, Any], progress: Any) -> dict[str, object]:
        """Requests on a read-only mount."""
        match op:
            case "status" if args.get("paths") or args.get("what"):
                raise UsageError(
                    f"{self.mountpoint} is a read-only mount; it has no states of single paths.",
                    next_step="`hpkfs status` without paths and options describes it.",
                )
            case "status":
                return self.status()
            case "sync":
                return {**await self.finish(), "sealed": None, "published": [], "pulled": False}
            case "history":
                limit = args.get("limit")
                count = int(limit) if limit else None
                return listed(await self._history_of.chain(self._reference, limit=count))
            case _:
                raise UsageError(
                    f"{self.mountpoint} is a read-only mount; {op} is not possible there.",
                    next_step="Mount the agent without --read-only and --at.",
                )
