"""Random scalar programs: kernels with variables, conditions on data, stores at loaded places and loops whose order
matters, on random meshes."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from .program_scene import ROWS, Program
from .program_steps import STEPS
from .spec import Block, Case, KernelSpec, Line
from .strategy import MESHES, make_shardings


def make_program(random: Random) -> KernelSpec:
    """A kernel of a few steps, each row's after the other's or apart from them."""
    p = Program(random, random.choice(ROWS), random.choice((1, 3, 5, 6, 7, 8)), random.choice((1, 4, 5, 7, 8, 9, 11)))
    p.dtype = p.pick(("float32", "float32", "int32"))
    p.row = {"none": "", "grid": "bx"}.get(p.kind, "r")
    size = p.pick((2, 3, 4)) if p.kind == "blocks" else 1
    if p.kind == "blocks":
        p.row = f"bx * {size} + r"
    for _ in range(p.random.randint(1, 4)):
        p.pick(STEPS)(p)
    if not any(param.role != "in" for param in p.params.values()):
        STEPS[0](p)
    return _kernel(p, size)


def _kernel(p: Program, size: int) -> KernelSpec:
    starts = [f"{name} = {init}" for name, (_, init) in p.variables.items() if name not in p.carried]
    body: list[Line] = [*(starts if p.has_rows else []), *p.lines]
    if p.kind == "blocks":
        inside = [Block(f"if {p.row} < {p.m}", tuple(body))] if p.m % size else body
        body = [Block(f"for r in T.serial({size})", tuple(inside))]
    elif p.kind in ("serial", "parallel"):
        body = [Block(f"for r in T.{'serial' if p.kind == 'serial' else 'Parallel'}({p.m})", tuple(body))]
    declared = [f'{name} = T.alloc_var("{dtype}", init={init})' for name, (dtype, init) in p.variables.items()]
    programs = {"grid": p.m, "blocks": -(-p.m // size)}.get(p.kind, 1)
    spec = KernelSpec((), (("bx", programs),), tuple(p.buffers), (*declared, *body))
    used = set(re.findall(r"\w+", spec.source()))
    params = sorted((q for q in p.params.values() if q.name in used), key=lambda q: q.role != "in")
    return replace(spec, params=tuple(params))


def make_program_case(number: int) -> Case:
    """The program with this number."""
    random = Random(number)
    kernel = make_program(random)
    mesh = dict(zip("xyz", random.choice(MESHES), strict=False))
    shardings = make_shardings(random, kernel.params, mesh)
    blank = random.random() < 0.3
    return Case(kernel.source(), kernel.params, mesh, shardings, blank=blank, as_python=True, seed=number)


def program_cases() -> st.SearchStrategy[Case]:
    """Random programs, each on a random mesh."""
    return st.integers(0, 2**40).map(make_program_case)
