"""Private names of PyTorch used by the engine and the workbench, each with the effect of its absence.

Versions: the tests ran every entry with torch 2.13.0. In the packages of 2.11.0 and 2.12.1 every entry was found (in Python
sources or compiled libraries) but not run. An entry that differs must name its versions.

Names of modules come first; other files import them from here. Attributes of PyTorch's objects are read where they are used,
since a function call would be too slow in hot paths. `ATTRIBUTES` lists them. Tests compare it with the code
(`tests/test_torch_names.py`) and allow private modules of torch in no other file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import _autograd, _functions
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function as enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.nn.utils import parametrize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Containers. Without it, tensors in containers that a library has registered (`ModelOutput`) are neither split, moved nor cut.
# 2.13 has no public name for it.
pytree = _pytree

# Modes: documented classes in a private module. `TorchDispatchMode` alone sees every operation. Without it: no guard for the
# tensors of suspended micro-batches, no operation counts in `strategies`, no trial of an optimizer's hooks.
# Without `no_dispatch` and `DisableTorchDispatch`, modes of the user would see the engine's copies and bookkeeping.
DisableTorchDispatch = torch._C._DisableTorchDispatch
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# A tensor without memory. Without them, used gradients would be None, and clipping after a step would do nothing.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
_tensor_class: Any = torch.Tensor
make_wrapper_subclass: Callable[..., Any] = _tensor_class._make_wrapper_subclass

# Stacks of modes. Without them, a suspended forward cannot save and restore its modes, so a model that enters a mode around a
# layer call must be refused.
function_modes = _get_current_function_mode_stack
pop_function_mode = _pop_function_mode
push_function_mode = _push_function_mode
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes = _get_current_dispatch_mode_stack
pop_dispatch_mode: Callable[[], Any] = _pop_mode
push_dispatch_mode = _push_mode
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class EngineDispatchMode(TorchDispatchMode):
    """A dispatch mode of the relay, which plain training does not have."""


# Thread state. Without the first, every turn calls `torch.set_grad_enabled`, which takes ten times as long. Without the others,
# checkpoints and `saved_tensors_hooks` entered around a layer call are not suspended with their micro-batch.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
top_saved_tensors_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks


def attention_flags() -> tuple[Any, ...]:
    """Return the kernels that `scaled_dot_product_attention` may use, and their order.

    Without it, an `sdpa_kernel` block around a layer call is not suspended with its micro-batch.
    """
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
    )


def set_attention_flags(flags: tuple[Any, ...]) -> None:
    """Set the flags that `attention_flags` returned."""
    torch._C._set_sdp_use_flash(flags[0])
    torch._C._set_sdp_use_mem_efficient(flags[1])
    torch._C._set_sdp_use_math(flags[2])
    torch._C._set_sdp_use_cudnn(flags[3])
    torch._C._set_sdp_priority_order(list(flags[4]))


# Transforms of torch.func. Without them, layer calls under vmap, jvp or grad are cut in the wrong place instead of refused, and
# shell code under vmap cannot read a tensor from outside.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
DisableFuncTorch = torch._C._DisableFuncTorch

# The autograd graph. `AccumulateGrad` is the class of leaves. `sequence_number` returns the number of the next node.
# `run_engine` is `torch.autograd.backward` with nodes as starts. `engine_will_run` is true in a backward that leads to a node.
# Without them, the graph of a micro-batch cannot be cut, and no step runs.
AccumulateGrad = _functions.AccumulateGrad  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
sequence_number: Callable[[], int] = _autograd._get_sequence_nr
run_engine = _engine_run_backward
engine_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node

# Tensors. `data_ptr` is the base class's method, which traces of reads do not replace: without it, the engine's reads would count
# as the model's. `foreach_norm` computes many norms at once: without it, they are computed one by one.
data_ptr: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
foreach_norm: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = torch._foreach_norm

# Modules. `NormBase` is the base of batch and instance norm: without it, running statistics that differ between workers are not
# refused.
NormBase = _NormBase


def is_torch_loss(value: object) -> bool:
    """Return whether `value` is a loss of torch.nn, called with outputs and targets.

    A subclass with another forward is not: it may take the batch.
    """
    return isinstance(value, _Loss) and type(value).forward.__module__ == _Loss.__module__


def caches_parametrizations() -> bool:
    """Return whether `parametrize.cached()` is active; without it, such a block is not refused and may use old weights."""
    return bool(parametrize._cache_enabled)


def hooks_of_all_optimizers() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the global hooks before and after any optimizer's step; without them, each part of a step runs them once."""
    return _global_optimizer_pre_hooks, _global_optimizer_post_hooks


def hooks_of_all_modules() -> list[Any]:
    """Return the hooks of ``register_module_forward_hook`` and the like; without them, what they keep is not restored."""
    hooks = _global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks
    return [hook for each in hooks for hook in each.values()]


def default_store() -> Any:
    """Return the store of the default process group; without it, workers need a second store on another port."""
    return torch.distributed.distributed_c10d._get_default_store()


def pipeline_runtime(stages: list[Any], micro_batches: int, path: str, **options: Any) -> Any:
    """Return torch's executor of the actions in a CSV file, a row per rank.

    Without it, only torch's own schedules run. The public schedules are its subclasses, which make their actions themselves.
    """
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(stages, micro_batches, **options)
    schedule._load_csv(path, format="compute_only")
    return schedule


# Dynamo is imported when something is compiled, which takes seconds. Without these, compiled parts must be refused.


def dynamo_is_imported() -> bool:
    """Return whether code may have been compiled in this process."""
    return "torch._dynamo.eval_frame" in sys.modules


def optimized_module() -> type:
    """Return the class of ``torch.compile(module)``; Dynamo must have been imported."""
    return sys.modules["torch._dynamo.eval_frame"].OptimizedModule


def wrap_dynamo(package: str, check: Callable[[Any], None]) -> None:
    """Make Dynamo skip frames of a package, and call `check` with the compiler before compiled code runs."""
    from torch._dynamo import eval_frame, trace_rules

    trace_rules.add(package)
    before = eval_frame._callback_from_stance

    def checked(compiler: Any) -> Any:
        check(compiler)
        return before(compiler)

    eval_frame._callback_from_stance = checked


# Private attributes of PyTorch's objects: their use, or the effect of their absence.
ATTRIBUTES: Mapping[str, str] = {
    # of tensors
    "_version": "counts writes in place: without it, a write to a weight or a layer's input would not be refused",
    "_backward_hooks": "hooks of `register_hook`: without it they fire twice or never where a graph is cut",
    "_post_accumulate_grad_hooks": "finds the user's hooks on weights, and removes the engine's after an interrupt",
    "_is_view": "a view cannot be detached in place: without it, backward raises",
    "_base": "the base of a view, which shares its graph",
    "_is_zerotensor": "such a tensor has no storage: without it, reading its address raises",
    "_use_count": "other holders of a side output: without it, one that a hook keeps may be freed",
    "_indices": "needed to count the bytes of an uncoalesced sparse tensor",
    "_values": "the same",
    # of storages
    "_cdata": "address of the storage, equal for all tensors that share it: without it, bytes of views count twice",
    # of graph nodes and operators
    "_sequence_nr": "order of nodes in the forward: separates the nodes of this segment from earlier ones",
    "_input_metadata": "shape and type of the gradient that a node expects",
    "_backward_cls": "class of the nodes of an autograd function, to recognise the engine's",
    "_schema": "arguments that an operator writes to: without it, writes by `out=` and in place are not seen",
    "_foreach_zero_": "operator of `zero_grad(set_to_none=False)`: without it, that raises after a step",
    "_to_copy": "operator of `model.double()`: the same",
    "_scaled_dot_product_efficient_attention": "operator of attention",
    "_scaled_dot_product_flash_attention": "operator of attention",
    "_scaled_dot_product_flash_attention_for_cpu": "operator of attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "operator of attention; its operations are counted",
    # of modules
    "_modules": "children by name, all of them: edits exchange them here",
    "_parameters": "parameters by name: a shared weight is in several of these",
    "_buffers": "buffers by name: assigned without `__setattr__`, which a model may have overwritten",
    "_non_persistent_buffers_set": "buffers that a state dict leaves out",
    "_forward_hooks": "finds the user's hooks, which are refused in compiled parts",
    "_forward_pre_hooks": "the same",
    "_forward_hooks_with_kwargs": "a trial of a layer runs without the user's hooks",
    "_forward_hooks_always_called": "the same",
    "_forward_pre_hooks_with_kwargs": "the same",
    "_backward_pre_hooks": "the same",
    # of results of torch.compile
    "_compiled_call_impl": "set by `module.compile()`: without it, such a module counts as not compiled",
    "_orig_mod": "the module in the wrapper of `torch.compile`: without it, it would be part of layer names",
    "_torchdynamo_orig_callable": "the method that was compiled: without it, copies are not compiled",
    # of optimizers
    "_optimizer_step_pre_hooks": "the user's step hooks: without them, each part of a step runs them once",
    "_optimizer_step_post_hooks": "the same",
    "_opt_called": "set by a step: without it, schedulers of learning rates warn that they step first",
    "_warned_capturable_if_run_uncaptured": "internal note, not a setting",
    "_zero_grad_profile_name": "internal note, not a setting",
}
