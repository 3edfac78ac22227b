"""Modules that were made elsewhere: torch, ONNX, files of TVM."""

from .imported import ImportedModule
from .onnx_import import import_onnx
from .saved import load_module, save_module
from .torch_import import import_torch

__all__ = ["ImportedModule", "import_onnx", "import_torch", "load_module", "save_module"]
