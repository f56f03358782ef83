"""Logical paths: refusals, collisions, and the mapping to the mount."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hpkfs.core.paths import (
    AGENTS,
    DATABASE,
    MEMORY,
    PORTABLE,
    SIDECAR,
    SOUL,
    START,
    USER,
    fold,
    path_problem,
    to_local,
    to_logical,
)

# Characters that matter to the rules come up often, all others now and then.
characters = st.sampled_from("/. \\aA\t\x7f\u00a0\u0301é\u0085\u3000ß😀") | st.characters()
paths = st.text(characters, max_size=12)


def plainly_allowed(path: str) -> bool:
    """Section 7 of the format, word by word, without the fast path."""
    try:
        if not 1 <= len(path.encode()) <= 1_024:
            return False
    except UnicodeEncodeError:
        return False
    if any(ord(c) < 0x20 or c in "\x7f\\" for c in path):
        return False
    segments = path.split("/")
    if any(s in ("", ".", "..") or s != s.strip() for s in segments):
        return False
    return unicodedata.normalize("NFC", path) == path


@settings(deadline=None, max_examples=500)
@given(paths)
@example("a/b c/d")
@example("...")
@example("a/..")
@example("..a/.b")
@example("a\n")
@example("workspace/\udc80")
def test_a_path_is_good_exactly_when_the_format_text_allows_it(path: str) -> None:
    assert (path_problem(path) is None) == plainly_allowed(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "empty"),
        ("x" * 1_025, "1,024 bytes"),
        ("é" * 513, "1,024 bytes"),
        ("/a", "starts with a slash"),
        ("a/", "ends with a slash"),
        ("a//b", "empty segment"),
        ("a/./b", 'segment "."'),
        ("../a", 'segment ".."'),
        ("a\\b", "backslash"),
        ("a\nb", "control character"),
        ("a/b\x7f", "control character"),
        (" a", "starts with a space"),
        ("a/b\u3000", "ends with a space"),
        ("e\u0301", "NFC"),
        ("\u212b", "NFC"),
        ("workspace/\udcff", "not Unicode"),
    ],
)
def test_a_refused_path_comes_with_its_reason(path: str, reason: str) -> None:
    assert reason in (path_problem(path) or "")


@pytest.mark.parametrize(
    "path",
    [
        "x" * 1_024,
        "é" * 512,
        "a",
        "a/b/c",
        ".git/config",
        ".env",
        "CON",
        'a:*?"<>|',
        "name.",
        "...",
        "..a",
        "a b/c d",
        "a\u200bb",
        "x\u0085y",
        "s" * 300,
        "\u200d",
    ],
)
def test_awkward_paths_are_allowed(path: str) -> None:
    assert path_problem(path) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [("A", "a"), ("ß", "ss"), ("ﬁ", "fi"), ("İ", "i̇"), ("Σς", "σσ"), ("é", "e\u0301"), ("ẞ", "SS")],
)
def test_paths_that_differ_by_case_or_form_collide(one: str, other: str) -> None:
    assert fold(one) == fold(other)


@settings(deadline=None)
@given(paths)
def test_folding_is_nfc_and_then_casefold_with_and_without_the_fast_path(path: str) -> None:
    assert fold(path) == unicodedata.normalize("NFC", path).casefold()


@pytest.mark.parametrize(
    ("local", "logical"),
    [
        ("SOUL.md", SOUL),
        ("memories/USER.md", USER),
        ("memories/MEMORY.md", MEMORY),
        ("state.db", DATABASE),
        ("config.yaml", PORTABLE),
        ("workspace/AGENTS.md", AGENTS),
        ("workspace/a/b", "workspace/a/b"),
        ("skills/x/SKILL.md", "profile/skills/x/SKILL.md"),
        ("workspace/état", "workspace/état"),
    ],
)
def test_local_and_logical_paths_map_to_each_other(local: str, logical: str) -> None:
    assert to_logical(local) == logical
    assert to_local(logical) == local


@pytest.mark.parametrize(
    "local",
    [
        "",
        "workspace",
        "workspace/",
        "skills",
        "skills/",
        "memories/OTHER.md",
        "memories",
        "logs/x",
        "soul.md",
        "SOUL.md/x",
        "state.db-wal",
        "plugins/skills/x",
        ".hpkfs/status.json",
        "profile/SOUL.md",
        "conversations/state.sqlite3",
    ],
)
def test_what_does_not_travel_has_no_logical_path(local: str) -> None:
    assert to_logical(local) is None


@pytest.mark.parametrize(
    "logical",
    [
        "foo/x",
        "profile/plugins/x",
        "profile/memories/OTHER.md",
        "profile/skills",
        "profile/skills/",
        "workspace",
        "SOUL.md",
        "state.db",
        "skills/x",
        SIDECAR,
        START,
    ],
)
def test_a_foreign_prefix_has_no_local_path(logical: str) -> None:
    assert to_local(logical) is None


def test_a_local_name_is_brought_to_nfc() -> None:
    assert to_logical("workspace/e\u0301") == "workspace/é"
    assert to_logical("skills/\u212b") == "profile/skills/Å"


def test_a_name_that_is_not_utf_8_maps_and_is_then_refused() -> None:
    logical = to_logical("workspace/\udc80")
    assert logical == "workspace/\udc80"
    assert path_problem(logical) is not None


@settings(deadline=None)
@given(
    st.sampled_from(["workspace/", "profile/skills/", "profile/", "config/", ""]),
    st.text(characters, max_size=12) | st.sampled_from(["SOUL.md", "memories/USER.md"]),
)
def test_a_stored_path_that_is_shown_is_stored_again_under_the_same_name(
    prefix: str, rest: str
) -> None:
    logical = prefix + rest
    assume(path_problem(logical) is None)
    local = to_local(logical)
    if local is not None:
        assert to_logical(local) == logical
