"""Write one page per contract into docs/contracts from the contracts' own docstrings and signatures.

    python scripts/contract_pages.py           # write
    python scripts/contract_pages.py --check   # exit 1 if a page is missing, stale or has no contract any more

Signatures are read from the source, without importing what a contract needs.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from generated_pages import write_or_check

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "core" / "src" / "pegboard" / "contracts"
PAGES = ROOT / "docs" / "contracts"


def signature(node: ast.FunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def marks(node: ast.FunctionDef) -> str:
    names = [ast.unparse(d) for d in node.decorator_list]
    found = [
        word
        for word, test in [
            ("required", any("abstractmethod" in n for n in names)),
            ("property", any(n.endswith("property") for n in names)),
            ("class method", "classmethod" in names),
            ("static", "staticmethod" in names),
        ]
        if test
    ]
    found += [f"group `{n[5:-2]}`" for n in names if n.startswith("rpc(")]
    return f" *({', '.join(found)})*" if found else ""


def method_section(node: ast.FunctionDef) -> list[str]:
    lines = [f"- `{signature(node)}`{marks(node)}"]
    doc = ast.get_docstring(node)
    if doc:
        lines += [""] + ["  " + line if line else "" for line in inspect.cleandoc(doc).splitlines()] + [""]
    return lines


def class_section(node: ast.ClassDef) -> list[str]:
    bases = ", ".join(f"`{ast.unparse(b)}`" for b in node.bases if "ABC" not in ast.unparse(b))
    lines = [f"## {node.name}" + (f" ({bases})" if bases else ""), "", ast.get_docstring(node) or "", ""]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    for item in fields:
        value = f" = {ast.unparse(item.value)}" if item.value is not None else ""
        lines.append(f"- `{ast.unparse(item.target)}: {ast.unparse(item.annotation)}{value}`")
    if fields:
        lines.append("")
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name in {"_init_executor", "_shutdown"}):
            lines += method_section(item)
    return [*lines, ""]


def page(path: Path) -> str:
    tree = ast.parse(path.read_text())
    lines = [f"# {path.stem}", "", f"`pegboard.contracts.{path.stem}`", "", ast.get_docstring(tree) or "", ""]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            lines += class_section(node)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def index(pages: dict[str, str]) -> str:
    rows = [f"| [{name}]({name}.md) | {text.splitlines()[4]} |" for name, text in sorted(pages.items())]
    return "\n".join(
        [
            "# Contracts",
            "",
            "What each kind of part must do. These pages are made from the source by `scripts/contract_pages.py`.",
            "",
            "| contract | |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> int:
    pages = {path.stem: page(path) for path in sorted(SOURCE.glob("*.py")) if path.stem != "__init__"}
    wanted = {f"{name}.md": text for name, text in pages.items()} | {"README.md": index(pages)}
    return write_or_check(PAGES, wanted)


if __name__ == "__main__":
    sys.exit(main())
