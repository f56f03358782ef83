"""A mount from beginning to end: build the parts, own the long-lived tasks, take it down.

`run_mount` blocks until the file system is unmounted, by whatever means, and what is dirty has
been sealed. It runs in the daemon process; commands reach it through the control socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pyfuse3
import trio

from hpkfs import control, mountpoint, places, waiting
from hpkfs.agent import Agent, AgentOptions
from hpkfs.core.documents import Reference
from hpkfs.core.ids import timestamp_ns
from hpkfs.errors import BusyError, HpkfsError, SavedLocallyError, UsageError
from hpkfs.fuse import Filesystem
from hpkfs.history import History, entry_name
from hpkfs.objects import ObjectStore
from hpkfs.refresher import load
from hpkfs.restore import restore
from hpkfs.transport.stores import make_transport
from hpkfs.virtual import HistoryEntry, VirtualTree
from hpkfs.volume import Caller, Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.core.uris import StoreUri
    from hpkfs.journal import Checkpoint
    from hpkfs.options import MountOptions
    from hpkfs.transport.base import Transport

log = logging.getLogger(__name__)

PUBLISH_BUDGET_S = 15.0
BUSY_PATIENCE_S = 2.0
BUSY_POLL_S = 0.1
REPLY_GRACE_S = 0.05
FUSE_TASKS_MAX = 64
READ_AHEAD_KIB = 1_024
HEAPS_MAX = 2
_M_ARENA_MAX = -8  # mallopt(3)


def run_mount(options: MountOptions, *, ready: Callable[[dict[str, object]], None]) -> int:
    """Mount and serve until unmounted.

    Args:
        options: what to mount, where and how; the mountpoint was made ready by
            `mountpoint.prepare`.
        ready: called once, when the mount answers.

    Returns:
        The exit code of how the state ended.

    Raises:
        HpkfsError: the mount could not be made; nothing was changed.
    """
    _share_heaps()
    return trio.run(_serve, options, ready)


async def _serve(options: MountOptions, ready: Callable[[dict[str, object]], None]) -> int:
    store, at = places.resolve_uri(options.uri, at=options.at)
    state_dir = places.state_dir(store, options.state_dir)
    daemon: Daemon
    if options.read_only or at is not None:
        daemon = await ReadOnlyDaemon.open(options, store, at, state_dir=state_dir)
    else:
        daemon = await ReadWriteDaemon.open(options, store, state_dir=state_dir)
    return await daemon.serve(ready)


class Daemon:
    """What a read-write and a read-only mount share: the kernel side, signals, the way down."""

    def __init__(self, options: MountOptions, *, uri: str, state_dir: str) -> None:
        self.options = options
        self.uri = uri
        self.state_dir = state_dir
        self.mountpoint = options.mountpoint
        self._finished = trio.Event()
        self._outcome: dict[str, object] = {"state": "clean", "exit_code": 0, "detail": ""}
        self._publish = True
        self._wait = False
        self._stopping = False
        self._hurried = False
        self._sending: trio.CancelScope | None = None
        self._fuse_scope = trio.CancelScope()

    # -- what the two kinds differ in -----------------------------------------------------

    def filesystem(self) -> Filesystem:
        """The handlers."""
        raise NotImplementedError

    async def background(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The long-lived tasks, until cancelled."""
        raise NotImplementedError

    async def finish(self) -> dict[str, object]:
        """Seal and publish what is left, once no write can come any more."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close every file."""
        raise NotImplementedError

    async def operate(self, op: str, args: dict[str, Any], progress: Any) -> dict[str, object]:
        """Answer a request that only this kind knows."""
        raise NotImplementedError

    # -- the life of a mount --------------------------------------------------------------

    async def serve(self, ready: Callable[[dict[str, object]], None]) -> int:
        """Mount, serve, take down."""
        try:
            self._mount()
            async with trio.open_nursery() as control_nursery:
                await control_nursery.start(control.serve, self, self.socket_path())
                self._register()
                async with trio.open_nursery() as nursery:
                    self._fuse_scope = nursery.cancel_scope
                    control_nursery.start_soon(self._signals, control_nursery)
                    nursery.start_soon(self._run_fuse)
                    await trio.to_thread.run_sync(_raise_read_ahead, self.mountpoint)
                    ready(self.record())
                    # Last, since looking for what is to be fetched takes a while.
                    await nursery.start(self.background)
                await self._end()
                control_nursery.cancel_scope.cancel()
        finally:
            self._unregister()
            await self.close()
        code = self._outcome["exit_code"]
        assert isinstance(code, int), "made by Agent.outcome"
        return code

    def _mount(self) -> None:
        fuse_options = set(pyfuse3.default_options)
        fuse_options |= {f"fsname={_escape(self.uri)}", "subtype=hpkfs"}
        fuse_options.discard("nonempty")
        if self.options.allow_other:
            fuse_options.add("allow_other")
        if isinstance(self, ReadOnlyDaemon):
            fuse_options.add("ro")
        filesystem = self.filesystem()
        waiting.install(filesystem.is_busy)
        try:
            pyfuse3.init(filesystem, self.mountpoint, fuse_options)
        except RuntimeError as error:
            raise UsageError(
                f"The kernel refused to mount on {self.mountpoint}.",
                kept="Nothing was changed.",
                next_step="`hpkfs doctor` says what is missing.",
            ) from error

    async def _run_fuse(self) -> None:
        """Serve the kernel until the file system is unmounted, by whatever means."""
        try:
            await pyfuse3.main(max_tasks=FUSE_TASKS_MAX)
        finally:
            self._fuse_scope.cancel()

    async def _end(self) -> None:
        """The kernel is gone, or was let go: seal, publish, answer who waits."""
        with trio.CancelScope(shield=True):
            try:
                self._outcome = await self.finish()
            except HpkfsError as error:
                log.error("%s", error)
                self._outcome = {
                    "state": "dirty",
                    "exit_code": error.exit_code,
                    "detail": str(error),
                    "pending": 0,
                }
            pyfuse3.close(unmount=False)
            self._finished.set()
            await trio.sleep(REPLY_GRACE_S)  # who asked for the unmount gets its answer

    async def _signals(self, nursery: trio.Nursery) -> None:
        """SIGTERM and SIGINT never lose anything; a second one only leaves the sending for later.

        What is still busy after a moment is sealed and published first, then detached.
        """
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for _number in signals:
                if not self._stopping:
                    self._stopping = True
                    nursery.start_soon(self._stop)
                    continue
                self._hurried = True
                if self._sending is not None:
                    self._sending.cancel()

    async def _stop(self) -> None:
        deadline = trio.current_time() + BUSY_PATIENCE_S
        while trio.current_time() < deadline:
            try:
                await trio.to_thread.run_sync(mountpoint.unmount, self.mountpoint)
            except BusyError:
                await trio.sleep(BUSY_POLL_S)
                continue
            except UsageError as error:  # someone else detached it, or nobody here may
                log.info("%s", error)
                break
            return
        else:
            log.warning("%s is still busy: saving first, then detaching it", self.mountpoint)
        try:
            await self.finish()
        except HpkfsError as error:
            log.error("%s", error)
        with contextlib.suppress(UsageError):  # as above; the process ends in any case
            await trio.to_thread.run_sync(mountpoint.detach, self.mountpoint)
        self._fuse_scope.cancel()

    # -- requests -------------------------------------------------------------------------

    async def handle(self, op: str, args: dict[str, Any], progress: Any) -> dict[str, object]:
        """Answer one request of the control socket."""
        if op == "umount":
            return await self._umount(args)
        return await self.operate(op, args, progress)

    async def _umount(self, args: dict[str, Any]) -> dict[str, object]:
        self._publish = bool(args.get("publish", True))
        self._wait = bool(args.get("wait", False))
        if args.get("force"):
            with contextlib.suppress(BusyError):
                await trio.to_thread.run_sync(mountpoint.unmount, self.mountpoint)
                await self._finished.wait()
                return self._outcome
            await self.finish()
            await trio.to_thread.run_sync(mountpoint.detach, self.mountpoint)
            self._fuse_scope.cancel()
        else:
            await trio.to_thread.run_sync(mountpoint.unmount, self.mountpoint)
        await self._finished.wait()
        return self._outcome

    # -- where others find us -------------------------------------------------------------

    def record(self) -> dict[str, object]:
        """What the registry file holds."""
        return {
            "uri": self.uri,
            "mountpoint": self.mountpoint,
            "state_dir": self.state_dir,
            "pid": os.getpid(),
            "read_only": isinstance(self, ReadOnlyDaemon),
            "started_at": int(time.time()),
        }

    def socket_path(self) -> str:
        """The control socket."""
        raise NotImplementedError

    def _register(self) -> None:
        places.register(self.socket_path(), self.record())

    def _unregister(self) -> None:
        places.unregister(self.socket_path())


class ReadWriteDaemon(Daemon):
    """The mount of an agent."""

    def __init__(self, options: MountOptions, agent: Agent, lock: Any) -> None:
        super().__init__(options, uri=agent.options.uri, state_dir=agent.options.state_dir)
        self.agent = agent
        self._lock = lock
        agent.invalidate = self.invalidate
        agent.who_holds = self.who_holds
        self.virtual = VirtualTree(
            objects=agent.objects,
            state_folder=agent.folder,
            uid=os.getuid(),
            gid=os.getgid(),
            started_ns=time.time_ns(),
            status=agent.status_bytes,
            history=self._history_entries,
            byte_state=agent.xattr,
            show_history=options.showhistory,
        )

    @classmethod
    async def open(
        cls, options: MountOptions, store: StoreUri, *, state_dir: str
    ) -> ReadWriteDaemon:
        """Open the state directory and make the tree ready."""
        uri = str(store)
        transport = make_transport(store)
        lock = places.RunLock(state_dir)
        lock.acquire()
        try:
            agent = Agent(
                AgentOptions(
                    uri=uri,
                    state_dir=state_dir,
                    device_id=places.device_id(state_dir),
                    mountpoint=options.mountpoint,
                    offline=options.offline,
                    lazy=options.lazy,
                    cache_bytes=options.cache_size_bytes,
                    seal_after_s=options.seal_after_s,
                ),
                transport,
            )
            await agent.prepare()
        except BaseException:
            lock.release()
            raise
        return cls(options, agent, lock)

    def filesystem(self) -> Filesystem:
        """The handlers over the volume."""
        owner = None
        if self.options.uid is not None or self.options.gid is not None:
            owner = Caller(
                os.getuid() if self.options.uid is None else self.options.uid,
                os.getgid() if self.options.gid is None else self.options.gid,
            )
        return Filesystem(
            self.agent.volume,
            self.virtual,
            xattr=self.options.xattr,
            owner=owner,
            umask=self.options.umask or 0,
            on_failure=self.agent.note_error,
        )

    async def background(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The agent's tasks."""
        await self.agent.run(task_status=task_status)

    async def finish(self) -> dict[str, object]:
        """Seal, then publish within the budget."""
        await self.agent.sync(pull=False, publish=False)
        if self._publish and not self._hurried:
            budget_s = math.inf if self._wait else PUBLISH_BUDGET_S
            try:
                with trio.move_on_after(budget_s) as self._sending:
                    await self.agent.sync(pull=False)
            except HpkfsError as error:
                log.info("%s", error)
        return self.agent.outcome()

    async def close(self) -> None:
        """Close the journal and let go of the state directory."""
        try:
            await self.agent.close()
        finally:
            self._lock.release()

    def socket_path(self) -> str:
        """The control socket of the state directory."""
        return places.socket_path(self.state_dir)

    async def invalidate(self, replaced: list[Replaced]) -> None:
        """Make the kernel forget names that mean something else now.

        In a worker thread and without a lock: the kernel may write dirty pages back through us
        before it returns.
        """
        if replaced:
            await trio.to_thread.run_sync(_invalidate, replaced)

    def who_holds(self, name: str) -> str:
        """Processes that hold a path of the mount open, for a sentence."""
        holders = mountpoint.holders(self.mountpoint)
        path = os.path.join(self.mountpoint, name)
        named = [f"{h.pid} ({h.command})" for h in holders if h.path.startswith(path)]
        return f" in process {', '.join(named)}" if named else ""

    async def _history_entries(self) -> list[HistoryEntry]:
        reference = self._newest()
        if reference is None:
            return []
        chain = await self.agent.history.chain(reference)
        return [_history_entry(self.agent.history, row) for row in chain.rows]

    def _newest(self) -> Reference | None:
        rows = {row.snapshot_id: row for row in self.agent.journal.checkpoints()}
        base = self.agent.journal.get_meta("base")
        row = rows.get(base or "")
        if row is None:
            return None
        return Reference(row.snapshot_id, row.sha256)  # type: ignore[arg-type]  # checked ids

    async def operate(self, op: str, args: dict[str, Any], progress: Any) -> dict[str, object]:
        """Requests on a read-write mount."""
        agent = self.agent
        match op:
            case "status":
                return self._status(args)
            case "sync":
                return await self._sync(wait=bool(args.get("wait")))
            case "history":
                return await self._history(args.get("limit"))
            case "log":
                since, limit = int(args.get("since") or 0), int(args.get("limit") or 1000)
                rows = agent.journal.read_log(since=since, limit=limit)
                return {"rows": rows, "last": agent.journal.last_log_id()}
            case "restore":
                return await self._restore(str(args["snapshot"]), list(args.get("paths") or []))
            case "fetch":
                return await agent.fetch(list(args.get("paths") or []), progress=progress)
            case "evict":
                return await agent.evict(list(args.get("paths") or []))
            case _:
                raise UsageError(f"This daemon does not know {op!r}.")

    def _status(self, args: dict[str, Any]) -> dict[str, object]:
        paths = args.get("paths")
        if paths:
            found = []
            for path in paths:
                try:
                    found.append(self.agent.path_status(path))
                except OSError as error:
                    raise UsageError(f"{path}: {os.strerror(error.errno or 0)}.") from error
            return {"paths": found}
        if args.get("what") == "metrics":
            return self.agent.metrics()
        if args.get("what") == "what-travels":
            return self.agent.what_travels()
        return {**self.agent.status(), "new_local": self.agent.tell_new_names()}

    async def _sync(self, *, wait: bool) -> dict[str, object]:
        while True:
            try:
                return await self.agent.sync()
            except SavedLocallyError:
                if not wait:
                    raise
                await trio.sleep(BUSY_PATIENCE_S)

    async def _history(self, limit: object) -> dict[str, object]:
        reference = self._newest()
        if reference is None:
            return {"checkpoints": [], "unread": 0}
        count = int(limit) if isinstance(limit, int) else None
        chain = await self.agent.history.chain(reference, limit=count)
        return {
            "checkpoints": [history_row(row) for row in chain.rows],
            "unread": 0 if chain.complete else None,
        }

    async def _restore(self, wanted: str, paths: list[str]) -> dict[str, object]:
        reference = self._newest()
        assert reference is not None, "a mounted agent has a base"
        before = timestamp_ns(wanted) if "T" in wanted else None
        row = await self.agent.history.find(reference, wanted, before_ns=before)
        result = await restore(self.agent, row, paths)
        with contextlib.suppress(SavedLocallyError):
            await self.agent.sync(pull=False)
        return {**result, **self.agent.outcome()}


class ReadOnlyDaemon(Daemon):
    """The mount of one checkpoint: no journal, nothing is ever written but the object cache."""

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
        transport = make_transport(store)
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
            reference = Reference(row.snapshot_id, row.sha256)  # type: ignore[arg-type]  # checked
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
        return Filesystem(None, self.virtual, xattr=self.options.xattr)

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
        return [_history_entry(self._history_of, row) for row in chain.rows]

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
            case "status":
                return self.status()
            case "sync":
                return {**await self.finish(), "sealed": None, "published": []}
            case "history":
                limit = args.get("limit")
                count = int(limit) if limit else None
                chain = await self._history_of.chain(self._reference, limit=count)
                return {
                    "checkpoints": [history_row(row) for row in chain.rows],
                    "unread": 0 if chain.complete else None,
                }
            case _:
                raise UsageError(
                    f"{self.mountpoint} is a read-only mount; {op} is not possible there.",
                    next_step="Mount the agent without --read-only and --at.",
                )


def history_row(row: Checkpoint) -> dict[str, object]:
    """One checkpoint as `history --json` shows it."""
    return {
        "snapshot_id": row.snapshot_id,
        "created_at": row.created_at,
        "device_id": row.device_id,
        "parent": row.parent_id,
        "files": row.files,
        "bytes": row.bytes,
        "state": row.state,
    }


def _history_entry(history: History, row: Checkpoint) -> HistoryEntry:
    async def load_row() -> Any:
        return await history.load(row)

    return HistoryEntry(entry_name(row), row.created_at, load_row)


def _invalidate(replaced: list[Replaced]) -> None:
    for one in replaced:
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_entry(pyfuse3.InodeT(one.parent), pyfuse3.FileNameT(one.name))
        if one.old_ino:
            with contextlib.suppress(OSError):
                pyfuse3.invalidate_inode(pyfuse3.InodeT(one.old_ino), attr_only=True)
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(pyfuse3.InodeT(one.parent), attr_only=True)


def _share_heaps() -> None:
    """Let the threads share heaps, so that a chunk which one has freed serves the next.

    Of its own accord glibc makes eight heaps per core, and each keeps what was freed in it: 30
    MiB after the hydration of a large agent.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, HEAPS_MAX)


def _raise_read_ahead(path: str) -> None:
    """Let the kernel read ahead further: a cold read is more than twice as fast. Needs root."""
    device = mountpoint.device_of(path)
    if device is None:
        return
    with (
        contextlib.suppress(OSError),
        open(f"/sys/class/bdi/{device}/read_ahead_kb", "w", encoding="ascii") as out,
    ):
        out.write(str(READ_AHEAD_KIB))


def _escape(text: str) -> str:
    """A comma or backslash in a mount option is escaped (fuse(8))."""
    return text.replace("\\", "\\\\").replace(",", "\\,")
