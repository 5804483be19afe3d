"""`python -m workbench ...`; no widgets.

May import `runs`.
Begin reading at `doctor.py`.
"""
