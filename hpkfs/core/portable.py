"""The settings that travel: `config/portable.json`, parsed and written.

`config.py` brings them into a machine's `config.yaml` and reads them back; `sealer.py` and
`refresher.py` store and load the document. A `Portable` that exists obeys every range of the
format, because the only ways to one from outside, `parse_portable` and `valid_value`, check them:
the peer answers a document out of range by dropping all settings of the agent.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hpkfs.core import canonical
from hpkfs.core.limits import MAX_PORTABLE
from hpkfs.errors import FormatError

SCHEMA_VERSION = 2
MAX_MODEL_CHARACTERS = 1_024
MAX_TOOLSETS = 100
MAX_TOOLSET_CHARACTERS = 128
MAX_TURNS = 1_000
MAX_CHAR_LIMIT = 64_000

# Where each setting stands in the document, and in config.yaml: the two agree.
PLACES: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("toolsets",),
    ("agent", "max_turns"),
    ("memory", "memory_enabled"),
    ("memory", "user_profile_enabled"),
    ("memory", "memory_char_limit"),
    ("memory", "user_char_limit"),
)
_GROUPS = ("agent", "memory")


@dataclass(frozen=True, slots=True)
class Portable:
    """The settings that are the same on all machines of an agent.

    Attributes:
        model: the model's name; empty means that Hermes chooses.
        toolsets: names of the tool sets in use, possibly none.
        max_turns: the most turns of one run, 1 to 1,000.
        memory_enabled: whether the agent keeps notes of its own.
        user_profile_enabled: whether the agent keeps a profile of its user.
        memory_char_limit: the most characters of the notes, 1 to 64,000.
        user_char_limit: the most characters of the profile, 1 to 64,000.
    """

    model: str = ""
    toolsets: tuple[str, ...] = ("hermes-cli",)
    max_turns: int = 90
    memory_enabled: bool = True
    user_profile_enabled: bool = True
    memory_char_limit: int = 2_200
    user_char_limit: int = 1_375


DEFAULT = Portable()
FIELDS = tuple(field.name for field in fields(Portable))


def parse_portable(data: bytes) -> Portable:
    """Parse `config/portable.json`; a key that is absent has its default.

    Raises:
        FormatError: a key is unknown, or a value has the wrong type or range.
    """
    document = canonical.decode(data, limit=MAX_PORTABLE, what="The settings document")
    version = document.pop("schemaVersion", None)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise _refused("its schemaVersion is not 2")
    found: dict[tuple[str, ...], object] = {}
    for key, value in document.items():
        if key not in _GROUPS:
            found[(key,)] = value
        elif isinstance(value, dict):
            found.update({(key, inner): below for inner, below in value.items()})
        else:
            raise _refused(f"`{key}` is not an object")
    values: dict[str, object] = {}
    for place, value in found.items():
        if place not in PLACES:
            raise _refused(f"the key `{'.'.join(place)}` is unknown")
        problem = value_problem(place[-1], value)
        if problem is not None:
            raise _refused(f"`{'.'.join(place)}` {problem}")
        values[place[-1]] = value
    return with_values(DEFAULT, values)


def encode_portable(portable: Portable) -> bytes:
    """Encode the settings canonically, with every key."""
    values = as_values(portable)
    for name, value in values.items():
        problem = value_problem(name, value)
        assert problem is None, f"{name} {problem}"
    document: dict[str, object] = {"schemaVersion": SCHEMA_VERSION}
    groups: dict[str, dict[str, object]] = {group: {} for group in _GROUPS}
    for place in PLACES:
        target = document if len(place) == 1 else groups[place[0]]
        target[place[-1]] = values[place[-1]]
    return canonical.encode({**document, **groups})


def as_values(portable: Portable) -> dict[str, object]:
    """Name every setting with its value as JSON and YAML have it (the tool sets as a list)."""
    values = {name: getattr(portable, name) for name in FIELDS}
    return {**values, "toolsets": list(portable.toolsets)}


def with_values(portable: Portable, values: dict[str, object]) -> Portable:
    """Replace the settings that `values` names; each must have passed `value_problem`."""
    merged = {**as_values(portable), **values}
    toolsets = merged["toolsets"]
    assert isinstance(toolsets, list)
    return Portable(**{**merged, "toolsets": tuple(toolsets)})  # type: ignore[arg-type]  # checked


def value_problem(name: str, value: object) -> str | None:
    """Say what is wrong with a value for a setting, as the end of a sentence; None if nothing."""
    match name:
        case "model":
            return _text_problem(value, MAX_MODEL_CHARACTERS)
        case "toolsets":
            return _toolsets_problem(value)
        case "max_turns":
            return _integer_problem(value, MAX_TURNS)
        case "memory_char_limit" | "user_char_limit":
            return _integer_problem(value, MAX_CHAR_LIMIT)
        case _:
            return None if isinstance(value, bool) else "is neither true nor false"


def _text_problem(value: object, longest: int) -> str | None:
    if not isinstance(value, str):
        return "is not a text"
    if len(value) > longest:
        return f"is longer than {longest:,} characters"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "holds half a character"
    return None


def _toolsets_problem(value: object) -> str | None:
    if not isinstance(value, list):
        return "is not a list"
    if len(value) > MAX_TOOLSETS:
        return f"names more than {MAX_TOOLSETS} tool sets"
    for item in value:
        problem = _text_problem(item, MAX_TOOLSET_CHARACTERS)
        if problem is not None:
            return f"has an entry that {problem}"
        if not item.strip():
            return "has a blank entry"
    return None


def _integer_problem(value: object, largest: int) -> str | None:
    if type(value) is not int:  # bool is an int to isinstance, not to the format
        return "is not a whole number"
    return None if 1 <= value <= largest else f"is not between 1 and {largest:,}"


def _refused(why: str) -> FormatError:
    return FormatError(
        f"The settings document is refused: {why}.",
        kept="The settings on this machine stay as they are.",
        next_step="Save the agent once from a machine whose config.yaml is right.",
    )
