"""Commands of `python -m workbench`, without widgets.

May import `runs`.
Begin reading at `doctor.py`.
"""
