"""What a kernel may not say, whatever is split: more than one program would mean, or than statements can tell."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.tir import tile_calls
from mesh_tensor.tir.nodes import function_name, loads, nodes

#: Attributes that have what they stand around done once by each of several threads or programs.
_LAUNCHES = frozenset(("thread_extent", "virtual_thread"))


def check_supported(func: tirx.PrimFunc, block: tirx.SBlock) -> None:
    """Refuse what means more than one program of the kernel."""
    where = f"kernel {function_name(func)!r}"
    _check_launches(block, where)
    _check_safe_values(func, block, where)
    _check_parts(block, where)
    _check_casts(func, where)
    found = list(filter(None, map(tile_calls.beyond_regions, nodes(block.body, tirx.Evaluate))))
    if found:
        refuse(
            list(dict.fromkeys(what for what, _ in found)),
            where=where,
            why="tile operations are known by their regions; programs are run one by one, and on several devices",
            fix="; ".join(dict.fromkeys(fix for _, fix in found)),
        )


def _check_launches(block: tirx.SBlock, where: str) -> None:
    """Refuse threads and programs that are launched inside of a program: even where nothing goes by their index, what
    is added is added by each of them."""
    launches = [attr for attr in nodes(block.body, tirx.AttrStmt) if attr.attr_key in _LAUNCHES]
    if launches:
        refuse(
            list(dict.fromkeys(f"T.launch_thread inside of a program ({a.attr_key} {a.value})" for a in launches)),
            where=where,
            why="a program of the grid is one; its threads are TileLang's",
            fix="give T.Kernel one more extent, or write a loop: T.serial, T.Parallel",
        )


def _check_parts(block: tirx.SBlock, where: str) -> None:
    """Refuse what only raw TIR has: conditions inside of accesses, and what blocks do before their first iteration."""
    accesses = nodes(block.body, tirx.BufferLoad, tirx.BufferStore)
    found = [f"an access to {a.buffer.name!r} has a predicate" for a in accesses if a.predicate is not None]
    found += [f"block {b.name_hint!r} has an init" for b in nodes(block.body, tirx.SBlock) if b.init is not None]
    if found:
        why = "what a kernel does is read from its statements alone"
        refuse(list(dict.fromkeys(found)), where=where, why=why, fix="write it as an `if` around a statement")


def _check_casts(func: tirx.PrimFunc, where: str) -> None:
    """Refuse casts that say how they round, or not to saturate: no target looks at that."""
    said = [cast for cast in nodes(func.body, tirx.Cast) if cast.annotations]
    if said:
        refuse(
            list(dict.fromkeys(f"a cast to {cast.dtype} with {_arguments(cast)}" for cast in said)),
            where=where,
            why="casts round to the nearest number, and 8-bit floats saturate",
            fix="leave that out: T.cast(value, dtype)",
        )


def _arguments(cast: tirx.Cast) -> str:
    """What `T.cast` was told, as it was."""
    texts = {key: "False" if key == "sat" else str(value) for key, value in sorted(cast.annotations.items())}
    return ", ".join(f"{key}={text}" for key, text in texts.items())


def _check_safe_values(func: tirx.PrimFunc, block: tirx.SBlock, where: str) -> None:
    """Refuse values outside a buffer that single loads would have to give: those give 0."""
    asked = safe_buffers(func.buffer_map.values(), block)
    if not asked:
        return
    single: list[tirx.Buffer] = []
    for node in nodes(block.body, tirx.BufferStore, tirx.IfThenElse, tirx.Bind):
        value = node.condition if isinstance(node, tirx.IfThenElse) else node.value
        single += [load.buffer for load in loads(value)]
    found = [f"T.annotate_safe_value of {b.name!r}, which is read element by element" for b in asked if b in single]
    if found:
        refuse(found, where=where, why="it is supported where T.copy reads", fix="T.copy the block to a shared buffer")


def safe_buffers(buffers: Iterable[tirx.Buffer], block: tirx.SBlock) -> list[tirx.Buffer]:
    """The buffers outside of which `T.copy` reads a value that is not 0, by `T.annotate_safe_value`."""
    safe = block.annotations.get("safe_value_map", {})
    return [buffer for buffer in buffers if buffer.data in safe and not _is_zero(safe[buffer.data])]


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float, tirx.IntImm, tirx.FloatImm)) and float(getattr(value, "value", value)) == 0
