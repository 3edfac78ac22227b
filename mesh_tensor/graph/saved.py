"""load_module: a module from a file, TVMScript or JSON, also one that another TVM saved."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import tvm.script
from tvm import ir, relax, tirx

from ..errors import listing, refuse

_FIX = "save it with TVM 0.20 or later, as tvm.ir.save_json(mod) or mod.script(show_meta=True)"
_KERNELS = "; TileLang's kernels as JSON: the parser does not know all words of their text"
# Newer TVMs mark functions as schedulable with it; older ones call blocks otherwise.
_MARK = re.compile(r",?\s*\bs_tir\s*=\s*(True|False)\b")
_OLD_BLOCKS = (
    ("T.block(", "T.sblock("),
    ("T.block_attr(", "T.sblock_attr("),
    ("T.alloc_buffer(", "T.sblock_alloc_buffer("),
)


def load_module(path: str | os.PathLike[str]) -> ir.IRModule:
    """The module in a file: JSON (`tvm.ir.save_json`) or TVMScript text (`mod.script(show_meta=True)`, or as a person
    writes it: one class or function; imports are left out), of tilelang's TVM or of apache-tvm 0.25.

    TVMScript is evaluated like Python: load only files that you would run.

    Raises:
        MeshTensorError: there is no such file, it holds no module or several, or is of a format that this TVM can't
            read.
    """
    path = Path(path)
    if not path.is_file():
        refuse(f"there is no file {str(path)!r}", fix="pass the path of a saved module")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        refuse(f"{str(path)!r} is no text", why=str(error), fix=_FIX)
    loaded = _of_json(text, path) if text.lstrip().startswith("{") else _of_script(text, path)
    if isinstance(loaded, (relax.Function, tirx.PrimFunc)):
        return ir.IRModule.from_expr(loaded)
    if not isinstance(loaded, ir.IRModule):
        refuse(f"{str(path)!r} holds a {type(loaded).__name__}, which is no module", fix=_FIX)
    return loaded


def _of_json(text: str, path: Path) -> object:
    try:
        version = json.loads(text).get("metadata", {}).get("tvm_version", "an unknown version")
    except (json.JSONDecodeError, AttributeError) as error:
        refuse(f"{str(path)!r} is no JSON of a module", why=str(error), fix=_FIX)
    try:
        return ir.load_json(text)
    except Exception as error:  # what TVM meets in a graph of objects that it doesn't know
        return refuse(
            f"{str(path)!r} can't be read: it was saved by TVM {version}, and this is {tvm.__version__}",
            why=str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__,
            fix=_FIX,
        )


def _of_script(text: str, path: Path) -> object:
    source = _only_definitions(text, path)
    try:
        return tvm.script.from_source(source)
    except Exception as error:  # the parser's diagnostics, and what evaluating raises
        return refuse(f"{str(path)!r} can't be parsed as TVMScript", why=str(error).strip(), fix=_FIX + _KERNELS)


def _only_definitions(text: str, path: Path) -> str:
    """What the parser of this TVM takes: the metadata and the one definition, in today's words."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        refuse(f"{str(path)!r} is neither JSON nor TVMScript", why=str(error), fix=_FIX)
    defined = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.decorator_list]
    if len(defined) != 1:
        names = listing([node.name for node in defined])
        refuse(f"{str(path)!r} holds {len(defined)} modules ({names}), not one", fix="put each in a file of its own")
    lines = text.splitlines()
    kept = [node for node in tree.body if isinstance(node, ast.Assign) or node in defined]
    parts = []
    for node in kept:
        first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return _in_todays_words("\n".join(parts))


def _in_todays_words(source: str) -> str:
    lines = [_unmarked(line) if line.lstrip().startswith("@") else line for line in source.split("\n")]
    source = "\n".join(lines)
    if "T.block(" in source:
        for old, new in _OLD_BLOCKS:
            source = source.replace(old, new)
    return source


def _unmarked(line: str) -> str:
    """A decorator without `s_tir=...`."""
    line = _MARK.sub("", line)
    return re.sub(r"\(\s*,\s*", "(", line)
