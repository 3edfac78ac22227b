"""from_torch_rank: what one rank of several exported, with its collectives, as a module of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tvm import ir, relax

from mesh_tensor.annotations.annotation import check, complete
from mesh_tensor.annotations.manual import manual_computation
from mesh_tensor.annotations.names import SOURCE_NAMES_ATTR
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh

from .imported import ImportedModule
from .torch_autocast import under_autocast
from .torch_import import import_torch
from .torch_program import written_buffers


def from_torch_rank(
    program: torch.export.ExportedProgram,
    mesh: Mesh | Mapping[str, int],
    groups: Mapping[str, Iterable[str]],
    shardings: Mapping[str, Any],
    results: Any,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> ImportedModule:
    """The Relax module of whole tensors, of a program that one rank of several exported, which works on its tiles and
    has torch's functional collectives in it (`all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`,
    `all_to_all_single`, `wait_tensor`). Its `main` is one manual computation of that program.

    Whether all ranks run this program, and whether groups are those axes, is the caller's word: nothing in an exported
    program says so.

    Args:
        program: what `torch.export.export` gave on one rank. It must not depend on the rank.
        mesh: the ranks, as a mesh.
        groups: the axes of each of torch's process groups, by `group.group_name`: its ranks in order are the devices
            along these, the first axis major.
        shardings: how inputs and parameters lie over the mesh, by torch's names; those left out are the same on all.
        results: the same of the result; a list for several.
        weights: the parameters that are split, whole: the program has one rank's tiles of them.

    Raises:
        MeshTensorError: a collective of another kind, group or size; a program that writes buffers or draws random
            numbers; a split parameter that is not in `weights`, or has other tiles than the program.
    """
    mesh = Mesh(mesh)
    if not isinstance(program, torch.export.ExportedProgram):
        refuse(f"a {type(program).__name__} is no exported program", fix="pass torch.export.export(model, inputs)")
    if written := [one.target for one in written_buffers(program)]:
        refuse(f"the program writes {listing(written)}", where="from_torch_rank", fix="export it in eval mode")
    by_name = {name: _axes(name, axes, mesh) for name, axes in groups.items()}
    local = import_torch(under_autocast(program), False, by_name)
    func = local.mod["main"]
    ours = {local.names.get(name, name): layout for name, layout in shardings.items()}
    params = {param.name_hint: param for param in func.params}
    if unknown := [name for name in ours if name not in params]:
        refuse(
            [f"there is no input or parameter {name!r}" for name in unknown],
            where="shardings of from_torch_rank",
            fix=f"it has {listing(list(params))}",
        )
    layouts = [ours.get(name, {}) for name in params]
    wholes = [_whole(param, mesh, layout) for param, layout in zip(func.params, layouts, strict=True)]
    mod = _called(local.mod, func, wholes, mesh, layouts, results)
    tensors = _weights(local, {var.name_hint: var for var in wholes}, weights or {})
    names = {theirs: mine for theirs, mine in local.names.items() if mine in params}
    main = mod["main"].with_attr(SOURCE_NAMES_ATTR, names)
    mod.update_func(mod.get_global_var("main"), main)
    return ImportedModule(mod, tensors, names, frozen=local.frozen, constants=local.constants)


def _axes(name: str, axes: Iterable[str], mesh: Mesh) -> Mesh:
    """The axes of a group, in the order in which its ranks lie."""
    stated = [axes] if isinstance(axes, str) else list(axes)
    if unknown := [axis for axis in stated if axis not in mesh]:
        refuse(
            [f"axis {axis!r} of group {name!r} is none of {mesh}" for axis in unknown],
            where="from_torch_rank",
            fix="give groups as {name of the group: the axes of the mesh that its ranks lie along}",
        )
    return Mesh({axis: mesh.size(axis) for axis in stated})


def _whole(param: relax.Var, mesh: Mesh, layout: Any) -> relax.Var:
    """A parameter of whole tensors, of that of tiles."""
    annotation, wrong = check(mesh, param.struct_info.ndim, complete(mesh, layout))
    if annotation is None or wrong:
        refuse(wrong, where=f"sharding of {param.name_hint!r}", fix=f"state a layout over {mesh}")
    sizes = enumerate(param.struct_info.shape.values)
    shape = [size * annotation.sharding.num_shards(dim) for dim, size in sizes]
    return relax.Var(param.name_hint, relax.TensorStructInfo(shape, param.struct_info.dtype))


def _called(
    mod: ir.IRModule, func: relax.Function, wholes: list[relax.Var], mesh: Mesh, layouts: list[Any], results: Any
) -> ir.IRModule:
    """The module whose main calls the program on tiles of whole tensors."""
    others = {var: other for var, other in mod.functions_items() if var.name_hint != "main"}
    builder = relax.BlockBuilder(ir.IRModule(others, attrs=mod.attrs, global_infos=mod.global_infos))
    body = builder.add_func(func.without_attr("global_symbol").without_attr(SOURCE_NAMES_ATTR), "on_device")
    with builder.function("main", wholes):
        builder.emit_func_output(builder.emit(manual_computation(body, wholes, mesh, layouts, results)))
    return builder.get()


def _weights(
    local: ImportedModule, wholes: Mapping[str, relax.Var], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters: of those that are split, whole ones."""
    known = {local.names.get(name, name): tensor for name, tensor in given.items()}
    made, problems = {}, []
    for name, tile in local.params.items():
        shape = tuple(int(size) for size in wholes[name].struct_info.shape.values)
        tensor = known.get(name, tile)
        if tuple(tensor.shape) != shape or tensor.dtype != tile.dtype:
            what = "is split, and not among `weights`" if name not in known else "does not fit"
            problems.append(f"{name!r} of {list(shape)} {tile.dtype} {what}: {list(tensor.shape)} {tensor.dtype}")
        made[name] = tensor
    if problems:
        refuse(problems, where="parameters of from_torch_rank", fix="pass whole tensors in `weights`, by torch's names")
    return made
