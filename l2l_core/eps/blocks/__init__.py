"""Parameters side by side in masters: layers as blocks, and what of them is trained.

May import `model`, `devices`.
Begin reading at `units.py` (what a unit is), `build.py` (how one is made), `layout.py`.
"""

from l2l_core.eps.blocks.buffers import Buffers as Buffers
from l2l_core.eps.blocks.buffers import Place as Place
from l2l_core.eps.blocks.build import Empty as Empty
from l2l_core.eps.blocks.build import build_layer as build_layer
from l2l_core.eps.blocks.build import build_units as build_units
from l2l_core.eps.blocks.build import into_memory as into_memory
from l2l_core.eps.blocks.build import masters_over as masters_over
from l2l_core.eps.blocks.build import outside as outside
from l2l_core.eps.blocks.build import shared_key as shared_key
from l2l_core.eps.blocks.checks import check_keys as check_keys
from l2l_core.eps.blocks.checks import check_model as check_model
from l2l_core.eps.blocks.checks import check_step as check_step
from l2l_core.eps.blocks.checks import hooked as hooked
from l2l_core.eps.blocks.checks import refuse_cached as refuse_cached
from l2l_core.eps.blocks.checks import refuse_checkpointing as refuse_checkpointing
from l2l_core.eps.blocks.checks import refuse_scripted as refuse_scripted
from l2l_core.eps.blocks.layout import Layout as Layout
from l2l_core.eps.blocks.layout import Piece as Piece
from l2l_core.eps.blocks.layout import aligned as aligned
from l2l_core.eps.blocks.ranges import assemble as assemble
from l2l_core.eps.blocks.ranges import is_absent as is_absent
from l2l_core.eps.blocks.ranges import new_piece as new_piece
from l2l_core.eps.blocks.stamps import Stamp as Stamp
from l2l_core.eps.blocks.stamps import check_stamps as check_stamps
from l2l_core.eps.blocks.stamps import stamps_of as stamps_of
from l2l_core.eps.blocks.stamps import weights_changed as weights_changed
from l2l_core.eps.blocks.trained import GradientPiece as GradientPiece
from l2l_core.eps.blocks.trained import Trained as Trained
from l2l_core.eps.blocks.units import SHELL as SHELL
from l2l_core.eps.blocks.units import Block as Block
from l2l_core.eps.blocks.units import Unit as Unit
from l2l_core.eps.blocks.units import is_nowhere as is_nowhere
from l2l_core.eps.blocks.units import nowhere as nowhere
