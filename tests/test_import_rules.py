"""Who may import whom: plugins import core, core imports no plugin, contracts and wire import nothing above them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src" / "pegboard"
PLUGIN_TREES = [p / "src" for p in ROOT.glob("plugins*") if (p / "src").is_dir()]

# package of core -> packages of core that it may import. What is not listed may import all of core.
LAYERS: dict[str, set[str]] = {
    "wire": {"wire"},
    "contracts": {"wire", "contracts"},
    "config": {"wire", "contracts", "config", "plugins"},
    "plugins": {"wire", "contracts", "config", "plugins", "hookspecs"},
    "hookspecs": {"wire", "contracts", "config", "plugins"},
    "engine": {"wire", "contracts", "config", "plugins", "hookspecs", "engine"},
}
# (file, imported package): upward calls made inside a function, each with its reason.
EXCEPTIONS = {
    ("contracts/executor.py", "plugins"),  # Executor.get_class resolves a name to a class
}
FOREIGN = {"torch", "transformers", "pegboard_plugins", "ray", "triton"}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules imported at run time, anywhere in the file; blocks under ``if TYPE_CHECKING`` don't count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module, node.lineno


def top_level_imports(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_core_is_layered() -> None:
    wrong = []
    for path in sorted(CORE.rglob("*.py")):
        relative = path.relative_to(CORE)
        package = relative.parts[0].removesuffix(".py")
        allowed = LAYERS.get(package)
        if allowed is None:
            continue
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] != "pegboard" or len(parts) == 1:
                continue
            if parts[1] not in allowed and (relative.as_posix(), parts[1]) not in EXCEPTIONS:
                wrong.append(f"{relative}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_core_imports_no_plugin_and_no_torch_at_import() -> None:
    wrong = []
    for path in sorted(CORE.rglob("*.py")):
        if "testing" in path.relative_to(CORE).parts:
            continue  # conformance kits of tensor contracts import torch; they are imported by tests only
        wrong += [f"{path}: {m}" for m in top_level_imports(path) if m.split(".")[0] in FOREIGN]
        wrong += [f"{path}:{line}: {m}" for m, line in imports(path) if m.split(".")[0] in FOREIGN - {"torch"}]
    assert not wrong, "\n".join(wrong)


def test_plugins_do_not_import_one_another() -> None:
    packages = {child.name for tree in PLUGIN_TREES for child in tree.iterdir() if (child / "__init__.py").exists()}
    allowed_pair = ("pegboard_executor_ray", "pegboard_executor_mp")
    wrong = []
    for tree in PLUGIN_TREES:
        for path in sorted(tree.rglob("*.py")):
            own = path.relative_to(tree).parts[0]
            for module, line in imports(path):
                other = module.split(".")[0]
                if other in packages and other != own and (own, other) != allowed_pair:
                    wrong.append(f"{path}:{line} imports {module}")
    assert packages
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module", ["pegboard", "pegboard.hookspecs", "pegboard.config", "pegboard.engine.llm_engine", "pegboard.wire"]
)
def test_importing_core_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_contract_module_states_its_version_and_imports_without_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, pegboard.contracts as c\n"
        "names = [m.name for m in pkgutil.iter_modules(c.__path__)]\n"
        "mods = [importlib.import_module(f'pegboard.contracts.{n}') for n in names]\n"
        "assert 'torch' not in sys.modules\n"
        "bare = [m.__name__ for m in mods if not isinstance(getattr(m, 'API', None), int)]\n"
        "assert set(bare) == {'pegboard.contracts.views', 'pegboard.contracts.model_source'}, bare\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_kind_names_a_contract_that_exists() -> None:
    from pegboard.plugins.provider import KINDS, import_target

    assert KINDS
    for kind in KINDS.values():
        contract = import_target(kind.contract)
        assert isinstance(contract, type), kind
        module = sys.modules[contract.__module__]
        assert kind.api == module.API, kind
