"""Modules as TVMScript text, also as another TVM prints them, or as people write it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mesh_tensor.base.errors import listing, refuse

FIX_OF_TEXT = (
    "save it as mod.script(show_meta=True), with TVM 0.20 or later; TileLang's kernels by mt.save_module: the parser "
    "does not know all words of their text"
)
# Newer TVMs mark functions as schedulable with it; older ones call blocks otherwise.
_MARK = re.compile(r",?\s*\bs_tir\s*=\s*(True|False)\b")
_OLD_BLOCKS = (
    ("T.block(", "T.sblock("),
    ("T.block_attr(", "T.sblock_attr("),
    ("T.alloc_buffer(", "T.sblock_alloc_buffer("),
)


def source_of(text: str, path: Path) -> str:
    """What the parser of this TVM takes of a text: the metadata and the one definition, in today's words and in the
    lines where they were."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        fix = "correct it there" if isinstance(error, SyntaxError) else FIX_OF_TEXT
        refuse(f"{str(path)!r} is no TVMScript", why=_why_not_python(error), fix=fix)
    defined = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.decorator_list]
    if not defined:
        refuse(
            f"{str(path)!r} has no @I.ir_module class in it",
            why="a decorated class or function is read, and the constants beside it; nothing else in the file is run",
            fix="write the module as one `@I.ir_module class ...:`; of one that Python code makes, save what it makes: "
            "mt.save_module(mod, path)",
        )
    if len(defined) != 1:
        names = listing([node.name for node in defined])
        refuse(f"{str(path)!r} holds {len(defined)} modules ({names}), not one", fix="put each in a file of its own")
    lines = text.splitlines()
    kept = [node for node in tree.body if isinstance(node, ast.Assign) or node in defined]
    parts: list[str] = []
    for node in kept:
        first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
        parts += [""] * (first - 1 - len(parts))
        parts += lines[first - 1 : node.end_lineno]
    return _in_todays_words("\n".join(parts))


def _why_not_python(error: Exception) -> str:
    if not isinstance(error, SyntaxError) or error.lineno is None:
        return str(error)
    line = f": {error.text.strip():.80}" if error.text else ""
    return f"{type(error).__name__}: {error.msg} (line {error.lineno}{line})"


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
