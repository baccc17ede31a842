"""The frame in which every job runs, and its tracking. Imports no torch."""
