"""save_module and load_module: modules in files, also those that another TVM saved, as JSON or as TVMScript text."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import tilelang
import tvm
from tvm import ir, relax, tirx

from mesh_tensor.annotations.combination import states_combinations
from mesh_tensor.annotations.names import check_module
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.version import __version__

from .saved_json import BadModule, checked, parse
from .saved_probe import FileForm, tried
from .weight_files import checked_path

#: Of the header that save_module writes, under the key `mesh_tensor`.
FORMAT = 1
_HEADER, _CHECKSUM = "mesh_tensor", "sha256"
_EXTENSIONS: dict[str, FileForm] = {".json": "json", ".py": "tvmscript", ".txt": "tvmscript", ".tvmscript": "tvmscript"}
_FIX = "save it with mt.save_module(mod, path), or with another TVM from 0.20 on as tvm.ir.save_json(mod)"


def save_module(mod: ir.IRModule, path: str | os.PathLike[str]) -> None:
    """Write a module to a file as JSON, with a checksum and the versions that it is of; `load_module` reads it, and so
    does `tvm.ir.load_json`. The file is there whole, or as it was before.

    Raises:
        MeshTensorError: `mod` is no module, the file's name does not end in .json, or it can't be written.
    """
    check_module(mod, "save_module")
    path = checked_path(path, "save_module")
    if path.suffix != ".json":
        refuse(f"{str(path)!r} does not end in .json", fix="name it so: load_module goes by that")
    document = json.loads(ir.save_json(mod))
    header = {"format": FORMAT, "mesh_tensor": __version__, "tilelang": tilelang.__version__, "tvm": tvm.__version__}
    header[_CHECKSUM] = _checksum(header, checked(document))
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder, path.name)
            written.write_text(json.dumps({_HEADER: header, **document}, ensure_ascii=False), encoding="utf-8")
            os.replace(written, path)
    except OSError as error:
        refuse(f"{str(path)!r} can't be written", why=str(error), fix="choose another folder")


def load_module(path: str | os.PathLike[str], *, format: FileForm | None = None, trusted: bool = False) -> ir.IRModule:
    """The module in a file: JSON (`mt.save_module`, or `tvm.ir.save_json` of tilelang's TVM or of apache-tvm 0.25), or
    TVMScript text (`mod.script(show_meta=True)`, or as a person writes it: one class or function, without its imports).

    JSON is never evaluated. It is checked before TVM sees it; what has no checksum of ours is first loaded in a process
    of its own, which takes some seconds once per process. TVMScript is evaluated in that process.

    Args:
        path: the file.
        format: "json" or "tvmscript"; by default what the extension says: .json, or .py, .txt and .tvmscript.
        trusted: you would run the file as a program. TVMScript needs it, for it is evaluated like Python.

    Raises:
        MeshTensorError: there is no such file, it is damaged, it holds no module or several, it is TVMScript that is
            not trusted, or it is of a format that this TVM can't read.
    """
    path = checked_path(path, "load_module")
    kind = _format_of(path, format)
    if not path.is_file():
        refuse(f"there is no file {str(path)!r}", fix="pass the path of a saved module")
    if kind == "tvmscript" and not trusted:
        refuse(
            f"{str(path)!r} is TVMScript, which is evaluated like Python",
            why="a file can do there whatever a program can",
            fix="pass trusted=True if you would run it as a program; or have it saved as JSON, by mt.save_module",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        refuse(f"{str(path)!r} is no text", why=str(error), fix=_FIX)
    except OSError as error:
        refuse(f"{str(path)!r} can't be read", why=str(error), fix="check its permissions")
    loaded = _of_json(text, path) if kind == "json" else _of_text(text, path)
    if isinstance(loaded, (relax.Function, tirx.PrimFunc)):
        return ir.IRModule.from_expr(loaded)
    if not isinstance(loaded, ir.IRModule):
        refuse(f"{str(path)!r} holds a {type(loaded).__name__}, which is no module", fix=_FIX)
    return loaded


def _format_of(path: Path, given: str | None) -> FileForm:
    known = listing(sorted(set(_EXTENSIONS.values())))
    if given is None:
        if path.suffix not in _EXTENSIONS:
            refuse(
                f"the extension of {str(path)!r} does not say what it is",
                why=f"known are {listing(list(_EXTENSIONS))}",
                fix=f"pass format=, one of {known}",
            )
        return _EXTENSIONS[path.suffix]
    if given not in _EXTENSIONS.values():
        refuse(f"unknown format {given!r}", fix=f"use one of {known}")
    return given  # type: ignore[return-value]


def _of_json(text: str, path: Path) -> object:
    try:
        document = parse(text)
    except BadModule as error:
        refuse(f"{str(path)!r} is no JSON", why=str(error), fix=_FIX)
    versions = f"saved by TVM {_maker(document)}; this is {tvm.__version__}"
    try:
        checked_text = checked(document)
    except BadModule as error:
        refuse(f"{str(path)!r} is no JSON of a module", where=versions, why=str(error), fix=_FIX)
    is_ours = _vouched_for(document, checked_text, path)
    if not is_ours:
        _refuse_combinations(checked_text, path)
    problem = "" if is_ours else tried("json", checked_text).problem
    loaded: object = None
    if not problem:
        try:
            loaded = ir.load_json(checked_text)
        except Exception as error:  # what TVM meets in a graph of objects that it doesn't know
            problem = str(error).strip() or type(error).__name__
    if problem:
        problem = problem.splitlines()[-1]
        refuse(f"{str(path)!r} holds a module that can't be read", where=versions, why=problem, fix=_FIX)
    return loaded


def _of_text(text: str, path: Path) -> object:
    answer = tried("tvmscript", source_of(text, path))
    problem = answer.problem
    if not problem:
        try:
            text = checked(parse(answer.text))
            _refuse_combinations(text, path)
            return ir.load_json(text)
        except BadModule as error:
            problem = str(error)
    return refuse(f"{str(path)!r} can't be parsed as TVMScript", why=problem, fix=FIX_OF_TEXT)


def _refuse_combinations(text: str, path: Path) -> None:
    """What a file says was tried, nobody has tried here."""
    if states_combinations(text):
        refuse(
            f"{str(path)!r} has a kernel that states how states combine (mt.combine)",
            why="that is taken as the kernel's author has it, and the file is not as mt.save_module left it",
            fix="save it with mt.save_module(mod, path), or build the kernel again here",
        )


def _vouched_for(document: dict[str, Any], text: str, path: Path) -> bool:
    """Whether save_module wrote the file, and nothing has changed since."""
    if _HEADER not in document:
        return False
    header = document[_HEADER]
    found = header.get("format") if isinstance(header, dict) else None
    if found != FORMAT:
        refuse(
            f"{str(path)!r} is of format {found!r:.80}, and mesh_tensor {__version__} reads format {FORMAT}",
            fix="update mesh_tensor, or save the module again with this one",
        )
    if header.get(_CHECKSUM) != _checksum(header, text):
        refuse(
            f"{str(path)!r} is damaged: it is not what its checksum was made of",
            fix="get it again from where it came from; after a change by hand, remove its key 'mesh_tensor'",
        )
    return True


def _checksum(header: dict[str, Any], text: str) -> str:
    stated = sorted((name, str(value)) for name, value in header.items() if name != _CHECKSUM)
    return hashlib.sha256(json.dumps([stated, text]).encode()).hexdigest()


def _maker(document: dict[str, Any]) -> str:
    metadata = document.get("metadata") or document.get("attrs")  # older TVMs call it attrs
    version = metadata.get("tvm_version") if isinstance(metadata, dict) else None
    return version[:40] if isinstance(version, str) else "an unknown version"


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
