"""Private names of PyTorch: every one that the engine or the workbench uses, with what fails without it.

Versions: every entry was run with torch 2.13.0, by the tests. In the packages of 2.11.0 and 2.12.1 every entry was found, in the
Python sources or in the compiled libraries, but not run. An entry for which that is not so must name its versions.

First come names of modules, which other files import from here. Attributes of PyTorch's objects are read where they are needed: a
function for each would cost a call in the hottest paths. `ATTRIBUTES` lists them. Tests compare it with the code
(`tests/test_torch_names.py`), and let no other file name a private module of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function as enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.optim import optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Containers. Without it: batches, arguments and outputs in containers that a library has registered (`ModelOutput`) stay closed,
# and their tensors are neither split, moved nor cut. 2.13 has no public name for it.
pytree = _pytree

# Modes. Documented classes in a private module; `TorchDispatchMode` is the only way to see every operation. Without it: no watch
# over tensors of paused micro-batches, no operation counts in `strategies`, no trial of an optimizer's hooks.
# `no_dispatch`, `DisableTorchDispatch`: without them copies and bookkeeping of the engine would be shown to modes of the user.
DisableTorchDispatch = torch._C._DisableTorchDispatch
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# Stacks of modes. Without them: a paused forward cannot take its modes along (`with autocast():` is public, modes are not), so a
# model that enters a mode around a layer call is refused at best.
function_modes = _get_current_function_mode_stack
pop_function_mode = _pop_function_mode
push_function_mode = _push_function_mode
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes = _get_current_dispatch_mode_stack
pop_dispatch_mode = _pop_mode
push_dispatch_mode = _push_mode
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# Thread state. Without the first: `torch.set_grad_enabled`, at ten times the time, at every turn of a micro-batch. Without the
# others: checkpoints and `saved_tensors_hooks` that are open around a layer call do not travel with their micro-batch.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


def attention_flags() -> tuple[Any, ...]:
    """Return the kernels that `scaled_dot_product_attention` may use, and their order.

    Without it: an `sdpa_kernel` block around a layer call does not travel with its micro-batch.
    """
    c = torch._C
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        tuple(c._get_sdp_priority_order()),
    )


def set_attention_flags(flags: tuple[Any, ...]) -> None:
    """Set what `attention_flags` returned."""
    c = torch._C
    c._set_sdp_use_flash(flags[0])
    c._set_sdp_use_mem_efficient(flags[1])
    c._set_sdp_use_math(flags[2])
    c._set_sdp_use_cudnn(flags[3])
    c._set_sdp_priority_order(list(flags[4]))


# Transforms of torch.func. Without them: layer calls under vmap, jvp or grad are cut in the wrong place instead of refused, and
# shell code under vmap cannot read a tensor from outside.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_functorch_wrapped_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
DisableFuncTorch = torch._C._DisableFuncTorch

# The autograd graph. `AccumulateGrad` and `PythonNode` tell leaves and custom functions from other nodes. `sequence_number` gives
# the number of the next node. `run_engine` is `torch.autograd.backward` with nodes as starts. `engine_will_run` is true in a
# backward that leads to a node. Without them: the graph of a micro-batch cannot be cut, and no step runs.
AccumulateGrad = torch._C._functions.AccumulateGrad
PythonNode = torch._C._FunctionBase
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
run_engine = _engine_run_backward
engine_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node

# Tensors. `data_ptr` is that of the base class, which the watch for reads does not replace: without it, reads of the engine would
# count as the model's. `storage_of_weak_ptr` makes a storage of a `StorageWeakRef`: without it, a product that a recompute left
# out and that is read after all is lost. `foreach_norm` takes many norms at once: without it, they are taken one by one.
data_ptr: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
storage_of_weak_ptr: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage._new_with_weak_ptr
foreach_norm: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = torch._foreach_norm

# Modules. `NormBase` is the base of batch and instance norm: without it, running statistics that workers would change apart are
# not refused.
NormBase = _NormBase


def caches_parametrizations() -> bool:
    """Return whether `parametrize.cached()` is open; without it, such a block is not refused, and weights may be old."""
    return bool(parametrize._cache_enabled)


def hooks_of_all_optimizers() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the global hooks before and after any optimizer's step; without them, each part of a step fires them once."""
    return optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks


def default_store() -> Any:
    """Return the store of the default process group; without it, workers need one of their own, with another port."""
    return torch.distributed.distributed_c10d._get_default_store()


# Dynamo. It is imported when something is compiled, and takes seconds to import. Without these: compiled parts must be refused.


def dynamo_is_imported() -> bool:
    """Return whether anything may have been compiled in this process."""
    return "torch._dynamo.eval_frame" in sys.modules


def optimized_module() -> type:
    """Return the class of what ``torch.compile(module)`` gives; Dynamo must have been imported."""
    return sys.modules["torch._dynamo.eval_frame"].OptimizedModule


def wrap_dynamo(package: str, wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Make Dynamo skip frames of a package, and wrap the function that it calls before compiled code runs."""
    from torch._dynamo import eval_frame, trace_rules

    trace_rules.add(package)
    eval_frame._callback_from_stance = wrap(eval_frame._callback_from_stance)


# Private attributes of objects of PyTorch: their use, and what fails without them.
ATTRIBUTES: Mapping[str, str] = {
    # of tensors
    "_version": "counts writes in place: without it, a write to a weight or a layer's input would not be refused",
    "_backward_hooks": "hooks of `register_hook`: without it they fire twice or never where a graph is cut",
    "_post_accumulate_grad_hooks": "finds hooks of the user on weights, and removes the engine's after an interrupt",
    "_is_view": "a view cannot be detached in place: without it, backward raises",
    "_base": "the tensor that a view is of, which shares its graph",
    "_is_zerotensor": "such a tensor has no storage: without it, asking for its address raises",
    "_use_count": "other holders of a side output: without it, one that a hook keeps may be freed",
    "_indices": "of a sparse tensor that is not coalesced: its bytes could not be counted",
    "_values": "the same",
    # of storages
    "_cdata": "address of the storage, equal for all tensors that share it: without it, bytes of views would count twice",
    # of graph nodes and operators
    "_sequence_nr": "order of nodes in the forward: without it, nodes of this segment and of earlier ones cannot be told apart",
    "_input_metadata": "shape and type that a node expects of its gradient",
    "_backward_cls": "class of the nodes of an autograd function, to recognise the engine's",
    "_schema": "arguments that an operator writes to: without it, writes by `out=` and in place are not seen",
    "_scaled_dot_product_efficient_attention": "operator of attention",
    "_scaled_dot_product_flash_attention": "operator of attention",
    "_scaled_dot_product_flash_attention_for_cpu": "operator of attention",
    # of modules
    "_modules": "children by name, without those that `named_modules` leaves out: edits exchange them here",
    "_parameters": "parameters by name: weights that a module shares are in several of these",
    "_buffers": "buffers by name: assigned to past `__setattr__`, which a model may have overwritten",
    "_non_persistent_buffers_set": "buffers that a state dict leaves out",
    "_forward_hooks": "finds hooks of the user in compiled parts, which are refused, and of all modules",
    "_forward_pre_hooks": "the same",
    "_forward_hooks_with_kwargs": "a trial of a layer runs without hooks of the user",
    "_forward_hooks_always_called": "the same",
    "_forward_pre_hooks_with_kwargs": "the same",
    "_backward_pre_hooks": "the same",
    # of what torch.compile makes
    "_compiled_call_impl": "what `module.compile()` sets: without it, such a module is taken for one that is not compiled",
    "_orig_mod": "the module in the wrapper of `torch.compile`: names of layers would have it in them",
    "_torchdynamo_orig_callable": "the method that was compiled: copies would not be compiled",
    # of optimizers
    "_optimizer_step_pre_hooks": "step hooks of the user: without them, each part of a step fires them once",
    "_optimizer_step_post_hooks": "the same",
    "_opt_called": "set by a step: without it, schedulers of learning rates warn that they step first",
    "_warned_capturable_if_run_uncaptured": "a note that is no setting",
    "_zero_grad_profile_name": "a note that is no setting",
}
