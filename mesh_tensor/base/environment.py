"""What mesh_tensor finds around it, looked at before TileLang is imported: versions, the folder of its cache, and other
TVMs. TileLang brings its own; one imported before it crashes the process's next `import`."""

from __future__ import annotations

import ast
import atexit
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "TILELANG_CACHE_DIR"
_PYTHON = (3, 10)
_REQUIREMENT = re.compile(r"([\w.-]+)\s*\(?([<>=!~,.\s\d]*)\)?$")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def check_versions() -> None:
    """Raise an ImportError with the way out if Python or what mesh_tensor is built on is too old, or too new."""
    problems = []
    if sys.version_info < _PYTHON:
        problems.append(f"Python {'.'.join(map(str, _PYTHON))} or newer, and this is {sys.version.split()[0]}")
    fixes = []
    for name, bounds in _requirements():
        found = _installed(name)
        if found is not None and not _within(found, bounds):
            problems.append(f"{name} {bounds}, and {found or 'none'} is installed")
            fixes.append(f'"{name}{bounds}"')
    if problems:
        fix = f"`pip install {' '.join(fixes)}`" if fixes else "use a newer Python"
        raise ImportError("\n".join([*(f"mesh_tensor needs {problem}" for problem in problems), f"  fix: {fix}"]))


def check_cache_folder() -> None:
    """Where TileLang's cache can't be, which its import would die of, a temporary folder takes its place."""
    if "tilelang" in sys.modules:
        return
    folder = os.environ.get(CACHE_VARIABLE) or os.path.expanduser("~/.tilelang/cache")
    try:
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(os.path.join(folder, _installed("tilelang") or "-")):
            return  # what is there already can be read
        raise PermissionError(13, os.strerror(13), folder)
    except OSError as error:
        os.environ[CACHE_VARIABLE] = temporary_folder()
        warn_of_cache(folder, error)


def temporary_folder() -> str:
    """A folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="mesh_tensor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def warn_of_cache(folder: str | os.PathLike[str], error: OSError) -> None:
    """Say that nothing can be kept in the cache's folder, and what to do."""
    warnings.warn(
        f"compiled kernels can't be kept in {os.fspath(folder)} ({error.strerror or error}): they are gone when this "
        f"process ends; set {CACHE_VARIABLE} to a folder with space that can be written",
        stacklevel=3,
    )


def _requirements() -> list[tuple[str, str]]:
    """What the installed mesh_tensor states that it needs: names and bounds."""
    try:
        stated = importlib.metadata.requires("mesh-tensor") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources, without being installed
        return []
    matches = [_REQUIREMENT.match(text.strip()) for text in stated if ";" not in text]
    return [(match[1], match[2].strip()) for match in matches if match]


def _installed(name: str) -> str | None:
    """The version of a package: "" if it is not there, None if that can't be told."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "" if importlib.util.find_spec(name) is None else None


def _within(version: str, bounds: str) -> bool:
    found = _numbers(version)
    checks = {">=": lambda wanted: found >= wanted, "<": lambda wanted: found < wanted}
    return bool(found) and all(checks[kind](_numbers(number)) for kind, number in _BOUND.findall(bounds))


def _numbers(version: str) -> tuple[int, ...]:
    """The release's numbers: 2.13.0+cpu is (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_tvm() -> None:
    """Raise an ImportError with the way out if `tvm` is already imported, and isn't the one that tilelang brings."""
    tvm = sys.modules.get("tvm")
    if tvm is None or "tilelang" in sys.modules:
        return
    path = getattr(tvm, "__file__", None)
    if path is not None and any(root in Path(path).resolve().parents for root in _own_roots()):
        return
    raise ImportError(
        f"mesh_tensor can't be imported: `tvm` was already imported from {path or 'an unknown place'} (apache-tvm?), "
        "but tilelang, which mesh_tensor builds on, brings its own TVM, and one process can't hold two.\n"
        "  fix: `import mesh_tensor` (or `import tilelang`) before anything that imports tvm; `import tvm` then gives "
        "tilelang's TVM.\n"
        "  or: uninstall the other one in this environment: `pip uninstall apache-tvm`."
    )


def _own_roots() -> list[Path]:
    chosen = os.environ.get("TVM_IMPORT_PYTHON_PATH")
    if chosen:
        return [Path(chosen).resolve()]
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).resolve().parent
    return [package / "3rdparty" / "tvm", package.parent / "3rdparty" / "tvm"]


def names_of(package: str, init: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for the package whose `__init__.py` is the file `init`. What its
    `__init__.pyi` imports (`from .module import name`, `from .package import module`) is what it has."""
    homes = dict(_homes(Path(init).with_suffix(".pyi").read_text(encoding="utf-8")))

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
