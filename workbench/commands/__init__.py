"""Commands of `python -m workbench`, without widgets.

May import `runs`, `study`.
Begin reading at `doctor.py`.
"""
