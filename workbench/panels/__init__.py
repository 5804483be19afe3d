"""Panels of ipywidgets over a session: each shows one thing, alone or inside a `Workbench`."""
