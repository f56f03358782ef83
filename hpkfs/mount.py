"""A mount from beginning to end: build the parts, own the long-lived tasks, take it down.

`run_mount` blocks until the file system is unmounted, by whatever means, and what is dirty has
been sealed. It runs in the daemon process; commands reach it through the control socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

import pyfuse3
import trio

from hpkfs import mountpoint, places
from hpkfs.agent import Agent, AgentOptions
from hpkfs.connection import lend, open_store, revoke
from hpkfs.core.ids import timestamp_ns
from hpkfs.daemon import Daemon, history_entry
from hpkfs.errors import HpkfsError, SavedLocallyError
from hpkfs.fuse import Filesystem
from hpkfs.history import listed
from hpkfs.readonly import ReadOnlyDaemon
from hpkfs.restore import restore
from hpkfs.virtual import HistoryEntry, VirtualTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.core.uris import StoreUri
    from hpkfs.options import MountOptions
    from hpkfs.volume import Replaced

log = logging.getLogger(__name__)

PUBLISH_BUDGET_S = 15.0
SYNC_AGAIN_S = 2.0
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
        transport = open_store(store, state_dir=state_dir)
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

    def first_state(self) -> dict[str, object]:
        """A store that is away, or a conflict, is told at every start."""
        state, detail = self.agent.state()
        return {"state": state, "detail": detail}

    def filesystem(self) -> Filesystem:
        """The handlers over the volume."""
        return Filesystem(
            self.agent.volume,
            self.virtual,
            xattr=self.options.xattr,
            owner=self.owner(),
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
        reference = self.agent.journal.base_reference()
        if reference is None:
            return []
        chain = await self.agent.history.chain(reference)
        return [history_entry(self.agent.history, row) for row in chain.rows]

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
            case "login":
                await agent.log_in()
                return agent.outcome()
            case "logout":
                return await self._log_out()
            case _:
                return await lend(agent.transport, op, args, progress)

    def _status(self, args: dict[str, Any]) -> dict[str, object]:
        paths = args.get("paths")
        if paths:
            return {"paths": [self.agent.path_status(path) for path in paths]}
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
                await trio.sleep(SYNC_AGAIN_S)

    async def _history(self, limit: object) -> dict[str, object]:
        reference = self.agent.journal.base_reference()
        if reference is None:
            return {"checkpoints": [], "unread": 0}
        count = int(limit) if isinstance(limit, int) else None
        return listed(await self.agent.history.chain(reference, limit=count))

    async def _log_out(self) -> dict[str, object]:
        """Work goes on here."""
        told = await revoke(self.agent.transport, self.state_dir)
        self.agent.log_out()
        return {**told, **self.agent.outcome()}

    async def _restore(self, wanted: str, paths: list[str]) -> dict[str, object]:
        reference = self.agent.journal.base_reference()
        assert reference is not None, "a mounted agent has a base"
        before = timestamp_ns(wanted) if "T" in wanted else None
        row = await self.agent.history.find(reference, wanted, before_ns=before)
        result = await restore(self.agent, row, paths)
        with contextlib.suppress(SavedLocallyError):
            await self.agent.sync(pull=False)
        return {**result, **self.agent.outcome()}


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
