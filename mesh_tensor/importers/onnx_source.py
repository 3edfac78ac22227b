"""ONNX models as users have them: files, bytes, and models that are loaded."""

from __future__ import annotations

import importlib
import os
from typing import Any

from mesh_tensor.base.errors import MeshTensorError, listing, refuse, shown

_FORMS = "pass the path of an ONNX file, a file that is open for reading bytes, its bytes, or an onnx.ModelProto"


def package() -> Any:
    """The package onnx, which is an extra."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        refuse("from_onnx needs the package onnx", why=str(error), fix="pip install onnx")


def loaded(onnx: Any, given: Any) -> tuple[Any, str]:
    """A model of our own, and what it is called."""
    if isinstance(given, (str, os.PathLike)):
        where = os.fspath(given)
        if not os.path.isfile(given):
            refuse(f"there is no file {given!r}", fix="pass the path of an ONNX file")
    else:
        where = f"a {type(given).__name__}"
    try:
        model = _parsed(onnx, given)
        onnx.checker.check_model(model)
    except MeshTensorError:
        raise
    except Exception as error:  # protobuf's and the checker's own classes
        refuse(
            f"{repr(where) if isinstance(given, (str, os.PathLike)) else where} is no valid ONNX model",
            why=str(error),
            fix="export it again",
        )
    return model, where


def _parsed(onnx: Any, given: Any) -> Any:
    if isinstance(given, (str, os.PathLike)):
        return onnx.load(os.fspath(given))
    if isinstance(given, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(given)
    else:
        content = given.read() if hasattr(given, "read") else given
        if not isinstance(content, (bytes, bytearray, memoryview)):
            what = f"a {type(given).__name__}" + (
                f", whose read() gives {shown(content)}" if content is not given else ""
            )
            refuse(f"{what} is no ONNX model", fix=_FORMS)
        model = onnx.load_model_from_string(bytes(content))
    external = importlib.import_module("onnx.external_data_helper")
    if apart := [t.name for t in external._get_all_tensors(model) if external.uses_external_data(t)]:
        refuse(
            f"the tensors {listing(apart)} lie in files beside the model's",
            where=f"a {type(given).__name__}",
            why="only a path says where these are",
            fix="pass the path of the file, or what onnx.load(path) gives",
        )
    return model
