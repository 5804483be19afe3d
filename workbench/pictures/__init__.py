"""Pure drawing: a trace or a snapshot in, an SVG string or a table out. No widgets, no threads, no clock."""
