"""What is stated of a kernel: how its buffers lie on a mesh, from outside of it, and read back; and, of kernels with
symbolic dims, one without for the sizes that a call brings.

An annotated function has two attributes: `mesh_tensor_info`, from the data variable of a parameter's buffer to its
metadata, and `mesh_tensor_mesh`, the axes of the mesh with their sizes, in order. One whose author asked for tiles has
`mesh_tensor_tiles`, too: the shapes of the tiles, as far as they were asked for. What is wrong in a call of `annotate`
is told in the words of that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.tir.nodes import DIVISIONS, function_name, is_const, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.views import declared

from .annotation import HOW_TO_ANNOTATE, BufferAnnotation, check, complete, from_attr, metadata_to_attr
from .kernel_source import check_kernel, of_jit

INFO_ATTR = "mesh_tensor_info"
MESH_ATTR = "mesh_tensor_mesh"
TILES_ATTR = "mesh_tensor_tiles"


def annotate(
    prim_func: tirx.PrimFunc | Callable[..., Any],
    mesh: Mesh | Mapping[str, int],
    shardings: Mapping[str, Any],
    *,
    sizes: Mapping[str, Any] | None = None,
) -> tirx.PrimFunc:
    """State the layouts of a kernel's parameters without editing the kernel.

    Args:
        prim_func: the kernel over global tensors, or a @tilelang.jit function.
        mesh: the mesh, or a dict from the names of its axes to their sizes.
        shardings: from the name of a parameter's buffer to how it lies on the mesh: `{"x": 0, "y": 1}` (axis to dim),
            one placement per axis as in `[mt.Shard(0), mt.Replicate()]`, a Sharding, its text `"S[0], R"`, or a
            metadata dict that may leave out what it doesn't state:
            `{"sharding": {"x": 0}, "partial": {"y": "sum"}}`.
        sizes: the arguments of a @tilelang.jit function, by name, as its `get_tir` takes them.

    Returns:
        A copy of the kernel with these layouts, which replace earlier ones.

    Raises:
        MeshTensorError: buffers that are no parameters, unknown dims or axes, or axes that are stated twice; all are
            named.
    """
    check_order_of_arguments(mesh, shardings)
    mesh, prim_func = Mesh(mesh), of_jit(prim_func, sizes)
    buffers = {buffer.name: buffer for buffer in _parameters(prim_func)}
    where = f"kernel {function_name(prim_func)!r} on {mesh}"
    fix = how_to_annotate(mesh, shardings, buffers)
    if not isinstance(shardings, Mapping):
        refuse(f"the shardings are {shown(shardings)}, which is not a dict from buffer names", where=where, fix=fix)
    problems = [why_not_parameter(prim_func, name) for name in shardings if name not in buffers]
    info = {}
    for name, buffer in buffers.items():
        if name in shardings:
            metadata = complete(mesh, shardings[name])
            annotation, wrong = check(mesh, len(buffer.shape), metadata)
            problems += [f"buffer {name!r}: {problem}" for problem in wrong]
            if annotation is not None:
                info[buffer.data] = metadata_to_attr(metadata, annotation)
    if problems:
        refuse(problems, where=where, fix=fix)
    return prim_func.with_attr(attributes(mesh, info))


def read_annotations(func: tirx.PrimFunc) -> tuple[Mesh, dict[str, BufferAnnotation]]:
    """The mesh of an annotated kernel, and what is stated per parameter, by the name of its buffer, in the order of the
    parameters; a parameter that nothing annotates is left out."""
    buffers = {buffer.data: buffer for buffer in _parameters(func)}
    where = f"kernel {function_name(func)!r}"
    attrs = func.attrs or {}
    missing = [f"the kernel has no `{key}` attribute" for key in (INFO_ATTR, MESH_ATTR) if key not in attrs]
    if missing:
        refuse(
            missing,
            where=where,
            why="nothing says how its buffers lie on a mesh",
            fix='call annotate_mesh_tensor_info in its body, or mesh_tensor.annotate(prim_func, mesh, {"A": {"x": 0}})',
        )
    mesh, info = _read_mesh(attrs[MESH_ATTR], where), attrs[INFO_ATTR]
    names = listing(_names(buffers.values()))
    problems = [
        f"buffer {str(getattr(data, 'name', data))!r} is annotated, but it is no parameter (parameters: {names})"
        for data in info
        if data not in buffers
    ]
    annotations = {}
    for data, buffer in buffers.items():
        if data in info:
            annotation, wrong = check(mesh, len(buffer.shape), from_attr(info[data]))
            problems += [f"buffer {buffer.name!r}: {problem}" for problem in wrong]
            if annotation is not None:
                annotations[buffer.name] = annotation
    if problems:
        refuse(problems, where=f"{where} on {mesh}", fix=f"annotate parameters of the kernel; {HOW_TO_ANNOTATE}")
    return mesh, annotations


def _parameters(func: Any) -> list[tirx.Buffer]:
    func = check_kernel(func)
    buffers = [func.buffer_map[param] for param in func.params if param in func.buffer_map]
    names = _names(buffers)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        refuse(
            [f"several parameters are named {name!r}" for name in sorted(twice)],
            where=f"kernel {function_name(func)!r}",
            fix="give every parameter's buffer a name of its own",
        )
    return buffers


def _names(buffers: Iterable[tirx.Buffer]) -> list[str]:
    return [str(buffer.name) for buffer in buffers]


def attributes(mesh: Mesh, info: dict[tirx.Var, dict[str, Any]]) -> dict[str, Any]:
    return {INFO_ATTR: info, MESH_ATTR: [[axis, size] for axis, size in mesh.shape.items()]}


def _read_mesh(attr: Any, where: str) -> Mesh:
    try:
        axes = dict(from_attr(attr))
    except (TypeError, ValueError):
        refuse(f"the `{MESH_ATTR}` attribute {attr} is no list of [axis, size]", where=where, fix="use annotate")
    return Mesh(axes)


def how_to_annotate(mesh: Mesh, shardings: Any, buffers: Mapping[str, tirx.Buffer]) -> str:
    """What the shardings look like, for a buffer of the kernel and an axis of the mesh."""
    stated = shardings if isinstance(shardings, Mapping) else {}
    name, buffer = next(((n, b) for n, b in buffers.items() if n in stated), next(iter(buffers.items()), ("A", None)))
    first = mesh.axis_names[0]
    dim = 0 if buffer is None or len(buffer.shape) else None
    listed = ", ".join(["mt.Shard(0)" if dim == 0 else "mt.Replicate()", *["mt.Replicate()"] * (len(mesh) - 1)])
    dims = f"0..{len(buffer.shape) - 1}" if buffer is not None and len(buffer.shape) else "none"
    return (
        f'write {{"{name}": {{"{first}": {dim}}}}}: per buffer, the dim that each axis splits (axes: '
        f"{listing(mesh.axis_names)}; dims of {name!r}: {dims}), an axis that is left out replicates; or one placement "
        f'per axis, {{"{name}": [{listed}]}}; of partial values, {{"{name}": {{"partial": {{"{mesh.axis_names[-1]}": '
        f'"sum"}}}}}}'
    )


def check_order_of_arguments(mesh: Any, shardings: Any) -> None:
    """Refuse a mesh in the place of the shardings."""
    is_sizes = isinstance(shardings, Mapping) and shardings and all(type(size) is int for size in shardings.values())
    is_mesh = isinstance(mesh, Mesh) or (isinstance(mesh, Mapping) and any(type(s) is int for s in mesh.values()))
    if isinstance(shardings, Mesh) or (is_sizes and not is_mesh and isinstance(mesh, Mapping)):
        refuse(
            f"the mesh is {shown(mesh)} and the shardings are {shown(shardings)}: they are the other way round",
            fix='write annotate(kernel, {"x": 2}, {"A": {"x": 0}}): first the mesh, then the shardings',
        )


def why_not_parameter(func: tirx.PrimFunc, name: Any) -> str:
    """What is wrong with a name that is no buffer's among the kernel's parameters."""
    buffers = [str(buffer.name) for param in func.params if (buffer := func.buffer_map.get(param)) is not None]
    known = f"(parameters: {listing(buffers)})"
    if isinstance(name, tirx.Buffer):
        is_there = str(name.name) in buffers
        wanted = f"; give its name, {str(name.name)!r}" if is_there else ""
        return f"a buffer ({str(name.name)!r}) where a parameter's name is expected{wanted} {known}"
    if any(str(param.name) == name for param in func.params if param not in func.buffer_map):
        return f"parameter {name!r} is a number, and every device has it {known}"
    return f"buffer {shown(name)} is no parameter of the kernel {known}{did_you_mean(name, buffers)}"


def symbols(func: tirx.PrimFunc) -> tuple[tirx.Var, ...]:
    """The variables in the shapes and strides of the parameters, in order of appearance."""
    found: dict[tirx.Var, None] = {}
    for param in func.params:
        buffer = func.buffer_map.get(param)
        for size in (*buffer.shape, *buffer.strides) if buffer is not None else ():
            found.update(dict.fromkeys(_variables(size)))
    return tuple(found)


def specialize(func: tirx.PrimFunc, sizes: Mapping[tirx.Var, int | tirx.PrimExpr]) -> tirx.PrimFunc:
    """`func` with every symbol of `sizes` replaced by its value, or by an expression of other symbols, in its
    annotations too. A scalar parameter that is such a symbol is a parameter no more."""
    values = {var: tirx.const(size, var.dtype) if isinstance(size, int) else size for var, size in sizes.items()}
    params = [*func.params, *(var for var in values if var not in set(func.params))]
    _check_divisors(func, values)
    as_params = tirx.PrimFunc(params, declared(func).body, func.ret_type, func.buffer_map, func.attrs)
    result = as_params.specialize(values)
    for name in (INFO_ATTR, TILES_ATTR):
        if result.attrs and name in result.attrs:
            result = result.with_attr(name, _replace(result.attrs[name], values))
    return result


def _check_divisors(func: tirx.PrimFunc, values: Mapping[tirx.Var, tirx.PrimExpr]) -> None:
    """Refuse sizes that make a divisor in the kernel 0: TVM fails on it."""
    for divisor in [quotient.b for quotient in nodes(func.body, *DIVISIONS)]:  # inner ones come first
        if any(var in values for var in _variables(divisor)):
            value = _simplify(substitute(divisor, values))
            if is_const(value, 0):
                told = ", ".join(f"{var.name} = {size}" for var, size in values.items())
                refuse(
                    f"the kernel divides by {divisor}, which is 0 where {told}",
                    where=f"kernel {function_name(func)!r}",
                    fix="call it with other sizes, or write the kernel without this division",
                )


def sized(
    func: tirx.PrimFunc, inputs: Sequence[TensorType], outputs: Sequence[TensorType], numbers: Sequence[int]
) -> tirx.PrimFunc:
    """`func` as R.call_tir calls it on tensors and numbers: with the sizes that these bring in place of its symbols.
    Refused where `func` takes other parameters."""
    tensors = [*inputs, *outputs]
    if len(func.params) != len(tensors) + len(numbers):
        refuse(f"a TIR function of {len(func.params)} parameters is called with {len(tensors) + len(numbers)}")
    sizes: dict[tirx.Var, int] = dict(zip(func.params[len(tensors) :], numbers, strict=True))
    for param, tensor in zip(func.params, tensors, strict=False):
        buffer = func.buffer_map[param]
        if str(buffer.dtype) != tensor.dtype or not fits(buffer.shape, tensor.shape, sizes):
            refuse(
                f"parameter {buffer.name!r} of a TIR function is {list(buffer.shape)} {buffer.dtype}, its argument "
                f"{list(tensor.shape)} {tensor.dtype}"
            )
    return specialize(func, sizes) if sizes else func


def fits(shape: Sequence[Any], actual: Sequence[int], sizes: dict[tirx.Var, int]) -> bool:
    """Whether constants and symbols of a shape agree with sizes; learns what the symbols are. Expressions are left."""
    if len(shape) != len(actual):
        return False
    learnt = dict(sizes)
    for expected, size in zip(shape, actual, strict=True):
        if isinstance(expected, tirx.Var):
            expected = learnt.setdefault(expected, int(size))
        if isinstance(expected, (int, tirx.IntImm)) and int(expected) != size:
            return False
    sizes.update(learnt)
    return True


def evaluate(size: Any, sizes: Mapping[tirx.Var, int]) -> int | None:
    """The value of a dim, or None while a symbol in it is unknown. Refused where it divides by zero."""
    if isinstance(size, (int, tirx.IntImm)):
        return int(size)
    if isinstance(size, tirx.Var):
        return sizes.get(size)
    if any(var not in sizes for var in _variables(size)):
        return None
    values = {var: tirx.const(value, var.dtype) for var, value in sizes.items()}
    value = _simplify(substitute(size, values))
    if not isinstance(value, tirx.IntImm):
        told = ", ".join(f"{var.name} = {value}" for var, value in sizes.items())
        refuse(f"the size {size} divides by 0 where {told}", fix="pass tensors of other sizes")
    return int(value)


def _replace(value: Any, values: Mapping[tirx.Var, tirx.PrimExpr]) -> Any:
    """`value`, an attribute or a part of one, with its symbols replaced."""
    if isinstance(value, Mapping):
        return {key: _replace(item, values) for key, item in value.items()}
    if isinstance(value, (list, tuple, tvm_ffi.Array)):
        return [_replace(item, values) for item in value]
    return _simplify(substitute(value, values)) if isinstance(value, tirx.PrimExpr) else value


def _simplify(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    return Prover().simplify(expr)


def _variables(expr: Any) -> list[tirx.Var]:
    return nodes(expr, tirx.Var) if isinstance(expr, tirx.PrimExpr) else []
