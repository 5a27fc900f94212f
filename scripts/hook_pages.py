"""Write one page per hook into docs/hooks from the docstrings and signatures in hookspecs.py.

python scripts/hook_pages.py           # write
python scripts/hook_pages.py --check   # exit 1 if a page is missing, stale or has no hook any more
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from generated_pages import write_or_check

from pegboard.plugins.provider import KINDS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "core" / "src" / "pegboard" / "hookspecs.py"
PAGES = ROOT / "docs" / "hooks"


@dataclass(frozen=True)
class Hook:
    """``group`` is the section of hookspecs.py that it stands in."""

    name: str
    signature: str
    first: bool
    doc: str
    group: str

    @property
    def summary(self) -> str:
        return " ".join(self.doc.split("\n\n")[0].split("```")[0].split())


def hooks() -> list[Hook]:
    text = SOURCE.read_text()
    headings = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith("# -- ")]
    found = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        group = [line for number, line in headings if number < node.lineno][-1]
        first = any("firstresult=True" in ast.unparse(d) for d in node.decorator_list)
        signature = f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}" if node.returns else ""
        found.append(Hook(node.name, signature, first, ast.get_docstring(node) or "", re.sub(r"^# -- |[ -]+$", "", group)))
    return found


def page(hook: Hook) -> str:
    lines = [f"# {hook.name}", "", "```python", hook.signature, "```", ""]
    if hook.first:
        lines += ["The first answer other than `None` counts.", ""]
    lines.append(hook.doc.strip())
    kind = next((k for k in KINDS.values() if k.hook == hook.name), None)
    if kind is not None:
        module = kind.contract.partition(":")[0].rpartition(".")[2]
        lines += ["", f"What the part must do: [{module}](../contracts/{module}.md), version {kind.api}."]
        lines += [f"`pegboard plugins show {kind.name}` lists what is installed."]
    return "\n".join([*lines, ""])


def index(found: list[Hook]) -> str:
    lines = [
        "# Hooks",
        "",
        "Everything that a plugin can do. [plugins.md](../plugins.md) says how to write one; these pages are made from",
        "`pegboard/hookspecs.py` by `scripts/hook_pages.py`, and every example on them runs in the tests.",
    ]
    group = None
    for hook in found:
        if hook.group != group:
            group = hook.group
            lines += ["", f"## {group[0].upper()}{group[1:]}", "", "| hook | |", "| --- | --- |"]
        lines.append(f"| [{hook.name}]({hook.name}.md) | {hook.summary} |")
    return "\n".join([*lines, ""])


def main() -> int:
    found = hooks()
    wanted = {f"{h.name}.md": page(h) for h in found} | {"README.md": index(found)}
    return write_or_check(PAGES, wanted)


if __name__ == "__main__":
    sys.exit(main())
