"""Import models that were trained elsewhere, each into a run directory of its own."""
