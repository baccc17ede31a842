"""Model cards: the README.md in the folder of every model that is saved."""
