"""Programs: steps, what they cost, and how long memory lives."""

import re
from pathlib import Path

import pytest
from tvm import relax

import mesh_tensor as mt
from kernels.matmul import matmul, split_k_matmul
from kernels.softmax import softmax
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, WaitStep, of_kinds
from mesh_tensor.rules.operator.call import op_call

K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}


def program(func, mesh, layouts):
    return lower_to_program(mt.annotate(func, mesh, layouts))


def words(made):
    """The steps in words."""
    return [
        f"alloc {step.storage}"
        if isinstance(step, AllocStep)
        else f"free {step.storage}"
        if isinstance(step, FreeStep)
        else f"kernel {' '.join(step.args)}"
        if isinstance(step, KernelStep)
        else f"{step.kind} {step.src} {step.dst}"
        for step in made.steps
    ]


def test_nothing_but_a_kernel():
    made = program(matmul(64, 64, 64, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}})
    assert words(made) == ["alloc C", "kernel A B C"]
    assert made.name == "matmul_kernel"
    assert [(p.name, p.input, p.output) for p in made.parameters] == [
        ("A", "A", None),
        ("B", "B", None),
        ("C", None, "C"),
    ]
    assert {name: value.tile_shape for name, value in made.values.items()} == {
        "A": (32, 64),
        "B": (64, 64),
        "C": (32, 64),
    }


def test_a_partial_output_is_reduced_in_place():
    made = program(matmul(64, 64, 64, 16, 16, 16), {"x": 2}, K_SPLIT)
    assert words(made) == ["alloc C", "kernel A B C", "all_reduce C C.1"]
    assert made.values["C.1"].storage == made.values["C"].storage == "C"
    assert made.parameters[-1].output == "C.1"


def test_workspaces_live_from_their_first_use_to_their_last():
    made = program(softmax(32, 64, 16), {"x": 2}, {"X": {"x": 1}, "Y": {"x": 1}})
    steps = words(made)
    freed = [step.split()[1] for step in steps if step.startswith("free")]
    assert freed
    assert len(set(freed)) == len(freed)
    for storage in freed:
        uses = [
            n
            for n, step in enumerate(made.steps)
            if isinstance(step, (KernelStep, CollectiveStep))
            and any(
                made.values[name].storage == storage for name in getattr(step, "args", None) or (step.src, step.dst)
            )
        ]
        assert steps.index(f"alloc {storage}") < uses[0]
        assert steps.index(f"free {storage}") == uses[-1] + 1 + sum(
            step.startswith("free") for step in steps[uses[-1] + 1 : steps.index(f"free {storage}")]
        )


def test_what_is_gathered_is_a_workspace():
    made = program(matmul(64, 64, 64, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}})
    assert words(made) == ["alloc B.1", "all_gather B B.1", "alloc C", "kernel A B.1 C", "free B.1"]


def test_what_is_updated_comes_in_and_goes_out():
    made = program(split_k_matmul(32, 32, 64, 2, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}})
    (c,) = (p for p in made.parameters if p.name == "C")
    assert (c.input, c.output) == ("C", "C")
    assert words(made) == ["kernel A B C"], "its memory is the caller's"


@pytest.mark.parametrize(
    ("mesh", "layouts", "kind", "expected"),
    [
        # A device has (a tile of) 64 x 64 floats: 16384 bytes.
        ({"x": 2}, K_SPLIT, "all_reduce", 16384),
        ({"x": 4}, K_SPLIT, "all_reduce", 2 * 16384 * 3 // 4),
        ({"x": 4}, {**K_SPLIT, "C": {"x": 0}}, "reduce_scatter", 16384 * 3 // 4),
        ({"x": 4}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}}, "all_gather", 16384 // 4 * 3),
        ({"x": 4}, {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 0}}, "all_to_all", 16384 // 4 * 3 // 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes(mesh, layouts, kind, expected):
    made = program(matmul(64, 64, 64, 16, 16, 16), mesh, layouts)
    found = [step.bytes for step in made.steps if isinstance(step, CollectiveStep) and step.kind == kind]
    assert found == [expected]


def test_slices_send_nothing():
    made = program(softmax(32, 64, 16), {"x": 2}, {"X": {}, "Y": {"x": 0}})
    assert [step.bytes for step in made.steps if isinstance(step, CollectiveStep)] == [0]


def test_flops_are_those_of_one_device():
    whole = program(matmul(64, 64, 64, 16, 16, 16), {"x": 1}, {})
    half = program(matmul(64, 64, 64, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}})
    flops = [next(step.flops for step in made.steps if isinstance(step, KernelStep)) for made in (whole, half)]
    assert flops == [2 * 64**3, 64**3]


def test_kernels_say_which_coordinates_they_take():
    made = program(matmul(64, 64, 37, 16, 16, 16), {"x": 2, "y": 3}, {"A": {"y": 1}, "B": {"y": 0}})
    (step,) = (step for step in made.steps if isinstance(step, KernelStep))
    assert step.axes == ("y",)
    assert step.writes == ("C",)
    assert [p.name for p in step.func.params if p not in step.func.buffer_map] == ["y"]


def test_steps_do_not_grow_with_the_mesh():
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    small, large = (program(matmul(4096, 64, 4096), {"x": n, "y": n}, layouts) for n in (2, 64))
    assert words(small) == words(large)


def of_every_kind():
    """One step of each kind, by its kind's method of Meanings."""
    reduce = CollectiveStep("all_reduce", "P", "C", ("x",), "sum", None, None, 64, "partial")
    call = op_call(
        relax.BlockBuilder().normalize(relax.op.exp(relax.Var("x", relax.TensorStructInfo((4,), "float32"))))
    )
    return {
        "kernel": KernelStep("k", matmul(64, 64, 64, 16, 16, 16), ("A", "B", "C"), (), ("C",), 7),
        "op": OpStep(call, ("A",), ("E",), frozenset(), 4, "lv"),
        "collective": reduce,
        "wait": WaitStep(reduce),
        "alloc": AllocStep("C"),
        "free": FreeStep("C"),
    }


def test_steps_say_what_they_read_and_write():
    said = {kind: (step.reads, step.writes, step.uses, step.makes) for kind, step in of_every_kind().items()}
    assert said == {
        "kernel": (("A", "B", "C"), ("C",), ("A", "B", "C"), ()),
        "op": (("A",), ("E",), ("A", "E"), ("E",)),
        "collective": (("P",), ("C",), ("P", "C"), ()),
        "wait": (("P",), ("C",), ("P", "C"), ()),
        "alloc": ((), (), (), ()),
        "free": ((), (), (), ()),
    }


def test_steps_say_what_they_cost_and_do():
    said = {kind: (step.flops, step.bytes, step.words) for kind, step in of_every_kind().items()}
    assert said == {
        "kernel": (7, 0, "kernel k"),
        "op": (4, 0, "operator exp (lv)"),
        "collective": (0, 64, "all_reduce(P, sum) over x"),
        "wait": (0, 0, "the end of all_reduce(P, sum) over x"),
        "alloc": (0, 0, "memory for C"),
        "free": (0, 0, "the end of the memory for C"),
    }
    steps = of_every_kind()
    assert [kind for kind, step in steps.items() if step.collective == steps["collective"]] == ["collective", "wait"]


def test_every_kind_has_a_meaning_of_its_own():
    class Kinds:
        def __getattr__(self, name):
            return lambda step: (name, step)

    steps = of_every_kind()
    assert [step.mean(Kinds()) for step in steps.values()] == list(steps.items())


def test_who_cares_for_some_kinds_gets_these_in_order():
    steps = list(of_every_kind().values())
    found = of_kinds([*steps, *steps], {KernelStep: lambda step: step.name, AllocStep: lambda step: step.storage})
    assert found == ["k", "C", "k", "C"]


def test_hardly_anything_asks_which_kind_a_step_is():
    """What looks at steps goes by what they say, or by a table of meanings."""
    root = Path(mt.__file__).parent
    asks = re.compile(r"isinstance\([^()]+, \(?(?:\w+, )*(?:Kernel|Op|Collective|Loop|Wait|Alloc|Free)Step\b")
    asking = [file.relative_to(root).as_posix() for file in sorted(root.rglob("*.py")) if asks.search(file.read_text())]
    assert len(asking) <= 5, asking
