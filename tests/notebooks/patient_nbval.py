"""Lets nbval wait for what a cell shows as long as tests wait for anything; by default it gives up after 5 s of silence."""

from nbval.plugin import IPyNbCell
from patience import HANG_S

IPyNbCell.output_timeout = property(lambda cell: HANG_S, lambda cell, seconds: None)
