"""The house rules: what is installed, and who may import whom (ARCHITECTURE.md, "Layers")."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "mmserve": "mmserve",
    "preprocess": "mmserve.preprocess",
    "encoders": "mmserve.encoders",
    "engine": "mmserve.engine",
    "models": "mmserve.models",
    "demos": "mmserve.demos",
}
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

# What each layer may import beside itself. "mmserve" stands for the outermost layer: server, command line.
MAY_IMPORT = {
    "mmserve.core": set(),
    "mmserve.preprocess": {"mmserve.core"},
    "mmserve.models": {"mmserve.core"},
    "mmserve.encoders": {"mmserve.core", "mmserve.models"},
    "mmserve.engine": {"mmserve.core", "mmserve.models", "mmserve.encoders"},
    "mmserve": {"mmserve.core", "mmserve.preprocess", "mmserve.models", "mmserve.encoders", "mmserve.engine"},
    "mmserve.demos": {"mmserve"},
}
# The core keeps to the standard library and four packages; the preprocessing workers never load torch.
CORE_PACKAGES = {"numpy", "msgspec", "zmq", "prometheus_client", "mmserve"}
NO_TORCH = ("mmserve.core", "mmserve.preprocess", "mmserve.engine.scheduler")


def modules() -> list[tuple[str, Path]]:
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(p for p in inner if p != "__init__")])
            found.append((name, path))
    return found


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; say `from mmserve...`"
            names.add(node.module)
    return names


def layer(name: str) -> str:
    return max((p for p in MAY_IMPORT if name == p or name.startswith(p + ".")), key=len)


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_module_imports_only_what_its_layer_may(name: str, path: Path) -> None:
    allowed = MAY_IMPORT[layer(name)] | {layer(name)}
    for target in imports(path):
        assert target.split(".")[0] not in FOLDERS.keys() - {"mmserve"}, f"{name}: bare import of {target}"
        if target.split(".")[0] == "mmserve" and target != "mmserve":
            assert layer(target) in allowed, f"{name} ({layer(name)}) may not import {target}"


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_module_keeps_torch_and_foreign_packages_out(name: str, path: Path) -> None:
    roots = {target.split(".")[0] for target in imports(path)}
    if name.startswith(NO_TORCH):
        assert not roots & {"torch", "transformers"}, name
    if layer(name) == "mmserve.core":
        assert roots <= CORE_PACKAGES | set(sys.stdlib_module_names), name


def test_every_package_is_installed() -> None:
    packages = {name for name, path in modules() if path.name == "__init__.py"}
    assert packages == set(SETUPTOOLS["packages"])


def test_every_code_folder_is_a_package() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent


def test_site_packages_gains_one_name() -> None:
    assert {p.split(".")[0] for p in SETUPTOOLS["packages"]} == {"mmserve"}


def test_import_is_cheap() -> None:
    heavy = ["torch", "transformers", "av", "cv2", "PIL", "fastapi", "uvicorn"]
    code = f"import mmserve, mmserve.core.messages, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.strip() == "[]"
