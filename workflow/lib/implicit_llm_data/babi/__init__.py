"""CatbAbI: bAbI's stories, fetched or simulated, written and read as one stream of tokens."""
