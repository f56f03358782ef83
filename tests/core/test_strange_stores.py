"""Stores nobody designed: everything in them is read, rebuilt, and written again unchanged."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores import ExpectedStore, make_store

from hpkfs.core.chunks import piece_at, starts
from hpkfs.core.documents import Reference, encode_snapshot, parse_head, parse_snapshot
from hpkfs.core.ids import sha256_hex, timestamp_ns
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.core.paths import to_local, to_logical
from hpkfs.errors import FormatError

if TYPE_CHECKING:
    from hpkfs.core.documents import FileRecord


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpectedStore:
    root = tmp_path_factory.mktemp("strange") / "a störe"
    return make_store(str(root), seed=7, files=300, checkpoints=5)


def read_file(root: Path, record: FileRecord) -> bytes:
    return b"".join((root / piece.object).read_bytes() for piece in record.pieces)


def assert_reads_as_expected(expected: ExpectedStore) -> None:
    root = Path(expected.root)
    head = parse_head((root / "head.json").read_bytes(), owner_id=expected.agent_id)
    reference: Reference | None = Reference(head.snapshot_id, head.sha256)
    for checkpoint in reversed(expected.checkpoints):
        assert reference == checkpoint.reference
        data = (root / f"snapshots/{reference.snapshot_id}.json").read_bytes()
        snapshot = parse_snapshot(data, owner_id=expected.agent_id, reference=reference)
        assert encode_snapshot(snapshot) == data
        assert timestamp_ns(snapshot.created_at) > 0
        assert snapshot.files.keys() == checkpoint.files.keys()
        for path, file in checkpoint.files.items():
            assert read_file(root, snapshot.files[path]) == file.data
            assert snapshot.files[path].sha256 == sha256_hex(file.data)
            assert snapshot.files[path].executable is file.executable
        reference = snapshot.parent
    assert reference is None


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), files=st.integers(2, 60), checkpoints=st.integers(1, 4))
def test_a_store_of_any_seed_is_read_back_as_it_was_made(
    seed: int, files: int, checkpoints: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = make_store(
            f"{folder}/store", seed=seed, files=files, checkpoints=checkpoints, big_files=1
        )
        assert len(made.checkpoints) == checkpoints
        assert len(made.newest.files) >= files
        assert_reads_as_expected(made)


def test_a_store_of_five_checkpoints_is_read_back_as_it_was_made(store: ExpectedStore) -> None:
    assert_reads_as_expected(store)


def test_the_same_seed_makes_the_same_store(tmp_path: Path, store: ExpectedStore) -> None:
    again = make_store(str(tmp_path / "again"), seed=7, files=300, checkpoints=5)
    assert again.checkpoints == store.checkpoints
    other = make_store(str(tmp_path / "other"), seed=8, files=300, checkpoints=5)
    assert other.newest.document != store.newest.document


def test_the_oddities_that_the_store_is_for_are_in_it(store: ExpectedStore) -> None:
    files = store.newest.files
    records = store.newest.snapshot.files
    sizes = {len(file.data) for file in files.values()}
    assert {0, 1, PIECE_SIZE} <= sizes
    assert any(size > PIECE_SIZE for size in sizes)
    assert any(not path.isascii() for path in files)
    assert any(to_local(path) is None for path in files)
    assert any(other.startswith(f"{path}/") for path in files for other in files)
    assert any(file.executable for file in files.values())
    assert any(max(map(len, path.encode().split(b"/"))) > 255 for path in files)
    assert any(len(path.encode()) == 1_024 for path in files)
    assert any(
        len({piece.extension for piece in record.pieces}) > 1
        and len({piece.size for piece in record.pieces[:-1]}) > 1
        for record in records.values()
    )


def test_every_checkpoint_changes_something_and_keeps_something(store: ExpectedStore) -> None:
    for before, after in zip(store.checkpoints, store.checkpoints[1:], strict=False):
        old, new = before.snapshot.files, after.snapshot.files
        assert old.keys() - new.keys()
        assert new.keys() - old.keys()
        kept = old.keys() & new.keys()
        assert any(old[path].sha256 != new[path].sha256 for path in kept)
        assert any(old[path] == new[path] for path in kept)
        assert any(
            old[path].sha256 == new[path].sha256 and old[path].executable != new[path].executable
            for path in kept
        )


def test_each_byte_of_an_uneven_file_is_found_by_its_offset(store: ExpectedStore) -> None:
    root = Path(store.root)
    uneven = [
        (record, store.newest.files[path].data)
        for path, record in store.newest.snapshot.files.items()
        if len(record.pieces) > 2 and record.size < 10_000
    ]
    assert uneven
    for record, data in uneven:
        for offset in (0, 1, record.size // 2, record.size - 1):
            index = piece_at(record, offset)
            piece = (root / record.pieces[index].object).read_bytes()
            assert piece[offset - starts(record)[index]] == data[offset]


def test_the_visible_files_form_one_tree_and_map_back(store: ExpectedStore) -> None:
    for checkpoint in store.checkpoints:
        visible = checkpoint.visible
        assert visible
        for local, file in visible.items():
            logical = to_logical(local)
            assert logical is not None
            assert checkpoint.files[logical] == file
            parents = [local[:i] for i, character in enumerate(local) if character == "/"]
            assert not any(parent in visible for parent in parents)


def test_a_file_beside_a_folder_of_its_name_is_stored_and_not_visible(tmp_path: Path) -> None:
    made = make_store(str(tmp_path / "store"), seed=1, files=40, checkpoints=1)
    assert {"workspace/both", "workspace/both/below"} <= made.newest.files.keys()
    assert "workspace/both" not in made.newest.visible
    assert "workspace/both/below" in made.newest.visible


def test_a_truncated_or_foreign_document_of_the_store_is_refused(store: ExpectedStore) -> None:
    newest = store.newest
    for damaged in (newest.document[:-2], newest.document + b"x", newest.document + b"\n"):
        with pytest.raises(FormatError):
            parse_snapshot(damaged, reference=newest.reference)
    foreign = replace(newest.snapshot, owner_id="other")
    with pytest.raises(FormatError, match="'other'"):
        parse_snapshot(encode_snapshot(foreign), owner_id=store.agent_id)
