"""Write model cards: the README.md in the folder of every saved model."""
