"""8-bit floats on a CPU: bit for bit as torch's, on every target, on one device and on several."""

import numpy as np
import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

TARGETS = ("interpret", "c")
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3")
SHARDING = {"X": {"x": 0}, "Y": {"x": 0}}


def torch_format(name):
    """`float8_e4m3` is TileLang's name of the format without infinities."""
    return getattr(torch, "float8_e4m3fn" if name == "float8_e4m3" else name)


def run(func, target, *inputs, devices=2, sharding=SHARDING):
    kernel = mt.compile(mt.annotate(func, mt.Mesh({"x": devices}), sharding), target=target)
    return torch.as_tensor(kernel(*inputs))


def cast(n, source, destination):
    @T.prim_func
    def casted(X: T.Tensor((n,), source), Y: T.Tensor((n,), destination)):
        with T.Kernel(T.ceildiv(n, 64), threads=32) as bx:
            for i in T.Parallel(64):
                Y[bx * 64 + i] = T.cast(X[bx * 64 + i], destination)

    return casted


def telling_floats():
    """Every 8-bit value, what lies halfway between two, their neighbours, what overflows, what vanishes, NaN."""
    values = [torch.arange(256, dtype=torch.uint8).view(torch_format(f)).float() for f in FORMATS[:2]]
    finite = torch.cat([v[v.isfinite()] for v in values]).unique()
    halfway = (finite[1:] + finite[:-1]) / 2
    limits = torch.tensor(
        [464.0, 464.1, 479.9, 480.0, 1e4, 61440.0, 65535.9, 65536.0, 1e38, float("inf"), float("nan")]
    )
    random = torch.randn(4000) * torch.tensor(10.0) ** torch.randint(-9, 6, (4000,))
    exact = torch.cat([finite, halfway, limits, -limits, random, torch.tensor([0.0, -0.0, 1e-12, -1e-12])])
    up, down = (torch.nextafter(exact, torch.tensor(sign * float("inf"))) for sign in (1, -1))
    return torch.cat([exact, up, down])


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
def test_casts_to_8_bits(name, target):
    x = telling_floats()
    y = run(cast(len(x), "float32", name), target, x)
    expected = x.to(torch_format(name))
    nan = expected.float().isnan()
    assert same_bits(y[~nan], expected[~nan])
    assert torch.equal(y.float().isnan(), nan)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", ["float64", "float16", "bfloat16", "int32"])
def test_casts_of_other_dtypes(name, source, target):
    x = (torch.randn(300) * 50).to(getattr(torch, source))
    assert same_bits(run(cast(300, source, name), target, x), x.to(torch_format(name)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
def test_casts_from_8_bits(name, target):
    x = torch.arange(256, dtype=torch.uint8).view(torch_format(name))
    for destination in ("float32", "float16", "int32"):
        numbers = x if destination != "int32" else torch.where(x.float().abs() < 1e4, x.float(), 1).to(x.dtype)
        y = run(cast(256, name, destination), target, numbers)
        assert torch.equal(y.nan_to_num(7), numbers.to(y.dtype).nan_to_num(7))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_operation_rounds(name, target, devices):
    @T.prim_func
    def polynomial(X: T.Tensor((40,), name), Y: T.Tensor((40,), name)):
        with T.Kernel(10, threads=32) as bx:
            block = T.alloc_shared((4,), name)
            T.copy(X[bx * 4], block)
            for i in T.Parallel(4):
                Y[bx * 4 + i] = T.max(block[i] * block[i] + block[i], T.cast(0.3, name))

    x = torch.randn(40).to(torch_format(name))

    def rounded(value):
        return value.to(x.dtype).float()

    square = rounded(rounded(x.float() * x.float()) + x.float())
    expected = torch.maximum(square, rounded(torch.tensor(0.3)))
    y = run(polynomial, target, x, devices=devices)
    assert y.dtype == x.dtype
    assert torch.equal(y.float(), expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "sharding",
    [
        {},
        {"A": {"x": 0}, "C": {"x": 0}},
        {"A": {"x": 1}, "B": {"x": 0}},
        {"B": {"x": 1}, "C": {"x": 1}},
        {"A": {"x": 0}},
    ],
)
def test_products(name, sharding, target):
    @T.prim_func
    def product(A: T.Tensor((20, 24), name), B: T.Tensor((24, 16), name), C: T.Tensor((20, 16), "float32")):
        with T.Kernel(2, 3, threads=32) as (bx, by):
            a, b = T.alloc_shared((8, 8), name), T.alloc_shared((8, 8), name)
            c = T.alloc_fragment((8, 8), "float32")
            T.clear(c)
            for k in T.serial(3):
                T.copy(A[by * 8, k * 8], a)
                T.copy(B[k * 8, bx * 8], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 8, bx * 8])

    a, b = torch.randn(20, 24).to(torch_format(name)), torch.randn(24, 16).to(torch_format(name))
    torch.testing.assert_close(run(product, target, a, b, sharding=sharding), a.float() @ b.float())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("operation", "expected"), [(T.reduce_max, np.max), (T.reduce_min, np.min)])
def test_extremes_over_a_split_dim(name, operation, expected, target):
    @T.prim_func
    def extremes(X: T.Tensor((6, 9), name), Y: T.Tensor((6,), name)):
        with T.Kernel(6, threads=32) as bx:
            x, y = T.alloc_fragment((1, 9), name), T.alloc_fragment((1,), name)
            T.copy(X[bx, 0], x)
            operation(x, y, dim=1)
            T.copy(y, Y[bx])

    for sign in (1, -1):
        x = (sign * (torch.rand(6, 9) + 1)).to(torch_format(name))
        y = run(extremes, target, x, sharding={"X": {"x": 1}})
        np.testing.assert_array_equal(y.float().numpy(), expected(x.float().numpy(), axis=1))
