"""Layers, stacks and state of the user's module; PyTorch's thread state, which is switched with each micro-batch.

Imports nothing of the engine.
Begin reading at `layers.py`, `layer_stacks.py`; `reference.py` is the oracle.
"""

from l2l_core.model.compiled import call_attribute as call_attribute
from l2l_core.model.compiled import compiled_attribute as compiled_attribute
from l2l_core.model.compiled import compiled_modules as compiled_modules
from l2l_core.model.compiled import deep_copy as deep_copy
from l2l_core.model.compiled import force_eager as force_eager
from l2l_core.model.compiled import is_compile_wrapper as is_compile_wrapper
from l2l_core.model.compiled import module_name as module_name
from l2l_core.model.compiled import modules_in_graph as modules_in_graph
from l2l_core.model.compiled import refuse_compiled_hooks as refuse_compiled_hooks
from l2l_core.model.compiled import refuse_compiled_whole as refuse_compiled_whole
from l2l_core.model.kv_caches import KVCaches as KVCaches
from l2l_core.model.kv_caches import RelayCache as RelayCache
from l2l_core.model.kv_caches import cache_message as cache_message
from l2l_core.model.kv_caches import holds_tensor as holds_tensor
from l2l_core.model.kv_caches import is_cache as is_cache
from l2l_core.model.kv_caches import no_cache_arguments as no_cache_arguments
from l2l_core.model.kv_caches import refuse_hidden_tensors as refuse_hidden_tensors
from l2l_core.model.layer_selection import resolve_layers as resolve_layers
from l2l_core.model.layer_stacks import LayerRef as LayerRef
from l2l_core.model.layer_stacks import LayerResolver as LayerResolver
from l2l_core.model.layer_stacks import Stack as Stack
from l2l_core.model.layer_stacks import find_stacks as find_stacks
from l2l_core.model.layers import find_layers as find_layers
from l2l_core.model.module_key import ModuleKey as ModuleKey
from l2l_core.model.plain_data import TensorReader as TensorReader
from l2l_core.model.plain_data import Tensors as Tensors
from l2l_core.model.plain_data import decode as decode
from l2l_core.model.plain_data import encode as encode
from l2l_core.model.plain_data import tensor_copier as tensor_copier
from l2l_core.model.reference import accumulate as accumulate
from l2l_core.model.reference import accumulate_together as accumulate_together
from l2l_core.model.reference import copy_tensors as copy_tensors
from l2l_core.model.reference import train_step as train_step
from l2l_core.model.reference import update_after as update_after
from l2l_core.model.state_snapshot import MOST_ITEMS as MOST_ITEMS
from l2l_core.model.state_snapshot import Restore as Restore
from l2l_core.model.state_snapshot import full_precision as full_precision
from l2l_core.model.state_snapshot import preserve_module_state as preserve_module_state
from l2l_core.model.state_snapshot import preserve_random_state as preserve_random_state
from l2l_core.model.state_snapshot import restore_all as restore_all
from l2l_core.model.state_snapshot import snapshot_attributes as snapshot_attributes
from l2l_core.model.state_snapshot import snapshot_except as snapshot_except
from l2l_core.model.state_snapshot import snapshot_random_state as snapshot_random_state
from l2l_core.model.state_snapshot import snapshot_value as snapshot_value
from l2l_core.model.tensor_storage import dense_parts as dense_parts
from l2l_core.model.tensor_storage import equal_values as equal_values
from l2l_core.model.tensor_storage import is_sparse as is_sparse
from l2l_core.model.tensor_storage import nbytes_of as nbytes_of
from l2l_core.model.tensor_storage import storage_key as storage_key
from l2l_core.model.tensor_storage import storage_keys as storage_keys
from l2l_core.model.tensor_storage import storage_of as storage_of
from l2l_core.model.tensor_storage import version_of as version_of
from l2l_core.model.thread_state import RandomState as RandomState
from l2l_core.model.thread_state import ThreadState as ThreadState
from l2l_core.model.thread_state import function_modes_without as function_modes_without
from l2l_core.model.user_state import is_state as is_state
from l2l_core.model.user_state import names_in as names_in
from l2l_core.model.user_state import preserved_user_state as preserved_user_state
from l2l_core.model.user_state import snapshot_user_state as snapshot_user_state
