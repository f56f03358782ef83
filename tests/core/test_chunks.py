"""Cutting, naming and finding pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkfs.core.chunks import (
    build_record,
    extension_for,
    object_name,
    parse_object_name,
    piece_at,
    split,
    starts,
)
from hpkfs.core.documents import FileRecord, Piece, record_from_json, record_to_json
from hpkfs.core.ids import EMPTY_DIGEST, Digest, sha256_hex
from hpkfs.core.limits import PIECE_SIZE, cap_for, max_pieces
from hpkfs.core.paths import AGENTS, DATABASE, MEMORY, PORTABLE, SOUL, USER
from hpkfs.errors import FormatError

DIGEST = Digest("ab" * 32)


def uneven(*sizes: int) -> FileRecord:
    pieces = tuple(Piece(DIGEST, size, "bin") for size in sizes)
    return FileRecord(DIGEST, sum(sizes), executable=False, pieces=pieces)


@pytest.mark.parametrize(
    ("logical", "size", "extension"),
    [
        ("workspace/a.md", 1, "md"),
        ("workspace/.md", 1, "md"),
        ("workspace/a.MD", 1, "bin"),
        ("workspace/a.md/b", 1, "bin"),
        ("workspace/a.json", PIECE_SIZE, "json"),
        ("workspace/a.json", PIECE_SIZE + 1, "chunk"),
        ("workspace/a", 1, "bin"),
        (PORTABLE, 191, "json"),
        (DATABASE, 1, "chunk"),
        ("workspace/" + DATABASE, 1, "bin"),
    ],
)
def test_the_extension_follows_path_and_size(logical: str, size: int, extension: str) -> None:
    assert extension_for(logical, size) == extension


@given(st.integers(0, 300 * PIECE_SIZE))
def test_pieces_are_full_and_the_last_one_is_never_empty(size: int) -> None:
    sizes = split(size)
    assert sum(sizes) == size
    assert all(piece == PIECE_SIZE for piece in sizes[:-1])
    assert all(1 <= piece <= PIECE_SIZE for piece in sizes[-1:])


@pytest.mark.parametrize("extension", ["md", "json", "bin", "chunk"])
def test_an_object_name_is_taken_apart_as_it_was_put_together(extension: str) -> None:
    assert parse_object_name(object_name(DIGEST, extension)) == (DIGEST, extension)
    assert Piece(DIGEST, 1, extension).object == object_name(DIGEST, extension)


@pytest.mark.parametrize(
    "text",
    [
        "",
        DIGEST,
        f"objects/{DIGEST}",
        f"objects/{DIGEST}.txt",
        f"objects/{DIGEST}.bin\n",
        f"objects/{DIGEST.upper()}.bin",
        f"objects/{DIGEST[1:]}.bin",
        f"objects/x/{DIGEST}.bin",
        f"../objects/{DIGEST}.bin",
        f"/objects/{DIGEST}.bin",
        "head.json",
    ],
)
def test_another_object_name_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_object_name(text)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([0, 1, 2, 100, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 1, 2 * PIECE_SIZE + 7]),
    st.booleans(),
    st.sampled_from(["workspace/a.md", "workspace/b", DATABASE]),
    st.binary(min_size=1, max_size=5),
)
def test_the_objects_of_a_record_put_together_are_the_file(
    size: int, executable: bool, logical: str, seed: bytes
) -> None:
    data = (seed * (size // len(seed) + 1))[:size]
    record, objects = build_record(logical, data, executable=executable)
    assert b"".join(objects[piece.object] for piece in record.pieces) == data
    assert (record.sha256, record.size) == (sha256_hex(data), size)
    assert record.executable is executable
    assert {piece.object for piece in record.pieces} == set(objects)
    assert all(sha256_hex(objects[piece.object]) == piece.sha256 for piece in record.pieces)
    assert record_from_json(record_to_json(record), path=logical) == record


def test_an_empty_file_has_no_pieces_and_no_objects() -> None:
    record, objects = build_record("workspace/x", b"", executable=True)
    assert record == FileRecord(EMPTY_DIGEST, 0, executable=True, pieces=())
    assert not objects
    assert starts(record) == ()


def test_equal_pieces_are_one_object() -> None:
    record, objects = build_record("workspace/x", bytes(3 * PIECE_SIZE), executable=False)
    assert len(record.pieces) == 3
    assert len(objects) == 1


@pytest.mark.parametrize("logical", [SOUL, USER, MEMORY, AGENTS, PORTABLE])
def test_a_core_file_may_have_64_kib_and_not_a_byte_more(logical: str) -> None:
    assert cap_for(logical) == 65_536
    assert max_pieces(cap_for(logical)) == 2
    record, _ = build_record(logical, bytes(65_536), executable=False)
    assert record.size == 65_536
    with pytest.raises(FormatError, match="65,537 bytes"):
        build_record(logical, bytes(65_537), executable=False)


@pytest.mark.parametrize(
    ("logical", "cap", "pieces"),
    [
        (DATABASE, 268_435_456, 258),
        ("workspace/x", 67_108_864, 66),
        ("workspace/sub/AGENTS.md", 67_108_864, 66),
        ("profile/skills/x", 67_108_864, 66),
        ("foo/x", 67_108_864, 66),
    ],
)
def test_other_files_have_the_caps_of_their_kind(logical: str, cap: int, pieces: int) -> None:
    assert cap_for(logical) == cap
    assert max_pieces(cap) == pieces


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_the_piece_at_each_offset_of_an_uneven_file_holds_that_byte(sizes: list[int]) -> None:
    record = uneven(*sizes)
    owners = [index for index, size in enumerate(sizes) for _ in range(size)]
    assert [piece_at(record, offset) for offset in range(record.size)] == owners
    assert starts(record) == tuple(owners.index(index) for index in range(len(sizes)))


@pytest.mark.parametrize("offset", [-1, 8])
def test_an_offset_outside_the_file_is_a_bug(offset: int) -> None:
    with pytest.raises(AssertionError):
        piece_at(uneven(3, 5), offset)
