"""Templates, styles and scripts of pages that stand alone, and settings that JupyterLab starts with; no code."""
