"""Templates, styles and scripts of pages that stand alone; no code."""
