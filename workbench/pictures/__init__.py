"""Values in, SVG and tables out: pure functions.

May import `readings`, `session`.
Begin reading at `picture.py`, `timeline.py`.
"""

from workbench.pictures.branches import branches_table as branches_table
from workbench.pictures.edits import outlook_html as outlook_html
from workbench.pictures.figures import loss_figure as loss_figure
from workbench.pictures.figures import memory_figure as memory_figure
from workbench.pictures.figures import timeline_figure as timeline_figure
from workbench.pictures.frames import relay_frames as relay_frames
from workbench.pictures.header import count_words as count_words
from workbench.pictures.header import header_html as header_html
from workbench.pictures.header import header_picture as header_picture
from workbench.pictures.header import progress_html as progress_html
from workbench.pictures.header import settings_table as settings_table
from workbench.pictures.header import title_of as title_of
from workbench.pictures.heat import draw_heat as draw_heat
from workbench.pictures.heat import show_heat as show_heat
from workbench.pictures.heat_cells import KINDS as KINDS
from workbench.pictures.heat_cells import heat_table as heat_table
from workbench.pictures.journal import draw_journal as draw_journal
from workbench.pictures.journal import journal_table as journal_table
from workbench.pictures.layers import draw_layers as draw_layers
from workbench.pictures.layers import layers_table as layers_table
from workbench.pictures.loss import draw_loss as draw_loss
from workbench.pictures.loss import loss_table as loss_table
from workbench.pictures.memory import draw_memory as draw_memory
from workbench.pictures.memory import memory_table as memory_table
from workbench.pictures.memory import show_memory as show_memory
from workbench.pictures.memory_bars import show_memory_bars as show_memory_bars
from workbench.pictures.page import bundle_of as bundle_of
from workbench.pictures.picture import Picture as Picture
from workbench.pictures.picture import Table as Table
from workbench.pictures.relay import draw_relay as draw_relay
from workbench.pictures.relay import relay_table as relay_table
from workbench.pictures.relay import show_relay as show_relay
from workbench.pictures.roofline import Point as Point
from workbench.pictures.roofline import show_roofline as show_roofline
from workbench.pictures.scale import Scale as Scale
from workbench.pictures.scale import format_seconds as format_seconds
from workbench.pictures.scale import round_up as round_up
from workbench.pictures.scale import ticks as ticks
from workbench.pictures.svg import document as document
from workbench.pictures.svg import group as group
from workbench.pictures.svg import path as path
from workbench.pictures.svg import text as text
from workbench.pictures.sweep import sweep_of as sweep_of
from workbench.pictures.theme import BLUE as BLUE
from workbench.pictures.theme import GREEN as GREEN
from workbench.pictures.theme import GREY as GREY
from workbench.pictures.theme import KIND_COLOURS as KIND_COLOURS
from workbench.pictures.theme import LANE_NAMES as LANE_NAMES
from workbench.pictures.theme import ORANGE as ORANGE
from workbench.pictures.theme import VERMILION as VERMILION
from workbench.pictures.theme import category_colour as category_colour
from workbench.pictures.theme import kind_colour as kind_colour
from workbench.pictures.timeline import draw_timeline as draw_timeline
from workbench.pictures.timeline import show_timeline as show_timeline
from workbench.pictures.timeline import timeline_table as timeline_table
from workbench.pictures.words import shorten as shorten
