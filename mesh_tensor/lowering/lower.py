"""lower, and the same as a TVM pass."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx, transform

from mesh_tensor.annotations.annotate import INFO_ATTR
from mesh_tensor.base.errors import MeshTensorError

from .assemble import as_module, assemble
from .pipeline import lower_kernel

# A pass is called through TVM's C++: what it raises comes out as the class that is registered under its name.
tvm_ffi.register_error("MeshTensorError", MeshTensorError)


def lower(func: tirx.PrimFunc, *, strict: bool = False, view: str = "auto") -> ir.IRModule:
    """Lower an annotated TileLang kernel in global view to local view.

    Args:
        func: the kernel, annotated by `annotate` or `annotate_mesh_tensor_info`.
        strict: refuse what would have to be gathered or exchanged instead of moving it.
        view: `global` for a kernel over whole tensors, `local` for one that sizes its loops with `get_tile_shape` and
            so is over tiles already, `auto` to see it from the loops.

    Returns:
        A module with one function over tiles. Collectives are `mesh.*` calls in blocks named for them. After the
        kernel's own parameters come the sizes that no tile tells, then the device's coordinates that the kernel uses.

    Raises:
        MeshTensorError: no or invalid annotations, not one TileLang kernel, or refused by `strict`.
    """
    return as_module(lower_kernel(func, strict=strict, view=view))


def LowerToLocalView(*, strict: bool = False) -> transform.Pass:
    """`lower` as a pass: every annotated function of a module is lowered, the others stay as they are."""

    @transform.module_pass(opt_level=0, name="mesh_tensor.LowerToLocalView")
    def run(mod: ir.IRModule, _: transform.PassContext) -> ir.IRModule:
        functions = {}
        for name, func in mod.functions.items():
            annotated = isinstance(func, tirx.PrimFunc) and func.attrs is not None and INFO_ATTR in func.attrs
            functions[name] = assemble(lower_kernel(func, strict=strict)) if annotated else func
        return ir.IRModule(functions, attrs=mod.attrs)

    return run
