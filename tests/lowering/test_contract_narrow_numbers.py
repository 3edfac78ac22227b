"""Clause 4: numbers that leave a narrow type, or one without a sign, begin anew there, as places, bounds of loops,
conditions and values; nothing is concluded from what they would be in a wider one."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

from .support import assert_right

N = 300
ALL = torch.arange(N)


def byte(numbers):
    """What 8 bits keep."""
    return numbers % 256


def indexed(place, read=N):
    """`B[i] = A[place(i)]`."""

    @T.prim_func
    def kernel(A: T.Tensor((read,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, 16), threads=16) as bx:
            for j in T.Parallel(16):
                if bx * 16 + j < N:
                    B[bx * 16 + j] = A[T.cast(place(bx * 16 + j), "int32")]

    return kernel


PLACES = {
    "cast": (lambda i: T.cast(i, "uint8"), byte(ALL)),
    "cast, with a sign": (lambda i: T.cast(T.cast(i, "int8"), "int32") + 128, byte(ALL + 128)),
    "below 0": (lambda i: T.cast(i % 16, "uint8") - T.uint8(3), byte(ALL % 16 - 3)),
    "cast from a negative": (
        lambda i: T.min(T.cast(T.cast(i - 9, "int8"), "uint16"), T.uint16(299)),
        torch.where(byte(ALL - 9) > 127, 299, byte(ALL - 9)),
    ),
    "of 32 bits": (
        lambda i: T.cast(i, "uint32") * T.uint32(2654435761) // T.uint32(2**24),
        ALL * 2654435761 % 2**32 // 2**24,
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    place, expected = PLACES[name]
    for layouts in ({"B": {"x": 0}}, {"A": {"x": 0}, "B": {"x": 0}}):
        assert_right(indexed(place), {"x": 2}, layouts, [torch.randn(N)], lambda a: a[expected])


def test_what_a_cast_keeps_is_a_place():
    rule = mt.sharding_rule(indexed(lambda i: T.cast(T.cast(i, "int64"), "int32")))
    assert str(rule) == "A[m] -> B[m]; m parallel"
    assert "A[*]" in str(mt.sharding_rule(indexed(lambda i: T.cast(i, "uint8"))))


@pytest.mark.parametrize("layouts", [{"A": {"x": 0}}, {"B": {"x": 0}}])
def test_a_loop_that_ends_where_8_bits_say(layouts):
    """3 less than 0, 1 and 2 is 253, 254 and 255: no loop is as short as the largest number less 3."""

    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(24, threads=32) as bx:
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for k in T.serial(T.cast(T.cast(bx, "uint8") - T.uint8(3), "int32")):
                total[0] = total[0] + A[k]
            T.copy(total, B[bx])

    def expected(a):
        return torch.stack([a[:end].sum() for end in byte(torch.arange(24) - 3)])

    assert_right(kernel, {"x": 3}, layouts, [torch.randn(N)], expected)


def test_what_lies_behind_an_end_begins_anew():
    """200 + 100 is 44 in 8 bits, less than the 255 that a minimum would not see."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 20), "uint8"), low: T.Tensor((2,), "uint8")):
        with T.Kernel(2, threads=32) as bx:
            part = T.alloc_fragment((1, 16), "uint8")
            lowest = T.alloc_fragment((1,), "uint8")
            T.fill(lowest, 255)
            for k in T.serial(2):
                T.copy(A[bx, k * 16], part)
                for i, j in T.Parallel(1, 16):
                    part[i, j] = T.if_then_else(k * 16 + j < 20, part[i, j], T.uint8(200))
                for i, j in T.Parallel(1, 16):
                    part[i, j] = T.min(part[i, j] + T.uint8(100), T.uint8(255))
                T.reduce_min(part, lowest, dim=1, clear=False)
            T.copy(lowest, low[bx])

    a = torch.randint(0, 100, (2, 20), dtype=torch.uint8)
    for devices in (2, 3):
        assert_right(kernel, {"x": devices}, {"A": {"x": 1}}, [a], lambda a: torch.full((2,), 44, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
@pytest.mark.parametrize("parallel", [False, True])
def test_loops_that_count_in_other_types(dtype, parallel):
    """Their dims are split as those of any loop; what is computed of a count is so in its type."""
    number = getattr(T, dtype)
    loop = T.Parallel if parallel else T.serial

    @T.prim_func
    def kernel(A: T.Tensor((13,), "float32"), B: T.Tensor((13,), "float32"), C: T.Tensor((13,), "float32")):
        with T.Kernel(1, threads=32):
            for k in loop(number(13)):
                B[k] = A[k] + T.cast(k - number(3), "float32")
                C[k] = T.if_then_else(k <= number(5), A[k], 0.0)

    def expected(a):
        less = ALL[:13] - 3
        return a + (less if dtype == "int16" else less % 2 ** int(dtype[4:])), a * (ALL[:13] <= 5)

    assert mt.sharding_rule(kernel).factors["m"] == "parallel"
    a = torch.randn(13)
    for layouts in ({"B": {"x": 0}}, {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}}):
        for devices in (2, 3):
            annotated = mt.annotate(kernel, {"x": devices}, layouts)
            result = mt.compile(annotated, target="interpret", poison=True)(a)
            torch.testing.assert_close(result, expected(a))


@pytest.mark.parametrize("devices", [2, 3])
def test_conditions_on_bits(devices):
    """The 128 of a byte is no -128, nor is the 3 % -2 of a number with a sign what is rounded down."""

    @T.prim_func
    def kernel(A: T.Tensor((13,), "float32"), B: T.Tensor((13,), "float32"), C: T.Tensor((13,), "float32")):
        with T.Kernel(1, threads=32):
            for k in T.serial(T.uint8(13)):
                B[k] = 1.0
                C[k] = 1.0
                if (k ^ T.uint8(128)) < T.uint8(5):
                    B[k] = A[k]
                if T.truncmod(T.cast(k, "int8") - T.int8(20), T.int8(3)) >= T.int8(0):
                    C[k] = A[k]

    def expected(a):
        return torch.ones(13), torch.where((20 - ALL[:13]) % 3 == 0, a, 1.0)

    a = torch.randn(13)
    layouts = {"A": {"x": 0}, "B": {"x": 0}, "C": {"x": 0}}
    results = mt.compile(mt.annotate(kernel, mt.Mesh({"x": devices}), layouts), target="interpret", poison=True)(a)
    for result, wanted in zip(results, expected(a), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("devices", [2, 3])
def test_what_lies_behind_an_end_saturates(devices):
    """1000 is 448 in a type without infinities; that it is no number, which a maximum might leave out, is not said."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 20), "float8_e4m3fn"), S: T.Tensor((2,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            part = T.alloc_fragment((1, 16), "float8_e4m3fn")
            value = T.alloc_fragment((1, 16), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for k in T.serial(2):
                T.copy(A[bx, k * 16], part)
                for i, j in T.Parallel(1, 16):
                    known = T.if_then_else(k * 16 + j < 20, T.cast(part[i, j], "float32"), 1000.0)
                    part[i, j] = T.cast(known, "float8_e4m3fn")
                for i, j in T.Parallel(1, 16):
                    value[i, j] = T.max(T.float32(0), T.cast(part[i, j], "float32"))
                T.reduce_sum(value, total, dim=1, clear=False)
            T.copy(total, S[bx])

    a = (torch.rand(2, 20) + 1).to(torch.float8_e4m3fn)
    assert_right(kernel, {"x": devices}, {"A": {"x": 1}}, [a], lambda a: a.float().sum(1) + 12 * 448)
