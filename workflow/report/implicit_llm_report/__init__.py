"""Make figures, tables, checked claims and the pages that show them."""
