"""save and load: a module on a mesh as a folder, and that folder as a module on a mesh, perhaps another one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.module_annotations import stated_meshes
from mesh_tensor.annotations.names import reachable
from mesh_tensor.annotations.stated_ties import Unannotated, without_annotations
from mesh_tensor.base.errors import MeshTensorError, listing, refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.sub_axes import Refinement
from mesh_tensor.importers.saved import load_module, save_module
from mesh_tensor.importers.weight_files import FORMAT, INDEX, index_entry, open_weights, read_json, write_weights
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.ranks.dtensor import from_placements, local_part, mesh_of

from .mesh_module import MeshModule
from .module import distribute_module
from .module_ports import whole

MODULE = "module.json"
# How what is no module on a mesh is kept.
_OTHERWISE = {
    "ImportedModule": "write its module, mt.save_module(module.mod, file), or distribute it first",
    "IRModule": "write it to a file: mt.save_module(mod, file)",
    "MeshKernel": "keep its source: what is compiled is cached",
    "Pipeline": "save what its state_dict() gives: torch.save(run.state_dict(), file)",
    "TrainingRun": "save what its state_dict() gives: torch.save(run.state_dict(), file), on ranks "
    "torch.distributed.checkpoint",
}
_FILE_BYTES = 2**30  # of whole weights that are in memory at a time


@undisturbed
def save(run: MeshModule, folder: str | os.PathLike[str]) -> None:
    """Write a distributed module with its layouts and weights to a folder: `module.json`, safetensors files, and
    `weights.json`, which says in which file each piece of each weight is. Global weights go to files of up to 1 GiB,
    under their names in torch. Collective: each rank writes the tiles of DTensors that no earlier rank has, rank 0 the
    rest.

    Raises:
        MeshTensorError: the folder can't be written, or safetensors is not installed.
    """
    if not isinstance(run, MeshModule):
        refuse(
            f"save takes a MeshModule, not {type(run).__name__}",
            fix=_OTHERWISE.get(type(run).__name__, "pass what mt.distribute_module gave of a module"),
        )
    path = _path(folder)
    state = run.state_dict(full=False)
    first: dict[int, str] = {}
    state = {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}
    entries = run.on_all_ranks("what is saved", lambda rank: _write(path, state, rank))
    run.on_all_ranks("the index of what is saved", lambda rank: _finish(run, path, entries) if rank == 0 else None)


def _path(folder: str | os.PathLike[str]) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        refuse(f"the folder is {shown(folder)}", fix="pass its path")
    return Path(folder)


def _write(path: Path, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Write what this rank has to; what the index says of all weights, on rank 0."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{str(path)!r} can't be written", why=str(error), fix="choose another folder")
    split = {name: tensor for name, tensor in state.items() if is_dtensor(tensor)}
    mine = {name: _own(local_part(tensor)) for name, tensor in split.items() if rank in _owners(tensor).values()}
    if mine:
        write_weights(path / _of_rank(rank), mine)
    if rank != 0:
        return {}
    entries = {name: _entry(name, tensor) for name, tensor in split.items()}
    return entries | _write_whole(path, {name: tensor for name, tensor in state.items() if name not in split})


def _finish(run: MeshModule, path: Path, entries: Mapping[str, Any]) -> None:
    """What makes a folder of the files."""
    save_module(run.annotated_module, path / MODULE)
    written = path / f".{INDEX}"
    try:
        index = {"format": FORMAT, "function": run.function, "mesh": dict(run.mesh.shape), "weights": entries}
        written.write_text(json.dumps(index), "utf-8")
        os.replace(written, path / INDEX)
    except OSError as error:
        refuse(f"{str(path / INDEX)!r} can't be written", why=str(error), fix="choose another folder")


def _write_whole(path: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Write whole weights, of which some are in memory at a time; what the index says of them."""
    entries: dict[str, Any] = {}
    kept: dict[str, torch.Tensor] = {}
    files = size = 0
    for position, (name, tensor) in enumerate(tensors.items(), 1):
        made = whole(tensor)
        file = f"weights-{files:05}.safetensors"
        entries[name] = index_entry(made.shape, made.dtype, [(file, name, (0,) * made.ndim)])
        kept[name] = _own(made)
        size += made.nbytes
        if size >= _FILE_BYTES or position == len(tensors):
            write_weights(path / file, kept)
            files, kept, size = files + 1, {}, 0
    return entries


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that it shares with no other: files of safetensors have none that is shared."""
    tensor = tensor.detach().cpu()
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _of_rank(rank: int) -> str:
    return f"weights-of-rank-{rank:05}.safetensors"


def _owners(tensor: Any) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """Offset and extent of every part of a DTensor -> the first rank of the mesh that has it."""
    sharding = from_placements(mesh_of(tensor.device_mesh), tensor.ndim, tensor.placements)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for rank in range(sharding.mesh.num_devices):
        part = sharding.tile_offset(tensor.shape, rank), sharding.valid_extent(tensor.shape, rank)
        if all(part[1]):
            found.setdefault(part, rank)
    return found


def _entry(name: str, tensor: Any) -> Any:
    """What the index says of a DTensor."""
    owners = _owners(tensor)
    return index_entry(tensor.shape, tensor.dtype, [(_of_rank(r), name, offset) for (offset, _), r in owners.items()])


@undisturbed
def load(
    folder: str | os.PathLike[str], mesh: Any = None, shardings: Mapping[str, Any] | None = None, **options: Any
) -> MeshModule:
    """Read a module that `save` wrote, and distribute it over any mesh. Weights are read where they are needed: on
    ranks, only a rank's own tiles. Results are tensors and tuples; a model's own classes are not saved.

    Args:
        folder: the folder.
        mesh: a Mesh, a dict, or a torch DeviceMesh; None: the mesh that it was saved for.
        shardings: layouts for that mesh; None: those that it was saved with, without axes that the mesh doesn't have.
        options: of `distribute_module`, but for `weights`.

    Raises:
        MeshTensorError: files are missing or damaged, or the layouts don't fit the mesh.
    """
    path = _path(folder)
    if "weights" in options:
        refuse(
            "weights are given for a module with weights of its own",
            where=str(path),
            fix=f"pass them to mt.distribute_module, with mt.load_module of the {MODULE} in it",
        )
    absent = [name for name in (MODULE, INDEX) if not (path / name).is_file()]
    if absent:
        refuse(f"there is no {absent[0]} in {str(path)!r}", fix="pass a folder that mt.save wrote")
    mod, weights = load_module(path / MODULE), open_weights(path)
    index = read_json(path / INDEX)
    function = options.pop("function", None) or index.get("function")
    if not isinstance(function, str):
        refuse(f"{INDEX} names no function", where=str(path), fix="pass function=, the one to run")
    if not stated_meshes(reachable(mod, function)):  # no layout says for which mesh it is
        mesh = index.get("mesh") if mesh is None else mesh
    elif mesh is not None:
        saved = without_annotations(mod, function)
        named = mesh_of(mesh) if type(mesh).__name__ == "DeviceMesh" else Mesh(mesh)
        if shardings is not None or Refinement.between(named, saved.mesh) is None:
            mod = saved.module if shardings is not None else _restated(saved, named, function)
    elif shardings is not None:
        refuse("shardings without a mesh", fix="pass the mesh that they are for")
    return distribute_module(mod, mesh, shardings, weights=weights, function=function, **options)


def _for_mesh(priority: int | dict[str, int], mesh: Mesh) -> int | dict[str, int]:
    """A priority without the axes that the mesh does not have."""
    if isinstance(priority, int):
        return priority
    return {axis: number for axis, number in priority.items() if axis in mesh.axis_names}


def _restated(saved: Unannotated, mesh: Mesh, function: str) -> Any:
    """The module with what was stated for another mesh, for this one."""
    layouts: dict[str, Any] = {}
    for (where, value), annotation in saved.stated.items():
        sharding = annotation.sharding
        kept = {axis: sharding.placement(axis) for axis in sharding.mesh.axis_names if axis in mesh.axis_names}
        name = value if where == function else f"{where}.{value}"
        replicated = tuple(axis for axis in annotation.replicated if axis in mesh.axis_names)
        layouts[name] = {"sharding": Sharding.of(mesh, sharding.ndim, kept), "replicate": replicated}
    if not set(mesh.axis_names) & set(saved.mesh.axis_names):
        refuse(
            f"it was saved for {saved.mesh}, which has no axis of {mesh}",
            where="load",
            fix=f"name the axes as there, {listing(saved.mesh.axis_names)}, or pass shardings",
        )
    names = {(v if w == function else f"{w}.{v}"): annotation for (w, v), annotation in saved.stated.items()}
    opened = {name: dims for name, said in names.items() if (dims := said.said_open(said.sharding.ndim))}
    priority = {name: _for_mesh(said.said_priority(), mesh) for name, said in names.items() if said.said_priority()}
    groups: dict[str, list[str]] = {}
    for name, said in names.items():
        if said.group is not None:
            groups.setdefault(said.group, []).append(name)
    barriers = {name: said.barrier for name, said in names.items() if said.barrier is not None}
    try:
        return annotate_module(
            saved.module, mesh, layouts, function, open=opened, priority=priority, groups=groups, barriers=barriers
        )
    except MeshTensorError as error:
        return refuse(
            f"the layouts that it was saved with don't fit {mesh}", why=str(error), fix="pass shardings for that mesh"
        )
