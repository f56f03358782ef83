"""`config.yaml` and the settings that travel: merged in place, and read back."""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING

import pytest
import ruamel.yaml
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpkfs.core.config import HEADER, MAX_CONFIG_CHARACTERS, extract, merge
from hpkfs.core.portable import DEFAULT, Portable

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHER = Portable("m-2", ("web", "files"), 200, False, False, 4_000, 3_000)
TURNS = dataclasses.replace(DEFAULT, max_turns=200)
TOOLS = dataclasses.replace(DEFAULT, toolsets=("hermes-cli", "web"))

NOTE = "# note"
SLOW_PARSERS = settings(max_examples=60, deadline=None)

HERMES = """\
# my agent
model: m-1   # the small one
toolsets:
- hermes-cli   # always
- web

# how long it may work
agent:
  max_turns: 90      # enough
  reasoning: 'high'
mcp_servers: {files: {command: "npx", args: [-y, files]}}
memory:
  provider: pubky
  # the notes
  memory_char_limit: 2200
"""


def merged(text: str, portable: Portable, base: Portable | None = None) -> str:
    """Merge, and check what holds for every merge."""
    result = merge(text, portable, base)
    assert merge(result, portable, base) == result, "not idempotent"
    return result


# -- what a merge writes --------------------------------------------------------------------


def test_without_a_file_one_is_generated_with_every_setting() -> None:
    text = merged("", OTHER)
    assert text.startswith(HEADER)
    assert extract(text, DEFAULT) == (OTHER, [])


def test_a_generated_file_names_no_model_where_hermes_is_to_choose() -> None:
    text = merged("", DEFAULT)
    assert "model" not in yaml.safe_load(text)
    assert extract(text, DEFAULT) == (DEFAULT, [])


def test_a_file_of_comments_keeps_them_and_gets_every_setting() -> None:
    text = merged("# mine", OTHER)
    assert text.startswith("# mine\n")
    assert extract(text, DEFAULT) == (OTHER, [])


@pytest.mark.parametrize("text", [HERMES, "{}\n", "logs: {level: debug}\n", "model: ''\n"])
def test_a_file_in_which_nothing_differs_is_left_alone(text: str) -> None:
    base = extract(text, DEFAULT)[0]
    assert merge(text, base, None) is text
    assert merge(text, base, base) is text


def test_only_the_values_that_differ_are_written() -> None:
    assert (
        merged(HERMES, OTHER)
        == """\
# my agent
model: m-2   # the small one
toolsets:
- web
- files

# how long it may work
agent:
  max_turns: 200      # enough
  reasoning: 'high'
mcp_servers: {files: {command: "npx", args: [-y, files]}}
memory:
  provider: pubky
  # the notes
  memory_char_limit: 4000
  memory_enabled: false
  user_profile_enabled: false
  user_char_limit: 3000
"""
    )


def test_a_setting_that_the_checkpoint_did_not_change_keeps_its_local_edit() -> None:
    text = "agent:\n  max_turns: 7\nmodel: mine\n"
    theirs = dataclasses.replace(DEFAULT, model="theirs")
    assert merged(text, theirs, DEFAULT) == "agent:\n  max_turns: 7\nmodel: theirs\n"


def test_a_default_is_not_written_where_the_file_is_silent() -> None:
    assert merged("logs: x\n", TURNS) == "logs: x\nagent:\n  max_turns: 200\n"


def test_a_list_keeps_the_notes_on_the_items_that_stay() -> None:
    text = "toolsets:\n  - hermes-cli  # always\n  - old  # now and then\n# end\n"
    assert merged(text, TOOLS) == (
        "toolsets:\n  - hermes-cli  # always\n  - web  # now and then\n# end\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("toolsets:\n- a\n- b\nx: 1\n", "toolsets:\n- hermes-cli\n- web\nx: 1\n"),
        ("toolsets:\n- hermes-cli\nx: 1\n", "toolsets:\n- hermes-cli\n- web\nx: 1\n"),
        ("toolsets:\n- hermes-cli", "toolsets:\n- hermes-cli\n- web"),
        ("toolsets: [a]  # c\n", "toolsets: [hermes-cli, web]  # c\n"),
        ("toolsets: [\n  a,\n  b ]\n", "toolsets: [hermes-cli, web]\n"),
        ("toolsets: []\n", "toolsets: [hermes-cli, web]\n"),
        ("toolsets:\n", "toolsets: [hermes-cli, web]\n"),
        ("toolsets: ~ # none\n", "toolsets: [hermes-cli, web] # none\n"),
        ("toolsets: hermes-cli\n", "toolsets: [hermes-cli, web]\n"),
        ("toolsets: {a: b}\n", "toolsets: [hermes-cli, web]\n"),
    ],
)
def test_a_list_is_written_in_the_shape_that_stands_there(text: str, expected: str) -> None:
    assert merged(text, TOOLS) == expected


@pytest.mark.parametrize("text", ["toolsets:\n- a\n- b\nx: 1\n", "toolsets:\n  - a\nx: 1\n"])
def test_a_list_may_become_empty(text: str) -> None:
    nothing = dataclasses.replace(DEFAULT, toolsets=())
    result = merged(text, nothing)
    assert yaml.safe_load(result) == {"toolsets": [], "x": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("agent:\n    # deep\n    a: 1  # one\n# end\nb: 2\n",
         "agent:\n    # deep\n    a: 1  # one\n    max_turns: 200\n# end\nb: 2\n"),
        ("agent: {a: 1, max_turns: 5}\n", "agent: {a: 1, max_turns: 200}\n"),
        ("agent: {a: 1}\n", "agent: {max_turns: 200, a: 1}\n"),
        ("agent: {}\n", "agent: {max_turns: 200}\n"),
        ("agent:\nb: 2\n", "agent: {max_turns: 200}\nb: 2\n"),
        ("agent: null # c\n", "agent: {max_turns: 200} # c\n"),
        ("agent:\n  max_turns:\n  b: 2\n", "agent:\n  max_turns: 200\n  b: 2\n"),
        ("agent:\n  a: |\n    text\n\n    more\nb: 2\n",
         "agent:\n  a: |\n    text\n\n    more\n  max_turns: 200\nb: 2\n"),
        ("agent:\n  max_turns: 90", "agent:\n  max_turns: 200"),
        ("agent:\n  a: 1", "agent:\n  a: 1\n  max_turns: 200"),
        ("agent:\r\n  a: 1\r\nb: 2\r\n", "agent:\r\n  a: 1\r\n  max_turns: 200\r\nb: 2\r\n"),
        ("---\nagent: {}\n...\n", "---\nagent: {max_turns: 200}\n...\n"),
        ("---\nb: 2\n...\n", "---\nb: 2\nagent:\n  max_turns: 200\n...\n"),
        ("%YAML 1.1\n---\nb: 2\n", "%YAML 1.1\n---\nb: 2\nagent:\n  max_turns: 200\n"),
        ("\ufeffb: 2\n", "\ufeffb: 2\nagent:\n  max_turns: 200\n"),
        ('{"agent": {"max_turns": 90}}', '{"agent": {"max_turns": 200}}'),
        ('{"a": 1}\n', '{agent: {max_turns: 200}, "a": 1}\n'),
        ('"agent":\n  "max_turns": 0x5a\n', '"agent":\n  "max_turns": 200\n'),
        ("agent:\n  max_turns: !!int '90'\n", "agent:\n  max_turns: 200\n"),
        ("agent:\n  max_turns: many\n", "agent:\n  max_turns: 200\n"),
        ("agent:\n  max_turns: 1\n  max_turns: 2\n", "agent:\n  max_turns: 1\n  max_turns: 200\n"),
        ("a: &t 90\nagent:\n  max_turns: *t\n", "a: &t 90\nagent:\n  max_turns: 200\n"),
        ("d: &d {x: 1}\nagent: *d  # same\n",
         "d: &d {x: 1}\nagent: {<<: *d, max_turns: 200}  # same\n"),
        ("d: &d {max_turns: 5}\nagent:\n  <<: *d\n",
         "d: &d {max_turns: 5}\nagent:\n  <<: *d\n  max_turns: 200\n"),
        ("agent: &g\n  a: 1\nother: x\n", "agent: &g\n  a: 1\n  max_turns: 200\nother: x\n"),
        ("agent: &g {a: 1}\n", "agent: &g {max_turns: 200, a: 1}\n"),
    ],
)  # fmt: skip
def test_a_value_is_written_where_it_stands_or_belongs(text: str, expected: str) -> None:
    assert merged(text, TURNS) == expected


def test_an_anchor_stays_on_a_value_that_changes() -> None:
    text = "agent:\n  max_turns: &turns 90\n"
    assert merged(text, TURNS) == "agent:\n  max_turns: &turns 200\n"


def test_a_value_shared_by_an_anchor_changes_in_its_own_place_only() -> None:
    text = "# top\nagent:\n  max_turns: &turns 90\nother: *turns  # as above\n"
    result = merged(text, TURNS)
    assert yaml.safe_load(result) == {"agent": {"max_turns": 200}, "other": 90}
    assert "# top" in result


@pytest.mark.parametrize("scalar", ["|\n  m-1\n  x\n", ">-\n  m-1\n", '"m\\\n  -1"\n', "m\n  -1\n"])
def test_a_model_over_several_lines_is_replaced(scalar: str) -> None:
    assert merged(f"model: {scalar}x: 1\n", OTHER).startswith("model: m-2\nx: 1\n")


@pytest.mark.parametrize(
    "model",
    ["{default: m-1, provider: custom}", "\n  default: m-1  # mine\n  base_url: http://x\n",
     "[a, b]", "5", "true", "2026-01-01"],
)  # fmt: skip
def test_a_model_that_is_no_plain_text_is_never_replaced(model: str) -> None:
    text = f"model: {model}\nlogs: x\n"
    theirs = dataclasses.replace(DEFAULT, model="theirs")
    assert merge(text, theirs, None) is text
    assert merge(text, theirs, DEFAULT) is text
    both = merged(text, dataclasses.replace(theirs, max_turns=200))
    assert both == text + "agent:\n  max_turns: 200\n"


@pytest.mark.parametrize(
    "text",
    ["agent: [1, 2]\n", "agent: off\n", "- a\n- b\n", "just a text\n", "a: [\n", "a: b: c\n",
     "\t- x\n", "a: *missing\n", "a: 1\n---\nb: 2\n", "a: \udce9\n", "a: \x00\n", "a: 2026-13-45\n",
     "&a [*a]\n", "? [x]\n: 1\n", "!!python/object:os.system {}\n", "x: 1\n" + "[" * 5_000],
)  # fmt: skip
def test_what_cannot_be_edited_is_left_alone(text: str) -> None:
    assert merge(text, TURNS, None) is text
    assert extract(text, OTHER)[0] == OTHER


def test_an_endless_or_exploding_file_is_left_alone() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    for text in ("\n".join(lines) + "\n", "a: " + "x" * MAX_CONFIG_CHARACTERS):
        assert merge(text, TURNS, None) is text
        portable, problems = extract(text, OTHER)
        assert portable == OTHER
        assert len(problems) == 1


# -- what is read back ----------------------------------------------------------------------


def test_settings_are_read_as_hermes_reads_them() -> None:
    text = "memory: {memory_enabled: off, user_profile_enabled: yes}\nagent: {max_turns: 0x10}\n"
    expected = dataclasses.replace(DEFAULT, memory_enabled=False, max_turns=16)
    assert extract(text, DEFAULT) == (expected, [])


def test_an_absent_or_empty_value_is_the_stored_one() -> None:
    for text in ("", "# nothing\n", "x: 1\n", "agent:\nmemory: {}\nmodel:\ntoolsets: ~\n"):
        assert extract(text, OTHER) == (OTHER, [])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("agent: {max_turns: 5000}", "agent.max_turns"),
        ("agent: {max_turns: 0}", "agent.max_turns"),
        ("agent: {max_turns: '90'}", "agent.max_turns"),
        ("agent: {max_turns: true}", "agent.max_turns"),
        ("agent: {max_turns: 90.0}", "agent.max_turns"),
        ("agent: [1]", "agent"),
        ("memory: {memory_enabled: 1}", "memory.memory_enabled"),
        ("memory: {user_char_limit: 64001}", "memory.user_char_limit"),
        ("toolsets: hermes-cli", "toolsets"),
        ("toolsets: [1]", "toolsets"),
        ("toolsets: [' ']", "toolsets"),
        ("model: 5", "model"),
        ("model: [a]", "model"),
        ("model: " + "m" * 1_025, "model"),
    ],
)
def test_a_wrong_value_is_named_and_the_stored_one_stays(line: str, name: str) -> None:
    portable, problems = extract(f"{line}\nlogs: x\n", OTHER)
    assert portable == OTHER
    assert len(problems) == 1
    assert f"`{name}` " in problems[0]


def test_a_wrong_value_does_not_hide_the_others() -> None:
    portable, problems = extract("model: m-9\nagent: {max_turns: x}\n", DEFAULT)
    assert portable == dataclasses.replace(DEFAULT, model="m-9")
    assert len(problems) == 1


def test_a_model_that_is_a_mapping_stays_local_without_a_word() -> None:
    assert extract("model: {default: m}\n", OTHER) == (OTHER, [])


def test_an_unreadable_file_is_named_with_its_line_and_never_quoted() -> None:
    portable, problems = extract("a: 1\napi_key: [sk-123\n", OTHER)
    assert portable == OTHER
    assert len(problems) == 1
    assert "line 3" in problems[0]
    assert "sk-123" not in problems[0]


# -- properties -----------------------------------------------------------------------------

texts = st.one_of(
    st.sampled_from(["yes", "null", "~", "1", "1.5", "a: b", "# x", "x #y", " x ", "'", '"', "- a",
                     "[", "{", "*a", "&a", "!x", "%", "@", "`", "2026-01-01", "=", "<<", "a\nb",
                     "a\r\nb", "\u2028", "\x85", "\ufeff", "é", "😀", "\x7f", "\t", "a,b", "---",
                     "...", "\x00", "?", ":", "-", "x" * 100 + " " + "y" * 100]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)  # fmt: skip
portables = st.builds(
    Portable,
    model=texts,
    toolsets=st.lists(texts.filter(str.strip).map(lambda t: t[:128]), max_size=4).map(tuple),
    max_turns=st.sampled_from([1, 90, 200, 1_000]),
    memory_enabled=st.booleans(),
    user_profile_enabled=st.booleans(),
    memory_char_limit=st.sampled_from([1, 2_200, 64_000]),
    user_char_limit=st.sampled_from([1, 1_375, 64_000]),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-5, 5_000), st.floats(), texts)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
known = {
    "model": st.one_of(texts, values),
    "toolsets": st.one_of(st.lists(texts, max_size=4), values),
    "agent": st.one_of(
        st.fixed_dictionaries({}, optional={"max_turns": scalars, "other": values}), values
    ),
    "memory": st.one_of(
        st.fixed_dictionaries(
            {}, optional={"memory_enabled": scalars, "user_char_limit": scalars, "provider": values}
        ),
        values,
    ),
}
configs = st.tuples(
    st.fixed_dictionaries({}, optional=known), st.dictionaries(texts, values, max_size=3)
).map(lambda parts: {**parts[1], **parts[0]})


@st.composite
def files(draw: st.DrawFn) -> str:
    """A configuration as one of the two libraries writes it, with comments strewn in."""
    config = draw(configs)
    if draw(st.booleans()):
        text = yaml.safe_dump(
            config,
            sort_keys=draw(st.booleans()),
            allow_unicode=draw(st.booleans()),
            default_flow_style=draw(st.sampled_from([None, True, False])),
            indent=draw(st.sampled_from([2, 4, 8])),
            explicit_start=draw(st.booleans()),
        )
    else:
        library = ruamel.yaml.YAML()
        library.indent(mapping=2, sequence=4, offset=draw(st.sampled_from([0, 2])))
        written = io.StringIO()
        library.dump(config, written)
        text = written.getvalue()
    lines = text.split("\n")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines)))
        lines.insert(at, draw(st.sampled_from(["", NOTE, f"    {NOTE}", "  "])))
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines)


def reach(config: Mapping[str, object], group: str, name: str) -> object:
    inner = config.get(group)
    return inner.get(name) if isinstance(inner, dict) else None


@SLOW_PARSERS
@given(files(), portables, st.none() | portables)
def test_a_merge_changes_nothing_but_settings(
    text: str, portable: Portable, base: Portable | None
) -> None:
    result = merge(text, portable, base)
    assert merge(result, portable, base) == result
    try:
        before = yaml.safe_load(text)
    except yaml.YAMLError:
        assert result == text or not text.strip()
        return
    after = yaml.safe_load(result)
    if not isinstance(before, dict):
        assert before is None or result == text
        return
    ours = {"model", "toolsets", "agent", "memory"}
    assert repr({k: v for k, v in before.items() if k not in ours}) == repr(
        {k: v for k, v in after.items() if k not in ours}
    )
    for group, name in (("agent", "other"), ("memory", "provider")):
        assert repr(reach(before, group, name)) == repr(reach(after, group, name))
    if not isinstance(before.get("model"), str | None):
        assert repr(before["model"]) == repr(after["model"])
    without = "".join(line for line in text.splitlines(keepends=True) if line.strip() != NOTE)
    is_comment = repr(load(without)) == repr(before)  # and not a part of a quoted text
    if is_comment and not isinstance(before.get("toolsets"), list | dict):
        assert count_notes(result) == count_notes(text)


def load(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def count_notes(text: str) -> int:
    return sum(line.strip() == NOTE for line in text.splitlines())


@SLOW_PARSERS
@given(files(), portables)
def test_what_was_merged_is_read_back(text: str, portable: Portable) -> None:
    read, problems = extract(merge(text, portable, None), portable)
    assert read == portable or problems


@SLOW_PARSERS
@given(files(), portables, portables)
def test_a_local_edit_survives_a_checkpoint_that_changes_nothing(
    text: str, base: Portable, other: Portable
) -> None:
    assert merge(text, base, base) == text or not text.strip()
    assert extract(text, other) == extract(text, other)


@SLOW_PARSERS
@given(st.one_of(st.text(), st.text("ab:-[]{}&*!|>'\"#%@ \n\t,?<=~")), portables)
@example("agent: &a\n  <<: *a\n", TURNS)
@example("? agent\n: max_turns: 1\n", TURNS)
@example("agent: !!map {a: 1,}\n", TURNS)
@example("{agent: {a: 1,},}\n", TURNS)
def test_any_text_is_survived(text: str, portable: Portable) -> None:
    result = merge(text, portable, None)
    assert merge(result, portable, None) == result
    read, problems = extract(result, portable)
    assert read == portable or problems or result == text
