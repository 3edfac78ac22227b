"""Names of a package that are imported when they are first used, as the package's stub lists them."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def names_of(package: str, init: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for the package whose `__init__.py` is the file `init`. What its
    `__init__.pyi` imports (`from .module import name`, `from .package import module`) is what it has."""
    homes = dict(_homes(Path(init).with_suffix(".pyi").read_text(encoding="utf-8")))

    class Package(ModuleType):
        """The package: importing a module of it doesn't hide a public name that is called alike."""

        def __setattr__(self, name: str, value: Any) -> None:
            if not (homes.get(name) and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        home = importlib.import_module(f"{package}.{homes[name] or name}")
        found: Any = home
        if homes[name]:  # a name in a module, or a module in a package
            found = getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{home.__name__}.{name}")
        vars(sys.modules[package])[name] = found
        return found

    names = sorted(homes)
    return get, lambda: sorted({*vars(sys.modules[package]), *names}), names


def _homes(stub: str) -> list[tuple[str, str]]:
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return [(alias.name, node.module or "") for node in imports for alias in node.names]
