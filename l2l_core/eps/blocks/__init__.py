"""Parameters side by side in masters: layers as blocks, and what of them is trained.

May import `model`, `devices`.
Begin reading at `units.py` (what a unit is), `unit_builder.py` (how one is made), `layout.py`.
"""

from l2l_core.eps.blocks.layout import Layout as Layout
from l2l_core.eps.blocks.layout import Piece as Piece
from l2l_core.eps.blocks.layout import aligned as aligned
from l2l_core.eps.blocks.model_checks import check_keys as check_keys
from l2l_core.eps.blocks.model_checks import check_model as check_model
from l2l_core.eps.blocks.model_checks import check_step as check_step
from l2l_core.eps.blocks.model_checks import gradient_hook_message as gradient_hook_message
from l2l_core.eps.blocks.model_checks import refuse_cached as refuse_cached
from l2l_core.eps.blocks.model_checks import refuse_checkpointing as refuse_checkpointing
from l2l_core.eps.blocks.model_checks import refuse_scripted as refuse_scripted
from l2l_core.eps.blocks.module_buffers import BufferKey as BufferKey
from l2l_core.eps.blocks.module_buffers import ModuleBuffers as ModuleBuffers
from l2l_core.eps.blocks.ranges import assemble as assemble
from l2l_core.eps.blocks.ranges import assemble_new as assemble_new
from l2l_core.eps.blocks.ranges import is_absent as is_absent
from l2l_core.eps.blocks.stamps import Stamp as Stamp
from l2l_core.eps.blocks.stamps import check_stamps as check_stamps
from l2l_core.eps.blocks.stamps import stamps_of as stamps_of
from l2l_core.eps.blocks.stamps import weights_changed_message as weights_changed_message
from l2l_core.eps.blocks.trained_parameters import BlockGradient as BlockGradient
from l2l_core.eps.blocks.trained_parameters import TrainedParameters as TrainedParameters
from l2l_core.eps.blocks.unit_builder import EmptyFn as EmptyFn
from l2l_core.eps.blocks.unit_builder import build_layer as build_layer
from l2l_core.eps.blocks.unit_builder import build_units as build_units
from l2l_core.eps.blocks.unit_builder import host_master_init as host_master_init
from l2l_core.eps.blocks.unit_builder import make_masters as make_masters
from l2l_core.eps.blocks.unit_builder import shared_key as shared_key
from l2l_core.eps.blocks.unit_builder import shell_modules as shell_modules
from l2l_core.eps.blocks.units import SHELL as SHELL
from l2l_core.eps.blocks.units import Block as Block
from l2l_core.eps.blocks.units import Unit as Unit
from l2l_core.eps.blocks.units import is_placeholder as is_placeholder
from l2l_core.eps.blocks.units import nan_placeholder as nan_placeholder
