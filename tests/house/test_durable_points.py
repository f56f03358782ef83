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

SYNCS = {"fsync", "fdatasync"}


def calls(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def texts_in_crash_tests() -> set[str]:
    """Every text that stands alone in a crash test, so the names of points among them."""
    found = set()
    for path in CRASH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@pytest.mark.parametrize("point", sorted(NAMES))
def test_each_point_has_a_crash_test(point: str) -> None:
    atomic = point.rpartition(".")[0]  # of which a test may take all steps from ATOMIC_CALLS
    assert {point, atomic if atomic in ATOMIC_POINTS else point} & texts_in_crash_tests()


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
