"""Private names of PyTorch: every one that the engine or the workbench uses, with what fails without it.

Versions: every entry was run with torch 2.13.0, by the tests. In the packages of 2.11.0 and 2.12.1 every entry was found, in the
Python sources or in the compiled libraries, but not run. An entry for which that is not so must name its versions.

First come names of modules, which other files import from here. Attributes of PyTorch's objects are read where they are needed: a
function for each would cost a call in the hottest paths. `ATTRIBUTES` lists them, with the files that read them. Tests compare it
with the code (`tests/test_torch_names.py`), and let no other file name a private module of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class Attribute(NamedTuple):
    """A private attribute of objects of PyTorch: its use, with what fails without it, and the files that name it.

    Files are separated by blanks, without `.py`, and lie in `l2l_core` where no package is named.
    """

    use: str
    files: str


ATTRIBUTES: Mapping[str, Attribute] = {
    # of tensors
    "_version": Attribute(
        "counts writes in place: without it, a write to a weight or a layer's input would not be refused",
        "eps/blocks/stamps step/micro_batch/call step/micro_batch/crossing step/micro_batch/traces strategies/course "
        "strategies/forward strategies/learning workbench/session/probe",
    ),
    "_backward_hooks": Attribute(
        "hooks of `register_hook`, which stay with the history where a graph is cut: without it they fire twice or never",
        "eps/blocks/checks step/checks step/graph/cut step/micro_batch/crossing surgery/identity/probe",
    ),
    "_post_accumulate_grad_hooks": Attribute(
        "finds hooks of the user on weights, and removes the engine's after an interrupt",
        "eps/blocks/checks step/traffic/takers",
    ),
    "_is_view": Attribute("a view cannot be detached in place: without it, backward raises", "step/graph/cut"),
    "_base": Attribute("the tensor that a view is of, which shares its graph", "step/micro_batch/operations"),
    "_is_zerotensor": Attribute(
        "such a tensor has no storage: without it, asking for its address raises",
        "step/traffic/images step/traffic/watch",
    ),
    "_use_count": Attribute(
        "other holders of a side output: without it, one that a hook keeps may be freed", "step/micro_batch/hooks"
    ),
    "_indices": Attribute("of a sparse tensor that is not coalesced: its bytes could not be counted", "model/pieces"),
    "_values": Attribute("the same", "model/pieces"),
    # of storages
    "_cdata": Attribute(
        "address of the storage, equal for all tensors that share it: without it, bytes of views would count twice",
        "eps/blocks/units model/pieces step/early_reads step/micro_batch/operations step/traffic/images step/traffic/watch "
        "strategies/activation_map strategies/course strategies/frames strategies/learning strategies/meter "
        "workbench/lessons/in_core",
    ),
    # of graph nodes and operators
    "_sequence_nr": Attribute(
        "number of a node in the order of the forward: without it, nodes cannot be told to be of this segment or an earlier one",
        "step/graph/cut step/micro_batch/call step/micro_batch/crossing step/micro_batch/sight",
    ),
    "_input_metadata": Attribute("shape and type that a node expects of its gradient", "step/micro_batch/crossing"),
    "_backward_cls": Attribute(
        "class of the nodes of an autograd function, to recognise the engine's", "step/graph/cut"
    ),
    "_schema": Attribute(
        "arguments that an operator writes to: without it, writes by `out=` and in place are not seen",
        "eps/optimizers/step_hooks step/graph/buffer_order step/micro_batch/endings step/traffic/watch",
    ),
    "_to_copy": Attribute("operator `aten::_to_copy`, of casts", "step/micro_batch/unread"),
    "_unsafe_view": Attribute("operator `aten::_unsafe_view`, of products", "step/micro_batch/unread"),
    "_scaled_dot_product_efficient_attention": Attribute("operator of attention", "strategies/selective"),
    "_scaled_dot_product_flash_attention": Attribute("operator of attention", "strategies/selective"),
    "_scaled_dot_product_flash_attention_for_cpu": Attribute("operator of attention", "strategies/selective"),
    # of modules
    "_modules": Attribute(
        "children by name, without those that `named_modules` leaves out: edits exchange them here",
        "edits/lineup model/modules saves/stacks step/micro_batch/attributes step/micro_batch/traces strategies/replace "
        "surgery/likeness surgery/rearrange surgery/surroundings",
    ),
    "_parameters": Attribute(
        "parameters by name: weights that a module shares are in several of these",
        "eps/blocks/build eps/blocks/checks shelf/empty surgery/likeness surgery/surroundings",
    ),
    "_buffers": Attribute(
        "buffers by name: assigned to past `__setattr__`, which a model may have overwritten",
        "eps/blocks/buffers shelf/on_files step/graph/buffer_order step/ground step/verify strategies/execution "
        "surgery/likeness surgery/sample surgery/surroundings",
    ),
    "_non_persistent_buffers_set": Attribute("buffers that a state dict leaves out", "shelf/on_files"),
    "_forward_hooks": Attribute(
        "finds hooks of the user in compiled parts, which are refused, and of all modules",
        "model/compiled step/micro_batch/hooks surgery/identity/probe",
    ),
    "_forward_pre_hooks": Attribute("the same", "model/compiled step/micro_batch/hooks surgery/identity/probe"),
    "_forward_hooks_with_kwargs": Attribute(
        "a trial of a layer runs without hooks of the user", "surgery/identity/probe"
    ),
    "_forward_hooks_always_called": Attribute("the same", "surgery/identity/probe"),
    "_forward_pre_hooks_with_kwargs": Attribute("the same", "surgery/identity/probe"),
    "_backward_pre_hooks": Attribute("the same", "surgery/identity/probe"),
    # of what torch.compile makes
    "_compiled_call_impl": Attribute(
        "what `module.compile()` sets: without it, such a module is taken for one that is not compiled",
        "model/compiled step/micro_batch/attributes",
    ),
    "_orig_mod": Attribute(
        "the module in the wrapper of `torch.compile`: names of layers would have it in them", "model/layers"
    ),
    "_torchdynamo_orig_callable": Attribute(
        "the method that was compiled: copies would not be compiled", "model/compiled"
    ),
    # of optimizers
    "_optimizer_step_pre_hooks": Attribute(
        "step hooks of the user: without them, each part of a step fires them once",
        "eps/optimizers/parts eps/optimizers/step_hooks",
    ),
    "_optimizer_step_post_hooks": Attribute("the same", "eps/optimizers/parts eps/optimizers/step_hooks"),
    "_opt_called": Attribute(
        "set by a step: without it, schedulers of learning rates warn that they step first",
        "eps/optimizers/settings eps/updates",
    ),
    "_warned_capturable_if_run_uncaptured": Attribute("a note that is no setting", "eps/optimizers/settings"),
    "_zero_grad_profile_name": Attribute("a note that is no setting", "eps/optimizers/settings"),
}
