"""Figures, tables, checked claims and the page that holds them."""
