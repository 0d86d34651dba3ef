"""The paper's first benchmark: predict the positions of five charged particles after a thousand steps."""
