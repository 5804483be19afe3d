"""Blocks of parameters in flat host buffers, and their trained parts.

May import `model`, `devices`. Begin reading at `units.py` (layers and shell), `unit_builder.py` (their construction),
`layout.py`.
"""

from l2l_core.eps.blocks.aliases import left_storages as left_storages
from l2l_core.eps.blocks.layout import BlockGradient as BlockGradient
from l2l_core.eps.blocks.layout import Layout as Layout
from l2l_core.eps.blocks.layout import Piece as Piece
from l2l_core.eps.blocks.layout import TrainedParameters as TrainedParameters
from l2l_core.eps.blocks.layout import aligned as aligned
from l2l_core.eps.blocks.layout import assemble as assemble
from l2l_core.eps.blocks.layout import assemble_new as assemble_new
from l2l_core.eps.blocks.layout import is_absent as is_absent
from l2l_core.eps.blocks.model_checks import Stamp as Stamp
from l2l_core.eps.blocks.model_checks import check_keys as check_keys
from l2l_core.eps.blocks.model_checks import check_model as check_model
from l2l_core.eps.blocks.model_checks import check_no_stray_grads as check_no_stray_grads
from l2l_core.eps.blocks.model_checks import check_stamps as check_stamps
from l2l_core.eps.blocks.model_checks import check_step as check_step
from l2l_core.eps.blocks.model_checks import check_values_in_place as check_values_in_place
from l2l_core.eps.blocks.model_checks import gradient_hook_message as gradient_hook_message
from l2l_core.eps.blocks.model_checks import refuse_cached as refuse_cached
from l2l_core.eps.blocks.model_checks import refuse_checkpointing as refuse_checkpointing
from l2l_core.eps.blocks.model_checks import refuse_scripted as refuse_scripted
from l2l_core.eps.blocks.model_checks import refuse_uninitialized as refuse_uninitialized
from l2l_core.eps.blocks.model_checks import refuse_wrapped as refuse_wrapped
from l2l_core.eps.blocks.model_checks import stamps_of as stamps_of
from l2l_core.eps.blocks.model_checks import stray_grad_message as stray_grad_message
from l2l_core.eps.blocks.model_checks import warn_of_shared_memory as warn_of_shared_memory
from l2l_core.eps.blocks.model_checks import weights_changed_message as weights_changed_message
from l2l_core.eps.blocks.module_buffers import BufferKey as BufferKey
from l2l_core.eps.blocks.module_buffers import ModuleBuffers as ModuleBuffers
from l2l_core.eps.blocks.placeholders import is_placeholder as is_placeholder
from l2l_core.eps.blocks.placeholders import nan_placeholder as nan_placeholder
from l2l_core.eps.blocks.unit_builder import EmptyFn as EmptyFn
from l2l_core.eps.blocks.unit_builder import build_layer as build_layer
from l2l_core.eps.blocks.unit_builder import build_units as build_units
from l2l_core.eps.blocks.unit_builder import disable_packing as disable_packing
from l2l_core.eps.blocks.unit_builder import host_master_init as host_master_init
from l2l_core.eps.blocks.unit_builder import make_masters as make_masters
from l2l_core.eps.blocks.unit_builder import quantised_parts as quantised_parts
from l2l_core.eps.blocks.unit_builder import restore_packing as restore_packing
from l2l_core.eps.blocks.unit_builder import shared_key as shared_key
from l2l_core.eps.blocks.unit_builder import shell_modules as shell_modules
from l2l_core.eps.blocks.units import SHELL as SHELL
from l2l_core.eps.blocks.units import Block as Block
from l2l_core.eps.blocks.units import Unit as Unit
from l2l_core.eps.blocks.units import put_back_params as put_back_params
from l2l_core.eps.blocks.used_gradients import clear_used_gradients as clear_used_gradients
from l2l_core.eps.blocks.used_gradients import set_used_gradients as set_used_gradients
