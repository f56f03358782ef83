"""Cutting files into pieces, naming objects, and finding a byte in a record.

New content is cut as the other v2 program cuts it, so that both share objects on the store. What
is read may be cut in any other way: positions always come from running sums, never from a
division by the size of a piece.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from hpkfs.core.canonical import refusal
from hpkfs.core.documents import OBJECT_NAME, FileRecord, Piece
from hpkfs.core.ids import EMPTY_DIGEST, Digest, sha256_hex
from hpkfs.core.limits import PIECE_SIZE, cap_for
from hpkfs.core.paths import DATABASE


def extension_for(logical: str, size: int) -> str:
    """Choose the extension of the objects of a file: by path and size, never by content."""
    if size > PIECE_SIZE or logical == DATABASE:
        return "chunk"
    if logical.endswith(".md"):
        return "md"
    return "json" if logical.endswith(".json") else "bin"


def object_name(digest: Digest, extension: str) -> str:
    """Name an object relative to its store."""
    return f"objects/{digest}.{extension}"


def parse_object_name(text: str) -> tuple[Digest, str]:
    """Take an object's name apart into its digest and extension.

    Raises:
        FormatError: it is not `objects/<digest>.<md, json, bin or chunk>`.
    """
    match = OBJECT_NAME.fullmatch(text)
    if match is None:
        raise refusal("An object's name", f"{text[:100]!r} is not a digest with an extension")
    return Digest(match[1]), match[2]


def split(size: int) -> tuple[int, ...]:
    """Give the piece sizes for a file of `size` bytes: full pieces, then the rest, never empty."""
    full, rest = divmod(size, PIECE_SIZE)
    return (PIECE_SIZE,) * full + ((rest,) if rest else ())


def build_record(
    logical: str, data: bytes, *, executable: bool
) -> tuple[FileRecord, dict[str, bytes]]:
    """Cut a file and hash it and its pieces (sync; over 64 KiB call it in a thread).

    Returns:
        The record, and the bytes of each object by name; equal pieces appear once.

    Raises:
        FormatError: the file is greater than its path may hold.
    """
    cap = cap_for(logical)
    if len(data) > cap:
        raise refusal(f"The file {logical}", f"it has {len(data):,} bytes, and {cap:,} are allowed")
    extension = extension_for(logical, len(data))
    pieces: list[Piece] = []
    objects: dict[str, bytes] = {}
    start = 0
    for size in split(len(data)):
        content = data[start : start + size]
        pieces.append(Piece(sha256_hex(content), size, extension))
        objects[pieces[-1].object] = content
        start += size
    whole = pieces[0].sha256 if len(pieces) == 1 else sha256_hex(data) if pieces else EMPTY_DIGEST
    return FileRecord(whole, len(data), executable, tuple(pieces)), objects


def starts(record: FileRecord) -> tuple[int, ...]:
    """Give the offset of each piece in its file."""
    return tuple(accumulate((piece.size for piece in record.pieces[:-1]), initial=0))[
        : len(record.pieces)
    ]


def piece_at(record: FileRecord, offset: int) -> int:
    """Give the index of the piece that holds the byte at `offset`, 0 <= offset < size."""
    assert 0 <= offset < record.size, (offset, record.size)
    return bisect_right(starts(record), offset) - 1
