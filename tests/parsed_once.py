"""TileLang rewrites a function's source whenever `T.prim_func` or `T.macro` decorates it, and `T.reduce_sum` decorates
one at each call: three quarters of the time of a test that builds a small kernel. Tests build the same kernels a
thousand times, for other sizes; here each is rewritten once, and then bound to what it closes over.

It also asks for a function's source twice, and writes what it has rewritten as text, for messages. TVM takes the source
of a function or module apart twice, the second time for messages; asks a registry how each node of it is copied; and
compiles each expression, and each one within it, to evaluate them.

TVM's arrays, of which kernels are made, look at their length and at what an index may be for each element of a walk.

TVMScript's decorators ask for the source around every frame of the stack, and look at that of the nearest few: below
pytest a hundred frames are an eighth of the time that collecting tests takes. Here the others have none."""

import ast
import builtins
import importlib
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import tilelang.language.eager.ast as rewriting
import tilelang.language.eager.builder as builder
from tilelang.language.eager import utils
from tilelang.language.eager.ast import IRGenerator, mutate
from tilelang.language.eager.utils import get_func_nonlocals
from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.diagnostics import Source
from tvm_ffi import container

_DECORATORS = (
    "tvm.script.parser.ir.entry",
    "tvm.relax.script.parser.entry",
    "tvm.tirx.script.parser.entry",
    "tilelang.language.tir.entry",
)
_DOC_KINDS = {
    getattr(ast, name): (kind, tuple(kind._FIELDS))
    for name, kind in vars(doc.doc).items()
    if isinstance(kind, type) and issubclass(kind, doc.doc.AST) and hasattr(ast, name)
}
_compiled_value, _registered_doc_tree = evaluator._eval_expr, doc.to_doc
_rewritten: dict[tuple[Any, ...], tuple[list[str], IRGenerator[..., Any]]] = {}


def mutate_once(func: Callable[..., Any]) -> IRGenerator[..., Any]:
    """What TileLang's `mutate(func)` gives: that depends on the text, and the globals and names that it refers to."""
    code, values = func.__code__, get_func_nonlocals(func)
    key = (code, code.co_filename, tuple(values), id(func.__globals__))
    text = linecache.getlines(code.co_filename)
    known = _rewritten.get(key)
    if known is None or known[0] is not text:
        known = _rewritten[key] = (text, mutate(func))
        return known[1]
    first = known[1]
    cells = tuple(CellType(values[name]) for name in first.gen.__code__.co_freevars)
    gen = FunctionType(first.gen.__code__, first.gen.__globals__, first.gen.__name__, None, cells)
    return IRGenerator(gen, first.source, first.extra_type_hints)


def tree_of(func: Callable[..., Any]) -> ast.Module:
    """What TileLang's `get_ast(func)` gives: the function's tree, with the lines that it has in its file."""
    lines, start = inspect.getsourcelines(func)
    source = "\n" * (start - 1) + utils._remove_leading_ident("".join(lines))
    return ast.parse(source, filename=os.path.abspath(inspect.getsourcefile(func) or inspect.getfile(func)))


@dataclass(frozen=True)
class Unparsed:
    """The text of a tree, when somebody asks."""

    tree: ast.AST

    def __str__(self) -> str:
        return ast.unparse(self.tree)


def unparsed(tree: ast.AST) -> str | Unparsed:
    """What `ast.unparse(tree)` gives; of a module, later."""
    return Unparsed(tree) if isinstance(tree, ast.Module) else ast.unparse(tree)


def source_tree(source: Source) -> doc.AST:
    """What TVM's `source.as_ast()` gives."""
    if "tree" not in vars(source):
        source.tree = doc.parse(source.source)
    return source.tree


def doc_tree(node: Any) -> Any:
    """What TVM's `to_doc(node)` gives, of what Python's parser makes."""
    if isinstance(node, ast.AST):
        kind, fields = _DOC_KINDS[type(node)]
        return kind(**{field: doc_tree(getattr(node, field, None)) for field in fields})
    return [doc_tree(item) for item in node] if isinstance(node, list) else node


def value_of(node: Any, names: dict[str, Any] | None) -> Any:
    """What TVM's `_eval_expr(node, names)` gives, which compiles the expression."""
    part = _PARTS.get(type(node))
    return _compiled_value(node, names) if part is None or not _is_plain(node) else part(node, names or {})


def _is_plain(node: Any) -> bool:
    """Whether the parts of an expression are evaluated, each by itself."""
    parts = [*getattr(node, "args", ()), *getattr(node, "elts", ())]
    keywords = [keyword.arg for keyword in getattr(node, "keywords", ())]
    return doc.Starred not in map(type, parts) and None not in keywords and len(set(keywords)) == len(keywords)


def _named(node: Any, names: dict[str, Any]) -> Any:
    if node.id in names:
        return names[node.id]
    return getattr(builtins, node.id) if hasattr(builtins, node.id) else _compiled_value(node, names)


def _called(node: Any, names: dict[str, Any]) -> Any:
    func, args = value_of(node.func, names), [value_of(arg, names) for arg in node.args]
    return func(*args, **{keyword.arg: value_of(keyword.value, names) for keyword in node.keywords})


_PARTS: dict[type, Callable[[Any, dict[str, Any]], Any]] = {
    doc.Name: _named,
    doc.Constant: lambda node, names: node.value,
    doc.Attribute: lambda node, names: getattr(value_of(node.value, names), node.attr),
    doc.Subscript: lambda node, names: value_of(node.value, names)[value_of(node.slice, names)],
    doc.Tuple: lambda node, names: tuple(value_of(item, names) for item in node.elts),
    doc.List: lambda node, names: [value_of(item, names) for item in node.elts],
    doc.Call: _called,
}


def elements_of(array: container.Array) -> Iterator[Any]:
    """What walking an array of TVM gives."""
    for index in range(len(array)):
        yield container._ffi_api.ArrayGetItem(array, index)


def near_stack(near: int = 4) -> list[inspect.FrameInfo]:
    """What `inspect.stack()` gives, with source for the nearest frames alone."""
    return [_told(frame, at < near) for at, frame in enumerate(_frames(sys._getframe(1)))]


def _told(frame: FrameType, with_source: bool) -> inspect.FrameInfo:
    """A frame and its line, straight from the file: `inspect` asks all modules first which of them it is."""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getlines(code.co_filename, frame.f_globals)[line - 1 : line] if with_source else []
    return inspect.FrameInfo(frame, code.co_filename, line, code.co_name, text or None, 0 if text else None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def install() -> None:
    """From now on, in this process."""
    builder.mutate = mutate_once
    utils.get_ast = tree_of
    rewriting.ast = _like(ast, unparse=unparsed)
    Source.as_ast = source_tree
    doc.to_doc, evaluator._eval_expr = doc_tree, value_of
    container.Array.__iter__ = elements_of
    nearby = _like(inspect, stack=near_stack)
    for decorators in _DECORATORS:
        vars(importlib.import_module(decorators))["inspect"] = nearby


def _like(module: ModuleType, **others: Any) -> ModuleType:
    """A module as another one, but for these names."""
    made = ModuleType(module.__name__)
    vars(made).update(vars(module), **others)
    return made
