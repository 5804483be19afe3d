"""Relays inside training frameworks: transformers' Trainer and Lightning. Each module imports its own library.

Begin reading at `lightning.py`. May import the facade, the rooms of batches and steps, and settings.
"""
