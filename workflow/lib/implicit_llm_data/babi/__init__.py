"""Build CatbAbI: download or simulate bAbI's stories, and write and read them as one stream of tokens."""
