"""Canonical JSON: the one way to write a document, and the strict way to read one.

The other v2 program re-encodes what it has read and hashes the result, so a document that is not
canonical makes its next publication conflict with itself. Every stored document goes out through
`encode` and comes in through `decode`. Order, blanks and escapes are not checked on reading, as
the format demands.
"""

from __future__ import annotations

import json
from typing import NoReturn

from hpkfs.errors import FormatError


def encode(value: object) -> bytes:
    """Encode a value of dicts, lists, texts, integers, booleans and None, with a final newline.

    Raises:
        FormatError: a text holds a lone surrogate, which UTF-8 cannot carry.
    """
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    )
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError as error:
        raise refusal("A document to be written", "it holds text that is not Unicode") from error


def decode(data: bytes, *, limit: int, what: str) -> dict[str, object]:
    """Decode one JSON object strictly.

    Args:
        data: the document as stored.
        limit: the greatest length in bytes; equal is allowed.
        what: the beginning of the error's sentence, such as "The snapshot".

    Raises:
        FormatError: it is too long, empty, not UTF-8, not one JSON object, has a byte-order mark,
            a key twice, a number that is not finite, a lone surrogate, or nests without end.
    """
    if len(data) > limit:
        raise refusal(what, f"it is {len(data):,} bytes long, and {limit:,} are allowed")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        # Only an escape can bring in a lone surrogate: UTF-8 itself has none.
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise refusal(what, "its text is not Unicode in UTF-8") from error
    except RecursionError as error:
        raise refusal(what, "it nests too deeply") from error
    except ValueError as error:
        raise refusal(what, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise refusal(what, "it is not a JSON object")
    return value


def refusal(what: str, problem: str) -> FormatError:
    """Build the error for a document that breaks the format; `problem` ends its sentence."""
    return FormatError(
        f"{what} breaks the storage format: {problem}.",
        kept="Nothing was changed.",
        next_step="It is damaged, or another program wrote it; an older checkpoint may be whole.",
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number without end")
    return number
