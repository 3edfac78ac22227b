"""Programs that take blocks in waves, each of which sums products and goes on with the sum: the sum is completed wave
by wave. Nothing is said of waves that hand a sum on, or of which some set it and others use it."""

import pytest
import tilelang.language as T
import torch

from kernels.schedules import waves_matmul
from tests.other_machines import AT_ONCE, planned_for

from .support import lowered, outline, run

K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}}


@pytest.fixture(autouse=True)
def _no_start():
    """Collectives start at once, so that small tensors are worth them."""
    with planned_for(AT_ONCE):
        yield


def moved(func, mesh, layouts):
    """The kinds of collectives."""
    return {step.partition("(")[0] for step in outline(lowered(func, mesh, layouts))} - {"kernel"}


def close(result, wanted):
    torch.testing.assert_close(result.float(), wanted, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("sizes", "mesh", "layouts"),
    [
        ((32, 48, 128), {"x": 2}, K_SPLIT),
        ((30, 41, 170), {"x": 3}, K_SPLIT),  # programs without a block in the last wave, short blocks, short tiles
        ((30, 41, 170), {"x": 2, "y": 2}, {"A": {"x": 1, "y": 1}, "B": {"x": 0, "y": 0}}),
        ((16, 16, 161), {"x": 8}, K_SPLIT),  # one block for six programs, a device with nothing
    ],
)
def test_sums_are_completed_before_they_are_rounded(sizes, mesh, layouts):
    M, N, K = sizes
    func, a, b = waves_matmul(M, N, K, out_dtype="float16"), torch.randn(M, K), torch.randn(K, N)
    assert moved(func, mesh, layouts) == {"all_reduce"}
    close(run(func, mesh, layouts, a, b), a @ b)


def waves(cleared="guarded", used="guarded", asked=None, after=False):
    """Six blocks of rows for four programs in two waves; wave w writes twice its sum.

    `cleared`: when the sum is set to 0, `used`: when it is used; `asked`: the condition is on what was read, and read
    again after it changed; `after`: the last sum is used behind the waves."""

    @T.prim_func
    def kernel(A: T.Tensor((24, 20)), B: T.Tensor((20, 4)), C: T.Tensor((24, 4), "float16"), D: T.Tensor((16, 4))):
        with T.Kernel(4, threads=32) as pid:
            a = T.alloc_shared((4, 4), "float32")
            b = T.alloc_shared((4, 4), "float32")
            total = T.alloc_fragment((4, 4), "float32")
            twice = T.alloc_fragment((4, 4), "float32")
            wanted = T.alloc_var("int32")
            wanted = 6
            T.fill(total, 1)
            for w in T.serial(2):
                at = w * 4 + pid
                if at < (wanted if asked else 6):
                    if cleared == "guarded":
                        T.clear(total)
                    if w == (0 if cleared == "first" else 9):
                        T.clear(total)
                    if cleared == "in part":
                        T.fill(total[0:2, 0:4], 0)
                    for k in T.serial(5):
                        T.copy(A[at * 4, k * 4], a)
                        T.copy(B[k * 4, 0], b)
                        T.gemm(a, b, total)
                    if asked:
                        wanted = 3
                    if used == "guarded":
                        for i, j in T.Parallel(4, 4):
                            C[at * 4 + i, j] = T.cast(total[i, j] * 2.0, "float16")
                if used == "by all":
                    for i, j in T.Parallel(4, 4):
                        twice[i, j] = total[i, j] * 2.0
                    if at < 6:
                        T.copy(twice, C[at * 4, 0])
            if after:
                T.copy(total, D[pid * 4, 0])
            else:
                T.clear(total)
                T.copy(total, D[pid * 4, 0])

    return kernel


def wanted_of(cleared="guarded", used="guarded", asked=None, after=False):
    """What `waves` computes, said in Python."""

    def compute(a, b):
        c, d = torch.zeros(24, 4), torch.zeros(16, 4)
        for pid in range(4):
            total, limit = torch.ones(4, 4), 6
            for w in range(2):
                at = w * 4 + pid
                if at < (limit if asked else 6):
                    if cleared == "guarded" or (cleared == "first" and w == 0):
                        total = torch.zeros(4, 4)
                    if cleared == "in part":
                        total[0:2] = 0
                    total = total + a[at * 4 : at * 4 + 4] @ b
                    limit = 3
                    c[at * 4 : at * 4 + 4] = total * 2
            if after:
                d[pid * 4 : pid * 4 + 4] = total
        return c, d

    return compute


@pytest.mark.parametrize(
    "options",
    [
        {"cleared": "guarded"},
        {"cleared": "first"},  # the second wave goes on with the first one's sum
        {"cleared": "never"},
        {"cleared": "in part"},
        {"used": "by all"},  # programs without a block use what they have of the wave before
        {"asked": True},  # the condition no longer holds when the sum is used
        {"after": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}], ids=str)
def test_waves_that_hand_something_on(options, mesh):
    a, b = torch.randn(24, 20), torch.randn(20, 4)
    c, d = run(waves(**options), mesh, K_SPLIT, a, b, torch.zeros(24, 4).half(), torch.zeros(16, 4))
    for result, wanted in zip((c, d), wanted_of(**options)(a, b), strict=True):
        close(result, wanted)


def test_only_waves_that_set_all_of_what_they_use_have_sums_of_their_own():
    kinds = {
        name: moved(waves(**options), {"x": 2}, K_SPLIT)
        for name, options in {
            "own": {},
            "first": {"cleared": "first"},
            "in part": {"cleared": "in part"},
            "asked": {"asked": True},
        }.items()
    }
    assert kinds == {"own": {"all_reduce"}, "first": {"all_gather"}, "in part": {"all_gather"}, "asked": {"all_gather"}}


def test_conditions_that_change_on_the_way_hand_sums_on():
    """The sum is set to 0 in the first wave alone, under the words under which it is used in both."""

    @T.prim_func
    def kernel(A: T.Tensor((24, 20)), B: T.Tensor((20, 4)), C: T.Tensor((24, 4), "float16")):
        with T.Kernel(3, threads=32) as pid:
            a = T.alloc_shared((4, 4), "float32")
            b = T.alloc_shared((4, 4), "float32")
            total = T.alloc_fragment((4, 4), "float32")
            on = T.alloc_var("int32")
            on = 1
            for w in T.serial(2):
                at = w * 3 + pid
                if on > 0:
                    T.clear(total)
                on = 1
                if on > 0:
                    for k in T.serial(5):
                        T.copy(A[at * 4, k * 4], a)
                        T.copy(B[k * 4, 0], b)
                        T.gemm(a, b, total)
                if on > 0:
                    for i, j in T.Parallel(4, 4):
                        C[at * 4 + i, j] = T.cast(total[i, j] * 2.0, "float16")
                on = 0

    a, b = torch.randn(24, 20), torch.randn(20, 4)
    sums = (a @ b).view(2, 12, 4).cumsum(0).view(24, 4)
    for devices in (2, 3):
        close(run(kernel, {"x": devices}, K_SPLIT, a, b), sums * 2)
