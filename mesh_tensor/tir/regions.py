"""Boxes of buffers: what TileLang's tile operations read and write."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from .nodes import is_const

_DEPTHS = {"local.fragment": 2, "local": 2, "shared": 1, "shared.dyn": 1, "shared.tmem": 1}  # as TileLang has them


@dataclass(frozen=True)
class Region:
    """A box of a buffer: `buffer[mins[0] : mins[0] + extents[0], ...]`."""

    buffer: tirx.Buffer
    mins: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]

    @classmethod
    def of(cls, call: tirx.Call) -> Region:
        """The box that a `tl.region(load, mode, extents...)` call names."""
        load = call.args[0]
        return cls(load.buffer, tuple(load.indices), tuple(call.args[2:]))

    @classmethod
    def at(cls, pointer: tirx.Call) -> Region:
        """The element that a pointer names."""
        load = pointer.args[0]
        return cls(load.buffer, tuple(load.indices), tuple(tirx.IntImm("int32", 1) for _ in load.indices))

    @property
    def long_dims(self) -> tuple[int, ...]:
        """The dims whose extent is not the constant 1: the ones that tile operations pair up in order."""
        return tuple(d for d, extent in enumerate(self.extents) if not is_const(extent, 1))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the buffer."""
        return all(is_const(low, 0) for low in self.mins) and ir.structural_equal([*self.extents], [*self.buffer.shape])


def deeper(src: Region, dst: Region) -> Region:
    """Whose extents both sides of a copy have: TileLang takes those of the one that is deeper in the memory
    hierarchy."""
    return src if _depth(src) >= _depth(dst) else dst


def _depth(region: Region) -> int:
    return _DEPTHS.get(region.buffer.scope(), 0)
