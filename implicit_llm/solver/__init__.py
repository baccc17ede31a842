"""Find the fixed point of any map f(., x); this package does not depend on the layers of f."""
