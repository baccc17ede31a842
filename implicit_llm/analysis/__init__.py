"""Tools that look into a trained layer rather than run it."""
