"""Read bAbI's stories from its archive, or simulate them."""
