"""Stand-in for a family of which the experiment has no models."""


class Llama3Layer:
    pass
