"""Kernels in three styles from one source: over whole tensors, over tiles with the helpers, and over tiles by an author
who forgot that positions are those in a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tvm import tirx

import mesh_tensor as mt

Layouts = Mapping[str, Mapping[str, int]]


class Style:
    """What a kernel asks for its sizes and positions. `kind` is global, tiles or forgotten."""

    def __init__(self, kind: str, mesh: Mapping[str, int], layouts: Layouts):
        self.kind, self.layouts = kind, layouts
        self.fns = mt.mesh_tensor_functions(dict(mesh))

    def annotate(self, *buffers: tirx.Buffer) -> None:
        """State how the buffers lie; the first statement of a kernel."""
        self.fns["annotate_mesh_tensor_info"](
            {
                buffer: {
                    "block_shape": (1,) * len(buffer.shape),
                    "program_id": None,
                    "sharding": dict(self.layouts.get(buffer.name, {})),
                }
                for buffer in buffers
            }
        )

    def shape(self, buffer: tirx.Buffer) -> tuple[Any, ...]:
        return _plain(buffer.shape) if self.kind == "global" else self.fns["get_tile_shape"](buffer)

    def offset(self, buffer: tirx.Buffer) -> tuple[Any, ...]:
        return self.fns["get_tile_offset"](buffer) if self.kind == "tiles" else (0,) * len(buffer.shape)

    def extent(self, buffer: tirx.Buffer) -> tuple[Any, ...]:
        return self.fns["get_tile_extent"](buffer) if self.kind == "tiles" else self.shape(buffer)


def _plain(shape: Any) -> tuple[Any, ...]:
    return tuple(int(size) if isinstance(size, tirx.IntImm) else size for size in shape)


Build = Callable[[Style], tirx.PrimFunc]


def results(build: Build, kind: str, mesh: Mapping[str, int], layouts: Layouts, *inputs: torch.Tensor, **options: Any):
    """What the kernel in this style gives on a mesh; interpreted and poisoned unless said otherwise."""
    options = {"target": "interpret", "poison": options.get("target", "interpret") == "interpret", **options}
    kernel = mt.compile(build(Style(kind, mesh, layouts)), **options)
    return kernel(*(tensor.clone() for tensor in inputs))
