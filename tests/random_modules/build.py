"""From the text of a random module to the module."""

from __future__ import annotations

import contextlib
import io
from functools import lru_cache

import tvm
from tvm import ir

from .spec import Case


@lru_cache(maxsize=32)
def build(source: str) -> ir.IRModule:
    """The module that `source` defines."""
    return tvm.script.from_source(source)


def typed(case: Case) -> ir.IRModule | None:
    """The module with R.DTensor types for all parameters of main, where TVM's parser takes it so."""
    text = case.source
    size = 1
    for parts in case.mesh.values():
        size *= parts
    for param in case.params:
        stated = case.shardings.get(param.name, {})
        if not isinstance(stated, dict) or "partial" in stated:
            stated = {}
        placement = ", ".join(f"S[{stated[axis]}]" if axis in stated else "R" for axis in case.mesh)
        plain = f'{param.name}: R.Tensor({param.shape}, "{param.dtype}")'
        text = text.replace(plain, f'{param.name}: R.DTensor({param.shape}, "{param.dtype}", "mesh[0]", "{placement}")')
    head = f'    I.module_global_infos({{"mesh": [R.device_mesh({tuple(case.mesh.values())}, I.Range(0, {size}))]}})\n'
    text = text.replace("class Module:\n", "class Module:\n" + head)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return build(text)
        except tvm.error.DiagnosticError:
            return None
