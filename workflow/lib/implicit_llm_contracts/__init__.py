"""Define what driver and library share. The package needs only the standard library, so planning needs no torch.

`config` defines the settings of a result; `runs` writes and reads a job's run directory, manifest and journal.
"""

__version__ = "0.2.0"
