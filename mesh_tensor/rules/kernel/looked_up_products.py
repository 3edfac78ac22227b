"""Products of blocks that are looked up, `total += A @ B[group]`, where one device has what is looked up.

A product is linear in each of its factors, and the other devices have zeros. They leave the product out, as zeros would
make NaN of what is infinite in the other factor. For that, which device has the block is the same in all of a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tvm import tirx

from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads
from mesh_tensor.tir.tile_ops import Copy, Gemm

from .coordinates import Coordinates
from .partial_values import PartialValues
from .statements import Access, Kernel, Statement, without_binds

#: A statement, and what it looks up of a table's dim.
Use = tuple[Statement, Access, int]


class LookedUpProducts:
    """The products of blocks that copies look up, each with its copy (`copies`) and the access to the block
    (`blocks`)."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, uses: Sequence[Use]) -> None:
        self._kernel, self._ranges = kernel, coordinates.ranges
        self.copies: dict[Statement, Statement] = {}
        self.blocks: dict[Statement, Access] = {}
        for copy, looked_up, dim in uses:
            if isinstance(copy.tile_op, Copy) and self._is_of_program(copy, looked_up.indices[dim]):
                for product, block in self._of(copy):
                    self.copies[product], self.blocks[product] = copy, block

    def are_linear(self, partial: PartialValues) -> bool:
        """Whether every product is of one block that is partial, and of one that is not."""
        return all(
            partial.op_of(self._ranges.of(access)) is None
            for product, block in self.blocks.items()
            for access in product.reads
            if access is not block
        )

    def used(self, partial: PartialValues) -> Mapping[Statement, Statement]:
        """The products that what was followed comes through."""
        return {product: copy for product, copy in self.copies.items() if partial.contributes(product)}

    def _is_of_program(self, copy: Statement, index: tirx.PrimExpr) -> bool:
        """Whether an index is the same wherever a program computes it, from the copy on."""
        value = without_binds(index, self._kernel)
        known = {*(loop.var for loop in self._kernel.grid), *self._kernel.func.params}
        if not vars_of([value], {}) <= known:
            return False
        return all(self._is_settled(load.buffer, copy.top) for load in loads(value))

    def _is_settled(self, buffer: tirx.Buffer, top: int) -> bool:
        """Whether nothing writes a buffer from a top-level statement on."""
        return not any(statement.writes(buffer) and statement.top >= top for statement in self._kernel.statements)

    def _of(self, copy: Statement) -> Iterator[tuple[Statement, Access]]:
        """Products of what a copy alone writes, in the loop in which it does, or in one in there."""
        block = self._ranges.of(copy.target)
        if {statement for statement, _ in block.writes} != {copy}:
            return
        for product, _ in block.reads:
            of_block = [access for access in product.reads if self._ranges.of(access) is block]
            if len(of_block) == 1 and _adds_product(product) and _is_within(product, copy):
                yield product, of_block[0]


def _adds_product(statement: Statement) -> bool:
    record = statement.tile_op
    return isinstance(record, Gemm) and not record.clears and statement.op == "sum"


def _is_within(inner: Statement, outer: Statement) -> bool:
    """Whether all that encloses one statement encloses the other one, too."""
    loops = [[loop.node for loop in s.loops if loop.kind != "tile"] for s in (inner, outer)]
    around, conditions = loops[1], outer.conditions
    same = all(a is not None and a.same_as(b) for a, b in zip(loops[0], around, strict=False))
    alike = all(a.same_as(b) for a, b in zip(inner.conditions, conditions, strict=False))
    enough = len(loops[0]) >= len(around) and len(inner.conditions) >= len(conditions)
    return inner.top == outer.top and enough and same and alike
