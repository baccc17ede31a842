"""A simulator of stories in the manner of bAbI, with words and sentences of its own."""
