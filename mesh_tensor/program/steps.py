"""What one device does, step by step.

Whatever its kind, a step says

    reads       the values that it takes; what a kernel writes is among them, for it may leave some of it as it was
    writes      the values that it makes or changes
    uses        all of these, each once
    makes       of what it writes, what comes in memory of its own: no AllocStep comes before it
    needs       of what it reads, what something has to have made before
    begins      the storages whose memory comes to life here, and nothing is in it yet
    ends        the storages whose memory is given back
    collective  the collective that it starts or waits for, if it does
    starts      the collective that it starts, if it does
    sends       the collectives that it starts, with how often it does
    is_long     whether a collective may hide behind it
    flops       the floating-point operations that a device does
    bytes       what the busiest device receives
    words       what it does, for people
    mean        what it means to somebody who has Meanings for all kinds

Who cares for some kinds only takes `Program.kernels`, `ops`, `collectives` and `loops`, or `of_kinds` with a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from tvm import tirx

from mesh_tensor.lowering.slabs import Slabs
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.cost import class_of
from mesh_tensor.rules.operator.update import UPDATE

from .loop_step import LoopStep

T = TypeVar("T")
Meaning_co = TypeVar("Meaning_co", covariant=True)
Sends = tuple[tuple["CollectiveStep", int], ...]


class Meanings(Protocol[Meaning_co]):
    """What each kind of step means to somebody: to a runtime an action, to a simulator a time."""

    def kernel(self, step: KernelStep) -> Meaning_co:
        """A device runs a local kernel."""

    def op(self, step: OpStep) -> Meaning_co:
        """A device calls an operator."""

    def collective(self, step: CollectiveStep) -> Meaning_co:
        """Groups of devices change a value's layout, or begin to."""

    def loop(self, step: LoopStep) -> Meaning_co:
        """Devices run other steps several times."""

    def wait(self, step: WaitStep) -> Meaning_co:
        """A collective that was started has ended."""

    def alloc(self, step: AllocStep) -> Meaning_co:
        """The memory of a workspace or an output comes to life."""

    def free(self, step: FreeStep) -> Meaning_co:
        """The memory of a workspace is given back."""


@dataclass(frozen=True)
class KernelStep:
    """One device runs `func`: its tensor parameters get the tiles of `args` in order, its scalar ones the kernel's own
    `scalars` (by name) in order, then come the `sizes` that no tile tells, and its last ones get the device's
    coordinate on each of `axes` (int32). `slabs` says how it may be run in several calls, if that is known. `counted`:
    its flops, or what counts them when somebody asks."""

    name: str
    func: tirx.PrimFunc
    args: tuple[str, ...]
    axes: tuple[str, ...]
    writes: tuple[str, ...]
    counted: int | Callable[[], int] = field(compare=False, repr=False)
    scalars: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    slabs: Slabs | None = field(default=None, compare=False, repr=False)

    makes = needs = begins = ends = sends = ()
    collective = starts = None
    bytes = 0
    is_long = True

    @property
    def reads(self) -> tuple[str, ...]:
        return self.args

    uses = reads

    @cached_property
    def flops(self) -> int:
        return self.counted if isinstance(self.counted, int) else self.counted()

    @property
    def words(self) -> str:
        return f"kernel {self.name}"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.kernel(self)


@dataclass(frozen=True, eq=False)
class OpStep:
    """One device calls an operator on the tiles of `args`; what it gives are the tiles of `results`, in memory of their
    own or views of the operands. `call` has the tiles' shapes as the operator knows them: values may have their dims
    taken apart further. `whole`: the results that have to lie in one piece, for who uses them. `where` names the
    binding. `kernel` computes the same, where there is one that is faster: it takes the operands, then the results.
    `checked`: indices outside of the dim that they are looked up in are refused, and zeros that integers are divided
    by. `one_for`: the operators that it is in place of, where it is one for several."""

    call: OpCall
    args: tuple[str, ...]
    results: tuple[str, ...]
    whole: frozenset[str]
    flops: int
    where: str
    kernel: tirx.PrimFunc | None = None
    checked: bool = False
    one_for: tuple[str, ...] = ()

    begins = ends = sends = ()
    collective = starts = None
    bytes = 0

    @property
    def is_long(self) -> bool:
        return class_of(self.call.name) == "product" or self.call.operator == UPDATE

    @property
    def reads(self) -> tuple[str, ...]:
        return self.args

    needs = reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.results

    makes = writes

    @property
    def uses(self) -> tuple[str, ...]:
        return (*self.args, *self.results)

    @property
    def stands_for(self) -> tuple[str, ...]:
        """The operators that it is, each by itself."""
        return self.one_for or (self.call.operator,)

    @property
    def words(self) -> str:
        return f"operator {self.call.name} ({self.where})"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.op(self)


@dataclass(frozen=True)
class CollectiveStep:
    """The devices that differ only in their coordinates on `axes` turn `src`'s layout into `dst`'s.

    `kind` is the name of one in `base.collectives`, which says what each of the axes does with the tensor before and
    after: partial values are combined by `op`, `src_dim` is the dim that they split, `dst_dim` the one that they split
    then. Where it is not to `wait`, it only starts: `src` is not written and `dst` not used before its WaitStep.
    """

    kind: str
    src: str
    dst: str
    axes: tuple[str, ...]
    op: str | None
    src_dim: int | None
    dst_dim: int | None
    bytes: int
    reason: str
    wait: bool = True

    makes = begins = ends = ()
    flops = 0
    is_long = False

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.src,)

    needs = reads

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst,)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.src, self.dst)

    @property
    def starts(self) -> CollectiveStep:
        return self

    collective = starts

    @property
    def sends(self) -> Sends:
        return ((self, 1),)

    @property
    def words(self) -> str:
        op = f", {self.op}" if self.op else ""
        return f"{self.kind}({self.src}{op}) over {', '.join(self.axes)}"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.collective(self)


@dataclass(frozen=True)
class WaitStep:
    """The collective, which an earlier step started, has ended: its `dst` is there, and its `src` was sent."""

    collective: CollectiveStep

    makes = begins = ends = sends = ()
    starts = None
    flops = bytes = 0
    is_long = False

    @property
    def reads(self) -> tuple[str, ...]:
        return self.collective.reads

    needs = reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.collective.writes

    @property
    def uses(self) -> tuple[str, ...]:
        return self.collective.uses

    @property
    def words(self) -> str:
        return f"the end of {self.collective.words}"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.wait(self)


@dataclass(frozen=True)
class _MemoryStep:
    """Computes and sends nothing."""

    storage: str

    reads = writes = uses = makes = needs = sends = ()
    collective = starts = None
    flops = bytes = 0
    is_long = False


@dataclass(frozen=True)
class AllocStep(_MemoryStep):
    """The memory of a workspace or an output comes to life here."""

    ends = ()

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.storage,)

    @property
    def words(self) -> str:
        return f"memory for {self.storage}"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.alloc(self)


@dataclass(frozen=True)
class FreeStep(_MemoryStep):
    """Nothing uses this workspace any more."""

    begins = ()

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.storage,)

    @property
    def words(self) -> str:
        return f"the end of the memory for {self.storage}"

    def mean(self, meanings: Meanings[T]) -> T:
        return meanings.free(self)


Step = KernelStep | OpStep | CollectiveStep | LoopStep | WaitStep | AllocStep | FreeStep


K = TypeVar("K", bound=Step)


def only(steps: Iterable[Step], kind: type[K]) -> tuple[K, ...]:
    """The steps of one kind, in their order."""
    return tuple([step for step in steps if isinstance(step, kind)])


def of_kinds(steps: Iterable[Step], table: Mapping[Any, Callable[[Any], T]]) -> list[T]:
    """What the steps of the kinds in the table mean by it, in their order."""
    return [table[type(step)](step) for step in steps if type(step) in table]
