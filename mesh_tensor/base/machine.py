"""Machine: what devices and the links between them can do. The one place of every cost constant.

Units are seconds, bytes, floating-point operations; rates are per second and per device, and are those that are
reached, not those of a data sheet: `sources` says where each comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

from .dtypes import is_float, numpy_dtype
from .errors import listing, refuse, shown
from .machine_checks import check_number, problems_of, unfit_parts


@dataclass(frozen=True)
class Memory:
    """A level of a device's memory: up to `size` bytes are read and written at `rate`."""

    size: int
    rate: float


@dataclass(frozen=True)
class Link:
    """What connects blocks of `devices` neighbours in the mesh's device order (None: any number of them).

    rate    bytes that a device receives
    start   what a collective takes without its bytes
    hop     what every message after the first one adds to that
    """

    name: str
    devices: int | None
    rate: float
    start: float
    hop: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """A class of operators: a call takes `start`, and then as long as the slower of its operations and its bytes, at
    these shares of the machine's rates. `again`: the share of the memory's rate at which a kernel's blocks are loaded
    again from beyond the nearest memory, which its operations don't hide; 0: they do."""

    start: float = 0.0
    flops: float = 1.0
    memory: float = 1.0
    again: float = 0.0


@dataclass(frozen=True)
class Work:
    """Seconds that a call takes before it works, that its operations and its bytes take beside each other, and until
    what lies `far` is near, which nothing hides."""

    start: float
    flops: float
    memory: float
    far: float = 0.0

    @property
    def seconds(self) -> float:
        """In all."""
        return self.start + max(self.flops, self.memory) + self.far

    @property
    def bound(self) -> str:
        """What takes most of it: start, flops or memory."""
        parts = ("flops", self.flops), ("memory", max(self.memory, self.far)), ("start", self.start)
        return max(parts, key=lambda part: part[1])[0]


@dataclass(frozen=True)
class Tuning:
    """Sizes from which one way of doing something beats another, on the processor that a Machine describes.

    elements_per_thread  elements of a copy that make up for handing them to another thread
    seconds_per_thread   seconds of an operator that make up for handing it to another thread
    kept_memory          bytes of tiles' memory that are kept for later tiles
    fresh_memory         bytes from which memory is taken from the system, and kept
    rotate_from          bytes to everybody that are sent peer by peer from where they lie
    chunked_from         bytes from which an all-reduce goes chunk by chunk
    segment              bytes of a chunked all-reduce that are reduced at a time
    totals               running totals of a reduction along the last dim
    long_row             elements of a row from which loops over it are joined where a row stays in registers
    long_scalar_row      the same where a scalar per row goes through memory
    stack                bytes of a block that may lie on the stack
    products_ahead       products that may run between a collective's start and the use of its result
    """

    elements_per_thread: int = 1 << 20
    seconds_per_thread: float = 1e-4
    kept_memory: int = 1 << 28
    fresh_memory: int = 1 << 20
    rotate_from: int = 1 << 20
    chunked_from: int = 1 << 22
    segment: int = 1 << 23
    totals: int = 32
    long_row: int = 64
    long_scalar_row: int = 256
    stack: int = 1 << 10
    products_ahead: int = 2


@dataclass(frozen=True)
class Machine:
    """Equal devices, and what connects them.

    flops      per dtype, operations of the units that multiply matrices; "float8" stands for all formats of 8 bits
    memory     levels, the nearest first; the last one is where tensors live
    links      levels, the innermost first
    launch     seconds from one kernel or operator to the next that no work hides
    call       seconds of a run beside its steps
    busy       the share of a collective's time that the kernel beside it loses: 0 .. 1
    devices    how many there are (None: as many as a mesh has)
    processors how many of them work at the same time, where they share processors (None: all)
    turn       where devices take turns on a processor: seconds from one step to the next that no call takes
    start      ... and what `launch` is there, as a multiple of that on one device alone
    cold_start seconds that a step takes more where more than the second nearest memory holds was touched since one of
               its operator started: its code has left that, too
    apart      where devices share processors: seconds in which a step is handed to those that take it at the same time
    result     seconds in which a run hands a result to its caller, beside copying it, for every part of it that devices
               which share processors have; 0: it is handed on as it is
    action     of a pipeline: seconds of an action beside its fragment's run, as threads wait for each other's values
    processor  which one `measure` ran on; None: its rates are of no processor that is known
    price      of a device, per hour
    classes    operators that reach another share of the rates, by operator or by class of operators

    >>> machine = Machine("one", {"float32": 1e12}, (Memory(2**30, 1e11),), (Link("wire", None, 1e9, 1e-5),))
    >>> machine.peak("float32") / machine.link(8).rate
    1000.0
    """

    name: str
    flops: Mapping[str, float]
    memory: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    _: KW_ONLY
    launch: float = 0.0
    call: float = 0.0
    busy: float = 0.0
    devices: int | None = None
    processors: int | None = None
    turn: float = 0.0
    start: float = 1.0
    cold_start: float = 0.0
    apart: float = 0.0
    result: float = 0.0
    action: float = 0.0
    processor: str | None = None
    price: float | None = None
    classes: Mapping[str, Roofline] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    sources: Mapping[str, str] = field(default_factory=dict)

    _measure: ClassVar[Callable[[float], Machine]]  # they run operators, which this module knows nothing of
    _with_kernel: ClassVar[Callable[[Machine, Any], Machine]]

    def __post_init__(self) -> None:
        parts = {"memory": Memory, "links": Link, "classes": Roofline, "tuning": Tuning}
        if unfit := list(unfit_parts(self, parts)):
            refuse(unfit, where=f"machine {shown(self.name)}", fix="pass what Machine's docstring says of each")
        for name in ("flops", "classes", "sources"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name in ("memory", "links"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = list(problems_of(self))
        if problems:
            refuse(problems, where=f"machine {self.name!r}", fix=_NUMBERS)

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.links))

    def peak(self, dtype: object) -> float:
        """Operations per second on `dtype`, by its name or as torch's, or on all formats of its size (`float8`);
        integers and booleans count as float32."""
        wanted = str(dtype).removeprefix("torch.")
        if not is_float(wanted):
            if not wanted.startswith(("int", "uint", "bool")):
                numpy_dtype(wanted)  # refuses what is none
            wanted = "float32"
        if wanted not in self.flops:
            wanted = wanted.partition("_")[0]
        if wanted not in self.flops:
            refuse(
                f"no rate of operations on {dtype}",
                where=f"machine {self.name!r}",
                why=f"it has rates for {listing(sorted(self.flops))}",
                fix=f"add one: dataclasses.replace(machine, flops={{**machine.flops, {wanted!r}: ...}})",
            )
        return self.flops[wanted]

    @property
    def main_memory(self) -> Memory:
        """Where tensors live."""
        return self.memory[-1]

    def memory_rate(self, nbytes: float) -> float:
        """Bytes per second of work on `nbytes` in all: that of the nearest level that holds them."""
        return next((level.rate for level in self.memory if nbytes <= level.size), self.memory[-1].rate)

    def link(self, devices: int) -> Link:
        """The innermost link that connects a block of that many neighbours."""
        found = next((link for link in self.links if link.devices is None or devices <= link.devices), None)
        if found is None:
            largest = max((link.devices or 0 for link in self.links), default=1)
            refuse(
                f"nothing connects {devices} devices",
                where=f"machine {self.name!r}",
                why=f"its links reach {largest}" if self.links else "it has no links",
                fix=f"use a mesh of at most {largest} devices, or a machine with a link of devices >= {devices}",
            )
        return found

    def joining(self, first: int, last: int) -> Link:
        """The innermost link that connects the devices of these numbers."""
        blocks = (link for link in self.links if link.devices is None or first // link.devices == last // link.devices)
        return next(blocks, None) or self.link(last + 1)  # which says how far links reach

    def seen_from(self, first: int, devices: int) -> Machine:
        """The machine as a mesh of so many neighbours has it that starts at device number `first`: where it starts
        inside of a block that a link connects, and goes on in the next one, blocks of it have fewer neighbours."""
        links = list[Link]()
        for link in self.links:
            blocks = link.devices
            if blocks is not None and first // blocks < (first + devices - 1) // blocks:
                blocks = math.gcd(first, blocks)
            if blocks is None or not links or blocks > (links[-1].devices or 0):
                links.append(replace(link, devices=blocks))
        return self if tuple(links) == self.links else replace(self, links=tuple(links))

    def roofline(self, *names: str) -> Roofline:
        """The class that is called by the first of `names` that there is; none: the machine's own rates."""
        return next((self.classes[name] for name in names if name in self.classes), _PLAIN)

    def work(
        self, flops: float, nbytes: float, dtype: str, *names: str, again: float = 0.0, between: float = 0.0
    ) -> Work:
        """What an operator of the class `names` (as in `roofline`) takes, by what it takes it for. `again`: bytes that
        a kernel loads a second time and more often, after so many bytes `between`."""
        roofline = self.roofline(*names)
        computing = flops / (self.peak(dtype) * roofline.flops)
        moving = nbytes / (self.memory_rate(nbytes) * roofline.memory)
        beyond = roofline.again and nbytes > self.memory[0].size
        far = again / (self.memory_rate(between) * roofline.again) if beyond else 0.0
        return Work(self.launch + roofline.start, computing, moving, far)

    def rounds(self, devices: int, apart: bool = True) -> int:
        """How often the processors go round that so many devices share; one of them does, unless they work `apart`."""
        return 1 if self.processors is None else math.ceil(devices / (self.processors if apart else 1))

    def in_turn(self, work: Work, rounds: int, devices: int, apart: bool) -> float:
        """Seconds of a call that processors make for so many of a mesh's devices one after the other, or, `apart`, for
        as many at a time as there are processors."""
        if self.processors is None or devices == 1:
            return work.seconds * rounds
        handed = self.apart if apart else 0.0
        return self.turn + handed + rounds * (work.seconds + self.launch * (self.start - 1))

    def colder(self, touched: float) -> float:
        """What `cold_start` comes to where so many bytes were touched; in eighths."""
        if not self.cold_start or len(self.memory) < 2:
            return 0.0
        nearest, next_one = self.memory[0].size, self.memory[1].size
        gone = min(1.0, max(0.0, (touched - nearest) / (next_one - nearest)))
        return self.cold_start * int(8 * gone) / 8

    def called(self, touched: float, results: Iterable[tuple[int, int]]) -> float:
        """Seconds of a run beside its steps, which touches so many bytes and gives `results`: of how many bytes each,
        and in how many parts."""
        given = list(results) if self.result else []
        copied = 2 * sum(nbytes / self.memory_rate(2 * nbytes) for nbytes, _ in given)
        return self.call + self.result * sum(parts for _, parts in given) + self.colder(touched) + copied

    @property
    def flops_per_byte(self) -> float:
        """The float32 operations of a device while it receives a byte over the outermost link."""
        return self.peak("float32") / self._outermost.rate

    @property
    def bytes_per_start(self) -> float:
        """The bytes that a device receives over the outermost link while a collective starts."""
        return self._outermost.start * self._outermost.rate

    @property
    def _outermost(self) -> Link:
        return self.links[-1] if self.links else self.link(2)  # which says that there is none

    def with_devices(self, devices: int) -> Machine:
        """The same with so many devices."""
        return replace(self, devices=devices)

    def check_holds(self, devices: int, what: str) -> None:
        """Refuse what needs more devices than there are."""
        if self.devices is not None and devices > self.devices:
            refuse(
                f"{what} has {devices} devices, the machine {self.devices}",
                where=f"machine {self.name!r}",
                fix=f"take a mesh of at most {self.devices} devices, or machine.with_devices({devices})",
            )

    @classmethod
    def measure(cls, seconds: float = 60.0) -> Machine:
        """This machine as a virtual mesh of it is: what operators and changes of layout take here, in CPU time, so that
        it doesn't matter who else is working. It takes at most about `seconds`, but what it can't do without (some
        20 s). Classes of operators that there was no time for are named in a warning, and in `sources["classes"]`: what
        was measured stays, and those are simulated at the rates of operations and memory alone."""
        fix = "say how long it may take: a number above 0"
        check_number("seconds", seconds, where="Machine.measure", fix=fix, above_zero=True)
        return cls._measure(seconds)

    def with_kernel(self, kernel: Any) -> Machine:
        """The machine, which `measure` gave here, with a class for a kernel: the share of its rates that the kernel
        reaches, at the sizes that it has, on one device of target "c". Simulations go by that for kernels of its name,
        at all sizes; one that has a class is not measured again.

        Raises:
            MeshTensorError: the machine's rates are not those of this processor, or it is no kernel of known sizes, or
                doesn't run.
        """
        return Machine._with_kernel(self, kernel)

    @staticmethod
    def preset(name: str) -> Machine:
        """A machine by its name: "h100", or "h100x16" for one of 16 devices. `Machine.presets()` has the names."""
        from .machine_presets import preset

        return preset(name)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that `preset` knows."""
        from .machine_presets import PRESETS

        return tuple(PRESETS)

    def to_text(self) -> str:
        """The machine as JSON, for `from_text`."""
        from .machine_presets import to_text

        return to_text(self)

    @staticmethod
    def from_text(text: str) -> Machine:
        """The machine of a text that `to_text` gave, or that was written by hand.

        Raises:
            MeshTensorError: it is no JSON, or lists what it doesn't have or can't have.
        """
        from .machine_presets import from_text

        return from_text(text)

    def __str__(self) -> str:
        from .machine_presets import table

        return table(self)


_PLAIN = Roofline()
_NUMBERS = "rates and sizes are numbers above 0, times from 0 up; none is below 1e-30 or above 1e30 but for 0"
