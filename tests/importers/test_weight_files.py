"""Weights in files of safetensors: opened without being read, and read in parts."""

import json
from functools import partial

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor.importers.weight_files import index_entry, write_weights
from tests.refusals import refusal

safetensors = pytest.importorskip("safetensors.torch")

TENSORS = {
    "a": torch.arange(24.0).reshape(4, 6),
    "b.weight": torch.randn(3, 2, 4).to(torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "number": torch.tensor(7),
    "nothing": torch.empty(0, 3),
}


def read(path):
    return [tensor.read() for tensor in mt.open_weights(path).values()]


refused = partial(refusal, read)


@pytest.fixture
def file(tmp_path):
    safetensors.save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_file(file):
    found = mt.open_weights(file)
    assert list(found) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found[name].read(), tensor)
    assert torch.equal(found["a"].read((slice(1, 3), slice(2, 6))), TENSORS["a"][1:3, 2:6])
    assert found["a"].read((slice(4, 4), slice(0, 6))).shape == (0, 6)


def test_a_folder_of_files_with_and_without_an_index(tmp_path):
    names = ["one.safetensors", "two.safetensors"]
    for name, keys in zip(names, (["a"], ["flags", "number"]), strict=True):
        safetensors.save_file({key: TENSORS[key] for key in keys}, tmp_path / name)
    assert sorted(mt.open_weights(tmp_path)) == ["a", "flags", "number"]
    index = {"weight_map": {"a": names[0], "flags": names[1], "number": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(mt.open_weights(tmp_path)["number"].read(), TENSORS["number"])


@pytest.mark.parametrize("dims", [((4,), (6,)), ((2, 2), (3, 2)), ((4,), (2, 3))])
def test_parts_of_dims_taken_apart(file, dims):
    """Any box of the atoms, also those that are no contiguous part of a dim."""
    sizes = [size for atoms in dims for size in atoms]
    for dim, size in enumerate(sizes):
        for start in range(size):
            box = tuple(slice(start, start + 1) if d == dim else slice(0, n) for d, n in enumerate(sizes))
            expected = TENSORS["a"].reshape(sizes)[box]
            assert torch.equal(mt.open_weights(file)["a"].read_atoms(dims, box), expected)


@pytest.fixture
def pieces(tmp_path):
    """A weight in two pieces, in two files."""
    write_weights(tmp_path / "0.safetensors", {"a": TENSORS["a"][:, :4]})
    write_weights(tmp_path / "1.safetensors", {"a": TENSORS["a"][:, 4:]})
    entry = index_entry((4, 6), torch.float32, [("0.safetensors", "a", (0, 0)), ("1.safetensors", "a", (0, 4))])
    return tmp_path, entry


def put(folder, entry, **changes):
    document = {"format": 1, "function": "main", "weights": {"a": entry}} | changes
    (folder / "weights.json").write_text(json.dumps(document))
    return folder


def test_a_weight_in_pieces(pieces):
    found = mt.open_weights(put(*pieces))["a"]
    assert torch.equal(found.read(), TENSORS["a"])
    assert torch.equal(found.read((slice(1, 2), slice(3, 6))), TENSORS["a"][1:2, 3:6])


def changed(entry, **changes):
    return entry | changes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: changed(e, shape=[4, 7]), "the pieces of 'a' are not that weight"),
        (lambda e: changed(e, pieces=e["pieces"][:1]), "the pieces of 'a' are not that weight"),
        (lambda e: changed(e, pieces=[e["pieces"][0], e["pieces"][1] | {"offset": [0, 3]}]), "are not that weight"),
        (lambda e: changed(e, pieces=[e["pieces"][0], e["pieces"][1] | {"offset": [0, -2]}]), "are not that weight"),
        (lambda e: changed(e, dtype="float16"), "the pieces of 'a' are not that weight"),
        (lambda e: changed(e, pieces=[e["pieces"][0] | {"key": "b"}]), "weights.json is damaged"),
        (lambda e: changed(e, pieces=[e["pieces"][0] | {"file": "../0.safetensors"}]), "there is no file"),
        (lambda e: changed(e, pieces=[e["pieces"][0] | {"file": "2.safetensors"}]), "no file '2.safetensors'"),
        (lambda e: [], "weights.json is damaged"),
    ],
)
def test_a_damaged_index(pieces, change, said):
    folder, entry = pieces
    assert said in refused(put(folder, change(entry)))


def test_indices_that_are_none(pieces, tmp_path):
    assert "weights.json is of format 2, and this is format 1" in refused(put(*pieces, format=2))
    (tmp_path / "weights.json").write_text("{")
    assert "can't be read" in refused(tmp_path)
    (tmp_path / "weights.json").write_text("[]")
    assert "holds no object" in refused(tmp_path)


def test_files_that_are_none(file, tmp_path):
    assert "there is no file or folder" in refused(tmp_path / "other")
    assert "the path is 3, which is no path" in refused(3)
    whole = file.read_bytes()
    for size in (0, 7, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "can't be read" in refused(file)
    file.write_bytes(whole)
    (tmp_path / "again.safetensors").write_bytes(whole)
    assert "weight 'a' is in several files" in refused(tmp_path)
