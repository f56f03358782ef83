"""The contract of a store, run against every transport; then what only a directory can suffer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.faulty_disk import FaultyDisk

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
from hpkfs.transport import local
from hpkfs.transport.base import HEAD_NAME, Transport, check_name, check_put_name
from hpkfs.transport.local import LocalTransport
from hpkfs.transport.memory import TIMEOUT_S, MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from support.fault_proxy import FaultProxy
    from support.homeserver import Testnet

SNAPSHOT_ID = "0123456789abcdef0123456789abcdef"
SNAPSHOT = f"snapshots/{SNAPSHOT_ID}.json"
LIMIT = 1 << 20
NOBODY = 65_534


def object_of(data: bytes, extension: str = "bin") -> str:
    return f"objects/{hashlib.sha256(data).hexdigest()}.{extension}"


def names_in(error: HpkfsError) -> str:
    """The sentences of an error, after a check that there are three of them."""
    for sentence in (error.happened, error.kept, error.next_step):
        assert sentence.endswith("."), sentence
        assert not sentence[0].islower() or sentence.startswith(("objects/", "snapshots/", "head."))
    return str(error)


class Store(Protocol):
    """One store and what a test does to it behind its back."""

    transport: Transport

    def another(self) -> Transport:
        """A second writer's view of the same store."""

    def plant(self, name: str, data: bytes) -> None:
        """Put bytes there without the transport."""

    def bytes_of(self, name: str) -> bytes | None:
        """What lies there, read without the transport."""

    def vanish(self) -> None:
        """Make the store unreachable."""

    def come_back(self) -> None:
        """Undo `vanish`."""

    def refuse_writes(self) -> None:
        """Let this user read only."""

    def fill(self) -> None:
        """Leave no space."""


class MemoryStore:
    def __init__(self) -> None:
        self.memory = MemoryTransport()
        self.transport: Transport = self.memory

    def another(self) -> Transport:
        return MemoryTransport(self.memory.files)

    def plant(self, name: str, data: bytes) -> None:
        self.memory.files[name] = data

    def bytes_of(self, name: str) -> bytes | None:
        return self.memory.files.get(name)

    def vanish(self) -> None:
        self.memory.faults.refuse = True

    def come_back(self) -> None:
        self.memory.faults.refuse = False

    def refuse_writes(self) -> None:
        self.memory.faults.status = 403

    def fill(self) -> None:
        self.memory.faults.status = 507


class LocalStore:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.disk = FaultyDisk()
        self.local = LocalTransport(str(self.root), create=True, disk=self.disk)
        self.transport: Transport = self.local

    def another(self) -> Transport:
        return LocalTransport(str(self.root))

    def plant(self, name: str, data: bytes) -> None:
        (self.root / name).write_bytes(data)

    def bytes_of(self, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.exists() else None

    def vanish(self) -> None:
        self.root.rename(self.root.with_name("away"))

    def come_back(self) -> None:
        self.root.with_name("away").rename(self.root)

    def refuse_writes(self) -> None:
        self._fail(errno.EROFS)

    def fill(self) -> None:
        self._fail(errno.ENOSPC)

    def _fail(self, number: int) -> None:
        self.disk.errors = {"store.object.write": number, "store.head.write": number}


class PubkyStore:
    """An agent on the homeserver of the tests, reached through a proxy; `another` has a grant too.

    `refuse_writes` and `fill` are answers that the proxy gives for the homeserver: a real quota
    has megabytes, and a grant that only reads is refused before anything is sent.
    """

    def __init__(self, testnet: Testnet, proxy: FaultProxy) -> None:
        self._user = testnet.new_user()
        self._folder = testnet.owner_folder(self._user)
        self._proxy = proxy
        self.transport: Transport = self.another()

    def another(self) -> Transport:
        from hpkfs.core.uris import agent
        from hpkfs.transport.pubky import PubkyTransport

        grant = self._user.agent_grant()
        store = agent(self._user.owner, "default")
        return PubkyTransport(store, network="testnet", grant=lambda: grant)

    def plant(self, name: str, data: bytes) -> None:
        import hpkfs_native

        client = hpkfs_native.Client(network="testnet", request_timeout_s=20, read_timeout_s=10)
        session = client.restore(self._user.agent_grant()).wait()
        session.put(f"/priv/hermes.pubky.app/v2/agents/default/{name}", data).wait()

    def bytes_of(self, name: str) -> bytes | None:
        path = self._folder / "priv/hermes.pubky.app/v2/agents/default" / name
        return path.read_bytes() if path.is_file() else None

    def vanish(self) -> None:
        self._proxy.fault("refuse")

    def come_back(self) -> None:
        self._proxy.faults.clear()

    def refuse_writes(self) -> None:
        self._proxy.fault("status", method="PUT", status=403)

    def fill(self) -> None:
        self._proxy.fault("status", method="PUT", status=507)


@pytest.fixture(params=["memory", "local", pytest.param("pubky", marks=pytest.mark.pubky)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    match request.param:
        case "memory":
            yield MemoryStore()
        case "local":
            yield LocalStore(tmp_path)
        case _:
            testnet: Testnet = request.getfixturevalue("testnet")
            with testnet.proxy() as proxy:
                yield PubkyStore(testnet, proxy)


# -- get, exists, put, list ---------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096], ids=["none", "one", "1MiB"])
async def test_what_was_put_is_what_is_read(store: Store, data: bytes) -> None:
    name = object_of(data)
    assert not await store.transport.exists(name)
    await store.transport.put(name, data)
    assert await store.transport.exists(name)
    assert await store.transport.get(name, limit=len(data)) == data
    assert await store.another().get(name, limit=LIMIT) == data
    assert store.bytes_of(name) == data


async def test_putting_the_same_bytes_again_changes_nothing(store: Store) -> None:
    for _ in range(2):
        await store.transport.put(SNAPSHOT, b"document")
    assert store.bytes_of(SNAPSHOT) == b"document"
    assert await store.transport.list_snapshots() == [SNAPSHOT_ID]


async def test_a_name_that_is_not_there_is_missing(store: Store) -> None:
    for name in (HEAD_NAME, SNAPSHOT, object_of(b"never put")):
        with pytest.raises(MissingObjectError) as caught:
            await store.transport.get(name, limit=LIMIT)
        assert name in names_in(caught.value)
        assert not await store.transport.exists(name)


async def test_a_document_longer_than_its_limit_is_refused_and_one_of_that_length_is_not(
    store: Store,
) -> None:
    store.plant(HEAD_NAME, b"h" * 4097)
    assert len(await store.transport.get(HEAD_NAME, limit=4097)) == 4097
    with pytest.raises(IntegrityError) as caught:
        await store.transport.get(HEAD_NAME, limit=4096)
    assert not isinstance(caught.value, MissingObjectError)
    assert "4,096 bytes" in names_in(caught.value)


async def test_snapshots_are_listed_by_id_and_nothing_else_is(store: Store) -> None:
    assert await store.transport.list_snapshots() == []
    ids = sorted(f"{number:032x}" for number in (3, 1, 2**127))
    for snapshot_id in ids:
        await store.transport.put(f"snapshots/{snapshot_id}.json", b"{}")
    await store.transport.put(object_of(b"x"), b"x")
    assert await store.transport.list_snapshots() == ids


BAD_NAMES = [
    "",
    "head.json\n",
    "Head.json",
    "head.lock",
    "../head.json",
    "objects/../head.json",
    "objects/" + "a" * 64,
    "objects/" + "A" * 64 + ".bin",
    "objects/" + "a" * 63 + ".bin",
    "objects/" + "a" * 64 + ".exe",
    "objects/" + "a" * 64 + ".bin\n",
    "objects//" + "a" * 64 + ".bin",
    "/objects/" + "a" * 64 + ".bin",
    f"snapshots/{SNAPSHOT_ID}",
    f"snapshots/{SNAPSHOT_ID}.json.tmp",
    f"snapshots/{SNAPSHOT_ID}.json\0",
]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_a_name_of_no_store_is_refused_before_anything_is_asked(
    store: Store, name: str
) -> None:
    store.vanish()  # so that asking would be another error
    with pytest.raises(UsageError) as caught:
        await store.transport.get(name, limit=LIMIT)
    names_in(caught.value)
    with pytest.raises(UsageError):
        await store.transport.put(name, b"")
    with pytest.raises(UsageError):
        await store.transport.exists(name)


@given(st.text(alphabet="objects/headnap.json0123456789abcdef\n\0", max_size=90) | st.text())
def test_every_accepted_name_stays_in_its_folder(name: str) -> None:
    try:
        check_name(name)
    except UsageError:
        return
    assert name == HEAD_NAME or os.path.dirname(name) in {"objects", "snapshots"}
    assert os.path.normpath(name) == name


async def test_the_head_is_never_put(store: Store) -> None:
    with pytest.raises(UsageError):
        await store.transport.put(HEAD_NAME, b"head")
    assert store.bytes_of(HEAD_NAME) is None
    assert check_put_name(SNAPSHOT) == SNAPSHOT


# -- the head -----------------------------------------------------------------------------


async def test_the_head_moves_from_none_to_one_to_the_next(store: Store) -> None:
    await store.transport.swap_head(None, b"one")
    await store.transport.swap_head(b"one", b"two")
    assert await store.transport.get(HEAD_NAME, limit=LIMIT) == b"two"


@pytest.mark.parametrize("there", [None, b"theirs", b"our", b"oursandmore"])
async def test_a_head_that_is_not_the_expected_one_stays(store: Store, there: bytes | None) -> None:
    if there is not None:
        store.plant(HEAD_NAME, there)
    with pytest.raises(ConflictError) as caught:
        await store.transport.swap_head(b"ours", b"new")
    assert "safe on this machine" in names_in(caught.value)
    assert store.bytes_of(HEAD_NAME) == there


async def test_a_head_where_none_is_expected_stays(store: Store) -> None:
    store.plant(HEAD_NAME, b"theirs")
    with pytest.raises(ConflictError):
        await store.transport.swap_head(None, b"new")
    assert store.bytes_of(HEAD_NAME) == b"theirs"


async def test_a_head_can_be_swapped_for_itself(store: Store) -> None:
    store.plant(HEAD_NAME, b"found")
    await store.transport.swap_head(b"found", b"found")
    assert store.bytes_of(HEAD_NAME) == b"found"


async def test_of_many_writers_with_one_expectation_one_wins(store: Store) -> None:
    await store.transport.swap_head(None, b"base")
    outcomes: dict[bytes, bool] = {}

    async def write(transport: Transport, new: bytes) -> None:
        try:
            await transport.swap_head(b"base", new)
            outcomes[new] = True
        except ConflictError:
            outcomes[new] = False

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(write, store.another(), b"head %d" % number)
    winners = [new for new, won in outcomes.items() if won]
    assert len(outcomes) == 12
    assert [store.bytes_of(HEAD_NAME)] == winners


# -- bad days -----------------------------------------------------------------------------


REQUESTS: dict[str, Callable[[Transport], Awaitable[object]]] = {
    "get": lambda t: t.get(SNAPSHOT, limit=LIMIT),
    "exists": lambda t: t.exists(SNAPSHOT),
    "exists of a name that is not there": lambda t: t.exists(object_of(b"never put")),
    "get of a name that is not there": lambda t: t.get(object_of(b"never put"), limit=LIMIT),
    "put": lambda t: t.put(object_of(b"new"), b"new"),
    "list": lambda t: t.list_snapshots(),
    "swap": lambda t: t.swap_head(b"one", b"two"),
    "swap of no head": lambda t: t.swap_head(None, b"two"),
}


async def ask(request: str, transport: Transport) -> object:
    return await REQUESTS[request](transport)


async def fill_store(store: Store) -> None:
    await store.transport.put(SNAPSHOT, b"document")
    await store.transport.swap_head(None, b"one")


@pytest.mark.parametrize("request_name", REQUESTS)
async def test_a_store_that_vanished_is_waited_for_and_not_called_empty(
    store: Store, request_name: str
) -> None:
    await fill_store(store)
    store.vanish()
    with pytest.raises(TransientError) as caught:
        await ask(request_name, store.transport)
    assert "tried again by itself" in names_in(caught.value)
    store.come_back()
    assert store.bytes_of(HEAD_NAME) == b"one"
    assert await store.transport.get(SNAPSHOT, limit=LIMIT) == b"document"


@pytest.mark.parametrize("request_name", ["put", "swap"])
async def test_a_full_store_says_so_and_keeps_what_it_has(store: Store, request_name: str) -> None:
    await fill_store(store)
    store.fill()
    with pytest.raises(QuotaError) as caught:
        await ask(request_name, store.transport)
    assert "Free space there" in names_in(caught.value)
    assert store.bytes_of(HEAD_NAME) == b"one"
    assert store.bytes_of(object_of(b"new")) is None
    assert await store.transport.get(SNAPSHOT, limit=LIMIT) == b"document"


@pytest.mark.parametrize("request_name", ["put", "swap"])
async def test_a_store_that_refuses_writes_says_so_and_keeps_what_it_has(
    store: Store, request_name: str
) -> None:
    await fill_store(store)
    store.refuse_writes()
    with pytest.raises(AuthorisationError) as caught:
        await ask(request_name, store.transport)
    names_in(caught.value)
    assert store.bytes_of(HEAD_NAME) == b"one"
    assert store.bytes_of(object_of(b"new")) is None


@pytest.mark.parametrize("request_name", REQUESTS)
async def test_a_cancelled_request_ends_and_the_next_one_works(
    store: Store, request_name: str
) -> None:
    await fill_store(store)
    with trio.CancelScope() as scope:
        scope.cancel()
        await ask(request_name, store.transport)
    assert store.bytes_of(HEAD_NAME) in {b"one", b"two"}
    assert await store.transport.get(SNAPSHOT, limit=LIMIT) == b"document"


async def test_a_closed_store_was_let_go(store: Store) -> None:
    assert store.transport.capabilities.writable
    await store.transport.aclose()


# -- the switches of the store in memory --------------------------------------------------


async def test_a_hanging_store_is_given_up_after_the_timeout(
    autojump_clock: trio.abc.Clock,
) -> None:
    memory = MemoryTransport()
    memory.faults.hang = True
    started = autojump_clock.current_time()
    with pytest.raises(TransientError):
        await memory.get(HEAD_NAME, limit=LIMIT)
    assert autojump_clock.current_time() - started == pytest.approx(TIMEOUT_S)


async def test_a_slow_store_takes_its_time_and_answers(autojump_clock: trio.abc.Clock) -> None:
    memory = MemoryTransport({HEAD_NAME: b"head"})
    memory.faults.slow_s = 2.5
    started = autojump_clock.current_time()
    assert await memory.get(HEAD_NAME, limit=LIMIT) == b"head"
    assert autojump_clock.current_time() - started == pytest.approx(2.5)


async def test_a_store_that_is_cut_answers_so_many_requests_and_no_more() -> None:
    memory = MemoryTransport()
    memory.faults.cut_after = 2
    await memory.put(SNAPSHOT, b"document")
    assert await memory.exists(SNAPSHOT)
    for _ in range(2):
        with pytest.raises(TransientError):
            await memory.put(object_of(b"new"), b"new")
    memory.faults.refuse = False
    assert not await memory.exists(object_of(b"new"))
    assert list(memory.requests)[:2] == [f"put {SNAPSHOT}", f"exists {SNAPSHOT}"]


async def test_a_lost_answer_hides_a_write_that_was_carried_out() -> None:
    memory = MemoryTransport()
    memory.faults.lose_answers = 1
    with pytest.raises(TransientError):
        await memory.swap_head(None, b"one")
    assert await memory.get(HEAD_NAME, limit=LIMIT) == b"one"


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, AuthorisationError), (403, AuthorisationError), (500, TransientError)],
)
async def test_a_status_is_the_error_that_it_means(status: int, error: type[HpkfsError]) -> None:
    memory = MemoryTransport({HEAD_NAME: b"head"})
    memory.faults.status = status
    with pytest.raises(error) as caught:
        await memory.get(HEAD_NAME, limit=LIMIT)
    assert str(status) in names_in(caught.value)


# -- a directory --------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_new_store_is_a_directory_with_its_two_folders(tmp_path: Path) -> None:
    disk = FaultyDisk()
    LocalTransport(str(tmp_path / "deep" / "store"), create=True, disk=disk)
    assert sorted(os.listdir(tmp_path / "deep" / "store")) == ["objects", "snapshots"]
    assert disk.passed == ["store.folder.fsync"] * 3
    LocalTransport(str(tmp_path / "deep" / "store"), create=True, disk=disk)
    assert len(disk.passed) == 3


def test_a_store_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HpkfsError) as caught:
        LocalTransport(str(tmp_path / "file" / "store"), create=True)
    assert str(tmp_path) in names_in(caught.value)


async def test_a_store_of_bare_objects_gets_the_folder_that_is_missing(tmp_path: Path) -> None:
    transport = LocalTransport(str(tmp_path))
    await transport.put(SNAPSHOT, b"document")
    assert await transport.list_snapshots() == [SNAPSHOT_ID]
    assert not await transport.exists(object_of(b""))


async def test_an_empty_mount_point_is_not_an_empty_store(directory: LocalStore) -> None:
    await fill_store(directory)
    shutil.rmtree(directory.root)
    directory.root.mkdir()
    for request in REQUESTS:
        with pytest.raises(TransientError) as caught:
            await ask(request, directory.transport)
        assert "is empty, and was a store before" in names_in(caught.value)
    assert os.listdir(directory.root) == []


async def test_what_killed_writers_left_is_removed_when_it_is_a_day_old(
    directory: LocalStore,
) -> None:
    name = object_of(b"x")
    old = [f"{name}.0123abcd.tmp", "head.json.0123abcd.tmp", f"{SNAPSHOT}.0123abcd.tmp"]
    kept = [f"{name}.4567abcd.tmp", "notes.tmp", "objects/mine.0123abcd.tmp"]
    for unfinished in (*old, *kept):
        directory.plant(unfinished, b"half")
    for unfinished in (*old, *kept[1:]):
        os.utime(directory.root / unfinished, (1, 1))
    await directory.transport.swap_head(None, b"one")
    left = {str(p.relative_to(directory.root)) for p in directory.root.rglob("*") if p.is_file()}
    assert left == {HEAD_NAME, local.LOCK_NAME, *kept}


@pytest.mark.parametrize("length", [0, 3])
async def test_half_an_object_on_the_store_is_put_again(directory: LocalStore, length: int) -> None:
    name = object_of(b"whole object")
    directory.plant(name, b"whole object"[:length])
    await directory.transport.put(name, b"whole object")
    assert directory.bytes_of(name) == b"whole object"


async def test_an_object_that_is_there_is_made_durable_and_not_written_again(
    directory: LocalStore,
) -> None:
    name = object_of(b"there")
    directory.plant(name, b"there")
    before = (directory.root / name).stat().st_ino
    directory.disk.passed.clear()
    await directory.transport.put(name, b"there")
    assert (directory.root / name).stat().st_ino == before
    assert directory.disk.passed == ["store.known.fsync", "store.folder.fsync"]


async def test_the_head_moves_after_the_names_it_needs_are_durable(directory: LocalStore) -> None:
    directory.disk.passed.clear()
    await directory.transport.swap_head(None, b"one")
    steps = [f"store.head.{call}" for call in ("write", "fsync", "rename", "folder")]
    assert directory.disk.passed == ["store.folder.fsync"] * 2 + steps


@pytest.mark.parametrize("point", ["store.folder.fsync", "store.head.fsync", "store.head.rename"])
async def test_a_swap_that_fails_before_its_rename_leaves_the_old_head(
    directory: LocalStore, point: str
) -> None:
    await fill_store(directory)
    directory.disk.errors = {point: errno.EIO}
    with pytest.raises(TransientError) as caught:
        await directory.transport.swap_head(b"one", b"two")
    names_in(caught.value)
    assert directory.bytes_of(HEAD_NAME) == b"one"


async def test_a_swap_that_fails_after_its_rename_can_be_made_durable_later(
    directory: LocalStore,
) -> None:
    await fill_store(directory)
    directory.disk.errors = {"store.head.folder": errno.EIO}
    with pytest.raises(TransientError):
        await directory.transport.swap_head(b"one", b"two")
    assert directory.bytes_of(HEAD_NAME) == b"two"
    directory.disk.errors = {}
    directory.disk.passed.clear()
    await directory.transport.swap_head(b"two", b"two")
    assert directory.disk.passed[-1] == "store.head.folder"


@pytest.mark.parametrize(
    "make",
    [os.mkdir, os.mkfifo, lambda path: os.symlink(path, path)],
    ids=["folder", "fifo", "circular link"],
)
async def test_what_is_no_file_under_the_name_of_an_object_is_damage_and_holds_nobody(
    directory: LocalStore, make: Callable[[str], None]
) -> None:
    name = object_of(b"x")
    make(str(directory.root / name))
    with trio.fail_after(20):
        with pytest.raises(IntegrityError) as caught:
            await directory.transport.get(name, limit=1)
        assert "is not a file" in names_in(caught.value)
        with pytest.raises(IntegrityError):
            await directory.transport.exists(name)


async def test_an_object_may_be_a_link_to_a_file(directory: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x")
    os.symlink(tmp_path / "elsewhere", directory.root / object_of(b"x"))
    assert await directory.transport.get(object_of(b"x"), limit=1) == b"x"


@contextlib.contextmanager
def lock_held(root: Path) -> Iterator[None]:
    fd = os.open(root / local.LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


async def test_a_writer_who_holds_the_head_for_too_long_is_named(
    directory: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOCK_TIMEOUT_S", 0.0)
    with lock_held(directory.root), pytest.raises(TransientError) as caught:
        await directory.transport.swap_head(None, b"one")
    assert "Another writer" in names_in(caught.value)
    await directory.transport.swap_head(None, b"one")
    assert directory.bytes_of(HEAD_NAME) == b"one"


async def test_the_wait_for_the_lock_can_be_given_up(directory: LocalStore) -> None:
    with lock_held(directory.root), trio.move_on_after(0.05) as scope:
        await directory.transport.swap_head(None, b"one")
    assert scope.cancelled_caught
    assert directory.bytes_of(HEAD_NAME) is None


async def test_a_lock_file_that_was_removed_under_its_holder_locks_nobody_out(
    directory: LocalStore,
) -> None:
    with lock_held(directory.root):
        (directory.root / local.LOCK_NAME).unlink()
        await directory.transport.swap_head(None, b"one")
    assert directory.bytes_of(HEAD_NAME) == b"one"


async def test_a_lock_file_that_is_replaced_while_it_is_taken_is_taken_anew(
    directory: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory.root / local.LOCK_NAME
    locked: list[int] = []
    flock = fcntl.flock

    def replaced_first(fd: int, operation: int) -> None:
        if not locked:
            path.unlink()
            path.touch()
        flock(fd, operation)
        locked.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    await directory.transport.swap_head(None, b"one")
    assert len(locked) == 2
    assert locked[-1] == path.stat().st_ino


@dataclass(frozen=True, slots=True)
class Copy:
    program: str
    name: str


CONFLICT_COPIES = [
    Copy("Syncthing", "head.sync-conflict-20260102-030405-ABCDEFG.json"),
    Copy("Dropbox", "head (Ada's conflicted copy 2026-01-02).json"),
    Copy("Nextcloud", "head (conflicted copy 2026-01-02 030405).json"),
    Copy("Drive", "head (1).json"),
    Copy("OneDrive", "head-LAPTOP.json"),
    Copy("iCloud", "head 2.json"),
]


@pytest.mark.parametrize("copy", CONFLICT_COPIES, ids=lambda copy: copy.program)
async def test_the_conflict_copy_of_a_sync_program_is_found(
    directory: LocalStore, copy: Copy
) -> None:
    await fill_store(directory)
    for name in ("head.json.0123abcd.tmp", "header.json", "README.md"):
        (directory.root / name).write_bytes(b"")
    assert directory.local.conflict_copies() == []
    (directory.root / copy.name).write_bytes(b"theirs")
    assert directory.local.conflict_copies() == [copy.name]
    assert await directory.transport.get(HEAD_NAME, limit=LIMIT) == b"one"


def test_conflict_copies_of_a_store_that_vanished_are_not_none(directory: LocalStore) -> None:
    directory.vanish()
    with pytest.raises(TransientError):
        directory.local.conflict_copies()


@pytest.mark.parametrize(
    ("call", "request_name"),
    [("read", "get"), ("_exists", "exists"), ("write", "put"), ("_try_swap", "swap")],
)
async def test_a_disk_that_hangs_is_given_up_after_the_timeout(
    directory: LocalStore,
    autojump_clock: trio.abc.Clock,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    request_name: str,
) -> None:
    release = threading.Event()
    monkeypatch.setattr(directory.local, call, lambda *_: release.wait())
    started = autojump_clock.current_time()
    try:
        with pytest.raises(TransientError) as caught:
            await ask(request_name, directory.transport)
    finally:
        release.set()
    assert autojump_clock.current_time() - started == pytest.approx(local.DISK_TIMEOUT_S)
    assert "did not answer for 60 s" in names_in(caught.value)


async def test_a_swap_that_has_begun_ends_although_its_caller_was_cancelled(
    directory: LocalStore,
) -> None:
    with trio.CancelScope() as scope:
        directory.disk.before = {"store.head.write": scope_canceller(scope)}
        await directory.transport.swap_head(None, b"one")
        assert directory.bytes_of(HEAD_NAME) == b"one"
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert directory.bytes_of(HEAD_NAME) == b"one"


def scope_canceller(scope: trio.CancelScope) -> Callable[[], None]:
    return lambda: trio.from_thread.run_sync(scope.cancel)


# -- other users --------------------------------------------------------------------------


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's rights for a while; skip for an ordinary user, who cannot."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("request_name", REQUESTS)
async def test_a_store_of_another_user_refuses_and_is_not_called_missing(
    public_folder: Path, request_name: str
) -> None:
    store = LocalStore(public_folder)
    await fill_store(store)
    store.root.chmod(0o700)
    with as_nobody(), pytest.raises(AuthorisationError) as caught:
        await ask(request_name, store.another())
    assert "Permission denied" in names_in(caught.value)
    assert store.bytes_of(HEAD_NAME) == b"one"


async def test_two_users_of_a_shared_disk_take_turns(public_folder: Path) -> None:
    store = LocalStore(public_folder)
    await fill_store(store)
    for folder in (store.root, store.root / "objects", store.root / "snapshots"):
        folder.chmod(0o777)
    with as_nobody():
        theirs = store.another()
        await theirs.put(SNAPSHOT, b"document")
        await theirs.put(object_of(b"new"), b"new")
        await theirs.swap_head(b"one", b"two")
    await store.transport.swap_head(b"two", b"three")
    assert (store.root / HEAD_NAME).stat().st_uid == 0
    assert (store.root / object_of(b"new")).stat().st_uid == NOBODY


# -- real disks ---------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    """A mount for the time of a test; skip where this user may not mount."""
    done = subprocess.run(
        ("mount", *arguments, str(at)), capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(("umount", str(at)), timeout=20, check=True)


async def test_a_disk_that_is_really_full_is_a_quota_error_and_no_object_is_half(
    tmp_path: Path,
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=256k", "tmpfs", at=root):
        transport = LocalTransport(str(root), create=True)
        await transport.put(SNAPSHOT, b"document")
        await transport.swap_head(None, b"one")
        big = os.urandom(1 << 19)
        with pytest.raises(QuotaError) as caught:
            await transport.put(object_of(big), big)
        assert str(root) in names_in(caught.value)
        assert os.listdir(root / "objects") == []
        small = os.urandom(1000)
        await transport.put(object_of(small), small)
        assert await transport.get(HEAD_NAME, limit=LIMIT) == b"one"


async def test_a_disk_that_turns_read_only_is_readable_and_says_that_it_refuses(
    tmp_path: Path,
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=root):
        transport = LocalTransport(str(root), create=True)
        await transport.put(SNAPSHOT, b"document")
        await transport.swap_head(None, b"one")
        with trio.fail_after(20):
            await trio.run_process(("mount", "-o", "remount,ro", str(root)))
        with pytest.raises(AuthorisationError) as caught:
            await transport.put(object_of(b"new"), b"new")
        assert "Read-only file system" in names_in(caught.value)
        with pytest.raises(AuthorisationError):
            await transport.swap_head(b"one", b"two")
        await transport.put(SNAPSHOT, b"document")  # it is there already
        assert await transport.get(HEAD_NAME, limit=LIMIT) == b"one"


async def test_a_disk_that_is_taken_away_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with mounted("-t", "tmpfs", "tmpfs", at=root):
        transport = LocalTransport(str(root), create=True)
        await transport.swap_head(None, b"one")
    for request in REQUESTS:
        with pytest.raises(TransientError):
            await ask(request, transport)
    assert os.listdir(root) == []
