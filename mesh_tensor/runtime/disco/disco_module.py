"""to_disco: the local module as a module that TVM's virtual machine runs on every worker of a Disco session, with the
function that brings its inputs there from worker 0."""

from __future__ import annotations

from typing import Any, NoReturn

from tvm import ir, relax, tirx

from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.errors import refuse
from mesh_tensor.lowering.local_calls import tile_info
from mesh_tensor.plan.explicit import Form
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.rules.operator.call import packed, plain, tensor_infos, tensors_in
from mesh_tensor.targets.torch_ops import has_torch_function, local_operators
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import nodes

WORKER_FUNC = "worker_func"
# What TVM computes as torch does, with NaN, infinities and without. The others differ somewhere: TVM loses NaN in relu
# and max, gives layer_norm the scale that it is not to have, mixes up heads of attention that share keys, reads what
# an index of padding points to, ...
_BY_TVM = """
    acos acosh asin asinh atan atan2 atanh ceil cos erf exp floor isnan log negative round rsqrt sigmoid sign sin sqrt
    square tan tanh trunc nn.gelu nn.gelu_tanh nn.silu nn.softplus nn.softmax nn.log_softmax
    add subtract multiply power equal not_equal greater greater_equal less less_equal
    bitwise_and bitwise_not bitwise_or bitwise_xor logical_and logical_not logical_or logical_xor
    matmul einsum outer nn.conv1d nn.conv3d nn.avg_pool1d nn.avg_pool3d nn.rms_norm nn.group_norm
    sum mean prod variance std cumsum cumprod
    arange eye full full_like ones ones_like zeros zeros_like tril triu
    broadcast_to expand_dims flatten flip permute_dims repeat reshape split squeeze stack strided_slice tile nn.pad
"""
_NOT_IN_C = ("float16", "bfloat", "float8")
BY_TVM = frozenset(_BY_TVM.split())
_TOLD = {f"mesh.{kind}" for kind in COLLECTIVES} | set(local_operators())


def to_disco_module(plan: ModulePlan) -> tuple[ir.IRModule, Any]:
    """The local module with `worker_func`, and what TVM builds of it for the CPU.

    - `worker_func` takes whole tensors on worker 0 (None elsewhere), gets every worker its tile of them (by
      `runtime.disco.broadcast_from_worker0` or `mesh.scatter_from_worker0`), and calls the local function.
    - Collectives and local operators are told the tile that they make.
    - `mesh.operator` is an operator that torch computes: TVM can't build it, gives something else, or reads what lies
      beyond a tensor where padding tells it to.
    - `mesh.kernel` is a TileLang kernel, which every worker compiles.

    Raises:
        MeshTensorError: a function of the module is called worker_func, or TVM can't build the module.
    """
    if WORKER_FUNC in [var.name_hint for var in plan.local_module.functions]:
        refuse(f"the module has a function {WORKER_FUNC!r}", fix="call it something else: Disco's workers call one")
    try:
        return _built(_module(plan, trial=False))
    except Exception:  # TVM has all kinds
        mod = _module(plan, trial=True)
    try:
        return _built(mod)
    except Exception as error:
        _cannot_build(error)


def export(executable: Any, path: str) -> None:
    """Compile what was built to a library that workers load. Refused where the C++ compiler does."""
    try:
        executable.export_library(path, options=["-O3", "-march=native"])
    except Exception as error:
        _cannot_build(error)


def _cannot_build(error: Exception) -> NoReturn:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "error:" in line] or lines[-1:]
    refuse(
        "TVM can't build the local module for the CPU",
        why=reasons[0] if reasons else type(error).__name__,
        fix="run it on the virtual mesh, or on ranks of torch.distributed",
    )


def _built(mod: ir.IRModule) -> tuple[ir.IRModule, Any]:
    return mod, relax.build(mod, target="c")


def _module(plan: ModulePlan, trial: bool) -> ir.IRModule:
    """`trial`: torch computes every operator that TVM can't build alone."""
    local, name = plan.local_module, plan.graph.name
    functions, callee = {}, ir.GlobalVar(name)
    for var, function in local.functions.items():
        var = callee if var.name_hint == name else var
        if isinstance(function, relax.Function):
            functions[var] = _ForVirtualMachine(local, trial).visit_expr(function)
        elif not _is_tilelang(function):
            functions[var] = function
    made = ir.IRModule(functions, attrs=local.attrs)
    relax.expr._update_struct_info(callee, made[callee].struct_info)
    made[WORKER_FUNC] = _worker_func(plan, callee)
    return relax.transform.DeadCodeElimination([WORKER_FUNC, name])(made)


def _worker_func(plan: ModulePlan, callee: ir.GlobalVar) -> relax.Function:
    builder = relax.BlockBuilder()
    params = [relax.Var(form.value.name, relax.ObjectStructInfo()) for form in plan.explicit.params]
    with builder.function(WORKER_FUNC, params):
        with builder.dataflow():
            tiles = [
                builder.emit(_brought(plan, form, param), form.name)
                for form, param in zip(plan.explicit.params, params, strict=True)
            ]
            result = builder.emit_output(relax.Call(callee, tiles))
        builder.emit_func_output(result)
    return builder.get()[WORKER_FUNC]


def _brought(plan: ModulePlan, form: Form, param: relax.Var) -> relax.Expr:
    """A parameter's tile on every worker."""
    tile, layout, shape = tile_info(form, plan.atoms), form.sharding, plan.atoms.shape(form.value)
    if not layout.as_dict() and not layout.partial:
        in_group = relax.PrimValue(1)
        return relax.op.call_dps_packed("runtime.disco.broadcast_from_worker0", [param, in_group], tile)
    args = [param, relax.ShapeExpr(shape), relax.StringImm(layout.text()), tile.shape, relax.StringImm(form.dtype)]
    return packed("mesh.scatter_from_worker0", args, tile)


@relax.expr_functor.mutator
class _ForVirtualMachine(relax.PyExprMutator):
    """Puts calls of what workers have in place of what TVM can't build for them."""

    def __init__(self, mod: ir.IRModule, trial: bool) -> None:
        super().__init__(mod)
        self._mod, self._trial = mod, trial

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """One call."""
        call = self.visit_expr_post_order(call)
        if not isinstance(call.op, ir.Op):
            return call
        name, info = call.op.name.removeprefix("relax."), call.struct_info
        if name == "call_pure_packed" and call.args[0].global_symbol in _TOLD:
            told = [info.shape, relax.StringImm(str(info.dtype))]
            return packed(call.args[0].global_symbol, [*call.args[1:], *told], info)
        if name == "call_pure_packed" and has_torch_function(call.args[0].global_symbol):
            return _operator_call(call)
        if name in ("call_tir", "call_tir_inplace"):
            kernel = self._mod[call.args[0]]
            return _kernel_call(call, kernel) if _is_tilelang(kernel) else call
        if not has_torch_function(name):
            return call
        by_torch = name not in BY_TVM or _low_precision(call) or _of_nothing(call)
        return _operator_call(call) if by_torch or (self._trial and not _builds(call)) else call


def _of_nothing(call: relax.Call) -> bool:
    """Whether an operand has no elements (what TVM sums of them is what memory held), or a result has none (TVM divides
    by its size)."""
    made = call.struct_info.fields if isinstance(call.struct_info, relax.TupleStructInfo) else [call.struct_info]
    infos = [*(tensor.struct_info for tensor in tensors_in(call.args)), *made]
    return any(0 in plain(info.shape) for info in infos)


def _low_precision(call: relax.Call) -> bool:
    """Whether tensors of the call have a dtype that C has not."""
    infos = [*(tensor.struct_info for tensor in tensors_in(call.args)), *tensor_infos(call.struct_info)]
    return any(str(info.dtype).startswith(_NOT_IN_C) for info in infos)


def _builds(call: relax.Call) -> bool:
    operands = {arg: relax.Var("x", arg.struct_info) for arg in tensors_in(call.args) if isinstance(arg, relax.Var)}
    builder = relax.BlockBuilder()
    with builder.function("main", list(operands.values())):
        builder.emit_func_output(builder.emit(_with_operands(call, operands)))
    try:
        _built(builder.get())
    except Exception:
        return False
    return True


def _with_operands(expr: relax.Expr, operands: dict[relax.Var, relax.Var]) -> relax.Expr:
    """The call, or tuple, on these variables."""
    if isinstance(expr, relax.Call):
        args = [_with_operands(arg, operands) for arg in expr.args]
        return relax.Call(expr.op, args, expr.attrs, expr.sinfo_args)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_with_operands(field, operands) for field in expr.fields])
    return operands.get(expr, expr)


def _operator_call(call: relax.Call) -> relax.Expr:
    return packed("mesh.operator", [relax.StringImm(ir.save_json(call)), *tensors_in(call.args)], call.struct_info)


def _kernel_call(call: relax.Call, kernel: tirx.PrimFunc) -> relax.Expr:
    numbers = plain(call.args[2]) if len(call.args) > 2 else ()
    changed = [n for n in plain(call.attrs.inplace_indices) if n >= 0] if "inplace" in call.op.name else []
    shapes = [call.args[2] if len(call.args) > 2 else relax.ShapeExpr(numbers), relax.ShapeExpr(changed)]
    return packed(
        "mesh.kernel", [relax.StringImm(ir.save_json(kernel)), *shapes, *call.args[1].fields], call.struct_info
    )


def _is_tilelang(func: Any) -> bool:
    """Whether TileLang compiles the function: it has tile operations or a grid of blocks, or dtypes that C has not."""
    if not isinstance(func, tirx.PrimFunc):
        return False
    return (
        any(str(buffer.dtype).startswith(_NOT_IN_C) for buffer in func.buffer_map.values())
        or any(op_name(call).startswith("tl.") for call in nodes(func.body, tirx.Call))
        or any(attr.attr_key == "thread_extent" for attr in nodes(func.body, tirx.AttrStmt))
        or any(loop.thread_binding is not None for loop in nodes(func.body, tirx.For))
    )
