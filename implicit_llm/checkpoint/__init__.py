"""Models that were trained elsewhere, brought into a run directory of their own."""
