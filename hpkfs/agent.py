"""One agent's state directory, opened: the parts, wired, and what commands ask of them.

`mount.py` puts a kernel mount in front of it; `init`, `sync` and `status` without a mount use it
as it is. It owns the long-lived tasks, and starts none before `run`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from hpkfs import recovery
from hpkfs.content import Content
from hpkfs.core.chunks import parse_object_name
from hpkfs.core.documents import Reference
from hpkfs.core.ids import sha256_hex
from hpkfs.core.known import is_known
from hpkfs.core.paths import to_local, to_logical
from hpkfs.durable import RealDisk
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
from hpkfs.history import History
from hpkfs.inodes import DIRTY, HYDRATED, ROOT_INO
from hpkfs.journal import Journal
from hpkfs.objects import ObjectStore
from hpkfs.options import CACHE_SIZE_BYTES_DEFAULT, EXIT_CODES, SEAL_AFTER_S_DEFAULT
from hpkfs.publisher import META_CONFLICT, META_HEAD, Publisher, store_is_empty
from hpkfs.refresher import META_ATTRIBUTES, META_PORTABLE, META_START, Installer, load
from hpkfs.reserve import Reserve
from hpkfs.sealer import META_KEPT_LOCAL, Sealer, SealResult
from hpkfs.survey import shown
from hpkfs.volume import Replaced, Volume

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hpkfs.core.documents import Head
    from hpkfs.durable import Disk
    from hpkfs.inodes import Inode
    from hpkfs.journal import Checkpoint
    from hpkfs.refresher import Loaded
    from hpkfs.survey import Survey
    from hpkfs.transport.base import Transport

log = logging.getLogger(__name__)

SEAL_AFTER_S_MAX = 300.0
MAINTENANCE_S = 1.0
RETRY_S_MIN = 2.0
RETRY_S_MAX = 60.0
CRITICAL_FILES = (
    "SOUL.md",
    "memories/USER.md",
    "memories/MEMORY.md",
    "skills/.bundled_manifest",
)
LOG_TRIM_S = 3_600.0
# Below this much free space, or this part of a small disk, clean chunks are evicted.
FREE_BYTES_MIN = 32 << 20
FREE_SHARE_MIN = 20
ROOM_AGAIN_S = 60.0
HYDRATE_FILES_AT_ONCE = 16
# A store that is slow to answer does not keep a mount waiting that has everything it needs.
START_BUDGET_S = 5.0
# The clock that stands still in a suspended machine fell this far behind the one that goes on.
SLEPT_S = 5.0
RANK_DOCUMENTS = 2
META_MOUNTPOINTS = "mountpoints"
MOUNTPOINTS_MAX = 8
META_TOLD = "told_names"
START_RECORDED_S = 60.0


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How an agent is opened. Sizes in bytes, times in seconds."""

    uri: str
    state_dir: str
    device_id: str
    mountpoint: str | None = None
    offline: bool = False
    lazy: bool = False
    cache_bytes: int = CACHE_SIZE_BYTES_DEFAULT
    seal_after_s: float = SEAL_AFTER_S_DEFAULT


class Agent:
    """The opened parts of one state directory."""

    def __init__(
        self, options: AgentOptions, transport: Transport, *, disk: Disk | None = None
    ) -> None:
        self.options = options
        self.transport = transport
        self.folder = os.path.join(options.state_dir, "hpkfs")
        for name in ("backing", "objects", "pending", "recovery"):
            os.makedirs(os.path.join(self.folder, name), mode=0o700, exist_ok=True)
        self.pending_folder = os.path.join(self.folder, "pending")
        disk = RealDisk() if disk is None else disk
        self.journal = Journal(os.path.join(self.folder, "journal.sqlite3"), disk=disk)
        self.objects = ObjectStore(
            transport,
            cache_dir=os.path.join(self.folder, "objects"),
            pending_dir=self.pending_folder,
            cache_bytes=options.cache_bytes,
        )
        self.content = Content(
            os.path.join(self.folder, "backing"),
            journal=self.journal,
            objects=self.objects,
            disk=disk,
        )
        self.unclean = recovery.recover(
            self.journal, self.content, pending_folder=self.pending_folder
        )
        reserve = Reserve(os.path.join(self.folder, "reserve"))
        self.volume = Volume(journal=self.journal, content=self.content, reserve=reserve)
        self.installer = Installer(self.volume, uid=os.getuid(), gid=os.getgid())
        self.installer.make_root()
        self.sealer = Sealer(
            self.volume,
            self.installer,
            self.objects,
            pending_folder=self.pending_folder,
            device_id=options.device_id,
            mountpoints=self._mountpoints(),
            disk=disk,
        )
        self.history = History(self.objects, self.journal)
        self.publisher: Publisher | None = None
        self.invalidate: Callable[[list[Replaced]], Awaitable[None]] = _nothing
        self.who_holds: Callable[[str], str] = lambda _name: ""
        self._last_error: HpkfsError | None = None
        self._offline = options.offline
        self._blocked: str | None = None
        self._wake = trio.Event()
        self._hydration = trio.Event()
        self._sync_lock = trio.Lock()
        self._trimmed = 0.0
        self._room_again = 0.0
        self._fetches_seen = 0
        self._asleep_s = math.inf
        if self.journal.has_unsealed():
            self.volume.changed_since = self.volume.changed_last = time.monotonic()

    # -- opening and closing --------------------------------------------------------------

    @property
    def owner_id(self) -> str | None:
        """The agent's id: that of the first head seen on this store."""
        return self.journal.get_meta("agent_id")

    def set_owner(self, agent_id: str) -> None:
        """Remember the agent's id."""
        if self.owner_id is None:
            self.journal.set_meta("agent_id", agent_id)
        self.journal.set_meta("uri", self.options.uri)
        self.publisher = Publisher(
            self.journal,
            self.objects,
            pending_folder=self.pending_folder,
            owner_id=agent_id,
            mend=self._bytes_of,
        )

    def _mountpoints(self) -> tuple[str, ...]:
        """Where the tree is mounted, and where it was: conversations name those paths, too."""
        known = self.journal.get_json(META_MOUNTPOINTS, [])
        current = self.options.mountpoint
        if current is not None and (not known or known[0] != current):
            known = [current, *(path for path in known if path != current)][:MOUNTPOINTS_MAX]
            self.journal.set_json(META_MOUNTPOINTS, known)
        return tuple(known)

    async def prepare(self) -> None:
        """Make the tree ready to be shown: the base installed, what Hermes reads first local.

        Raises:
            UsageError: there is no agent on the store, or the store did not answer and nothing is
                held locally.
            IntegrityError: the head or its snapshot cannot be trusted.
        """
        base = self.installer.base()
        if base is not None:
            self.set_owner(self.owner_id or base[0].owner_id)
        if not self.options.offline:
            try:
                await self._pull_at_start(must=base is None)
            except (TransientError, AuthorisationError, ConflictError) as error:
                if base is not None:
                    self.note_error(error)
                elif isinstance(error, TransientError):
                    raise _never_seen(error) from error
                else:
                    raise
        elif base is None:
            raise UsageError(
                "Nothing of this agent is on this machine yet.",
                next_step="Mount it once without --offline.",
            )
        if self.installer.base() is not None and await self.installer.read_config() is None:
            await self.installer.merge_config(self.installer.base_portable(), None)
        await self._hydrate_critical()

    async def _pull_at_start(self, *, must: bool) -> None:
        with trio.CancelScope() as scope:
            if not must:
                scope.deadline = trio.current_time() + START_BUDGET_S
            await self.pull()
        if scope.cancelled_caught:
            raise TransientError(
                f"The store did not answer within {START_BUDGET_S:.0f} s.",
                kept="Your work is safe on this machine.",
                next_step="It is asked again by itself; `hpkfs sync` takes over what is new.",
            )

    async def pull(self) -> bool:
        """Install the store's head where nothing local stands against it.

        Returns:
            Whether the tree changed.

        Raises:
            ConflictError: the head moved and there is local work; nothing is overwritten.
        """
        found = await self.objects.get_head(self.owner_id)
        base = self.installer.base()
        if found is None:
            if base is not None:
                raise store_is_empty()
            raise UsageError(
                f"There is no agent in {self.options.uri}.",
                next_step=f"Make one with `hpkfs init {self.options.uri}`.",
            )
        self._online()
        head = found[0]
        self.journal.set_meta(META_HEAD, head.snapshot_id)
        self.set_owner(head.owner_id)
        if base is not None and head.snapshot_id == base[0].snapshot_id:
            return False
        pending = self.journal.checkpoints(state="pending")
        if pending:
            self._check_ancestry(head.snapshot_id, pending)
            return False
        if base is not None:
            await self._check_lost_update(head)
        unsealed = self.volume.changed_since is not None or self.sealer.corrupt is not None
        if base is not None and unsealed:
            return False  # the seal that follows meets the head and names the conflict
        loaded = await load(
            self.objects, Reference(head.snapshot_id, head.sha256), owner_id=head.owner_id
        )
        with trio.CancelScope(shield=True):  # whoever gives up waiting gets all of it, or nothing
            before = self.installer.base_portable()
            replaced = self.installer.install(loaded)
            if await self.installer.merge_config(loaded.portable, before):
                replaced.append(Replaced(ROOT_INO, b"config.yaml", 0))
            for problem in loaded.problems:
                log.info("%s", problem)
            await self.invalidate(replaced)
        self._hydration.set()
        log.info("installed checkpoint %s", head.snapshot_id)
        return True

    async def _check_lost_update(self, head: Head) -> None:
        """What we published last must be among the head's ancestors, or it was overwritten.

        A store without locks lets that happen, and so does a writer that does not use them.
        """
        assert self.publisher is not None, "set with the owner"
        base = self.journal.base_reference()
        rows = self.journal.checkpoints(state="published")
        ours = next((r for r in rows if base and r.snapshot_id == base.snapshot_id), None)
        if ours is None or ours.device_id != self.options.device_id:
            return
        with contextlib.suppress(MissingObjectError):  # an ancestor was pruned: no one can tell
            if not await self.publisher.builds_on(head, ours):
                raise self.publisher.lost_update(head.snapshot_id, ours)

    async def install_pending(self, loaded: Loaded) -> None:
        """Make the tree a checkpoint that was just put into `pending/`."""
        before = self.installer.base_portable()
        replaced = self.installer.install(loaded, state="pending")
        if await self.installer.merge_config(loaded.portable, before):
            replaced.append(Replaced(ROOT_INO, b"config.yaml", 0))
        await trio.to_thread.run_sync(self.journal.sync)
        await self.invalidate(replaced)
        self._hydration.set()

    def _check_ancestry(self, head_id: str, pending: list[Checkpoint]) -> None:
        """A pending chain must start at the head, or contain it."""
        if head_id in {row.parent_id for row in pending} | {row.snapshot_id for row in pending}:
            return
        assert self.publisher is not None, "an agent with pending work has an owner"
        raise self.publisher.conflict(head_id, pending[-1])

    async def _hydrate_critical(self) -> None:
        """Fetch what Hermes reads first; what cannot be had in time comes when it is read."""
        if self._is_away() or self.options.offline:
            return

        async def hydrate(inode: Inode) -> None:
            try:
                await self.content.hydrate(inode)
            except HpkfsError as error:  # told when it is read; the other files can be had
                self.note_error(error)

        with trio.move_on_after(START_BUDGET_S):
            async with trio.open_nursery() as nursery:
                for path in CRITICAL_FILES:
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        nursery.start_soon(hydrate, self.volume.resolve(path))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The long-lived tasks: hydration, upkeep, seal, publish. Until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.content.run)
            nursery.start_soon(self._upkeep)
            nursery.start_soon(self._seal_and_publish)
            nursery.start_soon(self._hydrate_rest)
            nursery.start_soon(self._record_start)
            task_status.started()

    async def close(self) -> None:
        """Write what is only in memory, close every file. The journal is durable afterwards."""
        try:
            self.save_start()
            self.content.save_states()
            self.volume.bury()
            recovery.remove_dropped(self.journal, self.content)
        except (HpkfsError, OSError) as error:  # a full disk; all of this can be done again
            log.info("left for the next start: %s", error)
        self.content.close()
        recovery.close(self.journal)
        await self.transport.aclose()

    async def log_in(self) -> None:
        """This machine has a new grant: see whether it is good, and go on at once."""
        self.transport.reconnect()
        try:
            await self._probe()
        except HpkfsError as error:
            self.note_error(error)
        self._wake.set()

    def log_out(self) -> None:
        """This machine has no grant any more; work goes on here."""
        self.transport.reconnect()
        self.note_error(
            AuthorisationError(
                f"This machine was logged out of {self.options.uri}.",
                kept="Your work is safe on this machine.",
                next_step=f"Run `hpkfs login {self.options.uri}` to go on sending it.",
            )
        )

    # -- long-lived tasks -----------------------------------------------------------------

    def _look_for_sleep(self) -> None:
        """After a sleep of the machine connections are dead, and nobody has told us."""
        asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        asleep_s -= time.clock_gettime(time.CLOCK_MONOTONIC)
        slept_s = asleep_s - self._asleep_s
        self._asleep_s = asleep_s
        if slept_s > SLEPT_S:
            log.info("this machine slept for %d s; connections are made anew", slept_s)
            self.transport.reconnect()
            self._hydration.set()
            self._wake.set()

    async def _upkeep(self) -> None:
        self._look_for_sleep()
        while True:
            await trio.sleep(MAINTENANCE_S)
            self._look_for_sleep()
            try:
                await self._keep_space()
                await self.keep_bound()
                self.content.save_states()
                self.volume.bury()
                if self.journal.dropped():
                    await trio.to_thread.run_sync(self.journal.sync)
                    recovery.remove_dropped(self.journal, self.content)
                if self.journal.is_large():
                    await trio.to_thread.run_sync(self.journal.shrink)
                if time.monotonic() - self._trimmed > LOG_TRIM_S:
                    self._trimmed = time.monotonic()
                    self.journal.trim_log(time.time_ns())
            except (HpkfsError, OSError) as error:
                self.note_error(error if isinstance(error, HpkfsError) else _as_error(error))

    async def _keep_space(self) -> None:
        """Evict before the disk is full: operations without bytes of their own need some, too."""
        disk = os.statvfs(self.folder)
        low = min(FREE_BYTES_MIN, disk.f_blocks * disk.f_frsize // FREE_SHARE_MIN)
        free = disk.f_bavail * disk.f_frsize
        if free >= low:
            self.volume.keep_reserve()
        if free >= low or time.monotonic() < self._room_again:
            return
        if await self.volume.make_room(low - free) == 0:
            self._room_again = time.monotonic() + ROOM_AGAIN_S  # all that is left is dirty

    async def keep_bound(self) -> None:
        """Keep all clean bytes within `--cache-size`: objects go first, then documents."""
        if self.content.fetches == self._fetches_seen:
            return
        self._fetches_seen = self.content.fetches
        clean = [pair for pair in self._recorded_files() if self.content.evictable_bytes(pair[0])]
        held = sum(self.content.evictable_bytes(inode) for inode, _ in clean)
        bound = self.options.cache_bytes
        if held + self.objects.cached_bytes() <= bound:
            return
        await trio.to_thread.run_sync(self.objects.evict, max(bound - held, 0))
        waiting = self.publisher.waiting_objects() if self.publisher else set()
        for inode, _path in sorted(clean, key=lambda pair: -_rank(pair[1])):
            if held <= bound:
                return
            held -= await self.content.evict(
                [inode],
                keep=lambda one: self.volume.is_open(one.ino) or self._is_needed(one, waiting),
            )

    def _recorded_files(self) -> list[tuple[Inode, str]]:
        """Files whose bytes the store has, too, with their paths."""
        found = []
        for ino, _states in self.journal.with_states():
            inode = self.volume.inodes.get(ino)
            if inode is not None and inode.nlink:
                found.append((inode, self.volume.path_of(inode)))
        return found

    async def _record_start(self) -> None:
        """Note what is read in the first minute, for the next machine's start."""
        self.content.touched = {}
        await trio.sleep(START_RECORDED_S)
        self.save_start()

    def save_start(self) -> None:
        """Keep what was recorded, if anything was."""
        touched, self.content.touched = self.content.touched or {}, None
        profile: dict[str, list[int]] = {}
        for ino, ranges in touched.items():
            inode = self.volume.inodes.get(ino)
            logical = self._logical(inode) if inode is not None else None
            if logical is not None:
                profile[logical] = sorted(ranges)
        if profile:
            self.journal.set_json(META_START, profile)

    async def _hydrate_start(self) -> None:
        """Fetch what the last recorded start read, before everything else."""
        calls = []
        for logical, ranges in self.journal.get_json(META_START, {}).items():
            local = to_local(logical)
            try:
                inode = self.volume.resolve(local or "")
            except (FileNotFoundError, NotADirectoryError):
                continue
            if inode.is_file and inode.absent:
                calls += [partial(self.content.hydrate_range, inode, number) for number in ranges]

        async def fetch(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except (HpkfsError, OSError) as error:
                log.info("the start profile is fetched later: %s", error)

        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(fetch, call)

    async def _hydrate_rest(self) -> None:
        """Fetch what is absent, now and whenever a checkpoint or a returning store asks for it."""
        while True:
            self._hydration = trio.Event()
            await self._hydrate_start()
            await self._hydrate_all()
            await self._hydration.wait()

    async def _hydrate_all(self) -> None:
        """Fetch what is absent: small profile files, then the database, then documents."""
        # A database can be sealed only when it is whole, so it comes with --lazy, too.
        order = [
            inode
            for inode, path in self._absent_files()
            if not self.options.lazy or _rank(path) < RANK_DOCUMENTS
        ]
        limiter = trio.CapacityLimiter(HYDRATE_FILES_AT_ONCE)
        stopped = False

        async def fetch(inode: Inode) -> None:
            nonlocal stopped
            async with limiter:
                if stopped:
                    return
                try:
                    await self.content.hydrate(inode)
                except (HpkfsError, OSError) as error:
                    stopped = isinstance(error, TransientError | QuotaError)
                    log.info("background hydration of inode %d: %s", inode.ino, error)

        async with trio.open_nursery() as nursery:
            for inode in order:
                nursery.start_soon(fetch, inode)

    def _absent_files(self) -> list[tuple[Inode, str]]:
        """What background hydration fetches, in its order, as far as `--cache-size` goes."""
        files = sorted(self._recorded_files(), key=lambda pair: (_rank(pair[1]), pair[1]))
        room = self.options.cache_bytes
        room -= sum(self.content.evictable_bytes(inode) for inode, _ in files)
        found = []
        for inode, path in files:
            if inode.absent:
                room -= inode.size
                if room < 0:
                    break
                found.append((inode, path))
        return found

    async def _seal_and_publish(self) -> None:
        delay = 0.0
        while True:
            self._wake = trio.Event()
            with trio.move_on_after(delay or self._until_seal()):
                await self._wake.wait()
            away = self._is_away()
            if not (delay or away or self._has_pending() or self._until_seal() <= 0):
                continue
            try:
                await self.sync(pull=False)
                if away:
                    await self._probe()
                delay = 0.0
            except TransientError as error:
                self.note_error(error)
                delay = min(max(delay * 2, RETRY_S_MIN), RETRY_S_MAX)
                delay *= random.uniform(0.5, 1.0)
            except HpkfsError as error:
                self.note_error(error)
                delay = RETRY_S_MAX
            except OSError as error:
                self.note_error(_as_error(error))
                delay = RETRY_S_MAX

    def _is_away(self) -> bool:
        """Whether the store could not be asked the last time; work without the store is not."""
        is_away = self._offline or self._blocked == "auth-required"
        return is_away and not self.options.offline

    async def _probe(self) -> None:
        """Ask the store whether it is there again."""
        if await self.objects.get_head(self.owner_id) is None:
            raise store_is_empty()
        self._online()

    def _until_seal(self) -> float:
        """Seconds until what changed is to be sealed; a long time when nothing changed."""
        since = self.volume.changed_since
        if since is None:
            return MAINTENANCE_S * 5 if self._has_pending() else MAINTENANCE_S
        now = time.monotonic()
        quiet = self.volume.changed_last + self.options.seal_after_s - now
        longest = max(SEAL_AFTER_S_MAX, self.options.seal_after_s)
        return max(min(quiet, since + longest - now), 0.0)

    def _has_pending(self) -> bool:
        return bool(self.journal.checkpoints(state="pending"))

    # -- sync -----------------------------------------------------------------------------

    async def sync(self, *, pull: bool = True, publish: bool = True) -> dict[str, object]:
        """Seal, publish, and install a newer head where nothing is pending.

        Returns:
            `sealed`, `published`, `pulled` and the fields of `outcome`.
        """
        async with self._sync_lock:
            result = await self._seal()
            published: list[str] = []
            if publish and not self.options.offline and self.publisher is not None:
                try:
                    published = await self.publisher.publish()
                except HpkfsError as error:
                    self.note_error(error)
                    raise
                if published:
                    self._online()
            if self._blocked == "quota" and not self._has_pending():
                self._blocked = None  # the disk has space again: all of it is sealed and sent
            pulled = await self.pull() if pull and not self.options.offline else False
        outcome = self.outcome()
        return {
            "sealed": result.snapshot_id,
            "published": published,
            "pulled": pulled,
            **outcome,
        }

    async def _seal(self) -> SealResult:
        if self.volume.changed_since is None:
            return SealResult(None, self.sealer.waiting, self.sealer.corrupt)
        try:
            return await self.sealer.seal()
        except HpkfsError as error:
            self.note_error(error)
            raise
        except OSError as error:
            failure = _as_error(error)
            self.note_error(failure)
            raise failure from error

    def outcome(self) -> dict[str, object]:
        """How things stand: `state`, `exit_code`, `detail`, `pending`."""
        state, detail = self.state()
        pending = len(self.journal.checkpoints(state="pending"))
        return {
            "state": state,
            "exit_code": EXIT_CODES[state],
            "detail": detail,
            "pending": pending,
        }

    # -- status ---------------------------------------------------------------------------

    def note_error(self, error: HpkfsError) -> None:
        """Remember what went wrong for status."""
        self._last_error = error
        if isinstance(error, TransientError):
            self._offline = True
        elif isinstance(error, AuthorisationError):
            self._blocked = "auth-required"
        elif isinstance(error, QuotaError):
            self._blocked = "quota"

    def _online(self) -> None:
        if self._is_away():
            log.info("the store answers again")
            self._hydration.set()
        self._offline = self.options.offline
        self._blocked = None

    def state(self) -> tuple[str, str]:
        """The state and a sentence about it, by the order that `status` promises."""
        last = str(self._last_error) if self._last_error else ""
        if self.journal.get_meta(META_CONFLICT) is not None:
            return "conflict", last or "The store's head was made elsewhere."
        if self.sealer.corrupt is not None:
            return "corrupt", f"The conversation is NOT saved: {self.sealer.corrupt}"
        if self._blocked is not None:
            return self._blocked, last
        if self._has_pending():
            return "pending", last if self._offline else "Sealed here, not yet on the store."
        if self.volume.changed_since is not None or self.sealer.waiting:
            waiting = self.sealer.waiting
            text = f"{len(waiting)} files wait for missing chunks." if waiting else ""
            return "dirty", text or "Changed since the last checkpoint."
        if self._offline:
            return "offline", last or "Working offline."
        return "clean", ""

    def status(self) -> dict[str, object]:
        """What `status --json` shows."""
        state, detail = self.state()
        base = self.installer.base()
        survey = self.sealer.survey()
        assert self.publisher is not None or base is None, "set by prepare"
        waiting = self.publisher.waiting() if self.publisher else None
        head_id = self.journal.get_meta(META_HEAD)
        head = next((r for r in self.journal.checkpoints() if r.snapshot_id == head_id), None)
        shown = None if base is None else _point(base[0].snapshot_id, base[0].created_at)
        return {
            "uri": self.options.uri,
            "mountpoint": self.options.mountpoint,
            "state_dir": self.options.state_dir,
            "pid": os.getpid(),
            "read_only": False,
            "state": state,
            "detail": detail,
            "exit_code": EXIT_CODES[state],
            "head": _point(head_id, head.created_at if head else None) if head_id else None,
            "base": shown,
            "pending": {
                "checkpoints": waiting.checkpoints if waiting else 0,
                "objects": waiting.objects if waiting else 0,
                "bytes": waiting.bytes if waiting else 0,
                "oldest": waiting.oldest if waiting else None,
            },
            "dirty": self.sealer.dirty_paths() if self.volume.changed_since is not None else [],
            **_totals(survey),
            "kept_local": self._kept_local(survey),
            "last_published": self.journal.get_meta("last_published"),
            "last_error": str(self._last_error) if self._last_error else None,
        }

    def tell_new_names(self) -> list[str]:
        """Top-level names that nobody knows and that were not told before; each is told once."""
        told = set(self.journal.get_json(META_TOLD, []))
        names = {os.fsdecode(name) for name, _ in self.volume.list_folder(ROOT_INO)}
        new = sorted(name for name in names - told if not is_known(name))
        if new:
            self.journal.set_json(META_TOLD, sorted(told | set(new)))
        return [shown(name) for name in new]

    def _kept_local(self, survey: Survey) -> list[dict[str, str]]:
        """What stays: by the last seal, which read contents, and by the names that came since."""
        kept: dict[str, str] = dict(self.journal.get_json(META_KEPT_LOCAL, []))
        kept = {path: reason for path, reason in kept.items() if self._is_there(path)}
        kept |= {one.path: one.reason for one in survey.kept}
        return [{"path": path, "reason": kept[path]} for path in sorted(kept)]

    def _is_there(self, path: str) -> bool:
        try:
            self.volume.resolve(path)
        except OSError:
            return False
        return True

    def metrics(self) -> dict[str, object]:
        """Counters since the mount."""
        return {
            "operations": self.volume.operations,
            "open_files": len(self.volume.open_inos()),
            "changes": self.volume.change_count,
            "cache_bytes": self.objects.cached_bytes(),
        }

    def what_travels(self) -> dict[str, object]:
        """Every path that the next checkpoint holds, and what stays local among them."""
        survey = self.sealer.survey()
        kept = self._kept_local(survey)
        staying = {one["path"] for one in kept}
        files = [
            {"path": entry.path, "logical": logical, "size": entry.inode.size}
            for logical, entry in sorted(survey.files.items())
            if shown(entry.path) not in staying
        ]
        return {"files": files, "links": sorted(survey.links), "kept_local": kept}

    def path_status(self, path: str) -> dict[str, object]:
        """The byte states of one path."""
        inode = self._named(path)
        return {
            "path": path,
            "state": self.byte_state(inode),
            "size": inode.size,
            "sha256": inode.record.sha256 if inode.record and not inode.dirty else None,
            "logical": self._logical(inode),
            "chunks": {
                "total": len(inode.states),
                "absent": inode.absent,
                "dirty": inode.states.count(DIRTY),
            },
        }

    def _named(self, path: str) -> Inode:
        """What a person named; that it is not there is a usage error."""
        try:
            return self.volume.resolve(path)
        except OSError as error:
            raise UsageError(
                f"{shown(path)}: {os.strerror(error.errno or errno.ENOENT)}.",
                kept="Nothing was changed.",
                next_step="Name a path that is in the mount.",
            ) from error

    def _logical(self, inode: Inode) -> str | None:
        return to_logical(self.volume.path_of(inode)) if self.volume.matters(inode) else None

    def byte_state(self, inode: Inode) -> str:
        """One of absent, hydrated, dirty, sealed, published, local."""
        if not self.volume.matters(inode) or not inode.is_file:
            return "local"
        if inode.dirty:
            return "dirty"
        if inode.absent:
            return "absent"
        if self._has_pending() and inode.record is not None:
            waiting = self.publisher.waiting_objects() if self.publisher else set()
            if any(piece.object in waiting for piece in inode.record.pieces):
                return "sealed"
        return "published" if inode.record is None else "hydrated"

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        """`user.hpkfs.<name>` of an inode of the volume."""
        inode = self.volume.get(ino)
        if name == b"state":
            return self.byte_state(inode).encode()
        if name == b"sha256" and inode.record is not None and not inode.dirty:
            return inode.record.sha256.encode()
        if name == b"logical":
            logical = self._logical(inode)
            return None if logical is None else logical.encode()
        return None

    def status_bytes(self) -> bytes:
        """The bytes of `.hpkfs/status.json`."""
        return (json.dumps(self.status(), indent=2, sort_keys=True) + "\n").encode()

    # -- fetch and evict ------------------------------------------------------------------

    async def fetch(
        self, paths: list[str], *, progress: Callable[[dict[str, object]], Awaitable[None]]
    ) -> dict[str, object]:
        """Hydrate files and folders now; an empty list means everything."""
        chosen = [inode for inode in self._below(paths) if inode.absent]
        todo = sum(inode.size for inode in chosen)
        files = size = 0
        limiter = trio.CapacityLimiter(HYDRATE_FILES_AT_ONCE)
        failures: list[HpkfsError] = []

        async def hydrate(inode: Inode) -> None:
            nonlocal files, size
            async with limiter:
                if failures:
                    return
                try:
                    size += await self.content.hydrate(inode)
                except HpkfsError as error:
                    failures.append(error)
                    return
            files += 1
            await progress({"bytes": size, "total": todo, "files": files})

        async with trio.open_nursery() as nursery:
            for inode in chosen:
                nursery.start_soon(hydrate, inode)
        self.content.save_states()
        if failures:
            raise failures[0]
        return {"files": files, "bytes": size}

    async def evict(self, paths: list[str]) -> dict[str, object]:
        """Drop clean bytes from this disk; files that are open keep theirs."""
        chosen = [inode for inode in self._below(paths) if not inode.dirty]
        waiting = self.publisher.waiting_objects() if self.publisher else set()
        before = [inode.absent for inode in chosen]
        freed = await self.content.evict(
            chosen,
            keep=lambda one: self.volume.is_open(one.ino) or self._is_needed(one, waiting),
        )
        freed += await trio.to_thread.run_sync(self.objects.evict, 0) if not paths else 0
        files = sum(now.absent > was for now, was in zip(chosen, before, strict=True))
        return {"files": files, "bytes": freed}

    def _bytes_of(self, name: str) -> bytes | None:
        """The verified bytes of an object that the tree or the journal still holds."""
        digest, _ = parse_object_name(name)
        for key in (META_ATTRIBUTES, META_PORTABLE):
            data = (self.journal.get_meta(key) or "").encode()
            if sha256_hex(data) == digest:
                return data
        for ino, states in self.journal.with_states():
            inode = self.volume.inodes.get(ino)
            if inode is not None and inode.record is not None and HYDRATED in states:
                held = self.content.chunk_bytes(inode, name)
                if held is not None and sha256_hex(held) == digest:
                    return held
        return None

    def _is_needed(self, inode: Inode, waiting: set[str]) -> bool:
        """Whether bytes are not on the store yet: then two copies here are not too many."""
        return inode.record is not None and any(p.object in waiting for p in inode.record.pieces)

    def _below(self, paths: list[str]) -> list[Inode]:
        found: list[Inode] = []
        for path in paths or [""]:
            inode = self._named(path)
            if inode.is_folder:
                self._collect(inode.ino, found)
            elif inode.is_file:
                found.append(inode)
        return [self.volume.inodes.adopt(inode) for inode in found if inode.record_text is not None]

    def _collect(self, ino: int, found: list[Inode]) -> None:
        for _, inode in self.volume.walk_folder(ino):
            if inode.is_folder:
                self._collect(inode.ino, found)
            elif inode.is_file and inode.record_text is not None:
                found.append(inode)


def _never_seen(error: TransientError) -> UsageError:
    return UsageError(
        error.happened,
        kept="Nothing of this agent is on this machine yet, and nothing was changed.",
        next_step="Check the address, or bring the store back (is its disk mounted?); try again.",
    )


async def _nothing(_replaced: list[Replaced]) -> None:
    """No kernel mount: nothing to invalidate."""


def _totals(survey: Survey) -> dict[str, object]:
    files = hydrated = total = here = 0
    for entry in survey.files.values():
        inode = entry.inode
        files += 1
        total += inode.size
        missing = 0
        if inode.absent and inode.record is not None:
            missing = sum(
                piece.size
                for piece, state in zip(inode.record.pieces, inode.states, strict=True)
                if state not in (HYDRATED, DIRTY)
            )
        here += inode.size - missing
        hydrated += not missing
    return {
        "files": {"total": files, "hydrated": hydrated, "absent": files - hydrated},
        "bytes": {"total": total, "hydrated": here},
    }


def _point(snapshot_id: str, created_at: str | None) -> dict[str, str | None]:
    return {"snapshot_id": snapshot_id, "created_at": created_at}


def _rank(path: str) -> int:
    """The order of background hydration."""
    if path.startswith(("skills/", "memories/")) or ("/" not in path and path != "state.db"):
        return 0
    return 1 if path == "state.db" else RANK_DOCUMENTS


def _as_error(error: OSError) -> HpkfsError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return QuotaError(
            "The disk of the state directory is full.",
            kept="Everything written before is safe.",
            next_step="Free space on that disk, or run `hpkfs evict`.",
        )
    return IntegrityError(
        f"The state directory failed: {error}.",
        kept="What was written before is still there.",
        next_step="Check the disk that it is on, then run `hpkfs sync`.",
    )
