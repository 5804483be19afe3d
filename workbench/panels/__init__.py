"""Widgets of the workbench, one view each.

May import all of the workbench but `commands` and `lessons`.
Begin reading at `panel.py`, `dashboard.py`.
"""
