"""The names that a journal remembers are never older than the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpkfs import journal as journal_module
from hpkfs.durable import RealDisk
from hpkfs.inodes import ROOT_INO
from hpkfs.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(str(tmp_path / "journal.sqlite3"), disk=RealDisk())
    yield made
    made.close()


def test_a_name_that_is_given_to_another_inode_is_found_there(journal: Journal) -> None:
    journal.set_dentry(ROOT_INO, b"a", 7)
    assert journal.lookup(ROOT_INO, b"a") == 7
    journal.set_dentry(ROOT_INO, b"a", 8)
    assert journal.lookup(ROOT_INO, b"a") == 8


def test_a_name_that_is_removed_is_not_found(journal: Journal) -> None:
    journal.set_dentry(ROOT_INO, b"a", 7)
    assert journal.lookup(ROOT_INO, b"a") == 7
    journal.delete_dentry(ROOT_INO, b"a")
    assert journal.lookup(ROOT_INO, b"a") is None
    assert journal.remembered(ROOT_INO, b"a") is None


def test_a_name_that_a_whole_tree_replaces_is_found_there(journal: Journal) -> None:
    journal.set_dentry(ROOT_INO, b"a", 7)
    assert journal.lookup(ROOT_INO, b"a") == 7
    journal.bulk_insert([], [(ROOT_INO, b"a", 9)])
    assert journal.lookup(ROOT_INO, b"a") == 9


def test_a_name_that_was_looked_up_within_a_failed_transaction_is_forgotten(
    journal: Journal,
) -> None:
    journal.set_dentry(ROOT_INO, b"a", 7)

    def fail() -> None:
        with journal.transaction():
            journal.set_dentry(ROOT_INO, b"a", 8)
            assert journal.lookup(ROOT_INO, b"a") == 8
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    assert journal.lookup(ROOT_INO, b"a") == 7


def test_no_more_names_are_remembered_than_the_limit_says(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "NAMES_MAX", 3)
    for number in range(9):
        name = b"%d" % number
        journal.set_dentry(ROOT_INO, name, 10 + number)
        assert journal.lookup(ROOT_INO, name) == 10 + number
        held = [journal.remembered(ROOT_INO, b"%d" % other) for other in range(9)]
        assert sum(ino is not None for ino in held) <= 3
