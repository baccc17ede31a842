"""Define the code that driver and library share; it imports only Python's own modules, so planning needs no torch.

`config` defines the settings of a result. `runs` writes and reads a job's run directory, manifest and journal.
"""

__version__ = "0.2.0"
