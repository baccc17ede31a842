"""Models that start from the weights of other packages."""
