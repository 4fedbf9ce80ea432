"""Runs in a notebook: progress that is redrawn in the cell, tables and curves as HTML, rows as a DataFrame."""
