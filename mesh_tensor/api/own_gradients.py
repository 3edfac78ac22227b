"""What of a torch model has a say in gradients that its forward doesn't tell: hooks, and functions with a backward of
their own. They may change nothing in the gradients of an example, and others later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from mesh_tensor.base.errors import listing, refuse

_ON_TENSORS = torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook
_NODE = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_TORCHS = "torch."  # their gradients are those of what they compute
_BLOOM = "transformers.models.bloom.modeling_bloom.GeLUFunction"  # so are its


def refuse_hooks(model: nn.Module, loss: object) -> None:
    """Refuse a model with hooks on gradients of its parameters and modules, of its loss, or of all modules."""
    hooked = _hooked(model) + (_hooked(loss) if isinstance(loss, nn.Module) else [])
    if of_modules._global_backward_hooks or of_modules._global_backward_pre_hooks:
        hooked.append("all modules of torch")
    if hooked:
        _refuse_hooks(f"{listing(hooked)} with hooks on gradients")


@contextmanager
def refusing_hooks() -> Iterator[None]:
    """Refuse a model that sets hooks on the gradients of what it computes, as it runs within: nothing of it compiled,
    which would hide them, and functions with backwards of their own."""
    seen = _Hooks()
    with torch.compiler.set_stance("force_eager"), seen:
        yield
    if seen.count:
        _refuse_hooks(f"the model sets hooks on gradients of what it computes ({seen.count})")
    if seen.nodes:
        _refuse_hooks(f"the model asks for the grad_fn of what it computes ({seen.nodes}), where hooks are set")


def refuse_functions(loss: Any) -> None:
    """Refuse a loss that was computed by functions with backwards of their own, as far as autograd has recorded it."""
    found = _functions(loss)
    if BackwardHookFunction in found:
        _refuse_hooks("a module that the model doesn't know as its own, with hooks on gradients")
    if CheckpointFunction in found:
        refuse(
            "a checkpoint with use_reentrant=True",
            where="training_step",
            why="it computes without gradients at first, which is what a step is recorded from",
            fix="use_reentrant=False",
        )
    if own := sorted({each.__name__ for each in found if not _is_derived(each)}):
        refuse(
            f"{listing(own)} with a backward of its own (torch.autograd.Function)",
            where="training_step",
            why="a step is recorded from what its forward computes, and would have the gradients of that",
            fix="write it with torch's operators (y + (x - y).detach() gives y, with the gradient of x)",
        )


def _refuse_hooks(what: str) -> None:
    refuse(
        what,
        where="training_step",
        why="they are torch's alone: a step would leave them out",
        fix="remove them; an optimizer of one's own may do what they do",
    )


def _hooked(model: nn.Module) -> list[str]:
    """The parameters and modules whose functions are called with gradients, or after these were added up."""
    of_parameters = "_backward_hooks", "_post_accumulate_grad_hooks"
    of_modules = "_backward_hooks", "_backward_pre_hooks"
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    found = [name for name, each in trained if any(getattr(each, hooks, None) for hooks in of_parameters)]
    modules = [(name or type(model).__name__, each) for name, each in model.named_modules()]
    return found + [name for name, each in modules if any(getattr(each, hooks, None) for hooks in of_modules)]


class _Hooks(TorchFunctionMode):
    """Counts hooks on gradients that are set within, and how often others than torch ask for a node of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nodes = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch calls it
        self.count += func in _ON_TENSORS
        self.nodes += func == _NODE and not sys._getframe(1).f_globals.get("__name__", "").startswith(_TORCHS)
        return func(*args, **(kwargs or {}))


def _is_derived(function: type) -> bool:
    """Whether its gradients are known to be those of what it computes."""
    return function.__module__.startswith(_TORCHS) or f"{function.__module__}.{function.__qualname__}" == _BLOOM


def _functions(loss: Any) -> set[type]:
    """The functions with backwards written in Python, in what autograd recorded of a loss."""
    found: set[type] = set()
    ahead = [getattr(loss, "grad_fn", None)]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        own = getattr(type(node), "_forward_cls", None)
        if own is not None:
            found.add(own)
        following = {other for other, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        ahead += following
    return found
