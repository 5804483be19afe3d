"""The user's module: its layers found, its stacks read, and the thread state of PyTorch that travels with a micro-batch.

Imports nothing of the engine.
Begin reading at `layers.py`, `stacks.py`; `reference.py` is the oracle.
"""

from l2l_core.model.ambient import Ambient as Ambient
from l2l_core.model.ambient import RandomState as RandomState
from l2l_core.model.ambient import function_modes_without as function_modes_without
from l2l_core.model.asked_layers import resolve_layers as resolve_layers
from l2l_core.model.caches import Caches as Caches
from l2l_core.model.caches import arguments_without as arguments_without
from l2l_core.model.compiled import call_of as call_of
from l2l_core.model.compiled import compiled_below as compiled_below
from l2l_core.model.compiled import deep_copy as deep_copy
from l2l_core.model.compiled import entry_of as entry_of
from l2l_core.model.compiled import is_wrapper as is_wrapper
from l2l_core.model.compiled import not_compiled as not_compiled
from l2l_core.model.compiled import parts_of as parts_of
from l2l_core.model.compiled import refuse_hooks as refuse_hooks
from l2l_core.model.compiled import refuse_whole as refuse_whole
from l2l_core.model.full_precision import full_precision as full_precision
from l2l_core.model.hidden import RelayCache as RelayCache
from l2l_core.model.hidden import cache_refusal as cache_refusal
from l2l_core.model.hidden import holds_tensor as holds_tensor
from l2l_core.model.hidden import is_cache as is_cache
from l2l_core.model.hidden import refuse_hidden as refuse_hidden
from l2l_core.model.layers import find_layers as find_layers
from l2l_core.model.memento import keep as keep
from l2l_core.model.memento import keep_attributes as keep_attributes
from l2l_core.model.memento import keep_without as keep_without
from l2l_core.model.modules import modules_of as modules_of
from l2l_core.model.modules import name_in as name_in
from l2l_core.model.pieces import is_sparse as is_sparse
from l2l_core.model.pieces import key_of as key_of
from l2l_core.model.pieces import keys_of as keys_of
from l2l_core.model.pieces import nbytes_of as nbytes_of
from l2l_core.model.pieces import pieces_of as pieces_of
from l2l_core.model.pieces import same_numbers as same_numbers
from l2l_core.model.pieces import storage_of as storage_of
from l2l_core.model.plain_data import Take as Take
from l2l_core.model.plain_data import Tensors as Tensors
from l2l_core.model.plain_data import copies_of as copies_of
from l2l_core.model.plain_data import decode as decode
from l2l_core.model.plain_data import encode as encode
from l2l_core.model.reference import accumulate as accumulate
from l2l_core.model.reference import copy_tensors as copy_tensors
from l2l_core.model.reference import train_step as train_step
from l2l_core.model.stacks import Resolver as Resolver
from l2l_core.model.stacks import Stack as Stack
from l2l_core.model.stacks import Where as Where
from l2l_core.model.stacks import find_stacks as find_stacks
