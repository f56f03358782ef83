"""A machine's `config.yaml` and the settings that travel: merged in, and read back.

`refresher.py` merges when a checkpoint brings other settings, `sealer.py` extracts at each seal.
The file belongs to the person on this machine: what is read is what Hermes would read (the same
YAML library), and what is written is only the value that differs, cut into the text in place, so
that comments, order, quotes and line ends stay. Where the text cannot be cut (a value that other
places share by an anchor), a round-trip library writes it. Either result counts only if it reads
back as the old file with just those values changed; else the file stays as it is.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, TypeAlias

import ruamel.yaml
import yaml

from hpkfs.core.portable import DEFAULT, PLACES, as_values, value_problem, with_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpkfs.core.portable import Portable

MAX_CONFIG_CHARACTERS = 1_048_576
# Nodes of the file with every alias written out; beyond it a file is a trap, not a configuration.
MAX_NODES = 200_000

HEADER = (
    "# Made by hpkfs from the settings that travel with this agent. Whatever else you add to\n"
    "# this file stays on this machine.\n"
)

_LONGEST_LINE = 2**30
_PROPERTIES = re.compile(r"(?:[&!][^\s,\[\]{}]*[ \t]+)*")
_ALIAS = re.compile(r"\s*:\s*(?:#[^\n]*\n\s*)*(\*[^\s,\[\]{}]+)")
# What the two libraries raise for odd texts, beside their own errors.
_ODD = (
    AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, OverflowError,
    RecursionError, TypeError, ValueError,
)  # fmt: skip

Place: TypeAlias = tuple[str, ...]
Edit: TypeAlias = tuple[int, int, str]


class _UnreadableError(Exception):
    """The text is no configuration; the message is the end of a sentence."""


class _CannotCutError(Exception):
    """The text has a shape that is not edited in place."""


def merge(text: str, portable: Portable, base: Portable | None) -> str:
    """Bring settings into a `config.yaml`.

    A setting is written where the checkpoint changed it and the file has another value. An
    absent key has the value that Hermes gives it. A `model` that is not a plain string, and
    whatever stands where a group of settings is due, is never replaced.

    Args:
        text: the file, empty where there is none.
        portable: the settings of the checkpoint.
        base: the settings of the checkpoint before, which the file followed; None if unknown.

    Returns:
        The new text; `text` itself where nothing differs or the file cannot be edited.
    """
    if not text.strip():
        return HEADER + _block(_nested(_worth_writing(portable)))
    try:
        config = _read(text)[1]
    except _UnreadableError:
        return text
    if config is None:  # nothing but comments
        added = _block(_nested(_worth_writing(portable)))
        return text + ("" if text.endswith("\n") else "\n") + added
    if not isinstance(config, dict):
        return text
    changes = _changes(config, portable, base)
    if not changes:
        return text
    edited = _edited(text, changes)
    if edited is not None:
        return edited
    for place, value in changes.items():  # one at a time: a single one may be in the way
        text = _edited(text, {place: value}) or text
    return text


def extract(text: str, base: Portable) -> tuple[Portable, list[str]]:
    """Read the settings that travel out of a `config.yaml`.

    A key that is absent, empty or wrong keeps the value of `base`.

    Returns:
        The settings, and what is wrong with the file, a sentence each.
    """
    if not text.strip():
        return base, []
    try:
        config = _read(text)[1]
    except _UnreadableError as error:
        return base, [f"config.yaml {error}; the settings stay as they were stored."]
    if config is None:
        return base, []
    if not isinstance(config, dict):
        return base, ["config.yaml is not a mapping; the settings stay as they were stored."]
    values: dict[str, object] = {}
    problems: dict[str, None] = {}
    for place in PLACES:
        group = config.get(place[0])
        if len(place) > 1 and group is not None and not isinstance(group, dict):
            problems[f"`{place[0]}` in config.yaml is not a mapping; it stays as stored."] = None
            continue
        value = _value_at(config, place)
        if value is None or (place == ("model",) and isinstance(value, dict)):
            continue
        problem = value_problem(place[-1], value)
        if problem is None:
            values[place[-1]] = value
        else:
            name = ".".join(place)
            problems[f"`{name}` in config.yaml {problem}; the stored value stays."] = None
    return with_values(base, values), list(problems)


# -- reading ------------------------------------------------------------------------------


def _read(text: str) -> tuple[yaml.Node | None, object]:
    """Parse a text as Hermes does: its nodes with their positions, and its value."""
    if len(text) > MAX_CONFIG_CHARACTERS:
        raise _UnreadableError(f"is longer than {MAX_CONFIG_CHARACTERS:,} characters")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and _count(root, {}) > MAX_NODES:
            raise _UnreadableError("repeats itself too often")
        return root, yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise _UnreadableError(f"is not valid YAML{line}") from error
    except (yaml.YAMLError, *_ODD) as error:
        raise _UnreadableError("is not valid YAML") from error


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the nodes below and with `node`, aliases written out; a circle counts as too many."""
    identity = id(node)
    if identity not in known:
        known[identity] = MAX_NODES + 1
        known[identity] = 1 + sum(_count(child, known) for child in _children(node))
    return known[identity]


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _value_at(config: Mapping[object, object], place: Place) -> object:
    """The value at a place; None where it is absent, empty, or out of reach."""
    value: object = config
    for key in place:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


# -- deciding -----------------------------------------------------------------------------


def _worth_writing(portable: Portable) -> dict[Place, object]:
    """What a generated file holds: all settings, but no model where Hermes is to choose it."""
    values = as_values(portable)
    return {place: values[place[-1]] for place in PLACES if values[place[-1]] != ""}


def _changes(
    config: Mapping[object, object], portable: Portable, base: Portable | None
) -> dict[Place, object]:
    wanted, defaults = as_values(portable), as_values(DEFAULT)
    before = {} if base is None else as_values(base)
    changes: dict[Place, object] = {}
    for place in PLACES:
        name = place[-1]
        value, group = wanted[name], config.get(place[0])
        if before.get(name) == value:
            continue
        if len(place) > 1 and not (group is None or isinstance(group, dict)):
            continue
        current = _value_at(config, place)
        if place == ("model",) and not (current is None or isinstance(current, str)):
            continue
        if not _same(defaults[name] if current is None else current, value):
            changes[place] = value
    return changes


def _same(left: object, right: object) -> bool:
    """Compare two values; true is not 1."""
    return type(left) is type(right) and left == right


def _is_changed_so(old: object, new: object, changes: Mapping[Place, object]) -> bool:
    """Say whether `new` is `old` with exactly these changes."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return False
    if not all(_same(_value_at(new, place), value) for place, value in changes.items()):
        return False
    # As texts: not-a-number differs from itself, and 1 equals true.
    return repr(_without(old, changes)) == repr(_without(new, changes))


def _without(config: dict[object, object], places: Mapping[Place, object]) -> dict[object, object]:
    """Copy a configuration without some places, and without a group that is empty then."""
    copy = dict(config)
    for place in places:
        group = copy.get(place[0])
        if len(place) > 1 and isinstance(group, dict):
            copy[place[0]] = group = {key: below for key, below in group.items() if key != place[1]}
        if len(place) == 1 or not group:
            copy.pop(place[0], None)
    return copy


# -- writing ------------------------------------------------------------------------------


def _edited(text: str, changes: Mapping[Place, object]) -> str | None:
    """Write the changes and check the result; None where that cannot be done."""
    root, config = _read(text)
    for edit in (_cut_in, _round_trip):
        try:
            edited = edit(text, root, changes)
            if _is_changed_so(config, _read(edited)[1], changes):
                return edited
        except (_CannotCutError, _UnreadableError):
            continue
    return None


# -- writing in place ---------------------------------------------------------------------


def _cut_in(text: str, root: yaml.Node | None, changes: Mapping[Place, object]) -> str:
    """Change the text only where the values stand."""
    if not isinstance(root, yaml.MappingNode):
        raise _CannotCutError
    edits: list[Edit] = []
    new_at_root: dict[Place, object] = {}
    for name, members in _by_group(changes).items():
        pair = _find(root, name)
        if (name,) in members:
            if pair is None:
                new_at_root[(name,)] = members[(name,)]
            else:
                edits.append(_replace(text, *pair, members[(name,)]))
        elif pair is None:
            new_at_root.update(members)
        else:
            edits += _edit_group(text, *pair, {place[1]: value for place, value in members.items()})
    if new_at_root:
        edits.append(_insert(text, root, _nested(new_at_root)))
    return _apply(text, edits)


def _by_group(changes: Mapping[Place, object]) -> dict[str, dict[Place, object]]:
    groups: dict[str, dict[Place, object]] = {}
    for place, value in changes.items():
        groups.setdefault(place[0], {})[place] = value
    return groups


def _edit_group(
    text: str, key: yaml.Node, group: yaml.Node, members: dict[str, object]
) -> list[Edit]:
    alias = _alias(text, key, group)
    if alias is not None:
        # The group is shared with another place: take it over and add to it.
        start, end = alias
        inner = ", ".join(f"{name}: {_flow(value)}" for name, value in members.items())
        return [(start, end, f"{{<<: {text[start:end]}, {inner}}}")]
    if not isinstance(group, yaml.MappingNode):  # empty
        return [_replace(text, key, group, members)]
    edits: list[Edit] = []
    new: dict[str, object] = {}
    for name, value in members.items():
        pair = _find(group, name)
        if pair is None:
            new[name] = value
        else:
            edits.append(_replace(text, *pair, value))
    return [*edits, _insert(text, group, new)] if new else edits


def _find(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Find a key; of several that are equal the last one counts, as in Hermes."""
    found = None
    for key, value in mapping.value:
        if isinstance(key, yaml.ScalarNode) and key.value == name:
            found = (key, value)
    return found


def _replace(text: str, key: yaml.Node, node: yaml.Node, value: object) -> Edit:
    """Put a value in the place of the one that stands there."""
    alias = _alias(text, key, node)
    if alias is not None:
        return (*alias, _flow(value))
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and isinstance(value, list):
        return _replace_block_list(text, node, value)
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        end = _end(text, node)
    properties = _PROPERTIES.match(text, start, end)
    anchors = [] if properties is None else re.findall(r"&\S+", properties[0])
    written = " ".join([*anchors, _flow(value)])
    if start == end:  # the empty value after a colon
        written = " " + written
    if isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
        written += _line_end(text) if text[start:end].endswith("\n") else ""
    return start, end, written


def _replace_block_list(text: str, node: yaml.SequenceNode, value: list[object]) -> Edit:
    """Rewrite a list from its first item that differs, so that notes on the others stay."""
    items, column = node.value, node.start_mark.column
    if not text.startswith("-", node.start_mark.index):
        raise _CannotCutError
    kept = 0
    while kept < min(len(items), len(value)) and items[kept].value == value[kept]:
        kept += 1
    lines = [f"- {_flow(item)}" for item in value[kept:]]
    end = _end(text, node)
    line_end = _line_end(text) + " " * column
    if kept == 0:
        return node.start_mark.index, end, line_end.join(lines) or " []"
    start = _end_of_line(text, _end(text, items[kept - 1]))
    return start, max(start, end), "".join(line_end + line for line in lines)


def _insert(text: str, mapping: yaml.MappingNode, new: Mapping[str, object]) -> Edit:
    """Add keys to a mapping, at its end where it is written as a block."""
    if mapping.flow_style:
        properties = _PROPERTIES.match(text, mapping.start_mark.index)
        start = (mapping.start_mark.index if properties is None else properties.end()) + 1
        inner = ", ".join(f"{name}: {_flow(value)}" for name, value in new.items())
        return start, start, inner + (", " if mapping.value else "")
    column, line_end = _column(text, mapping), _line_end(text)
    lines = [" " * column + line for line in _block(new).rstrip("\n").split("\n")]
    end = _end(text, mapping)
    if text[:end].endswith("\n"):  # after a block scalar
        return end, end, "".join(line + line_end for line in lines)
    end = _end_of_line(text, end)
    return end, end, "".join(line_end + line for line in lines)


def _column(text: str, mapping: yaml.MappingNode) -> int:
    """Where the lines of a block mapping begin; its own mark may stand at its anchor or tag."""
    start = mapping.start_mark
    first = start if text[start.index] not in "&!" else mapping.value[0][0].start_mark
    return int(first.column)


def _end(text: str, node: yaml.Node) -> int:
    """Where the last character of a node ends; the parser puts a block's end after comments."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    if isinstance(node, yaml.MappingNode):
        key, last = node.value[-1]
        alias = _alias(text, key, last)
        return _end(text, last) if alias is None else alias[1]
    last = node.value[-1]
    if last.start_mark.index < node.start_mark.index:
        raise _CannotCutError  # an alias; its own place is not known
    return _end(text, last)


def _alias(text: str, key: yaml.Node, value: yaml.Node) -> tuple[int, int] | None:
    """Where an alias stands that a key has as its value; its node lies where the anchor is."""
    if value.start_mark.index >= key.end_mark.index:
        return None
    found = _ALIAS.match(text, key.end_mark.index)
    if found is None:
        raise _CannotCutError
    return found.span(1)


def _end_of_line(text: str, start: int) -> int:
    found = re.compile(r"\r?\n|\Z").search(text, start)
    assert found is not None, "every text has an end"
    return found.start()


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _apply(text: str, edits: list[Edit]) -> str:
    parts, position = [], 0
    for start, end, new in sorted(edits, key=lambda edit: edit[0]):
        if start < position:
            raise _CannotCutError
        parts += [text[position:start], new]
        position = end
    return "".join([*parts, text[position:]])


# -- writing anew -------------------------------------------------------------------------


def _round_trip(text: str, _root: yaml.Node | None, changes: Mapping[Place, object]) -> str:
    """Write the whole file again, with its comments."""
    library = ruamel.yaml.YAML(typ="rt")
    library.preserve_quotes = True
    library.width = _LONGEST_LINE
    written = io.StringIO()
    try:
        data = library.load(text)
        for place, value in changes.items():
            target = data
            if len(place) > 1:
                if data.get(place[0]) is None:
                    data[place[0]] = {}
                target = data[place[0]]
            target[place[-1]] = value
        library.dump(data, written)
    except (ruamel.yaml.error.YAMLError, *_ODD) as error:
        raise _CannotCutError from error
    return written.getvalue()


def _nested(values: Mapping[Place, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for place, value in values.items():
        if len(place) == 1:
            nested[place[0]] = value
            continue
        group = nested.setdefault(place[0], {})
        assert isinstance(group, dict)
        group[place[1]] = value
    return nested


def _block(values: Mapping[str, object]) -> str:
    """Write keys as lines; groups one level deep, lists in one line."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {inner}: {_flow(below)}" for inner, below in value.items())]
        else:
            lines.append(f"{name}: {_flow(value)}")
    return "".join(line + "\n" for line in lines)


def _flow(value: object) -> str:
    """Write a value in one line that is valid everywhere in a YAML text."""
    if isinstance(value, str):
        return _flow_text(value)
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(below)}" for name, below in value.items()) + "}"
    return str(value).lower()  # true, false, or a number


def _flow_text(value: str) -> str:
    # Quoted twice over, what is not printable is escaped; otherwise it may break the line.
    style = None if value.isprintable() else '"'
    dumped = yaml.safe_dump(
        [value], default_flow_style=True, default_style=style, allow_unicode=True,
        width=_LONGEST_LINE,
    )  # fmt: skip
    return dumped.rstrip("\n").removeprefix("[").removesuffix("]")
