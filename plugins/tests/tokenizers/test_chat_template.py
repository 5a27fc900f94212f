"""Which chat template is used, what it gets, and what happens when it is missing, broken or does too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.tokenizer import ChatTemplateError
from pegboard_plugins.tokenizers.chat_template import ChatTemplates

USER = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}).render(messages, **options)


def test_without_a_template_the_error_says_how_to_give_one() -> None:
    templates = ChatTemplates({}, {})
    with pytest.raises(ChatTemplateError, match="has no chat template; give one with the chat_template option: the template's"):
        templates.render(USER)
    assert templates.render(USER, chat_template="{{ messages[0].content }}") == "hi"


def test_the_option_is_a_text_a_file_or_a_name(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("file: {{ messages[0].content }}")
    named = {"default": "default", "other": "other"}
    for option, expected in (
        ("text: {{ messages[0].content }}", "text: hi"),
        (str(path), "file: hi"),
        ("other", "other"),
        (None, "default"),
    ):
        assert ChatTemplates(named, {}, option).render(USER) == expected
    with pytest.raises(ChatTemplateError, match=r"'absent.jinja' is neither a template nor a readable file"):
        ChatTemplates(named, {}, "absent.jinja")


def test_a_syntax_error_in_the_option_shows_at_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("line one\n{% for m in messages %}\n{{ m. }}\n{% endfor %}")
    with pytest.raises(ChatTemplateError, match="mistake in line 3"):
        ChatTemplates({}, {}, str(path))


def test_a_broken_template_of_the_model_shows_when_it_is_used() -> None:
    templates = ChatTemplates({"default": "{% if %}"}, {})
    with pytest.raises(ChatTemplateError, match="mistake in line 1"):
        templates.render(USER)


def test_tools_choose_the_template_for_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert templates.render(USER) == "plain"
    assert templates.render(USER, tools=[]) == "plain"
    assert templates.render(USER, tools=[{"name": "f"}]) == "tools"
    assert templates.render(USER, chat_template="tool_use") == "tools"
    with pytest.raises(ChatTemplateError, match="named rag but no default"):
        ChatTemplates({"rag": "x"}, {}).render(USER)
    with pytest.raises(ChatTemplateError, match="tools must be a list"):
        templates.render(USER, tools={"name": "f"})


def test_what_a_template_can_use() -> None:
    assert render("{{ bos_token }}{{ add_generation_prompt }}{{ documents }}{{ eos_token }}") == "<s>TrueNone"
    assert render("{{ bos_token }}", bos_token="<b>") == "<b>"
    assert render("{{ tools|tojson }}", tools=[{"f": "<é>"}]) == '[{"f": "<é>"}]'
    assert render("{{ {'a': 1}|tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}") == "3"
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert render("{% macro m(x) %}[{{ x ~ 1 }}]{% endmacro %}{{ m('a') }}{{ m('b') }}") == "[a1][b1]"
    assert render("{{ '%s, {}'|format('a') }}{{ '{:>3}'.format('b') }}{{ 'x-y'.replace('-', '+') }}") == "a, {}  bx+y"
    assert render("{{ messages[0].reasoning_content }}", [{"role": "a", "content": "", "reasoning": "so"}]) == "so"


def test_content_parts_are_joined_for_templates_that_know_only_texts() -> None:
    assert render("{{ messages[0].content }}", PARTS) == "a\nb"
    assert render("{% for part in messages[0]['content'] %}<{{ part.text }}>{% endfor %}", PARTS) == "<a><b>"
    assert render("{% set c = messages[0].content %}{% for part in c %}<{{ part.text }}>{% endfor %}", PARTS) == "<a><b>"
    only_asks = "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}"
    assert render(only_asks, PARTS) == "a\nb"


def test_a_call_of_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    assert render("{{ 'content' in messages[0] }} {{ messages[0].tool_calls[0].function.arguments.x }}", [call]) == "False 1"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (None, "got NoneType"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*USER, {"content": "x"}], r"messages\[1\] needs a role"),
        ([{"role": 3, "content": "x"}], "got 3"),
        ([{"role": "", "content": "x"}], "needs a role"),
        ([{"role": "user"}], r"messages\[0\] \(user\) has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 7}], "must be a text or a list of parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'"),
        ([{"role": "user", "content": "x", "name": object()}], "object cannot be given"),
    ],
)
def test_bad_messages_are_named(messages: Any, expected: str) -> None:
    with pytest.raises(ChatTemplateError, match=expected):
        render("{{ messages[0].content }}", messages)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].absent.further }}", "absent"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "loops more than"),
        ("{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}{% endmacro %}{{ a(99) }}", "loops more than"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ 'x' * 10**10 }}", "10000000000 characters"),
        ("{{ [0] * 10**10 }}", "10000000000 characters"),
        ("{{ (10**9)**(10**9) }}", "characters or items"),
        ("{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", "characters"),
        ("{% set n = namespace(s='xy') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "characters"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "the limit is"),
        ("{{ 'x'|center(10**9) }}", "width or count of 1000000000"),
        ("{{ 'x'.ljust(10**9) }}", "width or count"),
        ("{{ ('a' * 9999)|replace('a', 'b' * 9999) }}", "characters"),
        ("{{ ('a' * 9999).replace('a', 'b' * 9999) }}", "characters"),
        ("{{ '{:>999999999}'.format('x') }}", "width above"),
        ("{{ '{:{}}'.format('x', 10**9) }}", "width above"),
        ("{{ '%999999999d' % 1 }}", "width above"),
        ("{{ '%*d'|format(10**9, 1) }}", "width above"),
        ("{{ lipsum(n=10**9) }}", "lipsum"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set n = namespace(__class__=1) %}", "__class__"),
        ("{% break %}", "mistake"),
    ],
)
def test_templates_are_sandboxed_and_bounded(template: str, expected: str) -> None:
    with pytest.raises(ChatTemplateError, match=expected):
        render(template)


def test_rendering_does_not_change_the_messages() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
    render("{{ messages[0].role }}", messages)
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
