"""What the notebooks and the demonstration need.

May import `pictures`, `readings`, `runs`, `session`.
Begin reading at `demo.py`, `exercises.py`.
"""
