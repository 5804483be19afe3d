"""Texts, models, exercises and comparisons for the notebooks, and the demo.

May import `panels`, `pictures`, `readings`, `runs`, `session`.
Begin reading at `demo.py`, `exercises.py`.
"""
