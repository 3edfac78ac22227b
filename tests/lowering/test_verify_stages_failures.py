"""What is found where the record of a stage does not hold what the stage promises."""

from dataclasses import replace

import pytest

import mesh_tensor as mt
from kernels.softmax import softmax
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.lowering.decide import decide
from mesh_tensor.lowering.local_view import make_local
from mesh_tensor.lowering.parts import cut_up
from mesh_tensor.lowering.pipeline import read, verified
from mesh_tensor.lowering.stages import Annotated, LocalParts, Part, Parts, Ruled
from mesh_tensor.lowering.verify import VerificationError
from mesh_tensor.lowering.ways import rule

MESH = mt.Mesh({"x": 2})


def annotated() -> Annotated:
    """A softmax whose columns are split: it is cut twice."""
    return read(mt.annotate(softmax(16, 32, block_M=8), MESH, {"X": {"x": 1}, "Y": {"x": 1}}), "auto")


def ruled() -> Ruled:
    return rule(annotated())


def decided() -> Part:
    return decide(ruled(), {}, strict=True)


def cut() -> Parts:
    record = ruled()
    parts = cut_up(record, decide(record, {}, strict=True), {})
    assert isinstance(parts, Parts)
    return parts


def found(record: object) -> str:
    with pytest.raises(VerificationError) as caught:
        verified(record)
    return str(caught.value)


def test_every_stage_of_a_kernel_that_is_cut_holds_what_it_promises():
    parts = cut()
    assert len(parts.parts) == 3
    for record in (annotated(), ruled(), decided(), parts, make_local(parts)):
        assert verified(record) is record


def test_an_annotation_of_nothing():
    record = annotated()
    asked = {**record.asked, "Q": Sharding.make(MESH, 2, {"x": 0})}
    assert "Q is annotated" in found(replace(record, asked=asked))


def test_a_layout_of_another_rank():
    asked = {"X": Sharding.make(MESH, 3, {"x": 2})}
    assert "X is annotated" in found(replace(annotated(), asked=asked))


def test_a_dim_of_two_factors():
    record = ruled()
    columns = record.analysis.factor_of("X", 1)
    rows = record.analysis.factor_of("X", 0)
    derivation = record.analysis.coordinates.derivation
    both = replace(derivation, factors=(replace(rows, dims=(*rows.dims, ("X", 1))), columns))
    analysis = replace(record.analysis, coordinates=replace(record.analysis.coordinates, derivation=both))
    assert "X dim 1 is of the factors" in found(replace(record, analysis=analysis))


def test_a_parameter_without_a_placement():
    part = decided()
    assert "parameter X has no placement" in found(replace(part, assignment=replace(part.assignment, needed={})))


def test_an_output_that_is_left_nowhere():
    part = decided()
    assert "parameter Y is written" in found(replace(part, assignment=replace(part.assignment, produced={})))


def test_a_split_of_a_factor_of_another_kernel():
    part = decided()
    other = replace(part.analysis.factors[0], name="other")
    assert "axis x splits other" in found(replace(part, assignment=replace(part.assignment, axes={"x": other})))


def test_a_kernel_that_is_not_cut_where_it_needs_the_whole_result():
    record = cut()
    assert "in the middle" in found(replace(record, parts=(decided(),)))


def test_parts_in_another_order():
    record = cut()
    assert "which nothing left" in found(replace(record, parts=record.parts[::-1]))


def test_a_local_kernel_over_whole_tensors():
    local = make_local(cut())
    assert isinstance(local, LocalParts)
    whole = [replace(part, func=part.part.analysis.kernel.func) for part in local.parts]
    assert "runs" in found(replace(local, parts=tuple(whole)))
