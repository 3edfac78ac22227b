"""Compiled expressions against torch: functions, casts, integers and 16-bit floats, bit by bit where exact."""

import pytest
import tilelang.language as T
import torch

from mesh_tensor.targets.cpu.kernel import compile_for_cpu

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int8", "int16", "int32", "int64", "uint8")
NUMBERS = (*FLOATS, *INTS, "bool")
EPS = {"float32": 2**-23, "float64": 2**-52, "float16": 2**-10, "bfloat16": 2**-7}


def torch_dtype(name):
    return getattr(torch, name)


def elementwise(functions, arity, n, dtype, out_dtype):
    """`Y[f, i] = functions[f](A[i], B[i])`, every function in one kernel."""

    @T.prim_func
    def elementwise_kernel(
        A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype), Y: T.Tensor((len(functions), n), out_dtype)
    ):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as bx:
            for i in T.Parallel(128):
                for f, function in enumerate(functions):
                    Y[f, bx * 128 + i] = function(*[X[bx * 128 + i] for X in (A, B)[:arity]])

    return elementwise_kernel


def run_all(functions, inputs, out_dtype=None):
    """One row of results for each function of 1 or 2 tensors."""
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    out = torch.empty((len(functions), inputs[0].numel()), dtype=torch_dtype(out_dtype or dtype))
    kernel = compile_for_cpu(elementwise(functions, len(inputs), inputs[0].numel(), dtype, out_dtype or dtype))
    kernel(inputs[0], inputs[-1], out)
    return out


def run(function, inputs, out_dtype=None):
    """The results of one function."""
    return run_all([function], inputs, out_dtype)[0]


def check_all(table, inputs, **tolerance):
    """Compare every function of a table with its reference, in one kernel."""
    actual = run_all([function for function, _ in table.values()], inputs)
    for name, row in zip(table, actual, strict=True):
        expected = table[name][1](*inputs)
        torch.testing.assert_close(row, expected, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


def values(dtype, n=300):
    if dtype == "bool":
        return torch.rand(n) < 0.5
    if dtype in FLOATS:
        return (torch.randn(n) * 3).to(torch_dtype(dtype))
    info = torch.iinfo(torch_dtype(dtype))
    return torch.randint(max(info.min, -(2**40)), min(info.max, 2**40), (n,)).to(torch_dtype(dtype))


MATH = {
    "exp": (T.exp, torch.exp),
    "exp2": (T.exp2, torch.exp2),
    "exp10": (T.exp10, lambda x: 10**x),
    "log": (lambda x: T.log(T.abs(x)), lambda x: torch.log(x.abs())),
    "log2": (lambda x: T.log2(T.abs(x)), lambda x: torch.log2(x.abs())),
    "log10": (lambda x: T.log10(T.abs(x)), lambda x: torch.log10(x.abs())),
    "log1p": (lambda x: T.log1p(T.abs(x)), lambda x: torch.log1p(x.abs())),
    "sqrt": (lambda x: T.sqrt(T.abs(x)), lambda x: torch.sqrt(x.abs())),
    "rsqrt": (lambda x: T.rsqrt(T.abs(x)), lambda x: torch.rsqrt(x.abs())),
    "sigmoid": (T.sigmoid, torch.sigmoid),
    "tanh": (T.tanh, torch.tanh),
    "erf": (T.erf, torch.erf),
    "sin": (T.sin, torch.sin),
    "cos": (T.cos, torch.cos),
    "tan": (T.tan, torch.tan),
    "sinh": (T.sinh, torch.sinh),
    "cosh": (T.cosh, torch.cosh),
    "atan": (T.atan, torch.atan),
    "asinh": (T.asinh, torch.asinh),
    "acosh": (lambda x: T.acosh(T.max(x, 1)), lambda x: torch.acosh(x.clamp(min=1))),
    "cube": (lambda x: T.pow(x, 3), lambda x: x**3),
    "fast exp": (T.__exp, torch.exp),
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_floats_agree_with_torch(dtype):
    in_float64 = {
        name: (function, lambda x, reference=reference: reference(x.double()).to(x.dtype))
        for name, (function, reference) in MATH.items()
    }
    check_all(in_float64, [values(dtype)], rtol=6 * EPS[dtype], atol=6 * EPS[dtype])


def test_zero_keeps_its_sign():
    odd = [T.tanh, T.erf, T.sin, T.tan, T.sinh, T.atan, T.asinh, T.sqrt, T.floor, T.ceil, T.trunc, T.round]
    made = run_all(odd, [torch.tensor([0.0, -0.0])])
    assert made.signbit().tolist() == [[False, True]] * len(odd)
    assert (made == 0).all()


EXACT = {
    "floor": (T.floor, torch.floor),
    "ceil": (T.ceil, torch.ceil),
    "trunc": (T.trunc, torch.trunc),
    "round": (T.round, torch.round),
    "nearbyint": (T.nearbyint, torch.round),
    "abs": (T.abs, torch.abs),
    "negate": (lambda x: -x, lambda x: -x),
    "relu": (lambda x: T.max(x, 0), torch.relu),
    "clamp": (lambda x: T.clamp(x, -1, 1), lambda x: x.clamp(-1, 1)),
    "not a number": (lambda x: T.if_then_else(T.isnan(T.cast(x, "float32")), 1, 0), lambda x: x.isnan().to(x.dtype)),
    "infinite": (lambda x: T.if_then_else(T.isinf(T.cast(x, "float32")), 1, 0), lambda x: x.isinf().to(x.dtype)),
    "finite": (lambda x: T.if_then_else(T.isfinite(T.cast(x, "float32")), 1, 0), lambda x: x.isfinite().to(x.dtype)),
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_functions_of_floats_are_exact(dtype):
    special = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    check_all(EXACT, [torch.cat([values(dtype), special.to(torch_dtype(dtype))])], rtol=0, atol=0)


BINARY = {
    "add": (lambda a, b: a + b, torch.add),
    "subtract": (lambda a, b: a - b, torch.sub),
    "multiply": (lambda a, b: a * b, torch.mul),
    "divide": (lambda a, b: a / b, torch.div),
    "max": (T.max, torch.maximum),
    "min": (T.min, torch.minimum),
    "ieee_add": (lambda a, b: T.ieee_add(a, b, "rn"), torch.add),
    "ieee_fdiv": (lambda a, b: T.ieee_fdiv(a, b, "rn"), torch.div),
    "chain": (lambda a, b: (a + b) * a - b, lambda a, b: (a + b) * a - b),
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_operation_on_floats_rounds_as_torch_does(dtype):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 60000.0, -60000.0]).to(torch_dtype(dtype))
    a = torch.cat([values(dtype), special, special.flip(0)])
    b = torch.cat([values(dtype), special.roll(1), special])
    check_all(BINARY, [a, b], rtol=0, atol=0)


INTEGER = {
    "add": (lambda a, b: a + b, torch.add),
    "subtract": (lambda a, b: a - b, torch.sub),
    "multiply": (lambda a, b: a * b, torch.mul),
    "mean": (lambda a, b: T.floordiv(a + b, 2), lambda a, b: torch.div(a + b, 2, rounding_mode="floor")),
    "floordiv": (T.floordiv, lambda a, b: torch.div(a, b, rounding_mode="floor")),
    "floormod": (T.floormod, torch.remainder),
    "truncdiv": (T.truncdiv, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "truncmod": (T.truncmod, torch.fmod),
    "max": (T.max, torch.maximum),
    "min": (T.min, torch.minimum),
    "and": (lambda a, b: a & b, torch.bitwise_and),
    "or": (lambda a, b: a | b, torch.bitwise_or),
    "xor": (lambda a, b: a ^ b, torch.bitwise_xor),
    "not": (lambda a, b: ~a, lambda a, b: ~a),
    "shift left": (lambda a, b: a << 2, lambda a, b: a << 2),
    "shift right": (lambda a, b: a >> 2, lambda a, b: a >> 2),
    "abs": (lambda a, b: T.abs(a), lambda a, b: a.abs()),
    "square": (lambda a, b: T.pow(a, 2), lambda a, b: a * a),
    "compare": (lambda a, b: T.if_then_else(a + b > a, a, b), lambda a, b: torch.where(a + b > a, a, b)),
}


@pytest.mark.parametrize("dtype", INTS)
def test_integers_wrap_and_divide_as_torch_does(dtype):
    a, b = values(dtype), values(dtype)
    b[b == 0] = 3
    check_all(INTEGER, [a, b], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
def test_dividing_by_zero_and_the_smallest_by_minus_one_do_not_end_the_process(dtype):
    smallest = torch.iinfo(torch_dtype(dtype)).min
    a = torch.tensor([5, smallest, -7], dtype=torch_dtype(dtype))
    b = torch.tensor([0, -1, -1], dtype=torch_dtype(dtype))
    assert run_all([T.floordiv, T.truncmod], [a, b]).tolist() == [[0, smallest, 7], [0, 0, 0]]


def cast_kernel(n, dtype):
    """One output for each dtype."""

    @T.prim_func
    def casts(
        X: T.Tensor((n,), dtype),
        F32: T.Tensor((n,), "float32"),
        F64: T.Tensor((n,), "float64"),
        F16: T.Tensor((n,), "float16"),
        BF16: T.Tensor((n,), "bfloat16"),
        I8: T.Tensor((n,), "int8"),
        I16: T.Tensor((n,), "int16"),
        I32: T.Tensor((n,), "int32"),
        I64: T.Tensor((n,), "int64"),
        U8: T.Tensor((n,), "uint8"),
        B: T.Tensor((n,), "bool"),
    ):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                for Y in (F32, F64, F16, BF16, I8, I16, I32, I64, U8, B):
                    Y[i] = T.cast(X[i], Y.dtype)

    return casts


@pytest.mark.parametrize("source", NUMBERS)
def test_casts_agree_with_torch(source):
    x = values(source)
    if source in FLOATS:
        x = (x * 10).clamp(0, 100)
    outputs = [torch.empty(x.shape, dtype=torch_dtype(target)) for target in NUMBERS]
    compile_for_cpu(cast_kernel(x.numel(), source))(x, *outputs)
    for target, actual in zip(NUMBERS, outputs, strict=True):
        assert torch.equal(actual, x.to(torch_dtype(target))), target


@pytest.mark.parametrize("source", FLOATS)
def test_floats_without_their_fraction_are_no_negative_zero(source):
    """What becomes of them through whole numbers, in one expression."""
    x = torch.tensor([-0.3, -0.0, 0.0, 0.3, -0.9, -1.5, 2.7, -5.0]).to(torch_dtype(source))
    for target in FLOATS:
        names = [name for name in INTS if name != "uint8"]
        found = run_all([lambda a, b=name, c=target: T.cast(T.cast(a, b), c) for name in names], [x], target)
        for name, row in zip(names, found, strict=True):
            expected = x.to(torch_dtype(name)).to(torch_dtype(target))
            assert torch.equal(row, expected), name
            assert torch.equal(row.signbit(), expected.signbit()), name


def test_negative_floats_wrap_into_small_integers():
    x = torch.tensor([-1.5, 300.7, -129.0])
    assert run(lambda a: T.cast(a, "uint8"), [x], "uint8").tolist() == [255, 44, 127]
    assert run(lambda a: T.cast(a, "int8"), [x], "int8").tolist() == [-1, 44, 127]


def test_every_float16_is_read_right():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    actual = run(lambda a: T.cast(a, "float32"), [x], "float32")
    assert torch.equal(actual.isnan(), x.isnan())
    assert torch.equal(actual.nan_to_num(7.0), x.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_rounding_to_16_bits_is_to_the_nearest_even(source, dtype):
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch_dtype(dtype)).float()
    halfway = (exact.view(torch.int32) + (1 << (12 if dtype == "float16" else 15))).view(torch.float32)
    x = torch.cat([exact, halfway, torch.nextafter(halfway, torch.tensor(torch.inf)), torch.randn(1000) * 1e-6])
    x = torch.cat([x, -x]).to(torch_dtype(source))
    actual, expected = run(lambda a: T.cast(a, dtype), [x], dtype), x.to(torch_dtype(dtype))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(7.0).view(torch.int16), expected.nan_to_num(7.0).view(torch.int16))


def test_a_float64_is_rounded_to_16_bits_once():
    x = torch.tensor([1 + 2**-11 + 2**-40, 1 + 2**-11 - 2**-40, 2.0**-25 * (1 + 2**-30)], dtype=torch.float64)
    assert run(lambda a: T.cast(a, "float16"), [x], "float16").tolist() == [1 + 2**-10, 1.0, 2.0**-24]


@pytest.mark.parametrize("dtype", FLOATS)
def test_constants_keep_all_their_digits(dtype):
    x = torch.zeros(3, dtype=torch_dtype(dtype))
    third = torch.tensor(1 / 3, dtype=torch.float64).to(torch_dtype(dtype))
    assert torch.equal(run(lambda a: a + T.cast(1 / 3, dtype), [x]), third.expand(3))


def test_infinity_and_overflow_of_float16():
    x = torch.tensor([300.0, -300.0, 1.0], dtype=torch.float16)
    assert run(lambda a: a * a, [x]).tolist() == [torch.inf, torch.inf, 1.0]
    assert run(lambda a: T.if_then_else(a > 0, a, -T.infinity("float16")), [x]).tolist() == [300.0, -torch.inf, 1.0]


def test_bools_are_bytes():
    a, b = torch.rand(300) < 0.5, torch.rand(300) < 0.5
    both, same = run_all([lambda p, q: p & ~q, lambda p, q: p == q], [a, b])
    assert torch.equal(both, a & ~b)
    assert torch.equal(same, a == b)
    x = values("float32")
    assert torch.equal(run(lambda p: T.And(p > 0, p < 2), [x], "bool"), (x > 0) & (x < 2))


@pytest.mark.parametrize(("source", "target"), [("float32", "int32"), ("int64", "float64"), ("bfloat16", "uint16")])
def test_bits_are_reinterpreted(source, target):
    x = values(source)
    if source == "int64":
        x = x * 2**20
    actual = run(lambda a: T.reinterpret(a, target), [x], target)
    assert torch.equal(actual.view(torch.uint8), x.view(torch_dtype(target)).view(torch.uint8))
