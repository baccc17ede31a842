"""Run directories, and the frame in which every stage runs. Needs the standard library only."""
