"""The processes of one job on one node or several."""
