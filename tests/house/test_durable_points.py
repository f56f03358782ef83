"""Each named disk call has a crash test, and nobody else makes files durable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hpkfs.durable import ATOMIC_POINTS, NAMES, POINTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpkfs"
CRASH = ROOT / "tests" / "crash"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Their crash tests are still to be written, with the module that has the call. A name that gets
# its test is taken out here; a new name is never put in.
AWAITED = frozenset(
    {
        "backing.data.fsync",
        "backing.file.fsync",
        "backing.folder.fsync",
        "journal.wal.fsync",
        "pending.folder.fsync",
        "pending.object.fsync",
        "pending.objects.fsync",
        "pending.rename",
        "pending.snapshot",
    }
)
SYNCS = {"fsync", "fdatasync"}


def calls(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def named_in_crash_tests() -> set[str]:
    """Names that stand as texts in the crash tests; `store.head` stands for its steps."""
    found = set()
    for path in CRASH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found & POINTS


@pytest.mark.parametrize("point", sorted(POINTS))
def test_each_point_has_a_crash_test(point: str) -> None:
    if point in AWAITED and point not in named_in_crash_tests():
        pytest.skip(f"{point} has no crash test yet")
    assert point in named_in_crash_tests()


def test_only_known_points_are_awaited() -> None:
    assert AWAITED <= POINTS


@pytest.mark.parametrize("point", sorted(NAMES))
def test_a_point_is_named_area_what_call(point: str) -> None:
    words = point.split(".")
    assert 2 <= len(words) <= 3
    assert all(word.isalpha() and word.islower() for word in words)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_call_with_a_point_spells_it_out(path: Path) -> None:
    if path.name == "durable.py":
        pytest.skip("it passes on the points of its callers")
    for call in calls(path):
        for keyword in call.keywords:
            if keyword.arg == "point":
                assert isinstance(keyword.value, ast.Constant), ast.unparse(call)
                assert keyword.value.value in POINTS, ast.unparse(call)
                is_atomic = ast.unparse(call.func).endswith("write_atomic")
                assert is_atomic == (keyword.value.value in ATOMIC_POINTS), ast.unparse(call)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_durable_calls_the_kernels_sync(path: Path) -> None:
    if path.name == "durable.py":
        pytest.skip("it is the one that may")
    bare = [
        ast.unparse(call)
        for call in calls(path)
        if ast.unparse(call.func) in {f"os.{name}" for name in SYNCS}
    ]
    assert not bare
