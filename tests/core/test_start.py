"""The start profile: round trip, bounds, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs.core.start import MAX_CHUNKS, encode_start, parse_start
from hpkfs.errors import FormatError

PATHS = st.from_regex(r"workspace/[a-z]{1,8}", fullmatch=True)


@given(st.dictionaries(PATHS, st.sets(st.integers(0, 300), min_size=1), max_size=8))
def test_what_is_written_is_read(profile: dict[str, set[int]]) -> None:
    assert parse_start(encode_start(profile)) == {
        path: tuple(sorted(chunks)) for path, chunks in profile.items()
    }


def test_a_long_profile_is_cut() -> None:
    profile = parse_start(encode_start({"a": range(MAX_CHUNKS), "b": [1]}))
    assert sum(map(len, profile.values())) == MAX_CHUNKS


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"files":{},"kind":"hpkfs-start","version":2}\n',
        b'{"files":[],"kind":"hpkfs-start","version":1}\n',
        b'{"files":{"../x":[0]},"kind":"hpkfs-start","version":1}\n',
        b'{"files":{"a":[-1]},"kind":"hpkfs-start","version":1}\n',
        b'{"files":{"a":[true]},"kind":"hpkfs-start","version":1}\n',
    ],
)
def test_a_damaged_profile_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_start(data)
