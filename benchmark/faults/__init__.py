"""A deployment under fire: what is done to it and when, who asks it meanwhile, what its books say, and the verdict."""
