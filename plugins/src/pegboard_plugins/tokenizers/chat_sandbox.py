"""The jinja2 environment that chat templates run in: sandboxed and bounded (see ``chat_limits``).

A template comes with a model, from anywhere: it may not reach Python's internals, loop for ever, or build a string that fills
memory. Filters and globals are those that transformers offers, so that templates render alike.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pegboard_plugins.tokenizers.chat_limits import (
    Budget,
    budget,
    check_brace_format,
    check_method,
    check_operator,
    check_percent_format,
    check_replace,
    check_size,
    check_widths,
)

_WIDTH_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")


class GenerationTag(Extension):
    """``{% generation %} … {% endgeneration %}`` marks an assistant's words for training; rendering passes its body through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace`` without underscore names, which reach Python's internals. It looks its attributes up in a dict
    of its own, so methods of this class are called through the class."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        found = dict(*args, **values)
        for name in found:
            _check_attribute(name)
        super().__init__(found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class Bounding(NodeTransformer):
    """Makes every round of a loop and every macro call count, and every concatenation with ``~`` pass a size check."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("count_step"), lineno=node.lineno))
        if node.test is not None:  # items that the test drops are work too
            node.test = nodes.And(_call("count_step"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("count_step"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("join_bounded", *node.nodes)


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One instance serves all templates and threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        for name in _WIDTH_FILTERS:
            self.filters[name] = _checked(self.filters[name], lambda args, kwargs: check_widths((*args[1:], *kwargs.values())))
        self.filters["replace"] = _checked(self.filters["replace"], lambda args, kwargs: check_replace(*map(str, args[:3])))
        self.filters["format"] = _checked(self.filters["format"], lambda args, kwargs: check_percent_format(str(args[0])))
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=Namespace)
        del self.globals["lipsum"]  # random text of any length

    def compile_bounded(self, source: str) -> jinja2.Template:
        """A template whose work counts. Raises ``jinja2.TemplateSyntaxError``."""
        tree = Bounding().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    @staticmethod
    def count_step() -> bool:
        if (running := budget.get()) is not None:
            running.step()
        return True

    @staticmethod
    def join_bounded(*parts: Any) -> str:
        texts = [str(part) for part in parts]
        check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_method(obj, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_brace_format(value.__self__)
        return wrapped


def render_bounded(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The rendered text. Raises ``jinja2.TemplateError``, or whatever a template's operations on the variables raise."""
    token = budget.set(Budget())
    try:
        parts, length = [], 0
        for part in template.generate(variables):
            length += len(part)
            check_size(length)
            parts.append(part)
        return "".join(parts)
    finally:
        budget.reset(token)


def _checked(original: Callable[..., Any], check: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., Any]:
    """A filter that passes ``check(args, kwargs)`` first; a context that jinja2 may hand it is not among ``args``."""
    marker = "jinja_pass_arg"
    extra = 1 if hasattr(original, marker) else 0

    def filter_(*args: Any, **kwargs: Any) -> Any:
        check(args[extra:], kwargs)
        return original(*args, **kwargs)

    if extra:
        setattr(filter_, marker, getattr(original, marker))
    return filter_


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set the attribute {name!r}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
