"""Blocks inside of a kernel (`T.sblock`), with variables of their own for places (`T.axis.spatial(10, j)`), a condition
(`T.where`), and what they read and write.

They become blocks that only hold memory: the places stand where their variables stood, the condition is a branch, and
what is read and written is what statements say.
"""

from __future__ import annotations

from tvm import tirx

from .nodes import is_const, nodes


def with_plain_blocks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with plain blocks; those with an init or parts of other buffers are left, which are refused."""
    if all(map(_is_plain, nodes(func.body, tirx.SBlockRealize))):
        return func
    return func.with_body(tirx.stmt_functor.ir_transform(func.body, None, _plain, ["tirx.SBlockRealize"]))


def _is_plain(realize: tirx.SBlockRealize) -> bool:
    block = realize.block
    declared = len(block.iter_vars) or len(block.reads) or len(block.writes)
    return is_const(realize.predicate, 1) and not declared


def _plain(realize: tirx.SBlockRealize) -> tirx.SBlockRealize | None:
    block = realize.block
    if _is_plain(realize) or block.init is not None or len(block.match_buffers):
        return None
    places = {iter_var.var: at for iter_var, at in zip(block.iter_vars, realize.iter_values, strict=True)}
    body = tirx.stmt_functor.substitute(block.body, places)
    if not is_const(realize.predicate, 1):
        body = tirx.IfThenElse(realize.predicate, body, None)
    plain = tirx.SBlock(
        [], [], [], block.name_hint, body, None, block.alloc_buffers, [], block.annotations
    )  # fmt: skip
    return tirx.SBlockRealize([], True, plain)
