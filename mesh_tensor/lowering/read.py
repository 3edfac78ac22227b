"""The annotated stage: a kernel's annotations, the view that it is written in, and its normal form."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.prices import prices_on
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.statements import buffer_params
from mesh_tensor.tir.functions import function_name

from .stages import Annotated
from .view import over_tiles, read_view, refuse_views_of_tiles


def read(func: tirx.PrimFunc, view: str, machine: Machine | None = None) -> Annotated:
    """The kernel as its annotations state it, written over whole tensors or over tiles (`view`: auto, global, local);
    it is decided by what is cheap on the machine.

    Raises:
        MeshTensorError: no or invalid annotations, an unknown view, or one that doesn't fit the kernel's loops.
    """
    mesh, annotations = read_annotations(func)
    asked = {name: annotation.sharding for name, annotation in annotations.items()}
    refuse_views_of_tiles(func, asked, view)
    plain = normalize(func)
    shapes = {param: tuple(buffer.shape) for param, buffer in buffer_params(plain).items()}
    reading = read_view(plain, asked, view)
    if reading.over_tiles:
        asked = {name: asked.get(name) or Sharding.make(mesh, len(shape)) for name, shape in shapes.items()}
        plain = over_tiles(plain, asked)
    return Annotated(function_name(func), mesh, plain, asked, shapes, reading, prices_on(mesh, machine))
