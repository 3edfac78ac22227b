"""Every illegal lowering is found, and the message says what is wrong."""

from dataclasses import replace

import pytest
import tilelang.language as T

import mesh_tensor as mt
from mesh_tensor.lowering import verify
from mesh_tensor.lowering.local_view import Collective, LocalKernel
from mesh_tensor.lowering.lower import collective_block
from mesh_tensor.lowering.verify import VerificationError
from mesh_tensor.program.from_kernel import build_program
from mesh_tensor.program.steps import AllocStep, FreeStep, KernelStep
from mesh_tensor.program.verify import verify_program
from mesh_tensor.redistribution.plan import Move, illegal_move
from mesh_tensor.tir.bounds import accesses_outside

from .kernels import gelu, matmul, scale
from .support import lowered
from .test_contract_reductions import activated

MESH = mt.Mesh({"x": 2})
ROWS = {"A": {"x": 0}, "B": {"x": 0}}
K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}


@pytest.fixture
def scaled():
    """B = 2 * A with split rows."""
    return lowered(scale(32, 16), MESH, ROWS)


@pytest.fixture
def cut():
    """gelu(A @ B) with a split k: two kernels, a workspace, an all-reduce."""
    return lowered(activated(32, 32, 64, gelu), MESH, K_SPLIT)


def local_problems(result, func):
    """What is wrong with another function in place of the only local kernel."""
    (step,) = (step for step in result.steps if isinstance(step, LocalKernel))
    return "\n".join(verify.local_problems(func, step.analysis, step.assignment, MESH, over_tiles=step.written_locally))


def problems(result, **changes):
    """What is wrong with a changed lowering."""
    made = replace(result, **changes)
    steps = (step for step in made.steps if isinstance(step, LocalKernel))
    found = [verify.local_problems(s.func, s.analysis, s.assignment, MESH, over_tiles=s.written_locally) for s in steps]
    return "\n".join([*sum(found, []), *verify.explicit_problems(made)])


def program_problems(result, change):
    """What verify_program finds once `change` has made other steps of the Program's."""
    program = build_program(result)
    with pytest.raises(VerificationError) as error:
        verify_program(replace(program, steps=tuple(change(list(program.steps)))))
    return str(error.value)


# -- local kernels -----------------------------------------------------------------------------------------------------


def test_the_global_kernel_is_no_local_one(scaled):
    steps = (replace(scaled.steps[0], func=scale(32, 16)),)
    assert "parameter A has shape [32, 16], the tiles of A have [16, 16]" in problems(scaled, steps=steps)


def test_a_loop_over_the_whole_dim(scaled):
    step = scaled.steps[0]
    loops = step.func.body.block.body
    longer = type(loops)(loops.loop_var, loops.min, 4, loops.kind, loops.body, loops.thread_binding, loops.annotations)
    func = step.func.with_body(type(step.func.body)([], True, replace_body(step.func.body.block, longer)))
    found = local_problems(scaled, func)
    assert "loop bx runs 4 times over tiles of 16 in blocks of 8" in found
    assert "A dim 0 is accessed at bx * 8 + i, which may lie outside 0..16" in found
    assert "B dim 0 is accessed at bx * 8 + i, which may lie outside 0..16" in found


def replace_body(block, body):
    return type(block)([], [], [], block.name_hint, body)


def test_annotations_that_are_left(scaled):
    func = scaled.steps[0].func.with_attr("mesh_tensor_info", {})
    assert "attribute mesh_tensor_info is still on it" in local_problems(scaled, func)


def test_a_collective_inside_a_kernel(scaled):
    func = scaled.steps[0].func
    buffer = func.buffer_map[func.params[0]]
    move = Move("all_reduce", ("x",), mt.Sharding.make(MESH, 2), op="sum")
    assert "mesh.all_reduce is inside it" in local_problems(
        scaled, func.with_body(collective_block(move, buffer, buffer))
    )


def test_a_variable_that_nothing_defines(scaled):
    func = scaled.steps[0].func
    without = type(func)(
        list(func.params)[:1], func.body, func.ret_type, {func.params[0]: func.buffer_map[func.params[0]]}
    )
    assert "not well-formed" in local_problems(scaled, without.with_attr("global_symbol", "scale"))


def test_guarded_accesses_are_inside():
    @T.prim_func
    def guarded(A: T.Tensor((10,), "float32"), B: T.Tensor((10,), "float32")):
        with T.Kernel(2, threads=8) as bx:
            for i in T.Parallel(8):
                if bx * 8 + i < 10:
                    B[bx * 8 + i] = T.if_then_else(bx * 8 + i >= 3, A[bx * 8 + i - 3], 0.0)

    assert accesses_outside(guarded) == []


def test_coordinates_have_ends():
    """In groups of rows: with two devices all are in the first one."""

    @T.prim_func
    def grouped(A: T.Tensor((2,), "float32"), B: T.Tensor((1,), "float32"), x: T.int32):
        with T.Kernel(1, threads=8):
            B[0] = A[x % 3 // T.min(2 - x // 3 * 3, 3) * 2]

    place = grouped.params[-1]
    assert len(accesses_outside(grouped)) == len(accesses_outside(grouped, below={place: 3})) == 1
    assert accesses_outside(grouped, below={place: 2}) == []


def test_what_is_not_proved_of_all_coordinates_is_proved_of_each():
    """From the last block of a tile to the first; the loop tells in other words than the index how many there are."""

    def blocks(x, y):
        rows = T.max(T.min(T.max(T.min(12 - x * 8, 8), 0) - y * 4, 4), 0)
        return T.min(T.min((rows + 3) // 4, 1), T.max(1 - T.max(x * 2 + y - 2, 2 - (x * 2 + y)), 0))

    def same(x, y):
        rows = T.max(T.min(T.max(12 - T.max(x * 8, 4), 0) - y * 4, 4), 0)
        return T.min((rows + 3) // 4, T.max(1 - T.max(x * 2 + y - 2, 2 - y - x * 2), 0))

    @T.prim_func
    def turned(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32"), x: T.int32, y: T.int32):
        with T.Kernel(1, threads=8):
            for k in T.serial(blocks(x, y)):
                for q in T.Parallel(4):
                    B[q] = A[same(x, y) * 4 + q - k * 4 - 4]

    x, y = turned.params[-2:]
    assert accesses_outside(turned, below={x: 2, y: 2}) == []


@pytest.mark.parametrize(
    ("index", "shown"), [(lambda m: m + 1, "+ 1"), (lambda m: m - 1, "- 1"), (lambda m: m * 2, "* 2")]
)
def test_accesses_outside_are_found(index, shown):
    @T.prim_func
    def outside(A: T.Tensor((16,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(2, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[index(bx * 8 + i)]

    (problem,) = accesses_outside(outside)
    assert problem.startswith("A dim 0 is accessed at ")
    assert shown in problem
    assert accesses_outside(outside, {("A", 0)}) == []


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_a_collective_that_is_left_out(cut):
    steps = tuple(step for step in cut.steps if not isinstance(step, Collective))
    found = problems(cut, steps=steps)
    assert "C_local_w1.1 was overwritten by C_local_w1" in found


def test_a_partial_value_that_a_kernel_reads(cut):
    first, _, last = cut.steps
    args = tuple("C_local_w1" if arg == "C_local_w1.1" else arg for arg in last.args)
    found = problems(cut, steps=(first, replace(last, args=args)))
    assert "C_local_w1 is partial (P[sum]), and the kernel reads it" in found
    assert "but the kernel needs R" in found


def test_a_value_that_was_overwritten(cut):
    first, reduce, last = cut.steps
    args = tuple("C_local_w1" if arg == "C_local_w1.1" else arg for arg in last.args)
    assert "C_local_w1 was overwritten by C_local_w1.1" in problems(
        cut, steps=(first, reduce, replace(last, args=args))
    )


def test_a_layout_that_is_not_what_the_kernel_leaves(scaled):
    wrong = mt.Sharding.make(MESH, 2, {"x": 1})
    tensors = {**scaled.tensors, "B": replace(scaled.tensors["B"], sharding=wrong)}
    found = problems(scaled, tensors=tensors)
    assert "B lies as S[1], but the kernel leaves S[0]" in found
    assert "B is annotated S[0], but B lies as S[1]" in found
    assert "parameter B has shape [16, 16], the tiles of B have [32, 8]" in found


def test_an_output_that_is_not_there(cut):
    assert "C, the result of C, is not there in the end" in problems(cut, steps=cut.steps[:-1])


def test_steps_in_the_wrong_order(cut):
    assert "C_local_w1 is used before it is defined" in problems(cut, steps=(cut.steps[1], cut.steps[0], cut.steps[2]))


@pytest.mark.parametrize(
    ("src", "kind", "axes", "after", "options", "problem"),
    [
        ("S[0], R", "all_reduce", "x", "R, R", {"op": "sum"}, "axis x goes from S[0] to R"),
        ("P[max], R", "all_reduce", "x", "R, R", {"op": "sum"}, "axis x goes from P[max] to R"),
        ("S[0], S[0]", "all_gather", "x", "R, S[0]", {"src_dim": 0}, "are not the innermost of dim 0"),
        ("R, S[0]", "slice", "x", "S[0], S[0]", {"dst_dim": 0}, "are not the innermost of dim 0"),
        ("S[0], S[0]", "all_to_all", "x", "S[1], S[0]", {"src_dim": 0, "dst_dim": 1}, "are not the innermost of dim 0"),
        ("S[0], R", "all_gather", "x", "R, S[1]", {"src_dim": 0}, "axis y changes from R to S[1]"),
        ("S[0], R", "scatter", "x", "R, R", {}, "there is no such collective"),
        ("S[0], R", "all_gather", "", "S[0], R", {"src_dim": 0}, "it is over no axis"),
        ("S[0], R", "exchange", "xy", "R, S[0]", {}, "from S[0], R to R, S[0] leads the permute over x, y"),
        ("S[0], S[0]", "exchange", "x", "R, S[0]", {}, "from S[0], S[0] to R, S[0] leads the exchange over x, y"),
        ("P[sum], S[0]", "permute", "xy", "S[0], R", {}, "which changes what is partial"),
    ],
)
def test_collectives_that_can_not_be(src, kind, axes, after, options, problem):
    mesh = mt.Mesh({"x": 2, "y": 2})
    move = Move(kind, tuple(axes), mt.Sharding.parse(mesh, 2, after), **options)
    assert any(problem in found for found in illegal_move(mt.Sharding.parse(mesh, 2, src), move))


# -- programs ----------------------------------------------------------------------------------------------------------


def test_memory_that_is_not_there(cut):
    found = program_problems(cut, lambda steps: [s for s in steps if not isinstance(s, AllocStep)])
    assert "C_local_w1 is used while it has no memory" in found
    assert "C is used while it has no memory" in found


def test_memory_that_is_never_freed(cut):
    found = program_problems(cut, lambda steps: [s for s in steps if not isinstance(s, FreeStep)])
    assert "workspace C_local_w1 is never freed" in found


def test_memory_that_is_freed_too_early(cut):
    def early(steps):
        free = next(s for s in steps if isinstance(s, FreeStep))
        steps.remove(free)
        return [steps[0], steps[1], free, *steps[2:]]

    assert "C_local_w1 is used while it has no memory" in program_problems(cut, early)


def test_memory_that_is_allocated_twice(cut):
    assert "C_local_w1 is allocated, but is already there" in program_problems(cut, lambda steps: [steps[0], *steps])


@pytest.mark.parametrize("name", ["A", "C"])
def test_parameters_are_never_freed(cut, name):
    found = program_problems(cut, lambda steps: [*steps, FreeStep(name)])
    assert f"{name} is freed, but is no workspace that is there" in found


def change_kernel(**changes):
    def change(steps):
        at = next(n for n, step in enumerate(steps) if isinstance(step, KernelStep))
        steps[at] = replace(steps[at], **changes)
        return steps

    return change


def test_arguments_that_do_not_fit_the_kernel(cut):
    assert "takes 3 tensors, and is given 1" in program_problems(cut, change_kernel(args=("A",), writes=("A",)))
    assert "takes 0 scalars, and is given 1" in program_problems(cut, change_kernel(axes=("x",)))
    assert "writes C, no argument" in program_problems(cut, change_kernel(writes=("C",)))
    assert "there is no value Z" in program_problems(cut, change_kernel(args=("A", "B", "Z")))


def test_matmul_is_legal_as_it_is():
    verify_program(build_program(lowered(matmul(32, 32, 32), MESH, K_SPLIT)))
