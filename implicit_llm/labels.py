"""Which labels of a sequence count."""

IGNORED_LABEL = -100  # of a position that does not count, as in torch's cross entropy
LAST_TOKENS = 10  # those whose accuracy the published state-tracking experiments give
