"""`mesh.fft`: Fourier transforms of complex numbers as pairs of floats, the last dim.

`R.call_pure_packed("mesh.fft", x, "[kind, dims, normalization, option]")`, the arguments of torch's `aten._fft_<kind>`:
`c2c` (option: forwards), `r2c` (of floats; option: half of the spectrum), `c2r` (to floats; option: the last dim's
size).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tvm import relax

from .call import OpCall
from .rule import Dim, LocalCall, OpRule
from .table import rule

FFT = "mesh.fft"


def fft_call(
    x: relax.Expr, kind: str, dims: Sequence[int], normalization: int, option: int, shape: Sequence[int]
) -> relax.Call:
    """A transform along `dims`, counted from the front; the result has this shape."""
    text = relax.StringImm(json.dumps([kind, list(dims), normalization, option]))
    return relax.op.call_pure_packed(FFT, x, text, sinfo_args=[relax.TensorStructInfo(shape, x.struct_info.dtype)])


def fft_arguments(call: OpCall) -> tuple[str, list[int], int, int]:
    """The kind, the dims, the normalization and the option."""
    kind, dims, normalization, option = json.loads(call.literals[-1])
    return kind, dims, normalization, option


@rule(FFT)
def fft(call: OpCall) -> OpRule:
    """All dims but those that are transformed are independent."""
    kind, dims, _, _ = fft_arguments(call)
    count = call.inputs[0].ndim - (kind != "r2c")
    kept: tuple[Dim, ...] = tuple(None if d in dims else f"d{d}" for d in range(count))
    pair: tuple[Dim, ...] = (None,)
    given, made = (kept + pair * (kind != "r2c"), kept + pair * (kind != "c2r"))
    return OpRule((given,), (made,), linear=(frozenset({0}),), localize=_local)


def _local(local: LocalCall) -> relax.Expr:
    info = relax.TensorStructInfo(local.out_tiles[0], local.dtypes[0])
    return relax.op.call_pure_packed(FFT, *local.args, local.call.expr.args[-1], sinfo_args=[info])
