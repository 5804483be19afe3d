"""The notebook workbench around `l2l_core`: sessions, pictures, panels, command line. The engine never imports it."""
