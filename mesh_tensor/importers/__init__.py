"""Modules that were made elsewhere: torch, ONNX, files of TVM."""

from .imported import ImportedModule
from .onnx_import import from_onnx
from .saved import load_module, save_module
from .torch_frontend import from_torch
