"""Find fixed points of a map, whatever its layers are."""
