"""Texts, models, exercises and comparisons for the notebooks, and the demo.

May import `pictures`, `readings`, `runs`, `session`.
Begin reading at `demo.py`, `exercises.py`.
"""
