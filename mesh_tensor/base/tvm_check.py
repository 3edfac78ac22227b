"""TileLang brings its own TVM; another one imported before it crashes the process's next `import tilelang`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


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
