"""Weights in files of safetensors: opened without being read, and read in parts."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype

#: In a folder: what each weight is, and which pieces of it are where.
INDEX = "weights.json"
FORMAT = 1
_INDEX_OF_OTHERS = "model.safetensors.index.json"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a weight: the tensor `key` of a file, which begins at `offset` in the weight."""

    file: WeightFile
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def copy_into(self, out: torch.Tensor, box: Box) -> int:
        """What of this piece is in the box, into a tensor of the box's shape; how many elements that were."""
        low = [max(s.start, o) for s, o in zip(box, self.offset, strict=True)]
        high = [min(s.stop, o + n) for s, o, n in zip(box, self.offset, self.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        mine = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, self.offset, strict=True))
        theirs = tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, box, strict=True))
        part = self.file.read(self.key, mine)
        out[theirs] = part
        return part.numel()


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A weight in files, of which nothing is in memory."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def read(self, box: Box | None = None) -> torch.Tensor:
        """The part of it that is in the box (per dim from where to where), or all."""
        box = tuple(slice(0, size) for size in self.shape) if box is None else box
        whole = next((piece for piece in self.pieces if piece.shape == tuple(self.shape)), None)
        if whole is not None:
            return whole.file.read(whole.key, box)
        out = torch.empty([s.stop - s.start for s in box], dtype=self.dtype)
        found = sum(piece.copy_into(out, box) for piece in self.pieces)
        if found != out.numel():
            refuse(
                f"{found} of {out.numel()} elements of weight {self.name!r} are there",
                where=listing([str(piece.file.path) for piece in self.pieces]),
                fix="copy the files of all ranks into the folder",
            )
        return out

    def read_atoms(self, dims: Sequence[Sequence[int]], box: Box) -> torch.Tensor:
        """The part that a box of the atoms of its dims (their sizes, per dim) names; with the atoms as dims."""
        places, start = [], 0
        for atoms in dims:
            within = box[start : start + len(atoms)]
            places.append(np.arange(math.prod(atoms)).reshape(tuple(atoms))[within].reshape(-1))
            start += len(atoms)
        extent = [s.stop - s.start for s in box]
        if 0 in extent:
            return torch.empty(extent, dtype=self.dtype)
        part = self.read(tuple(slice(int(at[0]), int(at[-1]) + 1) for at in places))
        for dim, at in enumerate(places):
            if len(at) != part.shape[dim]:
                part = part.index_select(dim, torch.from_numpy(at - at[0]))
        return part.reshape(extent)


class WeightFile:
    """One file of safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _opened(self) -> Any:
        try:
            return _safetensors().safe_open(str(self.path), framework="pt")
        except Exception as error:  # of the library's own, of files that are damaged
            self._refuse(error)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The names of its tensors, with their shapes and dtypes."""
        made = {}
        for name in self._opened.keys():  # noqa: SIM118  (it is no dict)
            found = self._opened.get_slice(name)
            dtype = found.get_dtype()
            if dtype not in _DTYPES:
                refuse(f"weight {name!r} is {dtype}", where=str(self.path), fix=f"use {listing(list(_DTYPES))}")
            made[name] = tuple(found.get_shape()), _DTYPES[dtype]
        return made

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor."""
        try:
            if not box:
                return self._opened.get_tensor(name)
            found = self._opened.get_slice(name)
            if all(s.stop > s.start for s in box):
                return found[box].contiguous()
            return torch.empty([s.stop - s.start for s in box], dtype=_DTYPES[found.get_dtype()])
        except Exception as error:  # of the library's own
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        fix = "copy the file again"
        if self.path.suffix != ".safetensors":
            fix = "pass a file of safetensors; of what torch.save wrote: weights=torch.load(file, weights_only=True)"
        refuse(f"{str(self.path)!r} can't be read", why=str(error), fix=fix)


class StoredWeights(Mapping[str, StoredTensor]):
    """Weights in files, by name."""

    def __init__(self, tensors: Mapping[str, StoredTensor], where: str) -> None:
        self._tensors, self._where = dict(tensors), where

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{len(self)} weights in {self._where}"


def open_weights(path: str | os.PathLike[str]) -> StoredWeights:
    """The weights in a file of safetensors, or in a folder of such: what `mt.save` wrote, what others split into
    several files with an index, or all files of the folder. Nothing is read; `distribute_module(weights=...)` and
    `load_state_dict` take what they need of each weight, on ranks a rank its tile.

    Raises:
        MeshTensorError: there is no such file, it is damaged, a weight is in several files, or safetensors is not
            installed.

    >>> run = mt.distribute_module(module.mod, {"x": 2}, shardings, weights=mt.open_weights("model.safetensors"))
    """
    path = checked_path(path, "open_weights")
    if path.is_file():
        return StoredWeights(_in_files([path]), str(path))
    if not path.is_dir():
        refuse(f"there is no file or folder {str(path)!r}", fix="pass the path of a file of safetensors")
    if (path / INDEX).is_file():
        return StoredWeights(_in_pieces(path), str(path))
    if (path / _INDEX_OF_OTHERS).is_file():
        names = read_json(path / _INDEX_OF_OTHERS).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            problem = f"{_INDEX_OF_OTHERS} says in no `weight_map` which weight is where"
            refuse(problem, where=str(path), fix="copy the file again, or pass the path of one file of safetensors")
        found = _in_files([_inside(path, name) for name in dict.fromkeys(names.values())])
        missing = [name for name in names if name not in found]
        if missing:
            problem = f"the files lack {listing(missing)}, which {_INDEX_OF_OTHERS} names"
            refuse(problem, where=str(path), fix="copy all files of the folder again")
        return StoredWeights(found, str(path))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        refuse(f"there is no file of safetensors in {str(path)!r}", fix="pass the folder that mt.save wrote")
    return StoredWeights(_in_files(files), str(path))


def checked_path(path: object, what: str) -> Path:
    """The path; refused where it is none."""
    if not isinstance(path, (str, os.PathLike)):
        refuse(f"the path is {shown(path)}, which is no path", where=what, fix="give a text or a pathlib.Path")
    return Path(path)


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of safetensors, there whole or as it was before."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _safetensors("torch").save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(written))
        os.replace(written, path)
    except OSError as error:
        refuse(f"{str(path)!r} can't be written", why=str(error), fix="choose another folder")
    finally:
        written.unlink(missing_ok=True)


def index_entry(shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[str, str, Sequence[int]]]) -> Any:
    """What the index says of a weight: where its pieces are (file, name in it, offset)."""
    listed = [{"file": file, "key": key, "offset": list(offset)} for file, key, offset in pieces]
    return {"shape": list(shape), "dtype": dtype_name(dtype), "pieces": listed}


def _in_files(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    made: dict[str, StoredTensor] = {}
    for file in [WeightFile(path) for path in paths]:
        for name, (shape, dtype) in file.tensors().items():
            if name in made:
                files = [str(made[name].pieces[0].file.path), str(file.path)]
                refuse(f"weight {name!r} is in several files", where=listing(files), fix="pass one of them")
            made[name] = StoredTensor(name, torch.Size(shape), dtype, (Piece(file, name, (0,) * len(shape), shape),))
    return made


def _in_pieces(folder: Path) -> dict[str, StoredTensor]:
    document = read_json(folder / INDEX)
    if document.get("format") != FORMAT:
        problem = f"{INDEX} is of format {document.get('format')!r}, and this is format {FORMAT}"
        refuse(problem, where=str(folder), fix="load it with the version that wrote it, or save it anew with this one")
    try:
        weights = document["weights"]
        names = {piece["file"] for entry in weights.values() for piece in entry["pieces"]}
        files = {name: WeightFile(_inside(folder, name)) for name in names}
        known = {name: file.tensors() for name, file in files.items()}
        made = {}
        for name, entry in weights.items():
            found = [(p, *known[p["file"]][p["key"]]) for p in entry["pieces"]]
            pieces = tuple(Piece(files[p["file"]], p["key"], tuple(p["offset"]), shape) for p, shape, _ in found)
            made[name] = StoredTensor(name, torch.Size(entry["shape"]), torch_dtype(entry["dtype"]), pieces)
            if {dtype for _, _, dtype in found} != {made[name].dtype} or not _covered(made[name]):
                raise ValueError(f"the pieces of {name!r} are not that weight")
        return made
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"{INDEX} is damaged, or its files are of another one"
        refuse(problem, where=str(folder), why=repr(error), fix="copy all files of the folder again, or save it anew")


def _covered(tensor: StoredTensor) -> bool:
    """Whether every element is in just one piece."""
    boxes = [[range(o, o + n) for o, n in zip(p.offset, p.shape, strict=True)] for p in tensor.pieces]
    inside = all(at.start >= 0 and at.stop <= n for box in boxes for at, n in zip(box, tensor.shape, strict=True))
    apart = not any(
        all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True))
        for one, other in itertools.combinations(boxes, 2)
    )
    return inside and apart and sum(math.prod(map(len, box)) for box in boxes) == tensor.shape.numel()


def _inside(folder: Path, name: str) -> Path:
    """The file of a folder that an index names, which may name no other place."""
    path = folder / name
    if Path(name).name != name or not path.is_file():
        refuse(f"there is no file {name!r}, which the index names", where=str(folder), fix="copy all of its files")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        refuse(f"{str(path)!r} can't be read", why=str(error), fix="copy the file again")
    if not isinstance(made, dict):
        refuse(f"{str(path)!r} holds no object", fix="copy the file again")
    return made


def _safetensors(part: str = "") -> Any:
    """The library, or its part of that name."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        refuse("safetensors is not installed", fix="pip install safetensors")
    return getattr(safetensors, part) if part else safetensors
