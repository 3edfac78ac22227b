"""Collectives in TIR: registered operators in the `mesh.` namespace, each in a block named for it.

    with T.sblock("all_reduce"):
        T.evaluate(mesh.all_reduce(src_region, dst_region, op, axis, ...))
    with T.sblock("all_gather"):
        T.evaluate(mesh.all_gather(src_region, dst_region, src_dim, axis, ...))

`reduce_scatter` has the operation and then the dim it scatters, `all_to_all` the dim it gathers and the one it splits,
`slice` the dim it splits, `to_partial` the operation, `permute` and `exchange` the layouts before and after as texts.
The axes come last, in mesh order.
"""

from __future__ import annotations

from tvm import ir, tirx

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.tir.rewrite import region_call

#: Every collective that the language has; a broadcast is there for kernels' authors and for runtimes.
NAMES = (*COLLECTIVES, "broadcast")


def register() -> None:
    """Make the operators known to TVM; doing so again changes nothing."""
    for name in NAMES:
        full = f"mesh.{name}"
        if full not in ir.Op.list_op_names():
            ir._ffi_api.RegisterOp(full, f"mesh collective {name}")
            ir.register_op_attr(full, "TCallEffectKind", tirx.CallEffectKind.Opaque.value)
            ir.register_op_attr(full, "TScriptPrinterName", full)


def collective_block(move: Move, src: tirx.Buffer, dst: tirx.Buffer, before: Sharding | None = None) -> tirx.Stmt:
    """The block that turns `src` into `dst`. Of a permute or an exchange, `before` says how `src` lies."""
    args: list[object] = [_whole(src, 1), _whole(dst, 2)]
    if COLLECTIVES[move.kind].is_direct:
        args += [tirx.StringImm(str(before)), tirx.StringImm(str(move.after))]
    if move.op is not None:
        args.append(tirx.StringImm(move.op))
    args += [dim for dim in (move.src_dim, move.dst_dim) if dim is not None]
    args += [tirx.StringImm(axis) for axis in move.axes]
    call = tirx.Call(
        "handle", ir.Op.get(f"mesh.{move.kind}"), [tirx.convert(a) if isinstance(a, int) else a for a in args]
    )
    block = tirx.SBlock([], [], [], move.kind, tirx.Evaluate(call))
    return tirx.SBlockRealize([], tirx.const(True, "bool"), block)


def _whole(buffer: tirx.Buffer, mode: int) -> tirx.Call:
    return region_call(buffer, [tirx.IntImm("int32", 0)] * len(buffer.shape), buffer.shape, mode)


register()
