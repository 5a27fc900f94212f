"""Chat templates: which one to use, and rendering a conversation with it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.contracts.tokenizer import ChatTemplateError, NoChatTemplate
from pegboard_plugins.tokenizers.chat_messages import plain, prepare_messages

if TYPE_CHECKING:
    from jinja2 import Template, nodes

HOW_TO_GIVE = "give one with the chat_template option: the template's text, or the path of a file that holds it"
_CACHED_TEMPLATES = 32


class ChatTemplates:
    """The templates of one tokenizer, by name. ``override`` is the user's: text, a file's path, or one of the names.

    The user's is compiled at once, so that a mistake shows at start; the model's own when first used, so that a model with a
    broken one still completes text. Raises ``ChatTemplateError``.
    """

    def __init__(self, named: Mapping[str, str], special_tokens: Mapping[str, str], override: str | None = None) -> None:
        self._named = dict(named)
        self._special_tokens = dict(special_tokens)
        self._override: str | None = None
        if override is not None:
            self._override = self._named.get(override) or _read_override(override)
            _compile(self._override)

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        tools: Any = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text. ``chat_template``: a name or a text, for this call. Raises ``ChatTemplateError``."""
        template, content_parts = _compile(self._choose(chat_template, tools))
        if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
            raise ChatTemplateError(f"tools must be a list of objects, got {type(tools).__name__}")
        values = {
            "documents": None,
            **self._special_tokens,
            **{key: plain(value) for key, value in variables.items()},
            "messages": prepare_messages(messages, content_parts=content_parts),
            "tools": plain(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _render(template, values)

    def _choose(self, asked: str | None, tools: Any) -> str:
        if asked is not None:
            return self._named.get(asked, asked)
        if self._override is not None:
            return self._override
        if tools and "tool_use" in self._named:
            return self._named["tool_use"]
        if "default" in self._named:
            return self._named["default"]
        if self._named:
            raise ChatTemplateError(
                f"the model has chat templates named {', '.join(sorted(self._named))} but no default; {HOW_TO_GIVE}"
            )
        raise NoChatTemplate(f"the model has no chat template; {HOW_TO_GIVE}")


def _read_override(value: str) -> str:
    if "{" in value or "\n" in value:  # no template does without a brace
        return value
    path = Path(value).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"chat_template {value!r} is neither a template nor a readable file: {error}") from error


def _render(template: Template, values: dict[str, Any]) -> str:
    import jinja2

    from pegboard_plugins.tokenizers.chat_sandbox import render_bounded

    try:
        return render_bounded(template, values)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template refused the messages: {error.message or type(error).__name__}") from error
    except (RecursionError, MemoryError) as error:
        raise ChatTemplateError(f"the chat template needs too much: {type(error).__name__}") from error
    except Exception as error:  # a template's code can raise anything that Python's operators and methods can
        raise ChatTemplateError(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=_CACHED_TEMPLATES)
def _compile(source: str) -> tuple[Template, bool]:
    """The compiled template, and whether it handles content that is a list of parts."""
    import jinja2

    environment = _environment()
    try:
        template = environment.compile_bounded(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from error
    except SyntaxError as error:  # what only Python's compiler notices, such as {% break %} outside a loop
        raise ChatTemplateError(f"the chat template has a mistake: {error.msg}") from error
    except RecursionError as error:
        raise ChatTemplateError("the chat template is nested too deeply") from error
    return template, handles_parts(environment.parse(source))


@functools.cache
def _environment() -> Any:
    import jinja2

    version = tuple(int(number) for number in re.findall(r"\d+", jinja2.__version__)[:3])
    if version < (3, 1, 6):
        raise ChatTemplateError(f"jinja2 {jinja2.__version__} has known sandbox escapes; pip install 'jinja2>=3.1.6'")
    from pegboard_plugins.tokenizers.chat_sandbox import ChatEnvironment

    return ChatEnvironment()


def handles_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over a message's content. One that merely asks for its type may drop a list or print it raw."""
    from jinja2 import nodes

    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    from jinja2 import nodes

    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
