"""A run in figures, tables and plots."""
