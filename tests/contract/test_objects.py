"""Verified objects and documents over every transport, with damage in each place that has bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from hpkfs.core.documents import (
    HERMES_RUNTIME,
    Head,
    Piece,
    Reference,
    Snapshot,
    encode_head,
    encode_snapshot,
)
from hpkfs.core.ids import SnapshotId, sha256_hex
from hpkfs.errors import (
    FormatError,
    HpkfsError,
    IntegrityError,
    MissingObjectError,
    QuotaError,
    TransientError,
)
from hpkfs.objects import HASH_INLINE_BYTES_MAX, ObjectStore
from hpkfs.transport.base import HEAD_NAME
from hpkfs.transport.local import LocalTransport
from hpkfs.transport.memory import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.transport.base import Transport

GENUINE = Path(__file__).resolve().parents[1] / "data" / "hermes-0.19" / "store"
BUDGET_BYTES = 1 << 20
SNAPSHOT_ID = SnapshotId("0123456789abcdef0123456789abcdef")
OTHER_ID = SnapshotId("fedcba9876543210fedcba9876543210")
CHECKPOINT = "00000000000000000000000000000001"
DATA = b"some bytes of a file"
LONG = bytes(range(256)) * (HASH_INLINE_BYTES_MAX // 256 + 1)


def piece_of(data: bytes, extension: str = "bin") -> Piece:
    return Piece(sha256_hex(data), len(data), extension)


def snapshot_of(owner_id: str = "demo", snapshot_id: SnapshotId = SNAPSHOT_ID) -> Snapshot:
    return Snapshot(
        kind="agent",
        owner_id=owner_id,
        name="",
        snapshot_id=snapshot_id,
        parent=None,
        created_at="2026-01-02T03:04:05Z",
        device_id=OTHER_ID,
        runtime=HERMES_RUNTIME,
        last_session_id=None,
        template=None,
        description="",
        files={},
    )


DOCUMENT = encode_snapshot(snapshot_of())
REFERENCE = Reference(SNAPSHOT_ID, sha256_hex(DOCUMENT))
DOCUMENT_NAME = f"snapshots/{SNAPSHOT_ID}.json"
HEAD = encode_head(Head("agent", "demo", SNAPSHOT_ID, REFERENCE.sha256))


class Bench:
    """An object store over one transport, and ways to look at and spoil each of its places."""

    def __init__(self, transport: Transport, folder: Path, *, budget: int = BUDGET_BYTES) -> None:
        self.transport = transport
        self.cache = folder / "cache"
        self.pending = folder / "pending"
        self.objects = ObjectStore(
            transport,
            cache_dir=str(self.cache),
            pending_dir=str(self.pending),
            cache_bytes=budget,
        )

    def plant(self, name: str, data: bytes) -> None:
        if isinstance(self.transport, MemoryTransport):
            self.transport.files[name] = data
        else:
            (self.root / name).write_bytes(data)

    def on_store(self, name: str) -> bytes | None:
        if isinstance(self.transport, MemoryTransport):
            return self.transport.files.get(name)
        path = self.root / name
        return path.read_bytes() if path.exists() else None

    @property
    def root(self) -> Path:
        assert isinstance(self.transport, LocalTransport)
        return Path(self.transport.root)

    def seal(self, data: bytes, content: bytes | None = None) -> None:
        """Put an object into a pending checkpoint, damaged if `content` differs."""
        path = self.pending / CHECKPOINT / piece_of(data).object
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if content is None else content)

    def cached(self) -> set[str]:
        return {str(p.relative_to(self.cache)) for p in self.cache.rglob("*") if p.is_file()}


@pytest.fixture(params=["memory", "local"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "memory":
        return Bench(MemoryTransport(), tmp_path)
    return Bench(LocalTransport(str(tmp_path / "store"), create=True), tmp_path)


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture
def remote(memory: MemoryTransport, tmp_path: Path) -> Bench:
    return Bench(memory, tmp_path)


def check_sentences(error: HpkfsError) -> None:
    assert all(part.endswith(".") for part in (error.happened, error.kept, error.next_step))


# -- get ----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"x", DATA, LONG], ids=["one", "short", "long"])
@pytest.mark.parametrize("keep", [True, False])
async def test_what_is_read_is_what_was_put(bench: Bench, data: bytes, keep: bool) -> None:
    piece = piece_of(data)
    await bench.objects.put(piece.object, data)
    assert await bench.objects.has(piece.object)
    for _ in range(2):
        assert await bench.objects.get(piece, keep=keep) == data


BAD_OBJECTS: dict[str, Callable[[bytes], bytes]] = {
    "one bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "shorter": lambda data: data[:-1],
    "empty": lambda _: b"",
    "longer": lambda data: data + b"x",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("data", [DATA, LONG], ids=["short", "long"])
@pytest.mark.parametrize("damage", BAD_OBJECTS)
async def test_a_damaged_object_on_the_store_is_never_shown(
    bench: Bench, damage: str, data: bytes
) -> None:
    piece = piece_of(data)
    bench.plant(piece.object, BAD_OBJECTS[damage](data))
    with pytest.raises(IntegrityError) as caught:
        await bench.objects.get(piece)
    assert not isinstance(caught.value, MissingObjectError)
    assert piece.object in caught.value.happened
    check_sentences(caught.value)
    bench.plant(piece.object, data)  # repaired, it is read
    assert await bench.objects.get(piece) == data


async def test_an_object_that_the_store_lacks_is_named(bench: Bench) -> None:
    piece = piece_of(b"never put")
    with pytest.raises(MissingObjectError) as caught:
        await bench.objects.get(piece)
    assert piece.object in caught.value.happened
    check_sentences(caught.value)
    assert not await bench.objects.has(piece.object)


async def test_a_document_that_lies_about_a_size_gets_nothing_and_disturbs_nobody(
    bench: Bench,
) -> None:
    right = piece_of(DATA)
    bench.plant(right.object, DATA)
    got: list[bytes] = []

    async def read_right() -> None:
        got.append(await bench.objects.get(right))

    async def read_wrong(size: int) -> None:
        with pytest.raises(IntegrityError):
            await bench.objects.get(Piece(right.sha256, size, "bin"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_wrong, len(DATA) - 1)
        nursery.start_soon(read_right)
        nursery.start_soon(read_wrong, len(DATA) + 1)
    assert got == [DATA]


async def test_a_sealed_object_is_read_before_it_is_published(bench: Bench) -> None:
    bench.seal(DATA)
    assert await bench.objects.get(piece_of(DATA)) == DATA
    assert not await bench.objects.has(piece_of(DATA).object)


async def test_a_damaged_sealed_object_is_not_shown_while_the_store_has_it(bench: Bench) -> None:
    bench.seal(DATA, b"other bytes")
    bench.plant(piece_of(DATA).object, DATA)
    assert await bench.objects.get(piece_of(DATA)) == DATA


async def test_a_damaged_sealed_object_that_is_the_only_copy_is_named_as_such(
    bench: Bench,
) -> None:
    bench.seal(DATA, b"other bytes")
    with pytest.raises(IntegrityError) as caught:
        await bench.objects.get(piece_of(DATA))
    assert "sealed copy" in caught.value.happened
    check_sentences(caught.value)


async def test_every_byte_of_a_genuine_store_is_read_and_verified(tmp_path: Path) -> None:
    bench = Bench(LocalTransport(str(GENUINE)), tmp_path)
    found = await bench.objects.get_head(None)
    assert found is not None
    head = found[0]
    reference: Reference | None = Reference(head.snapshot_id, head.sha256)
    read: set[str] = set()
    while reference is not None:
        snapshot, _ = await bench.objects.get_snapshot(reference, owner_id=head.owner_id)
        for record in snapshot.files.values():
            data = b"".join([await bench.objects.get(piece) for piece in record.pieces])
            assert sha256_hex(data) == record.sha256
            read.update(piece.object for piece in record.pieces)
        reference = snapshot.parent
    assert {os.path.basename(name) for name in read} == set(os.listdir(GENUINE / "objects"))


async def test_a_directory_costs_a_reader_one_thread_and_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(LocalTransport(str(tmp_path / "store"), create=True), tmp_path)
    bench.plant(piece_of(LONG).object, LONG)
    hops = count_hops(monkeypatch)
    assert await bench.objects.get(piece_of(LONG)) == LONG
    assert len(hops) == 1
    assert bench.cached() == set()


def count_hops(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    hops: list[object] = []
    run_sync = trio.to_thread.run_sync

    def counting(call: Callable[..., object], *args: object, **options: object) -> object:
        hops.append(call)
        return run_sync(call, *args, **options)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(trio.to_thread, "run_sync", counting)
    return hops


# -- sharing ------------------------------------------------------------------------------


async def test_readers_of_one_object_share_one_fetch(
    remote: Bench, memory: MemoryTransport, autojump_clock: trio.abc.Clock
) -> None:
    del autojump_clock
    piece = piece_of(DATA)
    memory.files[piece.object] = DATA
    memory.faults.slow_s = 1.0
    got: list[bytes] = []

    async def read() -> None:
        got.append(await remote.objects.get(piece, keep=False))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(read)
    assert got == [DATA] * 10
    assert list(memory.requests) == [f"get {piece.object}"]


async def test_readers_of_one_object_share_its_failure(
    remote: Bench, memory: MemoryTransport, autojump_clock: trio.abc.Clock
) -> None:
    memory.faults.hang = True
    errors: list[TransientError] = []

    async def read() -> None:
        with pytest.raises(TransientError) as caught:
            await remote.objects.get(piece_of(DATA))
        errors.append(caught.value)

    started = autojump_clock.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(read)
    assert autojump_clock.current_time() - started == pytest.approx(60)
    assert len({id(error) for error in errors}) == 5
    assert {str(error) for error in errors} == {str(errors[0])}
    memory.faults.hang = False
    memory.files[piece_of(DATA).object] = DATA
    assert await remote.objects.get(piece_of(DATA)) == DATA


async def test_another_reader_takes_over_when_the_one_who_fetches_is_cancelled(
    remote: Bench, memory: MemoryTransport, autojump_clock: trio.abc.Clock
) -> None:
    del autojump_clock
    memory.files[piece_of(DATA).object] = DATA
    memory.faults.slow_s = 10.0
    got: list[bytes] = []

    async def read() -> None:
        got.append(await remote.objects.get(piece_of(DATA)))

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(5):
            async with trio.open_nursery() as impatient:
                impatient.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(read)
                nursery.start_soon(read)
    assert got == [DATA, DATA]
    assert len(memory.requests) == 2


# -- put ----------------------------------------------------------------------------------


async def test_an_object_that_the_store_has_is_not_sent_again(
    remote: Bench, memory: MemoryTransport
) -> None:
    name = piece_of(DATA).object
    for _ in range(2):
        await remote.objects.put(name, DATA)
    assert [line.split()[0] for line in memory.requests] == ["exists", "put", "exists"]


@pytest.mark.parametrize("data", [DATA, LONG], ids=["short", "long"])
async def test_bytes_that_are_not_what_the_name_says_are_never_sent(
    bench: Bench, data: bytes
) -> None:
    name = piece_of(data).object
    with pytest.raises(IntegrityError) as caught:
        await bench.objects.put(name, data[:-1])
    check_sentences(caught.value)
    assert bench.on_store(name) is None
    with pytest.raises(FormatError):
        await bench.objects.put("objects/../head.json", data)


async def test_a_put_whose_answer_was_lost_can_be_repeated(
    remote: Bench, memory: MemoryTransport
) -> None:
    memory.faults.lose_answers = 1
    name = piece_of(DATA).object
    with pytest.raises(TransientError):
        await remote.objects.put(name, DATA)
    await remote.objects.put(name, DATA)
    assert memory.files == {name: DATA}


async def test_a_full_store_takes_no_object_and_still_gives_them(
    remote: Bench, memory: MemoryTransport
) -> None:
    await remote.objects.put(piece_of(DATA).object, DATA)
    memory.faults.status = 507
    with pytest.raises(QuotaError):
        await remote.objects.put(piece_of(LONG).object, LONG)
    assert await remote.objects.get(piece_of(DATA)) == DATA


# -- documents ----------------------------------------------------------------------------


async def test_a_store_without_a_head_has_none(bench: Bench) -> None:
    assert await bench.objects.get_head(None) is None


async def test_the_head_comes_with_its_bytes(bench: Bench) -> None:
    await bench.objects.swap_head(None, HEAD)
    found = await bench.objects.get_head("demo")
    assert found == (Head("agent", "demo", SNAPSHOT_ID, REFERENCE.sha256), HEAD)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\0" * 184, HEAD[:-20], HEAD * 2, b"\xff" + HEAD, b"x" * 4097],
    ids=["empty", "no keys", "zeros", "cut", "twice", "no UTF-8", "too long"],
)
async def test_a_damaged_head_is_said_to_be_damaged_and_not_missing(
    bench: Bench, data: bytes
) -> None:
    bench.plant(HEAD_NAME, data)
    with pytest.raises(IntegrityError) as caught:
        await bench.objects.get_head(None)
    assert not isinstance(caught.value, MissingObjectError)
    check_sentences(caught.value)


async def test_the_head_of_another_agent_is_refused(bench: Bench) -> None:
    bench.plant(HEAD_NAME, HEAD)
    with pytest.raises(FormatError) as caught:
        await bench.objects.get_head("somebody-else")
    assert "'demo' and not 'somebody-else'" in caught.value.happened
    check_sentences(caught.value)
    assert await bench.objects.get_head(None) is not None


@pytest.mark.parametrize("wanted", [REFERENCE, SNAPSHOT_ID], ids=["reference", "id"])
async def test_a_snapshot_comes_with_its_bytes(
    bench: Bench, wanted: Reference | SnapshotId
) -> None:
    await bench.objects.put_snapshot(SNAPSHOT_ID, DOCUMENT)
    for _ in range(2):
        found = await bench.objects.get_snapshot(wanted, owner_id="demo")
        assert found == (snapshot_of(), DOCUMENT)


async def test_a_snapshot_with_another_digest_is_refused(bench: Bench) -> None:
    bench.plant(DOCUMENT_NAME, DOCUMENT.replace(b"2026", b"2027"))
    with pytest.raises(IntegrityError) as caught:
        await bench.objects.get_snapshot(REFERENCE, owner_id=None)
    assert SNAPSHOT_ID in caught.value.happened
    check_sentences(caught.value)
    assert bench.cached() == set()


async def test_a_snapshot_that_is_missing_is_named(bench: Bench) -> None:
    with pytest.raises(MissingObjectError) as caught:
        await bench.objects.get_snapshot(REFERENCE, owner_id=None)
    assert DOCUMENT_NAME in caught.value.happened
    check_sentences(caught.value)


async def test_a_snapshot_over_its_limit_is_refused(bench: Bench) -> None:
    data = DOCUMENT + b" " * (1 << 20)
    bench.plant(DOCUMENT_NAME, data)
    with pytest.raises(IntegrityError):
        await bench.objects.get_snapshot(Reference(SNAPSHOT_ID, sha256_hex(data)), owner_id=None)


async def test_a_snapshot_of_another_agent_is_refused(bench: Bench) -> None:
    bench.plant(DOCUMENT_NAME, DOCUMENT)
    with pytest.raises(FormatError) as caught:
        await bench.objects.get_snapshot(REFERENCE, owner_id="somebody-else")
    assert "'demo' and not 'somebody-else'" in caught.value.happened
    check_sentences(caught.value)


async def test_a_snapshot_under_the_name_of_another_is_refused(bench: Bench) -> None:
    bench.plant(f"snapshots/{OTHER_ID}.json", DOCUMENT)
    reference = Reference(OTHER_ID, REFERENCE.sha256)
    with pytest.raises(IntegrityError) as caught:
        await bench.objects.get_snapshot(reference, owner_id="demo")
    assert SNAPSHOT_ID in caught.value.happened
    assert OTHER_ID in caught.value.happened
    assert bench.cached() == set()


async def test_a_store_that_keeps_another_document_is_caught_by_reading_it_back(
    remote: Bench, memory: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(name: str, data: bytes) -> None:
        memory.files[name] = data[:-1]

    monkeypatch.setattr(memory, "put", put)
    with pytest.raises(IntegrityError) as caught:
        await remote.objects.put_snapshot(SNAPSHOT_ID, DOCUMENT)
    assert "head was not moved" in caught.value.kept


# -- the cache ----------------------------------------------------------------------------


async def test_what_was_fetched_is_there_when_the_store_is_not(
    remote: Bench, memory: MemoryTransport
) -> None:
    memory.files.update({piece_of(DATA).object: DATA, DOCUMENT_NAME: DOCUMENT})
    await remote.objects.get(piece_of(DATA))
    await remote.objects.get_snapshot(REFERENCE, owner_id=None)
    memory.faults.refuse = True
    assert await remote.objects.get(piece_of(DATA)) == DATA
    assert (await remote.objects.get_snapshot(REFERENCE, owner_id=None))[1] == DOCUMENT
    with pytest.raises(TransientError):
        await remote.objects.get_snapshot(SNAPSHOT_ID, owner_id=None)
    assert remote.objects.cached_bytes() == len(DATA) + len(DOCUMENT)


async def test_what_a_backing_file_keeps_is_not_cached_too(
    remote: Bench, memory: MemoryTransport
) -> None:
    memory.files[piece_of(DATA).object] = DATA
    await remote.objects.get(piece_of(DATA), keep=False)
    assert remote.cached() == set()
    assert remote.objects.cached_bytes() == 0


@pytest.mark.parametrize("damage", BAD_OBJECTS)
async def test_a_damaged_cached_copy_is_dropped_and_fetched_again(
    remote: Bench, memory: MemoryTransport, damage: str
) -> None:
    memory.files[piece_of(DATA).object] = DATA
    await remote.objects.get(piece_of(DATA))
    (copy,) = (remote.cache / name for name in remote.cached())
    copy.write_bytes(BAD_OBJECTS[damage](DATA))
    assert await remote.objects.get(piece_of(DATA)) == DATA
    assert copy.read_bytes() == DATA
    assert remote.objects.cached_bytes() == len(DATA)
    assert len(memory.requests) == 2


async def test_a_damaged_cached_snapshot_is_fetched_again(
    remote: Bench, memory: MemoryTransport
) -> None:
    memory.files[DOCUMENT_NAME] = DOCUMENT
    await remote.objects.get_snapshot(REFERENCE, owner_id=None)
    (remote.cache / DOCUMENT_NAME).write_bytes(b"{}")
    assert (await remote.objects.get_snapshot(REFERENCE, owner_id=None))[1] == DOCUMENT
    assert (remote.cache / DOCUMENT_NAME).read_bytes() == DOCUMENT


async def test_the_cache_keeps_its_budget_and_drops_what_was_used_longest_ago(
    memory: MemoryTransport, tmp_path: Path
) -> None:
    bench = Bench(memory, tmp_path, budget=1000)
    blocks = [bytes([number]) * 300 for number in range(4)]
    pieces = [piece_of(block) for block in blocks]
    memory.files.update(zip((piece.object for piece in pieces), blocks, strict=True))
    for age, piece in enumerate(pieces[:3]):
        await bench.objects.get(piece)
        os.utime(bench.cache / piece.object.removeprefix("objects/"), (100 + age, 100 + age))
    await bench.objects.get(pieces[0])  # used again, so the second one is the oldest now
    await bench.objects.get(pieces[3])
    left = {pieces[number].object.removeprefix("objects/") for number in (0, 2, 3)}
    assert bench.cached() == left
    assert bench.objects.cached_bytes() == 900


async def test_what_is_greater_than_the_budget_is_not_cached(
    memory: MemoryTransport, tmp_path: Path
) -> None:
    bench = Bench(memory, tmp_path, budget=len(DATA) - 1)
    memory.files[piece_of(DATA).object] = DATA
    assert await bench.objects.get(piece_of(DATA)) == DATA
    assert bench.cached() == set()


async def test_eviction_says_how_much_it_freed(remote: Bench, memory: MemoryTransport) -> None:
    for block in (b"a" * 10, b"b" * 20):
        memory.files[piece_of(block).object] = block
        await remote.objects.get(piece_of(block))
    assert remote.objects.evict(30) == 0
    assert remote.objects.evict(0) == 30
    assert remote.cached() == set()
    assert remote.objects.cached_bytes() == 0


async def test_the_cache_counts_what_an_earlier_process_left_and_drops_what_it_left_unfinished(
    remote: Bench, tmp_path: Path
) -> None:
    remote.cache.mkdir()
    (remote.cache / f"{hashlib.sha256(DATA).hexdigest()}.bin").write_bytes(DATA)
    (remote.cache / f"{hashlib.sha256(DATA).hexdigest()}.md.0123abcd.tmp").write_bytes(b"half")
    assert remote.objects.cached_bytes() == len(DATA)
    assert remote.cached() == {piece_of(DATA).object.removeprefix("objects/")}


async def test_a_cache_that_cannot_be_written_costs_only_the_copy(
    remote: Bench, memory: MemoryTransport
) -> None:
    remote.cache.write_bytes(b"a file where the folder should be")
    memory.files.update({piece_of(DATA).object: DATA, DOCUMENT_NAME: DOCUMENT})
    assert await remote.objects.get(piece_of(DATA)) == DATA
    assert (await remote.objects.get_snapshot(REFERENCE, owner_id=None))[1] == DOCUMENT


async def test_many_readers_at_once_leave_a_cache_whose_count_is_right(
    remote: Bench, memory: MemoryTransport
) -> None:
    blocks = [b"%d" % number * 50 for number in range(40)]
    memory.files.update({piece_of(block).object: block for block in blocks})
    async with trio.open_nursery() as nursery:
        for block in blocks:
            nursery.start_soon(remote.objects.get, piece_of(block))
    assert remote.objects.cached_bytes() == sum(map(len, blocks))
    assert remote.objects.evict(0) == sum(map(len, blocks))
