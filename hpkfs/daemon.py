"""What every mount of ours does: mount, serve, answer requests, and come down in order.

`mount.py` and `readonly.py` say what is mounted. The file system ends by `umount`, by a signal,
or by someone else's `fusermount3 -u`; what is dirty is sealed in each case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pyfuse3
import trio

from hpkfs import control, mountpoint, places, waiting
from hpkfs.errors import BusyError, HpkfsError, UsageError
from hpkfs.history import History, entry_name
from hpkfs.virtual import HistoryEntry
from hpkfs.volume import Caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.fuse import Filesystem
    from hpkfs.journal import Checkpoint
    from hpkfs.options import MountOptions

log = logging.getLogger(__name__)

BUSY_PATIENCE_S = 2.0
BUSY_POLL_S = 0.1
REPLY_GRACE_S = 0.05
FUSE_TASKS_MAX = 64
READ_AHEAD_KIB = 1_024
# How a seal that failed at the end is called, by its exit code.
STATES = {3: "conflict", 4: "auth-required", 5: "quota", 6: "corrupt"}


class Daemon:
    """What a read-write and a read-only mount share: the kernel side, signals, the way down."""

    read_only = False

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

    def owner(self) -> Caller | None:
        """Whom everything is shown to belong to, where the options say so."""
        uid, gid = self.options.uid, self.options.gid
        if uid is None and gid is None:
            return None
        return Caller(os.getuid() if uid is None else uid, os.getgid() if gid is None else gid)

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
                    ready({**self.record(), **self.first_state()})
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
        if self.read_only:
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
                    "state": STATES.get(error.exit_code, "dirty"),
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
            "read_only": self.read_only,
            "started_at": int(time.time()),
        }

    def first_state(self) -> dict[str, object]:
        """`state` and `detail` as a mount begins."""
        return {"state": "clean", "detail": ""}

    def socket_path(self) -> str:
        """The control socket."""
        raise NotImplementedError

    def _register(self) -> None:
        places.register(self.socket_path(), self.record())

    def _unregister(self) -> None:
        places.unregister(self.socket_path())


def history_entry(history: History, row: Checkpoint) -> HistoryEntry:
    """One checkpoint as `.hpkfs/history/` shows it."""

    async def load_row() -> Any:
        return await history.load(row)

    return HistoryEntry(entry_name(row), row.created_at, load_row)


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
