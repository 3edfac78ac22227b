"""What is proved is what TVM's analyzer proves, but for numbers that leave their types; an example refutes first."""

import operator
import random
import re
from pathlib import Path

import pytest
import tilelang.language as T
from tvm import arith, ir, tirx

import mesh_tensor
from mesh_tensor.tir.prover import Prover, keeps_numbers

M, N, i, j = (tirx.Var(name, "int32") for name in ("M", "N", "i", "j"))


def expression(draw: random.Random, depth: int = 3):
    """Sums, products, quotients and remainders of variables and numbers, as sizes and indices are made of."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice((M, N, i, j, tirx.IntImm("int32", draw.randint(0, 64))))
    one, number = expression(draw, depth - 1), draw.choice((1, 2, 3, 16))
    kinds = (
        lambda: one + expression(draw, depth - 1),
        lambda: one - expression(draw, depth - 1),
        lambda: one * number,
        lambda: tirx.floordiv(one, number),
        lambda: tirx.floormod(one, number),
        lambda: T.ceildiv(one, number),
        lambda: tirx.min(one, number),
    )
    return draw.choice(kinds)()


@pytest.mark.parametrize("seed", range(10))
def test_it_proves_what_tvm_proves(seed):
    draw, proofs = random.Random(seed), 0
    for _ in range(40):
        one = expression(draw)
        other = draw.choice((expression(draw), arith.Analyzer().simplify(one), (one * 2 + N) - one - N))
        expected = arith.Analyzer().can_prove_equal(one, other)
        assert Prover().can_prove_equal(one, other) == expected, (one, other)
        proofs += expected
    assert 0 < proofs < 40


def test_conditions_have_no_difference():
    true, false = (tirx.IntImm("bool", value) for value in (1, 0))
    prover = Prover()
    assert prover.can_prove_equal(i < j, i < j)
    assert not any(prover.can_prove_equal(*pair) for pair in ((true, false), (false, true), (i < j, i < M)))


def test_conditions_that_are_made_alike():
    """What is chosen by them, too; loads from two buffers of one shape are not alike, nor are other operators."""
    prover, first = Prover(), tirx.decl_buffer((16,), "float32")
    other = tirx.decl_buffer((16,), "float32")
    shifted, plain = tirx.And((i + 1) * 8 + (j - 8) < M, j < N), tirx.And(i * 8 + j < M, j < N)
    assert prover.can_prove_equal(shifted, plain)
    assert prover.can_prove_equal(tirx.if_then_else(shifted, first[i], 0.0), tirx.if_then_else(plain, first[i], 0.0))
    for one, two in (
        (tirx.if_then_else(plain, first[i], 0.0), tirx.if_then_else(plain, other[i], 0.0)),
        (tirx.if_then_else(plain, first[i], 0.0), tirx.if_then_else(plain, first[j], 0.0)),
        (i * 8 + j < M, i * 8 + j <= M),
        (tirx.And(i < j, j < N), tirx.And(i < j, j < M)),
        (tirx.exp(first[i]), tirx.exp(first[j])),
        (tirx.exp(first[i]), tirx.log(first[i])),
    ):
        assert not prover.can_prove_equal(one, two), (one, two)


def test_numbers():
    assert Prover().can_prove_equal(3, tirx.IntImm("int64", 3))
    assert not Prover().can_prove_equal(tirx.IntImm("int32", 3), 4)


def test_a_range_that_is_replaced_has_no_ends():
    prover = Prover()
    prover.bind(i, ir.Range(0, 16))
    prover.bind(i, ir.Range(0, 4), True)
    assert prover.can_prove(i < 4)
    prover.bind(i, j, True)
    with prover.constraint_scope(j < 2):
        assert prover.can_prove_equal(i, j)
        assert prover.can_prove(i < 2)


def test_examples_count_only_while_nothing_is_known():
    """What holds under a condition, or for what a variable is bound to, an example elsewhere does not refute."""
    prover = Prover()
    with prover.constraint_scope(tirx.And(i >= 0, i < 16)):
        assert prover.can_prove_equal(tirx.floordiv(i, 16), 0)
        with pytest.raises(KeyError), prover.constraint_scope(j < 4):
            raise KeyError
        assert prover.can_prove_equal(tirx.floormod(i, 16), i)
    assert not prover.can_prove_equal(tirx.floordiv(i, 16), 0)
    prover.bind(j, ir.Range(0, 4))
    assert prover.can_prove_equal(tirx.floordiv(j, 4), 0)
    known = Prover()
    known.update(M, arith.ConstIntBound(2, 2))
    assert known.can_prove_equal(M, 2)


def test_no_proof_is_looked_for_where_an_example_refutes_it():
    searches, prover = [], Prover()
    search = prover._can_prove_equal
    prover._can_prove_equal = lambda *pair: searches.append(pair) or search(*pair)
    assert not prover.can_prove_equal(T.ceildiv(M, 16) * 16, M)
    assert not prover.can_prove_equal(M * 96, N * 96)
    assert not searches
    assert prover.can_prove_equal(T.ceildiv(M * 2, 2), M)
    assert len(searches) == 1


@pytest.mark.parametrize("seed", range(4))
def test_it_proves_what_tvm_proves_of_ranges(seed):
    """Of two variables of constant ranges, one of a range that depends on the first's, and one of which nothing is
    known."""
    draw, proofs, ranges = random.Random(seed), 0, {i: (0, 16), j: (3, 5), M: (i, i + 4)}
    known, plain = Prover(), arith.Analyzer()
    for var, (low, extent) in ranges.items():
        known.bind(var, ir.Range.from_min_extent(low, extent))
        plain.bind(var, ir.Range.from_min_extent(low, extent))
    for _ in range(100):
        one, other = expression(draw, 2), draw.choice((expression(draw, 1), tirx.IntImm("int32", draw.randint(0, 20))))
        for condition in (one < other, one >= other):
            assert known.can_prove(condition) == plain.can_prove(condition), condition
            proofs += known.can_prove(condition)
        assert known.can_prove_equal(one, other) == plain.can_prove_equal(one, other), (one, other)
    assert 10 < proofs < 90


def test_what_has_no_value_at_the_end_of_a_range():
    """Guarded where it stands, it is no reason to end in TVM's error."""
    prover, plain = Prover(), arith.Analyzer()
    for analyzer in (prover, plain):
        analyzer.bind(i, ir.Range(0, 48))
        analyzer.bind(j, ir.Range(0, 300))
    for expr in (
        tirx.floordiv(16, i),
        tirx.floormod(j, i),
        tirx.truncdiv(16, i),
        tirx.shift_left(tirx.IntImm("int32", 1), i),
    ):
        assert prover.can_prove(expr < 3) == plain.can_prove(expr < 3), expr
        assert prover.can_prove_equal(expr, j) == plain.can_prove_equal(expr, j), expr
    assert not Prover().can_prove_equal(tirx.floordiv(16, M - 17), N)


def test_the_end_of_a_range_refutes():
    prover, searches = Prover(), []
    prover.bind(i, ir.Range(0, 16))
    prover.bind(j, ir.Range(0, 8))
    search = prover._can_prove_equal
    prover._can_prove_equal = lambda *pair: searches.append(pair) or search(*pair)
    assert not prover.can_prove_equal(tirx.floordiv(i, 2), j)  # at both starts, and at both ends, they are equal
    assert not searches
    assert not prover.can_prove(i < 15)
    assert prover.can_prove(i < 16)
    assert not prover.can_prove_equal(tirx.floordiv(i, 8), 0)


def test_numbers_that_begin_anew():
    """TVM takes a sum of 8 bits for what it is in more bits; what stays within its type is proved."""
    prover, loaded = Prover(), tirx.Var("loaded", "uint8")
    prover.bind(j, ir.Range(0, 300))
    prover.bind(i, ir.Range(0, 48))
    beyond = loaded + tirx.IntImm("uint8", 200) >= tirx.IntImm("uint8", 200)
    cast = tirx.Cast("int32", tirx.Cast("uint8", j))
    assert arith.Analyzer().can_prove(beyond)
    assert not prover.can_prove(beyond)
    assert not prover.can_prove(tirx.Cast("uint8", j) - tirx.IntImm("uint8", 1) < tirx.IntImm("uint8", 255))
    assert not prover.can_prove(cast - j <= 0)  # it is so; a narrow cast says nothing
    assert prover.can_prove(tirx.Cast("int32", loaded) + i < 303)
    assert prover.can_prove(tirx.floordiv(loaded, tirx.IntImm("uint8", 2)) < tirx.IntImm("uint8", 128))


def test_equal_numbers_that_begin_anew():
    """To TVM, 8 bits of what is below 300 are all of it, and constants without a sign that are less than 0 an error."""
    prover, narrow = Prover(), tirx.Cast("uint8", j)
    prover.bind(j, ir.Range(0, 300))
    for cast in (narrow, tirx.Cast("int8", j), tirx.Cast("uint16", j - 5)):
        assert not prover.can_prove_equal(tirx.Cast("int32", cast), j), cast
        assert prover.can_prove_equal(cast, cast)
        assert prover.simplify(cast) is cast
    assert not prover.can_prove_equal(tirx.Cast("int32", narrow - tirx.IntImm("uint8", 3)), i)
    assert prover.can_prove_equal(tirx.Cast("int32", tirx.Cast("int64", j)), j)
    prover.bind(j, ir.Range(0, 200), True)
    assert prover.can_prove_equal(tirx.Cast("int32", narrow), j)


def test_what_a_number_is_compared_with_bounds_it_only_if_it_does_not_begin_anew():
    prover, least = Prover(), tirx.IntImm("uint8", 3)
    for condition in (tirx.Cast("uint8", j) + least < least, tirx.Cast("uint8", j + 250) < least):
        with prover.constraint_scope(tirx.And(condition, i < 4)):
            assert not prover.can_prove(j < 4), condition
            assert prover.can_prove(i < 4)


def test_bounds_of_numbers_that_begin_anew():
    """They are those of the type; of a hash, those of the type that it is cast into."""
    prover = Prover()
    prover.bind(j, ir.Range(0, 300))

    def bounds(expr):
        bound = prover.const_int_bound(expr)
        return bound.min_value, bound.max_value

    assert bounds(tirx.Cast("uint8", j + 200)) == (0, 255)
    assert bounds(tirx.Cast("uint8", i) - tirx.IntImm("uint8", 3)) == (0, 255)
    assert bounds(tirx.Cast("int32", tirx.Cast("int64", j) * 2654435761)) == (-(2**31), 2**31 - 1)
    prover.bind(M, tirx.Cast("int32", tirx.Cast("uint8", j + 200)))
    assert bounds(M) == (-(2**31), 2**31 - 1)
    assert bounds(j + 200) == (200, 499)


@pytest.mark.parametrize(
    ("given", "made", "keeps"),
    [
        ("int32", "int64", True),
        ("int64", "int32", False),
        ("uint8", "int16", True),
        ("uint8", "uint16", True),
        ("bool", "int32", True),
        ("int8", "uint16", False),
        ("int32", "uint64", False),
        ("uint32", "int32", False),
        ("int32", "uint8", False),
        ("float16", "int32", False),
    ],
)
def test_casts_that_keep_all_numbers(given, made, keeps):
    assert keeps_numbers(tirx.Cast(made, tirx.Var("number", given))) == keeps


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int64"])
def test_what_is_proved_of_a_range_holds_in_it(dtype):
    """In all types, for all numbers of a range, however hard a proof is looked for. Differences of numbers without a
    sign are none: TVM proves 0 to 4 below 3, or raises."""
    prover, cast, proofs = Prover(), tirx.Cast(dtype, i), 0
    prover.bind(i, ir.Range(0, 5))
    forms = {
        cast: lambda n: n,
        cast + tirx.IntImm(dtype, 3): lambda n: n + 3,
        cast * tirx.IntImm(dtype, 40): lambda n: n * 40,
        tirx.min(cast, tirx.IntImm(dtype, 2)): lambda n: min(n, 2),
        tirx.floordiv(cast, tirx.IntImm(dtype, 2)): lambda n: n // 2,
    }
    for expr, number in forms.items():
        for bound in range(8):
            for compare in (operator.lt, operator.le, operator.gt, operator.ge):
                holds = all(compare(number(n), bound) for n in range(5))
                proved = prover.can_prove(compare(expr, tirx.IntImm(dtype, bound)), arith.ProofStrength.SYMBOLIC_BOUND)
                assert holds or not proved, (expr, compare, bound)
                proofs += proved
    assert proofs


BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "shift_right")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32"])
def test_what_is_proved_of_bits_holds(dtype):
    """Of bits, and of quotients that are rounded to 0: as values, as conditions, and as what a variable is. TVM's
    solver proves that the 128 of a byte is below 0."""
    var, low = tirx.Var("w", dtype), 0 if dtype.startswith("u") else -20
    high = {"uint8": 128, "uint16": 2**15}.get(dtype, 64)
    bits = {name: tirx.Call(dtype, ir.Op.get(f"tirx.{name}"), [var, tirx.IntImm(dtype, 1)]) for name in BITS[-1:]}
    bits |= {name: tirx.Call(dtype, ir.Op.get(f"tirx.{name}"), [var, tirx.IntImm(dtype, high)]) for name in BITS[:-1]}
    bits["truncmod"] = tirx.truncmod(var, tirx.IntImm(dtype, 3))
    numbers = {
        "bitwise_and": lambda n: n & high,
        "bitwise_or": lambda n: n | high,
        "bitwise_xor": lambda n: n ^ high,
        "shift_right": lambda n: n >> 1,
        "truncmod": lambda n: abs(n) % 3 * (1 if n > 0 else -1),
    }
    for name, expr in bits.items():
        values = [numbers[name](n) for n in range(low, low + 21)]
        for compare in (operator.lt, operator.ge):
            prover = Prover()
            prover.bind(var, ir.Range.from_min_extent(tirx.IntImm(dtype, low), tirx.IntImm(dtype, 21)))
            holds = all(compare(value, 5) for value in values)
            condition = compare(expr, tirx.IntImm(dtype, 5))
            assert holds or not prover.can_prove(condition), condition
            bound = tirx.Var("bound", "int32")
            prover.bind(bound, expr.astype("int32"))
            assert holds or not prover.can_prove(compare(bound + 1, 6)), condition
            if any(compare(value, 5) for value in values):
                with prover.constraint_scope(condition):
                    assert not prover.can_prove(i < j), condition


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_what_is_rounded_to_0_is_not_rounded_down(dtype):
    """Of numbers that may be negative; TVM's solver proves that remainders are not."""
    var, three = tirx.Var("w", dtype), tirx.IntImm(dtype, 3)
    remainder, quotient = tirx.truncmod(var, three), tirx.truncdiv(var, three)
    for low, proved in ((-20, False), (0, True)):
        prover = Prover()
        prover.bind(var, ir.Range.from_min_extent(tirx.IntImm(dtype, low), tirx.IntImm(dtype, 21)))
        facts = (remainder >= tirx.IntImm(dtype, 0), quotient * three <= var)
        assert [prover.can_prove(fact) for fact in facts] == [proved, proved]
        assert prover.can_prove_equal(remainder, tirx.floormod(var, three)) == proved
        with prover.constraint_scope(remainder < tirx.IntImm(dtype, 0)):
            assert proved or not prover.can_prove(i < j)


def test_conditions_of_numbers_without_a_sign_that_never_hold():
    byte = tirx.Var("byte", "uint8")
    with Prover().constraint_scope(tirx.And(i < j, byte < tirx.IntImm("uint8", 0))):
        pass


def test_narrow_numbers_are_compared_without_differences():
    """16 - -32768 begins anew."""
    sixteen = tirx.Cast("int16", tirx.IntImm("uint16", 16))
    assert not Prover().can_prove(tirx.LT(sixteen, tirx.IntImm("int16", -(2**15))), arith.ProofStrength.SYMBOLIC_BOUND)


def test_all_who_prove_ask_one_prover():
    package = Path(mesh_tensor.__file__).parent
    raw = [path for path in package.rglob("*.py") if re.search(r"\bAnalyzer\(\)", path.read_text())]
    assert raw == []
