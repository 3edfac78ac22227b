"""What the names of a function mean while it is compiled into closures; and sequences of actions, which may leave
loops early.

A compiled closure takes a *frame*: a list with one slot per variable and buffer, made anew for every run, so that one
compiled function can run in several threads. Slot MASK holds which lanes are active (None: all).

A *lane* is a loop that runs all at once: its variable is an array along one axis, and every value that depends on it is
an array over those axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.dtypes import numpy_dtype
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.tir.effects import FIX, FROM
from mesh_tensor.tir.prover import Prover

Frame = list[Any]
Action = Callable[[Frame], None]
MASK = 0


class Code(NamedTuple):
    """A compiled expression. `varies`: its value is an array over the lanes; else it is a scalar. `const`: its value,
    where that is known at compile time."""

    run: Callable[[Frame], Any]
    varies: bool = False
    const: Any = None


def constant(value: Any) -> Code:
    """An expression whose value is known."""
    return Code(lambda frame: value, False, value)


@dataclass(frozen=True)
class Lane:
    """A loop that runs all at once, along `axis`: the slots of its first value and of its extent, and the range itself,
    where that is known at compile time."""

    axis: int
    start: int
    size: int
    known: range | None


@dataclass(frozen=True)
class Storage:
    """A buffer's memory: where the frame holds it, and what to say and do about accesses outside it. With `strict`
    every direct access outside raises; without, reads give 0 and writes are dropped (as TileLang's guard does)."""

    name: str
    slot: int
    buffer: tirx.Buffer
    is_param: bool
    strict: bool

    def outside(self, verb: str, index: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        """Raise if an access outside the buffer is an error."""
        if self.strict:
            where = ", ".join(str(int(i)) for i in index)
            raise MeshTensorError(
                f"the kernel {verb} {self.name}[{where}], which is outside {self.name}'s shape {tuple(shape)}"
            )


@dataclass
class FunctionScope:
    """The names of one function."""

    poison: bool
    size: int = 1
    slots: dict[int, int] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    storages: dict[int, Storage] = field(default_factory=dict)
    binds: dict[int, tirx.PrimExpr] = field(default_factory=dict)
    lanes: dict[int, Lane] = field(default_factory=dict)
    axis_of: Mapping[int, int] = field(default_factory=dict)
    safe_values: dict[int, Code] = field(default_factory=dict)
    threads: set[tirx.Var] = field(default_factory=set)
    jumps: bool = False

    @property
    def axes(self) -> int:
        """The number of axes that values over lanes have here; 0 where nothing runs all at once."""
        return 1 + max(self.axis_of.values()) if self.axis_of else 0

    def new_slot(self) -> int:
        """A slot of the frame that nothing uses."""
        self.size += 1
        return self.size - 1

    def define(self, var: tirx.Var, varies: bool = False) -> int:
        """The slot of a variable, from here on defined."""
        key = hash(var)
        if key not in self.slots:
            self.slots[key] = self.new_slot()
        (self.varying.add if varies else self.varying.discard)(key)
        return self.slots[key]

    def variable(self, var: tirx.Var) -> Code:
        """A variable's value."""
        slot = self.slots.get(hash(var))
        if slot is None:
            if var in self.threads:
                refuse(
                    f"the thread index {var.name!r}, {FROM}, has no value in the interpreter",
                    why="kernels are read as whole blocks there",
                    fix=FIX,
                )
            raise MeshTensorError(
                f"the interpreter can't give a value to variable {var.name!r}: nothing that it runs defines it"
            )
        return Code(itemgetter(slot), hash(var) in self.varying)

    def define_buffer(self, buffer: tirx.Buffer, is_param: bool = False) -> int:
        """The slot of a buffer's memory."""
        slot = self.new_slot()
        strict = self.poison or not is_param
        self.storages[hash(buffer.data)] = Storage(buffer.name, slot, buffer, is_param, strict)
        return slot

    def storage(self, buffer: tirx.Buffer) -> Storage:
        """The memory that a buffer is, or is a view of."""
        storage = self.storages.get(hash(buffer.data))
        if storage is None:
            raise MeshTensorError(f"buffer {buffer.name!r} is neither a parameter nor allocated in the kernel")
        return storage

    def array(self, buffer: tirx.Buffer) -> Callable[[Frame], np.ndarray]:
        """How to get a buffer's array from the frame."""
        storage = self.storage(buffer)
        load = itemgetter(storage.slot)
        if buffer.same_as(storage.buffer):
            return load
        if not isinstance(buffer.elem_offset, tirx.IntImm) or int(buffer.elem_offset):
            raise MeshTensorError(f"buffer {buffer.name!r} is a view of {storage.name!r} with an offset: not supported")
        dtype = numpy_dtype(buffer.dtype)
        sizes = self._numbers(buffer.shape)
        steps = self._numbers(buffer.strides) if len(buffer.strides) else None
        name = f"{buffer.name or 'a view'} of {storage.name}"
        return lambda frame: _view(load(frame), sizes(frame), steps and steps(frame), dtype, name)

    def _numbers(self, exprs: Sequence[tirx.PrimExpr]) -> Callable[[Frame], tuple[int, ...]]:
        """The values of sizes, which are constants or made of the parameters' sizes."""
        if all(isinstance(n, tirx.IntImm) for n in exprs):
            known = tuple(int(n) for n in exprs)
            return lambda frame: known
        analyzer = Prover()
        slots = {var: self.variable(var).run for n in exprs for var in tirx.analysis.undefined_vars(n)}

        def run(frame: Frame) -> tuple[int, ...]:
            values = {var: tirx.const(int(get(frame)), var.dtype) for var, get in slots.items()}
            return tuple(int(analyzer.simplify(substitute(n, values))) for n in exprs)

        return run


def _view(
    array: np.ndarray, shape: tuple[int, ...], steps: tuple[int, ...] | None, dtype: np.dtype, name: str
) -> np.ndarray:
    """Another shape and dtype of the same memory, row by row or with steps of its own."""
    if not array.flags.c_contiguous:
        raise MeshTensorError(f"{name} is a view of an array that is not contiguous")
    size = math.prod(shape)
    steps = steps or tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if size else 0
    if reach * dtype.itemsize > array.nbytes:
        raise MeshTensorError(f"{name} has {reach} elements of {dtype}, more than {array.nbytes} bytes hold")
    flat = array.reshape(-1).view(np.uint8)[: reach * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * dtype.itemsize for step in steps])


class Break(Exception):
    """Leaves the innermost loop."""


class Continue(Exception):
    """Goes on with the innermost loop's next iteration."""


class Return(Exception):
    """Ends the program."""


def in_turn(actions: Sequence[Action]) -> Action:
    """The actions, one after the other."""
    if len(actions) == 1:
        return actions[0]

    def run(frame: Frame) -> None:
        for action in actions:
            action(frame)

    return run


def nothing(frame: Frame) -> None:
    """The action of statements without effect."""


def jump(signal: type[Exception], scope: FunctionScope) -> Action:
    """An action that raises `signal`, for the loop around it to catch."""
    scope.jumps = True

    def run(frame: Frame) -> None:
        raise signal

    return run


def until(signal: type[Exception], action: Action) -> Action:
    """`action`, which ends without more ado when `signal` is raised."""

    def run(frame: Frame) -> None:
        try:
            action(frame)
        except signal:
            return

    return run
